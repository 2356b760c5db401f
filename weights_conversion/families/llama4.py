"""Llama 4, its text model: chunks of attention, layers that do not turn, experts fed by weight."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.experts import EXPERT, router, shared_expert, with_experts
from weights_conversion.families import llama
from weights_conversion.families.llama import BLOCK
from weights_conversion.families.mixtral import TRAINING_ONLY
from weights_conversion.fields import Reading
from weights_conversion.table import Map, Row

MOE = f"{BLOCK}feed_forward."
# Hugging Face's "1" in no_rope_layers is a layer that does turn
TYPES = {"chunked_attention": "local", "full_attention": "global"}


def sparse_layers(reading: Reading) -> list[bool]:
    n_layers, step = reading.size("num_hidden_layers"), reading.size("interleave_moe_layer_step", 1)
    listed = reading.raw("moe_layers")
    if listed is None:
        listed = range(step - 1, n_layers, step)
    return [layer in listed for layer in range(n_layers)]


def turning_layers(reading: Reading) -> list[bool]:
    n_layers, interval = (
        reading.size("num_hidden_layers"),
        reading.size("no_rope_layer_interval", 4),
    )
    listed = reading.raw("no_rope_layers") or [
        (layer + 1) % interval != 0 for layer in range(n_layers)
    ]
    return [bool(each) for each in listed]


def read_config(reading: Reading) -> dict[str, Any]:
    reading.require("mlp_bias", False, "MLPs of this family have no biases")
    fields = llama.read_config(reading, theta=500000.0, n_kv=8, d_head=128, n_ctx=131072)
    turns, sparse = turning_layers(reading), sparse_layers(reading)
    chunk = reading.size("attention_chunk_size", reading.if_missing("attention_chunk_size", 8192))
    default = ["chunked_attention" if t and chunk else "full_attention" for t in turns]
    types = [TYPES.get(name, name) for name in reading.names("layer_types") or default]
    if unknown := sorted(set(types) - {"local", "global"}):
        raise ValueError(f"{reading.where}: layer_types may hold {sorted(TYPES)}: {unknown}")
    growth = {
        "scale": reading.number("attn_scale", 0.1),
        "length": reading.size("floor_scale", 8192),
        "start": 1,
        "unrotated_only": True,
    }
    grows = reading.flag("attn_temperature_tuning", True) and not all(turns)
    chunks: dict[str, Any] = {}
    if chunk and "local" in types:
        chunks = {"use_local_attn": True, "window_size": chunk, "attn_types": types}
    norm: dict[str, Any] = {}
    if reading.flag("use_qk_norm", True):
        # those that do not turn have none, and the norm takes a factor of the turn out again
        norm = {"use_qk_norm": True, "qk_norm_type": "RMSPre", "qk_norm_after_rotary": True}
    mixture = {
        "num_experts": reading.size("num_local_experts", 16),
        "experts_per_token": reading.size("num_experts_per_tok", 1),
        "d_expert": fields["d_mlp"],
        "d_shared_expert": fields["d_mlp"],
        "expert_layers": None if all(sparse) else sparse,
        "router_type": "sigmoid",
        "router_on_input": True,
    }
    return {
        **fields,
        **chunks,
        **norm,
        **(mixture if any(sparse) else {}),
        "chunked_attention": bool(chunks),
        "d_mlp": reading.size("intermediate_size_mlp", 16384),
        "eps": reading.number("rms_norm_eps", 1e-5),
        "rotary_adjacent_pairs": True,
        "rotary_layers": None if all(turns) else turns,
        "query_growth": growth if grows else None,
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in TYPES.items()}
    growth = cfg.query_growth or {}
    turns = cfg.rotary_layers or [True] * cfg.n_layers
    sparse = cfg.expert_layers or [cfg.num_experts is not None] * cfg.n_layers
    types = cfg.attn_types if cfg.use_local_attn else None
    written = {k: v for k, v in llama.write_config(cfg, needs).items() if k != "mlp_bias"}
    tuning = {"attn_scale": growth.get("scale", 0.1), "floor_scale": growth.get("length", 8192)}
    return {
        **written,
        **tuning,
        "intermediate_size": cfg.d_expert or cfg.d_mlp,
        "intermediate_size_mlp": cfg.d_mlp,
        "num_local_experts": cfg.num_experts or 16,
        "num_experts_per_tok": cfg.experts_per_token or 1,
        "moe_layers": [layer for layer, has in enumerate(sparse) if has],
        "no_rope_layers": [int(each) for each in turns],
        "layer_types": [names[each] for each in types or ["global"] * cfg.n_layers],
        "attention_chunk_size": cfg.window_size,
        "attn_temperature_tuning": cfg.query_growth is not None,
        "use_qk_norm": cfg.use_qk_norm,
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    reading.flag("attention_bias", False)
    dense = [
        replace(row, hf=row.hf.replace(".mlp.", ".feed_forward.")) if isinstance(row, Map) else row
        for row in llama.rows(cfg, reading)
    ]
    inner = (f"{EXPERT}W_gate", f"{EXPERT}W_in")
    return with_experts(
        dense,
        sparse_layers(reading),
        router(f"{MOE}router.weight"),
        Map(f"{MOE}experts.gate_up_proj", inner, "e m (s x) -> e s m x"),
        Map(f"{MOE}experts.down_proj", f"{EXPERT}W_out", "e x m"),
        *shared_expert(f"{MOE}shared_expert"),
    )


LLAMA4 = replace(
    llama.LLAMA,
    model_type="llama4_text",
    hf_class="Llama4ForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    aliases={"num_experts": "num_local_experts"},
    cosmetic={
        **TRAINING_ONLY,
        "router_jitter_noise": "only matters for training: noise on the router's input",
    },
)
ARCHITECTURES = (LLAMA4,)
