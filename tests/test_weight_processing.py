"""Processing weights: what the model says stays, and each step leaves the facts it promises."""

import copy
import inspect
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import native
import pytest
import tiny
import torch

from transformer_lens_lite import HookedTransformer, HookedTransformerConfig
from transformer_lens_lite import weight_processing as wp
from transformer_lens_lite.components.storage import in_matrix, matmul_ready, out_matrix

# Awkward sizes: no two equal, three heads that do not fill d_model, an odd vocabulary.
SIZES = {
    "n_layers": 2, "d_model": 22, "n_ctx": 16, "d_head": 6, "n_heads": 4, "d_mlp": 26,
    "d_vocab": 29, "eps": 1e-3, "act_fn": "gelu_new", "init_weights": False,
    "device": "cpu",
}  # fmt: skip
RMS = {"normalization_type": "RMS", "positional_embedding_type": "rotary", "rotary_dim": 4}
GATED = {"gated_mlp": True, "act_fn": "silu"}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "norm_topk_prob": True}
FOLDABLE = {
    "ln": {},
    "ln_tied": {"tie_word_embeddings": True},
    "ln_gated": {**GATED},
    "ln_gated_biases": {**GATED, "gated_mlp_biases": True},
    "ln_gqa_rotary": {"n_key_value_heads": 2, "positional_embedding_type": "rotary"},
    "ln_mqa": {"n_key_value_heads": 1},
    "ln_parallel": {"parallel_attn_mlp": True},
    "ln_parallel_gqa": {"parallel_attn_mlp": True, "n_key_value_heads": 2, **GATED},
    "ln_both": {"norm_place": "both"},
    "ln_final_rms": {"final_rms": True, "norm_weight_offset": 1.0},
    "ln_attn_only": {"attn_only": True, "act_fn": None},
    "ln_after_embedding": {"post_embedding_ln": True, "positional_embedding_type": "alibi"},
    "ln_multipliers": {"embed_scale": 3.0, "residual_scale": 0.6, "logit_scale": 0.4},
    "ln_qk_norm": {"use_qk_norm": True},
    "ln_clipped": {"clip_qkv": 0.4},
    "ln_sinks": {"use_attention_sinks": True},
    "ln_softcap": {"output_logits_soft_cap": 2.0, "attn_scores_soft_cap": 1.5},
    "ln_unscaled": {"use_attn_scale": False, "attention_dir": "bidirectional"},
    "ln_local": {"use_local_attn": True, "attn_types": ["local", "global"], "window_size": 3},
    "ln_solu": {"act_fn": "solu_ln"},
    "ln_after_positions": {
        "post_embedding_ln": True, "post_embedding_ln_last": True, "n_token_types": 2,
    },
    "ln_token_types": {"n_token_types": 3},
    "ln_unembed_transform": {"unembed_act_fn": "gelu", "tie_word_embeddings": True},
    "rms_no_final_norm": {**RMS, "final_norm": False, "tie_word_embeddings": True},
    "ln_no_final_norm": {"final_norm": False},
    "ln_no_first_norm": {"first_norm": False},
    "ln_solu_gated": {"act_fn": "solu_ln", "gated_mlp": True},
    "rms": {**RMS},
    "rms_tied_offset": {**RMS, **GATED, "tie_word_embeddings": True, "norm_weight_offset": 1.0},
    "rms_gqa_gated": {**RMS, **GATED, "n_key_value_heads": 2},
    "rms_both_softcap": {
        **RMS, **GATED, "norm_place": "both", "norm_weight_offset": 1.0, "use_qk_norm": True,
        "output_logits_soft_cap": 2.0, "tie_word_embeddings": True,
    },
    "rms_qk_norm_full": {**RMS, "use_qk_norm": True, "qk_norm_over": "all_heads"},
    "rms_solu": {**RMS, "act_fn": "solu_ln"},
    "rms_latent": {**RMS, "rotary_dim": 4, "latent_kv_rank": 9, "d_value": 5, "latent_q_rank": 7},
    "rms_latent_plain": {**RMS, "rotary_dim": 4, "latent_kv_rank": 9},
    "ln_latent": {"positional_embedding_type": "rotary", "rotary_dim": 4, "latent_kv_rank": 9},
    "rms_experts": {**RMS, **GATED, **EXPERTS, "d_shared_expert": 7, "shared_expert_gate": True},
    "ln_experts": {**GATED, **EXPERTS, "d_shared_expert": 7, "expert_layers": [False, True]},
    "rms_sinks": {**RMS, **GATED, "use_attention_sinks": True, "n_key_value_heads": 2},
    "rms_experts_weighed_before": {**RMS, **GATED, **EXPERTS, "router_on_input": True},
}  # fmt: skip
UNFOLDABLE = {
    "ln_experts_weighed_before": {**GATED, **EXPERTS, "router_on_input": True},
    "ln_post": {"norm_place": "post"},
    "rms_post": {**RMS, **GATED, "norm_place": "post", "use_qk_norm": True},
    "ln_stream": {
        "norm_place": "stream",
        "post_embedding_ln": True,
        "post_embedding_ln_last": True,
        "final_norm": False,
        "unembed_act_fn": "gelu",
        "n_token_types": 2,
        "tie_word_embeddings": True,
        "attention_dir": "bidirectional",
    },
    "ln_skip": {"norm_place": "skip"},
    "ln_shortformer": {"positional_embedding_type": "shortformer"},
    "rms_shortformer": {**RMS, "rotary_dim": None, "positional_embedding_type": "shortformer"},
    "no_norm": {"normalization_type": None},
    "folded_ln": {"normalization_type": "LNPre"},
    "folded_rms": {**RMS, "normalization_type": "RMSPre"},
}
CASES = {**FOLDABLE, **UNFOLDABLE}
STEPS = {
    "fold_ln": wp.fold_layer_norm,
    "center_writing_weights": wp.center_writing_weights,
    "center_unembed": wp.center_unembed,
    "fold_value_biases": wp.fold_value_biases,
    "refactor_factored_attn_matrices": wp.refactor_factored_attn_matrices,
}
# what is left out with a warning, by case; everything else must not warn
LEFT_OUT = {
    "ln_both": {"center_writing_weights"},
    "ln_final_rms": {"center_writing_weights"},
    "ln_post": {"center_writing_weights"},
    "ln_no_first_norm": {"center_writing_weights"},
    "ln_no_final_norm": {"center_writing_weights"},
    "ln_softcap": {"center_unembed"},
    "rms_both_softcap": {"center_unembed"},
    "ln_shortformer": {"fold_ln"},
    "rms_shortformer": {"fold_ln"},
    "ln_experts_weighed_before": {"fold_ln"},
    "ln_clipped": {"fold_value_biases"},
    "ln_sinks": {"fold_value_biases"},
    "rms_sinks": {"fold_value_biases"},
}
NOT_REFACTORABLE = {
    name
    for name, fields in CASES.items()
    if fields.get("positional_embedding_type") == "rotary"
    or fields.get("use_qk_norm")
    or fields.get("clip_qkv")
}


