"""One layer: attention and MLP, each reading the residual stream and adding to it."""

from jaxtyping import Float
from torch import Tensor, nn

from transformer_lens_lite.components.attention import build_attention
from transformer_lens_lite.components.context import ForwardContext
from transformer_lens_lite.components.mlp import MLP, GatedMLP
from transformer_lens_lite.components.moe import MixtureOfExperts
from transformer_lens_lite.components.norm import build_norm
from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.hooks import Absent, Component, HookPoint
from transformer_lens_lite.specs import BlockSpec, MLPSpec, MoESpec

Residual = Float[Tensor, "batch pos d_model"]


class TransformerBlock(Component):
    """The residual sentence.

        sequential                          parallel
        resid_pre ──┬───────────┐           resid_pre ──┬──────────┬───────┐
                    └ ln1 attn ─+           (both read  └ ln1 attn ┤       │
        resid_mid ──┬───────────┘            resid_pre) └ ln2 mlp ─┴───────+
                    └ ln2 mlp ──+           resid_post ────────────────────┘
        resid_post ─────────────┘

    `hook_attn_out` and `hook_mlp_out` are what is added, after any norm or scale behind the
    sublayer, so resid_pre + attn_out = resid_mid and resid_mid + mlp_out = resid_post hold exactly
    (`StreamNormBlock` and `SkipNormBlock` are the exceptions).
    """

    def __init__(self, cfg: HookedTransformerConfig, spec: BlockSpec) -> None:
        super().__init__()
        self.cfg = cfg
        self.spec = spec
        self.hook_attn_in = HookPoint(optional=True)  # [batch, pos, head, d_model]
        self.hook_q_input = HookPoint(optional=True)  # [batch, pos, head, d_model]
        self.hook_k_input = HookPoint(optional=True)  # [batch, pos, kv_head, d_model]
        self.hook_v_input = HookPoint(optional=True)  # [batch, pos, kv_head, d_model]
        self.ln1 = build_norm(spec.attention_norm)
        self.attn = build_attention(cfg, spec.attention, spec.layer)
        if spec.post_norm is not None:
            self.ln1_post = build_norm(spec.post_norm)
        self.hook_resid_pre = HookPoint()  # [batch, pos, d_model], like all that follow
        self.hook_attn_out = HookPoint()
        if spec.mlp is not None:
            if not spec.parallel:
                self.hook_resid_mid = HookPoint()
            self.hook_mlp_in = HookPoint(optional=True)
            self.ln2 = build_norm(spec.norm)
            self.mlp = build_mlp(cfg, spec.mlp)
            if spec.post_norm is not None:
                self.ln2_post = build_norm(spec.post_norm)
            self.hook_mlp_out = HookPoint()
        self.hook_resid_post = HookPoint()

    def forward(self, resid_pre: Residual, context: ForwardContext | None = None) -> Residual:
        """[batch, pos, d_model] in and out. Without a context: whole texts, nothing cached."""
        context = context or ForwardContext.alone(resid_pre)
        resid_pre = self.before_attention(self.hook_resid_pre(resid_pre))
        attn_out = self.hook_attn_out(self.scaled(self.attention_branch(resid_pre, context)))
        resid_mid = self.after_attention(resid_pre + attn_out)
        if self.spec.mlp is None:
            return self.hook_resid_post(resid_mid)
        if self.spec.parallel:
            mlp_in = resid_pre
        else:
            mlp_in = resid_mid = self.before_mlp(self.hook_resid_mid(resid_mid))
        if self.hook_mlp_in.listened:
            mlp_in = self.hook_mlp_in(mlp_in.clone())
        mlp_out = self.hook_mlp_out(self.scaled(self.mlp_branch(mlp_in)))
        return self.hook_resid_post(self.after_mlp(resid_mid + mlp_out))

    def attention_branch(self, x: Residual, context: ForwardContext) -> Residual:
        """Norm, attention, and the norm behind it where there is one."""
        out = self.attn(*self.attention_inputs(x, self.ln1, context), context)
        return out if self.spec.post_norm is None else self.ln1_post(out)

    def mlp_branch(self, x: Residual) -> Residual:
        """Norm, MLP, and the norm behind it where there is one."""
        out = self.mlp(self.ln2(x))
        return out if self.spec.post_norm is None else self.ln2_post(out)

    def before_attention(self, x: Residual) -> Residual:
        """What becomes of the stream before attention reads it and adds to it: nothing, most
        often."""
        return x

    def before_mlp(self, x: Residual) -> Residual:
        """The same before the MLP."""
        return x

    def after_attention(self, x: Residual) -> Residual:
        """What becomes of the stream once attention has added to it: nothing, most often."""
        return x

    def after_mlp(self, x: Residual) -> Residual:
        """The same after the MLP."""
        return x

    def scaled(self, out: Residual) -> Residual:
        """Times the residual multiplier."""
        return out if self.spec.residual_scale == 1.0 else out * self.spec.residual_scale

    # -- what queries, keys and values are made from --

    def attention_inputs(
        self, x: Residual, norm: nn.Module, context: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The normalised stream, three times; split by head when somebody listens to the split
        inputs."""
        if (
            self.hook_attn_in.listened
            or self.hook_q_input.listened
            or self.hook_k_input.listened
            or self.hook_v_input.listened
        ):
            q_in, k_in, v_in = (norm(part) for part in self.split_inputs(x))
        else:
            q_in = k_in = v_in = norm(x)
        if context.shortformer_pos_embed is not None:
            positions = context.shortformer_pos_embed
            positions = positions[:, :, None] if q_in.ndim == 4 else positions
            q_in, k_in = q_in + positions, k_in + positions
        return q_in, k_in, v_in

    def split_inputs(self, x: Residual) -> tuple[Tensor, Tensor, Tensor]:
        """A copy of the stream for every head of queries, keys and values, before the norm."""
        attention = self.spec.attention
        n_heads, n_kv_heads = attention.n_heads, attention.n_kv_heads
        if self.cfg.ungroup_grouped_query_attention:
            n_kv_heads = n_heads
        if self.hook_attn_in.listened:
            if n_kv_heads != n_heads:
                raise ValueError(
                    f"{self.hook_attn_in.name} has one input per query head, but keys and "
                    "values have "
                    f"{n_kv_heads} of {n_heads} heads; use hook_q_input, hook_k_input, "
                    "hook_v_input, "
                    "or set_ungroup_grouped_query_attention(True)"
                )
            shared = self.hook_attn_in(per_head(x, n_heads).clone())
            q_in, k_in, v_in = shared, shared, shared
        else:
            q_in, k_in = per_head(x, n_heads), per_head(x, n_kv_heads)
            v_in = k_in
        return (
            self.visited(self.hook_q_input, q_in),
            self.visited(self.hook_k_input, k_in),
            self.visited(self.hook_v_input, v_in),
        )

    @staticmethod
    def visited(point: nn.Module, x: Tensor) -> Tensor:
        """Through a hook point, or a module in its place, on a copy: an in-place edit stays with
        this input."""
        return point(x.clone()) if point.listened else x


class PostNormBlock(TransformerBlock):
    """A block whose norms stand only behind its sublayers: x + ln1(attn(x)), then x +
    ln2(mlp(x))."""

    def attention_branch(self, x: Residual, context: ForwardContext) -> Residual:
        return self.ln1(self.attn(*self.attention_inputs(x, Absent(), context), context))

    def mlp_branch(self, x: Residual) -> Residual:
        return self.ln2(self.mlp(x))


class BareBranchBlock(TransformerBlock):
    """A block whose sublayers read the stream as it is: norms hold the stream itself."""

    def attention_branch(self, x: Residual, context: ForwardContext) -> Residual:
        return self.attn(*self.attention_inputs(x, Absent(), context), context)

    def mlp_branch(self, x: Residual) -> Residual:
        return self.mlp(x)


class StreamNormBlock(BareBranchBlock):
    """Norms after each addition (arXiv 1706.03762): resid_mid = ln1(resid_pre + attn_out),
    resid_post = ln2(resid_mid + mlp_out)."""

    def after_attention(self, x: Residual) -> Residual:
        return self.ln1(x)

    def after_mlp(self, x: Residual) -> Residual:
        return self.ln2(x)


class SkipNormBlock(BareBranchBlock):
    """Norms before each sublayer, on what goes past it as well (BLOOM's
    `apply_residual_connection_post_layernorm`): resid_mid = ln1(resid_pre) + attn_out,
    resid_post = ln2(resid_mid) + mlp_out."""

    def before_attention(self, x: Residual) -> Residual:
        return self.ln1(x)

    def before_mlp(self, x: Residual) -> Residual:
        return self.ln2(x)


def per_head(x: Residual, n_heads: int) -> Float[Tensor, "batch pos head d_model"]:
    """The stream once per head: a view, expanded."""
    return x[:, :, None].expand(-1, -1, n_heads, -1)


def build_mlp(cfg: HookedTransformerConfig, spec: MLPSpec | MoESpec) -> MLP | MixtureOfExperts:
    """The module for a spec: the one place a new kind is added to."""
    if isinstance(spec, MoESpec):
        return MixtureOfExperts(cfg, spec)
    return GatedMLP(cfg, spec) if spec.gated else MLP(cfg, spec)


def build_block(cfg: HookedTransformerConfig, spec: BlockSpec) -> TransformerBlock:
    """The class whose norms stand where the spec says."""
    kinds = {"post": PostNormBlock, "stream": StreamNormBlock, "skip": SkipNormBlock}
    return kinds.get(spec.norm_place, TransformerBlock)(cfg, spec)
