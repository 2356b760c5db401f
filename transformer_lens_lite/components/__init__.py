"""The parts a transformer is made of, each built from its frozen spec."""

from transformer_lens_lite.components.attention import Attention, GroupedQueryAttention
from transformer_lens_lite.components.block import TransformerBlock
from transformer_lens_lite.components.embed import (
    Embed,
    PosEmbed,
    TiedUnembed,
    TokenTypeEmbed,
    Unembed,
)
from transformer_lens_lite.components.mlp import MLP, GatedMLP
from transformer_lens_lite.components.moe import MixtureOfExperts
from transformer_lens_lite.components.norm import LayerNorm, LayerNormPre, RMSNorm, RMSNormPre
from transformer_lens_lite.hooks import Component

# classic names: what attention, and what may stand at `block.mlp`, is an instance of
AbstractAttention = Attention
CanBeUsedAsMLP = Component
MoE = MixtureOfExperts

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
