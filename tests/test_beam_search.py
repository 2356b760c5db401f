"""Beam search: Hugging Face's sequences and scores, with the cache and without it."""

from typing import Any

import loud
import pytest
import tiny
import torch
from tokenizers_for_tests import with_own_pad
from torch import Tensor

from transformer_lens_lite import beam_search
from transformer_lens_lite.generate import GenerateOutput
from transformer_lens_lite.kv_cache import KeyValueCache
from transformer_lens_lite.model import HookedTransformer

PAD = 1


@pytest.fixture(scope="module", params=["gpt2", "llama_gqa"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, HookedTransformer]:
    """The same loud weights in Hugging Face's model and ours."""
    sizes = {"n_positions": 64} if request.param == "gpt2" else {}
    hf = tiny.build(request.param, **sizes)
    return hf, HookedTransformer.from_pretrained_no_processing(hf_model=hf, device="cpu")


def ragged(hf: Any, lengths: list[int]) -> tuple[Tensor, Tensor]:
    ids = tiny.tokens(hf.config, len(lengths), max(lengths))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = 0
    return ids.masked_fill(mask == 0, PAD), mask


def frequent(model: HookedTransformer, ids: Tensor, mask: Tensor) -> list[int]:
    """Tokens that a search comes across on its way: as EOS they end some beams and not others."""
    how: dict[str, Any] = {"num_beams": 4, "n": 4, "do_sample": False, "stop_at_eos": False}
    out = model.generate(ids, 8, attention_mask=mask, **how)
    new = out[:, ids.shape[1] :].flatten()
    return new.unique()[new.unique(return_counts=True)[1].argsort(descending=True)][:3].tolist()


def both(
    pair: tuple[Any, HookedTransformer], ids: Tensor, mask: Tensor, **how: Any
) -> tuple[GenerateOutput, Any]:
    hf, model = pair
    eos = how.pop("eos", None)
    given = {"max_new_tokens": 7, "do_sample": False, "attention_mask": mask, **how}
    ending = {"stop_at_eos": eos is not None, "eos_token_id": eos, "pad_token_id": PAD}
    ours = model.generate(ids, **ending, output_scores=True, **given)
    uncached = model.generate(ids, **ending, output_scores=True, use_past_kv_cache=False, **given)
    assert torch.equal(ours.sequences, uncached.sequences)
    torch.testing.assert_close(ours.sequences_scores, uncached.sequences_scores)
    theirs = hf.generate(
        ids, eos_token_id=eos, pad_token_id=PAD, return_dict_in_generate=True, output_scores=True,
        **given,
    )  # fmt: skip
    return ours, theirs


def assert_same(ours: GenerateOutput, theirs: Any) -> None:
    expected = theirs.sequences
    expected = expected.masked_fill(expected == -1, PAD)  # its pad where there is no EOS
    if expected.shape[1] < ours.sequences.shape[1]:
        raise AssertionError(f"{ours.sequences.tolist()} is longer than {expected.tolist()}")
    assert torch.equal(ours.sequences, expected)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("num_beams", "early_stopping", "length_penalty"),
    [
        (2, False, 1.0), (5, True, 1.0), (3, "never", 1.0), (3, False, 0.0), (5, "never", 2.5),
        (2, True, 2.5), (5, False, -1.0), (3, "never", -1.0), (4, False, 2.5),
    ],
)  # fmt: skip
def test_sequences_and_scores_are_hugging_faces(
    pair: tuple[Any, HookedTransformer],
    num_beams: int,
    early_stopping: bool | str,
    length_penalty: float,
) -> None:
    ids, mask = ragged(pair[0], [6, 6])
    how: dict[str, Any] = {
        "num_beams": num_beams, "early_stopping": early_stopping, "length_penalty": length_penalty,
        "num_return_sequences": 2, "eos": frequent(pair[1], ids, mask),
    }  # fmt: skip
    ours, theirs = both(pair, ids, mask, **how)
    assert_same(ours, theirs)
    assert (ours.sequences == PAD).any() or length_penalty > 1, "some end before others"


