"""What a configuration may hold: types and ranges of each field, and fields that disagree.

`check_values` looks at one field at a time, before defaults are filled in; `check_agreement` at
several, after. Both raise ValueError naming the fields and what they hold.
"""

import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from transformer_lens_lite.nearest import closest
from transformer_lens_lite.specs import QueryGrowth

if TYPE_CHECKING:
    from transformer_lens_lite.config import HookedTransformerConfig

ACTIVATIONS = (
    "solu", "solu_ln", "gelu_new", "gelu_fast", "silu", "relu", "gelu", "gelu_pytorch_tanh",
    "xielu", "relu2", "quick_gelu",
)  # fmt: skip
NORMALIZATIONS = ("LN", "LNPre", "RMS", "RMSPre", None)
CHOICES: dict[str, tuple[Any, ...]] = {
    "normalization_type": NORMALIZATIONS,
    "positional_embedding_type": ("standard", "rotary", "shortformer", "alibi", "none"),
    "init_mode": (
        "gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "muP",
    ),
    "attention_dir": ("causal", "bidirectional"),
    "norm_place": ("pre", "post", "both", "stream", "skip"),
    "qk_norm_type": NORMALIZATIONS[:-1],
    "qk_norm_over": ("head", "each_head", "all_heads"),
    "router_type": ("softmax", "sigmoid", "sparsemixer"),
    "act_fn": (*ACTIVATIONS, None),
    # of those without parameters or a norm of their own
    "unembed_act_fn": (*(name for name in ACTIVATIONS if name not in ("solu_ln", "xielu")), None),
}  # fmt: skip
# integers that are not positive only where something else is said
MAY_BE_ZERO = (
    "n_layers", "reserved_positions", "n_token_types", "seed", "checkpoint_index",
    "checkpoint_value", "decoder_start_token_id", "n_params",
)  # fmt: skip
MINUS_ONE_IS_DEFAULT = ("n_heads", "d_vocab", "d_vocab_out")
LARGEST_SEED = 2**32 - 1  # numpy's
POSITIVE = (
    "eps", "rotary_base", "rotary_scaling_factor", "NTK_by_parts_factor",
    "NTK_by_parts_low_freq_factor", "NTK_by_parts_high_freq_factor", "yarn_factor",
    "yarn_attention_factor", "yarn_beta_fast", "yarn_beta_slow", "embed_scale", "residual_scale",
    "logit_scale", "expert_gate_slope", "latent_eps", "router_scale",
)  # fmt: skip
# not positive only where they mean "none" or "the default"
POSITIVE_OR = {
    "clip_qkv": None, "rotary_base_local": None, "expert_limit": None, "attn_scale": -1.0,
    "attn_scores_soft_cap": -1.0, "output_logits_soft_cap": -1.0,
}  # fmt: skip

# Fields that do nothing without another: (those, whether what one of these holds will do). One that
# differs from its default without what it needs is a mistake that nobody would see.
NEEDS: tuple[tuple[tuple[str, ...], dict[str, Callable[[Any], bool]]], ...] = (
    (("attn_scale",), {"use_attn_scale": bool}),
    (("window_size", "chunked_attention"), {"use_local_attn": bool}),
    (
        (
            "rotary_scaling", "rotary_scaling_factor", "use_yarn_rope", "use_NTK_by_parts_rope",
            "rotary_layers", "rotary_dim", "rotary_base", "rotary_base_local",
            "rotary_adjacent_pairs",
        ),
        {"positional_embedding_type": "rotary".__eq__},
    ),
    (("rotary_base_local",), {"use_local_attn": bool}),
    (
        ("rotary_scaling_global_only",),
        {"rotary_scaling": bool, "use_NTK_by_parts_rope": bool},
    ),
    (
        (
            "NTK_by_parts_low_freq_factor", "NTK_by_parts_high_freq_factor", "NTK_by_parts_factor",
            "NTK_original_ctx_len",
        ),
        {"use_NTK_by_parts_rope": bool},
    ),
    (
        (
            "yarn_factor", "yarn_attention_factor", "yarn_beta_fast", "yarn_beta_slow",
            "yarn_original_max_position_embeddings", "yarn_truncate", "yarn_global_attn_only",
        ),
        {"use_yarn_rope": bool},
    ),
    (("qk_norm_type", "qk_norm_over", "qk_norm_after_rotary"), {"use_qk_norm": bool}),
    (
        ("alibi_slopes", "alibi_scaled", "alibi_in_bfloat16"),
        {"positional_embedding_type": "alibi".__eq__},
    ),
    (
        ("reserved_positions",),
        {"positional_embedding_type": ("standard", "shortformer").__contains__},
    ),
    (("latent_q_rank", "d_value", "latent_eps"), {"latent_kv_rank": bool}),
    (("gated_mlp_biases",), {"gated_mlp": bool}),
    (
        (
            "norm_topk_prob", "d_expert", "d_shared_expert", "shared_expert_gate",
            "expert_layers", "expert_limit", "expert_offset", "expert_gate_slope", "router_type",
            "router_scale", "router_groups", "router_top_groups", "router_group_members",
            "router_bias", "router_selection_bias", "router_on_input", "router_jitter",
        ),
        {"num_experts": bool},
    ),
    (("shared_expert_gate",), {"d_shared_expert": bool}),
    (("router_top_groups", "router_group_members"), {"router_groups": (1).__lt__}),
    (("router_jitter",), {"router_type": "sparsemixer".__eq__}),
    (("norm_weight_offset", "post_embedding_ln"), {"normalization_type": bool}),
    (("post_embedding_ln_last",), {"post_embedding_ln": bool}),
    (("final_rms",), {"final_norm": bool}),
    (("tie_word_embeddings", "unembed_act_fn"), {"unembedding": bool}),
)  # fmt: skip


