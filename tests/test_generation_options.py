"""What callers add to generation: processors, criteria, several continuations; and failures."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import loud
import pytest
import tiny
import torch
from tokenizers_for_tests import gpt2_like, with_own_pad
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteriaList,
)

from transformer_lens_lite.kv_cache import KeyValueCache
from transformer_lens_lite.model import HookedTransformer

GREEDY: dict[str, Any] = {"do_sample": False, "stop_at_eos": False}


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- processors -----------------------------------------------------------------------------------


def lifted(tokens: Tensor, logits: Tensor) -> Tensor:
    """The token above the newest becomes likelier, by an amount that no later scaling undoes."""
    rows = torch.arange(len(tokens))
    lifted = logits.clone()
    lifted[rows, (tokens[:, -1] + 1) % logits.shape[1]] += 100.0
    return lifted


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_processor_sees_the_tokens_so_far_and_decides(use_cache: bool) -> None:
    model, ids, seen = loud.build("rotary_gqa"), loud.tokens(2, 5), []

    def note(tokens: Tensor, logits: Tensor) -> Tensor:
        seen.append((tokens.clone(), logits))
        return logits

    for processors in (lifted, [note, lifted], LogitsProcessorList([lifted])):
        out = model.generate(
            ids, 4, logits_processor=processors, use_past_kv_cache=use_cache, **GREEDY
        )
        assert torch.equal(out[:, 5:], (ids[:, -1:] + torch.arange(1, 5)) % 61)
    assert [tokens.shape[1] for tokens, _ in seen] == [5, 6, 7, 8]
    assert all(torch.equal(tokens, out[:, : tokens.shape[1]]) for tokens, _ in seen)
    assert not any(tensor.is_inference() for pair in seen for tensor in pair)


def test_several_processors_run_one_after_the_other() -> None:
    model, ids = loud.build(), loud.tokens(2, 5)

    def forbid(tokens: Tensor, logits: Tensor) -> Tensor:
        return logits.index_fill(1, (tokens[:1, -1] + 1) % 61, -torch.inf)

    one = model.generate(ids[:1], 3, logits_processor=[lifted, forbid], **GREEDY)
    other = model.generate(ids[:1], 3, logits_processor=[forbid, lifted], **GREEDY)
    assert not torch.isin(one[0, 5:], (one[0, 4:-1] + 1) % 61).all()
    assert not torch.equal(one, model.generate(ids[:1], 3, logits_processor=lifted, **GREEDY))
    assert torch.equal(one, other)  # -inf and 100 is -inf


def test_hugging_faces_processors_and_criteria_fit() -> None:
    hf = tiny.build("gpt2")
    model = HookedTransformer.from_pretrained_no_processing(hf_model=hf, device="cpu")
    ids = tiny.tokens(hf.config, 2, 6)
    how: dict[str, Any] = {
        "max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids),
        "logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)]),
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(14)]), "pad_token_id": 0,
    }  # fmt: skip
    ours, theirs = model.generate(ids, stop_at_eos=False, **how), hf.generate(ids, **how)
    assert ours.shape == (2, 14)
    assert torch.equal(ours, theirs)
    assert all(len(set(row[5:].tolist())) == 9 for row in ours)


def test_the_new_arguments_give_hugging_faces_tokens() -> None:
    hf = tiny.build("llama_gqa")
    model = HookedTransformer.from_pretrained_no_processing(hf_model=hf, device="cpu")
    ids = tiny.tokens(hf.config, 2, 6)
    mask = torch.ones_like(ids)
    plain = model.generate(ids, 10, attention_mask=mask, **GREEDY)
    eos = int(plain[0, 7])
    how: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "attention_mask": mask}
    for given in (
        {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [[eos], plain[1, 6:8].tolist()]},  # EOS alone is no word
        {"suppress_tokens": plain[:, 6].tolist()},
        {"min_new_tokens": 6},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    ):
        ours = model.generate(ids, eos_token_id=eos, pad_token_id=1, **given, **how)
        theirs = hf.generate(ids, eos_token_id=eos, pad_token_id=1, **given, **how)
        assert torch.equal(ours, theirs), given
        assert ours.tolist() != plain.tolist()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda logits: logits[:, :-1],
            r"returned torch.float32 of shape \[2, 60\], expected .*61",
        ),
        (lambda logits: logits[0], r"returned torch.float32 of shape \[61\]"),
        (lambda logits: logits > 0, "returned torch.bool"),
        (lambda logits: None, "returned NoneType"),
    ],
)
def test_what_a_processor_returns_is_checked(
    returned: Callable[[Tensor], Any], message: str
) -> None:
    model = loud.build()

    def mine(tokens: Tensor, logits: Tensor) -> Any:
        return returned(logits)

    with pytest.raises(ValueError, match=f"logits_processor mine {message}"):
        model.generate(loud.tokens(2, 5), 2, logits_processor=mine, **GREEDY)


# --- criteria -------------------------------------------------------------------------------------


def test_criteria_end_rows_or_everything() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(3, 5)
    plain = model.generate(ids, 8, **GREEDY)
    last = [6, 9, 7]  # column each row is to end with

    def by_row(tokens: Tensor, logits: Tensor) -> Tensor:
        assert torch.equal(logits.argmax(-1)[0], tokens[0, -1]) or tokens.shape[1] > 7
        return torch.tensor([tokens.shape[1] - 1 >= column for column in last])

    out = model.generate(ids, 8, stopping_criteria=by_row, pad_token_id=2, **GREEDY)
    assert out.shape == (3, 10)
    for row, column in enumerate(last):
        assert torch.equal(out[row, : column + 1], plain[row, : column + 1])
        assert (out[row, column + 1 :] == 2).all()
    for stop in (True, torch.tensor(True)):
        criteria = [lambda tokens, logits: False, lambda tokens, logits, stop=stop: stop]
        assert model.generate(ids, 8, stopping_criteria=criteria, **GREEDY).shape == (3, 6)
    chunks = list(model.generate_stream(ids, 8, 1, stopping_criteria=by_row, **GREEDY))
    assert sum(chunk.shape[1] for chunk in chunks) == 10


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.tensor([True]), r"returned torch.bool of shape \[1\], expected .*\[2\]"),
        (torch.tensor([1, 0]), "returned torch.int64"),
        (None, "returned NoneType"),
    ],
)
def test_what_a_criterion_returns_is_checked(returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"stopping_criteria <lambda> {message}"):
        loud.build().generate(
            loud.tokens(2, 5), 2, stopping_criteria=lambda tokens, logits: returned, **GREEDY
        )


# --- several continuations of a prompt ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["standard", "rotary_window", "alibi_gqa", "sinks"])
@pytest.mark.parametrize("lengths", [[5], [1, 4]])
def test_continuations_are_those_of_as_many_rows(kind: str, lengths: list[int]) -> None:
    model = loud.build(kind)
    _, ids, mask = loud.ragged(lengths)
    how: dict[str, Any] = {"temperature": 1.3, "top_k": 30, "stop_at_eos": False}
    rows = model.generate(
        ids.repeat_interleave(3, 0), 8, attention_mask=mask.repeat_interleave(3, 0),
        generator=seeded(), output_logits=True, **how,
    )  # fmt: skip
    for given in ({"n": 3}, {"num_return_sequences": 3}, {"n": 3, "use_past_kv_cache": False}):
        out = model.generate(
            ids, 8, attention_mask=mask, generator=seeded(), output_logits=True, **given, **how
        )
        assert torch.equal(out.sequences, rows.sequences)
        for a, b in zip(out.logits, rows.logits, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    assert len({tuple(row) for row in rows.sequences.tolist()}) == len(rows.sequences)
    chunks = list(
        model.generate_stream(ids, 8, 2, attention_mask=mask, n=3, generator=seeded(), **how)
    )
    assert torch.equal(torch.cat(chunks, 1), rows.sequences)


@pytest.mark.parametrize("prefix_rows", [1, 2])
def test_continuations_behind_a_frozen_prefix_and_of_embeddings(prefix_rows: int) -> None:
    model = loud.build("rotary_gqa")
    prefix, ids = loud.tokens(prefix_rows, 4, 9), loud.tokens(2, 3)
    how: dict[str, Any] = {"max_new_tokens": 6, "n": 4, "stop_at_eos": False}
    out = model.generate(
        ids, past_kv_cache=loud.frozen_prefix(model, prefix), generator=seeded(), **how
    )
    whole = torch.cat((prefix.expand(2, -1), ids), 1)
    assert torch.equal(out, model.generate(whole, generator=seeded(), **how)[:, 4:])
    embeds = model.embed(whole).detach()
    for use_cache in (True, False):
        new = model.generate(
            embeds, return_type="tokens", generator=seeded(), use_past_kv_cache=use_cache, **how
        )
        assert torch.equal(new, out[:, 3:])


def test_the_prompt_is_run_once_and_its_keys_are_kept_once() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, 20)
    sizes: dict[int, tuple[int, int]] = {}
    for n in (2, 8):
        shapes: list[tuple[int, ...]] = []
        caches: list[Any] = []

        def note(x: Tensor, hook: Any, shapes: list[Any] = shapes) -> None:
            shapes.append(tuple(x.shape[:2]))

        branch = KeyValueCache.branch

        def kept(*args: Any, caches: list[Any] = caches, **kwargs: Any) -> KeyValueCache:
            caches.append(branch(*args, **kwargs))  # noqa: B023 (the same function every time)
            return caches[-1]

        with pytest.MonkeyPatch.context() as patch, model.hooks(fwd_hooks=[("hook_embed", note)]):
            patch.setattr(KeyValueCache, "branch", kept)
            model.generate(ids, 5, n=n, **GREEDY)
        assert shapes == [(2, 20)] + 4 * [(2 * n, 1)]
        (cache,) = caches
        prompt = sum(
            tensor.untyped_storage().nbytes()
            for entry in cache.entries
            for segment in entry.prefix
            for tensor in segment
        )
        sizes[n] = prompt, cache.nbytes() - prompt
    heads, d_head = 2, model.cfg.d_head
    assert sizes[2][0] == sizes[8][0] == 3 * 2 * 4 * (2 * 20 * heads * d_head)
    assert sizes[8][1] == 4 * sizes[2][1]


def test_texts_come_one_row_after_the_other() -> None:
    model = loud.build("standard", with_own_pad())
    how: dict[str, Any] = {"max_new_tokens": 5, "n": 2, "temperature": 1.5}
    one = model.generate("Hello", generator=seeded(), **how)
    assert isinstance(one, list)
    assert len(set(one)) == 2
    assert all(text.startswith("Hello") for text in one)
    several = model.generate(["Hello", "The cat"], generator=seeded(), **how)
    assert [text[:5] for text in several] == ["Hello", "Hello", "The c", "The c"]
    chunks = model.generate_stream("Hello", 5, 1, "str", n=2, generator=seeded(), temperature=1.5)
    assert list(map("".join, zip(*chunks, strict=True))) == one


def test_each_continuation_ends_by_itself() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(1, 4)
    plain = model.generate(ids, 10, n=3, generator=seeded(), stop_at_eos=False)
    eos = int(plain[1, 6])
    out = model.generate(ids, 10, n=3, generator=seeded(), eos_token_id=eos, pad_token_id=2)
    for row in range(3):
        said = plain[row, 4:].tolist()
        n = said.index(eos) + 1 if eos in said else 10
        assert out[row, 4 : 4 + n].tolist() == said[: out.shape[1] - 4][:n]
        assert (out[row, 4 + n :] == 2).all()


# --- bad input ------------------------------------------------------------------------------------


class Silent:
    """An object that is no function."""


@pytest.mark.parametrize(
    ("input", "arguments", "error", "message"),
    [
        (torch.zeros(0, 5, dtype=torch.long), {}, ValueError, "the batch is empty"),
        (torch.zeros(0, 5, 24), {}, ValueError, "the batch is empty"),
        ([], {}, TypeError, r"one of texts, or of messages; got \[\]"),
        ([1, 2, 3], {}, TypeError, r"one of int: make ids a tensor \[batch, pos\]"),
        ([[1, 2], [3, 4]], {}, TypeError, r"one of list: make ids a tensor"),
        (torch.zeros(2, 0, dtype=torch.long), {}, ValueError, "the prompt is empty"),
        (None, {"n": 0}, ValueError, "n must be a whole number of at least 1, got 0"),
        (None, {"n": 2.0}, ValueError, "n must be a whole number of at least 1, got 2.0"),
        (None, {"n": True}, ValueError, "n must be a whole number"),
        (None, {"num_return_sequences": -1}, ValueError, "num_return_sequences must be"),
        (None, {"max_new_tokens": 3.0}, ValueError, "max_new_tokens must be an integer"),
        (None, {"stop": ["a", 3]}, ValueError, r"stop must be a text or a list of texts, got \['a"),
        (None, {"stop": 3}, ValueError, "stop must be a text or a list of texts, got 3"),
        (None, {"stop": [None]}, ValueError, "stop must be"),
        (None, {"logits_processor": Silent()}, TypeError, "logits_processor must be a function"),
        (None, {"logits_processor": [lifted, 3]}, TypeError, "list of them, got 3"),
        (None, {"stopping_criteria": "x"}, TypeError, "stopping_criteria must be a function"),
        (None, {"bad_words_ids": [3]}, ValueError, "must be a list of lists of token ids"),
        (None, {"bad_words_ids": [[3], []]}, ValueError, "has an empty word"),
        (None, {"bad_words_ids": [[9999]]}, ValueError, "bad_words_ids=9999 is outside"),
        (None, {"suppress_tokens": [-1]}, ValueError, "suppress_tokens=-1 is outside"),
        (None, {"min_new_tokens": 4}, ValueError, "min_new_tokens=4 is more than max_new_tokens=3"),
        (None, {"typical_p": 0.0}, ValueError, "typical_p must be a number in"),
        (None, {"eta_cutoff": 1.0}, ValueError, "eta_cutoff must be"),
        (None, {"early_stopping": "often"}, ValueError, "must be True, False or 'never'"),
        (torch.zeros(1, 5, 24), {"no_repeat_ngram_size": 2}, ValueError, "prompt is embeddings"),
    ],
)
def test_bad_input_is_one_error_before_anything_is_run(
    input: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = loud.build("standard", gpt2_like())
    model.add_hook("hook_embed", lambda x, hook: pytest.fail("a forward was run"))
    ids = loud.tokens(1, 5) if input is None else input
    generate = inspect.unwrap(HookedTransformer.generate)  # past annotations, checked in tests only
    with pytest.raises(error, match=message):
        generate(model, ids, **{"max_new_tokens": 3, **GREEDY, **arguments})


def test_several_continuations_do_not_share_a_growing_cache() -> None:
    model = loud.build()
    cache = KeyValueCache.init_cache(model.cfg, "cpu", 1)
    with pytest.raises(ValueError, match=r"3 continuations .* appended .* freeze\(\)"):
        model.generate(loud.tokens(1, 5), 2, n=3, past_kv_cache=cache, **GREEDY)
    assert cache.length == 0


# --- nothing lost ---------------------------------------------------------------------------------

STEPS = 3


def failing(at: int, error: type[BaseException]) -> Callable[[], None]:
    """Raises when it is called for the `at`-th time, from 0."""
    calls = itertools.count()

    def call() -> None:
        if next(calls) == at:
            raise error("on purpose")

    return call


def broken_at(
    model: HookedTransformer, where: str, fail: Callable[[], None], ids: Tensor, **how: Any
) -> None:
    """Generate with a failure in a processor, a criterion or a hook."""

    def process(tokens: Tensor, logits: Tensor) -> Tensor:
        fail()
        return logits

    def judge(tokens: Tensor, logits: Tensor) -> bool:
        fail()
        return False

    def hook(value: Tensor, hook: Any) -> None:
        fail()

    inside: dict[str, Any] = {
        "processor": {"logits_processor": process},
        "criterion": {"stopping_criteria": judge},
    }.get(where, {})
    hooks = [(where, hook)] if not inside else []
    with model.hooks(fwd_hooks=hooks):
        model.generate(ids, STEPS, **inside, **how)


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize(
    "where", ["processor", "criterion", "hook_embed", "blocks.1.attn.hook_v", "unembed.hook_out"]
)
def test_a_failure_at_any_step_loses_nothing(where: str, step: int) -> None:
    error = KeyboardInterrupt  # what not even `except Exception` would see
    model, prefix = loud.build("rotary_window"), loud.tokens(2, 4, 9)
    _, ids, mask = loud.ragged([3, 5])
    whole = model.generate(ids, STEPS, attention_mask=mask, **GREEDY)
    behind = model.generate(ids, STEPS, past_kv_cache=loud.frozen_prefix(model, prefix), **GREEDY)

    growing, frozen = (
        KeyValueCache.init_cache(model.cfg, "cpu", 2),
        loud.frozen_prefix(model, prefix),
    )
    kept = [(e.past_keys.clone(), e.past_values.clone()) for e in frozen.entries]
    with pytest.raises(error, match="on purpose"):
        broken_at(
            model, where, failing(step, error), ids,
            attention_mask=mask, past_kv_cache=growing, **GREEDY,
        )  # fmt: skip
    with pytest.raises(error, match="on purpose"):
        broken_at(model, where, failing(step, error), ids, past_kv_cache=frozen, **GREEDY)

    # the growing one has exactly the tokens whose forward got through the last layer, and can be
    # gone on with
    through = step + (where in ("processor", "criterion", "unembed.hook_out"))
    assert growing.length == (5 + through - 1 if through else 0)
    if through:
        rest = model.generate(
            whole[:, growing.length : growing.length + 1], 1, past_kv_cache=growing, **GREEDY
        )
        assert torch.equal(rest[:, -1], model_says(model, whole[:, : growing.length], mask))
    assert frozen.frozen
    assert frozen.length == 4
    for entry, (keys, values) in zip(frozen.entries, kept, strict=True):
        assert torch.equal(entry.past_keys, keys)
        assert torch.equal(entry.past_values, values)
    # and the model is as it was
    assert model.list_hooks() == {}
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert torch.equal(model.generate(ids, STEPS, attention_mask=mask, **GREEDY), whole)
    assert torch.equal(model.generate(ids, STEPS, past_kv_cache=frozen, **GREEDY), behind)


def model_says(model: HookedTransformer, ids: Tensor, mask: Tensor) -> Tensor:
    """The likeliest token after a padded batch."""
    new = torch.ones(len(ids), ids.shape[1] - mask.shape[1], dtype=torch.long)
    with torch.no_grad():
        return model(ids, attention_mask=torch.cat((mask, new), 1))[:, -1].argmax(-1)


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("how", [{"n": 3}, {"num_beams": 3}], ids=str)
def test_a_failure_with_several_copies_leaves_the_prefix_alone(
    step: int, how: dict[str, Any]
) -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, 3)
    frozen = loud.frozen_prefix(model, loud.tokens(1, 4, 9))
    whole = model.generate(ids, STEPS, past_kv_cache=frozen, **how, **GREEDY)
    kept = [entry.past_keys.clone() for entry in frozen.entries]
    for where in ("processor", "criterion", "blocks.1.attn.hook_v"):
        if where == "criterion" and "num_beams" in how and step == STEPS - 1:
            continue  # a beam at its full length is not judged any more
        with pytest.raises(KeyboardInterrupt):
            broken_at(
                model, where, failing(step, KeyboardInterrupt), ids, past_kv_cache=frozen, **how,
                **GREEDY,
            )  # fmt: skip
    assert frozen.length == 4
    for entry, keys in zip(frozen.entries, kept, strict=True):
        assert torch.equal(entry.past_keys, keys)
    assert model.list_hooks() == {}
    assert torch.equal(model.generate(ids, STEPS, past_kv_cache=frozen, **how, **GREEDY), whole)


@pytest.mark.parametrize("step", range(STEPS))
def test_a_consumer_that_fails_between_chunks_leaves_nothing_behind(step: int) -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, 5)
    whole = model.generate(ids, STEPS, **GREEDY)
    cache = KeyValueCache.init_cache(model.cfg, "cpu", 2)

    def consume() -> None:
        for n, _ in enumerate(model.generate_stream(ids, STEPS, 1, past_kv_cache=cache, **GREEDY)):
            if n == step:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert model.list_hooks() == {}
    assert cache.length == 5 + step
    rest = model.generate(whole[:, 5 + step : 6 + step], 1, past_kv_cache=cache, **GREEDY)
    if step + 1 < STEPS:
        assert torch.equal(rest[:, -1], whole[:, 6 + step])
    assert torch.equal(model.generate(ids, STEPS, **GREEDY), whole)
