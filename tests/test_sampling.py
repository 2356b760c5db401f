"""Sampling equals Hugging Face's processors, and draws what the probabilities say."""

import itertools
import math
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from transformer_lens_lite.sampling import (
    Sampling,
    ban_repeated_ngrams,
    ban_words,
    check_sampling,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize,
    sample_logits,
    token_counts,
    warp_logits,
)

NO_IDS = torch.zeros(1, 1, dtype=torch.long)
D_VOCAB = 50


def random_logits(rows: int = 6, spread: float = 3.0) -> Tensor:
    """Rows of different sharpness, with ties: rounded to quarters."""
    scale = torch.linspace(0.3, spread, rows)[:, None]
    return (torch.randn(rows, D_VOCAB) * scale * 4).round() / 4


def probs_of(*p: float) -> Tensor:
    return torch.tensor([p]).log()


def hf_probs(logits: Tensor, **kwargs: Any) -> Tensor:
    """Hugging Face's distribution, from its own classes in the order `generate` builds them."""
    made = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
        "typical_p": TypicalLogitsWarper,
        "epsilon_cutoff": EpsilonLogitsWarper,
        "eta_cutoff": EtaLogitsWarper,
    }
    chain = LogitsProcessorList(made[n](kwargs[n]) for n in made if kwargs.get(n) is not None)
    return chain(NO_IDS, logits).softmax(-1)


# --- the same as Hugging Face ---------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [None, 0.0, 0.1, 1.0])
def test_report_060_one_step_distribution_is_hugging_faces(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    logits = random_logits()
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    # generate leaves TopPLogitsWarper out at 1.0
    theirs = hf_probs(logits, **given | {"top_p": None if top_p == 1.0 else top_p})
    ours = warp_logits(logits, **given).softmax(-1)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("temperature", [0.4, 1.7])
@pytest.mark.parametrize("top_p", [None, 0.8])
@pytest.mark.parametrize(
    "given",
    [
        *({"typical_p": p} for p in (0.01, 0.3, 0.7, 0.99)),
        *({"epsilon_cutoff": p} for p in (1e-4, 0.02, 0.1, 0.9)),
        *({"eta_cutoff": p} for p in (1e-4, 0.02, 0.3, 0.9)),
        {"typical_p": 0.6, "epsilon_cutoff": 0.03, "eta_cutoff": 0.2},
    ],
    ids=str,
)
def test_the_rarer_filters_are_hugging_faces(
    given: dict[str, float], temperature: float, top_p: float | None
) -> None:
    given = {"temperature": temperature, "top_p": top_p, **given}
    logits = torch.randn(40, D_VOCAB) * torch.linspace(0.3, 3.0, 40)[:, None]
    theirs, ours = hf_probs(logits, **given), warp_logits(logits, **given).softmax(-1)
    plain = warp_logits(logits, temperature=temperature, top_p=top_p).softmax(-1)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    if top_p is None and temperature == 1.7:  # nothing is cut off yet
        assert not torch.equal(ours > 0, plain > 0)


def test_the_rarer_filters_keep_everything_at_their_ends() -> None:
    logits = torch.randn(3, D_VOCAB)
    for given in ({"typical_p": 1.0}, {"epsilon_cutoff": 0.0}, {"eta_cutoff": 0}):
        assert torch.equal(warp_logits(logits, **given), logits)


EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.6, "no_repeat_ngram_size": 2, "bad_words_ids": [[3], [5, 7], [9]],
    "min_new_tokens": 30, "suppress_tokens": [11, 12], "temperature": 1.8, "top_k": 30,
    "top_p": 0.93, "min_p": 0.04, "typical_p": 0.9, "epsilon_cutoff": 0.012, "eta_cutoff": 0.13,
}  # fmt: skip
OWN_FORM: dict[str, Any] = {"bad_words_ids": ((3,), (5, 7)), "suppress_tokens": (11, 12)}


