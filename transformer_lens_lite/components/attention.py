"""Multi-head attention (arXiv 1706.03762) with one, several or a single key-value head per
group."""

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from transformer_lens_lite.components.context import ForwardContext, Mask
from transformer_lens_lite.components.norm import FullWidthRMSNorm, Norm, RMSNorm, build_norm
from transformer_lens_lite.components.storage import (
    Projecting,
    Remembered,
    in_matrix,
    in_projections,
    joined_projection,
    matmul_ready,
    out_matrix,
    out_projection,
    transposed,
)
from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.factored_matrix import FactoredMatrix
from transformer_lens_lite.hooks import Absent, HookPoint
from transformer_lens_lite.kv_cache import Segment
from transformer_lens_lite.specs import AttentionSpec, NormSpec

NO_MATRIX = (
    "latent attention has no QK or OV matrix: a norm stands between the stream and what keys and "
    "values are made from (W_K and W_V read the latent)"
)
# what older checkpoints of the classic class carry beside the parameters
LEGACY_BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")
# Of explicit attention that nobody watches: the scores of so many stay in a processor's cache.
QUERIES_AT_A_TIME = 128
PerHead = Float[Tensor, "batch pos head d_head"]
PerKeyHead = Float[Tensor, "batch pos kv_head d_head"]
PerValueHead = Float[Tensor, "batch pos kv_head d_value"]
HeadsFirst = Float[Tensor, "batch head pos d_head"]
Weighed = Float[Tensor, "batch head pos d_value"]


