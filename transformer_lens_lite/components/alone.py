"""Components as they are built by themselves: from a config, or a dictionary of one.

    MLP(cfg)    LayerNorm(cfg, length=64)    Attention(cfg, "local", layer_id=2)

A model's own parts count as instances of these classes. They may be subclassed and put in their
place.
"""

from dataclasses import replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from transformer_lens_lite.components import attention, block, embed, mlp, moe, norm
from transformer_lens_lite.components.context import ForwardContext
from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.specs import AttentionSpec, BlockSpec, MLPSpec, MoESpec, NormSpec

Config = HookedTransformerConfig | dict[str, Any]


# kinds that share code and are not each other's
BUT_NOT: dict[str, type] = {
    "Attention": attention.GroupedQueryAttention,
    "LayerNormPre": norm.LayerNorm,
    "MLP": mlp.GatedMLP,
    "RMSNormPre": norm.RMSNorm,
}


class BuiltAlone(type):
    """A class that only differs from its base in how it is made: instances of the base are its
    own. What is made has the config's dtype and is on its device."""

    def __call__(cls, cfg: Config, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(cfg, *args, **kwargs)
        whole = unwrap(cfg)
        return made.to(device=whole.device, dtype=whole.dtype)

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, other: type) -> bool:
        if not cls.is_from_here:
            return type.__subclasscheck__(cls, other)
        another = BUT_NOT.get(cls.__name__)
        is_another = another is not None and issubclass(other, another)
        return issubclass(other, cls.__bases__[0]) and not is_another

    @property
    def is_from_here(cls) -> bool:
        """Whether it is defined here, and no client's own."""
        return cls.__module__ == __name__


def unwrap(cfg: Config) -> HookedTransformerConfig:
    """The config itself."""
    return HookedTransformerConfig.unwrap(cfg)


def norm_of(cfg: Config, kind: str, length: int | None = None) -> NormSpec:
    """The spec of a norm of this kind, of a width of its own if it is given."""
    spec = unwrap(cfg).norm_spec(width=length, kind=kind)
    assert spec is not None  # a kind was named
    return spec


def attention_of(cfg: Config, attn_type: str, layer_id: int | None) -> AttentionSpec:
    """The spec of a layer's attention, "global" or "local" whatever the config has there."""
    cfg = unwrap(cfg)
    if attn_type not in ("global", "local"):
        raise ValueError(f"attn_type must be 'global' or 'local', got {attn_type!r}")
    if attn_type == "local" and cfg.window_size is None:
        raise ValueError("attn_type='local' needs a config with window_size")
    twin = cfg.copied()
    twin.use_local_attn = attn_type == "local"
    twin.attn_types = [attn_type] * cfg.n_layers if attn_type == "local" else None
    return twin.block_specs()[layer_id or 0].attention


def mlp_of(cfg: Config, gated: bool) -> tuple[HookedTransformerConfig, MLPSpec]:
    """The config, and the spec of its plain or gated MLP."""
    twin = unwrap(cfg).copied()
    twin.gated_mlp, twin.num_experts, twin.experts_per_token = gated, None, None
    twin.expert_layers, twin.attn_only = None, False
    spec = twin.block_specs()[0].mlp
    assert isinstance(spec, MLPSpec)  # without experts
    return unwrap(cfg), spec


class Embed(embed.Embed, metaclass=BuiltAlone):
    """`Embed(cfg)`."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(unwrap(cfg))


class PosEmbed(embed.PosEmbed, metaclass=BuiltAlone):
    """`PosEmbed(cfg)`; called with tokens, and how many came before them."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(unwrap(cfg))

    def forward(
        self,
        tokens: Any,
        past_kv_pos_offset: int = 0,
        attention_mask: Int[Tensor, "batch key_pos"] | None = None,
    ) -> Float[Tensor, "row pos d_model"]:
        """The rows of `W_pos` for these tokens; zero for padding."""
        if isinstance(tokens, ForwardContext):  # in a model
            return super().forward(tokens)
        batch, n_new = tokens.shape
        where = (tokens.device, self.W_pos.dtype, past_kv_pos_offset, attention_mask)
        return super().forward(ForwardContext(batch, n_new, *where)).expand(batch, -1, -1)