def halved(tokens: Tensor, logits: Tensor) -> Tensor:
    """A processor for which it matters what comes before it, and after."""
    return torch.where(logits > 1.0, logits / 2, logits)


@pytest.mark.parametrize("left_out", [(), *((name,) for name in EVERYTHING)], ids=str)
def test_all_at_once_are_what_hugging_face_itself_would_build(left_out: tuple[str, ...]) -> None:
    """Its own method puts the processors in order; leaving one out moves all the others up."""
    hf = tiny.build("gpt2")
    given = {name: value for name, value in EVERYTHING.items() if name not in left_out}
    if "top_k" in left_out:
        given["top_k"] = 0
    config = GenerationConfig(do_sample=True, eos_token_id=[9], pad_token_id=0, **given)
    hf._prepare_special_tokens(config, device="cpu")
    theirs = hf._get_logits_processor(config, input_ids_seq_length=8, logits_processor=[halved])
    assert len(theirs) >= 11
    ours = {n: OWN_FORM.get(n, value) for n, value in given.items() if value}
    sampling = Sampling(**ours, logits_processor=(halved,), eos_ids=(9,))
    tokens = torch.randint(D_VOCAB, (200, 20))
    tokens[:, -1] = 5  # as the bad word begins
    logits = 2.0 * torch.randn(200, D_VOCAB)
    expected = theirs(tokens, logits.clone()).softmax(-1)
    got = sampling.warped(sampling.processed(logits, tokens, n_new=12)).softmax(-1)
    same = ((got > 0) == (expected > 0)).all(1)
    assert same.float().mean() > 0.98  # a probability may lie on a threshold, within rounding
    torch.testing.assert_close(got[same], expected[same], atol=1e-5, rtol=0)


def test_min_new_tokens_ends_when_there_are_enough() -> None:
    sampling = Sampling(min_new_tokens=3, eos_ids=(4, 6))
    logits, tokens = torch.zeros(1, 8), torch.zeros(1, 5, dtype=torch.long)
    early, late = (sampling.processed(logits, tokens, n_new=n) for n in (2, 3))
    assert early[0].isinf().nonzero().flatten().tolist() == [4, 6]
    assert not late.isinf().any()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_repeated_ngrams_are_banned_as_in_hugging_face(size: int) -> None:
    tokens = torch.randint(4, (30, 25))
    logits = torch.randn(30, 6)
    ours = ban_repeated_ngrams(logits, tokens, size)
    assert torch.equal(ours, NoRepeatNGramLogitsProcessor(size)(tokens, logits))
    assert ours.isinf().any()
    assert not ours.isinf()[:, 4:].any()
    assert torch.equal(ban_repeated_ngrams(logits, tokens[:, : size - 1], size), logits)


def test_bad_words_are_banned_as_in_hugging_face() -> None:
    words = [[1], [2, 3], [0, 3], [3, 2, 1], [1, 1, 1], [0] * 40]
    tokens, logits = torch.randint(4, (60, 5)), torch.randn(60, 6)
    theirs = NoBadWordsLogitsProcessor(words)(tokens, logits)
    ours = ban_words(logits, tokens, tuple(map(tuple, words)))
    assert torch.equal(ours, theirs)
    assert ours.isinf().sum() > 75  # 60 would be the first word alone


@pytest.mark.parametrize("size", [1, 2, 3])
def test_padding_is_neither_a_repeated_ngram_nor_part_of_a_bad_word(size: int) -> None:
    words = ((0, 1), (0, 0, 2), (1, 0, 3))
    logits = torch.randn(1, 5)
    for length in range(1, 6):
        row = torch.randint(2, (1, length))
        padded = torch.cat((torch.zeros(1, 7, dtype=torch.long), row), 1)
        mask = torch.cat((torch.zeros(1, 7, dtype=torch.long), torch.ones_like(row)), 1)
        for ban, what in ((ban_repeated_ngrams, size), (ban_words, words)):
            assert torch.equal(ban(logits, padded, what, mask), ban(logits, row, what))


