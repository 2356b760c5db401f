"""What one forward pass shares between its layers: positions, masks and the key-value cache.

It travels beside the residual stream, so that no layer works out again what another already has,
and no method needs ten parameters.
"""

from collections.abc import Callable, Hashable
from functools import partial, reduce
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from transformer_lens_lite.components.rotary import Turn, inverse_frequencies
from transformer_lens_lite.kv_cache import KeyValueCache, Segment
from transformer_lens_lite.specs import Alibi, AttentionSpec, QueryGrowth, RotarySpec

T = TypeVar("T")


class Memo:
    """Something that works values out once.

    Not functools.cached_property: that takes a lock, which a compiled graph cannot.
    """

    def __init__(self) -> None:
        self._memo: dict[object, object] = {}

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]  # type: ignore[return-value]


class Mask(Memo):
    """Who may look at whom, in the forms attention wants, each made when first asked for.

    Args:
        is_causal: the plain lower triangle over the input itself: fused kernels know it by name.
        looks_back: no query sees a key in a later slot, whatever else is hidden.
        visible: makes [row, pos, key_pos], True where a query may look; None: everywhere.
        known_bias: gives what is added to scores where nothing is visible, [row, 1, pos, key_pos];
            None: it is made of `visible`.
        distance: makes [row, head, pos, key_pos] to add to scores (ALiBi); None: nothing.
        has_padding: some queries may see nothing at all.
        n_open: of so many first keys nothing is hidden and to their scores nothing is added.
    """

    def __init__(
        self,
        is_causal: bool,
        looks_back: bool,
        visible: Callable[[], Bool[Tensor, "row pos key_pos"]] | None,
        known_bias: Callable[[], Float[Tensor, "row 1 pos key_pos"]] | None,
        distance: Callable[[], Float[Tensor, "row head pos key_pos"]] | None,
        has_padding: bool,
        n_open: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.looks_back = looks_back
        self.is_open = visible is None and distance is None  # nothing is hidden, nothing added
        self._visible = visible
        self._known_bias = known_bias
        self._distance = distance
        self._has_padding = has_padding
        self._n_open = n_open
        self._dtype = dtype

    @property
    def visible(self) -> Bool[Tensor, "row 1 pos key_pos"] | None:
        """True where a query may look; None: everywhere."""
        make = self._visible
        return None if make is None else self._once("visible", lambda: make()[:, None])

    @property
    def bias(self) -> Float[Tensor, "row head pos key_pos"] | None:
        """What is added to scores: -inf where hidden, and the distance penalty."""
        return self._once("bias", self._make_bias)

    def bias_over(self, start: int, end: int) -> Float[Tensor, "row head pos key_pos"] | None:
        """`bias` of these keys alone; None: nothing is added to any of their scores."""
        if end <= self._n_open or self.bias is None:
            return None
        return self.bias[..., start:end]

    def of_queries(
        self, start: int, end: int
    ) -> tuple[
        Float[Tensor, "row head queries key_pos"] | None, Bool[Tensor, "row 1 queries 1"] | None
    ]:
        """`bias` and `dead` of these queries alone."""
        bias, dead = self.bias, self.dead
        return (
            None if bias is None else bias[:, :, start:end],
            None if dead is None else dead[:, :, start:end],
        )

    def _make_bias(self) -> Float[Tensor, "row head pos key_pos"] | None:
        hidden = None
        if self._known_bias is not None:
            hidden = self._known_bias()
        elif self.visible is not None:
            hidden = self.visible.to(self._dtype).log()  # of 1 and 0
        if self._distance is None:
            return hidden
        distance = self._distance().to(self._dtype)
        return distance if hidden is None else distance + hidden

    @property
    def dead(self) -> Bool[Tensor, "row 1 pos 1"] | None:
        """Queries that see nothing (padding): their pattern is zero. None: there are none."""
        visible = self.visible if self._has_padding else None
        return None if visible is None else self._once("dead", lambda: ~visible.any(-1, True))

    @property
    def finite_bias(self) -> Float[Tensor, "row head pos key_pos"] | None:
        """`bias` without rows of -inf alone, whose softmax would be NaN, forward or backward."""
        bias, dead = self.bias, self.dead
        if bias is None or dead is None:
            return bias
        return self._once("finite", lambda: bias.masked_fill(dead, 0.0))


class ForwardContext(Memo):
    """Positions, masks and cache of one forward over `pos` new positions.

    Args:
        batch, n_new: shape of the input.
        attention_mask: [batch, key_pos] of 0 and 1 over cached and new positions, None when no
            position is padding.
        shortformer_pos_embed: [row, pos, d_model], added to what makes queries and keys.
        token_type_ids: [batch, pos] of the new tokens; None: all are of the first type.
        new_are_real: no new position is padding, whatever the cached ones are.
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
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
        new_are_real: bool = False,
    ) -> None:
        super().__init__()
        self.batch = batch
        self.new_are_real = new_are_real or attention_mask is None
        self.n_new = n_new
        self.n_past = past_length
        self.n_keys = past_length + n_new
        self.device = device
        self.dtype = dtype
        self.attention_mask = attention_mask
        self.cache = cache
        self.padding = None if cache is None else cache.padding_of(attention_mask)
        # how often the cache was filled before: it counts this forward before the last norm
        self.n_before = 0 if cache is None else cache.n_forwards
        self.shortformer_pos_embed = shortformer_pos_embed
        self.token_type_ids = token_type_ids

    @classmethod
    def alone(cls, x: Shaped[Tensor, "batch pos *rest"]) -> "ForwardContext":
        """Of a component that is called by itself: from position 0, without padding or a cache."""
        return cls(x.shape[0], x.shape[1], x.device, x.dtype)

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
        if self.n_new == 1 and self.new_are_real and self.attention_mask is not None:
            return self.lengths[:, None] - 1  # without those of all keys, which few models ask for
        return self.key_positions[:, self.n_past :]

    @property
    def lengths(self) -> Int[Tensor, " row"]:
        """How many real tokens each row has by the end of this forward."""
        if self.attention_mask is None:
            return torch.full((1,), self.n_keys, device=self.device)
        if self.padding is not None:
            return self.padding.lengths(self.n_keys)
        return self.attention_mask.sum(1)

    @property
    def new_tokens_mask(self) -> Int[Tensor, "batch pos"] | None:
        """The attention mask of the new tokens alone."""
        return None if self.attention_mask is None else self.attention_mask[:, self.n_past :]

    def turn(self, rotary: RotarySpec) -> Turn:
        """The rotation of the new positions, shared by all layers with this spec."""
        return self._once(rotary.key, lambda: self._make_turn(rotary))

    def _make_turn(self, rotary: RotarySpec) -> Turn:
        frequencies = inverse_frequencies(rotary, self.lengths, self.device)
        angles = self.positions[..., None].float() * frequencies[..., None, :]
        factor = rotary.scaling.attention_factors(self.lengths)
        return Turn(angles, rotary.adjacent_pairs, factor, rotary.at_end)

    def growth(self, spec: QueryGrowth) -> Float[Tensor, "row pos 1 1"]:
        """What the queries of the new positions are multiplied by."""
        return self._once(spec.key, lambda: self._make_growth(spec))

    def _make_growth(self, spec: QueryGrowth) -> Float[Tensor, "row pos 1 1"]:
        steps = ((self.positions + spec.start).float() / spec.length).floor()
        return (1.0 + spec.scale * torch.log1p(steps))[:, :, None, None]

    # -- the cache --

    def key_values(
        self,
        layer: int,
        keys: Float[Tensor, "batch kv_head pos d_head"],
        values: Float[Tensor, "batch kv_head pos d_value"],
    ) -> tuple[Segment, ...]:
        """Everything layer `layer` attends to: cached segments and the new positions."""
        if self.cache is None:
            return ((keys, values),)
        entry = self.cache[layer]
        if keys.dtype != self.dtype and self.is_autocast:  # products come in a narrower dtype
            keys, values = keys.to(self.dtype), values.to(self.dtype)
        entry.check_kind(keys)  # batch and room were checked before anything was run
        return entry.extend(keys, values)

    @property
    def is_autocast(self) -> bool:
        """Whether torch chooses the dtype of products; nobody can say so of meta tensors."""
        return self.device.type != "meta" and torch.is_autocast_enabled(self.device.type)

    def commit(self, layers: range) -> None:
        """Count the new positions as cached in these layers: the forward got through."""
        if self.cache is None or self.cache.frozen or not layers:
            return
        self.cache.advance(layers, self.n_new, self.attention_mask)

    # -- masks --

    def mask(self, spec: AttentionSpec) -> Mask:
        """The mask of a layer, made once per distinct kind."""
        return self._once(spec.sight, lambda: self._make_mask(spec))

    def _make_mask(self, spec: AttentionSpec) -> Mask:
        causal, alibi = spec.causal, spec.alibi
        window = spec.window if spec.window is not None and spec.window < self.n_keys else None
        chunk = spec.chunk if spec.chunk is not None and spec.chunk < self.n_keys else None
        padded = self.attention_mask is not None
        local = window is not None or chunk is not None
        bites = (causal and self.n_new > 1) or local or padded
        return Mask(
            is_causal=bites and not local and not padded and alibi is None and not self.n_past,
            looks_back=causal,
            visible=partial(self._visible, causal, window, chunk) if bites else None,
            known_bias=None if local or self.n_new > 1 else self._padding_bias(),
            distance=partial(self._alibi, alibi) if alibi is not None else None,
            has_padding=padded and self.has_padded_queries,
            n_open=0 if local or padded or alibi is not None else self.n_past,
            dtype=self.dtype,
        )

    def _padding_bias(self) -> Callable[[], Float[Tensor, "row 1 1 key_pos"]] | None:
        """What hides padding and nothing else, where it is there already."""
        padding = self.padding
        return None if padding is None else partial(padding.bias, self.n_keys, self.dtype)

    @property
    def has_padded_queries(self) -> bool:
        """Whether a new position is padding: only such a one may see nothing, not even itself."""
        return self._once("padded_queries", self._look_for_padded_queries)

    def _look_for_padded_queries(self) -> bool:
        if self.new_are_real:
            return False
        assert self.attention_mask is not None
        # the test would break a compiled graph
        new = self.attention_mask[:, self.n_past :]
        return torch.compiler.is_compiling() or not bool(new.all())

    def _visible(
        self, causal: bool, window: int | None, chunk: int | None
    ) -> Bool[Tensor, "row pos key_pos"]:
        limits = []
        if causal and self.n_new > 1:  # a single query is the last one, and sees all
            slots = torch.arange(self.n_keys, device=self.device)
            limits.append((slots <= slots[self.n_past :, None])[None])
        if window is not None:
            distance = self.positions[:, :, None] - self.key_positions[:, None, :]
            limits.append((distance < window) & (distance > -window))
        if chunk is not None:
            chunks = self.key_positions // chunk
            limits.append(chunks[:, self.n_past :, None] == chunks[:, None, :])
        if self.attention_mask is not None:
            limits.append(self.attention_mask[:, None, :].bool().expand(-1, self.n_new, -1))
        return reduce(torch.logical_and, limits)

    def _alibi(self, alibi: Alibi) -> Float[Tensor, "row head pos key_pos"]:
        slopes = torch.tensor(alibi.slopes, device=self.device)[:, None, None]
        if alibi.in_bfloat16:
            # the stairs that rounding makes lie where the key does; less the query's own position,
            # which softmax does not see
            keys = (slopes.bfloat16() * self.key_positions[:, None, None]).float()
            penalty = slopes * self.positions[:, None, :, None].float() - keys
        else:
            distance = self.positions[:, :, None] - self.key_positions[:, None, :]
            penalty = slopes * distance[:, None].float()
        return -alibi.scale * penalty
