"""How a model stretches rotary positions past the length it was trained on.

Each scheme is a small frozen class with one formula: (base, dim) -> inverse frequencies. The names
of the fields are the ones a checkpoint's `rope_parameters` uses, so `scaling_from_dict` needs no
table.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def plain_frequencies(base: float | Tensor, dim: int) -> Float[Tensor, "*row half"]:
    """1 / base^(2i/dim) for i in 0 .. dim/2 - 1 (RoFormer, arXiv 2104.09864). fp32.

    On the CPU, whatever torch's default device is, unless `base` is one per row: the same bits for
    every device they then go to.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    if isinstance(base, Tensor):
        exponents = exponents.to(base.device)
    return 1.0 / (base**exponents)


@dataclass(frozen=True)
class RotaryScaling:
    """No scaling, and the interface of the others.

    `varies_with_length`: the frequencies of a row depend on how long it is by the end of the
    forward. `attention_factor` multiplies cos and sin (and so scores by its square).
    `turns_anew_past`: the length past which all of a row turns in another way, once and for all.
    """

    rope_type: ClassVar[str] = "default"
    varies_with_length: ClassVar[bool] = False

    @property
    def attention_factor(self) -> float:
        return 1.0

    @property
    def turns_anew_past(self) -> int | None:
        return None

    def attention_factors(self, lengths: Int[Tensor, " row"]) -> float | Float[Tensor, "row 1 1"]:
        """`attention_factor`, or one for each row where it depends on how long that is."""
        return self.attention_factor

    def inverse_frequencies(
        self, base: float, dim: int, lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "*batch half"]:
        """Inverse frequencies; [batch, half] when `lengths` is given to a scheme that reads it."""
        return plain_frequencies(base, dim)


@dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Positions divided by `factor` (position interpolation, arXiv 2306.15595)."""

    rope_type: ClassVar[str] = "linear"
    factor: float = 1.0

    def inverse_frequencies(self, base, dim, lengths=None):
        return plain_frequencies(base, dim) / self.factor


@dataclass(frozen=True)
class DynamicScaling(RotaryScaling):
    """A base that grows with the row once it is longer than the training length (dynamic NTK)."""

    rope_type: ClassVar[str] = "dynamic"
    varies_with_length: ClassVar[bool] = True
    factor: float = 1.0
    original_max_position_embeddings: int = 2048

    def inverse_frequencies(self, base, dim, lengths=None):
        if lengths is None:
            return plain_frequencies(base, dim)
        trained = self.original_max_position_embeddings
        stretch = self.factor * lengths.clamp(min=trained).float() / trained - (self.factor - 1)
        return plain_frequencies((base * stretch ** (dim / (dim - 2)))[:, None], dim)


@dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """Low frequencies divided by `factor`, high ones kept, a ramp between (NTK by parts)."""

    rope_type: ClassVar[str] = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def inverse_frequencies(self, base, dim, lengths=None):
        frequencies = plain_frequencies(base, dim)
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        keep = ((turns - self.low_freq_factor) / span).clamp(0, 1)
        return frequencies * keep + frequencies / self.factor * (1 - keep)


@dataclass(frozen=True)
class YarnScaling(RotaryScaling):
    """YaRN (arXiv 2309.00071): a ramp over dimensions, and cos/sin scaled by `attention_factor`."""

    rope_type: ClassVar[str] = "yarn"
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    fixed_attention_factor: float | None = None

    @property
    def attention_factor(self) -> float:
        if self.fixed_attention_factor is not None:
            return self.fixed_attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def inverse_frequencies(self, base, dim, lengths=None):
        def dimension_turning(times: float) -> float:
            """The dimension whose angle goes around `times` times within the training length."""
            trained = self.original_max_position_embeddings
            return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

        low, high = dimension_turning(self.beta_fast), dimension_turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high = high + 0.001 if low == high else high  # no division by zero
        dimensions = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
        ramp = ((dimensions - low) / (high - low)).clamp(0, 1)
        frequencies = plain_frequencies(base, dim)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp)


@dataclass(frozen=True)
class LongRopeScaling(RotaryScaling):
    """LongRoPE (arXiv 2402.13753): searched divisors, one set for short rows and one for long.

    `long_attention_factor`: that of long rows, where it is another (Phi-3.5-MoE).
    """

    rope_type: ClassVar[str] = "longrope"
    varies_with_length: ClassVar[bool] = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    original_max_position_embeddings: int = 4096
    factor: float = 1.0
    fixed_attention_factor: float | None = None
    long_attention_factor: float | None = None

    @property
    def attention_factor(self) -> float:
        if self.fixed_attention_factor is not None:
            return self.fixed_attention_factor
        if self.factor <= 1.0:
            return 1.0
        return math.sqrt(
            1 + math.log(self.factor) / math.log(self.original_max_position_embeddings)
        )

    def inverse_frequencies(self, base, dim, lengths=None):
        short = plain_frequencies(base, dim) / torch.tensor(self.short_factor, device="cpu")
        if lengths is None:
            return short
        long = plain_frequencies(base, dim) / torch.tensor(self.long_factor, device="cpu")
        is_long = self._is_long(lengths)[:, None]
        return torch.where(is_long, long.to(lengths.device), short.to(lengths.device))

    def attention_factors(self, lengths: Int[Tensor, " row"]) -> float | Float[Tensor, "row 1 1"]:
        if self.long_attention_factor is None:
            return self.attention_factor
        is_long = self._is_long(lengths)[:, None, None]
        short, long = (
            torch.tensor(x, dtype=torch.float32, device=lengths.device)
            for x in (self.attention_factor, self.long_attention_factor)
        )
        return torch.where(is_long, long, short)

    @property
    def turns_anew_past(self) -> int | None:
        return self.original_max_position_embeddings

    def _is_long(self, lengths: Int[Tensor, " row"]) -> Bool[Tensor, " row"]:
        return lengths > self.original_max_position_embeddings


SCALINGS: dict[str, type[RotaryScaling]] = {
    cls.rope_type: cls
    for cls in (
        RotaryScaling,
        LinearScaling,
        DynamicScaling,
        Llama3Scaling,
        YarnScaling,
        LongRopeScaling,
    )
}


def scaling_from_dict(parameters: dict[str, Any] | None, rotary_dim: int) -> RotaryScaling:
    """`{"rope_type": "llama3", "factor": 8.0, …}` -> the frozen object, refusing what it can't use.

    Raises:
        ValueError: unknown `rope_type`, a key this type does not read, or factor lists of a wrong
            length.
    """
    values = dict(parameters or {})
    kind = values.pop("rope_type", "default")
    if kind not in SCALINGS:
        raise ValueError(f"rotary_scaling: unknown rope_type {kind!r}; known: {sorted(SCALINGS)}")
    if "attention_factor" in values:
        values["fixed_attention_factor"] = values.pop("attention_factor")
    cls = SCALINGS[kind]
    known = {field.name for field in dataclasses.fields(cls)}
    if unread := sorted(set(values) - known):
        raise ValueError(
            f"rotary_scaling of type {kind!r} does not use {unread}; it uses {sorted(known)}"
        )
    if not values.get("factor", 1.0) > 0:
        raise ValueError(f"rotary_scaling: factor must be positive, got {values['factor']!r}")
    for name in ("short_factor", "long_factor"):
        if name in known:
            values[name] = tuple(float(x) for x in values.get(name) or ())
            if len(values[name]) != rotary_dim // 2:
                raise ValueError(
                    f"rotary_scaling: {name} has {len(values[name])} entries, but rotary_dim is "
                    f"{rotary_dim}, so {rotary_dim // 2} are needed"
                )
    return cls(**values)
