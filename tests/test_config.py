"""The flat config: what it fills in, refuses and expands to."""

import copy
import dataclasses
import json
from typing import Any

import loud
import native
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transformer_lens_lite import HookedTransformer, HookedTransformerConfig
from transformer_lens_lite.config import parse_dtype
from transformer_lens_lite.config_checks import check_values
from transformer_lens_lite.nearest import closest

SMALL: dict[str, Any] = {
    "n_layers": 3, "d_model": 24, "d_head": 6, "n_ctx": 16, "d_vocab": 11, "device": "cpu",
}  # fmt: skip
ROTARY = native.ROTARY
LOCAL = {"use_local_attn": True, "window_size": 4}


def config(**changes: Any) -> HookedTransformerConfig:
    return HookedTransformerConfig(**{**SMALL, **changes})


# --- defaults -------------------------------------------------------------------------------------


def test_sizes_that_are_not_given_are_filled_in() -> None:
    cfg = config()
    assert (cfg.n_heads, cfg.d_mlp, cfg.d_vocab_out) == (4, 96, 11)
    assert (cfg.rotary_dim, cfg.n_key_value_heads) == (None, None)
    assert config(**ROTARY).rotary_dim == 6
    assert config(n_heads=3).n_heads == 3  # heads need not fill the model
    assert config(attn_only=True, act_fn=None).d_mlp == 96
    assert config(use_attn_scale=False).attn_scale == -1.0
    turning = config(**ROTARY)
    still = dataclasses.replace(
        turning, positional_embedding_type="none", rotary_base=10000.0, use_attn_scale=False
    )  # what was filled in goes with what it was for
    assert (still.rotary_dim, still.attn_scale) == (None, -1.0)
    assert config(init_mode="muP").initializer_range == 1.0
    assert config(d_vocab_out=5).d_vocab_out == 5
    assert cfg.device == "cpu"
    assert cfg.dtype == torch.float32


def test_classic_defaults() -> None:
    cfg = config()
    expected = {
        "act_fn": "relu", "eps": 1e-5, "normalization_type": "LN", "attn_scale": 6**0.5,
        "positional_embedding_type": "standard", "init_mode": "gpt2",
        "initializer_range": 0.8 / 24**0.5,
        "attention_dir": "causal", "rotary_base": 10000.0, "default_prepend_bos": True,
        "model_name": "custom", "use_attn_scale": True, "tie_word_embeddings": False,
        "attn_scores_soft_cap": -1.0, "output_logits_soft_cap": -1.0, "seed": None,
    }  # fmt: skip
    assert {name: getattr(cfg, name) for name in expected} == expected


def test_n_params_counts_weights_of_attention_and_mlps() -> None:
    assert config().n_params == 3 * (4 * 24 * 24 + 2 * 24 * 96)
    assert config(gated_mlp=True).n_params == 3 * (4 * 24 * 24 + 3 * 24 * 96)
    assert config(attn_only=True).n_params == 3 * 4 * 24 * 24
    assert config(n_params=5).n_params == config().n_params


def test_the_two_ways_to_ask_for_norms_on_both_sides_are_one() -> None:
    assert config(use_normalization_before_and_after=True).norm_place == "both"
    assert config(norm_place="both").use_normalization_before_and_after is True
    assert config(norm_place="post").use_normalization_before_and_after is False


def test_a_seed_seeds_everything() -> None:
    config(seed=4)
    first = torch.rand(2)
    config(seed=4)
    assert torch.equal(torch.rand(2), first)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("torch.float16", torch.float16),
        ("fp64", torch.float64), (torch.float16, torch.float16), ("float32", torch.float32),
    ],
)  # fmt: skip
def test_dtypes_may_be_names(given: Any, dtype: torch.dtype) -> None:
    assert config(dtype=given).dtype == dtype
    assert parse_dtype(given) == dtype


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("d_modle", "d_model"), ("n_head", "n_heads"), ("rotary_bases", "rotary_base")],
)
def test_an_unknown_field_is_a_type_error_that_names_the_nearest(wrong: str, nearest: str) -> None:
    message = f"no field '{wrong}'. Did you mean .*'{nearest}'"
    with pytest.raises(TypeError, match=message):
        config(**{wrong: 1})
    with pytest.raises(TypeError, match=message):
        HookedTransformerConfig.from_dict({**SMALL, wrong: 1})
    with pytest.raises(TypeError, match=message):
        HookedTransformer({**SMALL, wrong: 1})
    cfg = config()
    with pytest.raises(AttributeError, match=message):
        setattr(cfg, wrong, 1)


