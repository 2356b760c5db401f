"""Tiny models of our own class, one per feature, with weights loud enough to show every mistake.

    model = native.build("softcap")

Sizes are awkward: no two are equal, heads do not fill the model's width, the vocabulary is odd.
Inputs of `native.LENGTH` tokens are longer than every window and than the original length of every
scaled rotation.
"""

from typing import Any

import torch
from torch import Tensor

from transformer_lens_lite import HookedTransformer, HookedTransformerConfig

SIZES = {
    "n_layers": 2,
    "d_model": 14,
    "n_heads": 4,
    "d_head": 6,
    "d_mlp": 19,
    "n_ctx": 32,
    "d_vocab": 23,
    "eps": 1e-3,
    "act_fn": "gelu",
    "device": "cpu",
}
LENGTH = 13
ROTARY = {"positional_embedding_type": "rotary"}
RMS = {"normalization_type": "RMS"}
WINDOW = {"use_local_attn": True, "window_size": 4, "attn_types": ["local", "global"]}
ORIGINAL = {"original_max_position_embeddings": 6}
GROUPED = {"n_key_value_heads": 2}


def scaled(rope_type: str, **values: Any) -> dict[str, Any]:
    return {**ROTARY, "rotary_base": 50.0, "rotary_scaling": {"rope_type": rope_type, **values}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BETWEEN = {"original_max_position_embeddings": 40}  # one pair of channels is kept, one on the ramp
LONG = {"short_factor": [1.0, 1.2, 1.5], "long_factor": [1.5, 2.5, 4.0], "factor": 4.0, **ORIGINAL}

# name -> what differs from the sizes above
LATENT = {"latent_kv_rank": 9, "d_value": 5, "rotary_dim": 4}
EXPERTS = {"num_experts": 6, "experts_per_token": 2, "gated_mlp": True, "act_fn": "silu"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{act: {"act_fn": act} for act in ("relu", "relu2", "silu", "gelu_new", "quick_gelu")},
    **{act: {"act_fn": act} for act in ("xielu", "solu", "solu_ln")},
    "no_norm": {"normalization_type": None},
    "ln_pre": {"normalization_type": "LNPre"},
    "rms": RMS,
    "rms_pre": {"normalization_type": "RMSPre"},
    "rms_offset": {**RMS, "norm_weight_offset": 1.0},
    "final_rms": {"final_rms": True},
    "post_embedding_ln": {"post_embedding_ln": True},
    "sandwich": {"use_normalization_before_and_after": True},
    "sandwich_rms": {**RMS, "norm_place": "both"},
    "post_norm": {**RMS, "norm_place": "post"},
    "stream_norm": {"norm_place": "stream", "final_norm": False},
    "stream_norm_attn_only": {**RMS, "norm_place": "stream", "attn_only": True},
    "skip_norm": {"norm_place": "skip"},
    "post_embedding_ln_last": {"post_embedding_ln": True, "post_embedding_ln_last": True},
    "token_types": {"n_token_types": 3},
    "no_first_norm": {"first_norm": False},
    "no_final_norm": {"final_norm": False},
    "unembed_transform": {"unembed_act_fn": "gelu"},
    "rotary": ROTARY,
    "rotary_adjacent": {**ROTARY, "rotary_adjacent_pairs": True},
    "rotary_partial": {**ROTARY, "rotary_dim": 4},
    "rotary_partial_adjacent": {**ROTARY, "rotary_dim": 2, "rotary_adjacent_pairs": True},
    "rotary_some_layers": {**ROTARY, "rotary_layers": [True, False]},
    "rotary_local_base": {**ROTARY, **WINDOW, "rotary_base_local": 20.0},
    "linear": scaled("linear", factor=2.5),
    "linear_global_only": {
        **scaled("linear", factor=2.5), **WINDOW, "rotary_scaling_global_only": True,
    },
    "dynamic": scaled("dynamic", factor=2.0, **ORIGINAL),
    "llama3": scaled("llama3", **LLAMA3, **BETWEEN),
    "yarn": scaled("yarn", factor=4.0, beta_fast=2.0, beta_slow=0.5, **BETWEEN),
    "longrope": scaled("longrope", **LONG, long_attention_factor=1.6),
    "alibi": {"positional_embedding_type": "alibi"},
    "alibi_six_heads": {"positional_embedding_type": "alibi", "n_heads": 6},
    "no_positions": {"positional_embedding_type": "none"},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "grouped": GROUPED,
    "grouped_rotary": {**GROUPED, **ROTARY},
    "one_kv_head": {"n_key_value_heads": 1, **ROTARY},
    "grouped_in_name_only": {"n_key_value_heads": 4},
    "ungrouped": {**GROUPED, **ROTARY, "ungroup_grouped_query_attention": True},
    "attn_scale": {"attn_scale": 1.3},
    "unscaled": {"use_attn_scale": False},
    "inverse_layer": {"scale_attn_by_inverse_layer_idx": True},
    "softcap": {"attn_scores_soft_cap": 1.5},
    "window": WINDOW,
    "window_rotary_grouped": {**WINDOW, **ROTARY, **GROUPED},
    "window_alibi": {**WINDOW, "positional_embedding_type": "alibi"},
    "qk_norm": {**ROTARY, **GROUPED, "use_qk_norm": True},
    "qk_norm_full_width": {**ROTARY, **GROUPED, "use_qk_norm": True, "qk_norm_over": "all_heads"},
    "clip_qkv": {"clip_qkv": 0.5},
    "sinks": {"use_attention_sinks": True},
    "sinks_window_grouped": {**WINDOW, **ROTARY, **GROUPED, "use_attention_sinks": True},
    "bidirectional": {"attention_dir": "bidirectional"},
    "bidirectional_encoder": {  # BERT
        "attention_dir": "bidirectional", "norm_place": "stream", "post_embedding_ln": True,
        "post_embedding_ln_last": True, "n_token_types": 3, "final_norm": False,
        "unembed_act_fn": "gelu", "tie_word_embeddings": True,
    },
    "bidirectional_window": {"attention_dir": "bidirectional", **WINDOW},
    "gated": {"gated_mlp": True},
    "gated_biases": {"gated_mlp": True, "gated_mlp_biases": True},
    "gated_solu_ln": {"gated_mlp": True, "act_fn": "solu_ln"},
    "attn_only": {"attn_only": True},
    "parallel": {"parallel_attn_mlp": True},
    "tied": {"tie_word_embeddings": True},
    "other_output": {"d_vocab_out": 29},
    "embed_scale": {"embed_scale": 3.7},
    "residual_scale": {"residual_scale": 0.3},
    "logit_scale": {"logit_scale": 2.3},
    "logit_softcap": {"output_logits_soft_cap": 2.0},
    "latent": {**ROTARY, **LATENT},
    "latent_queries": {
        **RMS, **ROTARY, **LATENT, "latent_q_rank": 7, "rotary_adjacent_pairs": True,
        "attn_scores_soft_cap": 1.5,
    },
    "experts": {**RMS, **ROTARY, **EXPERTS, "norm_topk_prob": True},
    "experts_shared": {
        **EXPERTS, "d_expert": 11, "d_shared_expert": 13, "shared_expert_gate": True,
        "expert_layers": [False, True], "gated_mlp_biases": True,
    },
    "experts_grouped": {
        **EXPERTS, "router_type": "sigmoid", "router_groups": 3, "router_top_groups": 2,
        "router_group_members": 2, "router_selection_bias": True, "norm_topk_prob": True,
        "router_scale": 1.7, "d_shared_expert": 7,
    },
    "experts_by_their_best": {**EXPERTS, "router_groups": 3, "router_top_groups": 2},
    "experts_mixed_sparsely": {**EXPERTS, "router_type": "sparsemixer", "router_jitter": 0.4},
    "experts_clamped": {
        **EXPERTS, "gated_mlp_biases": True, "router_bias": True, "expert_limit": 0.6,
        "expert_offset": 1.0, "act_fn": "quick_gelu",
    },
    "experts_weighed_before": {**EXPERTS, "router_type": "sigmoid", "router_on_input": True},
    "everything": {  # as much of the above as goes together
        **RMS, **WINDOW, **ROTARY, **GROUPED, "norm_place": "both", "norm_weight_offset": 1.0,
        "attn_scores_soft_cap": 1.5, "output_logits_soft_cap": 2.0, "use_qk_norm": True,
        "clip_qkv": 2.0, "gated_mlp": True, "gated_mlp_biases": True, "act_fn": "gelu_new",
        "embed_scale": 1.7, "residual_scale": 0.7, "logit_scale": 1.3, "attn_scale": 1.9,
        "tie_word_embeddings": True, "rotary_base_local": 20.0, "rotary_dim": 4,
    },
}  # fmt: skip


def config(name: str = "plain", **changes: Any) -> HookedTransformerConfig:
    """The config of a variant."""
    return HookedTransformerConfig(**{**SIZES, **VARIANTS[name], **changes})


@torch.no_grad()
def loud(model: HookedTransformer, seed: int = 0) -> HookedTransformer:
    """Matrices N(0, .4), norm weights += N(0, .3), all other vectors N(0, .3)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if ".W_" in name or "._W_" in name:
            parameter.copy_(0.4 * noise)
        elif name.endswith(("w", "alpha_p", "alpha_n")):
            parameter.add_(0.3 * noise)
        elif not name.endswith("beta"):
            parameter.copy_(0.3 * noise)
    return model


def of(cfg: HookedTransformerConfig, seed: int = 0) -> HookedTransformer:
    """A loud model of any config."""
    return loud(HookedTransformer(cfg), seed)


def build(name: str = "plain", seed: int = 0, **changes: Any) -> HookedTransformer:
    """A loud model of a variant."""
    return of(config(name, **changes), seed)


def tokens(batch: int = 2, length: int = LENGTH, d_vocab: int = 23) -> Tensor:
    """Random ids."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(d_vocab, (batch, length), generator=generator)
