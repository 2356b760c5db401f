"""Prefixes as values: files, Hugging Face's caches, whose they are, and finding them by tokens."""

import copy
import inspect
import pickle
import threading
from functools import partial
from pathlib import Path
from typing import Any

import loud
import native
import pytest
import tiny
import torch
from torch import Tensor

from transformer_lens_lite import fingerprint as fingerprints
from transformer_lens_lite import kv_formats
from transformer_lens_lite import prefixes as prefixes_module
from transformer_lens_lite.hooks import Limits
from transformer_lens_lite.kv_cache import KeyValueCache
from transformer_lens_lite.model import HookedTransformer
from transformer_lens_lite.prefixes import PrefixCache

KINDS = pytest.mark.parametrize("kind", list(loud.KINDS))
GREEDY: dict[str, Any] = {"do_sample": False, "stop_at_eos": False, "verbose": False}


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


@torch.no_grad()
def run(model: HookedTransformer, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, **kwargs)


def contents(cache: KeyValueCache) -> list[Tensor]:
    stored = [t for e in cache.entries for t in (e.past_keys, e.past_values)]
    return [t.detach().clone() for t in (*stored, cache.previous_attention_mask)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def nothing(x: Tensor, hook: Any) -> None:
    """An editing hook as far as anyone can tell."""


# --- model.prefix ---------------------------------------------------------------------------------


@KINDS
def test_a_prefix_continues_for_any_multiple_of_its_rows(kind: str) -> None:
    model, suffix = loud.build(kind), loud.tokens(4, 4, 8)
    _, ids, mask = loud.ragged([4, 7])
    prefix = model.prefix(ids, attention_mask=mask)
    assert (prefix.frozen, prefix.batch_size, prefix.length) == (True, 2, 7)
    whole = torch.cat((ids.repeat_interleave(2, 0), suffix), 1)
    whole_mask = torch.cat((mask.repeat_interleave(2, 0), torch.ones_like(suffix)), 1)
    expected = run(model, whole, attention_mask=whole_mask)[:, 7:]
    close(run(model, suffix, past_kv_cache=prefix), expected)
    prefix.unfreeze()
    run(model, suffix[:2], past_kv_cache=prefix)
    assert prefix.length == 11


@pytest.mark.parametrize("kind", ["standard", "rotary_window", "alibi_gqa"])
def test_report_056_a_hook_behind_a_prefix_counts_from_its_end_and_is_told_the_past(
    kind: str,
) -> None:
    model, ids = loud.build(kind), loud.tokens(2, 9)
    cache = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    model(ids[:, :5], past_kv_cache=cache)
    cache.freeze()
    seen: list[Any] = []

    def first(value: Tensor, hook: Any) -> Tensor:
        seen.append((tuple(value.shape[:2]), hook.step.pos))
        value = value.clone()
        value[:, 0] *= 3
        return value

    point = "blocks.1.hook_resid_pre"
    edited = model.run_with_hooks(ids[:, 5:], past_kv_cache=cache, fwd_hooks=[(point, first)])
    assert seen == [((2, 4), slice(5, 9))]

    def sixth(value: Tensor, hook: Any) -> Tensor:
        return value * 3

    with model.hooks([(point, sixth)], pos=5):  # of the whole text, cached or not
        whole = model(ids)
        behind = model(ids[:, 5:], past_kv_cache=cache)
    torch.testing.assert_close(edited, whole[:, 5:], atol=1e-4, rtol=1e-4)
    assert torch.equal(behind, edited)
    assert (edited - model(ids)[:, 5:]).abs().max() > 0.1
    with (
        pytest.warns(UserWarning, match="never"),
        model.hooks([(point, sixth)], pos=2),  # of the prefix, which is not computed again
    ):
        unchanged = model(ids[:, 5:], past_kv_cache=cache)
    assert torch.equal(unchanged, model(ids[:, 5:], past_kv_cache=cache))


def test_a_prefix_of_text_begins_with_bos_and_what_follows_does_not() -> None:
    from tokenizers_for_tests import gpt2_like

    model = loud.build("rotary", gpt2_like(), default_prepend_bos=True)
    prefix = model.prefix("The cat sat")
    assert prefix.length == model.to_tokens("The cat sat").shape[1]
    out = run(model, " on the mat", past_kv_cache=prefix)
    whole = torch.cat(
        (model.to_tokens("The cat sat"), model.to_tokens(" on the mat", prepend_bos=False)), 1
    )
    close(out, run(model, whole)[:, prefix.length :])
    with pytest.raises(ValueError, match="prefix is empty"):
        model.prefix(torch.zeros(1, 0, dtype=torch.long))


# --- files ----------------------------------------------------------------------------------------


@KINDS
def test_what_is_loaded_continues_as_what_was_saved(kind: str, tmp_path: Path) -> None:
    model, suffix = loud.build(kind), loud.tokens(4, 3, 8)
    _, ids, mask = loud.ragged([4, 7, 2, 5])
    prefix = model.prefix(loud.tokens(1, 6))
    branch = prefix.branch(4, max_len=12)
    run(model, ids, attention_mask=mask, past_kv_cache=branch)
    for name, cache in (("prefix", prefix), ("branch", branch)):
        cache.save(tmp_path / name)
        loaded = KeyValueCache.load(tmp_path / name)
        assert same(contents(loaded), contents(cache))
        assert (loaded.frozen, loaded.length) == (cache.frozen, cache.length)
        assert [e.max_len for e in loaded.entries] == [e.max_len for e in cache.entries]
        assert [len(e.prefix) for e in loaded.entries] == [len(e.prefix) for e in cache.entries]
        ours, theirs = (run(model, suffix, past_kv_cache=c) for c in (loaded, cache))
        close(ours, theirs)
    stored = 3 * 2 * (6 + 4 * 7) * prefix[0].past_keys.shape[2] * 10 * 4
    assert stored < (tmp_path / "branch").stat().st_size < stored + 10_000  # the prefix once
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".unfinished"] == []