def test_nothing_left_to_draw_is_an_error() -> None:
    sampling = Sampling(suppress_tokens=tuple(range(D_VOCAB)))
    for do_sample in (True, False):
        greedy = Sampling(do_sample=do_sample, suppress_tokens=sampling.suppress_tokens)
        with pytest.raises(ValueError, match=r"all -inf in batch row\(s\) \[0, 1\]"):
            greedy.next_tokens(random_logits(2), torch.zeros(2, 1, dtype=torch.long))


def test_report_060_temperature_comes_before_the_filters() -> None:
    """The order shows: a nucleus of the flattened distribution is wider."""
    logits = probs_of(0.7, 0.2, 0.06, 0.04)
    assert (warp_logits(logits, top_p=0.7, temperature=3.0) > -math.inf).sum() == 3
    assert (warp_logits(logits, top_p=0.7, temperature=1.0) > -math.inf).sum() == 1


def test_top_k_and_top_p_combine_each_on_what_the_last_one_left() -> None:
    logits = probs_of(0.4, 0.3, 0.2, 0.1)
    # The first alone reaches .5 of the two best (.57 and .43 of them), but not of all four.
    assert (warp_logits(logits, top_k=2, top_p=0.5)[0] > -math.inf).tolist() == [True] + [False] * 3
    assert (warp_logits(logits, top_p=0.5)[0] > -math.inf).tolist() == [True] * 2 + [False] * 2


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_hugging_faces(penalty: float) -> None:
    logits = random_logits()
    tokens = torch.randint(D_VOCAB, (6, 20))
    tokens[0] = 3  # many times: penalised once
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits)
    ours = penalize(logits, token_counts(tokens, D_VOCAB), repetition_penalty=penalty)
    assert not torch.equal(ours, logits)
    assert torch.equal(ours, theirs)


def test_ids_without_a_logit_do_not_count() -> None:
    tokens = torch.tensor([[1, D_VOCAB, D_VOCAB + 700]])
    counts = token_counts(tokens, D_VOCAB)
    assert counts.shape == (1, D_VOCAB)
    assert counts.sum() == 1


def test_frequency_penalty_subtracts_count_times_penalty() -> None:
    logits = random_logits(2)
    tokens = torch.tensor([[3, 3, 3, 5], [7, 8, 9, 7]])
    expected = logits.clone()
    for row, token in itertools.product(range(2), range(D_VOCAB)):
        expected[row, token] -= 0.75 * tokens[row].tolist().count(token)
    ours = penalize(logits, token_counts(tokens, D_VOCAB), freq_penalty=0.75)
    torch.testing.assert_close(ours, expected)


def test_padding_does_not_count_as_repetition() -> None:
    logits = torch.zeros(1, 4) + torch.tensor([2.0, 1.9, 0.0, 0.0])
    tokens, mask = torch.tensor([[0, 0, 3]]), torch.tensor([[0, 0, 1]])
    given: dict[str, Any] = {"do_sample": False, "tokens": tokens}
    for penalty in ({"repetition_penalty": 2.0}, {"freq_penalty": 0.5}):
        assert sample_logits(logits, **penalty, **given) == 1
        assert sample_logits(logits, **penalty, mask=mask, **given) == 0


# --- edges --------------------------------------------------------------------------------------


def test_report_061_nucleus_edges() -> None:
    logits = probs_of(0.4, 0.3, 0.2, 0.1)

    def kept(p: float) -> int:
        theirs = TopPLogitsWarper(p)(NO_IDS, logits)
        ours = keep_top_p(logits, p)
        assert torch.equal(ours, theirs)
        return int((ours > -math.inf).sum())

    assert [kept(p) for p in (0.6, 0.4 - 1e-6, 1e-9, 0.95)] == [2, 1, 1, 4]
    underflows = torch.tensor([[0.0, -200.0]])  # its probability is 0 in float32, yet 1.0 keeps all
    assert torch.equal(keep_top_p(underflows, 1.0), underflows)


