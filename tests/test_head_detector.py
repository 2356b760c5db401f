"""Heads that are made to attend as a pattern says, and found by it."""

from typing import Any

import native
import pytest
import tokenizers_for_tests as toks
import torch
from torch import Tensor

from transformer_lens_lite import HookedTransformer
from transformer_lens_lite import head_detector as hd

TEXT = "the cat sat on the mat and the cat"


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    cfg = native.config("grouped", d_vocab=-1, n_ctx=40)
    return native.loud(HookedTransformer(cfg, toks.gpt2_like()))


def rows(pattern: Tensor) -> Tensor:
    """A pattern as attention: rows that say nothing look at the first position."""
    attention = pattern.clone()
    attention[attention.sum(1) == 0, 0] = 1
    return attention / attention.sum(1, keepdim=True)


def test_the_patterns() -> None:
    tokens = torch.tensor([[3, 5, 7, 5, 3, 5]])
    previous = torch.zeros(6, 6)
    previous[range(1, 6), range(5)] = 1
    assert torch.equal(hd.get_previous_token_head_detection_pattern(tokens), previous)
    duplicate, induction = torch.zeros(6, 6), torch.zeros(6, 6)
    for row, columns in {3: [1], 4: [0], 5: [1, 3]}.items():
        duplicate[row, columns] = 1
        induction[row, [column + 1 for column in columns]] = 1
    assert torch.equal(hd.get_duplicate_token_head_detection_pattern(tokens), duplicate)
    assert torch.equal(hd.get_induction_head_detection_pattern(tokens), induction)
    assert set(hd.HEAD_NAMES) == set(hd.PATTERNS)


@pytest.mark.parametrize(
    ("measure", "bos", "current", "expected"),
    # of the same random matrices, by TransformerLens 3.9.0, which rounds "abs" to three digits
    [
        ("mul", False, False, 0.44197121262550354),
        ("mul", False, True, 0.34792202711105347),
        ("mul", True, False, 0.5100184679031372),
        ("mul", True, True, 0.4260524809360504),
        ("abs", False, False, -0.014),
        ("abs", False, True, 0.434),
        ("abs", True, False, 0.276),
        ("abs", True, True, 0.635),
    ],
)
def test_scores_are_the_classic_ones(
    measure: str, bos: bool, current: bool, expected: float
) -> None:
    torch.manual_seed(0)
    attention = torch.rand(5, 5).tril()
    attention = attention / attention.sum(-1, keepdim=True)
    pattern = torch.rand(5, 5).tril()
    found = hd.compute_head_attention_similarity_score(
        attention,
        pattern,
        exclude_bos=bos,
        exclude_current_token=current,
        error_measure=measure,
    )
    assert abs(found - expected) < (5e-4 if measure == "abs" else 1e-6)


@pytest.mark.parametrize("name", hd.HEAD_NAMES)
def test_a_head_that_does_it_is_found(model: HookedTransformer, name: str) -> None:
    tokens = model.to_tokens(TEXT)
    pattern = hd.PATTERNS[name](tokens)

    def attend(given: Tensor, hook: Any) -> Tensor:
        given[:, 2] = rows(pattern)
        return given

    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", attend)]):
        # the first position, which has nowhere else to look, counts for neither
        excluded = "current_token" if name == "previous_token_head" else "bos"
        found = hd.detect_head(model, TEXT, name, **{f"exclude_{excluded}": True})
        several = hd.detect_head(model, [TEXT, TEXT], name)
        once = hd.detect_head(model, TEXT, pattern)
    assert found.shape == (2, 4)
    assert (found.argmax() == 1 * 4 + 2).all()
    assert abs(found[1, 2] - 1) < 1e-5
    assert (found.flatten().sort().values[:-1] < 0.9).all()
    torch.testing.assert_close(several, once)


def test_every_score_is_that_of_its_head(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(TEXT)
    pattern = hd.get_induction_head_detection_pattern(model.to_tokens(TEXT))
    for measure in ("mul", "abs"):
        options: dict[str, Any] = {"exclude_bos": True, "exclude_current_token": True}
        options["error_measure"] = measure
        found = hd.detect_head(model, TEXT, "induction_head", **options)
        for layer in range(2):
            for head in range(4):
                seen = cache["pattern", layer][0, head]
                one = hd.compute_head_attention_similarity_score(seen, pattern, **options)
                assert abs(found[layer, head] - one) < 1e-5
        kept = hd.detect_head(model, TEXT, "induction_head", cache=cache, **options)
        torch.testing.assert_close(kept, found)
    cache.remove_batch_dim()
    kept = hd.detect_head(model, TEXT, "induction_head", cache=cache, **options)
    torch.testing.assert_close(kept, found)


def test_only_some_heads(model: HookedTransformer) -> None:
    every = hd.detect_head(model, TEXT, "previous_token_head")
    for heads in ([(0, 1), (1, 3)], {0: [1], 1: [3]}):
        some = hd.detect_head(model, TEXT, "previous_token_head", heads)
        torch.testing.assert_close(some[[0, 1], [1, 3]], every[[0, 1], [1, 3]])
        assert (some == -1).sum() == 6


def test_the_mean_over_texts(model: HookedTransformer) -> None:
    texts = [TEXT, "When Mary and John"]
    both = hd.detect_head(model, texts, "previous_token_head")
    each = [hd.detect_head(model, text, "previous_token_head") for text in texts]
    torch.testing.assert_close(both, (each[0] + each[1]) / 2)


def test_what_cannot_be_detected(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(TEXT)
    size = model.to_tokens(TEXT).shape[1]
    wrong: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("Did you mean 'induction_head'", (TEXT, "induction_heads"), {}),
        ("lower triangular", (TEXT, torch.ones(size, size)), {}),
        (rf"\[{size}, {size}\]", (TEXT, torch.ones(3, 3).tril()), {}),
        ("no head L2H0", (TEXT, "induction_head", [(2, 0)]), {}),
        ("no head L0H4", (TEXT, "induction_head", {0: [4]}), {}),
        ("of one text", ([TEXT], "induction_head"), {"cache": cache}),
        ("empty list", ([], "induction_head"), {}),
        ("has 1 tokens", ("", "induction_head"), {}),
        ("from 2 to 39", (TEXT * 20, "induction_head"), {}),
        ("error_measure", (TEXT, "induction_head"), {"error_measure": "sum"}),
        ("the text has", ("When Mary", "induction_head"), {"cache": cache}),
    ]
    for message, arguments, options in wrong:
        with pytest.raises(ValueError, match=message):
            hd.detect_head(model, *arguments, **options)
    with pytest.raises(ValueError, match="lower triangular"):
        hd.compute_head_attention_similarity_score(
            torch.ones(3, 3).tril(),
            torch.ones(3, 3),
            exclude_bos=False,
            exclude_current_token=False,
            error_measure="mul",
        )


def test_the_names_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    hd.get_supported_heads()
    assert "duplicate_token_head" in capsys.readouterr().out
