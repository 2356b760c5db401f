"""KeyValueCache: a sequence in pieces is the whole sequence, and a prefix is read, never copied."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import loud
import pytest
import tiny
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import transformer_lens_lite as tl
from transformer_lens_lite import padding
from transformer_lens_lite.components.attention import Attention, weighed_alone
from transformer_lens_lite.kv_cache import FIRST_CAPACITY, KeyValueCache
from transformer_lens_lite.model import HookedTransformer

TOLERANCE = 1e-5
KINDS = pytest.mark.parametrize("kind", list(loud.KINDS))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only lose by threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def empty_cache(model: HookedTransformer, batch: int = 1, max_len: int | None = None):
    return KeyValueCache.init_cache(model.cfg, "cpu", batch, max_len)


@torch.no_grad()
def filled(model: HookedTransformer, ids: Tensor, frozen: bool = False, **kwargs: Any):
    """A cache that holds these ids."""
    cache = empty_cache(model, len(ids))
    model(ids, past_kv_cache=cache, **kwargs)
    if frozen:
        cache.freeze()
    return cache


@torch.no_grad()
def run(model: HookedTransformer, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, **kwargs)


@torch.no_grad()
def in_pieces(model: HookedTransformer, ids: Tensor, sizes: list[int], cache: Any) -> Tensor:
    return torch.cat([model(part, past_kv_cache=cache) for part in ids.split(sizes, 1)], 1)


def close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


def contents(cache: KeyValueCache) -> list[Tensor]:
    """A copy of everything a cache stores."""
    stored = [t for e in cache.entries for t in (e.past_keys, e.past_values)]
    return [t.detach().clone() for t in (*stored, cache.previous_attention_mask)]


def assert_same_contents(cache: KeyValueCache, before: list[Tensor]) -> None:
    after = contents(cache)
    assert [t.shape for t in after] == [t.shape for t in before]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


# --- pieces are the whole -------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("max_len", [None, 20])
def test_pieces_equal_one_pass(kind: str, max_len: int | None) -> None:
    model, ids = loud.build(kind), loud.tokens(2, 20)
    cache = empty_cache(model, 2, max_len)
    close(in_pieces(model, ids, [5, 1, 3, 11], cache), run(model, ids))
    assert cache.length == 20


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_chunking_of_any_kind_equals_one_pass(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(loud.KINDS)))
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    model = loud.build(
        kind, n_layers=2, **({"attn_types": ["local", "global"]} if "window" in kind else {})
    )
    ids = loud.tokens(1, sum(sizes), seed=data.draw(st.integers(0, 99)))
    close(in_pieces(model, ids, sizes, empty_cache(model)), run(model, ids))


@pytest.mark.parametrize("kind", ["alibi", "alibi_gqa", "alibi_window"])
def test_report_047_alibi_one_by_one_equals_one_pass(kind: str) -> None:
    model, ids = loud.build(kind), loud.tokens(2, 14)
    close(in_pieces(model, ids, [1] * 14, empty_cache(model, 2)), run(model, ids))


@pytest.mark.parametrize("kind", ["window", "rotary_window", "alibi_window"])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_report_049_the_window_boundary(kind: str, step: int, length: int) -> None:
    model, ids = loud.build(kind), loud.tokens(2, length + 3)
    whole, cache = run(model, ids), empty_cache(model, 2)
    sizes = [step] * (length // step) + [length % step] * (length % step > 0)
    close(in_pieces(model, ids[:, :length], sizes, cache), whole[:, :length])
    close(run(model, ids[:, length:], past_kv_cache=cache), whole[:, length:])


def test_report_049_a_window_is_crossed_by_a_shared_prefix_and_ragged_suffixes() -> None:
    model, prefix = loud.build("rotary_window"), loud.tokens(1, 9)
    rows, ids, mask = loud.ragged([5, 2, 4])
    out = run(model, ids, attention_mask=mask, past_kv_cache=filled(model, prefix, frozen=True))
    for i, row in enumerate(rows):
        alone = run(model, torch.cat((prefix, row), 1))[:, 9:]
        close(out[i : i + 1, -row.shape[1] :], alone)


@pytest.mark.parametrize("kind", ["window", "rotary_window", "alibi_window"])
def test_report_011_a_query_sees_as_many_keys_as_the_window_is_wide(kind: str) -> None:
    model, ids = loud.build(kind), loud.tokens(1, 9)
    cache = filled(model, ids[:, :3])
    _, seen = model.run_with_cache(ids[:, 3:], past_kv_cache=cache)
    assert seen["pattern", 0][0, 0].ne(0).sum(-1).tolist() == [4] * 6
    assert seen["pattern", 1][0, 0].ne(0).sum(-1).tolist() == [4, 5, 6, 7, 8, 9]


def test_bf16_caches_bf16_and_agrees_with_one_pass() -> None:
    model, ids = loud.build("rotary_gqa", dtype="bfloat16"), loud.tokens(2, 16)
    cache = empty_cache(model, 2)
    pieces = in_pieces(model, ids, [9, 1, 6], cache)
    assert cache[0].past_keys.dtype == torch.bfloat16
    spread = (run(loud.build("rotary_gqa"), ids) - run(model, ids)).abs().max()
    assert (pieces - run(model, ids)).abs().max() <= 2 * spread


def test_report_050_bf16_cached_argmax_equals_hugging_face() -> None:
    hf = tiny.build("llama_gqa").to(torch.bfloat16)
    model = HookedTransformer.from_pretrained_no_processing(
        hf_model=hf, device="cpu", dtype="bfloat16"
    )
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    how |= {"eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    out = hf.generate(loud.tokens(1, 7, d_vocab=59), **how)
    theirs = torch.stack(out.logits, 1).float()
    ours = in_pieces(model, out.sequences[:, :-1], [7] + [1] * 7, empty_cache(model))[:, 6:].float()
    assert (ours - theirs).abs().max() < 0.15
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() >= 0.85


@pytest.mark.parametrize(
    ("scaling", "short"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}, 16),
        ({"rope_type": "longrope", "short_factor": [1.0] * 5, "long_factor": [1.5, 2, 3, 4, 5],
          "original_max_position_embeddings": 16}, 16),
    ],
    ids=["dynamic", "longrope"],
)  # fmt: skip
def test_length_dependent_frequencies_agree_up_to_the_threshold_only(
    scaling: Any, short: int
) -> None:
    model = loud.build("rotary", rotary_scaling=scaling)
    ids = loud.tokens(1, short + 4)
    cache = empty_cache(model)
    close(in_pieces(model, ids[:, :short], [9, short - 9], cache), run(model, ids[:, :short]))
    continued = run(model, ids[:, short:], past_kv_cache=cache)
    # cached keys keep the frequencies they were turned by, as in Hugging Face
    assert (continued - run(model, ids)[:, short:]).abs().max() > 1e-3


# --- padding, masks, loss -------------------------------------------------------------------------


@KINDS
def test_left_padding_in_both_pieces_is_ignored(kind: str) -> None:
    model = loud.build(kind)
    first, ids_1, mask_1 = loud.ragged([4, 7, 2], seed=2)
    second, ids_2, mask_2 = loud.ragged([5, 1, 3], seed=9)
    cache = filled(model, ids_1, attention_mask=mask_1)
    out = run(model, ids_2, attention_mask=mask_2, past_kv_cache=cache)
    third = run(model, loud.tokens(3, 2), past_kv_cache=cache)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        alone = run(model, torch.cat((a, b, loud.tokens(3, 2)[i : i + 1]), 1))[:, a.shape[1] :]
        close(out[i : i + 1, -b.shape[1] :], alone[:, :-2])
        close(third[i : i + 1], alone[:, -2:])
    assert (
        cache.previous_attention_mask.tolist()
        == torch.cat((mask_1, mask_2, torch.ones(3, 2, dtype=torch.long)), 1).tolist()
    )


def test_report_046_masks_of_the_new_and_of_the_full_length_are_equal() -> None:
    model = loud.build("rotary_gqa")
    _, ids, mask = loud.ragged([4, 7])
    _, new, new_mask = loud.ragged([3, 2], seed=7)
    prefix = filled(model, ids, frozen=True, attention_mask=mask)
    by_new = run(model, new, attention_mask=new_mask, past_kv_cache=prefix)
    full_mask = torch.cat((mask, new_mask), 1)
    assert torch.equal(run(model, new, attention_mask=full_mask, past_kv_cache=prefix), by_new)
    assert not torch.allclose(run(model, new, past_kv_cache=prefix)[0, -1], by_new[1, -1])
    with pytest.raises(ValueError, match=r"\[2, 3\] or \[2, 10\].*got \[2, 5\]"):
        model(new, attention_mask=mask[:, :5], past_kv_cache=prefix)


def test_a_full_mask_may_show_again_what_was_padding() -> None:
    model = loud.build("standard")
    _, ids, mask = loud.ragged([4, 7])
    cache = filled(model, ids, attention_mask=mask)
    new = loud.tokens(2, 2)
    run(model, new, attention_mask=torch.ones(2, 9, dtype=torch.long), past_kv_cache=cache)
    assert cache.previous_attention_mask.tolist() == [[1] * 9] * 2
    run(model, new, past_kv_cache=cache)
    assert cache.length == 11


@pytest.mark.parametrize("padded", [False, True])
def test_loss_with_a_cache_is_the_loss_of_the_new_tokens(padded: bool) -> None:
    model, prefix = loud.build("rotary_gqa"), loud.tokens(2, 6)
    _, ids, mask = loud.ragged([7, 4])
    mask = mask if padded else torch.ones_like(mask)
    whole_mask = torch.cat((torch.ones_like(prefix), mask), 1)
    whole = run(model, torch.cat((prefix, ids), 1), attention_mask=whole_mask)[:, 6:]
    expected = tl.utils.lm_cross_entropy_loss(whole, ids, mask)
    for return_type in ("loss", "both"):
        cache = filled(model, prefix)
        out = run(model, ids, return_type=return_type, attention_mask=mask, past_kv_cache=cache)
        close(out if return_type == "loss" else out.loss, expected)
    cache = filled(model, prefix, frozen=True)
    per_token = run(model, ids, return_type="loss", loss_per_token=True, past_kv_cache=cache)
    assert per_token.shape == (2, 6)


# --- frozen prefixes ------------------------------------------------------------------------------


@KINDS
def test_report_042_frozen_cache_two_suffixes(kind: str) -> None:
    model, prefix = loud.build(kind), loud.tokens(1, 8)
    cache = filled(model, prefix, frozen=True)
    before = contents(cache)
    for seed in (5, 6):
        suffix = loud.tokens(1, 5, seed)
        out = run(model, suffix, past_kv_cache=cache)
        close(out, run(model, torch.cat((prefix, suffix), 1))[:, 8:])
        assert_same_contents(cache, before)
    cache.unfreeze()
    run(model, suffix, past_kv_cache=cache)
    assert [entry.length for entry in cache.entries] == [13] * 3


@KINDS
def test_report_044_one_prefix_serves_ragged_suffixes(kind: str) -> None:
    model, prefix = loud.build(kind), loud.tokens(1, 9)
    cache = filled(model, prefix, frozen=True)
    before, places = contents(cache), [e._keys.data_ptr() for e in cache.entries]
    rows, ids, mask = loud.ragged([3, 7, 1, 5])
    out = run(model, ids, attention_mask=mask, past_kv_cache=cache)
    for i, row in enumerate(rows):
        alone = run(model, torch.cat((prefix, row), 1))[:, 9:]
        close(out[i : i + 1, -row.shape[1] :], alone)
    assert_same_contents(cache, before)
    assert [e._keys.data_ptr() for e in cache.entries] == places


def test_a_left_padded_prefix_is_shared_too() -> None:
    model = loud.build("rotary_window")
    _, ids, mask = loud.ragged([6, 9])
    cache = filled(model, ids[:1], frozen=True, attention_mask=mask[:1])
    rows, new, new_mask = loud.ragged([2, 5, 3], seed=8)
    out = run(model, new, attention_mask=new_mask, past_kv_cache=cache)
    for i, row in enumerate(rows):
        alone = run(model, torch.cat((ids[:1, 3:], row), 1))[:, 6:]
        close(out[i : i + 1, -row.shape[1] :], alone)


def test_a_frozen_cache_of_several_rows_serves_its_own_batch() -> None:
    model, prefix, suffix = loud.build("standard"), loud.tokens(3, 6), loud.tokens(3, 4, 5)
    out = run(model, suffix, past_kv_cache=filled(model, prefix, frozen=True))
    close(out, run(model, torch.cat((prefix, suffix), 1))[:, 6:])


@KINDS
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("how", ["frozen", "branch", "watched", "one by one"])
def test_prefixes_serve_every_batch_they_divide_neighbours_alike(
    kind: str, padded: bool, how: str
) -> None:
    model, n = loud.build(kind), 3
    _, ids, mask = loud.ragged([4, 7])
    cache = filled(model, ids, frozen=True, attention_mask=mask if padded else None)
    before, places = contents(cache), [e._keys.data_ptr() for e in cache.entries]
    suffix = loud.tokens(2 * n, 5, seed=8)
    whole = torch.cat((ids.repeat_interleave(n, 0), suffix), 1)
    whole_mask = torch.cat((mask.repeat_interleave(n, 0), torch.ones_like(suffix)), 1)
    expected = run(model, whole, attention_mask=whole_mask if padded else None)[:, 7:]
    if how == "frozen":
        out = run(model, suffix, past_kv_cache=cache)
    elif how == "watched":
        out, seen = model.run_with_cache(suffix, past_kv_cache=cache)
        assert seen["pattern", 0].shape[-1] == 12
    else:
        branch = cache.branch(2 * n)
        assert torch.equal(branch[0].past_keys, cache.expand(2 * n)[0].past_keys)
        expanded = mask.repeat_interleave(n, 0) if padded else torch.ones(2 * n, 7)
        assert branch.previous_attention_mask.tolist() == expanded.tolist()
        out = in_pieces(model, suffix, [5] if how == "branch" else [2, 1, 1, 1], branch)
        assert [e.prefix[0][0].data_ptr() for e in branch.entries] == places
    close(out, expected)
    assert_same_contents(cache, before)


def test_prefixes_serve_no_batch_they_do_not_divide() -> None:
    model = loud.build("rotary_gqa")
    cache = filled(model, loud.tokens(2, 5), frozen=True)
    for batch in (1, 3, 5):
        with pytest.raises(ValueError, match=f"holds 2 rows, the input has {batch}.*multiple"):
            model(loud.tokens(batch, 2), past_kv_cache=cache)
        with pytest.raises(ValueError, match=f"2 rows cannot continue as {batch}"):
            cache.branch(batch)
    several = cache.append_attention_mask(torch.tensor([[0], [1], [1], [0]]))
    assert several[:, -1].tolist() == [0, 1, 1, 0]


@KINDS
@pytest.mark.parametrize("padding", ["none", "prefix", "suffix", "both"])
def test_segments_joined_by_their_log_sums_are_the_explicit_way(kind: str, padding: str) -> None:
    model = loud.build(kind)
    _, ids, mask = loud.ragged([5, 9])
    _, new, new_mask = loud.ragged([6, 2, 4, 1], seed=7)
    cache = filled(
        model, ids, frozen=True, attention_mask=mask if padding in ("prefix", "both") else None
    )
    given = {"attention_mask": new_mask} if padding in ("suffix", "both") else {}
    joined = run(model, new, past_kv_cache=cache, **given)
    with torch.no_grad():
        explicit, seen = model.run_with_cache(new, past_kv_cache=cache, **given)
    close(joined, explicit)
    assert seen["pattern", 0].shape == (4, 4, 6, 15)


def test_a_query_that_sees_no_key_at_all_gets_nothing_and_no_nan() -> None:
    model = loud.build("rotary_window", attn_types=["local"] * 3)
    ids, mask = loud.tokens(2, 6), torch.tensor([[0] * 6, [1] * 6])
    cache = filled(model, ids, frozen=True, attention_mask=mask)
    new_mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    new, zs = loud.tokens(2, 3, 5), []
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: zs.append(z))]):
        out = model(new, past_kv_cache=cache, attention_mask=new_mask)
    out[new_mask.bool()].square().sum().backward()
    assert zs[0][0, :2].eq(0).all()
    assert zs[0][0, 2].ne(0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    close(out[:1, 2:], run(model, new[:1, 2:]))


@pytest.mark.parametrize("kind", ["standard", "rotary_window", "alibi_gqa"])
def test_gradients_through_the_join_are_those_of_the_explicit_way(kind: str) -> None:
    model, new = loud.build(kind, dtype="float64"), loud.tokens(4, 5, 6)
    cache = filled(model, loud.tokens(2, 9), frozen=True)
    gradients = []
    for names in ([], ["blocks.0.attn.hook_pattern"] * 3):
        names = [name.replace("0", str(layer)) for layer, name in enumerate(names)]
        model.zero_grad()
        with model.hooks(fwd_hooks=[(name, lambda x, hook: None) for name in names]):
            model(new, past_kv_cache=cache).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert sum(g.abs().max() > 1e-3 for g in gradients[0]) > 20
    for joined, explicit in zip(*gradients, strict=True):
        close(joined, explicit, 1e-8)


def test_the_join_keeps_its_sums_in_fp32() -> None:
    exact, half = loud.build("rotary_gqa"), loud.build("rotary_gqa", dtype="bfloat16")
    ids, new = loud.tokens(1, 40), loud.tokens(6, 4, 9)
    expected = run(exact, new, past_kv_cache=filled(exact, ids, frozen=True))
    cache = filled(half, ids, frozen=True)
    joined = run(half, new, past_kv_cache=cache)
    with torch.no_grad():
        explicit, _ = half.run_with_cache(new, past_kv_cache=cache)
    assert joined.dtype == torch.bfloat16
    assert (joined - expected).abs().mean() <= 1.1 * (explicit - expected).abs().mean()


def test_the_sums_by_which_segments_count_are_fp32_whatever_the_scores_are() -> None:
    q, keys, values = (torch.randn(1, 2, n, 8).bfloat16() for n in (5, 300, 300))
    z, log_sum = weighed_alone(q, keys, values, None)
    scores = (q @ keys.transpose(-1, -2)).double()
    assert (z.dtype, log_sum.dtype) == (torch.bfloat16, torch.float32)
    close(log_sum, scores.logsumexp(-1, keepdim=True).float())


def test_scores_of_different_segments_meet_only_when_somebody_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = loud.build("rotary_gqa")
    cache, new = filled(model, loud.tokens(1, 9), frozen=True), loud.tokens(4, 3, 5)
    watched: list[int] = []
    explicit = Attention.explicit

    def noted(self: Attention, *args: Any) -> Tensor:
        watched.append(self.layer_id)
        return explicit(self, *args)

    monkeypatch.setattr(Attention, "explicit", noted)
    run(model, new, past_kv_cache=cache)
    assert watched == []
    with torch.no_grad():
        model.run_with_cache(new, past_kv_cache=cache, names_filter="blocks.1.attn.hook_pattern")
    assert watched == [1]


def peak_memory(action: Callable[[], Any]) -> tuple[int, int]:
    """(the largest single allocation, the peak of all together) in bytes, temporaries included."""
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        action()
    sizes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for size in sizes:
        now += size
        peak = max(peak, now)
    return max(sizes), peak


@pytest.mark.parametrize("kind", ["standard", "rotary_gqa"])
def test_report_044_memory_does_not_grow_with_the_number_of_suffixes(kind: str) -> None:
    model = loud.build(kind, d_head=64, n_ctx=700)
    cache = filled(model, loud.tokens(1, 600), frozen=True)
    prefix_bytes = cache[0].past_keys.nbytes
    n, suffix = 16, loud.tokens(16, 2)
    largest, peak = peak_memory(lambda: model(suffix, past_kv_cache=cache))
    assert (
        largest < prefix_bytes * n / 4
    )  # scores are [n, head, 2, 602]: far smaller than n prefixes
    assert peak < prefix_bytes * n / 2
    _, copied = peak_memory(lambda: model(suffix, past_kv_cache=cache.expand(n)))
    assert copied > prefix_bytes * n  # the measurement sees a copy where there is one

    def branches_of(cache: KeyValueCache) -> int:
        return sum(e._keys.nbytes for e in cache.branch(n, max_len=4).entries)

    assert branches_of(cache) == branches_of(filled(model, loud.tokens(1, 5), frozen=True))
    assert cache.branch(n)[0].prefix[0][0].data_ptr() == cache[0].past_keys.data_ptr()


def test_a_branch_grows_and_leaves_its_prefix() -> None:
    model, prefix = loud.build("rotary_gqa"), loud.tokens(1, 7)
    cache = filled(model, prefix, frozen=True)
    before = contents(cache)
    branch = cache.branch(3, max_len=5)
    assert branch[0].past_keys.shape == (3, 7, 2, 10)
    ids = loud.tokens(3, 5, 4)
    out = in_pieces(model, ids, [2, 1, 2], branch)
    close(out, run(model, torch.cat((prefix.expand(3, -1), ids), 1))[:, 7:])
    assert_same_contents(cache, before)
    assert (branch.length, branch.batch_size, branch.frozen) == (12, 3, False)
    with pytest.raises(ValueError, match="cache is full: 5 of max_len=5"):
        model(ids[:, :1], past_kv_cache=branch)
    with pytest.raises(ValueError, match="2 rows cannot continue as 3.*multiple"):
        filled(model, loud.tokens(2, 3)).branch(3)


def test_branches_of_branches_share_all_their_prefixes() -> None:
    model, ids = loud.build("standard"), loud.tokens(1, 12)
    cache = filled(model, ids[:, :5], frozen=True)
    second = cache.branch(1)
    run(model, ids[:, 5:8], past_kv_cache=second)
    second.freeze()
    suffix = loud.tokens(4, 4)
    out = run(model, suffix, past_kv_cache=second.branch(4))
    whole = torch.cat((ids[:, :8].expand(4, -1), suffix), 1)
    close(out, run(model, whole)[:, 8:])


@KINDS
@pytest.mark.parametrize("branched", [False, True])
def test_D2_one_frozen_prefix_for_four_rows_is_four_full_runs(kind: str, branched: bool) -> None:
    model, prefix, prompts = loud.build(kind), loud.tokens(1, 7), loud.tokens(4, 3, 6)
    cache = filled(model, prefix, frozen=True)
    before, places = contents(cache), [e._keys.data_ptr() for e in cache.entries]
    args: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "stop_at_eos": False}
    args["output_logits"] = True
    used = cache.branch(4) if branched else cache
    out = model.generate(prompts, past_kv_cache=used, **args)
    for i in range(4):
        alone = model.generate(torch.cat((prefix, prompts[i : i + 1]), 1), **args)
        assert torch.equal(out.sequences[i], alone.sequences[0, 7:])
        close(torch.stack(out.logits)[:, i], torch.stack(alone.logits)[:, 0])
    assert_same_contents(cache, before)
    assert [e._keys.data_ptr() for e in cache.entries] == places


@pytest.mark.parametrize("in_decode", [False, True])
def test_C5_a_step_never_rewrites_earlier_entries(in_decode: bool) -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, 6)
    cache = filled(model, ids)
    before = contents(cache)

    def double(v: Tensor, hook: Any) -> Tensor:
        return 2 * v

    hooks = [(f"blocks.{layer}.attn.hook_v", double) for layer in range(3)] if in_decode else []
    with model.hooks(fwd_hooks=hooks):
        model.generate(loud.tokens(2, 1), 5, past_kv_cache=cache, stop_at_eos=False)
    assert cache.length == 11
    for layer in range(3):
        assert torch.equal(cache[layer].past_keys[:, :6], before[2 * layer])
        assert torch.equal(cache[layer].past_values[:, :6], before[2 * layer + 1])


# --- editing at rest ------------------------------------------------------------------------------


def assigned(cache: KeyValueCache, layer: int, columns: Any, **new: Any) -> KeyValueCache:
    """A copy in which these columns are assigned by hand."""
    by_hand = cache.clone()
    for name, value in new.items():
        stored = getattr(by_hand[layer], f"past_{name}")  # a view of a clone
        stored[:, columns] = value
    return by_hand


@pytest.mark.parametrize("pos", [1, -1, slice(1, 5, 2), [4, 0], torch.tensor([2, 3])], ids=str)
@pytest.mark.parametrize("what", ["keys", "values", "both"])
@pytest.mark.parametrize("per_row", [False, True])
def test_C3_edit_at_rest_is_an_assignment(pos: Any, what: str, per_row: bool) -> None:
    model, ids, new = loud.build("rotary_gqa"), loud.tokens(2, 6), loud.tokens(2, 4, 5)
    cache = filled(model, ids)
    n = 1 if isinstance(pos, int) else len(range(6)[pos]) if isinstance(pos, slice) else len(pos)
    noise = torch.randn(2 if per_row else 1, n, 2, 10)
    given = {k: noise for k in ("keys", "values") if what in (k, "both")}
    columns = [pos] if isinstance(pos, int) else pos
    by_hand = assigned(cache, 1, columns, **given)
    plain = run(model, new, past_kv_cache=cache.clone())
    cache.edit(1, pos, **given)
    assert_same_contents(cache, contents(by_hand))
    out = run(model, new, past_kv_cache=cache)
    assert torch.equal(out, run(model, new, past_kv_cache=by_hand))
    assert (out - plain).abs().max() > 1e-2
    assert cache.length == 10


def test_C3_edit_at_rest_is_not_an_edit_while_writing() -> None:
    model, ids, new = loud.build("rotary_gqa"), loud.tokens(1, 6), loud.tokens(1, 4, 5)

    def silence(v: Tensor, hook: Any) -> Tensor:
        return torch.cat((v[:, :1], torch.zeros_like(v[:, 1:2]), v[:, 2:]), 1)

    written = empty_cache(model)
    with torch.no_grad():
        hooks = [("blocks.0.attn.hook_v", silence)]
        model.run_with_hooks(ids, past_kv_cache=written, fwd_hooks=hooks)
    at_rest = filled(model, ids)
    at_rest.edit(0, 1, values=0.0)
    assert torch.equal(at_rest[0].past_values, written[0].past_values)
    assert not torch.allclose(at_rest[1].past_values, written[1].past_values, atol=1e-2)
    outs = [run(model, new, past_kv_cache=cache) for cache in (at_rest, written)]
    assert (outs[0] - outs[1]).abs().max() > 1e-2


def test_C3_an_edit_in_a_branch_reaches_the_prefix_and_leaves_the_original() -> None:
    model = loud.build("rotary_gqa")
    ids, new = loud.tokens(1, 5), loud.tokens(4, 3, 5)
    cache = filled(model, ids, frozen=True)
    before, other = contents(cache), cache.branch(4)
    branch = cache.branch(4, max_len=8)
    run(model, new, past_kv_cache=branch)
    by_hand = branch.expand(4)
    rows = torch.randn(4, 3, 2, 10)
    for layer in (0, 2):
        branch.edit(layer, [6, 2, -4], values=rows)  # columns of the prefix and of the tail
        by_hand[layer].past_values[:, [6, 2, 4]] = rows
    branch.edit(1, slice(0, 2), keys=0.5)
    by_hand[1].past_keys[:, :2] = 0.5
    assert_same_contents(branch, contents(by_hand))
    assert branch[1].prefix[0][0].shape[0] == 1  # the same for all rows: still one
    assert_same_contents(cache, before)
    assert other[0].prefix[0][0].data_ptr() == cache[0].past_keys.data_ptr()
    after = loud.tokens(4, 2, 9)
    for how in ("joined", "explicit"):
        names = ["blocks.0.attn.hook_pattern"] if how == "explicit" else []
        with model.hooks(fwd_hooks=[(name, lambda x, hook: None) for name in names]):
            ours = run(model, after, past_kv_cache=branch.clone())
            close(ours, run(model, after, past_kv_cache=by_hand.clone()))
            close(ours, run(model, after, past_kv_cache=branch.select_rows(range(4))))
    with pytest.raises(ValueError, match="frozen cache is read only"):
        cache.edit(0, 1, values=0.0)
    assert_same_contents(cache, before)


def test_C3_edits_that_do_not_fit_write_nothing() -> None:
    cache = filled(loud.build("rotary_gqa"), loud.tokens(2, 5))
    before, good = contents(cache), torch.zeros(2, 1, 2, 10)
    wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (IndexError, "layer 3 is outside a cache of 3 layers", (3, 0), {"keys": good}),
        (IndexError, "pos 5 is outside a cache of 5", (0, 5), {"keys": good}),
        (IndexError, "pos -6", (0, [0, -6]), {"keys": good}),
        (ValueError, "names a position twice", (0, [1, -4]), {"keys": good}),
        (ValueError, "chooses none", (0, slice(3, 3)), {"keys": good}),
        (ValueError, "int, a slice or a list", (0, (1, 3)), {"keys": good}),
        (ValueError, "int, a slice or a list", (0, True), {"keys": good}),
        (ValueError, "layer must be an int", ("0", 0), {"keys": good}),
        (ValueError, "nothing to write", (0, 0), {}),
        (ValueError, r"keys must be.*\[2, 1, 2, 10\]; got \[2, 1, 2, 9\]", (0, 0),
         {"keys": good[..., 1:], "values": good}),
        (ValueError, r"values must be.*got \[3, 1, 2, 10\]", (0, 0),
         {"keys": good, "values": torch.zeros(3, 1, 2, 10)}),
        (ValueError, "values are torch.float64", (0, 0), {"keys": good, "values": good.double()}),
        (ValueError, "on meta", (0, 0), {"keys": good, "values": good.to("meta")}),
        (ValueError, "a tensor or a number, got str", (0, 0), {"keys": good, "values": "0"}),
    ]  # fmt: skip
    for error, message, place, new in wrong:
        with pytest.raises(error, match=message):
            cache.edit(*place, **new)
        assert_same_contents(cache, before)


def test_an_edit_is_part_of_the_graph_and_the_past_before_it_too() -> None:
    model, ids = loud.build("rotary_gqa", dtype="float64"), loud.tokens(1, 6)
    cache = empty_cache(model)
    first = model(ids[:, :4], past_kv_cache=cache)
    new = torch.randn(1, 1, 2, 10, dtype=torch.float64, requires_grad=True)
    cache.edit(0, 1, values=new)
    (first.sum() + model(ids[:, 4:], past_kv_cache=cache).square().sum()).backward()
    assert new.grad is not None
    assert new.grad.abs().max() > 1e-6
    with torch.inference_mode():
        inside = empty_cache(model)
        model(ids[:, :4], past_kv_cache=inside)
    inside.edit(0, 1, values=0.0)  # made in inference mode, edited and used outside
    run(model, ids[:, 4:], past_kv_cache=inside)
    assert inside[0].past_values[:, 1].eq(0).all()


# --- rows -----------------------------------------------------------------------------------------


@KINDS
def test_stacked_rows_continue_as_each_alone(kind: str) -> None:
    model, suffix = loud.build(kind), loud.tokens(4, 4, 9)
    _, ids, mask = loud.ragged([3, 5])
    parts = [
        filled(model, loud.tokens(1, 7), frozen=True),
        filled(model, ids, frozen=True, attention_mask=mask),
        filled(model, loud.tokens(1, 2, 8), frozen=True),
    ]
    before = [contents(part) for part in parts]
    stacked = KeyValueCache.stack(parts)
    assert (stacked.frozen, stacked.batch_size, stacked.length) == (True, 4, 7)
    assert stacked.previous_attention_mask.sum(1).tolist() == [7, 3, 5, 2]
    out = run(model, suffix, past_kv_cache=stacked)
    close(out[:1], run(model, suffix[:1], past_kv_cache=parts[0]))
    close(out[1:3], run(model, suffix[1:3], past_kv_cache=parts[1]))
    close(out[3:], run(model, suffix[3:], past_kv_cache=parts[2]))
    for part, contained in zip(parts, before, strict=True):
        assert_same_contents(part, contained)


def test_what_cannot_be_stacked_is_refused() -> None:
    model = loud.build("rotary_gqa")
    cache = filled(model, loud.tokens(1, 4))
    with pytest.raises(ValueError, match="no caches"):
        KeyValueCache.stack([])
    with pytest.raises(ValueError, match="cache 1 has 2 layers, the first 3"):
        KeyValueCache.stack([cache, empty_cache(loud.build("rotary_gqa", n_layers=2))])
    with pytest.raises(ValueError, match="heads"):
        KeyValueCache.stack([cache, empty_cache(loud.build("rotary"))])
    assert not KeyValueCache.stack([cache, cache]).frozen
    whole = KeyValueCache.stack([cache, cache])
    assert whole.padding is None  # nothing is padding: the fast paths stay
    run(model, loud.tokens(2, 3), past_kv_cache=whole)
    assert (whole.length, cache.length) == (7, 4)


@KINDS
@pytest.mark.parametrize("rows", [[0], [2, 0, 2, 3, 1], [3, 3]], ids=str)
def test_selected_rows_continue_as_they_did(kind: str, rows: list[int]) -> None:
    model, suffix = loud.build(kind), loud.tokens(5, 3, 9)[: len(rows)]
    _, ids, mask = loud.ragged([3, 5, 2, 4])
    prefix = filled(model, loud.tokens(2, 4), frozen=True).branch(2)
    run(model, loud.tokens(2, 3, 4), past_kv_cache=prefix)
    prefix.freeze()
    growing = prefix.branch(4, max_len=10)
    run(model, ids, attention_mask=mask, past_kv_cache=growing)
    before = contents(growing)
    chosen = growing.select_rows(torch.tensor(rows))
    expected = growing.expand(4)
    for entry, mine in zip(expected.entries, chosen.entries, strict=True):
        assert torch.equal(mine.past_keys, entry.past_keys[rows])
        assert torch.equal(mine.past_values, entry.past_values[rows])
    assert torch.equal(
        chosen.previous_attention_mask, growing.previous_attention_mask[torch.tensor(rows)]
    )
    whole = torch.cat((loud.tokens(2, 4), loud.tokens(2, 3, 4)), 1).repeat_interleave(2, 0)
    whole = torch.cat((whole[rows], ids[rows], suffix), 1)
    whole_mask = F.pad(F.pad(mask[rows], (7, 0), value=1), (0, 3), value=1)
    alone = run(model, whole, attention_mask=whole_mask)[:, -3:]
    close(run(model, suffix, past_kv_cache=chosen), alone)
    assert_same_contents(growing, before)
    with pytest.raises(ValueError, match="8 of max_len=10.*3 more"):
        model(suffix, past_kv_cache=chosen)


def test_a_prefix_of_all_rows_stays_shared_when_rows_are_selected() -> None:
    model = loud.build("rotary_gqa")
    cache = filled(model, loud.tokens(1, 5), frozen=True)
    branch = cache.branch(3)
    run(model, loud.tokens(3, 2), past_kv_cache=branch)
    chosen = branch.select_rows([2, 2, 0, 1])
    assert chosen[1].prefix[0][0].data_ptr() == cache[1].past_keys.data_ptr()
    assert chosen.batch_size == 4
    for rows, error in (([3], IndexError), ([-1], IndexError), ([], ValueError), (0, ValueError)):
        with pytest.raises(error, match="rows"):
            branch.select_rows(rows)
    with pytest.raises(ValueError, match="list of ints"):
        branch.select_rows(torch.tensor([0.0]))


# --- copies by Python -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_pickles_and_deep_copies_hold_what_is_stored_and_no_more(how: str) -> None:
    model, ids = loud.build("rotary_gqa", n_ctx=500), loud.tokens(1, 40)
    cache = filled(model, ids, frozen=True)
    branch = cache.branch(2, max_len=400)
    _, new, mask = loud.ragged([3, 5])
    run(model, new, attention_mask=mask, past_kv_cache=branch)
    before = contents(branch)
    stored = 3 * 2 * (40 + 2 * 5) * 2 * 10 * 4
    if how == "pickle":
        data = pickle.dumps(branch)
        assert len(data) < stored + 20_000 < branch.nbytes()
        twin = pickle.loads(data)
    else:
        twin = copy.deepcopy(branch)
    assert twin.nbytes() == stored < branch.nbytes()
    assert_same_contents(twin, before)
    after = loud.tokens(2, 3)
    assert torch.equal(
        run(model, after, past_kv_cache=twin), run(model, after, past_kv_cache=branch)
    )
    assert_same_contents(twin, contents(branch))
    with pytest.raises(ValueError, match="8 of max_len=400"):
        model(loud.tokens(2, 393), past_kv_cache=twin)
    assert copy.deepcopy(cache).frozen


def test_a_deep_copy_of_a_cache_with_a_graph_leaves_the_graph() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(1, 6)
    cache = empty_cache(model)
    model(ids, past_kv_cache=cache)
    twin = copy.deepcopy(cache)
    assert not twin[0].past_keys.requires_grad
    assert cache[0].past_keys.requires_grad


def test_report_043_two_interleaved_continuations_are_as_one_after_the_other() -> None:
    model = loud.build("rotary_window")
    cache = filled(model, loud.tokens(1, 8), frozen=True)
    prompts = [loud.tokens(2, 3, seed) for seed in (4, 5)]
    args: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "stop_at_eos": False}
    expected = [model.generate(p, past_kv_cache=cache, **args) for p in prompts]
    streams = [
        model.generate_stream(p, past_kv_cache=cache, max_tokens_per_yield=1, **args)
        for p in prompts
    ]
    chunks = list(zip(*streams, strict=True))
    for i in (0, 1):
        assert torch.equal(torch.cat([pair[i] for pair in chunks], 1), expected[i])


def test_report_043_two_threads_share_a_frozen_prefix() -> None:
    model = loud.build("rotary_gqa")
    cache = filled(model, loud.tokens(1, 8), frozen=True)
    before = contents(cache)
    prompts = [loud.tokens(2, 3, seed) for seed in range(2)]

    def work(i: int, into: dict[int, list[Tensor]]) -> None:
        args: dict[str, Any] = {"do_sample": False, "stop_at_eos": False, "past_kv_cache": cache}
        into[i] = [model.generate(prompts[i], 8, **args) for _ in range(2)]

    alone: dict[int, list[Tensor]] = {}
    together: dict[int, list[Tensor]] = {}
    for i in range(2):
        work(i, alone)
    threads = [threading.Thread(target=work, args=(i, together)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert all(torch.equal(a, b) for a, b in zip(alone[i], together[i], strict=True))
    assert_same_contents(cache, before)


def test_two_models_caches_are_not_mixed() -> None:
    models = [loud.build("rotary_gqa", seed=seed) for seed in (0, 1)]
    ids = loud.tokens(1, 10)
    caches = [empty_cache(model) for model in models]
    for part in ids.split(2, 1):
        outs = [run(m, part, past_kv_cache=c) for m, c in zip(models, caches, strict=True)]
    for model, out in zip(models, outs, strict=True):
        close(out, run(model, ids)[:, -2:])


# --- refusals: before anything is written ---------------------------------------------------------


def wrong_caches(model: HookedTransformer) -> dict[str, tuple[KeyValueCache, str]]:
    ids = loud.tokens(2, 5)
    other_dtype = KeyValueCache.init_cache(loud.build("rotary_gqa", dtype="bfloat16").cfg, "cpu", 2)
    on_meta = KeyValueCache.init_cache(model.cfg, "meta", 2)
    full = empty_cache(model, 2, max_len=6)
    run(model, ids, past_kv_cache=full)
    uneven = filled(model, ids)
    run(model, ids, past_kv_cache=uneven, stop_at_layer=1)
    return {
        "full": (full, r"full: 5 of max_len=6 positions are taken and 3 more"),
        "batch": (filled(model, loud.tokens(3, 5)), "holds 3 rows, the input has 2"),
        "batch of one": (filled(model, loud.tokens(1, 5)), r"1 rows, the input has 2.*freeze"),
        "dtype": (other_dtype, "cache is torch.bfloat16, the keys are torch.float32"),
        "device": (on_meta, "cache is on meta, the keys on cpu"),
        "layers": (empty_cache(loud.build("rotary_gqa", n_layers=2), 2), "2 layers, the model 3"),
        "heads": (empty_cache(loud.build("rotary"), 2), r"\(4, 10\), got \(2, 10\)"),
        "uneven": (uneven, "different lengths in different layers"),
    }


@pytest.mark.parametrize(
    "what", ["full", "batch", "batch of one", "dtype", "device", "layers", "heads", "uneven"]
)
def test_a_cache_that_does_not_fit_is_refused_unchanged(what: str) -> None:
    model = loud.build("rotary_gqa")
    cache, message = wrong_caches(model)[what]
    lengths = [entry.length for entry in cache.entries]
    before = contents(cache) if what not in ("device",) else None
    with pytest.raises(ValueError, match=message):
        model(loud.tokens(2, 3), past_kv_cache=cache)
    if before is not None:
        assert_same_contents(cache, before)
    assert [entry.length for entry in cache.entries] == lengths


def test_past_n_ctx_is_refused_and_real_tokens_are_what_counts() -> None:
    model = loud.build("standard", n_ctx=12)
    cache = filled(model, loud.tokens(1, 10))
    with pytest.raises(ValueError, match="reaches 13 positions.*n_ctx=12"):
        model(loud.tokens(1, 3), past_kv_cache=cache)
    _, ids, mask = loud.ragged([4, 10])
    run(
        model,
        ids[:1],
        attention_mask=mask[:1],
        past_kv_cache=filled(model, ids[:1], attention_mask=mask[:1]),
    )


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("start", [0, 5])
def test_a_forward_that_fails_half_way_leaves_the_cache_as_it_was(
    error: type[BaseException], grad: bool, start: int
) -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(1, 9)
    cache = empty_cache(model)
    if start:
        run(model, ids[:, :start], past_kv_cache=cache)
    before = contents(cache)

    def boom(x: Tensor, hook: Any) -> None:
        raise error

    with torch.set_grad_enabled(grad), pytest.raises(error):
        model.run_with_hooks(
            ids[:, start:], past_kv_cache=cache, fwd_hooks=[("blocks.2.hook_resid_mid", boom)]
        )
    assert_same_contents(cache, before)
    assert not cache[0].past_keys.requires_grad
    close(run(model, ids[:, start:], past_kv_cache=cache), run(model, ids)[:, start:])


# --- the object -----------------------------------------------------------------------------------


@KINDS
def test_D5_a_preallocated_cache_gives_the_same_results_and_says_when_it_is_full(kind: str) -> None:
    model, ids = loud.build(kind), loud.tokens(2, 11)
    fixed, dynamic = empty_cache(model, 2, 9), empty_cache(model, 2)
    sizes = [5, 1, 3]
    outs = [in_pieces(model, ids[:, :9], sizes, cache) for cache in (fixed, dynamic)]
    close(*outs)
    before = contents(fixed)
    with pytest.raises(ValueError, match="9 of max_len=9 positions are taken and 2 more"):
        model(ids[:, 9:], past_kv_cache=fixed)
    assert_same_contents(fixed, before)


def test_growing_is_geometric_and_max_len_is_allocated_once() -> None:
    model, ids = loud.build("standard", n_ctx=400), loud.tokens(1, 300)
    cache, fixed, places, fixed_places = empty_cache(model), empty_cache(model, 1, 300), [], set()
    for part in ids.split(20, 1):
        run(model, part, past_kv_cache=cache)
        run(model, part, past_kv_cache=fixed)
        places.append((cache[0]._keys.data_ptr(), cache[0]._keys.shape[2]))
        fixed_places.add(fixed[0]._keys.data_ptr())
    assert [size for _, size in dict.fromkeys(places)] == [FIRST_CAPACITY * 2**i for i in range(4)]
    assert len(fixed_places) == 1
    assert torch.equal(cache[2].past_values, fixed[2].past_values)
    assert fixed.nbytes() == 3 * 2 * 300 * 4 * 10 * 4


def test_past_keys_are_views_of_what_attention_used() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, 6)
    cache = empty_cache(model, 2)
    assert cache[0].past_keys.shape == (2, 0, 2, 10)
    with torch.no_grad():
        _, seen = model.run_with_cache(ids, past_kv_cache=cache)
    for layer in range(3):
        assert torch.equal(cache[layer].past_keys, seen["rot_k", layer])  # rotated, stored once
        assert torch.equal(cache[layer].past_values, seen["v", layer])
        assert cache[layer].past_keys.data_ptr() == cache[layer]._keys.data_ptr()


def test_hooks_see_the_new_positions_and_the_keys_of_all() -> None:
    model = loud.build("rotary_gqa")
    cache = filled(model, loud.tokens(1, 7), frozen=True)
    _, seen = model.run_with_cache(loud.tokens(3, 4), past_kv_cache=cache)
    assert seen["q", 0].shape == (3, 4, 4, 10)
    assert seen["k", 0].shape == seen["rot_k", 0].shape == seen["v", 0].shape == (3, 4, 2, 10)
    assert seen["pattern", 0].shape == seen["attn_scores", 0].shape == (3, 4, 4, 11)
    close(seen["pattern", 0].sum(-1), torch.ones(3, 4, 4))


def test_an_edit_of_the_new_values_is_what_gets_cached() -> None:
    model, ids = loud.build("standard"), loud.tokens(1, 6)

    def double(v: Tensor, hook: Any) -> Tensor:
        return 2 * v

    cache, plain = empty_cache(model), filled(model, ids)
    with torch.no_grad():
        model.run_with_hooks(ids, past_kv_cache=cache, fwd_hooks=[("blocks.0.attn.hook_v", double)])
    close(cache[0].past_values, 2 * plain[0].past_values)
    assert torch.equal(cache[0].past_keys, plain[0].past_keys)


@pytest.mark.parametrize("frozen", [False, True])
def test_entries_append_and_return_old_and_new(frozen: bool) -> None:
    model = loud.build("rotary_gqa")
    cache = filled(model, loud.tokens(1, 4), frozen)
    before = cache[0].past_keys.clone()
    new = torch.randn(1, 3, 2, 10)
    keys, values = cache[0].append(new, -new)
    assert torch.equal(keys, torch.cat((before, new), 1))
    assert torch.equal(values[:, 4:], -new)
    assert cache[0].length == (4 if frozen else 7)
    assert torch.equal(cache[0].past_keys, before if frozen else keys)
    with pytest.raises(ValueError, match="heads"):
        cache[0].append(torch.randn(1, 3, 4, 10), torch.randn(1, 3, 4, 10))


def test_append_on_a_frozen_entry_serves_more_rows() -> None:
    cache = filled(loud.build("rotary_gqa"), loud.tokens(1, 4), frozen=True)
    new = torch.randn(5, 3, 2, 10)
    keys, _ = cache[0].append(new, new)
    assert torch.equal(keys, torch.cat((cache[0].past_keys.expand(5, -1, -1, -1), new), 1))


def test_D1_freezing_keeps_length_and_mask_and_changes_no_logit() -> None:
    model = loud.build("rotary_gqa")  # without a tokenizer
    _, ids, mask = loud.ragged([4, 6])
    new = loud.tokens(2, 3)
    cache = filled(model, ids, attention_mask=mask)
    cache.freeze()
    frozen = run(model, new, past_kv_cache=cache)
    assert (cache.frozen, cache.length) == (True, 6)
    assert all(entry.frozen and entry.length == 6 for entry in cache.entries)
    assert torch.equal(cache.previous_attention_mask, mask)
    cache.unfreeze()
    close(run(model, new, past_kv_cache=cache), frozen)
    assert cache.length == 9
    assert torch.equal(cache.previous_attention_mask[:, 6:], torch.ones(2, 3, dtype=torch.long))


@pytest.mark.parametrize("frozen", [False, True])
def test_D1_append_attention_mask_returns_the_joined_mask(frozen: bool) -> None:
    cache = filled(loud.build(), loud.tokens(1, 3), frozen)
    joined = cache.append_attention_mask(torch.tensor([[0, 1]]))
    assert joined.tolist() == [[1, 1, 1, 0, 1]]
    assert cache.previous_attention_mask.tolist() == ([[1] * 3] if frozen else joined.tolist())
    if frozen:
        several = cache.append_attention_mask(torch.tensor([[0, 1], [1, 1]]))
        assert several.tolist() == [[1, 1, 1, 0, 1], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ([[1, 1]], "tensor, got list"),
        (torch.tensor([[0, 2]]), "0 for padding; it holds other values"),
        (torch.tensor([[0.0, 0.5]]), "0 for padding; it holds other values"),
        (torch.tensor([0, 1]), r"\[batch, new_pos\], got \[2\]"),
        (torch.ones(3, 2), "the cache holds 2 rows, the input has 3"),
        (torch.ones(1, 2), "the cache holds 2 rows, the input has 1"),
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_append_attention_mask_refuses_what_is_no_mask_of_these_rows(
    mask: Any, said: str, frozen: bool
) -> None:
    cache = filled(loud.build(), loud.tokens(2, 3), frozen)
    append = KeyValueCache.append_attention_mask.__wrapped__  # without pytest's look at types
    with pytest.raises(ValueError, match=said):
        append(cache, mask)
    assert cache.previous_attention_mask.tolist() == [[1] * 3] * 2
    assert append(cache, torch.ones(2, 1, dtype=torch.bool)).dtype == torch.long


@pytest.mark.parametrize("size", [-1, 0, True, 2.5])
def test_sizes_of_a_cache_are_positive_integers(size: Any) -> None:
    cfg = loud.build().cfg
    of = KeyValueCache.init_cache.__func__.__wrapped__
    with pytest.raises(ValueError, match=f"max_len must be a positive integer, got {size}"):
        of(KeyValueCache, cfg, "cpu", 1, max_len=size)
    with pytest.raises(ValueError, match=f"batch_size must be a positive integer, got {size}"):
        of(KeyValueCache, cfg, "cpu", size)
    cache = filled(loud.build(), loud.tokens(2, 3), frozen=True)
    with pytest.raises(ValueError, match=f"max_len must be a positive integer, got {size}"):
        KeyValueCache.branch.__wrapped__(cache, 2, size)


@pytest.mark.parametrize("kind", ["standard", "rotary_gqa"])
def test_layers_that_come_later_know_the_padding_that_earlier_ones_were_given(kind: str) -> None:
    """Padding among the new tokens too: a query that is padding sees nothing, which is no NaN."""
    model, (_, ids, mask) = loud.build(kind), loud.ragged([4, 7, 2])
    cache = KeyValueCache.init_cache(model.cfg, "cpu", 3)
    stream = run(model, ids, attention_mask=mask, past_kv_cache=cache, stop_at_layer=1)
    with model.hooks([("blocks.1.attn.hook_pattern", lambda pattern, hook: pattern)]):  # by steps
        logits = run(model, stream, start_at_layer=1, past_kv_cache=cache)
    close(logits, run(model, ids, attention_mask=mask))
    _, seen = model.run_with_cache(ids, attention_mask=mask)
    if kind == "standard":
        assert not seen["hook_pos_embed"][mask == 0].any()
        assert seen["hook_pos_embed"][mask == 1].all()


def test_clone_crop_and_expand_are_copies() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(1, 8)
    cache = filled(model, ids)
    before = contents(cache)
    clone, cropped, wide = cache.clone(), cache.crop(5), cache.expand(3)
    places = {c[0]._keys.untyped_storage().data_ptr() for c in (cache, clone, cropped, wide)}
    assert len(places) == 4
    run(model, loud.tokens(1, 2), past_kv_cache=clone)
    assert (clone.length, cropped.length, wide.length) == (10, 5, 8)
    assert torch.equal(cropped[1].past_keys, cache[1].past_keys[:, :5])
    again = run(model, ids[:, 5:], past_kv_cache=cropped)
    close(again, run(model, ids)[:, 5:])
    rows = loud.tokens(3, 4, 6)
    close(
        run(model, rows, past_kv_cache=wide),
        run(model, torch.cat((ids.expand(3, -1), rows), 1))[:, 8:],
    )
    assert_same_contents(cache, before)
    with pytest.raises(ValueError, match="crop a cache of 8 positions to 9"):
        cache.crop(9)
    with pytest.raises(ValueError, match="expand a cache of 3 rows to 4"):
        filled(model, loud.tokens(3, 2)).expand(4)


def test_copies_keep_padding_freezing_and_room() -> None:
    model = loud.build("standard")
    _, ids, mask = loud.ragged([3, 6])
    cache = filled(model, ids, frozen=True, attention_mask=mask)
    assert cache.clone().frozen
    assert cache.clone()[0].frozen
    assert cache.crop(4).previous_attention_mask.tolist() == mask[:, :4].tolist()
    assert cache.expand(4).previous_attention_mask.tolist() == mask.repeat_interleave(2, 0).tolist()
    branch = cache.branch(2, max_len=4)
    assert branch.previous_attention_mask.tolist() == mask.tolist()
    run(model, loud.tokens(2, 1), past_kv_cache=branch)
    twin = branch.clone()
    run(model, loud.tokens(2, 3), past_kv_cache=twin)
    assert twin.length == 10
    with pytest.raises(ValueError, match="full"):
        model(loud.tokens(2, 1), past_kv_cache=twin)


def test_the_aliases_the_repr_and_the_length_of_nothing() -> None:
    cache = empty_cache(loud.build("standard"), 2, max_len=10)
    assert tl.TransformerLensKeyValueCache is tl.HookedTransformerKeyValueCache is KeyValueCache
    assert (len(cache), cache.length, cache.batch_size) == (3, 0, 2)
    assert "3 layers, 2 x 0 positions, growing, 0.02 MiB" in repr(cache)
    assert cache.previous_attention_mask.shape == (2, 0)
    assert cache[-1] is cache.entries[2]


def test_ungrouped_models_cache_a_key_per_query_head() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(1, 9)
    whole = run(model, ids)
    model.set_ungroup_grouped_query_attention(True)
    cache = empty_cache(model)
    close(in_pieces(model, ids, [4, 5], cache), whole)
    assert cache[0].past_keys.shape == (1, 9, 4, 10)


def test_an_empty_mask_given_to_the_constructor_means_no_padding_so_far() -> None:
    model, ids = loud.build("standard"), loud.tokens(1, 9)
    entries = empty_cache(model).entries
    cache = KeyValueCache(entries, torch.zeros(1, 0, dtype=torch.long))
    close(in_pieces(model, ids, [4, 5], cache), run(model, ids))
    assert cache.previous_attention_mask.tolist() == [[1] * 9]


# --- parts of the layers --------------------------------------------------------------------------


def test_two_halves_of_the_layers_fill_one_cache_and_remember_the_padding() -> None:
    model = loud.build("rotary_window")
    _, ids, mask = loud.ragged([3, 7])
    _, new, new_mask = loud.ragged([4, 2], seed=8)
    whole, cache = filled(model, ids, attention_mask=mask), empty_cache(model, 2)
    expected = run(model, new, attention_mask=new_mask, past_kv_cache=whole)
    for tokens, m in ((ids, mask), (new, new_mask)):
        half = run(model, tokens, attention_mask=m, past_kv_cache=cache, stop_at_layer=1)
        out = run(model, half, start_at_layer=1, past_kv_cache=cache)
    close(out[new_mask.bool()], expected[new_mask.bool()])
    assert cache.previous_attention_mask.tolist() == whole.previous_attention_mask.tolist()


def test_stopping_before_the_first_layer_stores_nothing() -> None:
    model = loud.build("standard")
    _, ids, mask = loud.ragged([3, 7])
    cache = empty_cache(model, 2)
    run(model, ids, attention_mask=mask, past_kv_cache=cache, stop_at_layer=0)
    assert cache.length == 0
    assert cache.padding is None


# --- gradients, inference mode --------------------------------------------------------------------


def test_under_grad_the_gradients_are_those_of_one_pass() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(1, 9)
    model(ids).square().sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    cache = empty_cache(model, 1, max_len=12)
    outs = [model(part, past_kv_cache=cache) for part in ids.split([4, 1, 4], 1)]
    torch.cat(outs, 1).square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            close(parameter.grad, expected[name], 1e-3)
    run(model, loud.tokens(1, 3), past_kv_cache=cache)  # on without a graph, in the room there is
    assert cache.length == 12
    assert not cache[0].past_keys.requires_grad


@pytest.mark.parametrize("max_len", [None, 4])
def test_D5_gradcheck_through_a_cache_in_pieces(max_len: int | None) -> None:
    sizes = {"n_layers": 1, "d_model": 5, "d_head": 4, "n_heads": 2, "d_mlp": 7}
    model = loud.build("rotary", dtype="float64", **sizes)
    residual = torch.randn(1, 4, 5, dtype=torch.float64, requires_grad=True)

    def pieces(x: Tensor) -> Tensor:
        cache = empty_cache(model, 1, max_len)
        args: dict[str, Any] = {"start_at_layer": 0, "stop_at_layer": 1, "past_kv_cache": cache}
        return torch.cat([model(part, **args) for part in x.split([2, 1, 1], 1)], 1)

    assert torch.autograd.gradcheck(pieces, residual)


def test_training_queries_alone_works_through_a_growing_cache() -> None:
    model, ids = loud.build("standard"), loud.tokens(1, 8)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.blocks[0].attn.W_Q.requires_grad_(True)
    cache = empty_cache(model)
    sum(model(part, past_kv_cache=cache).sum() for part in ids.split(4, 1)).backward()
    grad = model.blocks[0].attn.W_Q.grad.clone()
    model.zero_grad()
    model(ids).sum().backward()
    close(grad, model.blocks[0].attn.W_Q.grad, 1e-3)


def test_report_057_a_frozen_cache_lets_go_of_the_graph_that_made_it() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(1, 9)
    cache = empty_cache(model)
    model(ids[:, :5], past_kv_cache=cache)
    assert cache[0].past_keys.requires_grad
    cache.freeze()
    assert not any(e.past_keys.requires_grad or e.past_values.requires_grad for e in cache.entries)
    for _ in range(2):  # a prefix that kept its graph would fail the second time
        model(ids[:, 5:], past_kv_cache=cache).sum().backward()
    assert model.blocks[0].attn.W_Q.grad is not None


@pytest.mark.parametrize("how", ["growing", "frozen", "branch"])
def test_a_cache_made_in_inference_mode_is_usable_outside(how: str) -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(1, 9)
    cache = empty_cache(model)
    with torch.inference_mode():
        model(ids[:, :5], past_kv_cache=cache)
    if how != "growing":
        cache.freeze()
    used = cache.branch(1) if how == "branch" else cache
    out = model(ids[:, 5:], past_kv_cache=used)
    out.sum().backward()
    close(out.detach(), run(model, ids)[:, 5:])
    run(model, loud.tokens(1, 2), past_kv_cache=used)


def test_a_cache_made_outside_is_usable_in_inference_mode() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(1, 9)
    cache = filled(model, ids[:, :5])
    with torch.inference_mode():
        out = model(ids[:, 5:7], past_kv_cache=cache)
    close(out.clone(), run(model, ids)[:, 5:7])
    close(run(model, ids[:, 7:], past_kv_cache=cache), run(model, ids)[:, 7:])


# --- without and with a tokenizer -----------------------------------------------------------------


def test_text_that_continues_a_cache_gets_no_second_bos() -> None:
    from tokenizers_for_tests import gpt2_like

    model = loud.build("standard", gpt2_like())
    cache = empty_cache(model)
    run(model, "Hello world", past_kv_cache=cache)
    n = cache.length
    assert n == model.to_tokens("Hello world").shape[1]
    run(model, ", hello", past_kv_cache=cache)
    assert cache.length == n + model.to_tokens(", hello", prepend_bos=False).shape[1]
    run(model, " there", past_kv_cache=cache, prepend_bos=True)
    assert cache.length == n + model.to_tokens(", hello there").shape[1]


def test_texts_of_different_lengths_continue_a_frozen_text() -> None:
    from tokenizers_for_tests import gpt2_like

    model = loud.build("rotary", gpt2_like(), default_prepend_bos=True)
    cache = filled(model, model.to_tokens("The cat sat"), frozen=True)
    texts = [" on the mat", " down and looked at Mary"]
    out = run(model, texts, past_kv_cache=cache, padding_side="left")
    for row, text in zip(out, texts, strict=True):
        suffix = model.to_tokens(text, prepend_bos=False)
        whole = torch.cat((model.to_tokens("The cat sat"), suffix), 1)
        close(row[-suffix.shape[1] :], run(model, whole)[0, -suffix.shape[1] :])


def test_values_that_do_not_fit_their_keys_are_refused_before_anything_is_written() -> None:
    jaxtyping.config.update("jaxtyping_disable", True)  # users have no run-time check of types
    cfg = loud.build().cfg
    entry = KeyValueCache.init_cache(cfg, "cpu", 2)[0]
    heads = cfg.n_key_value_heads or cfg.n_heads
    keys = torch.ones(2, 3, heads, cfg.d_head)
    wrong = {
        "values of": [keys[:, :2], keys[:1]],
        "heads, d_head": [keys[..., :1], keys[:, :, :1]],
        "the values are torch.float64": [keys.double()],
    }
    for message, every in wrong.items():
        for values in every:
            with pytest.raises(ValueError, match=message):
                entry.append(keys, values)
    assert entry.length == 0
    entry.append(keys, 2 * keys)
    assert torch.equal(entry.past_values, 2 * keys)


# --- padding that grows along ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["standard", "rotary", "alibi", "window"])
@pytest.mark.parametrize("watched", [False, True])
def test_ragged_rows_continued_one_by_one_equal_one_pass(kind: str, watched: bool) -> None:
    """For more steps than there is room at first."""
    model = loud.build(kind, n_ctx=160)
    ids = loud.tokens(3, 110)
    mask = torch.ones(3, 110, dtype=torch.long)
    mask[0, :9], mask[1, :2] = 0, 0
    whole = run(model, ids, attention_mask=mask)
    cache = empty_cache(model, 3)
    looks = [("blocks.0.attn.hook_pattern", lambda value, hook: None)] if watched else []
    with model.hooks(looks):
        parts = [run(model, ids[:, :12], attention_mask=mask[:, :12], past_kv_cache=cache)]
        parts += [run(model, ids[:, i : i + 1], past_kv_cache=cache) for i in range(12, 110)]
    real = mask.bool()
    close(torch.cat(parts, 1)[real], whole[real])
    assert torch.equal(cache.previous_attention_mask, mask)


def test_what_padding_makes_is_made_once_and_not_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, made = loud.build("rotary"), []
    monkeypatch.setattr(padding.Padding, "__init__", counting(padding.Padding.__init__, made))
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    how: dict[str, Any] = {"attention_mask": mask, "stop_at_eos": False, "verbose": False}
    model.generate(loud.tokens(2, 6), 8, **how)
    assert len(made) == 1


def counting(function: Callable[..., None], calls: list[int]) -> Callable[..., None]:
    def counted(*args: Any) -> None:
        calls.append(1)
        function(*args)

    return counted


def test_a_mask_edited_between_two_steps_counts_as_it_is_then() -> None:
    model, ids = loud.build("rotary"), loud.tokens(2, 9)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    cache = empty_cache(model, 2)
    run(model, ids[:, :6], attention_mask=mask, past_kv_cache=cache)
    run(model, ids[:, 6:7], past_kv_cache=cache)
    hidden = cache.clone()
    hidden.previous_attention_mask = cache.previous_attention_mask.clone()
    for one in (cache, hidden):  # in place here, and by a mask of its own there
        one.previous_attention_mask[1, 3] = 0
    again = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), 1)
    again[1, 3] = 0
    afresh = cache.clone()
    afresh.previous_attention_mask = again
    expected = run(model, ids[:, 7:8], past_kv_cache=afresh)
    for one in (cache, hidden):
        close(run(model, ids[:, 7:8], past_kv_cache=one), expected)


def test_padding_of_inference_mode_does_not_reach_autograd() -> None:
    model, ids = loud.build("standard"), loud.tokens(2, 8)
    mask = torch.ones(2, 4, dtype=torch.long)
    mask[0, :2] = 0
    prefix = filled(model, ids[:, :4], frozen=True, attention_mask=mask)
    with torch.inference_mode():
        model(ids[:, 4:5], past_kv_cache=prefix)
    model(ids[:, 4:5], past_kv_cache=prefix).sum().backward()
    assert model.W_E.grad is not None


def test_memory_that_runs_out_while_a_cache_grows_leaves_it_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = loud.build("rotary", n_ctx=160), loud.tokens(1, 80)
    cache = filled(model, ids[:, :60])
    made = []
    allocate = Tensor.new_empty

    def running_out(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made.append(1)
        if len(made) == 2:
            raise torch.OutOfMemoryError
        return allocate(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "new_empty", running_out)
    with pytest.raises(torch.OutOfMemoryError):
        run(model, ids[:, 60:], past_kv_cache=cache)
    monkeypatch.undo()
    close(run(model, ids[:, 60:], past_kv_cache=cache), run(model, ids)[:, 60:])


def test_a_mask_that_was_given_may_be_used_for_something_else() -> None:
    model, ids = loud.build("rotary"), loud.tokens(2, 7)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    expected = filled(model, ids[:, :5], attention_mask=mask.clone())
    for frozen in (False, True):
        given = mask.clone()
        cache = filled(model, ids[:, :5], frozen=frozen, attention_mask=given)
        given.fill_(1)
        assert torch.equal(cache.previous_attention_mask, mask)
        close(
            run(model, ids[:, 5:6], past_kv_cache=cache),
            run(model, ids[:, 5:6], past_kv_cache=expected.clone()),
        )


def test_a_mask_edited_in_inference_mode_counts_as_it_is_then() -> None:
    model, ids = loud.build("rotary"), loud.tokens(2, 9)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    logits = []
    for edited in (False, True):
        cache = empty_cache(model, 2)
        again = mask.clone()
        again[1, 3] = 0
        with torch.inference_mode():
            model(ids[:, :6], attention_mask=mask, past_kv_cache=cache)
            model(ids[:, 6:7], past_kv_cache=cache)
            if edited:
                cache.previous_attention_mask[1, 3] = 0
            else:
                cache.previous_attention_mask = torch.cat((again, mask[:, -1:]), 1)
            logits.append(model(ids[:, 7:8], past_kv_cache=cache))
    close(*logits)


@pytest.mark.parametrize("wrong", ["mask", "dtype"])
def test_a_forward_that_is_refused_does_not_make_a_cache_another_models(wrong: str) -> None:
    model, other, ids = loud.build("rotary"), loud.build("rotary", seed=1), loud.tokens(1, 8)
    cache = filled(model, ids[:, :5])
    mask = torch.ones(1, 2 if wrong == "mask" else 3, dtype=torch.long)
    other = other if wrong == "mask" else other.double()
    with pytest.raises(ValueError, match=r"attention_mask must be|the cache is torch.float32"):
        other(ids[:, 5:], attention_mask=mask, past_kv_cache=cache)
    cache.freeze()
    close(run(model, ids[:, 5:], past_kv_cache=cache), run(model, ids)[:, 5:])


def test_unchecked_views_of_a_growing_cache_grow_by_themselves() -> None:
    model, ids = loud.build("rotary"), loud.tokens(2, 8)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    cache = filled(model, ids[:, :5], attention_mask=mask)
    view = cache.unchecked()
    expected = run(model, ids[:, 5:7], past_kv_cache=cache.clone())
    close(run(model, ids[:, 5:7], past_kv_cache=view), expected)
    assert (cache.length, view.length) == (5, 7)
    close(run(model, ids[:, 5:7], past_kv_cache=cache), expected)


def test_copies_have_masks_of_their_own() -> None:
    model, ids = loud.build("rotary"), loud.tokens(2, 8)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    cache = filled(model, ids[:, :5], attention_mask=mask)
    copies = [cache.crop(4), cache.clone(), cache.branch(2)]
    cache.previous_attention_mask.fill_(1)
    for each in copies:
        assert torch.equal(each.previous_attention_mask, mask[:, : each.length])


def test_a_mask_of_another_shape_is_refused() -> None:
    cache = filled(loud.build("rotary"), loud.tokens(2, 6))
    for shape in ([2, 3], [6], [3, 6]):
        with pytest.raises(ValueError, match=r"the mask of this cache is \[2, 6\], got"):
            cache.previous_attention_mask = torch.ones(shape, dtype=torch.long)