def fields_needing(field: str) -> tuple[str, ...]:
    """The fields that have no effect while `field` is off."""
    return tuple(name for names, needed in NEEDS if {*needed} == {field} for name in names)


# --- one field at a time --------------------------------------------------------------------------


def check_device(device: Any) -> None:
    """ValueError for what torch knows no device by."""
    try:
        torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device={device!r} is not a device; 'cpu' or 'cuda:0' is") from None


def check_values(cfg: "HookedTransformerConfig") -> None:
    """Types, ranges and choices. Numpy's integers become Python's."""
    for name, field in cfg.__dataclass_fields__.items():
        value, optional = getattr(cfg, name), field.type in (int | None, float | None)
        if field.type is bool and not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
        if value is None and optional:
            continue
        if field.type in (int, int | None):
            setattr(cfg, name, _integer(name, value, optional))
        elif field.type in (float, float | None):
            _check_number(name, value)
    if cfg.seed is not None and cfg.seed > LARGEST_SEED:
        raise ValueError(f"seed must be at most 2**32 - 1, got {cfg.seed}")
    for name, allowed in CHOICES.items():
        value = getattr(cfg, name)
        if value not in allowed:
            hint = closest(str(value), map(str, allowed))
            raise ValueError(f"{name}={value!r} is not one of {list(allowed)}.{hint}")
    check_device(cfg.device)
    _check_per_layer(cfg, "attn_types", ("global", "local"))
    _check_per_layer(cfg, "rotary_layers", (True, False))
    _check_per_layer(cfg, "expert_layers", (True, False))
    if cfg.alibi_slopes is not None:
        _check_list("alibi_slopes", cfg.alibi_slopes)
        for slope in cfg.alibi_slopes:
            _check_finite("alibi_slopes", slope)
    _check_query_growth(cfg.query_growth)


def _integer(name: str, value: Any, optional: bool) -> int:
    least = 0 if name in MAY_BE_ZERO else 1
    may_be = "None or " if optional else "-1 for its default, or " * (name in MINUS_ONE_IS_DEFAULT)
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or (value < least and not (value == -1 and name in MINUS_ONE_IS_DEFAULT)):
        raise ValueError(f"{name} must be {may_be}an integer of at least {least}, got {value!r}")
    return operator.index(value)


def _check_number(name: str, value: Any) -> None:
    _check_finite(name, value)
    if name in POSITIVE and not value > 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    if name in POSITIVE_OR and value != POSITIVE_OR[name] and not value > 0:
        raise ValueError(f"{name} must be {POSITIVE_OR[name]} or a positive number, got {value!r}")
    if name == "initializer_range" and value < 0 and value != -1.0:
        raise ValueError(f"{name} must be -1 for its default or not negative, got {value!r}")


def _check_finite(name: str, value: Any) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")


def _check_list(name: str, value: Any) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a list, got {value!r}")


