"""Training: initial weights, gradients through every path, compiled code, no state left behind."""

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import native
import pytest
import torch
from torch import Tensor

from transformer_lens_lite import HookedTransformer, HookedTransformerConfig
from transformer_lens_lite.kv_cache import KeyValueCache


def gradients(model: HookedTransformer, **arguments: Any) -> dict[str, Tensor]:
    """Of the loss, by parameter; parameters that got none are left out."""
    model.zero_grad(set_to_none=True)
    arguments.setdefault("attention_mask", None)
    tokens = native.tokens()
    # a model that sees the next token has no loss of its own
    model.loss_fn(model(tokens, **arguments), tokens, arguments["attention_mask"]).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        atol = 2e-5 * max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(
            ours[name], grad, atol=atol, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


def listening_to_all(model: HookedTransformer, optional: bool = False) -> list[tuple[str, Any]]:
    """Hooks that only look: at every point, the optional ones too if asked."""
    return [
        (name, lambda value, hook: None)
        for name, point in model.hook_dict.items()
        if not point.optional or (optional and not name.endswith("attn_in"))
    ]


def left_padding() -> Tensor:
    mask = torch.ones_like(native.tokens())
    mask[0, :5] = 0
    return mask


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", native.VARIANTS)
def test_gradients_are_equal_fused_explicit_and_split_and_reach_every_parameter(name: str) -> None:
    model = native.build(name)
    fused = gradients(model)
    expected = {n for n, p in model.named_parameters() if p.requires_grad}
    idle = {n for n in expected - fused.keys() if ".experts." in n}  # chosen for no token here
    assert fused.keys() == expected - idle
    assert {n.split(".")[-1] for n, g in fused.items() if not g.any()} <= {"W_pos"}
    for optional in (False, True):
        with model.hooks(fwd_hooks=listening_to_all(model, optional)):
            assert_same_gradients(gradients(model), fused)


@pytest.mark.parametrize("name", ["plain", "everything", "sinks_window_grouped", "alibi"])
def test_gradients_of_a_padded_batch_are_equal_fused_and_explicit(name: str) -> None:
    model = native.build(name)
    fused = gradients(model, attention_mask=left_padding())
    with model.hooks(fwd_hooks=listening_to_all(model)):
        assert_same_gradients(gradients(model, attention_mask=left_padding()), fused)
    other = native.tokens().clone()
    other[0, :5] = 3  # what stands in the padding does not matter
    model(other, return_type="loss", attention_mask=left_padding()).backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_same_gradients(found, fused)


@pytest.mark.parametrize("name", ["plain", "grouped_rotary", "everything"])
def test_report_057_gradients_flow_through_a_cache(name: str) -> None:
    model = native.build(name)
    tokens, whole = native.tokens(), {}
    for chunked in (False, True):
        model.zero_grad(set_to_none=True)
        if chunked:
            cache = KeyValueCache.init_cache(model.cfg, "cpu", 2)
            sizes = ((0, 5), (5, 6), (6, 13))
            parts = [model(tokens[:, a:b], past_kv_cache=cache) for a, b in sizes]
            logits = torch.cat(parts, 1)
        else:
            logits = model(tokens)
        logits.square().mean().backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if chunked:
            assert_same_gradients(found, whole)
        whole = found


DOUBLE = ["plain", "grouped_rotary", "everything", "sinks", "solu_ln", "shortformer", "parallel"]


@pytest.mark.parametrize("name", DOUBLE)
@pytest.mark.parametrize("listening", [False, True])
def test_report_154_gradcheck_in_double_precision(name: str, listening: bool) -> None:
    """Numerical derivatives by every parameter, along random directions."""
    model = native.build(name, d_model=6, d_head=4, d_mlp=5, rotary_dim=None)
    model.to(torch.float64)
    tokens = native.tokens(1, 6)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def loss(*changed: Tensor) -> Tensor:
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        state = dict(zip(names, changed, strict=True))
        return torch.func.functional_call(model, state, (tokens,), {"return_type": "loss"})

    with model.hooks(fwd_hooks=listening_to_all(model) if listening else []):
        inputs = tuple(p.detach().clone().requires_grad_() for p in parameters)
        assert torch.autograd.gradcheck(loss, inputs, fast_mode=True, eps=1e-6, atol=1e-4)


def test_gradients_reach_embeddings_given_from_outside() -> None:
    model = native.build("rotary")
    embedded = model.embed(native.tokens()).detach().requires_grad_()
    model(embedded, start_at_layer=0).sum().backward()
    assert embedded.grad.abs().amax(-1).min() > 0


# --- modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", native.VARIANTS)
@torch.no_grad()
def test_report_154_train_and_eval_are_the_same(name: str) -> None:
    model = native.build(name)
    trained = model.train()(native.tokens())
    assert model.training
    assert torch.equal(model.eval()(native.tokens()), trained)


def test_generation_does_not_change_the_mode_or_the_gradients() -> None:
    model = native.build().train()
    before = gradients(model)
    model.generate(native.tokens(), max_new_tokens=3, stop_at_eos=False, verbose=False)
    assert model.training
    after = gradients(model)
    assert all(torch.equal(after[name], grad) for name, grad in before.items())


@torch.no_grad()
def test_a_forward_leaves_nothing_behind() -> None:
    """Short after long, padded after unpadded, captured after plain: as if it were the first."""
    for name in ("plain", "longrope", "everything", "alibi"):
        fresh = {}
        runs = {
            "long": lambda model: model(native.tokens(2, 30)),
            "short": lambda model: model(native.tokens(3, 4)),
            "padded": lambda model: model(native.tokens(), attention_mask=left_padding()),
            "captured": lambda model: model.run_with_cache(native.tokens())[0],
            "generated": lambda model: model.generate(
                native.tokens(), max_new_tokens=4, do_sample=False, stop_at_eos=False, verbose=False
            ),
        }
        for what, run in runs.items():
            fresh[what] = run(native.build(name))
        model = native.build(name)
        for what in ("long", "short", "padded", "generated", "long", "captured", "short", "padded"):
            assert torch.equal(runs[what](model), fresh[what]), (name, what)


@pytest.mark.parametrize("name", ["plain", "everything", "tied", "xielu"])
def test_a_deep_copy_is_a_model_of_its_own(name: str) -> None:
    model = native.build(name)
    model.add_perma_hook("hook_embed", lambda value, hook: value * 0.5)
    before = model(native.tokens())
    copied = copy.deepcopy(model)
    assert torch.equal(copied(native.tokens()), before)
    assert not {p.data_ptr() for p in model.parameters()} & {
        p.data_ptr() for p in copied.parameters()
    }
    assert list(copied.hook_dict) == list(model.hook_dict)
    assert not {id(p) for p in copied.hook_points()} & {id(p) for p in model.hook_points()}
    copied.reset_hooks(including_permanent=True)
    copied.cfg.eps = 1.0
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(model(native.tokens()), before)
    _, cache = copied.run_with_cache(native.tokens())
    assert set(cache) == {n for n, p in copied.hook_dict.items() if not p.optional}


# --- learning -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "grouped_rotary"])
def test_report_154_eight_sequences_are_memorised_in_200_steps(name: str) -> None:
    cfg = HookedTransformerConfig(
        **{**native.SIZES, **native.VARIANTS[name], "d_model": 32, "d_mlp": 64, "seed": 0}
    )
    model = HookedTransformer(cfg)
    tokens = 8 + native.tokens(8, 10, d_vocab=15)
    tokens[:, 0] = torch.arange(8)  # the first token tells them apart, and occurs nowhere else
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(200):
        loss = model(tokens, return_type="loss")
        if step == 0:
            assert loss > 2.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.01:
            break
    assert loss < 0.1
    with torch.no_grad():
        continued = model.generate(
            tokens[:, :1], max_new_tokens=9, do_sample=False, stop_at_eos=False, verbose=False
        )
    assert torch.equal(continued, tokens)


LARGE = {
    "n_layers": 2, "d_model": 64, "d_head": 16, "n_heads": 4, "d_mlp": 200, "n_ctx": 100,
    "d_vocab": 300, "act_fn": "gelu", "device": "cpu",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama": {**native.ROTARY, **native.GROUPED, **native.RMS, "gated_mlp": True},
}


@pytest.mark.parametrize("init_mode", ["gpt2", "xavier_normal", "xavier_uniform", "muP"])
@torch.no_grad()
def test_report_147_an_untrained_model_knows_nothing(init_mode: str) -> None:
    """Its loss is that of guessing, within 5 % (muP, small by design; xavier, a little louder)."""
    cfg = HookedTransformerConfig(**LARGE, init_mode=init_mode, seed=1)
    tokens = torch.randint(300, (8, 50), generator=torch.Generator().manual_seed(0))
    loss = HookedTransformer(cfg)(tokens, return_type="loss")
    slack = {"gpt2": 0.1, "xavier_normal": 0.1, "xavier_uniform": 0.1, "muP": 0.05}[init_mode]
    assert abs(loss / math.log(300) - 1) < slack


def fans(name: str) -> tuple[int, int]:
    """(inputs, outputs) of each weight of a LARGE model with 4 heads of 16."""
    inner = name.rsplit(".", 1)[-1].removeprefix("_")
    heads = 32 if name.rsplit(".", 1)[-1].startswith("_") else 64
    return {
        "W_E": (1, 64), "W_pos": (1, 64), "W_U": (64, 300),
        "W_Q": (64, 64), "W_K": (64, heads), "W_V": (64, heads), "W_O": (64, 64),
        "W_in": (64, 200), "W_gate": (64, 200), "W_out": (200, 64),
    }[inner]  # fmt: skip


def expected_std(mode: str, gain: float, name: str) -> float:
    inputs, outputs = fans(name)
    if mode == "gpt2":
        return 0.8 / 8 if gain < 0 else gain
    gain = 1.0 if gain < 0 else gain
    if mode.startswith("xavier"):
        return gain * math.sqrt(2 / (inputs + outputs))
    if mode.startswith("kaiming"):
        return gain * math.sqrt(2 / inputs)
    return gain / inputs if name.endswith("W_U") else gain / math.sqrt(inputs)


MODES = ["gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "muP"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gain", [-1.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_report_146_initial_weights_have_the_documented_statistics(
    mode: str, gain: float, kind: str
) -> None:
    cfg = HookedTransformerConfig(
        **LARGE, **KINDS[kind], init_mode=mode, initializer_range=gain, seed=3
    )
    for name, parameter in HookedTransformer(cfg).named_parameters():
        values = parameter.detach()
        if "W_" in name:
            std = expected_std(mode, gain, name)
            assert values.std() == pytest.approx(std, rel=0.05), name
            assert abs(values.mean()) < 0.08 * std, name
            farthest = values.abs().max() / std
            if mode.endswith("uniform"):
                assert 1.7 < farthest <= math.sqrt(3) + 1e-4, name
            else:
                assert farthest > 2.5, name
        else:
            assert torch.equal(values, torch.full_like(values, name.endswith(".w"))), name


def test_report_146_a_hundred_seeds_give_finite_and_different_weights() -> None:
    sums = set()
    for seed in range(100):
        mode = MODES[seed % len(MODES)]
        name = list(native.VARIANTS)[seed % len(native.VARIANTS)]
        model = HookedTransformer(native.config(name, seed=seed, init_mode=mode))
        assert all(p.isfinite().all() for p in model.parameters())
        with torch.no_grad():
            assert model(native.tokens()).isfinite().all()
        sums.add(float(model.W_E.detach().sum()))
    assert len(sums) == 100


def test_report_146_a_seed_fixes_the_weights_and_no_seed_follows_the_global_one() -> None:
    def weights(**changes: Any) -> Tensor:
        return torch.cat(
            [p.flatten() for p in HookedTransformer(native.config(**changes)).parameters()]
        )

    seeded = weights(seed=7)
    torch.manual_seed(5)
    torch.rand(3)
    assert torch.equal(weights(seed=7), seeded)
    assert torch.equal(weights(seed=7, dtype=torch.float64).float(), seeded)
    assert not torch.equal(weights(seed=8), seeded)
    torch.manual_seed(5)
    first = weights()
    assert not torch.equal(weights(), first)
    torch.manual_seed(5)
    assert torch.equal(weights(), first)


def test_report_146_without_a_seed_nothing_global_is_reset() -> None:
    torch.manual_seed(11)
    drawn = torch.rand(1)
    torch.manual_seed(11)
    native.config()
    assert torch.equal(torch.rand(1), drawn)


def test_init_weights_draws_anew_and_can_be_left_out() -> None:
    model = native.build()
    loud = model.W_E.detach().clone()
    model.init_weights()
    assert not torch.equal(model.W_E, loud)
    assert model.W_E.detach().std() == pytest.approx(0.8 / math.sqrt(14), rel=0.2)
    cfg = native.config(init_weights=False)
    HookedTransformer(cfg).load_state_dict(model.state_dict())


def test_half_precision_models_train() -> None:
    model = native.build().to(torch.bfloat16)
    for grad in gradients(model).values():
        assert grad.dtype == torch.bfloat16
        assert grad.isfinite().all()


# --- compiled -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_104_generated_code_agrees_for_plain_and_rotary_grouped_models(
    project_root: Path,
) -> None:
    """torch.compile(fullgraph=True) with its own backend; other variants: see `test_features`."""
    command = [sys.executable, "tests/compiled.py", "inductor", "plain", "window_rotary_grouped"]
    run = subprocess.run(
        command,
        cwd=project_root,
        env={**os.environ, "PYTHONPATH": str(project_root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for found in json.loads(run.stdout.splitlines()[-1]).values():
        assert found.pop("graphs") == 3
        assert max(found.values()) < 1e-4
