"""DeepSeek-V2 and V3: keys and values from a latent, many small experts in groups, shared ones."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.experts import MLP, experts, router, shared_expert, with_experts
from weights_conversion.families import llama
from weights_conversion.families.llama import ATTN, BLOCK
from weights_conversion.families.mixtral import TRAINING_ONLY
from weights_conversion.fields import Reading, rope, score_divisor
from weights_conversion.table import Map, Row, optional, without

MOE = f"{BLOCK}mlp."
NATIVE = "blocks.{i}.attn."
DOWN_BIASES = (f"{NATIVE}b_Q_down", f"{NATIVE}b_KV_down", f"{NATIVE}b_K_rotary", f"{NATIVE}b_O")


# --- the config ---------------------------------------------------------------------------------


def read_latent(reading: Reading) -> dict[str, Any]:
    still, turning = reading.size("qk_nope_head_dim", 128), reading.size("qk_rope_head_dim", 64)
    for name, value in (("head_dim", turning), ("qk_head_dim", still + turning)):
        reading.require(name, value, "it follows from qk_nope_head_dim and qk_rope_head_dim")
    n_heads, n_ctx = reading.size("num_attention_heads"), reading.size("max_position_embeddings")
    reading.require("num_key_value_heads", n_heads, "every head has keys of its own")
    positions = rope(reading, turning, n_ctx)
    return {
        "n_layers": reading.size("num_hidden_layers"),
        "d_model": reading.size("hidden_size"),
        "n_heads": n_heads,
        "d_head": still + turning,
        "d_mlp": reading.size("intermediate_size"),
        "d_vocab": reading.size("vocab_size"),
        "n_ctx": n_ctx,
        "act_fn": reading.activation("hidden_act", "silu"),
        "eps": reading.number("rms_norm_eps", 1e-6),
        "normalization_type": "RMS",
        "gated_mlp": True,
        "tie_word_embeddings": reading.flag("tie_word_embeddings", False),
        **positions,
        "attn_scale": math.sqrt(still + turning) / more_attention(positions["rotary_scaling"]),
        "latent_kv_rank": reading.size("kv_lora_rank", 512),
        "latent_q_rank": reading.size("q_lora_rank", reading.if_missing("q_lora_rank", 1536)),
        "d_value": reading.size("v_head_dim", 128),
    }


def more_attention(scaling: dict[str, Any] | None) -> float:
    """What scores are multiplied by where positions are stretched."""
    if scaling is None or not scaling.get("mscale_all_dim"):
        return 1.0
    factor = scaling["factor"]
    mscale = 1.0 if factor <= 1 else 0.1 * scaling["mscale_all_dim"] * math.log(factor) + 1.0
    return mscale * mscale


def read_mixture(
    reading: Reading, n_experts: int, top_k: int | None, n_shared: int, width: int
) -> dict[str, Any]:
    sparse = sparse_layers(reading)
    d_expert = reading.size("moe_intermediate_size", width)
    return {
        "num_experts": reading.size("n_routed_experts", n_experts),
        "experts_per_token": reading.size("num_experts_per_tok", top_k or 1),
        "d_expert": d_expert,
        "d_shared_expert": d_expert * reading.size("n_shared_experts", n_shared),
        "expert_layers": None if all(sparse) else sparse,
        "router_scale": reading.number("routed_scaling_factor", 1.0),
    }


def sparse_layers(reading: Reading) -> list[bool]:
    default = {"deepseek_v3": 3}.get(str(reading.raw("model_type")), 0)
    first = reading.raw("first_k_dense_replace", default)
    return [layer >= first for layer in range(reading.size("num_hidden_layers"))]


def flag_or_null(reading: Reading, name: str) -> bool:
    """True by default; null is false, as Hugging Face reads it."""
    return reading.flag(name, bool(reading.if_missing(name, True)))


def read_v3(reading: Reading) -> dict[str, Any]:
    interleaved = flag_or_null(reading, "rope_interleave")
    n_groups = reading.size("n_group", 8)
    return {
        **read_latent(reading),
        **read_mixture(reading, 256, 8, 1, 2048),
        "router_scale": reading.number("routed_scaling_factor", 2.5),
        "rotary_adjacent_pairs": interleaved,
        "router_type": "sigmoid",
        "router_groups": n_groups,
        "router_top_groups": reading.size("topk_group", 4),
        "router_group_members": 2 if n_groups > 1 else 1,
        "router_selection_bias": True,
        "norm_topk_prob": flag_or_null(reading, "norm_topk_prob"),
    }


def read_v2(reading: Reading) -> dict[str, Any]:
    reading.require("mlp_bias", False, "experts of this family have no biases")
    method = reading.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"{reading.where}: topk_method={method!r} is not supported")
    n_groups, best = reading.size("n_group", 1), reading.size("topk_group", 1)
    grouped = method == "group_limited_greedy"
    return {
        **read_latent(reading),
        **read_mixture(reading, 64, None, 2, 1407),
        "rotary_adjacent_pairs": True,
        "router_groups": n_groups if grouped else 1,
        "router_top_groups": best if grouped else 1,
    }


def write_latent(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = llama.write_without_biases(cfg, needs)  # refuses models that do not turn
    assert cfg.rotary_dim is not None
    wanted = math.sqrt(cfg.d_head) / more_attention(cfg.rotary_scaling)
    if not math.isclose(score_divisor(cfg), wanted):
        raise ValueError(f"attn_scale={cfg.attn_scale} has no place: it follows from the sizes")
    sparse = list(cfg.expert_layers or [True] * cfg.n_layers)
    first = sparse.index(True) if True in sparse else cfg.n_layers
    if not all(sparse[first:]):
        raise ValueError("expert_layers: only the first layers may be without experts")
    width = cfg.d_expert or cfg.d_mlp or 0
    if not cfg.d_shared_expert or cfg.d_shared_expert % width:
        raise ValueError(
            f"d_shared_expert={cfg.d_shared_expert} is no multiple of d_expert={width}"
        )
    return {
        **{k: v for k, v in written.items() if k != "head_dim"},
        "attention_bias": any(needs(name) for name in DOWN_BIASES),
        "qk_nope_head_dim": cfg.d_head - cfg.rotary_dim,
        "qk_rope_head_dim": cfg.rotary_dim,
        "v_head_dim": cfg.d_value or cfg.d_head,
        "kv_lora_rank": cfg.latent_kv_rank,
        "q_lora_rank": cfg.latent_q_rank,
        "n_routed_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "moe_intermediate_size": width,
        "n_shared_experts": cfg.d_shared_expert // width,
        "first_k_dense_replace": first,
        "routed_scaling_factor": cfg.router_scale,
        "n_group": cfg.router_groups,
        "topk_group": cfg.router_top_groups,
    }


def write_v3(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    return {
        **write_latent(cfg, needs),
        "rope_interleave": cfg.rotary_adjacent_pairs,
        "norm_topk_prob": cfg.norm_topk_prob,
    }


def write_v2(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    grouped = cfg.router_groups > 1
    return {
        **write_latent(cfg, needs),
        "topk_method": "group_limited_greedy" if grouped else "greedy",
    }


# --- the tensors --------------------------------------------------------------------------------


def latent_rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    assert cfg.rotary_dim is not None
    sizes = {
        "z": cfg.latent_kv_rank or 0,
        "q": cfg.latent_q_rank or 0,
        "t": cfg.rotary_dim,
        "o": cfg.d_head - cfg.rotary_dim,  # the channels that do not turn
        "d": cfg.d_value or cfg.d_head,
    }
    bias = reading.flag("attention_bias", False)

    def row(hf: str, native: str | tuple[str, ...], pattern: str, **more: Any) -> Map:
        names = native if isinstance(native, tuple) else (native,)
        full = tuple(f"{NATIVE}{name}" for name in names)
        return Map(f"{ATTN}{hf}", full if len(full) > 1 else full[0], pattern, sizes=sizes, **more)

    if cfg.latent_q_rank is None:
        of_queries: list[Row] = [row("q_proj.weight", "W_Q", "(n h) m -> n m h")]
        of_queries.append(optional(False, row("q_proj.bias", "b_Q", "(n h) -> n h")))
    else:
        of_queries = [
            row("q_a_proj.weight", "W_Q_down", "q m -> m q"),
            optional(bias, row("q_a_proj.bias", "b_Q_down", "q")),
            row("q_a_layernorm.weight", "q_latent_norm.w", "q"),
            row("q_b_proj.weight", "W_Q", "(n h) q -> n q h"),
        ]
    down, down_bias = ("W_KV_down", "W_K_rotary"), ("b_KV_down", "b_K_rotary")
    return [
        *of_queries,
        row("kv_a_proj_with_mqa.weight", down, "a m", cut=("z", "t"),
            pieces=("z m -> m z", "t m -> m t")),
        *(
            [row("kv_a_proj_with_mqa.bias", down_bias, "a", cut=("z", "t"))]
            if bias
            else [
                optional(False, row("", "b_KV_down", "z")),
                optional(False, row("", "b_K_rotary", "t")),
            ]
        ),
        row("kv_a_layernorm.weight", "kv_latent_norm.w", "z"),
        row("kv_b_proj.weight", ("W_K", "W_V"), "(n a) z -> a n z", cut=("o", "d"),
            pieces=("o n z -> n z o", "d n z -> n z d")),
        row("o_proj.weight", "W_O", "m (n d) -> n d m"),
        optional(bias, row("o_proj.bias", "b_O", "m")),
    ]  # fmt: skip


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    attention = [f"{NATIVE}{kind}_{x}" for kind in "Wb" for x in "QKVO"]
    return with_experts(
        [*without(llama.rows(cfg, reading), *attention), *latent_rows(cfg, reading)],
        sparse_layers(reading),
        router(f"{MOE}gate.weight"),
        *experts(f"{MOE}experts"),
        *shared_expert(f"{MOE}shared_experts"),
    )


def v3_rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    reading.require("mlp_bias", False, "experts of this family have no biases")
    sparse = sparse_layers(reading)
    layers = None if all(sparse) else tuple(i for i, has in enumerate(sparse) if has)
    bias = Map(f"{MOE}gate.e_score_correction_bias", f"{MLP}selection_bias", "e", layers=layers)
    return [*rows(cfg, reading), bias]


V3 = replace(
    llama.LLAMA,
    model_type="deepseek_v3",
    hf_class="DeepseekV3ForCausalLM",
    remote_stem="deepseekv3",
    read_config=read_v3,
    write_config=write_v3,
    rows=v3_rows,
    further_layers="they predict tokens further on (num_nextn_predict_layers)",
    aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
    cosmetic={
        **TRAINING_ONLY,
        "num_mtp_layers": "layers that predict further tokens, which Hugging Face does not run",
        "num_nextn_predict_layers": "the same, as older configs call it",
        "ep_size": "how experts are spread over machines",
        "moe_layer_freq": "every layer after the first dense ones has experts, in Hugging Face too",
        "scoring_func": "always the sigmoid, in Hugging Face too",
        "topk_method": "always noaux_tc, in Hugging Face too",
        "aux_loss_alpha": "only matters for training",
        "seq_aux": "only matters for training",
    },
)
V2 = replace(
    V3,
    model_type="deepseek_v2",
    hf_class="DeepseekV2ForCausalLM",
    remote_stem="deepseekv2",
    read_config=read_v2,
    write_config=write_v2,
    rows=rows,
    cosmetic={
        **V3.cosmetic,
        "norm_topk_prob": "Hugging Face's V2 never normalises the weights of the chosen",
        "scoring_func": "always softmax, in Hugging Face too",
    },
)
ARCHITECTURES = (V2, V3)