class Attention(Projecting):
    """Queries, keys, values; who looks at whom; and back into the residual stream.

    Parameters: `W_Q`, `W_K`, `W_V` [head, d_model, d_head] with biases [head, d_head]; `W_O`
    [head, d_head, d_model] with bias [d_model]; `sinks` [head] when the spec has them.

    Attention is fused until somebody listens to `hook_attn_scores` or `hook_pattern`: by torch's
    kernel, by blocks of queries where a softcap or sinks act on scores, which that kernel does not
    have, and segment by segment where some keys are shared.
    """

    prefix = ""  # of the key and value parameters' names
    W_Q: nn.Parameter
    b_Q: Any  # a parameter, or None
    W_K: Any  # a parameter, or made from a grouped one
    W_V: Any
    b_K: Any
    b_V: Any

    def __init__(self, cfg: HookedTransformerConfig, spec: AttentionSpec, layer: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.spec = spec
        self.layer_id = layer
        # for classic clients, which share the mask between layers of a type; nothing here reads it
        self.attn_type = "global" if spec.window is None and spec.chunk is None else "local"
        self.mask = torch.empty(0, 0, dtype=torch.bool)
        n, k = spec.n_heads, spec.n_kv_heads
        self.W_names = ("W_Q", f"{self.prefix}W_K", f"{self.prefix}W_V")
        self.b_names = ("b_Q", f"{self.prefix}b_K", f"{self.prefix}b_V")
        self._make_projections()
        self.joined = Remembered(joined_projection, *self.W_names, *self.b_names)
        self.out_matrix = Remembered(out_matrix, "W_O")
        self.W_O = out_projection(n, spec.d_value, spec.d_model)
        self.b_O = nn.Parameter(torch.zeros(spec.d_model))
        if spec.sinks:
            self.sinks = nn.Parameter(torch.zeros(n))

        self.hook_q = HookPoint()  # [batch, pos, head, d_head]
        self.hook_k = HookPoint()  # [batch, pos, kv_head, d_head]
        self.hook_v = HookPoint()  # [batch, pos, kv_head, d_head]
        self.q_norm = self._qk_norm(n)
        self.k_norm = self._qk_norm(k)
        if spec.rotary is not None:
            self.hook_rot_q = HookPoint()  # [batch, pos, head, d_head]
            self.hook_rot_k = HookPoint()  # [batch, pos, kv_head, d_head], new positions only
        # [batch, head, pos, key_pos]
        self.hook_attn_scores = HookPoint(pos_axis=2, unseen=-math.inf)
        self.hook_pattern = HookPoint(pos_axis=2, unseen=0.0)
        self.hook_z = HookPoint()  # [batch, pos, head, d_head]
        self.hook_result = HookPoint(optional=True)  # [batch, pos, head, d_model]

    def _make_projections(self) -> None:
        """The parameters that make queries, keys and values."""
        n, k, m, h = self.spec.n_heads, self.spec.n_kv_heads, self.spec.d_model, self.spec.d_head
        weights = in_projections((n, k, k), m, h)
        biases = torch.zeros(n + 2 * k, h).split((n, k, k))
        for W_name, b_name, weight, bias in zip(
            self.W_names, self.b_names, weights, biases, strict=True
        ):
            self.register_parameter(W_name, weight)
            self.register_parameter(b_name, nn.Parameter(bias))

    def _qk_norm(self, n_heads: int) -> Norm | Absent:
        spec = self.spec.qk_norm
        if spec is None:
            return Absent()
        if self.spec.qk_norm_joins_heads:
            return FullWidthRMSNorm(spec.widened_to(n_heads * spec.width))
        return build_norm(spec if spec.n_heads is None else replace(spec, n_heads=n_heads))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in LEGACY_BUFFERS:
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name in self.W_names:  # assign=True keeps any layout
            parameter = self._parameters.get(name)
            if parameter is not None:  # parametrised ones are elsewhere
                parameter.data = matmul_ready(parameter.data)

    @property
    def QK(self) -> FactoredMatrix:
        """What each head scores: W_Q W_Kᵀ, from queries' streams to keys', [head, d_model,
        d_model]."""
        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @property
    def OV(self) -> FactoredMatrix:
        """What each head moves: W_V W_O, from where it reads to where it writes, [head, d_model,
        d_model]."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def attn_scale(self) -> float:
        """What scores are divided by."""
        return 1.0 / self.spec.scale

    # -- the sentence --

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch pos *kv_head d_model"],
        value_input: Float[Tensor, "batch pos *kv_head d_model"],
        context: ForwardContext | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """What attention adds to the stream. Inputs have a head axis when they were split by
        head. Without a context: whole texts, nothing cached."""
        spec, context = self.spec, context or ForwardContext.alone(query_input)
        q, k, v = self.projected(query_input, key_input, value_input)
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        if not spec.qk_norm_after_rotary:
            q, k = self.q_norm(q), self.k_norm(k)
        if spec.clip_qkv is not None:
            q, k, v = (x.clamp(-spec.clip_qkv, spec.clip_qkv) for x in (q, k, v))
        if spec.rotary is not None:
            turn = context.turn(spec.rotary)
            q, k = self.hook_rot_q(turn(q)), self.hook_rot_k(turn(k))
        if spec.qk_norm_after_rotary:
            q, k = self.q_norm(q), self.k_norm(k)
        if spec.growth is not None:
            q = (q * context.growth(spec.growth)).to(q.dtype)
        segments = context.key_values(self.layer_id, k.transpose(1, 2), v.transpose(1, 2))
        z = self.hook_z(self.attend(q.transpose(1, 2), segments, context.mask(spec)))
        return self.back_to_stream(z)

    def projected(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch pos *kv_head d_model"],
        value_input: Float[Tensor, "batch pos *kv_head d_model"],
    ) -> tuple[PerHead, PerKeyHead, PerValueHead]:
        """Queries, keys and values of the new positions; by one product where their weights
        adjoin."""
        if self.may_join() and query_input is key_input and key_input is value_input:
            joined = self.joined.kept(self)
            if joined is not None:
                n, kv, d_head = self.spec.n_heads, self.spec.n_kv_heads, self.spec.d_head
                shape = (*query_input.shape[:2], n + 2 * kv, d_head)
                heads = F.linear(query_input, *joined).view(shape)
                q, k, v = heads.split_with_sizes((n, kv, kv), 2)
                return q, k, v
        q = project(query_input, self.W_Q, self.b_Q)
        return q, *self.keys_and_values(key_input, value_input)

    def may_join(self) -> bool:
        """The parts of one product share one memory: whoever keeps the queries should not keep the
        rest with them."""
        return not (self.hook_q.listened or self.hook_k.listened or self.hook_v.listened)

    def keys_and_values(
        self,
        key_input: Float[Tensor, "batch pos *kv_head d_model"],
        value_input: Float[Tensor, "batch pos *kv_head d_model"],
    ) -> tuple[PerKeyHead, PerKeyHead]:
        """Keys and values of the new positions."""
        return project(key_input, self.W_K, self.b_K), project(value_input, self.W_V, self.b_V)

    def attend(
        self, q: HeadsFirst, segments: tuple[Segment, ...], mask: Mask
    ) -> Float[Tensor, "batch pos head d_value"]:
        """Weigh the values. Fused, unless the scores are wanted."""
        if self.hook_attn_scores.listened or self.hook_pattern.listened:
            z = self.explicit(q, segments, mask.bias, mask.dead)
        elif self.spec.softcap is not None or self.spec.sinks:
            z = self.in_blocks(q, segments, mask)
        elif len(segments) > 1:
            z = self.segmented(q, segments, mask)
        else:
            z = self.fused(q, *segments[0], mask)
        return z.transpose(1, 2)

    def back_to_stream(
        self, z: Float[Tensor, "batch pos head d_value"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """Join the heads; each head's part separately when `hook_result` is listened to."""
        if self.hook_result.listened:
            result = torch.einsum("bpnh,nhm->bpnm", z, self.W_O)
            return self.hook_result(result).sum(2) + self.b_O
        return F.linear(z.flatten(2), self.out_matrix.of(self), self.b_O)

    # -- the four ways to weigh --

    def fused(
        self,
        q: HeadsFirst,
        k: Float[Tensor, "batch kv_head key_pos d_head"],
        v: Float[Tensor, "batch kv_head key_pos d_value"],
        mask: Mask,
    ) -> Weighed:
        """One kernel for scores, softmax and the weighted sum."""
        bias = None if mask.is_causal or mask.is_open else mask.finite_bias
        if bias is None and q.shape[2] == 1 and q.shape[1] != k.shape[1]:
            # a single query: the heads that share keys are the rows of one matrix
            grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
            z = F.scaled_dot_product_attention(grouped, k, v, scale=self.spec.scale).view(q.shape)
        else:
            z = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=bias,
                is_causal=mask.is_causal,
                scale=self.spec.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return z if bias is None or mask.dead is None else z.masked_fill(mask.dead, 0.0)

    def segmented(self, q: HeadsFirst, segments: tuple[Segment, ...], mask: Mask) -> Weighed:
        """Each segment weighed by itself, shared ones once for all rows that share them; then they
        count by their sums of exponentials (Hydragen, arXiv 2402.05099)."""
        q = q * self.spec.scale
        ends = accumulate(keys.shape[2] for keys, _ in segments)
        parts = [
            weighed_alone(q, keys, values, mask.bias_over(end - keys.shape[2], end))
            for (keys, values), end in zip(segments, ends, strict=True)
        ]
        shares = torch.stack([log_sum for _, log_sum in parts]).softmax(0)
        z = torch.stack([part for part, _ in parts])
        z = (shares * z).sum(0).to(q.dtype)
        return z if mask.dead is None else z.masked_fill(mask.dead, 0.0)

    def in_blocks(self, q: HeadsFirst, segments: tuple[Segment, ...], mask: Mask) -> Weighed:
        """The explicit steps for some queries at a time, without the keys ahead of them: neither
        memory nor work grows as all queries times all keys."""
        n = q.shape[2]
        size = n if torch.compiler.is_compiling() else QUERIES_AT_A_TIME
        *past, (keys, values) = segments
        z = []
        for start in range(0, max(n, 1), size):
            end = min(start + size, n)
            n_seen = keys.shape[2] - (n - end if mask.looks_back else 0)
            seen = (*past, (keys[:, :, :n_seen], values[:, :, :n_seen]))
            z.append(self.explicit(q[:, :, start:end], seen, *mask.of_queries(start, end)))
        return z[0] if len(z) == 1 else torch.cat(z, 2)

    def explicit(
        self,
        q: HeadsFirst,
        segments: tuple[Segment, ...],
        bias: Float[Tensor, "#batch #head pos _"] | None,
        dead: Bool[Tensor, "#batch 1 pos 1"] | None,
    ) -> Weighed:
        """Scores, softmax and weighted sum as three steps, with the hook points between."""
        q = q * self.spec.scale
        scores = concatenated([scores_against(q, keys) for keys, _ in segments])
        if self.spec.softcap is not None:
            scores = self.spec.softcap * torch.tanh(scores / self.spec.softcap)
        if bias is not None:
            scores += bias[..., : scores.shape[-1]]
        scores = self.hook_attn_scores(scores)
        dead = self.dead_rows(scores, dead)
        if dead is not None:
            scores = scores.masked_fill(dead, 0.0)
        pattern = self.softmax(scores).to(q.dtype)
        if dead is not None:
            pattern = pattern.masked_fill(dead, 0.0)
        pattern = self.hook_pattern(pattern)
        parts = pattern.split([keys.shape[2] for keys, _ in segments], dim=-1)
        z = [weighted_sum(part, values) for part, (_, values) in zip(parts, segments, strict=True)]
        return z[0] if len(z) == 1 else torch.stack(z).sum(0)

    def dead_rows(
        self,
        scores: Float[Tensor, "batch head pos key_pos"],
        padding: Bool[Tensor, "#batch 1 pos 1"] | None,
    ) -> Bool[Tensor, "#batch #head pos 1"] | None:
        """Queries that see nothing: padding, or rows a hook on the scores, or a module in place of
        that point, has hidden altogether."""
        handles = getattr(self.hook_attn_scores, "fwd_hooks", None)
        edited = handles is None or any(not handle.is_listener for handle in handles)
        return scores.isneginf().all(-1, keepdim=True) if edited else padding

    def softmax(
        self, scores: Float[Tensor, "batch head pos key_pos"]
    ) -> Float[Tensor, "batch head pos key_pos"]:
        """Over keys, in fp32 at least; with sinks, each head has one more logit that gets
        weight."""
        wide = at_least_float32(scores.dtype)
        if not self.spec.sinks:
            return scores.softmax(-1, dtype=wide)
        sinks = self.sinks.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores.to(wide), sinks), -1).softmax(-1)[..., :-1]