def test_a_loaded_prefix_lies_in_its_file_and_never_changes_it(tmp_path: Path) -> None:
    model, path = loud.build("rotary_gqa"), tmp_path / "prefix"
    model.prefix(loud.tokens(1, 40)).save(path)
    before = path.read_bytes()
    loaded = KeyValueCache.load(path)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    places = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in maps]
    inside = [any(a <= e._keys.data_ptr() < b for a, b in places) for e in loaded.entries]
    assert all(inside)
    loaded.unfreeze()
    loaded.edit(0, 0, keys=0.0)
    run(model, loud.tokens(1, 3), past_kv_cache=loaded)
    assert loaded.length == 43
    assert path.read_bytes() == before


def test_files_that_are_damaged_or_something_else_are_one_clear_error(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    good, path = tmp_path / "good", tmp_path / "bad"
    loud.build().prefix(loud.tokens(1, 5)).save(good)
    data = good.read_bytes()
    save_file({"x": torch.zeros(2)}, tmp_path / "foreign")
    wrong = {"empty": b"", "cut": data[:-9], "text": b"hello " * 40, "pickle": pickle.dumps([1])}
    wrong |= {"head": data[:20], "foreign": (tmp_path / "foreign").read_bytes()}
    for content in wrong.values():
        path.write_bytes(content)
        with pytest.raises(ValueError, match="bad is not a saved KeyValueCache"):
            KeyValueCache.load(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        KeyValueCache.load(tmp_path / "nowhere")


def test_saving_over_a_file_that_fails_keeps_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    path, cache = tmp_path / "kv", loud.build().prefix(loud.tokens(1, 5))
    cache.save(path)
    before = path.read_bytes()

    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        cache.save(path)
    assert [each.name for each in tmp_path.iterdir()] == ["kv"]
    assert path.read_bytes() == before


# --- Hugging Face ---------------------------------------------------------------------------------


def reading(hf: Any, cache: Any) -> dict[str, Any]:
    """The argument by which a cache is given; transformers 5.24 renamed it."""
    known = inspect.signature(hf.forward).parameters
    return {"cache" if "cache" in known else "past_key_values": cache}


FAMILIES = ["gpt2", "llama_gqa", "gpt_neox", "gemma2", "gptj", "phi"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_what_is_begun_here_continues_in_hugging_face_and_back(name: str, padded: bool) -> None:
    from transformers import DynamicCache

    hf = tiny.build(name)
    model = HookedTransformer.from_pretrained_no_processing(hf_model=hf, device="cpu")
    ids, new = tiny.tokens(hf.config, 2, 20).split([14, 6], 1)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    whole_mask = torch.cat((mask, torch.ones_like(new)), 1)
    positions = (whole_mask.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": mask} if padded else {}
    ours = model.prefix(ids, **given)
    expected = run(model, torch.cat((ids, new), 1), attention_mask=whole_mask)[:, 14:]
    with torch.no_grad():
        there = hf(
            new, attention_mask=whole_mask, position_ids=positions[:, 14:],
            **reading(hf, ours.to_hf()),
        ).logits  # fmt: skip
        close(there, expected, 1e-4)
        theirs = DynamicCache()
        hf(ids, attention_mask=mask, position_ids=positions[:, :14], **reading(hf, theirs))
        back = KeyValueCache.from_hf(theirs, model.cfg, **given)
        close(model(new, past_kv_cache=back), expected, 1e-4)
    for mine, its in zip(ours.entries, theirs.layers, strict=True):
        real = mask.bool()
        close(mine.past_keys[real], its.keys.transpose(1, 2)[real], 1e-4)
    assert back.length == 20
    assert theirs.get_seq_length() == 14  # a copy: growing here does not grow there


def test_a_window_kept_by_hugging_face_is_refused() -> None:
    from transformers import DynamicCache

    hf = tiny.build("gemma2")
    model = HookedTransformer.from_pretrained_no_processing(hf_model=hf, device="cpu")
    cache = DynamicCache(config=hf.config)
    with torch.no_grad():
        hf(tiny.tokens(hf.config, 1, 20), **reading(hf, cache))
    with pytest.raises(ValueError, match=r"layer 0 holds \d of 20 positions.*without config="):
        KeyValueCache.from_hf(cache, model.cfg)


def test_foreign_caches_that_do_not_fit_are_refused() -> None:
    from transformers import DynamicCache

    model = loud.build("rotary_gqa")
    other = loud.build("rotary").prefix(loud.tokens(2, 4)).to_hf()
    good = model.prefix(loud.tokens(2, 4)).to_hf()
    with pytest.raises(ValueError, match=r"layer 0 holds .*\(4, 10, 10\), the config says \(2, 10"):
        KeyValueCache.from_hf(other, model.cfg)
    with pytest.raises(ValueError, match="0 layers, the config 3"):
        KeyValueCache.from_hf(DynamicCache(), model.cfg)
    with pytest.raises(ValueError, match="takes a DynamicCache of transformers, got list"):
        KeyValueCache.from_hf([], model.cfg)
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, 4\].*got \[2, 5\]"):
        KeyValueCache.from_hf(good, model.cfg, torch.ones(2, 5, dtype=torch.long))
    assert KeyValueCache.from_hf(good, model.cfg, torch.ones(2, 4, dtype=torch.long)).length == 4


# --- whose it is ----------------------------------------------------------------------------------


def scale(model: HookedTransformer) -> None:
    with torch.no_grad():
        model.blocks[1].mlp.W_out[0, 0] += 1e-3


def swap_heads(model: HookedTransformer) -> None:
    weight = model.blocks[0].attn.W_Q
    with torch.no_grad():
        weight.copy_(weight.flip(0))


def replace(model: HookedTransformer) -> None:
    old = model.blocks[0].attn.W_Q
    model.blocks[0].attn.W_Q = torch.nn.Parameter(old.detach() * 2)


@pytest.mark.parametrize("change", [scale, swap_heads, replace])
@pytest.mark.parametrize("how", ["frozen", "branch", "loaded", "pickled", "clone", "stack"])
def test_changed_weights_are_refused_until_they_are_as_they_were(
    change: Any, how: str, tmp_path: Path
) -> None:
    model, new = loud.build("rotary_gqa"), loud.tokens(1, 3)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    cache = model.prefix(loud.tokens(1, 6))
    if how == "loaded":
        cache.save(tmp_path / "kv")
        cache = KeyValueCache.load(tmp_path / "kv")
    elif how == "pickled":
        cache = pickle.loads(pickle.dumps(cache))
    elif how != "frozen":
        made = {"branch": lambda: cache.branch(1), "clone": cache.clone}
        cache = made.get(how, lambda: KeyValueCache.stack([cache]))()
    if how != "branch":  # one that grows is checked at its first use only
        run(model, new, past_kv_cache=cache.branch(1) if how == "clone" else cache)
    change(model)
    before, ran = contents(cache), []

    def generate(ids: Tensor, past_kv_cache: KeyValueCache) -> None:
        model.generate(ids, 2, past_kv_cache=past_kv_cache, **GREEDY)

    with model.hooks(fwd_hooks=[("hook_embed", lambda x, hook: ran.append(1))]):
        for use in (model, generate):
            with pytest.raises(ValueError, match=r"another model: its weights.*unchecked\(\)"):
                use(new, past_kv_cache=cache)
    assert ran == []
    assert same(contents(cache), before)
    run(model, new, past_kv_cache=cache.unchecked())
    if how != "branch":
        model.load_state_dict(state)
        run(model, new, past_kv_cache=cache)


def test_another_model_is_refused_by_what_differs_and_an_equal_one_is_not() -> None:
    cache = loud.build("rotary_gqa").prefix(loud.tokens(1, 6))  # the model is gone
    new = loud.tokens(1, 3)
    run(loud.build("rotary_gqa", use_attn_result=True), new, past_kv_cache=cache)
    with pytest.raises(ValueError, match="attn_scores_soft_cap was -1.0 and is 1.5"):
        loud.build("rotary_gqa", attn_scores_soft_cap=1.5)(new, past_kv_cache=cache)
    with pytest.raises(ValueError, match="its weights or parts are others"):
        loud.build("rotary_gqa", seed=1)(new, past_kv_cache=cache)
    view = cache.unchecked()
    assert view[0].past_keys.data_ptr() == cache[0].past_keys.data_ptr()
    run(loud.build("rotary_gqa", seed=1), new, past_kv_cache=view)
    with pytest.raises(
        ValueError, match="its weights or parts are others"
    ):  # the view alone is free
        loud.build("rotary_gqa", seed=1)(new, past_kv_cache=cache)


def test_a_cache_filled_by_two_is_no_prefix_of_either() -> None:
    models = [loud.build("rotary_gqa", seed=seed) for seed in (0, 1)]
    cache = KeyValueCache.init_cache(models[0].cfg)
    for model in models:
        run(model, loud.tokens(1, 3), past_kv_cache=cache)  # growing, it is classic: anyone may
    cache.freeze()
    for model in models:
        with pytest.raises(ValueError, match="another model"):
            model(loud.tokens(1, 3), past_kv_cache=cache)


def test_another_models_use_of_a_copy_leaves_the_original_alone() -> None:
    models = [loud.build("rotary_gqa", seed=seed) for seed in (0, 1)]
    cache = KeyValueCache.init_cache(models[0].cfg)
    run(models[0], loud.tokens(1, 3), past_kv_cache=cache)
    run(models[1], loud.tokens(1, 3), past_kv_cache=cache.clone())
    cache.freeze()
    run(models[0], loud.tokens(1, 3), past_kv_cache=cache)


def test_a_growing_cache_is_nobodys_and_costs_no_reading_of_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = loud.build("rotary_gqa")
    readings: list[Any] = []
    digest = fingerprints.weights_digest

    def counted(model: Any) -> str:
        readings.append(model)
        return digest(model)

    monkeypatch.setattr(fingerprints, "weights_digest", counted)
    model.generate(loud.tokens(1, 4), 4, **GREEDY)
    model.generate(loud.tokens(1, 4), 4, n=2, verbose=False, stop_at_eos=False)  # its own prefix
    model.generate(loud.tokens(1, 4), 4, num_beams=3, **GREEDY)
    seen: list[Any] = []
    handle = model.blocks[0].attn.register_forward_hook(lambda m, args, out: seen.append(args[3]))
    model.generate(loud.tokens(1, 4), 4, **GREEDY)
    handle.remove()
    own = seen[0].cache  # of a generation, which somebody got hold of
    cache = KeyValueCache.init_cache(model.cfg)
    run(model, loud.tokens(1, 4), past_kv_cache=cache)
    scale(model)
    run(model, loud.tokens(1, 4), past_kv_cache=cache)
    assert readings == []
    prefix = model.prefix(loud.tokens(1, 4))
    for _ in range(3):
        model.generate(loud.tokens(2, 2), 3, past_kv_cache=prefix, **GREEDY)
    assert len(readings) == 1
    own.freeze()
    with pytest.raises(ValueError, match="filled by another model"):
        run(loud.build("rotary_gqa", seed=1), loud.tokens(1, 2), past_kv_cache=own)


def test_the_digest_sees_bits_places_names_and_dtypes_and_no_strides() -> None:
    seen = set()
    for values in ([1.0, 2.0], [2.0, 1.0], [-1.0, 2.0], [0.0, 2.0], [-0.0, 2.0]):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            seen.add(int(fingerprints.hashed(torch.tensor(values, dtype=dtype))))
    assert len(seen) == 15
    long = torch.randn(3, fingerprints.CHUNK)
    assert torch.equal(fingerprints.hashed(long), fingerprints.hashed(long.T.contiguous().T))
    assert not torch.equal(fingerprints.hashed(long), fingerprints.hashed(long.flip(0)))
    model = loud.build()
    before = fingerprints.fingerprint(model)
    model.blocks[0].attn.W_Q.data.mul_(2)  # moves no version
    assert fingerprints.fingerprint(model) == before
    fingerprints.forget(model)
    assert fingerprints.fingerprint(model) != before


# --- hooks ----------------------------------------------------------------------------------------


def test_a_prefix_refuses_hooks_that_would_have_acted_on_it(tmp_path: Path) -> None:
    model, new, point = loud.build("rotary_gqa"), loud.tokens(2, 3), "blocks.1.hook_resid_pre"
    plain = model.prefix(loud.tokens(1, 6))
    with model.hooks(fwd_hooks=[(point, nothing)]):
        for use in (model, partial(model.generate, stop_at_eos=False)):
            with pytest.raises(ValueError, match=r"nothing on 'blocks.1.*its 6 positions.*pos=sl"):
                use(new, past_kv_cache=plain)
        run(model, new, past_kv_cache=plain.unchecked())
        under = model.prefix(loud.tokens(1, 6))
        run(model, new, past_kv_cache=under)  # the same hook was there
        classic = KeyValueCache.init_cache(model.cfg)
        run(model, loud.tokens(1, 6), past_kv_cache=classic)
        classic.freeze()
        run(model, new, past_kv_cache=classic)
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", nothing)]):
        run(model, new, past_kv_cache=classic)  # classic code hooks what follows a prefix
        with pytest.raises(ValueError, match="blocks.0"):
            model(new, past_kv_cache=under)
        with pytest.raises(ValueError, match="blocks.0"):
            model(new, past_kv_cache=KeyValueCache.stack([plain, under]))
    with pytest.raises(ValueError, match="under the hook nothing .* is not there now"):
        model(new, past_kv_cache=under)
    run(model, new, past_kv_cache=under.unchecked())  # an edited past, continued without the edit
    model.run_with_cache(new, past_kv_cache=plain)  # listeners only look
    for limits in ({"when": "decode"}, {"pos": slice(6, None)}, {"pos": 7}):
        with model.hooks(fwd_hooks=[(point, nothing)], on_zero_fire="ignore", **limits):
            run(model, new, past_kv_cache=plain)
            model.generate(new, 2, past_kv_cache=plain, **GREEDY)
    with (
        model.hooks(fwd_hooks=[(point, nothing)], pos=slice(5, None), on_zero_fire="ignore"),
        pytest.raises(ValueError, match="was not there"),
    ):
        model(new, past_kv_cache=plain)
    under.save(tmp_path / "kv")
    with model.hooks(fwd_hooks=[(point, nothing)]):
        run(model, new, past_kv_cache=copy.deepcopy(under))
        for loaded in (KeyValueCache.load(tmp_path / "kv"), pickle.loads(pickle.dumps(under))):
            with pytest.raises(ValueError, match="was not there"):  # not known any more
                model(new, past_kv_cache=loaded)


@pytest.mark.parametrize(
    ("limits", "acts"),
    [
        ({}, True), ({"when": "prefill"}, True), ({"when": "decode"}, False), ({"when": 0}, True),
        ({"when": 2}, False), ({"when": [1, 2]}, False), ({"when": [0, 2]}, True),
        ({"when": slice(1, None)}, False), ({"when": slice(None)}, True),
        ({"when": lambda step: False}, True), ({"pos": slice(6, None)}, False),
        ({"pos": slice(5, None)}, True), ({"pos": slice(5, None), "when": "decode"}, False),
        ({"call": 1}, True), ({"call": 2}, False),
    ],
)  # fmt: skip
def test_hooks_limited_to_what_follows_do_not_act_on_a_prefix(limits: Any, acts: bool) -> None:
    assert fingerprints.acts_on(Limits(**limits), 6) == acts


# --- PrefixCache ----------------------------------------------------------------------------------


def prompts(*starts: Tensor, lengths: tuple[int, ...], seed: int = 5) -> tuple[Tensor, Tensor]:
    """Rows that begin so and go on differently, padded on the left: (ids, mask)."""
    rows = [
        torch.cat((start[0], loud.tokens(1, n, seed + i)[0]))
        for i, (start, n) in enumerate(zip(starts, lengths, strict=True))
    ]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, -len(row) :], mask[i, -len(row) :] = row, 1
    return ids, mask


def check(prefixes: PrefixCache, ids: Tensor, mask: Tensor | None = None) -> None:
    """Results are those of the model, with and without the trie."""
    model = prefixes.model
    with torch.no_grad():
        expected = model.next_logits(ids, attention_mask=mask)
    close(prefixes.next_logits(ids, mask), expected)
    args = {"attention_mask": mask, "output_logits": True, **GREEDY}
    ours, theirs = (each.generate(ids, 4, **args) for each in (prefixes, model))
    assert torch.equal(ours.sequences, theirs.sequences)
    close(torch.stack(ours.logits), torch.stack(theirs.logits))


@KINDS
def test_prompts_that_begin_alike_start_from_there(kind: str) -> None:
    model, start, other = loud.build(kind), loud.tokens(1, 8), loud.tokens(1, 8, 3)
    prefixes = PrefixCache(model, 2**20)
    check(prefixes, *prompts(start, start, start, lengths=(3, 5, 1)))
    assert (prefixes.hits, prefixes.misses) == (3, 3)  # the second of the two found the first's
    check(prefixes, *prompts(start, lengths=(4,), seed=20))
    check(prefixes, *prompts(start, other, start, lengths=(2, 3, 6), seed=30))
    check(prefixes, *prompts(start, start[:, :5], other[:, :2], lengths=(3, 9, 5), seed=5))
    check(prefixes, *prompts(start[:, :1], other[:, :3], lengths=(0, 0)))
    check(prefixes, loud.tokens(2, 1), None)


def test_only_what_is_new_is_computed_and_what_is_shared_once() -> None:
    model, start = loud.build("rotary_gqa"), loud.tokens(1, 20)
    prefixes = PrefixCache(model, 2**20)
    fed: list[tuple[int, int]] = []
    forward = model._through_blocks

    def counted(residual: Tensor, *args: Any) -> Tensor:
        fed.append(tuple(residual.shape[:2]))
        return forward(residual, *args)

    model._through_blocks = counted
    ids, mask = prompts(start, start, start, lengths=(3, 5, 2))
    prefixes.next_logits(ids, mask)
    assert fed == [(1, 20), (3, 4), (3, 1)]  # the common start, the rest, each last token
    fed.clear()
    prefixes.next_logits(ids, mask)
    assert fed == [(3, 1)]
    fed.clear()
    ids, mask = prompts(start, start, lengths=(4, 4), seed=40)
    prefixes.next_logits(ids, mask)
    assert fed == [(2, 3), (2, 1)]


def test_what_all_prompts_share_is_read_where_it_lies() -> None:
    model, start = loud.build("rotary_gqa"), loud.tokens(1, 20)
    prefixes = PrefixCache(model, 2**20)
    rows = [start[0].tolist() + [i, i, i] for i in range(1, 4)]
    prefixes._filled(rows)
    (run_of_start,) = prefixes._root.children.values()
    assert run_of_start.tokens == start[0].tolist()
    cache = prefixes._filled(rows)
    first = cache[1].prefix[0][0]
    assert first.shape[0] == 1
    assert first.data_ptr() == run_of_start.layers[1][0].data_ptr()
    bytes_of_a_token = 3 * 2 * 2 * 10 * 4
    assert prefixes.nbytes == (20 + 3 * 2) * bytes_of_a_token


def test_the_least_recently_used_go_first_and_the_limit_holds() -> None:
    model, starts = loud.build("rotary_gqa"), [loud.tokens(1, 11, seed) for seed in range(4)]
    per_prompt = 10 * 3 * 2 * 2 * 10 * 4
    prefixes = PrefixCache(model, 2 * per_prompt)
    for i in (0, 1, 0, 2):
        check(prefixes, starts[i])
        assert prefixes.nbytes <= 2 * per_prompt
    hits = prefixes.hits
    prefixes.next_logits(starts[0])
    assert prefixes.hits == hits + 1  # used again before 2 came, so 1 went
    prefixes.next_logits(starts[1])
    assert prefixes.hits == hits + 1
    nothing_kept = PrefixCache(model, 0)
    check(nothing_kept, starts[0])
    assert nothing_kept.nbytes == 0
    assert repr(nothing_kept) == "PrefixCache(0 tokens, 0.0 of 0.0 MiB, 0 hits, 2 misses)"
    with pytest.raises(ValueError, match="max_bytes"):
        PrefixCache(model, -1)


def test_changed_weights_flags_and_hooks_are_noticed() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, 9)
    prefixes = PrefixCache(model, 2**20)
    check(prefixes, ids)
    scale(model)
    check(prefixes, ids)
    model.set_ungroup_grouped_query_attention(True)
    check(prefixes, ids)
    hits = prefixes.hits

    def double(x: Tensor, hook: Any) -> Tensor:
        return 2 * x

    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_mid", double)]):
        check(prefixes, ids)
    assert prefixes.hits == hits
    check(prefixes, ids)
    assert prefixes.hits > hits


def test_arguments_that_look_at_the_prompt_and_bad_ones_are_the_models() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, 9)
    prefixes = PrefixCache(model, 2**20)
    prefixes.next_logits(ids)
    state = repr(prefixes)
    args: dict[str, Any] = {"repetition_penalty": 5.0, **GREEDY}
    assert torch.equal(prefixes.generate(ids, 6, **args), model.generate(ids, 6, **args))
    right = torch.tensor([[1] * 9, [1] * 8 + [0]])
    wrong: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("top_k", (ids, 3), {"top_k": -1}),
        ("max_new_tokens", (ids, -1), {}),
        ("n_ctx=48", (ids, 48), {"stop_at_eos": False}),
        ("end in padding", (ids, 3), {"attention_mask": right}),
        ("empty", (ids[:, :0], 3), {}),
        ("return_type", (ids, 3), {"return_type": "json"}),
    ]
    for message, given, keywords in wrong:
        with pytest.raises(ValueError, match=message):
            prefixes.generate(*given, **{"stop_at_eos": False, **keywords})
    assert repr(prefixes) == state
    assert torch.equal(prefixes.generate(ids, 0, **GREEDY), ids)


