"""`verify`: both models side by side, place by place, for every family and for a user's own."""

import inspect
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_families import FAMILIES

import weights_conversion
from transformer_lens_lite import HookedTransformer, verification, verify
from transformer_lens_lite.__main__ import main
from weights_conversion.families import llama
from weights_conversion.table import Map, override


@pytest.mark.parametrize("name", [*FAMILIES.values(), "opt_350m", "opt_no_last_norm"])
def test_every_family_is_equal_at_every_place_its_table_names(name: str) -> None:
    result = verify(tiny.build(name), tokens=tiny.tokens(tiny.config(name), length=34), n_greedy=5)
    assert result.passed, str(result)
    assert result.first_difference is None
    assert max(result.errors.values()) < 1e-4
    assert result.greedy == result.of_greedy == 10
    layers = range(2) if name == "opt_350m" else range(3)  # its last one comes out narrowed
    assert all(result.of_layer(layer) is not None for layer in layers)
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


# --- numbers that are none, continuations that part -----------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.no_grad()
def test_nan_is_a_difference_with_its_first_place(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_model = tiny.build("llama")
    hf_model.model.layers[1].self_attn.v_proj.weight[3] = float("nan")
    result = verify(hf_model.to(dtype))
    assert not result.passed
    assert result.differing == ["places", "logits", "loss"]
    assert result.first_difference == "blocks.1.attn.hook_v"
    assert "part first at blocks.1.attn.hook_v = output of " in str(result)
    assert "v_proj (nan)" in str(result)
    assert math.isnan(result.of_layer(1))
    assert result.of_layer(0) < 1e-2
    assert (result.greedy, result.of_greedy) == (0, 0)
    hf_model.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--dtype", str(dtype)]) == 1
    assert "layer   1  nan" in capsys.readouterr().out


@torch.no_grad()
def test_a_continuation_that_parts_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one token that Hugging Face's logits put far behind; at a near tie it says nothing."""
    hf_model = tiny.build("llama")
    tokens = tiny.tokens(hf_model.config, length=9)
    right = verify(hf_model, tokens=tokens)
    assert right.passed
    assert (right.greedy, right.of_greedy, right.greedy_gap) == (40, 40, 0.0)
    generate = HookedTransformer.generate

    def third_token_by_rank(rank: int) -> Any:
        """Our generation with its third token replaced by the one of this rank."""

        def changed(self: HookedTransformer, ids: torch.Tensor, *args: Any, **named: Any) -> Any:
            made = generate(self, ids, *args, **named)
            order = self(made[:, : ids.shape[1] + 2])[:, -1].argsort(-1, descending=True)
            made[:, ids.shape[1] + 2] = order[:, rank]
            return made

        return changed

    gaps = []
    for rank in (1, 20):
        monkeypatch.setattr(HookedTransformer, "generate", third_token_by_rank(rank))
        result = verify(hf_model, tokens=tokens)
        assert not result.passed
        assert result.differing == ["greedy"]
        assert (result.greedy, result.of_greedy) == (4, 40)
        assert f"part first at the greedy tokens, by {result.greedy_gap:.1e} of" in str(result)
        gaps.append(result.greedy_gap)
        assert verify(hf_model, tokens=tokens, tolerance=1.001 * result.greedy_gap).passed
    assert gaps[0] < gaps[1]


@torch.no_grad()
def test_a_continuation_without_numbers_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_numbers(*args: Any, **named: Any) -> Any:
        raise ValueError("logits are NaN, +inf or all -inf in batch row(s) [0]")

    monkeypatch.setattr(HookedTransformer, "generate", no_numbers)
    result = verify(tiny.build("llama"))
    assert result.differing == ["greedy"]
    assert math.isnan(result.greedy_gap)


def test_a_loss_that_differs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([5.0, 5.001])
    monkeypatch.setattr(verification, "lm_cross_entropy_loss", lambda *_: next(losses))
    result = verify(tiny.build("llama"), n_greedy=0)
    assert result.differing == ["loss"]
    assert not result.passed
    assert "part first at the loss" in str(result)
    assert replace(result, tolerance=1e-3).passed


def test_penalties_of_a_generation_config_are_not_part_of_the_comparison() -> None:
    hf_model = tiny.build("gpt2")
    given = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "eos_token_id": 3}
    hf_model.generation_config.update(**given)
    result = verify(hf_model)
    assert result.greedy == result.of_greedy == 40
    assert hf_model.generation_config.repetition_penalty == 5.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n_greedy": -1}, ValueError, "n_greedy must be at least 0, got -1"),
        ({"n_greedy": 2.5}, TypeError, "n_greedy must be an integer, got 2.5"),
        ({"n_greedy": True}, TypeError, "n_greedy must be an integer, got True"),
        ({"tolerance": "1e-4"}, TypeError, "tolerance must be a number, got '1e-4'"),
        ({"tolerance": -1.0}, ValueError, "tolerance must be a finite number of at least 0"),
        ({"tolerance": float("nan")}, ValueError, "tolerance must be a finite number"),
        ({"tolerance": float("inf")}, ValueError, "tolerance must be a finite number"),
        ({"tokens": [[1, 2]]}, TypeError, r"tokens must be a tensor \[batch, pos\], got a list"),
        ({"dtype": "float31"}, ValueError, "unknown dtype 'float31'"),
        ({"n_gredy": 3}, TypeError, "verify.. has no argument 'n_gredy'. Did you mean 'n_greedy'"),
    ],
)
def test_arguments_are_checked_before_anything_is_loaded(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    start: Any = inspect.unwrap(verify)  # past its annotations, which tests check
    start = verify if "n_gredy" in arguments else start
    with pytest.raises(error, match=message):
        start("a folder that is not there", **arguments)


def test_a_mistake_in_a_users_table_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(monkeypatch, residual_scal=0.5)
    tiny.build("llama").save_pretrained(tmp_path)
    capsys.readouterr()  # of saving
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "table of 'llama' sets 'residual_scal', which is no field of" in said
    assert "Did you mean 'residual_scale'" in said
    assert said.count("\n") == 1

    def with_row(pattern: str) -> None:
        new = Map("model.norm.weight", "ln_final.w", pattern)
        rows = lambda cfg, reading: override(llama.rows(cfg, reading), new)  # noqa: E731
        family = replace(llama.LLAMA, rows=rows)
        monkeypatch.setitem(weights_conversion._REGISTRY, "llama", family)
        assert main(["verify", str(tmp_path)]) == 1

    with_row("z -> z")
    assert "a pattern has 'z', which is no size" in capsys.readouterr().err
    with_row("m -> m f")
    said = capsys.readouterr().err
    assert "llama table, row model.norm.weight: the pattern 'm -> m f' does not fit [24]" in said
    assert said.count("\n") == 1


def test_an_internlm_of_ours_has_nothing_to_be_compared_with() -> None:
    cfg = HookedTransformer.from_pretrained_no_processing("tiny-lens", device="cpu").cfg
    model = HookedTransformer(replace(cfg, original_architecture="InternLM2ForCausalLM"))
    with pytest.raises(ValueError, match="no class for a InternLM2ForCausalLM: nothing to compare"):
        verify(model)