def test_a_missing_size_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="n_ctx"):
        HookedTransformerConfig(n_layers=1, d_model=8, d_head=4)  # type: ignore[call-arg]


GIVEN_TWICE = {"rotary_scaling_factor": 2.0, "use_yarn_rope": True}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 3}
ALIBI: dict[str, Any] = {"positional_embedding_type": "alibi"}
# what is wrong, and what the message must name
EXPERTS = {"num_experts": 6, "experts_per_token": 2, "gated_mlp": True}
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    # unknown choices
    ({"act_fn": "geluu"}, ["act_fn='geluu'", "'gelu'"]),
    ({"act_fn": None}, ["act_fn=None"]),
    ({"init_mode": "xavier"}, ["init_mode='xavier'", "xavier_normal"]),
    ({"normalization_type": "RMSNorm"}, ["normalization_type='RMSNorm'", "'RMS'"]),
    ({"positional_embedding_type": "rotory"}, ["positional_embedding_type", "'rotary'"]),
    ({"attention_dir": "both"}, ["attention_dir='both'", "bidirectional"]),
    ({"norm_place": "after"}, ["norm_place='after'", "post"]),
    ({"dtype": "int8"}, ["int8", "bfloat16"]),
    ({"dtype": torch.int64}, ["int64", "floating"]),
    ({**ROTARY, "rotary_scaling": {"rope_type": "llama4"}}, ["llama4", "llama3"]),
    # impossible values
    ({"n_layers": -1}, ["n_layers", "-1"]),
    ({"n_layers": True}, ["n_layers", "True"]),
    ({"d_model": 0}, ["d_model", "0"]),
    ({"n_ctx": 0}, ["n_ctx"]),
    ({"n_heads": 0}, ["n_heads", "0"]),
    ({"d_vocab": 0}, ["d_vocab"]),
    ({"d_vocab_out": -2}, ["d_vocab_out"]),
    ({"d_mlp": 0}, ["d_mlp"]),
    ({"eps": 0.0}, ["eps"]),
    ({"eps": float("nan")}, ["eps"]),
    ({"attn_scale": 0.0}, ["attn_scale", "0.0"]),
    ({"attn_scale": -2.0}, ["attn_scale", "-2.0"]),
    ({"clip_qkv": -1.0}, ["clip_qkv", "-1.0"]),
    ({"embed_scale": 0.0}, ["embed_scale"]),
    ({"residual_scale": -1.0}, ["residual_scale"]),
    ({"logit_scale": float("inf")}, ["logit_scale"]),
    ({**ROTARY, "rotary_base": 0.0}, ["rotary_base"]),
    ({**ROTARY, "rotary_base_local": -5.0}, ["rotary_base_local"]),
    ({**ROTARY, "rotary_scaling_factor": 0.0}, ["rotary_scaling_factor"]),
    ({**ROTARY, "rotary_scaling": {"rope_type": "linear", "factor": 0.0}}, ["factor", "0.0"]),
    # values that disagree
    ({"d_head": 7}, ["d_model=24", "d_head=7", "n_heads"]),
    ({"n_key_value_heads": 3}, ["n_heads=4", "n_key_value_heads=3"]),
    ({"n_key_value_heads": 8}, ["n_heads=4", "n_key_value_heads=8"]),
    ({**ROTARY, "rotary_dim": 8}, ["rotary_dim=8", "d_head=6"]),
    ({**ROTARY, "rotary_dim": 3}, ["rotary_dim=3", "even"]),
    ({**ROTARY, "d_head": 3}, ["rotary_dim=3", "d_head=3"]),
    ({"window_size": 4}, ["window_size=4", "use_local_attn=False"]),
    ({"use_local_attn": True}, ["use_local_attn=True", "window_size", "attn_types"]),
    ({**LOCAL, "attn_types": ["local"] * 2}, ["attn_types", "2", "n_layers=3"]),
    ({**LOCAL, "attn_types": ["global"] * 3}, ["window_size=4", "attn_types", "local"]),
    ({**LOCAL, "attn_types": ["local", "sliding", "local"]}, ["attn_types", "sliding"]),
    ({**ROTARY, "rotary_layers": [True]}, ["rotary_layers", "n_layers=3"]),
    ({"rotary_layers": [True] * 3}, ["rotary_layers", "positional_embedding_type", "standard"]),
    ({"rotary_scaling": {"rope_type": "linear"}}, ["rotary_scaling", "standard"]),
    ({"use_yarn_rope": True}, ["use_yarn_rope", "positional_embedding_type", "standard"]),
    ({"use_NTK_by_parts_rope": True}, ["use_NTK_by_parts_rope", "standard"]),
    ({"rotary_scaling_factor": 2.0}, ["rotary_scaling_factor", "standard"]),
    ({**ROTARY, **GIVEN_TWICE}, ["rotary_scaling_factor", "use_yarn_rope"]),
    ({**ROTARY, "rotary_scaling": {"rope_type": "linear", "beta": 2}}, ["'linear'", "'beta'"]),
    ({**ROTARY, "rotary_scaling": LONGROPE}, ["short_factor", "rotary_dim is 6"]),
    ({"tie_word_embeddings": True, "d_vocab_out": 5}, ["tie_word", "d_vocab_out=5", "d_vocab=11"]),
    ({"use_attention_sinks": True, "attn_scores_soft_cap": 5.0}, ["sinks", "attn_scores_soft_cap"]),
    ({"attn_only": True, "gated_mlp": True}, ["attn_only", "gated_mlp"]),
    ({"attn_only": True, "parallel_attn_mlp": True}, ["attn_only", "parallel_attn_mlp"]),
    ({"gated_mlp_biases": True}, ["gated_mlp_biases", "gated_mlp=False"]),
    ({"norm_place": "post", "normalization_type": None}, ["norm_place", "normalization_type"]),
    (
        {"norm_place": "post", "use_normalization_before_and_after": True},
        ["norm_place='post'", "use_normalization_before_and_after"],
    ),
    (
        {"norm_place": "stream", "use_normalization_before_and_after": True},
        ["norm_place='stream'", "use_normalization_before_and_after"],
    ),
    ({"norm_place": "stream", "normalization_type": None}, ["norm_place", "normalization_type"]),
    ({"norm_place": "stream", "parallel_attn_mlp": True}, ["norm_place", "parallel_attn_mlp"]),
    ({"norm_place": "skip", "parallel_attn_mlp": True}, ["norm_place", "parallel_attn_mlp"]),
    ({"norm_place": "stream", "first_norm": False}, ["first_norm", "norm_place"]),
    ({"n_token_types": -1}, ["n_token_types", "-1"]),
    ({"unembed_act_fn": "geluu"}, ["unembed_act_fn='geluu'", "'gelu'"]),
    ({"unembed_act_fn": "xielu"}, ["unembed_act_fn='xielu'"]),
    ({"post_embedding_ln_last": True}, ["post_embedding_ln_last", "post_embedding_ln=False"]),
    ({"final_rms": True, "final_norm": False}, ["final_rms", "final_norm"]),
    ({"unembedding": False, "tie_word_embeddings": True}, ["tie_word_embeddings", "unembedding"]),
    ({"unembedding": False, "unembed_act_fn": "relu"}, ["unembed_act_fn", "unembedding"]),
    ({"qk_norm_over": "all_heads"}, ["qk_norm_over", "use_qk_norm"]),
    ({"qk_norm_type": "LN"}, ["qk_norm_type", "use_qk_norm"]),
    (
        {"use_qk_norm": True, "qk_norm_type": "LN", "qk_norm_over": "all_heads"},
        ["qk_norm_over", "qk_norm_type"],
    ),
    ({"alibi_slopes": [1.0]}, ["alibi_slopes", "positional_embedding_type"]),
    ({"positional_embedding_type": "alibi", "alibi_slopes": [1.0]}, ["alibi_slopes", "n_heads"]),
    (
        {"positional_embedding_type": "none", "reserved_positions": 2},
        ["reserved_positions", "positional_embedding_type"],
    ),
    ({"chunked_attention": True}, ["chunked_attention", "use_local_attn"]),
    ({"query_growth": {"scale": 1.0, "lenght": 4}}, ["query_growth", "lenght"]),
    ({"use_attn_in": True, "n_key_value_heads": 2}, ["use_attn_in", "n_key_value_heads=2"]),
    # what is not supported
    ({"n_devices": 2}, ["n_devices=2"]),
    ({"load_in_4bit": True}, ["load_in_4bit"]),
    ({"quantization_method": "gptq"}, ["quantization_method"]),
    ({"use_dynamic_ntk_rope": True}, ["use_dynamic_ntk_rope", "rotary_scaling"]),
    ({"use_logn_attn": True}, ["use_logn_attn"]),
    ({"num_experts": 4, "experts_per_token": 2}, ["num_experts", "gated_mlp"]),
    ({"experts_per_token": 2}, ["experts_per_token", "num_experts"]),
    ({"eps": True}, ["eps", "True"]),
    ({"norm_weight_offset": float("nan")}, ["norm_weight_offset", "nan"]),
    ({"output_logits_soft_cap": float("nan")}, ["output_logits_soft_cap"]),
    ({"attn_scores_soft_cap": -3.0}, ["attn_scores_soft_cap", "-3.0"]),
    ({"d_embed": 3, "unembed_act_fn": "gelu"}, ["d_embed", "unembed_act_fn"]),
    ({"latent_q_rank": 7}, ["latent_q_rank", "latent_kv_rank"]),
    ({"latent_kv_rank": 7}, ["latent_kv_rank", "positional_embedding_type"]),
    ({"latent_kv_rank": 7, "positional_embedding_type": "rotary"}, ["rotary_dim", "d_head"]),
    (
        {
            "latent_kv_rank": 7,
            "positional_embedding_type": "rotary",
            "rotary_dim": 2,
            "n_key_value_heads": 2,
        },
        ["latent_kv_rank", "n_key_value_heads"],
    ),
    ({"router_scale": 2.0}, ["router_scale", "num_experts"]),
    ({**EXPERTS, "experts_per_token": 7}, ["experts_per_token=7", "num_experts=6"]),
    ({**EXPERTS, "router_groups": 4}, ["num_experts=6", "router_groups=4"]),
    ({**EXPERTS, "router_groups": 6}, ["experts_per_token=2", "router_top_groups=1"]),
    ({**EXPERTS, "router_group_members": 7}, ["router_group_members=7", "num_experts=6"]),
    (
        {**EXPERTS, "router_type": "sparsemixer", "experts_per_token": 1},
        ["sparsemixer", "experts_per_token=1"],
    ),
    ({**EXPERTS, "shared_expert_gate": True}, ["shared_expert_gate", "d_shared_expert"]),
    ({**EXPERTS, "expert_layers": [True]}, ["expert_layers", "n_layers"]),
    ({**EXPERTS, "router_type": "softmin"}, ["softmin", "softmax"]),
    # True is no size, infinity no number, and text no list
    *[({name: True}, [name, "True"]) for name in ("n_heads", "d_mlp", "d_vocab", "seed")],
    *[({name: float("inf")}, [name, "inf"]) for name in ("initializer_range", "clip_qkv")],
    ({"norm_weight_offset": float("inf")}, ["norm_weight_offset", "inf"]),
    ({"initializer_range": -0.5}, ["initializer_range", "-0.5"]),
    ({**ALIBI, "alibi_slopes": [1.0, 2.0, float("nan"), 3.0]}, ["alibi_slopes", "nan"]),
    ({"attn_types": "local"}, ["attn_types", "list", "'local'"]),
    ({"query_growth": {"scale": "x", "length": 4}}, ["query_growth", "scale", "'x'"]),
    ({"query_growth": {"scale": 1.0, "length": float("nan")}}, ["query_growth", "length"]),
    ({"query_growth": {"scale": 1.0, "length": 0}}, ["query_growth", "length", "positive"]),
    (
        {"query_growth": {"scale": 1.0, "length": 4, "unrotated_only": "no"}},
        ["query_growth", "unrotated_only", "'no'"],
    ),
    ({"seed": -1}, ["seed", "-1"]),
    ({"seed": 2**32}, ["seed", "2**32"]),
    ({"device": "nonsense"}, ["device='nonsense'"]),
    ({**EXPERTS, "router_groups": 0}, ["router_groups", "0"]),
    ({**EXPERTS, "router_top_groups": 0}, ["router_top_groups", "0"]),
    ({**EXPERTS, "router_top_groups": 2}, ["router_top_groups=2", "router_groups=1"]),
    ({**EXPERTS, "router_jitter": 0.5}, ["router_jitter", "router_type"]),
    ({**EXPERTS, "expert_limit": -1.0}, ["expert_limit", "-1.0"]),
    # what would be without effect
    ({"attn_types": ["local"] * 3}, ["attn_types", "use_local_attn=False"]),
    ({"attn_scale": 2.0, "use_attn_scale": False}, ["attn_scale=2.0", "use_attn_scale"]),
    ({"rotary_dim": 4}, ["rotary_dim=4", "positional_embedding_type='standard'"]),
    ({"rotary_base": 500.0}, ["rotary_base=500.0", "positional_embedding_type='standard'"]),
    ({**ROTARY, "rotary_base_local": 500.0}, ["rotary_base_local", "use_local_attn=False"]),
    ({**ROTARY, "yarn_beta_fast": 8.0}, ["yarn_beta_fast=8.0", "use_yarn_rope"]),
    ({**ROTARY, "NTK_by_parts_factor": 2.0}, ["NTK_by_parts_factor=2.0", "use_NTK_by_parts"]),
    ({**ROTARY, "rotary_scaling_global_only": True}, ["rotary_scaling_global_only"]),
    ({"qk_norm_after_rotary": True}, ["qk_norm_after_rotary", "use_qk_norm"]),
    ({"norm_weight_offset": 1.0, "normalization_type": None}, ["norm_weight_offset"]),
    ({"act_fn": "nonsense", "attn_only": True}, ["act_fn='nonsense'"]),
    ({"uses_rms_norm": True}, ["uses_rms_norm=True", "normalization_type='LN'"]),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED)
