"""The engine: a family's table of rows, read from left to right to import and back to export.

    Map("model.layers.{i}.self_attn.q_proj.weight", "blocks.{i}.attn.W_Q", "(n h) m -> n m h")

Letters are sizes: n heads, k key/value heads, g = n/k, h d_head, m d_model, f d_mlp, v d_vocab,
u d_vocab_out, c n_ctx, r reserved positions, t token types, e experts, x d_expert, y
d_shared_expert. Importing applies the pattern, exporting swaps the sides of its arrow. `{i}` runs
over the layers, `{e}` over the experts of a layer.

Rows rename, reshape, split and stack; they never do arithmetic, so a round trip is bit-exact. What
a pattern gives is a *view* of the checkpoint's matrix wherever strides can express it: a forward
pass reads that matrix back without a copy.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from einops import EinopsError, rearrange
from jaxtyping import Float
from torch import Tensor

from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.config_checks import fields_needing
from transformer_lens_lite.nearest import closest
from weights_conversion.fields import Reading

AnyShape = Float[Tensor, "..."]


# --- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Map:
    """One Hugging Face tensor and the native parameter, or parameters, it becomes.

    Several natives share a fused tensor. The pattern brings the fused axis to the front, and there
    it is cut: into the lengths `cut` (their sum is the letter `a`), or, without `cut`, one entry
    for each native (the letter `s`). `pieces` are patterns for the parts after the cut.

        Map("…qkv.weight", (q, k, v), "(a h) m -> a m h", cut=("n", "k", "k"))     # phi-3
        Map("…qkv.weight", (q, k, v), "(n s h) m -> s n m h")                      # gpt-neox

    `copies`: each native is the whole tensor (one norm used twice); exporting checks that they
    still agree.

    `{e}` in both names: one tensor per expert. In the Hugging Face name alone: the native parameter
    stacks them, as it does those of heads with `{n}` or `{k}`. In the native names alone: the
    pattern brings `e` to the front, and what each expert gets is cut as above.

    `layers`: the layers that have such a tensor; None: all.

    `sizes`: letters of this pattern alone.
    """

    hf: str
    native: str | tuple[str, ...]
    pattern: str
    cut: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()
    copies: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Zeros:
    """A native parameter the family lacks (most often a bias): zero, and without gradient."""

    native: str
    shape: str
    layers: tuple[int, ...] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Tied:
    """A Hugging Face name for a tensor that is already another one: the head of a tied model.

    Files omit it or repeat it. `native` is not a parameter of its own in the model either; None:
    the model has but one name for both. `unread`: Hugging Face reads `source` alone, so the two may
    differ.
    """

    hf: str
    source: str
    native: str | None
    unread: bool = False


Row = Map | Zeros | Tied


def natives_of(row: Row) -> tuple[str, ...]:
    if row.native is None:
        return ()
    return row.native if isinstance(row.native, tuple) else (row.native,)


def optional(present: bool, row: Map) -> Map | Zeros:
    """The row, or zeros where this checkpoint has no such tensor."""
    assert isinstance(row.native, str)
    return row if present else Zeros(row.native, _sides(row.pattern)[1], row.layers, row.sizes)


def override(rows: Iterable[Row], *new: Row) -> list[Row]:
    """A parent's rows with some replaced: the row that fills a native name gives way to the new.

    The way families inherit: `override(llama.rows(cfg, reading), Map(… "blocks.{i}.attn.b_Q" …))`.
    """
    names = {name for row in new for name in natives_of(row)}
    return [*without(rows, *names), *new]


def without(rows: Iterable[Row], *natives: str) -> list[Row]:
    """A parent's rows less those that fill `natives`."""
    return [row for row in rows if not set(natives_of(row)) & set(natives)]


def key_value(cfg: HookedTransformerConfig, name: str) -> str:
    """The parameter `name` of keys or values, under the name it has in this model."""
    grouped = cfg.n_key_value_heads is not None
    return "blocks.{i}.attn." + ("_" if grouped else "") + name


# --- patterns -----------------------------------------------------------------------------------