def with_and_without_refactoring(cases: Iterable[str]) -> list[tuple[str, bool]]:
    """(case, refactor) for all that may be."""
    return [
        (c, flag) for c in cases for flag in (False, True) if not flag or c not in NOT_REFACTORABLE
    ]


TOKENS = torch.randint(29, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models this small only wait for a second thread: ten times longer on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@torch.no_grad()
def loud_model(seed: int = 0, **fields: Any) -> HookedTransformer:
    """Matrices N(0, .25), norm weights += N(0, .3), every other vector N(0, .3).

    As loud as tests/tiny.py, and for the same reason: quiet biases and unit norms hide mistakes.
    """
    model = HookedTransformer(HookedTransformerConfig(**{**SIZES, **fields}))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        is_matrix = leaf.startswith(("W_", "_W_"))
        start = parameter if leaf == "w" else torch.zeros_like(parameter)  # w: 1 - offset
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(0.25 * noise if is_matrix else start + 0.3 * noise)
    return model.eval()


def model_of(processed: tuple[HookedTransformerConfig, dict]) -> HookedTransformer:
    cfg, state = processed
    model = HookedTransformer(cfg)
    model.load_state_dict(state, strict=True)
    return model.eval()


@torch.no_grad()
def log_probs(model: HookedTransformer, **kwargs: Any) -> torch.Tensor:
    return model(TOKENS, **kwargs).log_softmax(-1)


def quietly(function: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def processed_model(model: HookedTransformer, **flags: bool) -> HookedTransformer:
    return model_of(quietly(wp.process_weights, model.cfg, model.state_dict(), **flags))


# --- what the model says stays ------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_everything_on_leaves_log_probs(case: str) -> None:
    model = loud_model(**CASES[case])
    processed = processed_model(model)
    torch.testing.assert_close(log_probs(processed), log_probs(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("case", "step"),
    [
        (c, s)
        for c in CASES
        for s in STEPS
        if c not in NOT_REFACTORABLE or not s.startswith("refactor")
    ],
)
def test_each_step_alone_leaves_log_probs(case: str, step: str) -> None:
    model = loud_model(**CASES[case])
    processed = model_of(quietly(STEPS[step], model.cfg, model.state_dict()))
    torch.testing.assert_close(log_probs(processed), log_probs(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["ln", "ln_gqa_rotary", "ln_after_embedding", "rms_gqa_gated"])
def test_padded_rows_stay(case: str) -> None:
    """Folded value biases rest on patterns whose rows sum to one, with padding too."""
    model = loud_model(**CASES[case])
    mask = torch.ones_like(TOKENS)
    mask[0, :5] = 0
    mask[1, 9:] = 0
    before, after = (log_probs(m, attention_mask=mask) for m in (model, processed_model(model)))
    torch.testing.assert_close(after[mask == 1], before[mask == 1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", sorted(set(CASES) - NOT_REFACTORABLE))
def test_everything_and_refactored_leaves_log_probs(case: str) -> None:
    model = loud_model(**CASES[case])
    processed = processed_model(model, refactor_factored_attn_matrices=True)
    torch.testing.assert_close(log_probs(processed), log_probs(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_loud_model_hears_every_weight(case: str) -> None:
    """The tests above mean something: each norm weight and bias, changed a little, is heard."""
    model = loud_model(**CASES[case])
    before = log_probs(model)
    for name, parameter in model.named_parameters():
        if name.endswith((".w", ".b", "b_V", "b_O", "b_gate", "b_up", "b_U")):
            with torch.no_grad():
                parameter += 0.2 * torch.randn_like(parameter)
            assert (log_probs(model) - before).abs().max() > 3e-4, name
            before = log_probs(model)


# --- the facts each step leaves -----------------------------------------------------------------


@pytest.mark.parametrize("case", FOLDABLE)
def test_folding_removes_the_norms_that_are_read_by_matrices(case: str) -> None:
    model = loud_model(**CASES[case])
    cfg, state = quietly(wp.fold_layer_norm, model.cfg, model.state_dict())
    kept = (
        "ln1_post.w",
        "ln2_post.w",
        "q_norm.w",
        "k_norm.w",
        "embed.ln.w",
        "ln_embed.w",
        "transform.ln.w",
        "mlp.ln.w",
        "latent_norm.w",
    )
    left = [name for name in state if name.endswith(".w")]
    assert all(name.endswith(kept) for name in left), left
    assert cfg.normalization_type == f"{model.cfg.normalization_type}Pre"
    assert not cfg.tie_word_embeddings
    for name in left:
        if not name.endswith("mlp.ln.w") or cfg.gated_mlp:
            assert state[name] is model.state_dict()[name] or torch.equal(
                state[name], model.state_dict()[name]
            )


@pytest.mark.parametrize("case", FOLDABLE)
def test_folding_leaves_what_the_norms_compute(case: str) -> None:
    """`hook_normalized` is before weight and bias, and `hook_scale` the size of the input."""
    model = loud_model(**CASES[case])
    folded = processed_model(
        model, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )

    def wanted(name: str) -> bool:
        return name.endswith(("hook_normalized", "hook_scale", "hook_pattern", "hook_resid_post"))

    with torch.no_grad():
        _, before = model.run_with_cache(TOKENS, names_filter=wanted)
        _, after = folded.run_with_cache(TOKENS, names_filter=wanted)
    assert set(before) == set(after)
    assert any(name.endswith("ln1.hook_normalized") for name in before)
    for name in before:
        torch.testing.assert_close(after[name], before[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", UNFOLDABLE)
def test_folding_leaves_alone_what_it_cannot_fold(case: str) -> None:
    model = loud_model(**CASES[case])
    cfg, state = quietly(wp.fold_layer_norm, model.cfg, model.state_dict())
    assert cfg == model.cfg
    assert same_states(state, model.state_dict())


def test_folding_makes_reading_matrices_of_layer_norm_mean_zero() -> None:
    model = loud_model(**GATED)
    _, state = wp.fold_layer_norm(model.cfg, model.state_dict())
    for name in ("attn.W_Q", "attn.W_K", "attn.W_V", "mlp.W_in", "mlp.W_gate"):
        assert state[f"blocks.1.{name}"].mean(-2).abs().max() < 1e-7
    assert state["unembed.W_U"].mean(-2).abs().max() < 1e-7


def test_folded_solu_norm_becomes_the_identity() -> None:
    model = loud_model(**CASES["ln_solu"])
    _, state = wp.fold_layer_norm(model.cfg, model.state_dict())
    assert (state["blocks.0.mlp.ln.w"] == 1).all()
    assert (state["blocks.0.mlp.ln.b"] == 0).all()


def test_a_gate_gets_biases_only_when_a_norm_hands_one_over() -> None:
    model = loud_model(**GATED)
    cfg, state = wp.fold_layer_norm(model.cfg, model.state_dict())
    assert cfg.gated_mlp_biases
    assert state["blocks.0.mlp.b_gate"].abs().max() > 0.1
    assert torch.equal(state["blocks.0.mlp.b_in"], model.blocks[0].mlp.b_in)
    with torch.no_grad():
        for block in model.blocks:
            block.ln2.b.zero_()
    cfg, state = wp.fold_layer_norm(model.cfg, model.state_dict())
    assert not cfg.gated_mlp_biases
    assert "blocks.0.mlp.b_gate" not in state
    torch.testing.assert_close(
        log_probs(model_of((cfg, state))), log_probs(model), atol=1e-4, rtol=0
    )


def test_one_layers_norm_bias_gives_every_gate_its_biases() -> None:
    model = loud_model(**GATED)
    with torch.no_grad():
        model.blocks[0].ln2.b.zero_()
    processed = processed_model(model)
    torch.testing.assert_close(log_probs(processed), log_probs(model), atol=1e-4, rtol=0)
    assert (processed.blocks[0].mlp.b_gate == 0).all()


LEFT_OUT_OF_CENTRING = {
    *(name for name, steps in LEFT_OUT.items() if "center_writing_weights" in steps),
    *("ln_after_embedding", "ln_after_positions", "ln_stream", "ln_skip"),
}
CENTRED = [
    name
    for name in CASES
    if name.startswith(("ln", "folded_ln")) and name not in LEFT_OUT_OF_CENTRING
]


@pytest.mark.parametrize("case", CENTRED)
def test_centred_streams_have_mean_zero(case: str) -> None:
    model = loud_model(**CASES[case])
    processed = processed_model(model)
    names = lambda name: "hook_resid" in name or name.endswith(("attn_out", "mlp_out", "embed"))  # noqa: E731
    with torch.no_grad():
        _, before = model.run_with_cache(TOKENS, names_filter=names)
        _, after = processed.run_with_cache(TOKENS, names_filter=names)
    for name in after:
        if name == "hook_pos_embed" and case == "ln_shortformer":
            torch.testing.assert_close(after[name], before[name])
            continue
        assert after[name].mean(-1).abs().max() < 2e-6, name
        least = 1e-3 if name == "hook_token_type_embed" else 1e-2  # the same row everywhere
        assert before[name].mean(-1).abs().max() > least, name


def test_the_norm_behind_the_embedding_and_what_it_reads_are_kept() -> None:
    model = loud_model(**CASES["ln_after_embedding"])
    cfg, state = wp.center_writing_weights(model.cfg, model.state_dict())
    assert torch.equal(state["embed.W_E"], model.embed.W_E)
    assert torch.equal(state["embed.ln.w"], model.embed.ln.w)
    for name in ("embed.ln.b", "blocks.1.attn.W_O", "blocks.1.mlp.b_out"):
        assert state[name].mean(-1).abs().max() < 1e-7
    model = loud_model(**CASES["ln_after_positions"])
    cfg, state = wp.center_writing_weights(model.cfg, model.state_dict())
    assert torch.equal(state["embed.W_E"], model.embed.W_E)
    assert torch.equal(state["ln_embed.w"], model.ln_embed.w)
    assert state["ln_embed.b"].mean(-1).abs().max() < 1e-7


@pytest.mark.parametrize("case", ["rms_gqa_gated", "no_norm", "rms_post", "folded_rms"])
def test_means_that_are_read_are_kept_without_a_word(case: str) -> None:
    model = loud_model(**CASES[case])
    cfg, state = wp.center_writing_weights(model.cfg, model.state_dict())
    assert same_states(state, model.state_dict())
    assert cfg == model.cfg


@pytest.mark.parametrize("case", ["ln", "ln_tied", "rms_gqa_gated", "rms_post", "no_norm"])
def test_centred_logits_have_mean_zero(case: str) -> None:
    model = loud_model(**CASES[case])
    cfg, state = wp.center_unembed(model.cfg, model.state_dict())
    assert state["unembed.W_U"].mean(-1).abs().max() < 1e-7
    assert state["unembed.b_U"].mean().abs() < 1e-7
    assert model_of((cfg, state))(TOKENS).mean(-1).abs().max() < 1e-5


@pytest.mark.parametrize("case", ["ln", "ln_mqa", "ln_gqa_rotary", "rms_gqa_gated", "rms_post"])
def test_value_biases_end_up_in_the_output_bias(case: str) -> None:
    model = loud_model(**CASES[case])
    cfg, state = wp.fold_value_biases(model.cfg, model.state_dict())
    assert cfg == model.cfg
    b_V = "attn._b_V" if cfg.n_key_value_heads else "attn.b_V"
    for layer, block in enumerate(model.blocks):
        assert (state[f"blocks.{layer}.{b_V}"] == 0).all()
        expected = block.attn.b_O + torch.einsum("nh,nhm->m", block.attn.b_V, block.attn.W_O)
        torch.testing.assert_close(state[f"blocks.{layer}.attn.b_O"], expected)


def test_output_biases_stay_centred_when_value_biases_join_them() -> None:
    model = loud_model()
    _, state = wp.process_weights(model.cfg, model.state_dict())
    assert state["blocks.1.attn.b_O"].mean().abs() < 1e-7


@pytest.mark.parametrize("fields", [{}, {"n_key_value_heads": 2}, {"d_head": 40, "n_heads": 2}])
def test_refactored_factors_are_even_and_orthonormal(fields: dict[str, Any]) -> None:
    model = loud_model(**fields)
    cfg, state = wp.refactor_factored_attn_matrices(model.cfg, model.state_dict())
    new = model_of((cfg, state)).blocks[0].attn
    old = model.blocks[0].attn
    torch.testing.assert_close(new.W_V @ new.W_O, old.W_V @ old.W_O, atol=1e-4, rtol=0)
    torch.testing.assert_close(new.W_Q @ new.W_K.mT, old.W_Q @ old.W_K.mT, atol=1e-4, rtol=0)
    groups = cfg.n_key_value_heads or cfg.n_heads
    rows = new.W_O.transpose(1, 2).reshape(groups, -1, cfg.d_head)
    rank = min(cfg.d_head, cfg.d_model)
    gram = (rows.mT @ rows)[:, :rank, :rank]
    torch.testing.assert_close(gram, torch.eye(rank).expand_as(gram), atol=1e-5, rtol=0)
    queries = wp.with_bias_row(new.W_Q, new.b_Q).reshape(groups, -1, cfg.d_head)
    keys = wp.with_bias_row(new.W_K, new.b_K)[:: cfg.n_heads // groups]
    for factor in (queries, keys):
        gram = factor.mT @ factor
        assert (gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2))).abs().max() < 1e-4
    torch.testing.assert_close(queries.norm(dim=1), keys.norm(dim=1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", sorted(NOT_REFACTORABLE))
def test_factors_that_are_not_free_are_not_refactored(case: str) -> None:
    model = loud_model(**CASES[case])
    with pytest.raises(ValueError, match="rotary|use_qk_norm|clip_qkv"):
        wp.refactor_factored_attn_matrices(model.cfg, model.state_dict())


# --- what holds for all of them -----------------------------------------------------------------


def same_states(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("case", CASES)
def test_inputs_are_not_changed(case: str) -> None:
    model = loud_model(**CASES[case])
    state = model.state_dict()
    cfg_before, state_before = copy.deepcopy((model.cfg, state))
    quietly(wp.process_weights, model.cfg, state)
    assert model.cfg == cfg_before
    assert same_states(state, state_before)


@pytest.mark.parametrize(("case", "refactor"), with_and_without_refactoring(CASES))
def test_twice_is_once(case: str, refactor: bool) -> None:
    flags = {"refactor_factored_attn_matrices": refactor}
    model = loud_model(**CASES[case])
    cfg, state = quietly(wp.process_weights, model.cfg, model.state_dict(), **flags)
    again_cfg, again = quietly(wp.process_weights, cfg, state, **flags)
    assert again_cfg == cfg
    assert again.keys() == state.keys()
    for name in state:
        # singular vectors are only as sharp as the gaps between singular values
        tolerance = 1e-3 if refactor and ".attn." in name else 1e-6
        torch.testing.assert_close(again[name], state[name], atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_what_is_left_out_is_said_once(case: str) -> None:
    model = loud_model(**CASES[case])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wp.process_weights(model.cfg, model.state_dict())
    said = [str(warning.message) for warning in caught]
    assert {text.partition(" is left out")[0] for text in said} == LEFT_OUT.get(case, set())
    assert len(said) == len(LEFT_OUT.get(case, set()))


@pytest.mark.parametrize("step", ["center_unembed", "fold_value_biases"])
def test_a_step_alone_says_why_it_is_left_out(step: str) -> None:
    model = loud_model(**CASES["ln_softcap" if step == "center_unembed" else "ln_sinks"])
    with pytest.warns(UserWarning, match="output_logits_soft_cap=2.0|use_attention_sinks=True"):
        cfg, state = STEPS[step](model.cfg, model.state_dict())
    assert cfg == model.cfg
    assert same_states(state, model.state_dict())


def test_sinks_and_clipping_without_value_biases_need_no_warning() -> None:
    for case in ("rms_sinks", "ln_clipped"):
        state = loud_model(**CASES[case]).state_dict()
        for name in state:
            if name.endswith(("b_V", "ln1.b")):
                state[name] = torch.zeros_like(state[name])
        wp.process_weights(HookedTransformerConfig(**{**SIZES, **CASES[case]}), state)


def test_a_norms_bias_that_becomes_the_values_bias_counts() -> None:
    model = loud_model(**CASES["ln_clipped"])
    with torch.no_grad():
        for block in model.blocks:
            block.attn.b_V.zero_()
    with pytest.warns(UserWarning, match="clip_qkv=0.4"):
        processed = model_of(wp.process_weights(model.cfg, model.state_dict()))
    torch.testing.assert_close(log_probs(processed), log_probs(model), atol=1e-4, rtol=0)


def test_attention_only_models_get_no_second_norm() -> None:
    model = loud_model(**CASES["ln_attn_only"])
    processed = processed_model(model)
    assert not any("ln2" in name for name in [*processed.state_dict(), *processed.hook_dict])


@pytest.mark.parametrize("case", ["ln_tied", "rms_tied_offset"])
def test_tied_embeddings_part_and_only_what_changes_changes(case: str) -> None:
    model = loud_model(**CASES[case])
    W_E = model.embed.W_E.detach().clone()
    cfg, state = wp.process_weights(model.cfg, model.state_dict(), center_writing_weights=False)
    assert not cfg.tie_word_embeddings
    assert model.cfg.tie_word_embeddings
    assert torch.equal(state["embed.W_E"], W_E)
    assert not torch.allclose(state["unembed.W_U"], W_E.T)
    processed = model_of((cfg, state))
    assert processed.unembed.W_U.data_ptr() != processed.embed.W_E.data_ptr()


def test_tied_weights_without_an_unembedding_get_one() -> None:
    model = loud_model(**CASES["ln_tied"])
    state = model.state_dict()
    del state["unembed.W_U"]
    processed = model_of(wp.center_writing_weights(model.cfg, state))
    torch.testing.assert_close(log_probs(processed), log_probs(model), atol=1e-4, rtol=0)


def test_nothing_asked_for_passes_the_tensors_on() -> None:
    model = loud_model(**CASES["ln_tied"])
    state = model.state_dict()
    flags = dict.fromkeys(STEPS, False)
    cfg, new = wp.process_weights(model.cfg, state, **flags)
    assert cfg == model.cfg
    assert cfg is not model.cfg
    assert all(new[name] is state[name] for name in state)


def test_steps_have_the_flags_names() -> None:
    parameters = inspect.signature(wp.process_weights).parameters.values()
    flags = [each.name for each in parameters if each.annotation is bool and each.name != "consume"]
    assert flags == list(STEPS)
    assert {step.name for step in wp.Step.__subclasses__()} == set(flags)


@pytest.mark.parametrize(
    ("case", "refactor"),
    with_and_without_refactoring(["ln_gated", "ln_gqa_rotary", "ln_mqa", "rms_gqa_gated"]),
)
def test_weights_stay_ready_for_matrix_products(case: str, refactor: bool) -> None:
    model = loud_model(**CASES[case])
    flags = {"refactor_factored_attn_matrices": refactor}
    _, state = wp.process_weights(model.cfg, model.state_dict(), **flags)
    for name, tensor in state.items():
        leaf = name.rsplit(".", 1)[-1].removeprefix("_")
        if leaf in ("W_Q", "W_K", "W_V"):
            assert matmul_ready(tensor) is tensor, name
            assert in_matrix(tensor).data_ptr() == tensor.data_ptr(), name
        if leaf == "W_O":
            assert out_matrix(tensor).data_ptr() == tensor.data_ptr(), name
        if leaf in ("W_in", "W_gate", "W_out", "W_U"):
            assert tensor.T.is_contiguous(), name


def test_a_checkpoints_own_layout_stays() -> None:
    """GPT-2 keeps queries, keys and values beside each other, the transpose of what we allocate."""
    model = loud_model()
    state = model.state_dict()
    for layer in range(2):
        names = [f"blocks.{layer}.attn.W_{x}" for x in "QKV"]
        fused = torch.cat([state[name].permute(1, 0, 2).flatten(1) for name in names], 1)
        for name, part in zip(names, fused.chunk(3, 1), strict=True):
            state[name] = part.unflatten(1, (4, 6)).permute(1, 0, 2)
    cfg, new = wp.process_weights(model.cfg, state)
    for name in new:
        if name.endswith(("W_Q", "W_K", "W_V")):
            assert matmul_ready(new[name]) is new[name]
            assert in_matrix(new[name]).data_ptr() == new[name].data_ptr()
    torch.testing.assert_close(log_probs(model_of((cfg, new))), log_probs(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["ln_gated", "rms_gqa_gated"])
def test_half_precision_is_rounded_once(case: str, dtype: torch.dtype) -> None:
    model = loud_model(**CASES[case]).to(dtype)
    state = model.state_dict()
    cfg, new = wp.process_weights(model.cfg, state)
    assert all(tensor.dtype == dtype for tensor in new.values())
    assert cfg.dtype == dtype
    wide = {name: tensor.float() for name, tensor in state.items()}
    _, exact = wp.process_weights(model.cfg, wide)
    for name in new:
        assert torch.equal(new[name], exact[name].to(dtype)), name


def test_processing_adds_no_more_error_than_bf16_has() -> None:
    plain, processed = 0.0, 0.0
    for seed in range(4):
        model = loud_model(seed, **CASES["rms_gqa_gated"])
        half = copy.deepcopy(model).to(torch.bfloat16)
        cfg, state = wp.process_weights(half.cfg, half.state_dict())
        exact = log_probs(model)
        plain += (log_probs(half).float() - exact).pow(2).mean().item()
        processed += (log_probs(model_of((cfg, state))).float() - exact).pow(2).mean().item()
    assert processed < 1.5 * plain


def test_float64_is_computed_in_float64() -> None:
    model = loud_model(dtype=torch.float64)
    processed = processed_model(model)
    assert (log_probs(processed) - log_probs(model)).abs().max() < 1e-12
    wide = {name: tensor.float() for name, tensor in model.state_dict().items()}
    _, in_single = wp.process_weights(model.cfg, wide)
    _, in_double = wp.process_weights(model.cfg, wide, dtype=torch.float64)
    exact = {name: tensor.double() for name, tensor in wide.items()}
    _, exact = wp.process_weights(model.cfg, exact)
    name = "blocks.0.attn.b_Q"
    assert torch.equal(in_double[name], exact[name].float())
    assert not torch.equal(in_single[name], exact[name].float())


def test_weights_that_were_folded_under_a_config_that_says_otherwise() -> None:
    model = loud_model()
    _, state = wp.fold_layer_norm(model.cfg, model.state_dict())
    with pytest.raises(ValueError, match="'LN' but the weights have no blocks.0.ln1.w.*'LNPre'"):
        wp.process_weights(model.cfg, state)


def test_masks_of_old_checkpoints_pass_through() -> None:
    model = loud_model()
    state = model.state_dict()
    mask = torch.ones(4, 4, dtype=torch.bool)
    state["blocks.0.attn.mask"] = mask
    cfg, new = wp.process_weights(model.cfg, state)
    assert new["blocks.0.attn.mask"] is mask
    torch.testing.assert_close(log_probs(model_of((cfg, new))), log_probs(model), atol=1e-4, rtol=0)


def test_hooks_are_there_after_processing() -> None:
    model = loud_model(**CASES["ln"])
    processed = processed_model(model)
    assert list(processed.hook_dict) == list(model.hook_dict)


def test_result_needs_no_gradient() -> None:
    model = loud_model()
    parameters = dict(model.named_parameters())
    _, state = wp.process_weights(model.cfg, parameters)
    assert not state["blocks.0.attn.W_Q"].requires_grad


def test_processed_names_the_steps_that_were_taken_and_no_others(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="center_unembed is left out"):
        capped = HookedTransformer.from_pretrained(hf_model=tiny.build("gemma2"), device="cpu")
    assert capped.processed == {"fold_ln", "fold_value_biases"}
    with pytest.raises(ValueError, match=r"processed \(fold_ln, fold_value_biases\)"):
        capped.save_pretrained(tmp_path)
    nothing = HookedTransformer.from_pretrained_no_processing(
        hf_model=tiny.build("llama"), device="cpu", center_writing_weights=True
    )
    assert nothing.processed == set()  # RMSNorms see a stream's mean
    nothing.save_pretrained(tmp_path)
    again = native.build("rms")
    again.process_weights_(fold_ln=False)
    assert again.processed == {"center_unembed", "fold_value_biases"}
