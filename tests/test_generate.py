"""generate, generate_stream: cached = uncached, batched = one by one, Hugging Face's numbers."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import loud
import pytest
import tiny
import torch
from tokenizers_for_tests import byte_level, gpt2_like, llama_like, with_own_pad
from torch import Tensor

from transformer_lens_lite import generate as generate_module
from transformer_lens_lite import sampling
from transformer_lens_lite.generate import GenerateOutput
from transformer_lens_lite.kv_cache import KeyValueCache
from transformer_lens_lite.model import HookedTransformer
from transformer_lens_lite.utils import lm_cross_entropy_loss

# every kind of position, windows, grouped queries
KINDS = pytest.mark.parametrize(
    "kind",
    [
        "standard",
        "rotary",
        "rotary_pairs",
        "alibi",
        "shortformer",
        "none",
        "window",
        "rotary_window",
    ],
)
GREEDY: dict[str, Any] = {"do_sample": False, "stop_at_eos": False}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only lose by threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(kind: str = "standard", tokenizer: Any = None, **overrides: Any) -> HookedTransformer:
    return loud.build(kind, tokenizer, **overrides)


def scripted(model: HookedTransformer, rows: list[list[int]]) -> AbstractContextManager:
    """While this lasts, row i of a batch continues with rows[i], and then with its last entry."""
    step = 0

    def script(logits: Tensor, hook: Any) -> Tensor:
        nonlocal step
        wanted = [row[min(step, len(row) - 1)] for row in rows]
        step += 1
        forced = torch.zeros_like(logits)
        forced[torch.arange(len(rows)), -1, wanted] = 100.0
        return forced

    return model.hooks(fwd_hooks=[("unembed.hook_out", script)])


def refuse_to_run(model: HookedTransformer) -> None:
    """From now on any forward is a failure of the test."""

    def fail(x: Tensor, hook: Any) -> None:
        raise AssertionError("a forward was run")

    model.add_hook("hook_embed", fail)


# --- the cache changes nothing --------------------------------------------------------------------


@KINDS
def test_D3_cached_equals_uncached_without_a_tokenizer(kind: str) -> None:
    model, ids = build(kind), loud.tokens(2, 5)
    out = model.generate(ids, 12, **GREEDY)
    assert torch.equal(out, model.generate(ids, 12, use_past_kv_cache=False, **GREEDY))
    assert out.shape == (2, 17)
    assert torch.equal(out[:, :5], ids)
    assert len(set(out[:, 5:].flatten().tolist())) > 2  # loud models do not repeat one token


@KINDS
def test_D3_cached_equals_uncached_with_a_tokenizer(kind: str) -> None:
    model = build(kind, gpt2_like())
    texts = ["Hello world", "The cat sat on the mat"]
    how: dict[str, Any] = {"max_new_tokens": 8, **GREEDY}
    assert model.generate(texts, **how) == model.generate(texts, use_past_kv_cache=False, **how)


def test_every_step_is_the_argmax_of_the_whole_sequence() -> None:
    model, ids = build("rotary_window"), loud.tokens(2, 6)
    out = model.generate(ids, 8, **GREEDY)
    with torch.no_grad():
        assert torch.equal(model(out)[:, 5:-1].argmax(-1), out[:, 6:])


# --- batches --------------------------------------------------------------------------------------


@KINDS
def test_report_029_ragged_ids_continue_as_one_by_one(kind: str) -> None:
    model = build(kind)
    rows, ids, mask = loud.ragged([3, 7, 1])
    for use_cache in (True, False):
        out = model.generate(ids, 7, attention_mask=mask, use_past_kv_cache=use_cache, **GREEDY)
        for i, row in enumerate(rows):
            alone = model.generate(row, 7, **GREEDY)
            assert torch.equal(out[i : i + 1, -alone.shape[1] :], alone)


@pytest.mark.parametrize("kind", ["standard", "rotary_window", "alibi"])
@pytest.mark.parametrize("tokenizer", [gpt2_like, with_own_pad, llama_like])
def test_report_029_037_ragged_texts_continue_as_one_by_one(kind: str, tokenizer: Any) -> None:
    model = build(kind, tokenizer())
    texts = ["Hello world", "The cat sat on the mat", "a"]
    batch = model.generate(texts, 6, return_type="tokens", output_logits=True, **GREEDY)
    for i, text in enumerate(texts):
        alone = model.generate(text, 6, return_type="tokens", output_logits=True, **GREEDY)
        n = alone.sequences.shape[1]
        assert torch.equal(batch.sequences[i : i + 1, -n:], alone.sequences)
        for a, b in zip(batch.logits, alone.logits, strict=True):
            torch.testing.assert_close(a[i : i + 1], b, atol=1e-5, rtol=0)


def test_texts_are_padded_on_the_left_whatever_the_argument_says() -> None:
    model = build("standard", gpt2_like())
    texts = ["Hello world", "The cat sat on the mat"]
    left = model.generate(texts, 4, **GREEDY)
    assert model.generate(texts, 4, padding_side="right", **GREEDY) == left
    assert [model.generate(text, 4, **GREEDY) for text in texts] == left


@pytest.mark.parametrize("tokenizer", [gpt2_like, with_own_pad, llama_like])
def test_ids_are_padded_where_the_argument_says(tokenizer: Any) -> None:
    model = build("standard", tokenizer())
    texts = ["Hello world", "The cat sat on the mat"]
    how: dict[str, Any] = {"return_type": "tokens", "output_logits": True, **GREEDY}
    ids = model.to_tokens(texts, padding_side="left")
    batch = model.generate(ids, 4, padding_side="left", **how)
    expected = model.generate(texts, 4, **how)
    assert torch.equal(batch.sequences, expected.sequences)
    for ours, theirs in zip(batch.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    streamed = list(
        model.generate_stream(ids, 4, padding_side="left", return_type="tokens", **GREEDY)
    )
    assert torch.equal(streamed[-1][:, -4:], expected.sequences[:, -4:])


def test_ids_that_end_in_padding_are_refused() -> None:
    model = build("standard", with_own_pad())
    ids = model.to_tokens(["Hello world", "The cat sat on the mat"], padding_side="right")
    with pytest.raises(ValueError, match=r"row\(s\) \[0\] end in padding"):
        model.generate(ids, 3, **GREEDY)


def test_prompts_that_end_in_padding_are_refused() -> None:
    model = build()
    _, ids, mask = loud.ragged([3, 7], side="right")
    refuse_to_run(model)
    with pytest.raises(ValueError, match=r"row\(s\) \[0\] end in padding.*left"):
        model.generate(ids, 3, attention_mask=mask, **GREEDY)
    with pytest.raises(ValueError, match=r"row\(s\) \[0\] end in padding"):
        model.generate(torch.randn(2, 7, 24), 3, attention_mask=mask, **GREEDY)


# --- the end of a row -----------------------------------------------------------------------------


def test_report_058_after_its_eos_a_row_is_padded_and_others_go_on() -> None:
    model, ids = build("rotary_gqa"), loud.tokens(2, 3)
    with scripted(model, [[5, 9, 7, 7], [5, 6, 8, 9]]):
        out = model.generate(ids, 10, eos_token_id=9, pad_token_id=2)
    assert out[:, 3:].tolist() == [[5, 9, 2, 2], [5, 6, 8, 9]]  # and it stopped when both had ended


def test_report_058_finished_rows_do_not_influence_the_others() -> None:
    model = build("standard")
    _, ids, mask = loud.ragged([6, 4, 5])
    plain = model.generate(ids, 14, attention_mask=mask, **GREEDY)
    eos = int(plain[0, 8])  # what row 0 says third
    out = model.generate(
        ids, 14, attention_mask=mask, do_sample=False, eos_token_id=eos, pad_token_id=1
    )
    for i in range(3):
        said = plain[i, 6:].tolist()
        n = said.index(eos) + 1 if eos in said else 14
        expected = said[:n] + [1] * (out.shape[1] - 6 - n)
        assert out[i, 6:].tolist() == expected


@pytest.mark.parametrize("eos", [[9, 4], (4, 9, 60)])
def test_report_059_any_of_several_eos_ids_ends_a_row(eos: Any) -> None:
    model = build()
    with scripted(model, [[5, 4, 7, 7], [5, 6, 9, 7]]):
        out = model.generate(loud.tokens(2, 3), 10, eos_token_id=eos)
    assert out[:, 3:].tolist() == [[5, 4, eos[0]], [5, 6, 9]]  # no tokenizer: EOS is the pad


def test_stop_at_eos_false_goes_on_past_eos() -> None:
    model = build()
    with scripted(model, [[9]]):
        out = model.generate(loud.tokens(1, 3), 5, stop_at_eos=False, eos_token_id=9)
    assert out[0, 3:].tolist() == [9] * 5


def test_the_tokenizers_eos_and_pad_are_the_defaults() -> None:
    tokenizer = with_own_pad()
    model = build("standard", tokenizer)
    eos, pad = model.text.eos_token_id, model.text.pad_token_id
    assert eos != pad
    with scripted(model, [[5, eos], [5, 6, 7, eos]]):
        out = model.generate(loud.tokens(2, 3), 9)
    assert out[:, 3:].tolist() == [[5, eos, pad, pad], [5, 6, 7, eos]]


def test_without_any_eos_one_must_be_named() -> None:
    model = build()
    refuse_to_run(model)
    with pytest.raises(ValueError, match="eos_token_id"):
        model.generate(loud.tokens())


def test_stop_strings_may_span_tokens_and_end_their_row_only() -> None:
    model = build("standard", with_own_pad())
    ids = [model.to_tokens(t, prepend_bos=False)[0].tolist() for t in ("a. Th", "e end")]
    pad = model.text.pad_token_id
    script = ids[0] + ids[1]
    stop = next(
        s for s in ("Th", ". T", ". Th") if not any(s in t for t in map(model.to_string, ids[0]))
    )
    with scripted(model, [script, [ids[1][0]]]):
        out = model.generate(["Hello", "Hello world"], len(script), stop=stop, return_type="tokens")
    new = out[:, -len(script) :].tolist()
    assert new[0] == ids[0] + [pad] * len(ids[1])
    assert new[1] == [ids[1][0]] * len(script)
    with scripted(model, [script]):
        text = model.generate("Hello", len(script), stop=["nowhere", stop])
    assert text == "Helloa. Th"


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    model = build("standard", with_own_pad())
    letter = model.to_single_token("x")
    with scripted(model, [[letter]]):
        assert model.generate("Hello. ", 3, stop=".") == "Hello. xxx"


@pytest.mark.parametrize("tokenizer", [llama_like, gpt2_like])
def test_a_stop_string_with_a_space_is_found_in_the_first_new_token(tokenizer: Any) -> None:
    model = build("rotary", tokenizer())
    the = model.to_single_token(" the")
    assert model.to_str_tokens(torch.tensor([the, the]))[1] == " the"
    with scripted(model, [[the]]):
        out = model.generate("Hello", 5, stop=" the", return_type="tokens")
    assert out[0].tolist() == model.to_tokens("Hello")[0].tolist() + [the]


def test_stop_strings_of_several_byte_characters() -> None:
    model = build("standard", gpt2_like())
    euro = model.to_tokens("€", prepend_bos=False)[0].tolist()
    assert len(euro) == 3
    with scripted(model, [[*euro[:1], *euro, 5]]):
        out = model.generate("Hello", 9, stop="€", return_type="tokens")
    assert out[0, -4:].tolist() == [euro[0], *euro]


# --- Hugging Face ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_report_006_forty_greedy_tokens_are_hugging_faces(name: str) -> None:
    hf = tiny.build(name, **({"n_positions": 64} if name == "gpt2" else {}))
    model = HookedTransformer.from_pretrained_no_processing(hf_model=hf, device="cpu")
    ids = tiny.tokens(hf.config, 2, 6)
    how: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    mask = torch.ones_like(ids)  # or Hugging Face takes every pad id in the prompt for padding
    theirs = hf.generate(ids, attention_mask=mask, eos_token_id=None, pad_token_id=0, **how)
    assert torch.equal(model.generate(ids, stop_at_eos=False, **how), theirs)
    eos = [int(row[12]) for row in theirs]
    how |= {"attention_mask": mask, "eos_token_id": eos, "pad_token_id": 1}
    theirs = hf.generate(ids, **how)
    assert theirs.shape[1] <= 13
    assert torch.equal(model.generate(ids, **how), theirs)


def test_report_060_sampling_sees_what_hugging_faces_processors_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    hf = tiny.build("llama_gqa")
    model = HookedTransformer.from_pretrained_no_processing(hf_model=hf, device="cpu")
    seen = []

    def draw(logits: Tensor, generator: Any = None) -> Tensor:
        seen.append(logits)
        return logits.argmax(-1)

    monkeypatch.setattr(sampling, "draw", draw)
    ids = tiny.tokens(hf.config, 2, 6)
    how = {"top_k": 20, "top_p": 0.9, "temperature": 1.7, "min_p": 0.05, "repetition_penalty": 1.4}
    out = model.generate(ids, 5, stop_at_eos=False, **how)
    warpers = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.4),
            TemperatureLogitsWarper(1.7),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ]
    )
    with torch.no_grad():
        theirs = hf(out).logits
    for step, ours in enumerate(seen):
        expected = warpers(out[:, : 6 + step], theirs[:, 5 + step].clone())
        torch.testing.assert_close(ours.softmax(-1), expected.softmax(-1), atol=1e-5, rtol=0)


def test_a_frequency_penalty_counts_prompt_and_new_tokens_but_no_padding() -> None:
    model = build("standard")
    rows, ids, mask = loud.ragged([3, 6])
    ids[mask == 0] = model.generate(rows[0], 1, **GREEDY)[0, -1]  # padding with what comes next
    out = model.generate(ids, 8, attention_mask=mask, freq_penalty=0.7, **GREEDY)
    for i, row in enumerate(rows):
        alone = row
        for _ in range(8):
            with torch.no_grad():
                logits = model(alone)[:, -1]
            counts = torch.bincount(alone[0], minlength=61)
            alone = torch.cat((alone, (logits - 0.7 * counts).argmax(-1)[:, None]), 1)
        assert torch.equal(out[i : i + 1, -alone.shape[1] :], alone)


# --- randomness -----------------------------------------------------------------------------------


def test_report_070_same_seed_same_tokens_whenever_others_end() -> None:
    model, ids = build("rotary_gqa"), loud.tokens(3, 4)

    def sampled(**kwargs: Any) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        return model.generate(ids, 12, temperature=1.5, generator=generator, **kwargs)

    plain = sampled(stop_at_eos=False)
    assert torch.equal(plain, sampled(stop_at_eos=False))
    eos = int(plain[1, 5])
    ended = sampled(eos_token_id=eos)
    for i in (0, 2):
        said = plain[i, 4:].tolist()
        n = said.index(eos) + 1 if eos in said else ended.shape[1] - 4
        assert ended[i, 4 : 4 + n].tolist() == said[:n]
    assert not torch.equal(plain, model.generate(ids, 12, temperature=1.5, stop_at_eos=False))


def test_the_default_samples_and_temperature_zero_does_not() -> None:
    model, ids = build(), loud.tokens(4, 5)
    greedy = model.generate(ids, 8, **GREEDY)
    assert torch.equal(model.generate(ids, 8, temperature=0, stop_at_eos=False), greedy)
    assert torch.equal(model.generate(ids, 8, top_k=1, stop_at_eos=False), greedy)
    assert not torch.equal(model.generate(ids, 8, stop_at_eos=False), greedy)


# --- prefixes -------------------------------------------------------------------------------------


@KINDS
def test_report_043_a_frozen_prefix_serves_many_generations(kind: str) -> None:
    model, prefix = build(kind), loud.tokens(1, 6)
    cache = loud.frozen_prefix(model, prefix)
    kept = [t.clone() for e in cache.entries for t in (e.past_keys, e.past_values)]
    rows, ids, mask = loud.ragged([3, 5], seed=8)
    for _ in range(2):
        out = model.generate(ids, 6, attention_mask=mask, past_kv_cache=cache, **GREEDY)
        for i, row in enumerate(rows):
            whole = model.generate(torch.cat((prefix, row), 1), 6, **GREEDY)
            assert torch.equal(out[i, -row.shape[1] - 6 :], whole[0, 6:])
    now = [t for e in cache.entries for t in (e.past_keys, e.past_values)]
    assert all(torch.equal(a, b) for a, b in zip(now, kept, strict=True))
    assert cache.frozen
    assert cache.length == 6


def test_a_frozen_prefix_may_be_padded() -> None:
    model = build("rotary_window")
    _, ids, mask = loud.ragged([4, 6])
    cache = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_kv_cache=cache)
    cache.freeze()
    out = model.generate(loud.tokens(2, 2, 9), 6, past_kv_cache=cache, **GREEDY)
    whole = torch.cat((ids, loud.tokens(2, 2, 9)), 1)
    whole_mask = torch.cat((mask, torch.ones(2, 2, dtype=torch.long)), 1)
    expected = model.generate(whole, 6, attention_mask=whole_mask, **GREEDY)
    assert torch.equal(out, expected[:, 6:])


def test_a_full_mask_over_prefix_and_prompt_is_accepted() -> None:
    model, cache = build(), loud.frozen_prefix(build(), loud.tokens(1, 4))
    _, ids, mask = loud.ragged([3, 5])
    full = torch.cat((torch.ones(2, 4, dtype=torch.long), mask), 1)
    how: dict[str, Any] = {"past_kv_cache": cache, "max_new_tokens": 5, **GREEDY}
    out = model.generate(ids, attention_mask=mask, **how)
    assert torch.equal(out, model.generate(ids, attention_mask=full, **how))
    hidden = torch.cat((torch.tensor([[0, 0, 1, 1]] * 2), mask), 1)
    assert not torch.equal(out, model.generate(ids, attention_mask=hidden, **how))


def test_a_growing_cache_takes_in_prompt_and_all_new_tokens_but_the_last() -> None:
    model, ids = build("rotary_gqa"), loud.tokens(2, 5)
    cache = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    first = model.generate(ids, 4, past_kv_cache=cache, **GREEDY)
    assert cache.length == 8
    turn = torch.cat((first[:, -1:], loud.tokens(2, 2, 9)), 1)
    second = model.generate(turn, 4, past_kv_cache=cache, **GREEDY)
    whole = model.generate(torch.cat((first[:, :-1], turn), 1), 4, **GREEDY)
    assert torch.equal(second, whole[:, 8:])
    assert cache.length == 14


def test_a_string_prompt_after_a_prefix_gets_no_bos() -> None:
    model = build("standard", gpt2_like())
    cache = loud.frozen_prefix(model, model.to_tokens("The cat"))
    how: dict[str, Any] = {"return_type": "tokens", "past_kv_cache": cache, **GREEDY}
    out = model.generate(" sat", 3, **how)
    bare = model.to_tokens(" sat", prepend_bos=False)
    assert torch.equal(out[:, : bare.shape[1]], bare)
    whole = model.generate(torch.cat((model.to_tokens("The cat"), bare), 1), 3, **GREEDY)
    assert torch.equal(out, whole[:, -out.shape[1] :])
    assert model.generate(" sat", 3, prepend_bos=True, **how)[0, 0] == model.text.bos_token_id


def test_report_065_ids_are_fed_as_they_are() -> None:
    model, fed = build("standard", gpt2_like(), use_hook_tokens=True), []
    ids = loud.tokens(2, 5)

    def note(tokens: Tensor, hook: Any) -> None:
        fed.append(tokens.clone())

    with model.hooks(fwd_hooks=[("hook_tokens", note)]):
        out = model.generate(ids, 4, **GREEDY)
    assert torch.equal(torch.cat(fed, 1), out[:, :-1])
    assert torch.equal(out[:, :5], ids)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_prefix_that_does_not_fit_is_refused_before_anything_is_run(use_cache: bool) -> None:
    model, ids = build("rotary_gqa", n_ctx=20), loud.tokens(2, 5)
    small = KeyValueCache.init_cache(model.cfg, "cpu", 2, max_len=8)
    three = loud.frozen_prefix(model, loud.tokens(3, 4))
    shallow = KeyValueCache.init_cache(build(n_layers=2).cfg, "cpu", 2)
    long = loud.frozen_prefix(model, loud.tokens(1, 12))
    refuse_to_run(model)
    if not use_cache:
        with pytest.raises(ValueError, match="use_past_kv_cache=False"):
            model.generate(ids, past_kv_cache=small, use_past_kv_cache=False, **GREEDY)
        return
    for cache, message in (
        (small, "full: 0 of max_len=8 .* 10 more"),
        (three, "3 rows, the input has 2"),
        (shallow, "2 layers, the model 3"),
        (long, r"17 tokens of prompt and 6 new ones do not fit into n_ctx=20"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate_stream(ids, 6, past_kv_cache=cache, **GREEDY)
    assert small.length == 0


# --- hooks ----------------------------------------------------------------------------------------


@KINDS
def test_report_063_steering_gives_the_same_tokens_with_and_without_the_cache(kind: str) -> None:
    model, ids = build(kind), loud.tokens(2, 5)
    direction = torch.randn(24)

    def steer(residual: Tensor, hook: Any) -> None:
        residual += direction

    plain = model.generate(ids, 8, **GREEDY)
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", steer)]):
        cached = model.generate(ids, 8, **GREEDY)
        uncached = model.generate(ids, 8, use_past_kv_cache=False, **GREEDY)
    assert torch.equal(cached, uncached)
    assert not torch.equal(cached, plain)
    assert torch.equal(model.generate(ids, 8, **GREEDY), plain)  # and it is gone afterwards


def test_report_054_a_hook_sees_every_step_and_one_position_after_the_prompt() -> None:
    model, shapes = build("rotary_gqa"), []

    def note(residual: Tensor, hook: Any) -> None:
        shapes.append(residual.shape[1])

    handle = model.add_hook("blocks.0.hook_resid_pre", note)
    model.generate(loud.tokens(2, 5), 6, **GREEDY)
    assert shapes == [5, 1, 1, 1, 1, 1]
    shapes.clear()
    model.generate(loud.tokens(2, 5), 4, use_past_kv_cache=False, **GREEDY)
    assert shapes == [5, 6, 7, 8]
    handle.remove()


@pytest.mark.parametrize(
    ("listen", "positions"),
    [(None, 1), ("unembed.hook_in", 5), ("unembed.hook_out", 5), ("ln_final.hook_scale", 5)],
)
def test_only_the_last_position_is_unembedded_unless_somebody_listens(
    listen: str | None, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shapes = build(), []
    forward = model.unembed.forward

    def counted(x: Tensor) -> Tensor:
        shapes.append(x.shape[1])
        return forward(x)

    monkeypatch.setattr(model.unembed, "forward", counted)
    plain = model.generate(loud.tokens(1, 5), 3, **GREEDY)
    assert shapes == [1, 1, 1]
    shapes.clear()
    if listen is not None:
        model.add_hook(listen, lambda x, hook: None)
    assert torch.equal(model.generate(loud.tokens(1, 5), 3, **GREEDY), plain)
    assert shapes == [positions, 1, 1]


def test_a_raising_hook_leaves_no_hooks_and_the_cache_as_it_was() -> None:
    model, ids = build(), loud.tokens(1, 5)
    cache, calls = KeyValueCache.init_cache(model.cfg, "cpu"), 0

    def boom(x: Tensor, hook: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("third")

    with (
        pytest.raises(RuntimeError, match="third"),
        model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", boom)]),
    ):
        model.generate(ids, 6, past_kv_cache=cache, **GREEDY)
    assert model.list_hooks() == {}
    assert cache.length == 6  # two whole forwards
    plain = model.generate(ids, 6, **GREEDY)
    rest = model.generate(plain[:, 6:7], 4, past_kv_cache=cache, **GREEDY)
    assert torch.equal(rest, plain[:, 6:])


@pytest.mark.parametrize("listened", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_what_comes_out_is_an_ordinary_tensor_without_a_graph(listened: bool, cached: bool) -> None:
    model, ids, seen = build(), loud.tokens(1, 4), []
    if listened:
        model.add_hook("blocks.1.hook_resid_pre", lambda x, hook: seen.append(x))
    how: dict[str, Any] = {"use_past_kv_cache": cached, **GREEDY}
    for return_type in ("embeds", "tokens"):
        out = model.generate(ids, 3, return_type=return_type, output_logits=True, **how)
        seen += [out.sequences, *out.logits]
    seen += model.generate_stream(ids, 3, max_tokens_per_yield=1, **how)
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in seen)
    assert torch.is_grad_enabled()


@KINDS
def test_training_works_after_generating(kind: str) -> None:
    base = {"rotary_base": 777.0} if "rotary" in kind else {}  # of angles nobody has asked for yet
    model, ids = build(kind, **base), loud.tokens(2, 6)
    cache = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    model.generate(ids, 3, **GREEDY)
    model.generate(ids, 3, past_kv_cache=cache, **GREEDY)
    model(ids, return_type="loss").backward()
    model(ids, return_type="loss", past_kv_cache=cache).backward()
    assert model.blocks[2].attn.W_O.grad is not None


# --- embeddings, return types ---------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("use_cache", [True, False])
def test_embeddings_continue_as_their_ids_do(kind: str, use_cache: bool) -> None:
    model = build(kind)
    _, ids, mask = loud.ragged([3, 5])
    how: dict[str, Any] = {"attention_mask": mask, "use_past_kv_cache": use_cache, **GREEDY}
    new = model.generate(model.embed(ids).detach(), 6, return_type="tokens", **how)
    assert torch.equal(new, model.generate(ids, 6, **how)[:, 5:])


def test_embeddings_that_mean_nothing_are_refused() -> None:
    model = build()
    refuse_to_run(model)
    with pytest.raises(
        ValueError, match=r"\[batch, pos, 24\]; got torch.float32 of shape \[1, 5, 23\]"
    ):
        model.generate(torch.randn(1, 5, 23), **GREEDY)
    with pytest.raises(ValueError, match="count tokens; the prompt is embeddings"):
        model.generate(torch.randn(1, 5, 24), freq_penalty=1.0, **GREEDY)


def test_return_types() -> None:
    model = build("standard", gpt2_like())
    ids = model.to_tokens("Hello world")

    def made(input: Any, return_type: str | None) -> Any:
        return model.generate(input, 4, return_type=return_type, **GREEDY)

    tokens = made(ids, "tokens")
    text = model.text.to_string(tokens[0], skip_special_tokens=True)
    assert text.startswith("Hello world")
    assert (
        made("Hello world", "input")
        == made("Hello world", None)
        == made("Hello world", "str")
        == text
    )
    assert made(["Hello world"], "input") == [text]
    assert made(ids, "str") == text
    assert made(ids.repeat(2, 1), "str") == [text, text]
    assert torch.equal(made("Hello world", "tokens"), tokens)
    assert torch.equal(made(ids, "input"), tokens)
    assert torch.equal(made(ids[0], "input"), tokens)  # [pos] becomes [1, pos]
    assert torch.equal(made(ids, "embeds"), model.embed(tokens))
    embeds = model.embed(ids).detach()
    assert torch.equal(made(embeds, "input"), model.embed(tokens))
    assert torch.equal(made(embeds, "tokens"), tokens[:, ids.shape[1] :])
    assert text.endswith(made(embeds, "str"))


def test_report_067_logits_are_those_of_the_whole_sequence() -> None:
    model = build("softcap")
    rows, ids, mask = loud.ragged([3, 5])
    out = model.generate(ids, 6, attention_mask=mask, output_logits=True, **GREEDY)
    assert isinstance(out, GenerateOutput)
    assert len(out.logits) == 6
    logits = torch.stack(out.logits, 1)
    for i, row in enumerate(rows):
        sequence = out.sequences[i : i + 1, -row.shape[1] - 6 :]
        with torch.no_grad():
            forced = model(sequence)[:, row.shape[1] - 1 : -1]
        torch.testing.assert_close(logits[i : i + 1], forced, atol=1e-5, rtol=0)


def test_the_mean_log_probability_of_a_greedy_text_is_its_loss() -> None:
    model, ids = build("rotary"), loud.tokens(1, 4)
    out = model.generate(ids, 6, output_logits=True, **GREEDY)
    chosen = [logits.log_softmax(-1).max() for logits in out.logits]
    with torch.no_grad():
        loss = lm_cross_entropy_loss(model(out.sequences), out.sequences, per_token=True)[0, 3:]
    torch.testing.assert_close(-torch.stack(chosen), loss, atol=1e-5, rtol=0)


def test_the_default_prompt_is_bos_alone_and_zero_new_tokens_is_the_prompt() -> None:
    model = build("standard", gpt2_like())
    out = model.generate(max_new_tokens=3, return_type="tokens", **GREEDY)
    assert out.shape == (1, 4)
    assert out[0, 0] == model.text.bos_token_id
    ids = loud.tokens(2, 3)
    assert torch.equal(model.generate(ids, 0, **GREEDY), ids)
    assert [chunk.tolist() for chunk in model.generate_stream(ids, 0, **GREEDY)] == [ids.tolist()]


# --- streaming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_least", [1, 3, 8, 100])
def test_report_066_joined_chunks_are_what_generate_returns(at_least: int) -> None:
    model = build("rotary_gqa")
    _, ids, mask = loud.ragged([3, 5])
    chunks = list(
        model.generate_stream(ids, 9, max_tokens_per_yield=at_least, attention_mask=mask, **GREEDY)
    )
    whole = model.generate(ids, 9, attention_mask=mask, **GREEDY)
    assert torch.equal(torch.cat(chunks, 1), whole)
    assert torch.equal(chunks[0][:, :5], ids)
    assert all(chunk.shape[1] >= at_least for chunk in chunks[:-1])
    assert [len(chunks), chunks[0].shape[1]] == {1: [9, 6], 3: [4, 6], 8: [2, 8], 100: [1, 14]}[
        at_least
    ]


def test_streaming_stops_at_eos_and_takes_embeddings() -> None:
    model, ids = build(), loud.tokens(1, 3)
    with scripted(model, [[5, 6, 9, 7]]):
        chunks = list(model.generate_stream(ids, 9, max_tokens_per_yield=1, eos_token_id=9))
    assert torch.cat(chunks, 1)[0, 3:].tolist() == [5, 6, 9]
    chunks = list(model.generate_stream(model.embed(ids).detach(), 5, **GREEDY))
    assert torch.equal(torch.cat(chunks, 1), model.generate(ids, 5, **GREEDY)[:, 3:])


def test_report_066_an_early_break_leaves_nothing_behind() -> None:
    model, ids = build("rotary_gqa"), loud.tokens(1, 5)
    whole = model.generate(ids, 6, **GREEDY)
    cache = KeyValueCache.init_cache(model.cfg, "cpu")
    stream = model.generate_stream(ids, 6, max_tokens_per_yield=1, past_kv_cache=cache, **GREEDY)
    for _ in zip(range(3), stream, strict=False):
        pass
    stream.close()
    assert model.list_hooks() == {}
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    n = cache.length
    assert torch.equal(
        model.generate(whole[:, n : n + 1], 2, past_kv_cache=cache, **GREEDY), whole[:, n : n + 3]
    )
    assert torch.equal(model.generate(ids, 6, **GREEDY), whole)


def test_grad_mode_is_the_callers_between_chunks() -> None:
    for _ in build().generate_stream(loud.tokens(1, 3), 3, max_tokens_per_yield=1, **GREEDY):
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("tokenizer", [gpt2_like, llama_like, with_own_pad])
@pytest.mark.parametrize("at_least", [1, 4])
def test_streamed_text_joined_is_the_text(tokenizer: Any, at_least: int) -> None:
    model = build("rotary", tokenizer())
    how: dict[str, Any] = {"max_new_tokens": 10, **GREEDY}
    chunks = list(
        model.generate_stream(
            "Hello world", max_tokens_per_yield=at_least, return_type="str", **how
        )
    )
    assert "".join(chunks) == model.generate("Hello world", **how)
    texts = ["Hello world", "a"]
    several = list(
        model.generate_stream(texts, max_tokens_per_yield=at_least, return_type="str", **how)
    )
    assert ["".join(parts) for parts in zip(*several, strict=True)] == model.generate(texts, **how)


def test_streamed_text_never_shows_half_a_character() -> None:
    model = build("standard", gpt2_like())
    ids = model.to_tokens("é€!", prepend_bos=False)[0].tolist()
    unfinished = model.to_tokens("€", prepend_bos=False)[0, :2].tolist()
    script = [*ids, *unfinished]
    how: dict[str, Any] = {"max_new_tokens": len(script), **GREEDY}
    with scripted(model, [script]):
        chunks = list(model.generate_stream("a", max_tokens_per_yield=1, return_type="str", **how))
    with scripted(model, [script]):
        assert "".join(chunks) == model.generate("a", **how)
    assert [chunk for chunk in chunks[:-1] if chunk] == ["a", "é", "€", "!"]


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"temperature": -1.0}, "temperature"),
        ({"min_p": 2.0}, "min_p"),
        ({"freq_penalty": float("nan")}, "freq_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"stop": "x"}, "stop strings need a tokenizer"),
        ({"max_new_tokens": 45}, r"5 tokens of prompt and 45 new ones do not fit into n_ctx=48"),
        ({"attention_mask": torch.ones(1, 4, dtype=torch.long)}, r"must be \[1, 5\].*got \[1, 4\]"),
        ({"return_type": "str"}, "needs a tokenizer"),
        ({"return_type": "words"}, "return_type must be"),
    ],
)
def test_arguments_are_checked_before_anything_is_run(arguments: Any, message: str) -> None:
    model, ids = build(), loud.tokens(1, 5)
    refuse_to_run(model)
    for method in (model.generate, model.generate_stream):
        with pytest.raises(ValueError, match=message):
            method(ids, **{**GREEDY, **arguments})


def test_a_text_or_an_empty_prompt_needs_something_to_start_from() -> None:
    model = build()
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate("Hello", **GREEDY)
    with pytest.raises(ValueError, match="prompt is empty"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), **GREEDY)
    with pytest.raises(ValueError, match="empty stop string"):
        build("standard", gpt2_like()).generate("Hello", stop=["", "x"])
    with pytest.raises(ValueError, match="max_tokens_per_yield"):
        model.generate_stream(loud.tokens(), max_tokens_per_yield=0, **GREEDY)


@pytest.mark.parametrize("method", ["generate", "generate_stream"])
def test_unknown_arguments_are_type_errors(method: str) -> None:
    with pytest.raises(TypeError, match="no argument 'temprature'.*'temperature'"):
        getattr(build(), method)(loud.tokens(), temprature=1.0, **GREEDY)


def test_the_last_position_may_be_used_and_padding_takes_no_room() -> None:
    model = build("standard", n_ctx=12)
    assert model.generate(loud.tokens(1, 5), 8, **GREEDY).shape == (1, 13)  # the last is never fed
    with pytest.raises(ValueError, match="n_ctx=12"):
        model.generate(loud.tokens(1, 5), 9, **GREEDY)
    _, ids, mask = loud.ragged([5, 9])
    model.generate(ids[:1], 8, attention_mask=mask[:1], **GREEDY)
    cache = KeyValueCache.init_cache(model.cfg, "cpu")
    with torch.no_grad():
        model(ids[:1], attention_mask=mask[:1], past_kv_cache=cache)
    model.generate(loud.tokens(1, 1), 7, past_kv_cache=cache, **GREEDY)
    for kind in ("alibi", "none"):
        assert build(kind, n_ctx=12).generate(loud.tokens(1, 5), 9, **GREEDY).shape == (1, 14)


# --- the progress bar -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verbose", "terminal", "shown"),
    [(None, False, False), (True, False, True), (False, True, False), (None, True, True)],
)
def test_a_bar_is_shown_when_asked_or_in_a_terminal(
    verbose: bool | None, terminal: bool, shown: bool, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    build().generate(loud.tokens(1, 3), 2, verbose=verbose, **GREEDY)
    printed = capsys.readouterr()
    assert ("generate" in printed.err) == shown
    assert printed.out == ""


def test_the_public_methods_take_the_same_arguments() -> None:
    """generate_stream hands its keywords on: what start_generation takes is what both take."""
    import inspect

    names = set(inspect.signature(HookedTransformer.generate).parameters)
    inner = set(inspect.signature(generate_module.start_generation).parameters)
    inner |= set(generate_module.SAMPLING_ARGUMENTS)
    of_results = {"return_type", "output_logits", "output_scores"}
    of_captures = {"return_cache", "names_filter", "device", "include_last"}
    assert names - inner == {"self"} | of_results | of_captures
    for name in ("return_cache", "feeds_last"):
        with pytest.raises(TypeError, match=name):
            loud.build().generate_stream(loud.tokens(), **{name: True})
    assert inner - names == {"model", "sampling", "is_captured", "feeds_last"}


def test_tokenizers_without_special_tokens_still_generate() -> None:
    model = build("standard", byte_level(end_of_text=False))
    out = model.generate("Hello", 4, **GREEDY)
    assert out.startswith("Hello")


def test_processors_and_criteria_that_edit_what_they_get_edit_nothing_of_ours() -> None:
    model, ids = loud.build("rotary"), loud.tokens(2, 5)
    how: dict[str, Any] = {"max_new_tokens": 4, "stop_at_eos": False, "do_sample": False}

    def in_place(tokens: Tensor, logits: Tensor) -> Tensor:
        tokens.zero_()
        logits[:, 3] = logits.max() + 1
        return logits

    def looks(tokens: Tensor, logits: Tensor) -> bool:
        tokens.zero_()
        logits.zero_()
        return False

    given = model.generate(
        ids, **how, output_logits=True, logits_processor=in_place, stopping_criteria=looks
    )
    assert torch.equal(given.sequences[:, :5], ids)
    assert bool((given.sequences[:, 5:] == 3).all())
    whole = model(given.sequences)
    for number, logits in enumerate(given.logits):
        torch.testing.assert_close(logits, whole[:, 4 + number], atol=1e-4, rtol=1e-4)