def test_early_stopping_runs_no_further_once_all_are_found(
    pair: tuple[Any, HookedTransformer],
) -> None:
    _, model = pair
    ids, mask = ragged(pair[0], [6])
    how: dict[str, Any] = {"num_beams": 3, "do_sample": False, "length_penalty": 3.0}
    eos, steps = frequent(model, ids, mask), {}
    for early in (True, "never"):
        seen: list[int] = []
        note = ("hook_embed", lambda x, hook, seen=seen: seen.append(1))
        with model.hooks(fwd_hooks=[note]):
            model.generate(
                ids, 20, attention_mask=mask, early_stopping=early,
                eos_token_id=eos, **how,
            )  # fmt: skip
        steps[early] = len(seen)
    assert steps[True] < steps["never"] == 20


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 8])
def test_ragged_batches_of_several_lengths(
    pair: tuple[Any, HookedTransformer], max_new_tokens: int, eos: bool
) -> None:
    ids, mask = ragged(pair[0], [3, 7, 5])
    how: dict[str, Any] = {"num_beams": 3, "max_new_tokens": max_new_tokens}
    if eos:
        how["eos"] = frequent(pair[1], ids, mask)[:1]
    ours, theirs = both(pair, ids, mask, num_return_sequences=3, **how)
    assert_same(ours, theirs)
    for row in range(3):  # and each as alone
        real = mask[row].bool()
        alone = pair[1].generate(
            ids[row : row + 1, real], max_new_tokens, num_beams=3, do_sample=False,
            stop_at_eos=eos, eos_token_id=how.get("eos"), pad_token_id=PAD,
        )[0, int(real.sum()) :]  # fmt: skip
        new = ours.sequences[3 * row, ids.shape[1] :]
        n = min(len(new), len(alone))
        assert torch.equal(new[:n], alone[:n])
        assert (new[n:] == PAD).all()
        assert len(alone) == n


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2, "repetition_penalty": 0.4},
        {"min_new_tokens": 6},
        {"bad_words_ids": [[4], [9, 2]], "suppress_tokens": [3, 8]},
    ],
    ids=str,
)
def test_penalties_and_bans_are_hugging_faces(
    pair: tuple[Any, HookedTransformer], given: dict[str, Any]
) -> None:
    ids, mask = ragged(pair[0], [6, 6])
    eos = frequent(pair[1], ids, mask)[:2]
    plain, _ = both(pair, ids, mask, num_beams=4, eos=eos)
    if "bad_words_ids" in given:
        said = plain.sequences[0, 6:8].tolist()
        given = {**given, "bad_words_ids": [[4], said]}
    ours, theirs = both(pair, ids, mask, num_beams=4, eos=eos, **given)
    assert_same(ours, theirs)
    assert ours.sequences.tolist() != plain.sequences.tolist()


def test_processors_and_criteria_are_hugging_faces(pair: tuple[Any, HookedTransformer]) -> None:
    hf, model = pair
    ids, mask = ragged(hf, [5, 5])

    def shifted(tokens: Tensor, logits: Tensor) -> Tensor:
        return logits - 0.3 * torch.arange(logits.shape[1]) * (tokens[:, -1:] % 3)

    def on_multiples(tokens: Tensor, logits: Any, **_: Any) -> Tensor:
        return tokens[:, -1] % 7 == 0

    how: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}
    how |= {"logits_processor": [shifted], "attention_mask": mask, "pad_token_id": PAD}
    theirs = hf.generate(
        ids, eos_token_id=None, stopping_criteria=[on_multiples], return_dict_in_generate=True,
        output_scores=True, **how,
    )  # fmt: skip
    ours = model.generate(
        ids, stop_at_eos=False, stopping_criteria=on_multiples, output_scores=True, **how
    )
    assert_same(ours, theirs)
    del how["logits_processor"]
    plain = model.generate(ids, stop_at_eos=False, **how)
    assert plain.tolist() != ours.sequences.tolist()