def test_report_061_top_k_edges() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]])
    assert (keep_top_k(logits, 2)[0] > -math.inf).tolist() == [True, True, True, True, False]
    assert torch.equal(keep_top_k(logits, 99), logits)
    assert (keep_top_k(logits, 1)[0] > -math.inf).tolist() == [True] + [False] * 4


def test_min_p_edges() -> None:
    logits = probs_of(0.4, 0.21, 0.19, 0.2)
    assert (keep_min_p(logits, 0.5)[0] > -math.inf).tolist()[:3] == [True, True, False]
    assert (keep_min_p(logits, 1.0)[0] > -math.inf).sum() == 1
    assert torch.equal(keep_min_p(logits, 0.0), logits)


def test_report_060_temperature_zero_is_greedy() -> None:
    logits = random_logits()
    best = logits.argmax(-1)
    assert torch.equal(sample_logits(logits, temperature=0.0), best)
    assert torch.equal(sample_logits(logits, temperature=0), best)
    assert torch.equal(sample_logits(logits, do_sample=False, temperature=5.0), best)
    assert not warp_logits(logits, temperature=0.0).softmax(-1).isnan().any()
    ties = torch.tensor([[0.0, 1.0, 1.0, 1.0]]).expand(100, -1)
    assert (sample_logits(ties, temperature=0.0) == 1).all(), "always the same of equals"


def test_tiny_temperatures_do_not_overflow() -> None:
    logits = torch.tensor([[700.0, 800.0, 900.0, -3.0]])
    for temperature in (1e-6, 1e-30, 1e-44):
        assert sample_logits(logits, temperature=temperature, top_p=0.9) == 2


def test_greedy_obeys_the_penalties() -> None:
    """As in Hugging Face, where they are processors and apply without sampling."""
    logits = torch.tensor([[2.0, 1.5, 0.0]])
    seen = torch.tensor([[0]])
    for given in ({"repetition_penalty": 2.0}, {"freq_penalty": 1.0}):
        assert sample_logits(logits, do_sample=False) == 0
        assert sample_logits(logits, do_sample=False, tokens=seen, **given) == 1
        assert sample_logits(logits, temperature=0, tokens=seen, **given) == 1


def test_penalties_need_tokens() -> None:
    for given in ({"repetition_penalty": 2.0}, {"freq_penalty": 1.0}):
        with pytest.raises(ValueError, match="need tokens="):
            sample_logits(random_logits(), **given)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("top_k", [0, -1, 2.5, True, "5"]),
        ("top_p", [0.0, -0.1, 1.01, math.nan]),
        ("min_p", [-0.1, 1.01, math.nan]),
        ("temperature", [-1.0, math.nan, math.inf]),
        ("freq_penalty", [math.nan, math.inf]),
        ("repetition_penalty", [0.0, -1.0, math.nan, math.inf, None]),
        ("typical_p", [0.0, 1.01, math.nan, True]),
        ("epsilon_cutoff", [-0.1, 1.0, math.nan]),
        ("eta_cutoff", [-0.1, 1.0, math.nan]),
        ("no_repeat_ngram_size", [-1, 1.5, True]),
        ("min_new_tokens", [-1, 1.5, True]),
    ],
)
def test_arguments_out_of_range_are_named(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} must be"):
            check_sampling({name: value})
    out_of_range = values[0]
    with pytest.raises(ValueError, match=f"^{name} must be"):
        Sampling(do_sample=False, **{name: out_of_range})