class Unembed(embed.Unembed, metaclass=BuiltAlone):
    """`Unembed(cfg)`."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(unwrap(cfg))


class LayerNorm(norm.LayerNorm, metaclass=BuiltAlone):
    """`LayerNorm(cfg, length=None)`; length: another width than d_model."""

    def __init__(self, cfg: Config, length: int | None = None) -> None:
        super().__init__(norm_of(cfg, "LN", length))


class LayerNormPre(norm.LayerNormPre, metaclass=BuiltAlone):
    """`LayerNormPre(cfg)`."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(norm_of(cfg, "LNPre"))


class RMSNorm(norm.RMSNorm, metaclass=BuiltAlone):
    """`RMSNorm(cfg, length=None)`; length: another width than d_model."""

    def __init__(self, cfg: Config, length: int | None = None) -> None:
        super().__init__(norm_of(cfg, "RMS", length))


class RMSNormPre(norm.RMSNormPre, metaclass=BuiltAlone):
    """`RMSNormPre(cfg)`."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(norm_of(cfg, "RMSPre"))


class Attention(attention.Attention, metaclass=BuiltAlone):
    """`Attention(cfg, attn_type="global", layer_id=None)`."""

    def __init__(self, cfg: Config, attn_type: str = "global", layer_id: int | None = None) -> None:
        spec = attention_of(cfg, attn_type, layer_id)
        spec = replace(spec, n_kv_heads=spec.n_heads, grouped=False)
        super().__init__(unwrap(cfg), spec, layer_id or 0)


class GroupedQueryAttention(attention.GroupedQueryAttention, metaclass=BuiltAlone):
    """`GroupedQueryAttention(cfg, attn_type="global", layer_id=None)`; the config says how many
    heads keys and values have."""

    def __init__(self, cfg: Config, attn_type: str = "global", layer_id: int | None = None) -> None:
        if unwrap(cfg).n_key_value_heads is None:
            raise ValueError("GroupedQueryAttention needs a config with n_key_value_heads")
        super().__init__(unwrap(cfg), attention_of(cfg, attn_type, layer_id), layer_id or 0)


class MLP(mlp.MLP, metaclass=BuiltAlone):
    """`MLP(cfg)`."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(*mlp_of(cfg, gated=False))


class GatedMLP(mlp.GatedMLP, metaclass=BuiltAlone):
    """`GatedMLP(cfg)`."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(*mlp_of(cfg, gated=True))


class MoE(moe.MixtureOfExperts, metaclass=BuiltAlone):
    """`MoE(cfg)`; the config says how many experts there are."""

    def __init__(self, cfg: Config) -> None:
        spec = next((b.mlp for b in specs_of(cfg) if isinstance(b.mlp, MoESpec)), None)
        if spec is None:
            raise ValueError("MoE needs a config with num_experts and experts_per_token")
        super().__init__(unwrap(cfg), spec)


class TransformerBlock(block.TransformerBlock, metaclass=BuiltAlone):
    """`TransformerBlock(cfg, block_index)`; its norms stand in front of its sublayers."""

    def __init__(self, cfg: Config, block_index: int) -> None:
        spec = specs_of(cfg)[block_index]
        if spec.norm_place not in ("pre", "both"):
            raise ValueError(
                f"norm_place={spec.norm_place!r}: such blocks are made by "
                "transformer_lens_lite.components.block.build_block"
            )
        super().__init__(unwrap(cfg), spec)


def specs_of(cfg: Config) -> tuple[BlockSpec, ...]:
    """What each layer is built from."""
    return unwrap(cfg).block_specs()