def brute_force(model: HookedTransformer, prompt: Tensor, steps: int) -> tuple[Tensor, float]:
    """The most probable continuation of all that there are."""
    rows, scores = prompt, torch.zeros(1)
    for _ in range(steps):
        with torch.no_grad():
            new = model(rows)[:, -1].log_softmax(-1)
        scores = (scores[:, None] + new).flatten()
        d_vocab = new.shape[1]
        rows = torch.cat(
            (rows.repeat_interleave(d_vocab, 0), torch.arange(d_vocab).repeat(len(rows))[:, None]),
            1,
        )
    return rows[scores.argmax()], float(scores.max() / steps)


def test_wide_enough_a_search_finds_the_best_of_all() -> None:
    model, prompt = loud.build("rotary", d_vocab=7), loud.tokens(1, 4, d_vocab=7)
    expected, score = brute_force(model, prompt, 4)
    out = model.generate(
        prompt, 4, num_beams=343, do_sample=False, stop_at_eos=False, output_scores=True
    )
    assert torch.equal(out.sequences[0], expected)
    assert float(out.sequences_scores) == pytest.approx(score, abs=1e-5)
    greedy = model.generate(prompt, 4, do_sample=False, stop_at_eos=False)
    assert not torch.equal(greedy[0], expected)
    narrow = model.generate(prompt, 4, num_beams=2, do_sample=False, stop_at_eos=False)
    assert not torch.equal(narrow[0], expected)


@pytest.mark.parametrize("kind", ["standard", "rotary_window", "alibi_gqa", "shortformer"])
@pytest.mark.parametrize("rows", [1, 2])
def test_report_069_cached_equals_uncached_for_every_kind_of_position_and_behind_a_prefix(
    kind: str, rows: int
) -> None:
    model = loud.build(kind)
    _, ids, mask = loud.ragged([3, 6])
    how: dict[str, Any] = {"num_beams": 3, "n": 2, "do_sample": False, "stop_at_eos": False}
    out = model.generate(ids, 7, attention_mask=mask, **how)
    plain = model.generate(ids, 7, attention_mask=mask, use_past_kv_cache=False, **how)
    assert torch.equal(out, plain)
    prefix = loud.tokens(1, 5, 8).repeat(rows, 1)
    cache = KeyValueCache.init_cache(model.cfg, "cpu", rows)
    with torch.no_grad():
        model(prefix, past_kv_cache=cache)
    cache.freeze()
    before = [entry.past_keys.clone() for entry in cache.entries]
    out = model.generate(ids, 7, attention_mask=mask, past_kv_cache=cache, **how)
    whole = torch.cat((prefix[:1].expand(2, -1), ids), 1)
    whole_mask = torch.cat((torch.ones(2, 5, dtype=torch.long), mask), 1)
    expected = model.generate(whole, 7, attention_mask=whole_mask, **how)
    assert torch.equal(out, expected[:, 5:])
    assert all(
        torch.equal(entry.past_keys, keys)
        for entry, keys in zip(cache.entries, before, strict=True)
    )


@pytest.mark.parametrize("kind", ["standard", "rotary_gqa"])
def test_report_069_beams_take_their_keys_along_in_every_layer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loud.build(kind)
    _, ids, mask = loud.ragged([3, 6])
    how: dict[str, Any] = {"do_sample": False, "stop_at_eos": False, "attention_mask": mask}
    greedy = model.generate(ids, 7, **how)
    assert torch.equal(model.generate(ids, 7, num_beams=1, **how), greedy)
    with torch.no_grad():
        model.unembed.W_U.mul_(0.2)  # so that beams change places
    how |= {"num_beams": 3, "n": 3, "output_scores": True}
    searched = model.generate(ids, 7, **how)
    follow = beam_search.follow
    for stuck in range(3):  # a layer whose keys stay where they are gives another answer

        def leave_behind(cache: KeyValueCache, rows: Tensor, stuck: int = stuck) -> None:
            tails = cache.entries[stuck].segments[-1]
            before = [tail.clone() for tail in tails]
            follow(cache, rows)
            for tail, value in zip(tails, before, strict=True):
                tail.copy_(value)

        monkeypatch.setattr(beam_search, "follow", leave_behind)
        other = model.generate(ids, 7, **how).sequences_scores
        assert (other - searched.sequences_scores).abs().max() > 1e-3


