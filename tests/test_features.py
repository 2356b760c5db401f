"""Every variant of every component: by hand = fused = explicit = in chunks = padded = compiled.

`by_hand` is the transformer written out by its formulas. A table at the end flips every field of
the config and expects other logits, so no field can be ignored.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import by_hand
import jaxtyping
import loud
import native
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from transformer_lens_lite import HookedTransformer, HookedTransformerConfig
from transformer_lens_lite.components import attention, rotary
from transformer_lens_lite.config_checks import fields_needing
from transformer_lens_lite.kv_cache import KeyValueCache

# frequencies of a row depend on its length: a cached key keeps those it was turned by
BY_LENGTH = {"dynamic", "longrope"}
every_variant = pytest.mark.parametrize("name", native.VARIANTS)


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes through blocks of queries goes through more than one."""
    monkeypatch.setattr(attention, "QUERIES_AT_A_TIME", 5)


causal_variant = pytest.mark.parametrize(
    "name", [name for name in native.VARIANTS if "bidirectional" not in name]
)


def assert_close(ours: Tensor, theirs: Tensor, name: str = "") -> None:
    """To 2e-5 of the size of the numbers, which for loud models are around one."""
    assert ours.isfinite().all(), name
    atol = 2e-5 * max(1.0, float(theirs.abs().mean()))
    theirs = theirs.to(ours.dtype)
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-5, msg=lambda m: f"{name}: {m}")


def explicit(model: HookedTransformer, *args: Any, **kwargs: Any) -> Tensor:
    """Everything listened to that a blanket capture listens to."""
    return model.run_with_cache(*args, **kwargs)[0]


def split_by_head(model: HookedTransformer, *args: Any, **kwargs: Any) -> Tensor:
    """The optional points listened to as well."""
    optional = [name for name in model.hook_dict if not name.endswith("attn_in")]
    return model.run_with_cache(*args, names_filter=optional, **kwargs)[0]


def fused(model: HookedTransformer, *args: Any, **kwargs: Any) -> Tensor:
    return model(*args, **kwargs)


WAYS: dict[str, Callable[..., Tensor]] = {
    "fused": fused,
    "explicit": explicit,
    "split by head": split_by_head,
}


def in_chunks(
    model: HookedTransformer, tokens: Tensor, sizes: list[int], way: Callable[..., Tensor] = fused,
    mask: Tensor | None = None, **arguments: Any,
) -> Tensor:  # fmt: skip
    """All logits, computed over a growing cache."""
    cache = KeyValueCache.init_cache(model.cfg, "cpu", tokens.shape[0], **arguments)
    parts, start = [], 0
    for size in sizes:
        new = slice(start, start + size)
        new_mask = None if mask is None else mask[:, new]
        parts.append(way(model, tokens[:, new], past_kv_cache=cache, attention_mask=new_mask))
        start += size
    assert cache.length == start == tokens.shape[1]
    return torch.cat(parts, 1)


def left_padded(lengths: list[int], d_vocab: int = 23) -> tuple[list[Tensor], Tensor, Tensor]:
    """Rows of those lengths; the batch of them; its mask. The pad is a token like others."""
    rows = list(native.tokens(len(lengths), max(lengths), d_vocab))
    rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    tokens = torch.full((len(rows), max(lengths)), 7)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, len(tokens[i]) - len(row) :] = row
        mask[i, len(tokens[i]) - len(row) :] = 1
    return rows, tokens, mask


# --- five ways to the same logits -----------------------------------------------------------------


@every_variant
def test_logits_are_what_the_formulas_say(name: str) -> None:
    model = native.build(name)
    tokens = native.tokens()
    expected = by_hand.logits(model, tokens)
    assert expected.std() > 0.5
    for way, run in WAYS.items():
        assert_close(run(model, tokens), expected, way)
    with torch.no_grad():  # where queries, keys and values come from one product
        for way, run in WAYS.items():
            assert_close(run(model, tokens), expected, f"{way}, no_grad")
    with torch.inference_mode():
        assert_close(model(tokens), expected, "inference_mode")


@causal_variant
@torch.no_grad()
def test_cached_in_chunks_equals_one_pass(name: str) -> None:
    """Reports 047 and 049 among others."""
    model = native.build(name)
    length = 6 if name in BY_LENGTH else native.LENGTH
    tokens = native.tokens(length=length)
    whole = model(tokens)
    for sizes in ([1] * length, [length - 1, 1], [3, 1, length - 4]):
        assert_close(in_chunks(model, tokens, sizes), whole, f"fused {sizes}")
    for way, run in WAYS.items():
        assert_close(in_chunks(model, tokens, [3, 1, length - 4], run), whole, way)
    assert_close(in_chunks(model, tokens, [2, length - 2], max_len=length), whole, "max_len")