@pytest.mark.parametrize("texts", ["Hello there, world", ["Hello", "Hello there, world", "No"]])
def test_texts_go_in_and_texts_come_out(texts: Any) -> None:
    from tokenizers_for_tests import gpt2_like

    model = loud.build("rotary", gpt2_like(), default_prepend_bos=True)
    prefixes = PrefixCache(model, 2**20)
    for return_type in ("input", "str", "tokens"):
        args = {"return_type": return_type, **GREEDY}
        ours, theirs = (each.generate(texts, 5, **args) for each in (prefixes, model))
        assert type(ours) is type(theirs)
        assert torch.equal(ours, theirs) if return_type == "tokens" else ours == theirs
    sampled = [
        each.generate(texts, 8, generator=torch.Generator().manual_seed(3), stop_at_eos=False)
        for each in (prefixes, model)
    ]
    assert sampled[0] == sampled[1]
    assert prefixes.hits > 0


def test_frequencies_that_depend_on_the_length_are_left_to_the_model() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}
    prefixes = PrefixCache(loud.build("rotary", rotary_scaling=scaling), 2**20)
    for length in (6, 12):
        check(prefixes, loud.tokens(1, length))
    assert prefixes.nbytes == 0


@torch.no_grad()
def test_ungrouped_caches_are_hugging_faces_with_a_config() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, 6)
    plain = model.prefix(ids[:, :4]).to_hf()
    expected = model(ids)[:, 4:]
    model.set_ungroup_grouped_query_attention(True)
    cache = model.prefix(ids[:, :4])
    theirs = cache.to_hf(model.cfg)
    for (keys, values), (same_keys, same_values) in zip(
        [layer[:2] for layer in theirs], [layer[:2] for layer in plain], strict=True
    ):
        torch.testing.assert_close(keys, same_keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values, same_values, atol=1e-5, rtol=1e-5)
    back = KeyValueCache.from_hf(plain, model.cfg)
    close(run(model, ids[:, 4:], past_kv_cache=back), expected)
    edited = cache.clone()
    edited.unfreeze()
    edited.entries[1]._keys = edited.entries[1]._keys * torch.arange(1, 5)[:, None, None]
    with pytest.raises(ValueError, match="of an ungrouped model, edited"):
        edited.to_hf(model.cfg)