def sizes_of(cfg: HookedTransformerConfig) -> dict[str, int]:
    """The letters of the patterns."""
    n_kv = cfg.n_key_value_heads or cfg.n_heads
    return {
        "n": cfg.n_heads,
        "k": n_kv,
        "g": cfg.n_heads // n_kv,
        "h": cfg.d_head,
        "m": cfg.d_model,
        "f": cfg.d_mlp or 0,
        "v": cfg.d_vocab,
        "u": cfg.d_vocab_out,
        "c": cfg.n_ctx,
        "r": cfg.reserved_positions,
        "t": cfg.n_token_types,
        "e": cfg.num_experts or 0,
        "x": cfg.d_expert or cfg.d_mlp or 0,
        "y": cfg.d_shared_expert or 0,
    }


def _sides(pattern: str) -> tuple[str, str]:
    """ "a b -> b a" -> ("a b", "b a"); a pattern without an arrow changes nothing."""
    left, arrow, right = pattern.partition("->")
    return left.strip(), (right if arrow else left).strip()


def _length(letter: str, sizes: Mapping[str, int]) -> int:
    if not letter.isdigit() and letter not in sizes:
        raise ValueError(f"a pattern has {letter!r}, which is no size: {', '.join(sizes)}")
    return int(letter) if letter.isdigit() else sizes[letter]


