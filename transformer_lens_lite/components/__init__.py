"""The parts a transformer is made of. Here they are built from a config alone; a model builds those
in the files beside this one, each from its frozen spec."""

from transformer_lens_lite.components.alone import (
    MLP,
    Attention,
    Embed,
    GatedMLP,
    GroupedQueryAttention,
    LayerNorm,
    LayerNormPre,
    MoE,
    PosEmbed,
    RMSNorm,
    RMSNormPre,
    TransformerBlock,
    Unembed,
)
from transformer_lens_lite.components.attention import Attention as AbstractAttention
from transformer_lens_lite.components.embed import TiedUnembed, TokenTypeEmbed
from transformer_lens_lite.components.moe import MixtureOfExperts
from transformer_lens_lite.hooks import Component

# a classic name: what may stand at `block.mlp` is an instance of
CanBeUsedAsMLP = Component

__all__ = [
    "MLP",
    "AbstractAttention",
    "Attention",
    "CanBeUsedAsMLP",
    "Embed",
    "GatedMLP",
    "GroupedQueryAttention",
    "LayerNorm",
    "LayerNormPre",
    "MixtureOfExperts",
    "MoE",
    "PosEmbed",
    "RMSNorm",
    "RMSNormPre",
    "TiedUnembed",
    "TokenTypeEmbed",
    "TransformerBlock",
    "Unembed",
]