@every_variant
@torch.no_grad()
def test_report_030_a_row_of_a_left_padded_batch_equals_the_row_alone(name: str) -> None:
    model = native.build(name)
    rows, tokens, mask = left_padded([13, 9, 1, 6, 12])
    alone = [model(row[None])[0] for row in rows]
    for way, run in WAYS.items():
        padded = run(model, tokens, attention_mask=mask)
        assert padded.isfinite().all()
        for row, expected in zip(padded, alone, strict=True):
            assert_close(row[-len(expected) :], expected, way)


@causal_variant
@torch.no_grad()
def test_a_left_padded_batch_cached_in_chunks_equals_its_rows_alone(name: str) -> None:
    """Padding in the first chunk, across a boundary, and a chunk of nothing else."""
    model = native.build(name)
    longest = 6 if name in BY_LENGTH else 13
    rows, tokens, mask = left_padded([longest, longest - 4, 2])
    alone = [model(row[None])[0] for row in rows]
    for run, sizes in ((fused, [2, 2, 1, longest - 5]), (explicit, [3, longest - 3])):
        padded = in_chunks(model, tokens, sizes, run, mask)
        for row, expected in zip(padded, alone, strict=True):
            assert_close(row[-len(expected) :], expected, f"{sizes}")


@pytest.mark.parametrize("name", ["plain", "rotary", "alibi", "window", "grouped", "bidirectional"])
@torch.no_grad()
def test_report_033_padding_anywhere_equals_a_row_without_it(name: str) -> None:
    """Windows and ALiBi count real positions."""
    model = native.build(name)
    tokens = native.tokens(1)
    for hidden in ([0, 1], [11, 12], [4, 5, 6], [0, 5, 9, 12]):
        mask = torch.ones_like(tokens)
        mask[:, hidden] = 0
        seen = mask[0].bool()
        alone = model(tokens[:, seen])
        for way, run in WAYS.items():
            padded = run(model, tokens, attention_mask=mask)
            assert_close(padded[:, seen], alone, f"{way} {hidden}")


@pytest.mark.parametrize(
    "name",
    ["plain", "rotary", "everything", "shortformer", "post_embedding_ln", "bidirectional_encoder"],
)
@torch.no_grad()
def test_report_031_every_hook_point_of_a_padded_row_holds_what_it_holds_alone(name: str) -> None:
    model = native.build(name)
    rows, tokens, mask = left_padded([13, 9, 4])
    _, padded = model.run_with_cache(tokens, attention_mask=mask)
    for i, row in enumerate(rows):
        _, alone = model.run_with_cache(row[None])
        for point, expected in alone.items():
            real = padded[point][i : i + 1].narrow(
                model.hook_dict[point].pos_axis, 13 - len(row), len(row)
            )
            if point.endswith(("scores", "pattern")):
                real = real[..., 13 - len(row) :]
            torch.testing.assert_close(real, expected, atol=2e-5, rtol=1e-4, msg=point)


@every_variant
@pytest.mark.parametrize("listening", [False, True])
def test_report_035_rows_and_windows_of_nothing_but_padding_stay_finite(
    name: str, listening: bool
) -> None:
    model = native.build(name)
    _, tokens, mask = left_padded([13, 2])
    mask[1] = 0
    hooks = [("*hook_pattern", lambda pattern, hook: patterns.append(pattern))] if listening else []
    patterns: list[Tensor] = []
    logits = model.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=hooks)
    assert logits.isfinite().all()
    for pattern in patterns:
        assert not pattern[1].any()
    logits[0].square().mean().backward()
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all(), parameter_name


# between them, every branch of a forward; `test_training` has more
COMPILED = ["everything", "sinks_window_grouped", "alibi", "longrope", "ungrouped"]
COMPILED += ["latent_queries", "experts_shared", "experts_grouped", "experts_mixed_sparsely"]
COMPILED += ["experts_clamped", "experts_weighed_before"]


@pytest.fixture(scope="module")
def compiled(project_root: Path) -> dict[str, dict[str, float]]:
    """Differences of compiled models, by variant and situation: see `compiled.py`."""
    return compiled_ones(project_root, "aot_eager", *COMPILED)