# --- several at once ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["frozen", "trie"])
def test_two_threads_generate_what_one_after_the_other_does(kind: str) -> None:
    model = loud.build("rotary_window")
    prefix = model.prefix(loud.tokens(1, 8))
    before, given = contents(prefix), [loud.tokens(2, 3, seed) for seed in range(2)]
    whole = [torch.cat((loud.tokens(1, 8).expand(2, -1), each), 1) for each in given]
    trie = PrefixCache(model, 2**20)

    def work(i: int, into: dict[int, Tensor], sharing: bool = True) -> None:
        if kind == "frozen":
            into[i] = model.generate(given[i], 6, past_kv_cache=prefix, **GREEDY)
        elif sharing:
            into[i] = trie.generate(whole[i], 6, **GREEDY)
        else:
            into[i] = model.generate(whole[i], 6, **GREEDY)

    alone: dict[int, Tensor] = {}
    for i in range(2):
        work(i, alone, sharing=False)
    for _ in range(20):
        together: dict[int, Tensor] = {}
        threads = [threading.Thread(target=work, args=(i, together)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(2):
            assert torch.equal(together[i], alone[i])
    assert same(contents(prefix), before)


def test_a_branch_of_a_prefix_that_was_used_is_checked_too() -> None:
    model, ids = native.build("rotary"), native.tokens(2, 6)
    prefix = model.prefix(ids[:1, :3])
    model(ids[:, 3:], past_kv_cache=prefix)
    early = prefix.branch(2)
    with model.hooks([("blocks.0.hook_resid_post", lambda act, hook: act * 2)]):
        for branch in (early, prefix.branch(2)):
            with pytest.raises(ValueError, match="was not there when this prefix was computed"):
                model(ids[:, 3:], past_kv_cache=branch)
    with torch.no_grad():
        model.blocks[0].attn.W_K.mul_(1.5)
    for branch in (early, prefix.branch(2), prefix.clone(), prefix.select_rows([0, 0])):
        with pytest.raises(ValueError, match="weights"):
            model(ids[:, 3:], past_kv_cache=branch)


def test_a_hook_that_acted_elsewhere_and_a_modules_own_hook_are_other_hooks() -> None:
    model, ids = native.build("rotary"), native.tokens(2, 6)

    def double(act: Any, hook: Any) -> Any:
        return act * 2

    with model.hooks([("blocks.0.hook_resid_post", double)], pos=0):
        prefix = model.prefix(ids[:1, :3])
        model(ids[:, 3:], past_kv_cache=prefix)
    with (
        model.hooks([("blocks.0.hook_resid_post", double)]),
        pytest.raises(ValueError, match="hook .*double.* on 'blocks.0.hook_resid_post' was not"),
    ):
        model(ids[:, 3:], past_kv_cache=prefix)
    without: list[tuple[dict[str, Any], bool]] = [  # limits, and whether the hook is missed
        ({}, True),
        ({"when": "prefill"}, False),
        ({"when": 0}, False),
        ({"when": [0]}, False),
        ({"when": [0, 2]}, True),
        ({"when": slice(0, 1)}, False),
        ({"when": slice(None)}, True),
        ({"when": lambda step: True}, True),
        ({"pos": slice(1, 3)}, False),
        ({"pos": slice(1, 4)}, True),
        ({"pos": slice(1, None)}, True),
        ({"pos": [0, 2]}, False),
    ]
    for limits, is_missed in without:
        with model.hooks([("blocks.0.hook_resid_post", double)], **limits):
            prefix = model.prefix(ids[:1, :3])
            model(ids[:, 3:], past_kv_cache=prefix)
        if is_missed:
            what = r"under the hook .*double.* on 'blocks.0.hook_resid_post', which is not there"
            for used in (prefix, prefix.branch(2), KeyValueCache.stack([prefix, prefix])):
                with pytest.raises(ValueError, match=what):
                    model(ids[:, 3:], past_kv_cache=used)
            prefix = prefix.unchecked()
        model(ids[:, 3:], past_kv_cache=prefix)
    prefix = model.prefix(ids[:1, :3])
    handle = model.blocks[0].mlp.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(ValueError, match=r"hook .* on 'blocks\.0\.mlp' was not there"):
        model(ids[:, 3:], past_kv_cache=prefix)
    handle.remove()
    with model.capture("blocks.0.mlp"):  # looks only
        model(ids[:, 3:], past_kv_cache=prefix)


def test_other_weights_at_the_same_address_are_other_weights() -> None:
    model, ids = native.build("rotary"), native.tokens(2, 6)
    attention = model.blocks[0].attn
    for _ in range(30):
        prefix = model.prefix(ids[:1, :3])
        for _ in range(2):  # the second often lands where the first was
            attention.W_O.data = attention.W_O.data.clone() + 0.1
        with pytest.raises(ValueError, match="weights"):
            model(ids[:, 3:], past_kv_cache=prefix)


def test_a_trie_that_runs_out_of_memory_while_parting_a_run_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = native.build("rotary"), native.tokens(1, 9)
    prefixes = PrefixCache(model, 2**24)
    how: dict[str, Any] = {"do_sample": False, "stop_at_eos": False, "verbose": False}
    expected = prefixes.generate(ids, 3, **how)
    other = torch.cat((ids[:, :4], (ids[:, 4:] + 1) % 23), 1)
    whole = prefixes_module.columns

    def columns(layers: Any, which: slice) -> Any:
        if which.start:
            raise MemoryError
        return whole(layers, which)

    monkeypatch.setattr(prefixes_module, "columns", columns)
    with pytest.raises(MemoryError):
        prefixes.generate(other, 3, **how)
    monkeypatch.undo()
    assert torch.equal(prefixes.generate(ids, 3, **how), expected)
    assert torch.equal(prefixes.generate(other, 3, **how), model.generate(other, 3, **how))


def test_an_interrupt_while_a_cache_is_frozen_leaves_it_growing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = native.build("rotary"), native.tokens(2, 6)
    cache = KeyValueCache.init_cache(model.cfg, "cpu", 2)

    def interrupted(model: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(fingerprints, "weights_digest", interrupted)
    fingerprints.forget(model)
    # does not freeze it, which would read the weights
    model.generate(
        ids, 2, past_kv_cache=cache, return_cache="resid_post", stop_at_eos=False, verbose=False
    )
    with pytest.raises(KeyboardInterrupt):
        cache.freeze()
    monkeypatch.undo()
    assert not cache.frozen
    assert not any(entry.frozen for entry in cache.entries)
    model(ids[:, :1], past_kv_cache=cache)


# --- what a prefix was made by, after it was cut, continued or looked at --------------------------


def test_a_cropped_prefix_is_that_of_its_own_columns() -> None:
    model, ids = native.build("rotary"), native.tokens(1, 10)

    def louder(value: Tensor, hook: Any) -> Tensor:
        return value * 1.5

    point = "blocks.0.hook_resid_post"
    cropped = model.prefix(ids).crop(5)
    with model.hooks([(point, louder)], pos=slice(5, None)):
        expected = model(ids)[:, 5:]
        torch.testing.assert_close(model(ids[:, 5:], past_kv_cache=cropped), expected)
    with (
        model.hooks([(point, louder)], pos=4, on_zero_fire="ignore"),
        pytest.raises(ValueError, match="its 5 positions"),
    ):
        model(ids[:, 5:], past_kv_cache=cropped)
    with model.hooks([(point, louder)], pos=slice(7, None)):
        late = model.prefix(ids)  # computed under it: it is to be there for what follows
        with_it = late.crop(9)
    with pytest.raises(ValueError, match="is not there now"):
        model(ids[:, 9:], past_kv_cache=with_it)
    early = late.crop(6)  # it had no part in these
    torch.testing.assert_close(model(ids[:, 6:], past_kv_cache=early), model(ids)[:, 6:])


@pytest.mark.parametrize("how", ["branch", "unfrozen"])
def test_what_two_versions_of_the_weights_have_filled_is_refused_by_both(how: str) -> None:
    model, ids = native.build("rotary"), native.tokens(1, 9)
    start = model.prefix(ids[:, :4])
    if how == "branch":
        cache = start.branch(1)
    else:
        cache = start
        cache.unfreeze()
    model(ids[:, 4:5], past_kv_cache=cache)
    before = model.blocks[1].mlp.W_out.detach().clone()
    with torch.no_grad():
        model.blocks[1].mlp.W_out.mul_(2)
    model(ids[:, 5:6], past_kv_cache=cache)
    cache.freeze()
    with pytest.raises(ValueError, match="filled by another model"):
        model(ids[:, 6:], past_kv_cache=cache)
    with torch.no_grad():
        model.blocks[1].mlp.W_out.copy_(before)
    with pytest.raises(ValueError, match="filled by another model"):
        model(ids[:, 6:], past_kv_cache=cache)


def test_what_one_model_has_filled_in_two_goes_is_its_own() -> None:
    model, ids = native.build("rotary"), native.tokens(1, 9)
    branch = model.prefix(ids[:, :4]).branch(1)
    model(ids[:, 4:6], past_kv_cache=branch)
    branch.freeze()
    torch.testing.assert_close(model(ids[:, 6:], past_kv_cache=branch), model(ids)[:, 6:])


def test_an_unchecked_view_grows_by_itself() -> None:
    model, ids = native.build("rotary"), native.tokens(1, 9)
    start = model.prefix(ids[:, :5])
    views = [start.unchecked(), start.unchecked()]
    for view, piece in zip(views, (ids[:, 5:7], ids[:, 7:9]), strict=True):
        view.unfreeze()
        model(piece, past_kv_cache=view)
    assert start.frozen
    assert [start.length, *(view.length for view in views)] == [5, 7, 7]
    whole = model(torch.cat((ids[:, :7], ids[:, :1]), 1))
    torch.testing.assert_close(model(ids[:, :1], past_kv_cache=views[0]), whole[:, -1:])


def test_a_captured_generation_leaves_a_growing_cache_as_any_other_does() -> None:
    model, other, ids = native.build("rotary"), native.build("rotary", seed=3), native.tokens(2, 6)
    caches = [KeyValueCache.init_cache(model.cfg, "cpu", 2, max_len=7) for _ in range(2)]
    how: dict[str, Any] = {"stop_at_eos": False, "verbose": False, "do_sample": False}
    plain = model.generate(ids, 2, past_kv_cache=caches[0], **how)
    # the last token is run, but not stored: seven positions are room enough
    out, kept = model.generate(ids, 2, past_kv_cache=caches[1], return_cache="resid_post", **how)
    assert torch.equal(out, plain)
    assert kept["resid_post", 0].shape[1] == 8
    for cache in caches:
        assert (cache.length, cache.frozen, cache.origin is None) == (7, False, False)
        cache.entries[0].max_len = cache.entries[1].max_len = 20
        other(ids[:, :1], past_kv_cache=cache)
    for one, two in zip(caches[0].entries, caches[1].entries, strict=True):
        assert torch.equal(one.past_keys, two.past_keys)


def test_parts_that_compute_something_else_are_other_models() -> None:
    model, ids = native.build("rotary"), native.tokens(1, 6)
    start = model.prefix(ids[:, :4])
    mlp = model.blocks[0].mlp
    before = mlp.act_fn
    for other in (torch.tanh, lambda x: x.tanh()):
        mlp.act_fn = other
        with pytest.raises(ValueError, match="weights or parts"):
            model(ids[:, 4:], past_kv_cache=start)
    mlp.act_fn = before
    model(ids[:, 4:], past_kv_cache=start)
    model.blocks[0].mlp = torch.nn.Sequential(mlp, torch.nn.Identity())
    model.setup()
    inside = model.prefix(ids[:, :4])
    model.blocks[0].mlp = torch.nn.Sequential(mlp, torch.nn.Tanh())
    model.setup()
    with pytest.raises(ValueError, match="weights or parts"):
        model(ids[:, 4:], past_kv_cache=inside)


def test_hooks_of_the_model_itself_are_hooks_too() -> None:
    model, ids = native.build("rotary"), native.tokens(1, 6)
    start = model.prefix(ids[:, :4])
    handle = model.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(ValueError, match="was not there"):
        model(ids[:, 4:], past_kv_cache=start)
    handle.remove()
    model(ids[:, 4:], past_kv_cache=start)


def test_keys_kept_for_every_query_head_are_taken_once_per_group() -> None:
    """As Falcon's newer decoder keeps them in a Hugging Face cache."""
    from transformers import DynamicCache

    model, ids = loud.build("rotary_gqa"), loud.tokens(2, 6)
    times = model.cfg.n_heads // model.cfg.n_key_value_heads
    theirs = DynamicCache()
    for i, layer in enumerate(model.prefix(ids[:, :4]).to_hf().layers):
        theirs.update(*(t.repeat_interleave(times, 1) for t in (layer.keys, layer.values)), i)
    cache = KeyValueCache.from_hf(theirs, model.cfg)
    torch.testing.assert_close(model(ids[:, 4:], past_kv_cache=cache), model(ids)[:, 4:])


def test_falcons_newer_decoder_continues_from_a_copy_for_every_query_head() -> None:
    hf_model = tiny.build("falcon_new")
    model = HookedTransformer.from_pretrained_no_processing(hf_model=hf_model, device="cpu")
    ids = tiny.tokens(hf_model.config, 2, 12)
    theirs = model.prefix(ids[:, :9]).to_hf(model.cfg, per_query_head=True)
    with torch.no_grad():
        expected = hf_model(ids).logits[:, 9:]
        ours = hf_model(ids[:, 9:], **reading(hf_model, theirs)).logits
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    back = KeyValueCache.from_hf(model.prefix(ids).to_hf(model.cfg, True), model.cfg)
    assert back.length == 12
    with pytest.raises(ValueError, match="per_query_head=True needs cfg="):
        model.prefix(ids).to_hf(per_query_head=True)


def test_latents_in_hugging_faces_cache_are_refused_either_way() -> None:
    from transformers import DynamicCache

    hf_model = tiny.build("deepseek_v3")
    model = HookedTransformer.from_pretrained_no_processing(hf_model=hf_model, device="cpu")
    ids = tiny.tokens(hf_model.config, 2, 12)
    prefix = model.prefix(ids[:, :9])
    if not kv_formats.hf_caches_latents():  # older versions keep keys and values
        with torch.no_grad():
            ours = hf_model(ids[:, 9:], **reading(hf_model, prefix.to_hf())).logits
            torch.testing.assert_close(ours, hf_model(ids).logits[:, 9:], atol=1e-4, rtol=1e-4)
        return
    for cfg in (None, model.cfg):
        with pytest.raises(ValueError, match="caches the latents"):
            prefix.to_hf(cfg)
    with torch.no_grad():
        theirs = DynamicCache()
        hf_model(ids[:, :9], use_cache=True, **reading(hf_model, theirs))
    with pytest.raises(ValueError, match="latents of latent attention are neither"):
        KeyValueCache.from_hf(theirs, model.cfg)