def test_impossible_and_contradicting_values_are_refused_by_name(
    changes: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ValueError, match=".") as error:
        config(**changes)
    for part in named:
        assert part in str(error.value)


def test_what_goes_together_is_not_refused() -> None:
    config(n_heads=3, d_head=7)
    config(use_attn_in=True, n_key_value_heads=4)
    config(use_attn_in=True, n_key_value_heads=2, ungroup_grouped_query_attention=True)
    config(attn_types=["global"] * 3)
    config(final_rms=True, normalization_type="RMS", uses_rms_norm=True)  # as Gemma's are
    config(initializer_range=0.0, seed=0, device="cuda:3", clip_qkv=None)
    config(n_layers=0)
    config(normalization_type=None, final_rms=False)
    config(tie_word_embeddings=True, d_vocab_out=11)


def test_a_model_wants_a_config() -> None:
    with pytest.raises((ValueError, TypeError), match="from_pretrained|cfg"):
        HookedTransformer("gpt2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="d_vocab.*tokenizer"):
        HookedTransformer(config(d_vocab=-1))


# --- dicts and JSON -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", native.VARIANTS)
def test_dict_and_json_bring_back_the_same_config(name: str) -> None:
    cfg = native.config(name, dtype=torch.bfloat16)
    assert HookedTransformerConfig.from_dict(cfg.to_dict()) == cfg
    again = HookedTransformerConfig.from_json(cfg.to_json())
    assert again == cfg
    assert again.block_specs() == cfg.block_specs()
    assert json.loads(cfg.to_json())["dtype"] == "bfloat16"


def test_tuples_survive_json_as_what_they_mean() -> None:
    kinds = {"attn_types": ("local", "global", "local"), "rotary_layers": (True, False, True)}
    scaling = {**LONGROPE, "short_factor": (1.0, 2.0, 3.0)}
    cfg = config(**ROTARY, **LOCAL, **kinds, rotary_scaling=scaling)
    again = HookedTransformerConfig.from_json(cfg.to_json())
    assert again.block_specs() == cfg.block_specs()


def test_to_dict_is_a_copy_of_every_field() -> None:
    cfg = config()
    values = cfg.to_dict()
    assert set(values) == {field.name for field in dataclasses.fields(cfg)}
    values["d_model"] = 99
    assert cfg.d_model == 24


def test_unwrap_takes_configs_and_dicts() -> None:
    cfg = config()
    assert HookedTransformerConfig.unwrap(cfg) is cfg
    assert HookedTransformerConfig.unwrap(dict(SMALL)) == cfg


def test_repr_shows_the_fields() -> None:
    assert "HookedTransformerConfig" in repr(config())
    assert "'d_model': 24" in repr(config())


@given(st.text(max_size=20))
def test_no_name_breaks_the_search_for_the_nearest(name: str) -> None:
    hint = closest(name, HookedTransformerConfig.__dataclass_fields__)
    assert hint == "" or "Did you mean" in hint


# --- a model and its config -----------------------------------------------------------------------


def test_models_made_from_one_config_do_not_change_each_other() -> None:
    cfg = config(tie_word_embeddings=True)
    first, second = HookedTransformer(cfg), HookedTransformer(cfg)
    first.to(torch.bfloat16)
    first.untie()
    first.set_use_attn_result(True)
    assert (cfg.dtype, cfg.tie_word_embeddings, cfg.use_attn_result) == (torch.float32, True, False)
    assert second.cfg == cfg
    out = second.generate(torch.tensor([[1, 2]]), 2, stop_at_eos=False, verbose=False)
    assert out.shape == (1, 4)  # its cache is as wide as its weights


def test_every_part_of_a_model_sees_its_config() -> None:
    model = HookedTransformer(config())
    for part in (model.embed, model.unembed, model.blocks[2], model.blocks[2].attn):
        assert part.cfg is model.cfg


# --- expansion ------------------------------------------------------------------------------------


def test_specs_are_frozen_hashable_and_one_per_layer() -> None:
    kinds = {"attn_types": ["local", "global", "local"], "scale_attn_by_inverse_layer_idx": True}
    specs = config(**LOCAL, **kinds, **ROTARY, rotary_layers=[True, True, False]).block_specs()
    assert [spec.layer for spec in specs] == [0, 1, 2]
    assert [spec.attention.window for spec in specs] == [4, None, 4]
    assert [spec.attention.rotary is not None for spec in specs] == [True, True, False]
    scales = [spec.attention.scale for spec in specs]
    assert scales == pytest.approx([6**-0.5, 6**-0.5 / 2, 6**-0.5 / 3])
    assert len({hash(spec) for spec in specs}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        specs[0].layer = 5  # type: ignore[misc]
    assert copy.deepcopy(specs) == specs


@pytest.mark.parametrize(
    ("classic", "modern"),
    [
        (
            {"rotary_scaling_factor": 2.5},
            {"rotary_scaling": {"rope_type": "linear", "factor": 2.5},
             "rotary_scaling_global_only": True},
        ),
        (
            {"use_NTK_by_parts_rope": True, "NTK_by_parts_factor": 32.0,
             "NTK_original_ctx_len": 16},
            {"rotary_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                                "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
        ),
        (
            {"use_yarn_rope": True, "yarn_factor": 4.0, "yarn_attention_factor": 1.3,
             "yarn_original_max_position_embeddings": 16, "yarn_global_attn_only": True},
            {"rotary_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3,
                                "original_max_position_embeddings": 16},
             "rotary_scaling_global_only": True},
        ),
    ],
)  # fmt: skip
def test_classic_rotary_flags_are_other_names_for_a_scaling(
    classic: dict[str, Any], modern: dict[str, Any]
) -> None:
    kinds = {**ROTARY, **LOCAL, "attn_types": ["local", "global", "local"]}
    specs = config(**kinds, **classic).block_specs()
    assert specs == config(**kinds, **modern).block_specs()
    scaled = [spec.attention.rotary.scaling.rope_type != "default" for spec in specs]
    only_global = modern.get("rotary_scaling_global_only", False)
    assert scaled == ([False, True, False] if only_global else [True] * 3)


def test_local_layers_may_turn_at_a_base_of_their_own() -> None:
    kinds = {**ROTARY, **LOCAL, "attn_types": ["local", "global", "local"]}
    specs = config(**kinds, rotary_base=500.0, rotary_base_local=10.0).block_specs()
    assert [spec.attention.rotary.base for spec in specs] == [10.0, 500.0, 10.0]


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 6**-0.5),
        ({"attn_scale": 2.0}, 0.5),
        ({"use_attn_scale": False}, 1.0),
    ],
)
def test_scores_are_divided_by_the_scale_in_force(changes: dict[str, Any], scale: float) -> None:
    assert config(**changes).block_specs()[0].attention.scale == pytest.approx(scale)