def compiled_ones(project_root: Path, *arguments: str) -> dict[str, dict[str, float]]:
    command = [sys.executable, "tests/compiled.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(project_root)}
    run = subprocess.run(
        command, cwd=project_root, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, dict[str, float]] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", COMPILED)
def test_report_104_the_unhooked_model_is_one_graph_that_agrees(
    name: str, compiled: dict[str, dict[str, float]]
) -> None:
    """Traced and differentiated by the compiler; `test_training` generates code as well."""
    assert compiled[name].pop("graphs") == 3
    assert compiled[name].keys() == {"gradients", "no_grad", "padded"}
    assert max(compiled[name].values()) < 2e-5


def test_compiled_models_go_on_with_a_cache_and_hear_later_hooks(project_root: Path) -> None:
    for differences in compiled_ones(project_root, "used", "plain", "rotary", "experts").values():
        assert differences.keys() == {"cached", "hooked", "set aside", "captured"}
        assert max(differences.values()) < 2e-5


# --- parts of a forward ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "rotary", "shortformer", "everything", "parallel"])
@torch.no_grad()
def test_report_036_and_078_a_forward_may_be_cut_at_any_layer(name: str) -> None:
    model = native.build(name)
    rows, tokens, mask = left_padded([13, 9])
    whole = model(tokens, attention_mask=mask)
    unmasked = model(tokens)
    assert (whole - unmasked)[1].abs().max() > 0.01
    for layer in range(3):
        residual = model(tokens, stop_at_layer=layer, attention_mask=mask)
        assert_close(model(residual, start_at_layer=layer, attention_mask=mask), whole)
        assert_close(
            model(residual, start_at_layer=layer - 2 if layer < 2 else 2, attention_mask=mask),
            whole,
        )
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    for layer, stop in ((0, -2), (1, -1)):
        stopped = model(tokens, stop_at_layer=stop, attention_mask=mask)
        assert_close(stopped, cache["resid_pre", layer])


@torch.no_grad()
def test_loss_is_the_mean_over_pairs_of_real_tokens() -> None:
    model = native.build()
    rows, tokens, mask = left_padded([13, 9])
    expected = [
        torch.nn.functional.cross_entropy(model(row[None])[0, :-1], row[1:], reduction="none")
        for row in rows
    ]
    loss = model(tokens, return_type="loss", attention_mask=mask)
    assert_close(loss[None], torch.cat(expected).mean()[None])
    per_token = model(tokens, return_type="loss", loss_per_token=True, attention_mask=mask)
    assert per_token.shape == (2, 12)
    assert_close(per_token[1, 4:], expected[1])
    assert not per_token[1, :4].any()
    both = model(tokens, return_type="both", attention_mask=mask)
    assert torch.equal(both.loss, loss)
    assert torch.equal(both.logits, model(tokens, attention_mask=mask))


@torch.no_grad()
def test_report_010_and_011_a_query_sees_as_many_keys_as_its_window_says() -> None:
    model = native.build("window")  # local, then global
    _, cache = model.run_with_cache(native.tokens())
    seen = (cache["pattern", 0] > 0).sum(-1)
    assert torch.equal(seen, torch.arange(1, 14).clamp(max=4).expand_as(seen))
    everything = (cache["pattern", 1] > 0).sum(-1)
    assert torch.equal(everything, torch.arange(1, 14).expand_as(everything))
    assert (cache["pattern", 0].diagonal(dim1=-2, dim2=-1) > 0).all()


def everywhere(model: HookedTransformer, tokens: Tensor, mask: Tensor) -> list[Tensor]:
    """What forwards, caches and generations of all kinds come to."""
    out = [model(tokens), model(tokens, attention_mask=mask)]
    out += model.run_with_cache(tokens, attention_mask=mask)[1].values()
    if model.cfg.attention_dir == "bidirectional":
        return out
    growing = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    for part, real in zip(tokens.split([7, 1, 5], 1), mask.split([7, 1, 5], 1), strict=True):
        out.append(model(part, past_kv_cache=growing, attention_mask=real))
    prefix = KeyValueCache.init_cache(model.cfg, "cpu", 1)
    model(tokens[:1, :5], past_kv_cache=prefix)
    prefix.freeze()
    out.append(model(tokens[:, 5:], past_kv_cache=prefix))
    out.append(model(tokens, return_type="loss", attention_mask=mask))
    if model.cfg.d_vocab_out == model.cfg.d_vocab:
        how: dict[str, Any] = {"stop_at_eos": False, "attention_mask": mask}
        drawn = {"top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2, "freq_penalty": 0.3}
        generator = torch.Generator("cpu").manual_seed(0)
        out.append(model.generate(tokens, 4, generator=generator, **drawn, **how))
        out.append(model.generate(tokens, 4, do_sample=False, num_beams=2, **how))
    return out


# whatever makes tensors of its own: positions, frequencies, slopes, masks, buffers, routes
MAKES_TENSORS = [
    *["plain", "xielu", "embed_scale", "token_types", "bidirectional_window", "no_positions"],
    *["rotary_partial_adjacent", "rotary_local_base", "linear", "dynamic", "llama3", "yarn"],
    *["longrope", "alibi", "alibi_six_heads", "shortformer", "sinks_window_grouped", "latent"],
    *["window_alibi", "experts_shared", "experts_grouped", "experts_mixed_sparsely", "everything"],
]


@pytest.mark.parametrize("name", MAKES_TENSORS)
@torch.no_grad()
def test_report_055_nothing_is_made_on_torchs_default_device(name: str) -> None:
    """Everything goes where the model is; what is kept between forwards is forgotten here."""
    tokens = native.tokens()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    expected = everywhere(native.build(name), tokens, mask)
    model = native.build(name)
    rotary._frequencies_on.cache_clear()
    with torch.device("meta"):  # a value that was made there would be none
        found = everywhere(model, tokens, mask)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@torch.no_grad()
def test_report_003_channels_beyond_rotary_dim_pass_unchanged() -> None:
    model = native.build("rotary_partial")
    _, cache = model.run_with_cache(native.tokens())
    for name in ("q", "k"):
        before, after = cache[name, 1], cache[f"rot_{name}", 1]
        assert torch.equal(before[..., 4:], after[..., 4:])
        assert (before[:, 1:, :, :4] - after[:, 1:, :, :4]).abs().amin() > 0
        torch.testing.assert_close(before.norm(dim=-1), after.norm(dim=-1))


@torch.no_grad()
def test_patterns_are_distributions_and_sinks_take_their_share() -> None:
    for name, complete in (("plain", True), ("softcap", True), ("sinks", False)):
        _, cache = native.build(name).run_with_cache(native.tokens())
        total = cache["pattern", 0].sum(-1)
        assert torch.allclose(total, torch.ones(())) == complete
        assert (total < 1.0001).all()


@pytest.mark.parametrize("name", ["softcap", "sinks", "sinks_window_grouped"])
@torch.no_grad()
def test_a_softcap_or_sinks_do_not_hold_all_scores_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless somebody listens; and the keys ahead of a block are not even multiplied."""
    model, tokens = native.build(name), native.tokens()
    seen: list[tuple[int, int]] = []
    against = attention.scores_against

    def spy(q: Tensor, keys: Tensor) -> Tensor:
        scores = against(q, keys)
        seen.append((scores.shape[2], scores.shape[3]))
        return scores

    monkeypatch.setattr(attention, "scores_against", spy)
    model(tokens)
    assert seen == [(5, 5), (5, 10), (3, 13)] * model.cfg.n_layers
    seen.clear()
    model.run_with_cache(tokens, names_filter="blocks.1.attn.hook_pattern")
    assert seen == [(5, 5), (5, 10), (3, 13), (13, 13)]
    seen.clear()
    in_chunks(model, tokens, [4, 9])
    n = model.cfg.n_layers
    assert seen == [(4, 4)] * n + [(5, 9), (4, 13)] * n


@torch.no_grad()
def test_scores_are_capped_scaled_and_masked_with_minus_infinity() -> None:
    _, cache = native.build("softcap").run_with_cache(native.tokens())
    scores = cache["attn_scores", 0]
    hidden = torch.ones(13, 13).triu(1).bool()
    assert scores[..., hidden].isneginf().all()
    assert scores[..., ~hidden].abs().max() <= 1.5
    assert torch.equal(scores.softmax(-1), cache["pattern", 0])


@torch.no_grad()
def test_a_chunk_sees_only_itself_of_rotated_keys() -> None:
    model = native.build("grouped_rotary")
    cache = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    model(native.tokens()[:, :9], past_kv_cache=cache)
    _, seen = model.run_with_cache(native.tokens()[:, 9:], past_kv_cache=cache)
    _, whole = model.run_with_cache(native.tokens())
    for name in ("rot_k", "rot_q", "k", "v", "resid_post"):
        assert_close(seen[name, 1], whole[name, 1][:, 9:], name)
    assert_close(seen["pattern", 1], whole["pattern", 1][:, :, 9:], "pattern")
    assert_close(cache[1].past_keys, whole["rot_k", 1], "stored keys")


# --- random configs and chunkings -----------------------------------------------------------------


@st.composite
def features(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of any causal config whose parts go together."""

    def one_of(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    def maybe(**values: Any) -> dict[str, Any]:
        return values if draw(st.booleans()) else {}

    rotary = {**native.ROTARY, "rotary_dim": one_of(2, 4, 6), **maybe(rotary_adjacent_pairs=True)}
    rotary |= maybe(rotary_scaling={"rope_type": "linear", "factor": 2.5})
    rotary |= maybe(rotary_layers=[False, True])
    positions = one_of(
        rotary,
        rotary,
        {"positional_embedding_type": "standard"},
        {"positional_embedding_type": "alibi"},
        {"positional_embedding_type": "alibi", "alibi_slopes": [0.9, 0.5, 0.2, 0.1]},
        {
            "positional_embedding_type": "alibi",
            "alibi_slopes": [0.9, 0.5, 0.3, 0.1],
            "alibi_scaled": True,
            "alibi_in_bfloat16": True,
        },
        {"positional_embedding_type": "none"},
        {"positional_embedding_type": "shortformer"},
    )
    norm = one_of(None, "LN", "LNPre", "RMS", "RMSPre")
    place = "pre" if norm is None else one_of("pre", "post", "both", "stream", "skip")
    shape = one_of(
        {"attn_only": True},
        {} if place in ("stream", "skip") else {"parallel_attn_mlp": True},
        {"gated_mlp": True, "gated_mlp_biases": one_of(True, False)},
        {},
    )
    return {
        **positions,
        **shape,
        **one_of({}, {**LOCAL, "window_size": one_of(1, 3, 40), **maybe(chunked_attention=True)}),
        **one_of({}, {"use_attention_sinks": True}, {"attn_scores_soft_cap": 1.5}),
        **one_of(
            {},
            {"use_qk_norm": True, **maybe(qk_norm_after_rotary=True)},
            {"use_qk_norm": True, "qk_norm_over": "all_heads"},
            {"use_qk_norm": True, "qk_norm_over": "each_head", "qk_norm_type": one_of("LN", "RMS")},
            {"use_qk_norm": True, "qk_norm_type": one_of("LN", "LNPre", "RMSPre")},
        ),
        **maybe(query_growth={"scale": 0.7, "length": 3, **maybe(unrotated_only=True, start=1)}),
        **maybe(clip_qkv=1.0),
        **maybe(attn_scale=1.7),
        **maybe(scale_attn_by_inverse_layer_idx=True),
        **maybe(tie_word_embeddings=True),
        **one_of(
            {},
            {"post_embedding_ln": True} if norm else {},
            {"post_embedding_ln": True, "post_embedding_ln_last": True} if norm else {},
        ),
        **maybe(n_token_types=2),
        **(maybe(first_norm=False) if place == "pre" else {}),
        **maybe(unembed_act_fn=one_of("gelu", "solu")),
        **one_of(
            {},
            {"final_norm": False},
            {"final_rms": True} if norm in ("LN", "LNPre") else {},
        ),
        **maybe(output_logits_soft_cap=3.0),
        **(maybe(norm_weight_offset=1.0) if norm else {}),
        **maybe(residual_scale=0.5, embed_scale=1.5, logit_scale=1.2),
        "normalization_type": norm,
        "norm_place": place,
        "n_key_value_heads": one_of(None, 1, 2, 4),
        "act_fn": one_of("gelu", "solu_ln", "silu", "xielu"),
    }


@st.composite
def chunkings(draw: st.DrawFn, length: int = native.LENGTH) -> list[int]:
    """Sizes that sum to `length`."""
    cuts = sorted(draw(st.sets(st.integers(1, length - 1))))
    return [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]


LOCAL = {"use_local_attn": True, "attn_types": ["local", "global"]}
without_deadline = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)


@given(fields=features(), sizes=chunkings(), n_pad=st.integers(1, 5), seed=st.integers(0, 99))
@without_deadline
@torch.no_grad()
def test_any_config_agrees_by_hand_fused_explicit_chunked_and_padded(
    fields: dict[str, Any], sizes: list[int], n_pad: int, seed: int
) -> None:
    # in fp64: some of these configs, such as those without norms, amplify the rounding of fp32
    model = native.build("plain", seed, **fields, dtype=torch.float64)
    tokens = native.tokens(1)
    expected = by_hand.logits(model, tokens)
    for way, run in WAYS.items():
        assert_close(run(model, tokens), expected, way)
    assert_close(in_chunks(model, tokens, sizes), expected, f"chunks {sizes}")
    padded = torch.cat((torch.full((1, n_pad), 7), tokens), 1)
    mask = (torch.arange(native.LENGTH + n_pad) >= n_pad).long()[None]
    assert_close(model(padded, attention_mask=mask)[:, n_pad:], expected, "padded")
    first, *rest = sizes
    chunked = in_chunks(model, padded, [first + n_pad, *rest], explicit, mask)
    assert_close(chunked[:, n_pad:], expected, "padded and in chunks")


@pytest.mark.parametrize("name", ["everything", "window_alibi", "sinks_window_grouped"])
@given(sizes=chunkings(), pads=st.lists(st.integers(0, 11), min_size=3, max_size=3))
@settings(without_deadline, max_examples=10)
@torch.no_grad()
def test_any_chunking_of_any_padded_batch_agrees(
    name: str, sizes: list[int], pads: list[int]
) -> None:
    model = native.build(name)
    rows, tokens, mask = left_padded([13, *(13 - n for n in pads)])
    for run in (fused, explicit):
        padded = in_chunks(model, tokens, sizes, run, mask)
        for row, logits in zip(rows, padded, strict=True):
            assert_close(logits[-len(row) :], model(row[None])[0])


# --- no field is ignored --------------------------------------------------------------------------

ROTARY, WINDOW = native.ROTARY, native.WINDOW
NTK = {"use_NTK_by_parts_rope": True, "NTK_original_ctx_len": 40, **ROTARY, "rotary_base": 50.0}
YARN = {
    "use_yarn_rope": True, "yarn_factor": 4.0, "yarn_original_max_position_embeddings": 40,
    "yarn_beta_fast": 2.0, "yarn_beta_slow": 0.5, **ROTARY, "rotary_base": 50.0,
}  # fmt: skip
# field -> (what the model is like before, the field's other value)
EXPERTS = native.EXPERTS
LATENT = native.VARIANTS["latent"]
GROUPS = {**EXPERTS, "router_groups": 3, "experts_per_token": 1}
FLIPS: dict[str, tuple[dict[str, Any], Any]] = {
    "eps": ({}, 1e-5),
    "act_fn": ({}, "gelu_new"),
    "use_attn_scale": ({}, False),
    "attn_scale": ({}, 2.0),
    "scale_attn_by_inverse_layer_idx": ({}, True),
    "use_local_attn": (WINDOW, False),
    "attn_types": (WINDOW, ["global", "local"]),
    "window_size": (WINDOW, 5),
    "attention_dir": ({}, "bidirectional"),
    "attn_only": ({}, True),
    "parallel_attn_mlp": ({}, True),
    "use_qk_norm": ({}, True),
    "qk_norm_over": ({"use_qk_norm": True}, "all_heads"),
    "qk_norm_type": ({"use_qk_norm": True}, "LN"),
    "qk_norm_after_rotary": ({**ROTARY, "use_qk_norm": True}, True),
    "alibi_slopes": ({"positional_embedding_type": "alibi"}, [0.3, 0.2, 0.1, 0.4]),
    "alibi_scaled": ({"positional_embedding_type": "alibi"}, True),
    "alibi_in_bfloat16": (
        {"positional_embedding_type": "alibi", "alibi_slopes": [0.3, 0.2, 0.1, 0.4]},
        True,
    ),
    "chunked_attention": (WINDOW, True),
    "latent_kv_rank": ({**ROTARY, "rotary_dim": 4}, 9),
    "latent_q_rank": (LATENT, 7),
    "d_value": (LATENT, 3),
    "d_embed": ({}, 9),
    "latent_eps": (LATENT, 0.1),
    "num_experts": (EXPERTS, 5),
    "experts_per_token": (EXPERTS, 3),
    "norm_topk_prob": (EXPERTS, True),
    "d_expert": (EXPERTS, 5),
    "d_shared_expert": (EXPERTS, 5),
    "shared_expert_gate": ({**EXPERTS, "d_shared_expert": 5}, True),
    "expert_layers": (EXPERTS, [True, False]),
    "expert_limit": (EXPERTS, 0.3),
    "expert_offset": (EXPERTS, 1.0),
    "expert_gate_slope": (EXPERTS, 1.6),
    "router_type": (EXPERTS, "sigmoid"),
    "router_scale": (EXPERTS, 1.5),
    "router_groups": ({**EXPERTS, "experts_per_token": 2}, 3),
    "router_top_groups": ({**GROUPS, "router_group_members": 2}, 2),
    "router_group_members": ({**EXPERTS, "router_groups": 2, "experts_per_token": 1}, 3),
    "router_bias": (EXPERTS, True),
    "router_selection_bias": (EXPERTS, True),
    "router_on_input": (EXPERTS, True),
    "router_jitter": ({**EXPERTS, "router_type": "sparsemixer"}, 0.4),
    "query_growth": ({}, {"scale": 0.5, "length": 3, "start": 1}),
    "clip_qkv": ({}, 0.5),
    "use_attention_sinks": ({}, True),
    "attn_scores_soft_cap": ({}, 5.0),
    "positional_embedding_type": ({}, "none"),
    "rotary_dim": (ROTARY, 4),
    "rotary_base": (ROTARY, 500.0),
    "rotary_base_local": ({**ROTARY, **WINDOW}, 500.0),
    "rotary_adjacent_pairs": (ROTARY, True),
    "rotary_layers": (ROTARY, [True, False]),
    "rotary_scaling": (ROTARY, {"rope_type": "linear", "factor": 2.0}),
    "rotary_scaling_global_only": ({**native.VARIANTS["linear"], **WINDOW}, True),
    "rotary_scaling_factor": (ROTARY, 2.0),
    "use_NTK_by_parts_rope": (NTK, False),
    "NTK_by_parts_low_freq_factor": (NTK, 0.5),
    "NTK_by_parts_high_freq_factor": (NTK, 2.0),
    "NTK_by_parts_factor": (NTK, 2.0),
    "NTK_original_ctx_len": (NTK, 12),
    "use_yarn_rope": (YARN, False),
    "yarn_factor": (YARN, 2.0),
    "yarn_attention_factor": (YARN, 1.2),
    "yarn_beta_fast": (YARN, 1.0),
    "yarn_beta_slow": (YARN, 0.1),
    "yarn_original_max_position_embeddings": (YARN, 400),
    "yarn_truncate": (YARN, False),
    "yarn_global_attn_only": ({**YARN, **WINDOW}, True),
    "normalization_type": ({}, "RMS"),
    "final_rms": ({}, True),
    "post_embedding_ln": ({}, True),
    "use_normalization_before_and_after": ({}, True),
    "norm_place": ({}, "post"),
    "n_token_types": ({}, 2),
    "post_embedding_ln_last": ({"post_embedding_ln": True}, True),
    "first_norm": ({}, False),
    "final_norm": ({}, False),
    "unembed_act_fn": ({}, "gelu"),
    "norm_weight_offset": (native.RMS, 1.0),
    "gated_mlp": ({}, True),
    "gated_mlp_biases": ({"gated_mlp": True}, True),
    "output_logits_soft_cap": ({}, 5.0),
    "tie_word_embeddings": ({}, True),
    "embed_scale": ({}, 1.1),
    "residual_scale": ({}, 0.9),
    "logit_scale": ({}, 1.1),
}
SIZES = {"n_layers", "d_model", "n_ctx", "d_head", "n_heads", "d_mlp", "d_vocab", "d_vocab_out"}
SIZES |= {"n_key_value_heads"}
NOT_ABOUT_NUMBERS = {
    "unembedding",  # without it there are no logits: test_encoders
    "reserved_positions", "model_name", "original_architecture", "from_checkpoint",
    "checkpoint_index",
    "checkpoint_label_type", "checkpoint_value", "n_params", "uses_rms_norm", "layer_norm_folding",
    "relative_attention_max_distance", "relative_attention_num_buckets", "decoder_start_token_id",
    "train_seq_length",  # metadata
    "use_attn_result", "use_split_qkv_input", "use_attn_in", "use_hook_mlp_in",
    "use_hook_tokens",  # what is captured: test_hooks
    "ungroup_grouped_query_attention",  # the same numbers, more of them: test_hooks
    "tokenizer_name", "default_prepend_bos", "tokenizer_prepends_bos", "trust_remote_code",
    "init_weights", "init_mode", "initializer_range", "seed",  # test_training
    "device", "dtype",
    "n_devices", "load_in_4bit", "quantization_method", "use_dynamic_ntk_rope", "use_logn_attn",
}  # fmt: skip


def test_every_field_of_the_config_is_accounted_for() -> None:
    fields = set(HookedTransformerConfig.__dataclass_fields__)
    assert fields == set(FLIPS) | SIZES | NOT_ABOUT_NUMBERS
    assert len(fields) == len(FLIPS) + len(SIZES) + len(NOT_ABOUT_NUMBERS)


@pytest.mark.parametrize("field", FLIPS)
@torch.no_grad()
def test_flipping_a_field_changes_the_logits_of_the_same_weights(field: str) -> None:
    before, value = FLIPS[field]
    model = native.of(native.config("plain", **before))
    changes = {field: value}
    if field == "use_local_attn":
        changes["attn_types"] = None
    if not value:  # what then would have no effect is refused
        fields = HookedTransformerConfig.__dataclass_fields__
        changes |= {name: fields[name].default for name in fields_needing(field)}
    if field == "tie_word_embeddings":
        model.unembed.W_U.copy_(model.W_E.T + 0.01)
    mutant = native.of(dataclasses.replace(model.cfg, **changes))
    own = mutant.state_dict()
    common = {n: t for n, t in model.state_dict().items() if n in own and own[n].shape == t.shape}
    if field == "tie_word_embeddings":
        del common["unembed.W_U"]
    mutant.load_state_dict({**own, **common})
    difference = (mutant(native.tokens()) - model(native.tokens())).abs().max()
    assert difference > 4e-4  # 20 times the tolerance here
    assert_close(mutant(native.tokens()), by_hand.logits(mutant, native.tokens()))


@pytest.mark.parametrize(
    "changes", [{"act_fn": a} for a in ("gelu", "gelu_new", "relu", "silu", "quick_gelu", "relu2")]
)
@torch.no_grad()
def test_report_023_no_two_activations_are_the_same(changes: dict[str, Any]) -> None:
    model = native.build(**changes)
    for other in ("gelu", "gelu_new", "relu", "silu", "quick_gelu", "relu2", "solu"):
        if other != changes["act_fn"]:
            mutant = native.build(act_fn=other)
            assert (mutant(native.tokens()) - model(native.tokens())).abs().max() > 4e-4
    same = [native.build(act_fn=name) for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")]
    assert torch.equal(same[0](native.tokens()), same[1](native.tokens()))
    assert torch.equal(same[0](native.tokens()), same[2](native.tokens()))


@pytest.mark.parametrize(
    "name",
    ["plain", "grouped_rotary", "qk_norm", "sinks", "sandwich", "post_norm", "post_embedding_ln"]
    + ["stream_norm", "post_embedding_ln_last", "unembed_transform", "bidirectional_encoder"]
    + [
        "gated_biases",
        "gated_solu_ln",
        "xielu",
        "parallel",
        "attn_only",
        "shortformer",
        "everything",
    ],
)
@torch.no_grad()
def test_every_parameter_counts(name: str) -> None:
    """A parameter that is never read, or read in one path only, would show."""
    model = native.build(name)
    tokens = native.tokens()
    before = model(tokens)
    inert = set()
    for parameter_name, parameter in model.named_parameters():
        kept = parameter.clone()
        parameter.mul_(1.5).add_(0.1)
        for way, run in (("fused", fused), ("explicit", explicit)):
            if (run(model, tokens) - before).abs().max() < 1e-4:
                inert.add((parameter_name.split(".", 2)[-1], way))
        parameter.copy_(kept)
    unturned = model.cfg.positional_embedding_type != "rotary" or name == "rotary_some_layers"
    plain_scores = unturned and not model.cfg.use_qk_norm and model.cfg.clip_qkv is None
    if plain_scores and model.cfg.attn_scores_soft_cap <= 0 and not model.cfg.use_attention_sinks:
        # softmax does not see what a key bias adds to all scores of a query
        inert -= {
            (bias, way) for bias in ("attn.b_K", "attn._b_K") for way in ("fused", "explicit")
        }
    assert not inert
    assert torch.equal(model(tokens), before)


def test_the_ids_behind_a_stream_are_looked_at_before_anything_is_run() -> None:
    jaxtyping.config.update("jaxtyping_disable", True)  # users have no run-time check of types
    model, ids = loud.build(), loud.tokens(2, 5)
    residual = model(ids, stop_at_layer=1)
    ran: list[str] = []
    listening = [(lambda name: True, lambda value, hook: ran.append(hook.name))]
    loss = model(residual, start_at_layer=1, tokens=ids, return_type="loss")
    torch.testing.assert_close(loss, model(ids, return_type="loss"))
    for tokens, message in (
        (ids[:, :-1], "must be .2, 5. as the input, got .2, 4."),
        (ids.float(), "an integer tensor"),
        (ids + model.cfg.d_vocab, "outside the vocabulary of"),
    ):
        with model.hooks(fwd_hooks=listening), pytest.raises(ValueError, match=message):
            model(residual, start_at_layer=1, tokens=tokens, return_type="loss")
    with pytest.raises(ValueError, match="start_at_layer=2 is behind stop_at_layer=1"):
        model(residual, start_at_layer=2, stop_at_layer=1)
    assert not ran