class GroupedQueryAttention(Attention):
    """Attention whose key and value heads serve several query heads each (arXiv 2305.13245).

    The parameters are `_W_K`, `_W_V` [kv_head, d_model, d_head] and `_b_K`, `_b_V`; `W_K` and the
    others repeat each of them for its query heads, as fresh tensors.
    """

    prefix = "_"
    _W_K: nn.Parameter
    _W_V: nn.Parameter
    _b_K: nn.Parameter
    _b_V: nn.Parameter

    @property
    def W_K(self) -> Float[Tensor, "head d_model d_head"]:
        return self._per_query_head(self._W_K)

    @property
    def W_V(self) -> Float[Tensor, "head d_model d_head"]:
        return self._per_query_head(self._W_V)

    @property
    def b_K(self) -> Float[Tensor, "head d_head"]:
        return self._per_query_head(self._b_K)

    @property
    def b_V(self) -> Float[Tensor, "head d_head"]:
        return self._per_query_head(self._b_V)

    def may_join(self) -> bool:
        return super().may_join() and not self.cfg.ungroup_grouped_query_attention

    def _per_query_head(
        self, weight: Float[Tensor, "kv_head *rest"]
    ) -> Float[Tensor, "head *rest"]:
        return weight.repeat_interleave(self.spec.n_heads // self.spec.n_kv_heads, dim=0)

    def keys_and_values(
        self,
        key_input: Float[Tensor, "batch pos *kv_head d_model"],
        value_input: Float[Tensor, "batch pos *kv_head d_model"],
    ) -> tuple[PerKeyHead, PerKeyHead]:
        onto = self.ungrouped_onto if self.cfg.ungroup_grouped_query_attention else project
        k = onto(key_input, self._W_K, self._b_K)
        return k, onto(value_input, self._W_V, self._b_V)

    def ungrouped_onto(
        self,
        x: Float[Tensor, "batch pos *head d_in"],
        weight: Float[Tensor, "kv_head d_in d_out"],
        bias: Float[Tensor, "kv_head d_out"],
    ) -> Float[Tensor, "batch pos head d_out"]:
        """A key or value for each query head, by weights that are not copied for it."""
        n_each = self.spec.n_heads // self.spec.n_kv_heads
        if x.ndim == 3:
            return project(x, weight, bias).repeat_interleave(n_each, 2)
        each = x.unflatten(2, (-1, n_each))
        out = torch.einsum("bpngm,nmh->bpngh", each, weight) + bias[:, None]
        return out.flatten(2, 3)


class LatentAttention(Attention):
    """Attention whose keys and values are made from a narrow latent of each token (DeepSeek-V2,
    arXiv 2405.04434).

        latent = norm(x W_KV_down + b_KV_down)                    [batch, pos, kv_rank]
        k      = [latent W_K, x W_K_rotary + b_K_rotary]          the second part is shared by heads
        v      = latent W_V

    and queries from `norm(x W_Q_down + b_Q_down)` where the spec has a rank for them. What is
    cached are keys and values, as everywhere: the hook points stay those of attention.
    """

    def _make_projections(self) -> None:
        spec, latent = self.spec, self.spec.latent
        assert latent is not None
        assert spec.rotary is not None
        n, m, turning = spec.n_heads, spec.d_model, spec.rotary.dim
        self.W_KV_down = transposed(m, latent.kv_rank)
        self.b_KV_down = nn.Parameter(torch.zeros(latent.kv_rank))
        self.W_K_rotary = transposed(m, turning)
        self.b_K_rotary = nn.Parameter(torch.zeros(turning))
        self.hook_kv_latent = HookPoint()  # [batch, pos, kv_rank]
        self.kv_latent_norm = RMSNorm(NormSpec("RMS", latent.kv_rank, latent.eps))
        (self.W_K,) = in_projections((n,), latent.kv_rank, spec.d_head - turning)
        (self.W_V,) = in_projections((n,), latent.kv_rank, latent.d_value)
        if latent.q_rank is not None:
            self.W_Q_down = transposed(m, latent.q_rank)
            self.b_Q_down = nn.Parameter(torch.zeros(latent.q_rank))
            self.hook_q_latent = HookPoint()  # [batch, pos, q_rank]
            self.q_latent_norm = RMSNorm(NormSpec("RMS", latent.q_rank, latent.eps))
        (self.W_Q,) = in_projections((n,), latent.q_rank or m, spec.d_head)
        own_bias = nn.Parameter(torch.zeros(n, spec.d_head)) if latent.q_rank is None else None
        self.register_parameter("b_Q", own_bias)

    def projected(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch pos *head d_model"],
        value_input: Float[Tensor, "batch pos *head d_model"],
    ) -> tuple[PerHead, PerHead, Float[Tensor, "batch pos head d_value"]]:
        latent = self.spec.latent
        assert latent is not None
        if latent.q_rank is not None:
            down = F.linear(query_input, self.W_Q_down.T, self.b_Q_down)
            query_input = self.hook_q_latent(self.q_latent_norm(down))
        of_keys = self.hook_kv_latent(self.kv_latent(key_input))
        of_values = of_keys if value_input is key_input else self.kv_latent(value_input)
        k = project(of_keys, self.W_K)
        shared = F.linear(key_input, self.W_K_rotary.T, self.b_K_rotary)
        shared = shared if shared.ndim == 4 else shared[:, :, None].expand(*k.shape[:3], -1)
        return (
            project(query_input, self.W_Q, self.b_Q),
            torch.cat((k, shared), -1),
            project(of_values, self.W_V),
        )

    @property
    def QK(self) -> FactoredMatrix:
        raise ValueError(NO_MATRIX)

    @property
    def OV(self) -> FactoredMatrix:
        raise ValueError(NO_MATRIX)

    def kv_latent(
        self, x: Float[Tensor, "batch pos *head d_model"]
    ) -> Float[Tensor, "batch pos *head kv_rank"]:
        """What keys and values are made from."""
        return self.kv_latent_norm(F.linear(x, self.W_KV_down.T, self.b_KV_down))


def build_attention(cfg: HookedTransformerConfig, spec: AttentionSpec, layer: int) -> Attention:
    """The class for a spec."""
    if spec.latent is not None:
        return LatentAttention(cfg, spec, layer)
    kind = GroupedQueryAttention if spec.grouped else Attention
    return kind(cfg, spec, layer)


def project(
    x: Float[Tensor, "batch pos *head d_in"],
    weight: Float[Tensor, "head d_in d_out"],
    bias: Float[Tensor, "head d_out"] | None = None,
) -> Float[Tensor, "batch pos head d_out"]:
    """x onto every head; when x has a head axis, each head reads its own."""
    if x.ndim == 4:
        out = torch.einsum("bpnm,nmh->bpnh", x, weight)
        return out if bias is None else out + bias
    flat = None if bias is None else bias.flatten()
    return F.linear(x, in_matrix(weight), flat).view(*x.shape[:2], *weight.shape[::2])


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """What statistics are kept in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def weighed_alone(
    q: HeadsFirst,
    keys: Float[Tensor, "row kv_head key_pos d_head"],
    values: Float[Tensor, "row kv_head key_pos d_value"],
    bias: Float[Tensor, "#batch #head pos key_pos"] | None,
) -> tuple[Weighed, Float[Tensor, "batch head pos 1"]]:
    """The values of one segment, weighed as if there were no others, and the logarithm of the sum
    of its exponentials: what it counts beside others.

    A query that sees nothing here gets any finite values, which count nothing.
    """
    batch, heads, pos, _ = q.shape
    scores = grouped_rows(q, keys) @ keys.transpose(-1, -2)
    if bias is not None:
        scores = scores + grouped_rows(bias.expand(batch, heads, -1, -1), keys)
        scores = scores.clamp(min=torch.finfo(scores.dtype).min)
    pattern = scores.softmax(-1, dtype=at_least_float32(scores.dtype))
    # the largest weight is exp(its score) over the sum: cheaper than a second pass of exponentials
    log_sum = scores.amax(-1, keepdim=True) - pattern.amax(-1, keepdim=True).log()
    z = pattern.to(q.dtype) @ values
    return ungrouped(z, batch, heads, pos), ungrouped(log_sum, batch, heads, pos)


def scores_against(
    q: HeadsFirst, keys: Float[Tensor, "row kv_head key_pos d_head"]
) -> Float[Tensor, "batch head pos key_pos"]:
    """q·k. The keys of a row serve all rows that share it as one product, without being
    expanded."""
    batch, heads, pos, _ = q.shape
    product = grouped_rows(q, keys) @ keys.transpose(-1, -2)
    return ungrouped(product, batch, heads, pos)


def weighted_sum(
    pattern: Float[Tensor, "batch head pos key_pos"],
    values: Float[Tensor, "row kv_head key_pos d_value"],
) -> Weighed:
    """The values each query looks at, summed by its pattern."""
    batch, heads, pos, _ = pattern.shape
    return ungrouped(grouped_rows(pattern, values) @ values, batch, heads, pos)


def grouped_rows(
    x: Float[Tensor, "batch head pos inner"], shared: Float[Tensor, "row kv_head key_pos _"]
) -> Float[Tensor, "row kv_head queries inner"]:
    """All queries that read the same keys, as the rows of one matrix: those of the heads of a
    group, and of the neighbouring batch rows that share a row of keys."""
    batch, heads, pos, inner = x.shape
    rows, kv_heads = shared.shape[:2]
    in_group = heads // kv_heads * pos  # not -1, which nobody can tell of an empty batch
    if rows == batch:
        return x if heads == kv_heads else x.reshape(batch, kv_heads, in_group, inner)
    by_row = x.reshape(rows, batch // rows, kv_heads, in_group, inner).transpose(1, 2)
    return by_row.reshape(rows, kv_heads, batch // rows * in_group, inner)


def ungrouped(
    x: Float[Tensor, "row kv_head queries inner"], batch: int, heads: int, pos: int
) -> Float[Tensor, "batch head pos inner"]:
    """The inverse of `grouped_rows`."""
    rows, kv_heads, _, inner = x.shape
    if rows == batch:
        return x.view(batch, heads, pos, inner)
    by_row = x.view(rows, kv_heads, batch // rows, heads // kv_heads * pos, inner).transpose(1, 2)
    return by_row.reshape(batch, heads, pos, inner)


def concatenated(
    parts: list[Float[Tensor, "batch head pos _"]],
) -> Float[Tensor, "batch head pos key_pos"]:
    """Parts along the key axis, joined; a single part is itself."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
