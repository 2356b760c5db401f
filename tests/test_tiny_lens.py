"""The model in the box: loaded as any other, and as good as its card says."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_lens_lite import HookedTransformer
from transformer_lens_lite.pretrained import tiny_language

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "transformer_lens_lite" / "pretrained" / "tiny_lens"
CARD = json.loads((FOLDER / "card.json").read_text())


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """The training script's own evaluation, on the shipped weights."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import train_tiny_lens
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    model = HookedTransformer.from_pretrained_no_processing("tiny-lens", device="cpu")
    return train_tiny_lens.evaluate(model, train_tiny_lens.build_tokenizer())


def test_the_card_tells_the_truth(measured: dict[str, Any]) -> None:
    for order in ("ABBA", "BABA"):
        card = CARD[f"indirect_object_{order}"]["top1"]
        assert measured[f"indirect_object_{order}"]["top1"] == pytest.approx(card, abs=0.01)
    assert measured["held_out_loss"] == pytest.approx(CARD["held_out_loss"], abs=0.01)
    assert measured["facts"]["top1"] == pytest.approx(CARD["facts"]["top1"], abs=0.02)


def test_held_out_indirect_objects_are_right(measured: dict[str, Any]) -> None:
    for order in ("ABBA", "BABA"):
        assert measured[f"indirect_object_{order}"]["top1"] > 0.95


def test_it_has_induction_heads(measured: dict[str, Any]) -> None:
    repeats = measured["repeats"]
    assert max(repeats["induction_scores"].values()) > 0.5
    assert repeats["second_half_loss"] < repeats["first_half_loss"] / 3


def test_it_is_small_and_safe() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 3_000_000
    assert not list(FOLDER.glob("*.bin"))


def test_held_out_pairs_never_meet_in_training() -> None:
    sentences = tiny_language.sentences(seed=3)
    for _ in range(3000):
        sentence = next(sentences)
        names = [name for name in tiny_language.NAMES if name in sentence.replace(".", "").split()]
        assert not any(tiny_language.is_held_out(a, b) for a in names for b in names if a < b), (
            sentence
        )


def test_sentences_survive_the_tokenizer() -> None:
    model = HookedTransformer.from_pretrained_no_processing("tiny-lens", device="cpu")
    for example in tiny_language.indirect_object_sentences(20, seed=5):
        tokens = model.to_tokens(example.prompt, prepend_bos=False)
        assert model.to_string(tokens[0]) == example.prompt
        assert model.to_single_token(example.io) != model.to_single_token(example.subject)


def test_hugging_face_loads_it_too() -> None:
    from transformers import AutoModelForCausalLM

    hf_model = AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    model = HookedTransformer.from_pretrained_no_processing("tiny-lens", device="cpu")
    tokens = model.to_tokens("When Mary and John went to the store, John gave a drink to")
    with torch.no_grad():
        assert torch.allclose(model(tokens), hf_model(tokens).logits, atol=1e-4)