def test_folded_norms_keep_weights_where_nothing_follows_to_fold_into() -> None:
    spec = config(normalization_type="RMSPre", norm_place="both", use_qk_norm=True).block_specs()[0]
    assert (spec.norm.kind, spec.post_norm.kind) == ("RMSPre", "RMS")
    assert spec.attention.qk_norm.kind == "RMS"
    assert config(final_rms=True).final_norm_spec().kind == "RMS"
    assert config(normalization_type="LNPre", final_rms=True).final_norm_spec().kind == "RMSPre"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rotary_base", "x"), ("parallel_attn_mlp", "false"), ("gated_mlp", "no"), ("eps", None),
        ("seed", 1.5), ("seed", "a"), ("n_ctx", 4.0), ("alibi_slopes", "abcd"),
    ],
)  # fmt: skip
def test_flags_are_flags_and_numbers_are_numbers(field: str, value: Any) -> None:
    cfg = HookedTransformerConfig(n_layers=1, d_model=8, n_ctx=4, d_head=4, d_vocab=7)
    object.__setattr__(cfg, field, value)  # in tests the annotations refuse it first
    with pytest.raises(ValueError, match=rf"{field} must be .*, got {value!r}"):
        check_values(cfg)


def test_integers_of_numpy_become_integers() -> None:
    cfg = config()
    object.__setattr__(cfg, "n_ctx", np.int64(5))  # in tests the annotations refuse it first
    check_values(cfg)
    assert (cfg.n_ctx, type(cfg.n_ctx)) == (5, int)