def test_arguments_in_range_are_accepted() -> None:
    low = {"top_k": 1, "top_p": 1e-12, "temperature": 0.0, "freq_penalty": -2.0, "min_p": 0.0}
    check_sampling({**low, "repetition_penalty": 0.5, "eta_cutoff": 0.0, "typical_p": None})
    check_sampling({"top_k": 10**9, "top_p": 1.0, "temperature": 100, "min_p": 1, "typical_p": 1})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_an_error_that_names_the_row(bad: float) -> None:
    logits = random_logits()
    logits[4, 7] = bad
    for do_sample in (True, False):
        with pytest.raises(ValueError, match=r"row\(s\) \[4\]"):
            sample_logits(logits, do_sample=do_sample)
    logits[4] = -math.inf
    with pytest.raises(ValueError, match=r"row\(s\) \[4\]"):
        sample_logits(logits)
    logits[4, 7] = 0.0  # one token left: that one
    assert sample_logits(logits)[4] == 7


# --- draws --------------------------------------------------------------------------------------


def chi_square(drawn: Tensor, probs: Tensor) -> float:
    seen = drawn.bincount(minlength=len(probs)).double()
    assert (seen[probs == 0] == 0).all()
    possible = probs > 0
    expected = probs[possible].double() * len(drawn)
    return float(((seen[possible] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("given", [{}, {"top_k": 6, "temperature": 1.7}, {"top_p": 0.8}])
def test_report_061_20k_samples_match_the_probabilities(given: dict[str, Any]) -> None:
    logits = torch.linspace(0, 2, 12)[torch.randperm(12)][None]
    probs = hf_probs(logits, **given)[0]
    generator = torch.Generator().manual_seed(0)
    drawn = sample_logits(logits.expand(20_000, -1), generator=generator, **given)
    # 99.9 % of chi-square with 11 degrees of freedom is 31.3; fewer tokens, less.
    assert chi_square(drawn, probs) < 31.3
    wrong = probs.roll(1)
    assert chi_square(drawn[wrong[drawn] > 0], wrong) > 100


def test_report_070_same_seed_same_tokens() -> None:
    logits = random_logits()

    def drawn(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [sample_logits(logits, generator=generator).tolist() for _ in range(20)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    before = torch.get_rng_state()
    drawn(3)
    assert torch.equal(torch.get_rng_state(), before), "a generator leaves the global one alone"


def test_report_070_a_rows_tokens_do_not_depend_on_its_batch_mates() -> None:
    mine = random_logits(8)

    def first_row(mates: Tensor) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        steps = [torch.stack([row, *mates]) for row in mine]
        return [int(sample_logits(s, top_k=20, generator=generator)[0]) for s in steps]

    ended = torch.full((3, D_VOCAB), -math.inf)
    ended[:, 0] = 0.0  # rows that can only say EOS
    assert first_row(random_logits(3)) == first_row(ended) == first_row(torch.zeros(3, D_VOCAB))


def test_without_a_generator_the_global_seed_counts() -> None:
    logits = random_logits()
    torch.manual_seed(5)
    first = draw(logits)
    torch.manual_seed(5)
    assert torch.equal(draw(logits), first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits = random_logits().repeat(500, 1).to(dtype)
    one, other = (torch.Generator().manual_seed(0) for _ in range(2))
    drawn = sample_logits(logits, top_p=0.9, generator=one)
    assert drawn.dtype == torch.long
    if dtype != torch.float64:
        assert torch.equal(drawn, sample_logits(logits.float(), top_p=0.9, generator=other))


def test_impossible_tokens_are_never_drawn() -> None:
    """Not even where the noise is as extreme as it gets: -inf stays -inf and never NaN."""
    logits = torch.full((2000, 5), -math.inf)
    logits[:, 2] = -1e30
    assert (draw(logits) == 2).all()


def test_the_logits_passed_in_are_left_alone() -> None:
    logits = random_logits()
    before = logits.clone()
    everything = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "temperature": 0.5}
    tokens = torch.randint(D_VOCAB, (6, 4))
    sample_logits(logits, **everything, freq_penalty=1.0, repetition_penalty=2.0, tokens=tokens)
    assert torch.equal(logits, before)
