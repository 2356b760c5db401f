"""The parts a transformer is made of, each built from its frozen spec."""

from transformer_lens_lite.components.attention import Attention, GroupedQueryAttention
from transformer_lens_lite.components.block import TransformerBlock
from transformer_lens_lite.components.embed import Embed, PosEmbed, TiedUnembed, Unembed
from transformer_lens_lite.components.mlp import MLP, GatedMLP
from transformer_lens_lite.components.norm import LayerNorm, LayerNormPre, RMSNorm, RMSNormPre

__all__ = [
    "MLP",
    "Attention",
    "Embed",
    "GatedMLP",
    "GroupedQueryAttention",
    "LayerNorm",
    "LayerNormPre",
    "PosEmbed",
    "RMSNorm",
    "RMSNormPre",
    "TiedUnembed",
    "TransformerBlock",
    "Unembed",
]