def test_copies_share_no_dictionary_and_no_list() -> None:
    cfg = loud.build(
        positional_embedding_type="rotary",
        rotary_scaling={"rope_type": "linear", "factor": 2.0},
        window_size=4,
        attn_types=["local", "global", "local"],
        use_local_attn=True,
    ).cfg
    fields, model = cfg.to_dict(), HookedTransformer(cfg)
    for copied in (fields["rotary_scaling"], model.cfg.rotary_scaling):
        copied["factor"] = 8.0
    for copied in (fields["attn_types"], model.cfg.attn_types):
        copied.append("global")
    assert cfg.rotary_scaling["factor"] == 2.0
    assert cfg.attn_types == ["local", "global", "local"]


def test_a_model_is_made_where_its_config_says() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cfg = HookedTransformerConfig(
            n_layers=1, d_model=8, n_ctx=4, d_head=4, d_vocab=5, act_fn="relu", dtype=dtype,
            device="meta", init_weights=False,
        )  # fmt: skip
        model = HookedTransformer(cfg)
        assert {p.device.type for p in model.parameters()} == {"meta"}
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert model.cfg.device == "meta"
        cfg.device = "cpu"
        model.load_state_dict(HookedTransformer(cfg).state_dict(), assign=True)
        assert model.cfg.device == "cpu"
        cfg.device = "meta"
        here = HookedTransformer(cfg, move_to_device=False)
        assert {p.device.type for p in here.parameters()} == {"cpu"}
