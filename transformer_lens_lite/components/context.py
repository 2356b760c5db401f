"""What one forward pass shares between its layers: positions, masks and the key-value cache.

It travels beside the residual stream, so that no layer works out again what another already has,
and no method needs ten parameters.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_lens_lite.components.rotary import Turn, inverse_frequencies
from transformer_lens_lite.config import AttentionSpec, RotarySpec
from transformer_lens_lite.kv_cache import KeyValueCache, Segment

T = TypeVar("T")


class Mask(NamedTuple):
    """Who may look at whom, in the forms attention wants.

    `is_causal`: the plain lower triangle, needing no tensor on the fused path. `bias`: added to
    scores, -inf where hidden. `dead`: queries that see nothing at all (padding); their pattern is
    zero.
    """

    is_causal: bool
    bias: Float[Tensor, "row head pos key_pos"] | None
    dead: Bool[Tensor, "row 1 pos 1"] | None


class ForwardContext:
    """Positions, masks and cache of one forward over `pos` new positions.

    Args:
        batch, n_new: shape of the input.
        attention_mask: [batch, key_pos] of 0 and 1 over cached and new positions, None when no
            position is padding.
        shortformer_pos_embed: [row, pos, d_model], added to what makes queries and keys.
    """

    def __init__(
        self,
        batch: int,
        n_new: int,
        device: torch.device,
        dtype: torch.dtype,
        past_length: int = 0,
        attention_mask: Int[Tensor, "batch key_pos"] | None = None,
        cache: KeyValueCache | None = None,
        shortformer_pos_embed: Float[Tensor, "row pos d_model"] | None = None,
    ) -> None:
        self.batch = batch
        self.n_new = n_new
        self.n_past = past_length
        self.n_keys = past_length + n_new
        self.device = device
        self.dtype = dtype
        self.attention_mask = attention_mask
        self.cache = cache
        self.shortformer_pos_embed = shortformer_pos_embed
        self._memo: dict[object, object] = {}

    def _once(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]  # type: ignore[return-value]

    # -- positions --

    @property
    def key_positions(self) -> Int[Tensor, "row key_pos"]:
        """The position of every cached and new token: its slot, not counting padding before it."""
        return self._once("key_positions", self._make_key_positions)

    def _make_key_positions(self) -> Int[Tensor, "row key_pos"]:
        if self.attention_mask is None:
            return torch.arange(self.n_keys, device=self.device)[None]
        return (self.attention_mask.cumsum(1) - 1).clamp(min=0)

    @property
    def positions(self) -> Int[Tensor, "row pos"]:
        """The positions of the new tokens."""
        return self.key_positions[:, self.n_past :]

    @property
    def lengths(self) -> Int[Tensor, " row"]:
        """How many real tokens each row has by the end of this forward."""
        if self.attention_mask is None:
            return torch.full((1,), self.n_keys, device=self.device)
        return self.attention_mask.sum(1)

    @property
    def new_tokens_mask(self) -> Int[Tensor, "batch pos"] | None:
        """The attention mask of the new tokens alone."""
        return None if self.attention_mask is None else self.attention_mask[:, self.n_past :]

    def turn(self, rotary: RotarySpec) -> Turn:
        """The rotation of the new positions, shared by all layers with this spec."""
        return self._once(rotary, lambda: self._make_turn(rotary))

    def _make_turn(self, rotary: RotarySpec) -> Turn:
        frequencies = inverse_frequencies(rotary, self.lengths, self.device)
        angles = self.positions[..., None].float() * frequencies[..., None, :]
        return Turn(angles, rotary.adjacent_pairs, rotary.scaling.attention_factor)

    # -- the cache --

    def key_values(
        self,
        layer: int,
        keys: Float[Tensor, "batch kv_head pos d_head"],
        values: Float[Tensor, "batch kv_head pos d_head"],
    ) -> tuple[Segment, ...]:
        """Everything layer `layer` attends to: cached segments and the new positions."""
        if self.cache is None:
            return ((keys, values),)
        entry = self.cache[layer]
        entry.check(keys)
        return entry.extend(keys, values)

    def commit(self, layers: range) -> None:
        """Count the new positions as cached in these layers: the forward got through."""
        if self.cache is None or self.cache.frozen or not layers:
            return
        for layer in layers:
            self.cache[layer].advance(self.n_new)
        self.cache.padding = self.attention_mask

    # -- masks --

    def mask(self, spec: AttentionSpec) -> Mask:
        """The mask of a layer, made once per distinct kind."""
        window = spec.window if spec.window is not None and spec.window < self.n_keys else None
        kind = (spec.causal, window, spec.n_heads if spec.alibi else None)
        return self._once(kind, lambda: self._make_mask(*kind))

    def _make_mask(self, causal: bool, window: int | None, alibi_heads: int | None) -> Mask:
        plain = window is None and self.attention_mask is None and alibi_heads is None
        if plain and (self.n_new == 1 or not causal):
            return Mask(False, None, None)
        visible = self._visible(causal, window)
        dead = None
        if self.attention_mask is not None:
            dead = ~visible.any(-1)[:, None, :, None]
        bias = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        bias = bias.masked_fill(~visible, -math.inf)[:, None]
        if alibi_heads is not None:
            bias = bias + self._alibi(alibi_heads).to(self.dtype)
        return Mask(plain and self.n_past == 0, bias, dead)

    def _visible(self, causal: bool, window: int | None) -> Bool[Tensor, "row pos key_pos"]:
        slots = torch.arange(self.n_keys, device=self.device)
        visible = torch.ones(1, self.n_new, self.n_keys, dtype=torch.bool, device=self.device)
        if causal:
            visible = visible & (slots <= slots[self.n_past :, None])
        if window is not None:
            distance = self.positions[:, :, None] - self.key_positions[:, None, :]
            visible = visible & (distance < window) & (distance > -window)
        if self.attention_mask is not None:
            visible = visible & self.attention_mask[:, None, :].bool()
        return visible

    def _alibi(self, n_heads: int) -> Float[Tensor, "row head pos key_pos"]:
        distance = self.positions[:, :, None] - self.key_positions[:, None, :]
        return -alibi_slopes(n_heads).to(self.device)[:, None, None] * distance[:, None].float()


def alibi_slopes(n_heads: int) -> Float[Tensor, " head"]:
    """The penalty per position of each head (ALiBi, arXiv 2108.12409).

    A geometric series for a power of two; other counts take every second slope of the next one.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(n_heads - power)]
    return torch.tensor(slopes)
