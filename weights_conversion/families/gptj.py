"""GPT-J: attention and MLP side by side behind one norm; rotary positions on adjacent channels."""

from collections.abc import Callable
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import gpt2
from weights_conversion.fields import Reading
from weights_conversion.parts import ends, layer_norm, mlp, out_projection, projections, shared_norm
from weights_conversion.table import Architecture, Row

BLOCK = gpt2.BLOCK
DEFAULTS: dict[str, Any] = {
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "n_positions": 2048,
    "vocab_size": 50400,
    "tied": False,
}
SCALING = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx")


def read_config(reading: Reading) -> dict[str, Any]:
    for name in SCALING:  # Hugging Face's class does not look at them
        reading.require(name, name == SCALING[0], "attention is always scaled by sqrt(d_head)")
    return {
        **gpt2.read_config(reading, **DEFAULTS),
        "positional_embedding_type": "rotary",
        "rotary_dim": reading.size("rotary_dim", 64),
        "rotary_adjacent_pairs": True,
        "parallel_attn_mlp": True,
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = gpt2.write_config(cfg, needs)
    return {
        **{name: value for name, value in written.items() if name not in SCALING},
        "rotary_dim": cfg.rotary_dim,
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return [
        *ends(cfg, "transformer.wte", head_bias=True),
        *shared_norm(f"{BLOCK}ln_1"),
        *projections(cfg, f"{BLOCK}attn.", bias=False),
        *out_projection(f"{BLOCK}attn.out_proj", bias=False),
        *mlp(f"{BLOCK}mlp.fc_in", f"{BLOCK}mlp.fc_out"),
        *layer_norm("transformer.ln_f", "ln_final"),
    ]


GPTJ = Architecture(
    model_type="gptj",
    hf_class="GPTJForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    ignore=gpt2.GPT2.ignore,
    cosmetic={"rotary": "positions are always rotary"},
    aliases=gpt2.GPT2.aliases,
    optional_prefix="transformer.",
)
ARCHITECTURES = (GPTJ,)