def test_the_prompt_is_run_once_and_embeddings_search_as_their_ids_do() -> None:
    model, ids, rows = loud.build("rotary_gqa"), loud.tokens(2, 5), []
    how: dict[str, Any] = {"num_beams": 3, "do_sample": False, "stop_at_eos": False}
    handle = model.add_hook("hook_embed", lambda x, hook: rows.append(x.shape[:2]))
    out = model.generate(ids, 4, **how)
    assert rows == [(2, 5), (6, 1), (6, 1), (6, 1)]
    handle.remove()
    new = model.generate(model.embed(ids).detach(), 4, return_type="tokens", **how)
    assert torch.equal(new, out[:, 5:])
    uncached = model.generate(
        model.embed(ids).detach(), 4, return_type="tokens", use_past_kv_cache=False, **how
    )
    assert torch.equal(new, uncached)
    assert torch.equal(model.generate(ids, 0, **how), ids)


def test_texts_stop_strings_and_logits() -> None:
    model = loud.build("standard", with_own_pad())
    how: dict[str, Any] = {"num_beams": 3, "do_sample": False, "stop_at_eos": False}
    texts = ["Hello world", "The cat"]
    out = model.generate(texts, 6, n=2, output_logits=True, output_scores=True, **how)
    assert len(out.sequences) == 4
    assert [text.startswith(prompt) for text, prompt in zip(out.sequences, 2 * texts, strict=False)]
    assert [logits.shape[0] for logits in out.logits] == [6] * 6
    assert not any(t.is_inference() for t in (*out.logits, out.sequences_scores))
    assert out.sequences_scores.view(2, 2).diff().le(0).all()
    stop = out.sequences[0][len("Hello world") :][-1]
    ended = model.generate(texts, 6, stop=stop, **how)
    assert any(text.endswith(stop) for text in ended)
    assert isinstance(model.generate("Hello", 2, **how), str)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"do_sample": True}, "num_beams=3 searches and does not draw: pass do_sample=False"),
        ({"n": 4}, "n=4 is more than there are beams, num_beams=3"),
        ({"num_beams": 0}, "num_beams must be a whole number of at least 1, got 0"),
        ({"num_beams": 1, "length_penalty": 2.0}, "length_penalty and early_stopping are for"),
        ({"num_beams": 1, "output_scores": True}, "output_scores=True is about beam search"),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number"),
        ({"n": 2, "num_return_sequences": 3}, "n=2 and num_return_sequences=3 are the same"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_first(
    arguments: dict[str, Any], message: str
) -> None:
    model = loud.build()
    model.add_hook("hook_embed", lambda x, hook: pytest.fail("a forward was run"))
    how: dict[str, Any] = {"num_beams": 3, "do_sample": False, "stop_at_eos": False}
    with pytest.raises(ValueError, match=message):
        model.generate(loud.tokens(1, 5), **{**how, **arguments})


def test_a_growing_cache_and_a_stream_are_refused() -> None:
    model, how = loud.build(), {"num_beams": 2, "do_sample": False, "stop_at_eos": False}
    cache = KeyValueCache.init_cache(model.cfg, "cpu")
    with pytest.raises(ValueError, match=r"2 continuations .* freeze\(\)"):
        model.generate(loud.tokens(1, 5), past_kv_cache=cache, **how)
    assert cache.length == 0
    with pytest.raises(ValueError, match="at the end only: use generate"):
        model.generate_stream(loud.tokens(1, 5), **how)