def shape_of(side: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """ "(n h) m" -> (n * h, m)."""
    axes = re.findall(r"\(([^)]*)\)|(\w+)", side)
    return tuple(
        math.prod(_length(letter, sizes) for letter in (group or single).split())
        for group, single in axes
    )


def _apply(x: AnyShape, source: str, target: str, sizes: Mapping[str, int]) -> AnyShape:
    letters = set(re.findall("[a-z]", source)) & set(sizes)
    try:
        return rearrange(x, f"{source} -> {target}", **{name: sizes[name] for name in letters})
    except EinopsError as error:
        why = str(error).strip().splitlines()[-1].strip()
        raise ValueError(
            f"the pattern '{source} -> {target}' does not fit {list(x.shape)}: {why}"
        ) from error


# --- one row at one layer -----------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """A `Map` at one layer: names without placeholders and the sizes its pattern needs.

    `hf` has several entries where one native parameter stacks the tensors of all experts.
    """

    hf: tuple[str, ...]
    native: tuple[str, ...]
    row: Map
    sizes: dict[str, int]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape of each Hugging Face tensor."""
        shape = shape_of(_sides(self.row.pattern)[0], self.sizes)
        return shape[1:] if self._stacked else shape

    @property
    def native_shape(self) -> tuple[int, ...]:
        """The shape of a native tensor that is not cut out of a fused one."""
        return shape_of(_sides(self.row.pattern)[1], self.sizes)

    @property
    def _stacked(self) -> bool:
        counted = _counted(self.row.hf)
        return counted != "" and not any(f"{{{counted}}}" in n for n in natives_of(self.row))

    @property
    def _unstacked(self) -> bool:
        return "{e}" not in self.row.hf and any("{e}" in name for name in natives_of(self.row))

    @property
    def _fused(self) -> bool:
        return len(natives_of(self.row)) > 1 and not self.row.copies

    @property
    def _cut(self) -> list[int]:
        return [_length(letter, self.sizes) for letter in self.row.cut]

    def to_native(self, tensors: Sequence[AnyShape]) -> list[AnyShape]:
        """Views of the Hugging Face tensor; copies of stacked experts and where strides fail."""
        whole = torch.stack(tuple(tensors)) if self._stacked else tensors[0]
        x = _apply(whole, *_sides(self.row.pattern), self.sizes)
        if self.row.copies:  # two parameters must not share memory
            return [x, *(x.clone() for _ in self.native[1:])]
        if self._unstacked:
            return [part for of_one in x.unbind() for part in self._parted(of_one)]
        return self._parted(x)

    def _parted(self, x: AnyShape) -> list[AnyShape]:
        if not self._fused:
            return [x]
        parts = list(x.split(self._cut) if self.row.cut else x.unbind())
        for index, pattern in enumerate(self.row.pieces):
            parts[index] = _apply(parts[index], *_sides(pattern), self.sizes)
        return parts

    def _joined(self, natives: Sequence[AnyShape]) -> AnyShape:
        parts = list(natives)
        for index, pattern in enumerate(self.row.pieces):
            source, target = _sides(pattern)
            parts[index] = _apply(parts[index], target, source, self.sizes)
        if not self._fused:
            return parts[0]
        return torch.cat(parts) if self.row.cut else torch.stack(parts)

    def to_hf(self, natives: Sequence[AnyShape]) -> list[AnyShape]:
        """The inverse: bit for bit what `to_native` was given, contiguous."""
        if self._unstacked:
            n = len(natives_of(self.row))
            each = [natives[start : start + n] for start in range(0, len(natives), n)]
            x = torch.stack([self._joined(of_one) for of_one in each])
        else:
            x = self._joined(natives)
        source, target = _sides(self.row.pattern)
        x = _apply(x, target, source, self.sizes).contiguous()
        return list(x.unbind()) if self._stacked else [x]


def _counted(hf: str) -> str:
    """What there is one tensor for each of: "e" experts, "n" heads, "k" key/value heads; or ""."""
    found = re.search(r"\{([enk])\}", hf)
    return found[1] if found else ""


def _layers(row: "Map | Zeros", layers: Iterable[int]) -> list[int]:
    """Those of `layers` at which the row has something."""
    return [layer for layer in layers if row.layers is None or layer in row.layers]


def _place(row: Map, layer: int, sizes: dict[str, int]) -> Iterator[Placed]:
    """The row at one layer; once per expert when the native parameters are per expert too."""

    def fill(name: str, expert: int | None = None) -> str:
        name = name.replace("{i}", str(layer))
        return name if expert is None else name.replace("{e}", str(expert))

    natives = natives_of(row)
    sizes = {**sizes, **row.sizes}
    letters = {**sizes, "s": len(natives), "a": sum(_length(c, sizes) for c in row.cut)}
    if any("{e}" in name for name in natives):
        filled = [tuple(fill(n, e) for n in natives) for e in range(sizes["e"])]
        if "{e}" not in row.hf:  # one tensor for all experts
            together = tuple(name for of_one in filled for name in of_one)
            yield Placed((fill(row.hf),), together, row, letters)
            return
        for e, of_one in enumerate(filled):
            yield Placed((fill(row.hf, e),), of_one, row, letters)
        return
    counted, hf = _counted(row.hf), [fill(row.hf)]
    if counted:
        hf = [hf[0].replace(f"{{{counted}}}", str(x)) for x in range(sizes[counted])]
    yield Placed(tuple(hf), tuple(fill(n) for n in natives), row, letters)


# --- a family -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """Everything that is known about a family: its config both ways, and its rows.

    read_config: a `Reading` -> keyword arguments of `HookedTransformerConfig`.
    write_config: the inverse. Its second argument says whether a native parameter, named with
        `{i}`, needs a place in the checkpoint (in some layer it is not zero).
    rows: the table, for a config and the reading it came from.
    ignore: names of tensors that carry nothing, with the reason.
    cosmetic: config fields without effect on the logits, with the reason.
    optional_prefix: a prefix that some checkpoints leave out.
    further_layers: why files may hold layers past those the config counts, and Hugging Face does
        not run them; empty: they do not.
    in_transformers: whether Hugging Face has a class for it, to compare with.
    headless_class: the class of checkpoints without a single tensor whose name starts with
        `head_prefix`; `architectures` of their configs says so.
    old_names: endings of names, and what old files have instead.
    remote_stem: how the classes of remote code begin, lower case and without underscores, that
        checkpoints name in `auto_map` and that is known to be what `hf_class` is now.
    joins_stream: sublayers ("attn", "mlp") whose module in Hugging Face adds the stream to what it
        computes, so that its output is not what is added.
    """

    model_type: str
    hf_class: str
    read_config: Callable[[Reading], dict[str, Any]]
    write_config: Callable[[HookedTransformerConfig, Callable[[str], bool]], dict[str, Any]]
    rows: Callable[[HookedTransformerConfig, Reading], list[Row]]
    ignore: Mapping[str, str] = field(default_factory=dict)
    cosmetic: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    optional_prefix: str = ""
    further_layers: str = ""
    in_transformers: bool = True
    headless_class: str = ""
    head_prefix: str = ""
    old_names: Mapping[str, str] = field(default_factory=dict)
    remote_stem: str = ""
    joins_stream: tuple[str, ...] = ()

    def check(self) -> None:
        """TypeError where a field that the conversion needs holds nothing it can use."""
        for name in ("read_config", "write_config", "rows"):
            if not callable(value := getattr(self, name)):
                raise TypeError(f"{name} of the table must be a function, got {value!r}")
        for name in ("model_type", "hf_class"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise TypeError(f"{name} of the table must be a name, got {value!r}")
        for name in ("ignore", "cosmetic", "aliases", "old_names"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise TypeError(f"{name} of the table must be a dict, got {value!r}")

    def class_of(self, names: Iterable[str]) -> str:
        """Hugging Face's class of a checkpoint with these tensors."""
        headless = self.headless_class and not any(n.startswith(self.head_prefix) for n in names)
        return self.headless_class if headless else self.hf_class

    def reading(self, hf_config: Mapping[str, Any], where: str = "the config") -> Reading:
        return Reading(hf_config, where, self.aliases)

    def read(self, reading: Reading, **overrides: Any) -> HookedTransformerConfig:
        """The native config of the whole checkpoint, with some fields overridden.

        Raises:
            ValueError: a field that is missing, of the wrong type, not supported, or not known.
        """
        fields = {"original_architecture": self.hf_class, **self.read_config(reading)}
        if architectures := reading.names("architectures"):
            fields["original_architecture"] = architectures[0]
        if unknown := sorted(set(fields) - set(HookedTransformerConfig.__dataclass_fields__)):
            raise ValueError(
                f"the table of {self.model_type!r} sets {unknown[0]!r}, which is no field of "
                f"HookedTransformerConfig."
                f"{closest(unknown[0], HookedTransformerConfig.__dataclass_fields__)}"
            )
        try:
            cfg = HookedTransformerConfig(**{**fields, **overrides})
        except ValueError as error:
            raise ValueError(f"{reading.where}: {error}") from error
        self.rows(cfg, reading)  # rows read the config too
        reading.refuse_unread(self.cosmetic)
        return cfg


def first_layers(cfg: HookedTransformerConfig, n: int) -> HookedTransformerConfig:
    """The config of the model made of the first `n` layers."""
    if not 0 <= n <= cfg.n_layers:
        raise ValueError(f"first_n_layers={n}, but the model has {cfg.n_layers} layers")
    changes: dict[str, Any] = {"n_layers": n}
    for name in ("rotary_layers", "expert_layers"):
        if getattr(cfg, name) is not None:
            changes[name] = list(getattr(cfg, name))[:n]
    if cfg.attn_types is not None:
        changes["attn_types"] = list(cfg.attn_types)[:n]
        if "local" not in changes["attn_types"]:
            changes |= {"attn_types": None, "use_local_attn": False}
            fields = type(cfg).__dataclass_fields__
            changes |= {name: fields[name].default for name in fields_needing("use_local_attn")}
    return replace(cfg, **changes)


@runtime_checkable
class TensorSource(Protocol):
    """Where tensors come from: one at a time, by their Hugging Face name."""

    def names(self) -> set[str]: ...

    def read(self, name: str) -> AnyShape: ...

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors are equal."""
        ...

    def describe(self, name: str) -> str:
        """The file, for messages."""
        ...


class Table:
    """A family's rows written out for one config."""

    def __init__(
        self,
        architecture: Architecture,
        cfg: HookedTransformerConfig,
        reading: Reading,
        n_layers: int | None = None,
    ) -> None:
        """`n_layers`: layers in the checkpoint, when the model takes fewer."""
        self.architecture = architecture
        self.family = architecture.model_type
        self.sizes = sizes_of(cfg)
        self.n_layers = cfg.n_layers
        self.n_layers_in_checkpoint = cfg.n_layers if n_layers is None else n_layers
        rows = architecture.rows(cfg, reading)
        # the largest first: what a conversion needs beside the result is then needed early
        rows = sorted(rows, key=lambda row: isinstance(row, Map) and "{i}" in row.hf)
        self.maps = list(self._placed(rows, range(cfg.n_layers)))
        self.zeros = {
            name.replace("{i}", str(layer)).replace("{e}", str(e)): shape_of(
                row.shape, {**self.sizes, **row.sizes}
            )
            for row in rows
            if isinstance(row, Zeros)
            for name in natives_of(row)
            for layer in (_layers(row, range(cfg.n_layers)) if "{i}" in name else range(1))
            for e in range(self.sizes["e"] if "{e}" in name else 1)
        }
        self.tied = [row for row in rows if isinstance(row, Tied)]
        beyond = range(cfg.n_layers, cfg.n_layers if n_layers is None else n_layers)
        layered = [row for row in rows if isinstance(row, Map) and "{i}" in row.hf]
        skipped = {name for placed in self._placed(layered, beyond) for name in placed.hf}
        ignored = {
            name.replace("{i}", str(layer))
            for name in architecture.ignore
            for layer in range(max(cfg.n_layers, beyond.stop))
        }
        self.unused = {variant for name in skipped | ignored for variant in self._variants(name)}

    def _placed(self, rows: Iterable[Row], layers: range) -> Iterator[Placed]:
        for row in rows:
            if isinstance(row, Map):
                for layer in _layers(row, layers) if "{i}" in row.hf else range(1):
                    yield from _place(row, layer, self.sizes)

    def _variants(self, name: str) -> list[str]:
        prefix = self.architecture.optional_prefix
        bare = name.removeprefix(prefix)
        found = [name, bare, prefix + bare]
        for new, old in self.architecture.old_names.items():
            if name.endswith(new):
                found += [variant.removesuffix(new) + old for variant in found]
        return found

    def _beyond_the_model(self, name: str) -> bool:
        """Whether it is of a layer the config does not count, in families that have such."""
        layer = re.search(r"\.layers\.(\d+)\.", name)
        has_more = bool(self.architecture.further_layers)
        return has_more and layer is not None and int(layer[1]) >= self.n_layers_in_checkpoint

    # -- Hugging Face -> native --

    def locate(self, names: set[str]) -> dict[str, str]:
        """Hugging Face's name of each tensor that is needed -> its name in this checkpoint.

        Raises:
            ValueError: a tensor is missing, or one is there that no row has a place for.
        """
        wanted = [name for placed in self.maps for name in placed.hf]
        found: dict[str, str] = {}
        for name in (*wanted, *(row.hf for row in self.tied)):
            for variant in self._variants(name):
                if variant in names:
                    found.setdefault(name, variant)
        for row in self.tied:  # a tied checkpoint may hold its one matrix under the other name
            if row.source not in found and row.hf in found:
                found[row.source] = found.pop(row.hf)
        missing = [name for name in wanted if name not in found]
        unknown = names - set(found.values()) - self.unused
        leftover = sorted(name for name in unknown if not self._beyond_the_model(name))
        if missing or leftover:
            raise ValueError(
                f"not a {self.architecture.model_type} checkpoint of this config: "
                + "; ".join(_problems(missing, leftover))
            )
        return found

    def to_native(self, source: TensorSource) -> Iterator[tuple[str, AnyShape]]:
        """Native parameters one by one; each Hugging Face tensor is read once and let go.

        Raises:
            ValueError: names as in `locate`, a wrong shape, a head that is not what it is tied to.
        """
        found = self.locate(source.names())
        for placed in self.maps:
            tensors = [self._read(source, found[name], placed.hf_shape) for name in placed.hf]
            try:
                made = placed.to_native(tensors)
            except ValueError as error:  # a mistake in the row: the shape is what it says
                raise ValueError(f"{self.family} table, row {placed.row.hf}: {error}") from error
            yield from zip(placed.native, made, strict=True)
        for row in self.tied:
            if row.hf in found and not row.unread:  # both names are in the checkpoint
                _check_tied(source, found[row.source], found[row.hf])

    def _read(self, source: TensorSource, name: str, shape: tuple[int, ...]) -> AnyShape:
        tensor = source.read(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{source.describe(name)}: {name} has shape {list(tensor.shape)}, but the config "
                f"makes it {list(shape)}"
            )
        return tensor

    # -- native -> Hugging Face --

    def to_hf(self, state: Mapping[str, AnyShape]) -> dict[str, AnyShape]:
        """The checkpoint, contiguous; tied names share one tensor.

        Raises:
            ValueError: a parameter that has no place in the checkpoint, or is missing.
        """
        self._refuse_homeless(state)
        result: dict[str, AnyShape] = {}
        for placed in self.maps:
            natives = [state[name] for name in placed.native]
            for name, tensor in zip(placed.native, natives, strict=True):
                if placed.row.copies and not torch.equal(tensor, natives[0]):
                    raise ValueError(
                        f"{placed.native[0]} and {name} are one tensor, {placed.hf[0]}, in a "
                        f"{self.architecture.model_type} checkpoint, but they differ"
                    )
            result.update(zip(placed.hf, placed.to_hf(natives), strict=True))
        for row in self.tied:
            result[row.hf] = result[row.source]
        return result

    def _refuse_homeless(self, state: Mapping[str, AnyShape]) -> None:
        family = self.architecture.model_type
        exported = {name for placed in self.maps for name in placed.native}
        tied = {row.native for row in self.tied if row.native is not None}
        known = exported | set(self.zeros) | tied
        if missing := sorted(exported - set(state)):
            raise ValueError(f"the model lacks what a {family} checkpoint holds: {_some(missing)}")
        if extra := sorted(set(state) - known):
            raise ValueError(f"{_some(extra)} has no place in a {family} checkpoint")
        filled = [name for name in self.zeros if name in state and state[name].any()]
        if filled:
            raise ValueError(
                f"{_some(filled)} has no place in a {family} checkpoint of this config "
                "(it would have to be zero)"
            )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _problems(missing: Sequence[str], leftover: Sequence[str]) -> Iterator[str]:
    if missing:
        yield f"missing {_some(missing)}"
        if set(missing) & {"lm_head.weight", "embed_out.weight", "output.weight"}:
            yield "its head is not there: take the family's …ForCausalLM, not the bare model"
    if leftover:
        yield f"no place for {_some(leftover)}"
        if any(".lora_" in name or name.startswith("base_model.") for name in leftover):
            yield "this looks like a PEFT adapter: merge it first (merge_and_unload)"


def _check_tied(source: TensorSource, name: str, other: str) -> None:
    # transformers 4 would ignore the second, transformers 5 untie them: neither is safe to guess
    if not source.same(name, other):
        raise ValueError(
            f"the config says tie_word_embeddings, but {other} ({source.describe(other)}) differs "
            f"from {name} ({source.describe(name)}); set tie_word_embeddings to false to use both"
        )


# --- which config describes a model -------------------------------------------------------------

# These name or group things; they change no number.
_NO_BEHAVIOUR = ("layer", "grouped")


def _flat(spec: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for f in fields(spec):
        value = getattr(spec, f.name)
        if is_dataclass(value) and f.name in ("attention", "mlp"):
            yield from _flat(value, f"{prefix}{f.name}.")
        elif f.name not in _NO_BEHAVIOUR:
            yield prefix + f.name, value


def behaviour(cfg: HookedTransformerConfig) -> dict[str, Any]:
    """What a config means, field by field: equal behaviour, equal logits."""
    names = (
        "n_layers d_model d_vocab d_vocab_out tie_word_embeddings positional_embedding_type "
        "reserved_positions d_embed post_embedding_ln post_embedding_ln_last n_token_types "
        "unembedding "
        "unembed_act_fn output_logits_soft_cap embed_scale logit_scale "
        "attn_only"
    )
    result = {name: getattr(cfg, name) for name in names.split()}
    result["final_norm"] = cfg.final_norm_spec()
    if cfg.positional_embedding_type in ("standard", "shortformer"):
        result["n_ctx"] = cfg.n_ctx  # elsewhere it is a limit without a parameter
    for spec in cfg.block_specs():
        result.update(_flat(spec, f"layer {spec.layer}: "))
    return result


def differences(cfg: HookedTransformerConfig, other: HookedTransformerConfig) -> list[str]:
    """What `cfg` asks for and `other` does not do: ["layer 0: attention.softcap=5.0", …]."""
    ours, theirs = behaviour(cfg), behaviour(other)
    missing = object()
    return [f"{name}={v!r}" for name, v in ours.items() if theirs.get(name, missing) != v]