def _check_per_layer(cfg: "HookedTransformerConfig", name: str, allowed: tuple[Any, ...]) -> None:
    values = getattr(cfg, name)
    if values is None:
        return
    _check_list(name, values)
    if len(values) != cfg.n_layers:
        raise ValueError(f"{name} has {len(values)} entries but n_layers={cfg.n_layers}")
    if wrong := [v for v in values if v not in allowed]:
        raise ValueError(f"{name} may hold {list(allowed)}, got {wrong[0]!r}")


def _check_query_growth(given: dict[str, Any] | None) -> None:
    if given is None:
        return
    values = dict(given)
    unrotated_only = values.pop("unrotated_only", False)
    if not isinstance(unrotated_only, bool):
        raise ValueError(f"query_growth: unrotated_only must be a bool, got {unrotated_only!r}")
    try:
        growth = QueryGrowth(**values)
    except TypeError as error:
        raise ValueError(f"query_growth={given!r}: {error}") from None
    for name in ("scale", "length", "start"):
        _check_finite(f"query_growth: {name}", getattr(growth, name))
    if not growth.length > 0:
        raise ValueError(f"query_growth: length must be positive, got {growth.length!r}")


# --- fields that disagree -------------------------------------------------------------------------


def check_agreement(cfg: "HookedTransformerConfig") -> None:
    """Nothing contradicts, and nothing is without effect."""
    _check_supported(cfg)
    _check_attention(cfg)
    _check_latent(cfg)
    _check_experts(cfg)
    _check_blocks_and_ends(cfg)
    fields = cfg.__dataclass_fields__
    for names, needed in NEEDS:
        if not any(will_do(getattr(cfg, name)) for name, will_do in needed.items()):
            there = " and ".join(f"{name}={getattr(cfg, name)!r}" for name in needed)
            for name in names:
                if (value := getattr(cfg, name)) != fields[name].default:
                    raise ValueError(f"{name}={value!r} has no effect with {there}")


def _check_attention(cfg: "HookedTransformerConfig") -> None:
    kv = cfg.n_key_value_heads
    if kv is not None and cfg.n_heads % kv:
        raise ValueError(f"n_heads={cfg.n_heads} is not a multiple of n_key_value_heads={kv}")
    if cfg.use_local_attn and (cfg.window_size is None or cfg.attn_types is None):
        raise ValueError(
            "use_local_attn=True needs both window_size and attn_types; got "
            f"window_size={cfg.window_size!r}, attn_types={cfg.attn_types!r}"
        )
    has_local = "local" in (cfg.attn_types or ())
    if cfg.use_local_attn and not has_local:
        raise ValueError(f"window_size={cfg.window_size} but attn_types has no 'local' layer")
    if has_local and not cfg.use_local_attn:
        raise ValueError("attn_types has 'local' layers but use_local_attn=False")
    if cfg.rotary_dim is not None and (cfg.rotary_dim > cfg.d_head or cfg.rotary_dim % 2):
        raise ValueError(
            f"rotary_dim={cfg.rotary_dim} must be even and at most d_head={cfg.d_head}"
        )
    shares_keys = kv not in (None, cfg.n_heads) and not cfg.ungroup_grouped_query_attention
    if cfg.use_attn_in and shares_keys:
        raise ValueError(
            f"use_attn_in=True needs as many key as query heads: n_key_value_heads={kv}, "
            f"n_heads={cfg.n_heads}; use_split_qkv_input has no such limit"
        )
    if cfg.use_attention_sinks and cfg.attn_scores_soft_cap > 0:
        raise ValueError("use_attention_sinks and attn_scores_soft_cap > 0 cannot be combined")
    if cfg.qk_norm_over == "all_heads" and cfg.qk_norm_type != "RMS":
        raise ValueError(
            f"qk_norm_over='all_heads' needs qk_norm_type='RMS', got {cfg.qk_norm_type!r}"
        )
    if (
        cfg.positional_embedding_type == "alibi"
        and cfg.alibi_slopes is not None
        and len(cfg.alibi_slopes) != cfg.n_heads
    ):
        raise ValueError(
            f"alibi_slopes has {len(cfg.alibi_slopes)} entries but n_heads={cfg.n_heads}"
        )


