"""`verify`: both models side by side, place by place, for every family and for a user's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_families import FAMILIES

import weights_conversion
from transformer_lens_lite import HookedTransformer, verify
from transformer_lens_lite.__main__ import main
from weights_conversion.families import llama


@pytest.mark.parametrize("name", FAMILIES.values())
def test_every_family_is_equal_at_every_place_its_table_names(name: str) -> None:
    result = verify(tiny.build(name), tokens=tiny.tokens(tiny.config(name), length=34), n_greedy=5)
    assert result.passed, str(result)
    assert result.first_difference is None
    assert max(result.errors.values()) < 1e-4
    assert result.greedy == result.of_greedy == 10
    assert all(result.of_layer(layer) is not None for layer in range(3))
    # not only what enters and leaves a layer
    assert {key.rsplit(".", 1)[-1] for key in result.errors} > {"hook_z", "hook_resid_post"}


def broken(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Llama's table with a mistake in it, as a user might have written it."""

    def read_config(reading: Any) -> dict[str, Any]:
        return {**llama.read_config(reading), **changes}

    family = replace(llama.LLAMA, read_config=read_config)
    monkeypatch.setitem(weights_conversion._REGISTRY, "llama", family)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"eps": 0.5}, "blocks.0.attn.hook_q"),
        ({"act_fn": "gelu"}, "blocks.0.mlp.hook_post"),
        ({"attn_scale": 1.0}, "blocks.0.attn.hook_z"),
        ({"residual_scale": 0.5}, "blocks.0.hook_resid_mid"),
    ],
)
def test_a_mistake_is_found_where_it_is_made(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], first: str
) -> None:
    broken(monkeypatch, **changes)
    hf_model = tiny.build("llama")
    result = verify(hf_model, tokens=tiny.tokens(hf_model.config))
    assert not result.passed
    assert result.first_difference == first
    assert f"NOT equal up to 1e-04; they part first at {first} = " in str(result)


def test_report_134_a_family_that_a_user_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = dict(weights_conversion._REGISTRY)
    theirs = registry.pop("seed_oss")
    monkeypatch.setattr(weights_conversion, "_REGISTRY", registry)
    hf_model = tiny.build("seed_oss")
    supported = r"(?s)'seed_oss' is not supported.*gpt2.*llama.*qwen3"
    with pytest.raises(ValueError, match=supported):
        verify(hf_model)
    weights_conversion.register_architecture("seed_oss", theirs)
    result = verify(hf_model)
    assert result.passed
    assert result.family == "seed_oss"


def test_a_model_of_ours_is_compared_with_its_export() -> None:
    model = HookedTransformer.from_pretrained_no_processing("tiny-lens")
    assert verify(model).passed
    with pytest.raises(ValueError, match="were processed"):
        verify(HookedTransformer.from_pretrained("tiny-lens"))


def test_the_model_that_is_verified_stays_as_it_was() -> None:
    hf_model = tiny.build("gpt2")
    hf_model.generation_config.update(eos_token_id=5, pad_token_id=7)
    before = hf_model.generation_config.to_dict()
    assert verify(hf_model).of_greedy
    assert hf_model.generation_config.to_dict() == before


def test_half_precision_has_a_tolerance_of_its_own() -> None:
    result = verify("tiny-lens", dtype="bf16")
    assert result.passed
    assert result.dtype == torch.bfloat16
    assert 1e-4 < result.logits < result.tolerance
    assert not verify("tiny-lens", dtype="bf16", tolerance=1e-4).passed


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.build("gpt2").save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "gpt2, float32: " in said
    assert "layer   2" in said
    assert said.rstrip().endswith("equal up to 1e-04")
    assert main(["verify", str(tmp_path), "--tolerance", "1e-12"]) == 1
    assert "NOT equal" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_what_there_is_nothing_to_compare_with_is_said(tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained("tiny-lens")
    model.save_pretrained(tmp_path, native=True)
    with pytest.raises(ValueError, match="nothing to compare with"):
        verify(tmp_path)
    with pytest.raises(ValueError, match="no Hugging Face model"):
        verify(torch.nn.Linear(2, 2))
    hf_model = tiny.build("llama").train()
    with pytest.raises(ValueError, match="outside the vocabulary"):
        verify(hf_model, tokens=torch.full((1, 4), 999))
    with pytest.raises(ValueError, match="at least two"):
        verify(hf_model, tokens=torch.zeros(1, 1, dtype=torch.long))
    assert verify(hf_model).passed
    assert hf_model.training


def test_double_precision_and_alibi(tmp_path: Path) -> None:
    assert verify(tiny.build("llama").double()).passed
    tiny.build("falcon_rw").save_pretrained(tmp_path)
    assert verify(tmp_path).passed
