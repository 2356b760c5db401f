"""Rows that many families have in common: norms, projections, MLPs and heads of torch's layers."""

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.fields import Reading
from weights_conversion.table import Map, Row, Tied, key_value, optional

ATTN, MLP = "blocks.{i}.attn.", "blocks.{i}.mlp."


def layer_norm(hf: str, native: str, shape: str = "m") -> list[Row]:
    """Weight and bias of a LayerNorm."""
    return [Map(f"{hf}.weight", f"{native}.w", shape), Map(f"{hf}.bias", f"{native}.b", shape)]


def shared_norm(hf: str) -> list[Row]:
    """The one LayerNorm that attention and MLP of a parallel block read through."""
    return [
        Map(f"{hf}.weight", ("blocks.{i}.ln1.w", "blocks.{i}.ln2.w"), "m", copies=True),
        Map(f"{hf}.bias", ("blocks.{i}.ln1.b", "blocks.{i}.ln2.b"), "m", copies=True),
    ]


def qkv(cfg: HookedTransformerConfig, kind: str) -> tuple[str, str, str]:
    """The parameters that share a fused matrix (`kind` "W") or bias ("b")."""
    return f"{ATTN}{kind}_Q", key_value(cfg, f"{kind}_K"), key_value(cfg, f"{kind}_V")


def grouped_qkv(cfg: HookedTransformerConfig, hf: str, kind: str) -> Map:
    """One matrix (`kind` "W") or bias ("b") in which the queries of a group stand before the key
    and the value that they share."""
    name, m = {"W": ("weight", " m"), "b": ("bias", "")}[kind]
    pieces = (f"g k{m} h -> (k g){m} h", *[f"1 k{m} h -> k{m} h"] * 2)
    pattern, cut = f"(k a h){m} -> a k{m} h", ("g", "1", "1")
    return Map(f"{hf}.{name}", qkv(cfg, kind), pattern, cut=cut, pieces=pieces)


def projections(cfg: HookedTransformerConfig, hf: str, bias: bool) -> list[Row]:
    """q_proj, k_proj and v_proj."""
    rows: list[Row] = []
    for x, W, b, n in zip("qkv", qkv(cfg, "W"), qkv(cfg, "b"), "nkk", strict=True):
        rows += [
            Map(f"{hf}{x}_proj.weight", W, f"({n} h) m -> {n} m h"),
            optional(bias, Map(f"{hf}{x}_proj.bias", b, f"({n} h) -> {n} h")),
        ]
    return rows


def out_projection(hf: str, bias: bool) -> list[Row]:
    """From the heads back to the stream."""
    return [
        Map(f"{hf}.weight", f"{ATTN}W_O", "m (n h) -> n h m"),
        optional(bias, Map(f"{hf}.bias", f"{ATTN}b_O", "m")),
    ]


def mlp(hf_in: str, hf_out: str, bias: bool = True) -> list[Row]:
    """A plain MLP of two linear layers."""
    return [
        Map(f"{hf_in}.weight", f"{MLP}W_in", "f m -> m f"),
        optional(bias, Map(f"{hf_in}.bias", f"{MLP}b_in", "f")),
        Map(f"{hf_out}.weight", f"{MLP}W_out", "m f -> f m"),
        optional(bias, Map(f"{hf_out}.bias", f"{MLP}b_out", "m")),
    ]


def ends(
    cfg: HookedTransformerConfig, embed: str, head: str = "lm_head", head_bias: bool = False
) -> list[Row]:
    """Embedding and head, which are one tensor in tied models."""
    tied = Tied(f"{head}.weight", f"{embed}.weight", "unembed.W_U")
    own = Map(f"{head}.weight", "unembed.W_U", "u m -> m u")
    return [
        Map(f"{embed}.weight", "embed.W_E", "v m"),
        tied if cfg.tie_word_embeddings else own,
        optional(head_bias, Map(f"{head}.bias", "unembed.b_U", "u")),
    ]


def head_size(reading: Reading, width: str, heads: str) -> tuple[int, int, int]:
    """(d_model, n_heads, d_head) of a family whose heads divide the width."""
    d_model, n_heads = reading.size(width), reading.size(heads)
    if d_model % n_heads:
        raise ValueError(
            f"{reading.where}: {width}={d_model} is not a multiple of {heads}={n_heads}"
        )
    return d_model, n_heads, d_model // n_heads