def _check_latent(cfg: "HookedTransformerConfig") -> None:
    if cfg.latent_kv_rank is None:
        return
    if cfg.positional_embedding_type != "rotary":
        raise ValueError(
            "latent_kv_rank needs positional_embedding_type='rotary', got "
            f"{cfg.positional_embedding_type!r}"
        )
    assert cfg.rotary_dim is not None
    if cfg.rotary_dim >= cfg.d_head:
        raise ValueError(
            f"latent_kv_rank needs channels that do not turn: rotary_dim={cfg.rotary_dim} "
            f"must be less than d_head={cfg.d_head}"
        )
    if cfg.n_key_value_heads is not None:
        raise ValueError(
            f"latent_kv_rank gives every head its keys; n_key_value_heads="
            f"{cfg.n_key_value_heads} contradicts it"
        )


def _check_experts(cfg: "HookedTransformerConfig") -> None:
    n, k = cfg.num_experts, cfg.experts_per_token
    if n is None and k is None:
        return
    if n is None or k is None:
        raise ValueError(f"num_experts={n} and experts_per_token={k} go together")
    if not 1 <= k <= n:
        raise ValueError(f"experts_per_token={k} must be between 1 and num_experts={n}")
    if not cfg.gated_mlp or cfg.attn_only:
        raise ValueError("num_experts needs gated_mlp=True: experts are gated MLPs")
    groups = cfg.router_groups
    if n % groups or cfg.router_top_groups > groups:
        raise ValueError(
            f"num_experts={n} must be a multiple of router_groups={groups}, and "
            f"router_top_groups={cfg.router_top_groups} between 1 and it"
        )
    if k > (n // groups) * cfg.router_top_groups:
        raise ValueError(
            f"experts_per_token={k} is more than router_top_groups="
            f"{cfg.router_top_groups} groups of {n // groups} hold"
        )
    if cfg.router_group_members > n // groups:
        raise ValueError(
            f"router_group_members={cfg.router_group_members} is more than a group holds: "
            f"num_experts={n}, router_groups={groups}"
        )
    if cfg.router_type == "sparsemixer" and k != 2:
        raise ValueError(f"router_type='sparsemixer' chooses two, experts_per_token={k}")


def _check_blocks_and_ends(cfg: "HookedTransformerConfig") -> None:
    if cfg.act_fn is None and not cfg.attn_only:
        raise ValueError("act_fn=None needs attn_only=True")
    if cfg.attn_only and (cfg.gated_mlp or cfg.parallel_attn_mlp):
        raise ValueError("attn_only=True contradicts gated_mlp=True or parallel_attn_mlp=True")
    if cfg.uses_rms_norm and (cfg.normalization_type or "RMS").startswith("LN"):
        raise ValueError(
            f"uses_rms_norm=True contradicts normalization_type={cfg.normalization_type!r}"
        )
    if cfg.norm_place != "pre" and cfg.normalization_type is None:
        raise ValueError(f"norm_place={cfg.norm_place!r} contradicts normalization_type=None")
    if cfg.norm_place in ("stream", "skip") and cfg.parallel_attn_mlp:
        raise ValueError(f"norm_place={cfg.norm_place!r} contradicts parallel_attn_mlp=True")
    if not cfg.first_norm and cfg.norm_place != "pre":
        raise ValueError(f"first_norm=False contradicts norm_place={cfg.norm_place!r}")
    if cfg.tie_word_embeddings and cfg.d_vocab_out != cfg.d_vocab:
        raise ValueError(
            f"tie_word_embeddings=True needs d_vocab_out={cfg.d_vocab_out} == d_vocab={cfg.d_vocab}"
        )
    if cfg.d_embed is not None and cfg.unembed_act_fn is not None:
        raise ValueError(
            f"d_embed={cfg.d_embed} and unembed_act_fn={cfg.unembed_act_fn!r} cannot be combined"
        )


def _check_supported(cfg: "HookedTransformerConfig") -> None:
    if cfg.n_devices != 1:
        raise ValueError(
            f"n_devices={cfg.n_devices}: splitting a model over devices is not supported"
        )
    if cfg.load_in_4bit or cfg.quantization_method:
        raise ValueError("load_in_4bit / quantization_method: quantised weights are not supported")
    if cfg.use_dynamic_ntk_rope or cfg.use_logn_attn:
        raise ValueError(
            "use_dynamic_ntk_rope / use_logn_attn (Qwen-1) are not supported; for dynamic NTK use "
            "rotary_scaling={'rope_type': 'dynamic', 'factor': …}"
        )
