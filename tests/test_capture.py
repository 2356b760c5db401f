"""Capturing: CaptureSpec, capture(), generate(return_cache=…), and caches as places to look up.

Tests are named after the rows of the specification (A1 … E2).
"""

import copy
import functools
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_ident
from typing import Any

import loud
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from transformer_lens_lite import (
    ActivationCache,
    CaptureSpec,
    HookedTransformer,
    HookPoint,
    KeyValueCache,
    UnknownHookError,
    capture,
)
from transformer_lens_lite.capture import Recorder
from transformer_lens_lite.components.mlp import GatedMLP

P, N = 5, 4  # columns of the prompts, and new tokens
POSITIONS = pytest.mark.parametrize(
    "kind", ["standard", "rotary_gqa", "alibi", "shortformer", "none", "rotary_window"]
)
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


def assert_close(cache: Any, other: Any, names: Any = None) -> None:
    for name in names or other:
        torch.testing.assert_close(cache[name], other[name], **CLOSE, msg=lambda m, n=name: n + m)


def generated(model: HookedTransformer, ids: Tensor, wanted: Any = True, **more: Any) -> Any:
    return model.generate(
        ids, max_new_tokens=N, do_sample=False, stop_at_eos=False, return_cache=wanted, **more
    )


def zero(value: Tensor, hook: HookPoint) -> Tensor:
    return torch.zeros_like(value)


# --- A: capturing ---------------------------------------------------------------------------------

SPECS = [
    CaptureSpec("blocks.1.hook_resid_post"),
    CaptureSpec("resid_post"),
    CaptureSpec(("pattern", -1)),
    CaptureSpec(["blocks.*.attn.hook_[qk]", "hook_embed"]),
    CaptureSpec(lambda name: name.endswith("hook_z")),
    CaptureSpec(["resid_mid", ("v", 1)], layers=[1, 2]),
    CaptureSpec(layers=slice(0, 2)),
    CaptureSpec(),
]


@pytest.mark.parametrize("spec", SPECS)
def test_A1_selected_sites_of_one_run_and_no_others(spec: CaptureSpec) -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, P)
    _, everything = model.run_with_cache(ids)
    _, cache = model.run_with_cache(ids, names_filter=spec)
    with model.capture(spec) as captured:
        model(ids)
    assert set(cache) == set(captured) == set(spec.resolve(model))
    for name in cache:
        torch.testing.assert_close(cache[name], everything[name], **CLOSE)
        torch.testing.assert_close(captured[name], everything[name], **CLOSE)


@POSITIONS
def test_A2_every_step_of_a_generation_is_one_forward_over_all(kind: str) -> None:
    model, ids = loud.build(kind), loud.tokens(2, P)
    names = [n for n in model.hook_dict if not n.endswith(("attn_in", "_input"))]
    out, cache = generated(model, ids, names)
    _, whole = model.run_with_cache(out, names_filter=names)
    assert set(cache) == set(whole)
    assert_close(cache, whole)
    assert torch.equal(cache.tokens, out)
    assert torch.equal(cache.attention_mask, torch.ones_like(out))


@pytest.mark.parametrize("kind", ["standard", "rotary_gqa", "alibi", "rotary_window"])
def test_A2_under_hooks_that_act_on_every_step(kind: str) -> None:
    model, ids = loud.build(kind), loud.tokens(2, P)
    steering = torch.randn(24, generator=torch.Generator().manual_seed(4))

    def steer(value: Tensor, hook: HookPoint) -> Tensor:
        return value + steering

    with model.hooks([("blocks.1.hook_resid_pre", steer)]):
        out, cache = generated(model, ids)
        _, whole = model.run_with_cache(out)
    assert_close(cache, whole)
    assert not torch.equal(out, generated(model, ids)[0])


@POSITIONS
def test_report_064_what_generated_tokens_were_made_of_is_that_of_the_whole_text(kind: str) -> None:
    """One left-padded batch, each column once, where it was asked to be kept."""
    model = loud.build(kind)
    rows, ids, mask = loud.ragged([3, 5])
    names = ["resid_post", "mlp_out", "z"]
    out, cache = generated(model, ids, names, attention_mask=mask)
    assert cache["resid_post", 0].shape[:2] == out.shape == (2, P + N)
    whole_mask = torch.cat((mask, torch.ones(2, N, dtype=torch.long)), 1)
    _, whole = model.run_with_cache(out, attention_mask=whole_mask, names_filter=names)
    assert len(whole) == len(cache) == 9
    for name, value in whole.items():
        for i, row in enumerate(rows):
            start = P - row.shape[1]
            torch.testing.assert_close(cache[name][i, start:], value[i, start:], **CLOSE)
            steps = torch.cat([step[i] for step in cache.steps(name)])
            assert torch.equal(steps, cache[name][i])
    spec = CaptureSpec(names, device="meta")
    again, elsewhere = generated(model, ids, spec, attention_mask=mask)
    assert torch.equal(again, out)
    assert {value.device.type for value in elsewhere.values()} == {"meta"}


def test_A2_a_generation_without_a_key_value_cache_is_captured_alike() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, P)
    out, cache = generated(model, ids)
    again, uncached = generated(model, ids, use_past_kv_cache=False)
    assert torch.equal(out, again)
    assert set(cache) == set(uncached)
    assert_close(uncached, cache)
    assert torch.equal(uncached.tokens, out)
    assert [len(uncached.steps("resid_post", i)) for i in range(3)] == [N + 1] * 3


def test_A3_each_call_by_its_number() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, P)
    _, cache = generated(model, ids, include_last=False)
    name = "blocks.1.hook_resid_post"
    shapes = [tuple(step.shape) for step in cache.steps(name)]
    assert shapes == [(2, P, 24)] + [(2, 1, 24)] * (N - 1)
    assert torch.equal(cache[f"{name}:1"], cache[name][:, :P])
    assert torch.equal(cache["resid_post:1", 1], cache.prefill[name])
    assert torch.equal(torch.cat(cache.steps("resid_post", 1), 1), cache[name])
    assert torch.equal(cache.step(2)[name], cache[f"{name}:3"])
    assert torch.equal(cache.decode[name], cache[name][:, P:])
    pattern = cache["pattern:3", 0]
    assert pattern.shape == (2, 4, 1, P + 2)  # the keys that step has seen
    with pytest.raises(KeyError, match=r"there are 4 calls \(1, 2, 3, 4\)"):
        cache[f"{name}:9"]
    with pytest.raises(KeyError, match="step 7 is not in this cache"):
        cache.step(7)


def test_A4_the_last_token_costs_one_forward() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    forwards = []
    model.add_hook("hook_embed", lambda value, hook: forwards.append(value.shape[1]))
    out, cache = generated(model, ids, "resid_post")
    assert cache["resid_post", 0].shape == (2, P + N, 24)
    assert forwards == [P] + [1] * N
    assert torch.equal(cache.tokens, out)
    forwards.clear()
    again, cache = generated(model, ids, "resid_post", include_last=False)
    assert cache["resid_post", 0].shape == (2, P + N - 1, 24)
    assert forwards == [P] + [1] * (N - 1)
    assert torch.equal(again, out)
    assert torch.equal(cache.tokens, out[:, :-1])


def test_A4_a_given_cache_does_not_grow_by_the_last_token() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    given = KeyValueCache.init_cache(model.cfg, batch_size=2)
    _, cache = generated(model, ids, "resid_post", past_kv_cache=given)
    assert given.length == P + N - 1
    assert not given.frozen
    assert cache["resid_post", 0].shape[1] == P + N


def test_A5_inputs_and_outputs_of_modules() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    seen: list[Any] = []
    handle = model.blocks[1].mlp.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    spec = CaptureSpec(["blocks.1.mlp", model.blocks[0]], inputs=True)
    with model.capture(spec) as cache, torch.no_grad():
        model(ids)
    handle.remove()
    _, whole = model.run_with_cache(ids)
    node = cache.blocks[1].mlp
    torch.testing.assert_close(node.output, whole["mlp_out", 1], **CLOSE)
    ((args, kwargs),) = seen
    assert torch.equal(node.input, args[0])
    assert torch.equal(node.inputs[0][0], node.input)
    assert node.inputs[1] == kwargs == {}
    torch.testing.assert_close(cache.blocks[0].output, whole["resid_post", 0], **CLOSE)
    # the context of a forward holds what goes on changing: its name is what is kept
    assert [repr(each) for each in cache.blocks[0].inputs[0][1:]] == ["<ForwardContext, not kept>"]
    assert "blocks.1.mlp" in cache


def test_A5_a_module_without_arguments_and_modules_over_several_steps() -> None:
    class Constant(torch.nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(1, P, 24)

    model, ids = loud.build(), loud.tokens(1, P)
    model.constant = Constant()
    model.setup()
    model.add_hook("hook_embed", lambda value, hook: value + model.constant()[:, : value.shape[1]])
    spec = CaptureSpec(["constant", "blocks.1.attn"], inputs=True)
    with model.capture(spec) as cache:
        model(ids)
    assert cache.constant.input is None
    assert cache.constant.inputs == ((), {})
    model.reset_hooks()
    _, cache = generated(model, ids, CaptureSpec("blocks.1.attn", inputs=True))
    assert cache["blocks.1.attn"].shape == cache.blocks[1].attn.input.shape == (1, P + N, 24)
    assert len(cache.blocks[1].attn) == N + 1
    with pytest.raises(KeyError, match="called 5 times"):
        cache.blocks[1].attn.inputs  # noqa: B018


def test_A5_the_first_keyword_is_the_input_where_nothing_is_positional() -> None:
    class Named(torch.nn.Module):
        def forward(self, *, x: Tensor, times: float) -> Tensor:
            return x * times

    model, ids = loud.build(), loud.tokens(1, P)
    model.named = Named()
    model.setup()
    model.add_hook("hook_embed", lambda value, hook: model.named(x=value, times=2.0))
    with model.capture(CaptureSpec(["named", "hook_embed"], inputs=True)) as cache:
        model(ids)
    torch.testing.assert_close(cache.named.output, 2 * cache.named.input)
    assert cache.named.inputs[1]["times"] == 2.0


def test_A5_specs_that_would_keep_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="would keep nothing"):
        CaptureSpec("resid_post", outputs=False)
    with pytest.raises(ValueError, match="hook points only; name a module"):
        CaptureSpec("resid_post", inputs=True).resolve(loud.build())
    with pytest.raises(KeyError, match="a list of modules, which nobody calls"):
        CaptureSpec("blocks").resolve(loud.build())


def test_A6_one_tensor_by_many_names() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    _, cache = model.run_with_cache(ids)
    same = cache["blocks.1.hook_mlp_out"]
    model.alias("layers", "blocks")
    for other in (
        cache["mlp_out", 1],
        cache.blocks[1].hook_mlp_out.output,
        cache.blocks[-2].mlp.output,
        cache["blocks.1.mlp"],
        cache.layers[1].mlp.output,
    ):
        assert other is same
    assert "mlp" in cache.blocks[1]
    assert "mlpp" not in cache.blocks[1]
    assert "blocks.1.hook_resid_post" in cache.blocks[1].keys()  # noqa: SIM118
    below = cache.blocks[2].attn.keys()
    assert set(below) == {n for n in cache if n.startswith("blocks.2.attn")} | {
        "blocks.2.hook_attn_out"  # what the module itself returned
    }
    assert len(cache.blocks[1].mlp) == 1
    with pytest.raises(AttributeError, match="nothing at 'blocks.1.mpl'. Did you mean 'mlp'"):
        cache.blocks[1].mpl  # noqa: B018
    with pytest.raises(AttributeError, match="nothing at 'blocks.7'"):
        cache.blocks[7]


def test_A6_paths_follow_a_model_whose_parts_were_replaced() -> None:
    model = loud.build()
    assert model.point_at("blocks.1.mlp") == "blocks.1.hook_mlp_out"
    model.blocks[1].hook_mlp_out = torch.nn.Identity()
    model.setup()
    assert model.point_at("blocks.1.mlp") is None
    assert model.point_at("blocks.0.mlp") == "blocks.0.hook_mlp_out"


def test_A6_the_paths_of_hugging_face() -> None:
    import tiny

    hf_model = tiny.build("llama")
    model = HookedTransformer.from_pretrained_no_processing("llama", hf_model=hf_model)
    ids = loud.tokens(2, P, d_vocab=model.cfg.d_vocab)
    _, cache = model.run_with_cache(ids)
    assert cache["model.layers.1"] is cache["resid_post", 1]
    assert cache.layers[1].mlp.output is cache["mlp_out", 1]
    assert cache["model.layers.0.self_attn"] is cache["attn_out", 0]
    assert cache["model.embed_tokens"] is cache["embed"]
    paths = CaptureSpec(["model.layers.1.mlp", "model.layers.0"]).resolve(model)
    assert set(paths) == {"blocks.1.hook_mlp_out", "blocks.0.hook_resid_post"}
    seen = {}
    hf_model.model.layers[1].mlp.register_forward_hook(
        lambda module, args, output: seen.update(mlp=output)
    )
    hf_model(ids)
    torch.testing.assert_close(cache["model.layers.1.mlp"], seen["mlp"], atol=1e-4, rtol=1e-4)


def test_A7_dtype_and_device_are_for_floats() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    spec = CaptureSpec(["hook_tokens", "resid_post"], dtype=torch.bfloat16, device="cpu")
    _, cache = generated(model, ids, spec)
    assert cache["hook_tokens"].dtype == torch.int64
    assert cache["resid_post", 1].dtype == torch.bfloat16
    _, exact = generated(model, ids, "resid_post")
    assert torch.equal(cache["resid_post", 1], exact["resid_post", 1].bfloat16())
    with model.capture(spec) as cache:  # outside of generations, too
        model(ids)
    assert cache["hook_tokens"].dtype == torch.int64
    assert cache["resid_post", 1].dtype == torch.bfloat16
    unordered = CaptureSpec("resid_post", pos_slice=[5, 3, 1])
    _, cache = generated(model, ids, unordered)
    assert cache.columns.tolist() == [1, 3, 5]
    assert torch.equal(cache["resid_post", 1], exact["resid_post", 1][:, [1, 3, 5]])
    with pytest.raises(ValueError, match="detach=False with device= or dtype="):
        CaptureSpec("resid_post", detach=False, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="detach=False with device= or dtype="):
        CaptureSpec("resid_post", detach=False, device="cpu")
    with pytest.raises(ValueError, match="a floating torch dtype"):
        CaptureSpec("resid_post", dtype=torch.int8)


def test_A7_values_that_keep_their_graph_have_autograds_gradients() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    live: list[Tensor] = []
    model.add_hook("blocks.1.hook_resid_post", lambda value, hook: live.append(value))
    with model.capture(CaptureSpec("blocks.1.hook_resid_post", detach=False, clone=False)) as cache:
        loss = model(ids, return_type="loss")
    expected = torch.autograd.grad(loss, live, retain_graph=True)
    got = torch.autograd.grad(loss, cache["resid_post", 1])
    torch.testing.assert_close(got, expected)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(model(ids, return_type="loss"), generated(model, ids)[1]["embed"])


def test_A8_values_are_those_after_interventions() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    name = "blocks.1.hook_resid_post"
    with model.hooks([(name, zero)]), model.capture(name) as cache:
        logits = model(ids)
    assert not cache[name].any()
    assert torch.equal(logits, model.run_with_hooks(ids, fwd_hooks=[(name, zero)]))
    assert not torch.equal(logits, model(ids))


def test_A9_what_is_cached_is_copied_where_it_could_change() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    names = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_pre"]
    with torch.no_grad(), model.capture(names) as cache:
        model(ids)
    assert cache[names[0]].data_ptr() == cache[names[1]].data_ptr()  # nobody edits: no copies
    before = cache[names[0]].clone()

    def edit(value: Tensor, hook: HookPoint) -> None:
        value.zero_()

    with torch.no_grad(), model.hooks([(names[1], edit)]), model.capture(names) as cache:
        model(ids)
    assert torch.equal(cache[names[0]], before)
    with torch.no_grad(), model.capture("unembed.hook_out") as cache:
        logits = model(ids)
        kept = cache["unembed.hook_out"].clone()
    logits.zero_()
    assert torch.equal(cache["unembed.hook_out"], kept)


def test_A10_a_spec_says_what_it_wants_and_nothing_else_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    spec = CaptureSpec("resid_post", layers=-1)
    monkeypatch.setattr(HookedTransformer, "forward", None)  # resolving runs nothing
    assert spec.resolve(model) == ["blocks.2.hook_resid_post"]
    assert [n for n in model.hook_dict if spec.wants(n, model)] == spec.resolve(model)
    monkeypatch.undo()
    visits: list[str] = []
    monkeypatch.setattr(HookPoint, "_visit", lambda self, x: visits.append(self.name) or x)
    with model.capture(spec):
        model(ids)
    assert visits == ["blocks.2.hook_resid_post"]


BAD_NAMES: list[tuple[Any, str]] = [
    ("blocks.1.hook_resid_pots", "Did you mean 'blocks.1.hook_resid_post'"),
    (["hook_embed", "blocks.1.attn.hook_zz"], "Did you mean .*hook_z'"),
    ("blocks.*.hook_nothing", "matches none"),
    (lambda name: False, "matches none"),
    (("resid_post", 9), "no hook point is meant by"),
    ("model.layers.1.mlp", "no hook point is called"),
    (CaptureSpec("resid_post", layers=7), "no layer 7 in a model of 3"),
    (CaptureSpec("hook_embed", layers=1), "has none of the points"),
    (torch.nn.Linear(2, 2), "no module of this model"),
]


@pytest.mark.parametrize(("names", "message"), BAD_NAMES)
def test_A11_wrong_names_raise_before_any_forward(
    names: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loud.build()
    monkeypatch.setattr(HookedTransformer, "_context", None)  # which every forward calls first
    ids = loud.tokens(2, P)
    for use in (
        lambda: model.run_with_cache(ids, names_filter=names),
        lambda: generated(model, ids, names),
        lambda: model.capture(names).__enter__(),
    ):
        with pytest.raises((KeyError, ValueError), match=message):
            use()
    assert model.list_hooks() == {}
    assert not model._forward_hooks


def test_A11_wrong_names_when_looking_up() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    _, cache = generated(model, ids, "resid_post")
    with pytest.raises(KeyError, match="the model has that hook point"):
        cache["resid_pre", 1]
    with pytest.raises(KeyError, match="Did you mean"):
        cache["resid_pots", 1]
    for bad in ({"layers": 5}, {"names": "resid_pots"}, {"span": "answers"}, {"steps": "prefil"}):
        with pytest.raises((KeyError, ValueError)):
            cache.select(**bad)
    with pytest.raises(KeyError, match="3 values fit 'resid_post'"):
        cache.at("resid_post")


def test_A12_the_type_does_not_depend_on_the_number_of_steps() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    for n in (1, 4):
        _, cache = model.generate(
            ids, max_new_tokens=n, stop_at_eos=False, return_cache="resid_post"
        )
        assert isinstance(cache["resid_post", 0], Tensor)
        assert cache["resid_post", 0].shape == (2, P + n, 24)


@pytest.mark.parametrize("over", ["forward", "generation"])
def test_A12_a_site_that_is_called_three_times_has_no_bare_value(over: str) -> None:
    model, ids = loud.build(use_split_qkv_input=True), loud.tokens(2, P)
    name = "blocks.0.ln1.hook_normalized"
    if over == "forward":
        _, cache = model.run_with_cache(ids)
        last = 3
    else:
        _, cache = generated(model, ids, [name, "q_input", "resid_post"])
        last = 3 * (N + 1)
        assert cache["resid_post", 0].shape == (2, P + N, 24)
    assert cache[f"{name}:1"].shape == cache[f"{name}:3"].shape == (2, P, 4, 24)
    assert f"{name}:{last}" in cache
    assert f"{name}:{last + 1}" not in cache
    with pytest.raises(KeyError, match=f"called {last} times.*{name}:1"):
        cache[name]


def test_A13_nothing_leaks_and_an_error_leaves_what_was_captured() -> None:
    model, ids = loud.build(), loud.tokens(2, P)

    def fail(value: Tensor, hook: HookPoint) -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):  # noqa: SIM117
        with model.capture("resid_post") as cache, model.hooks([("blocks.1.hook_mlp_out", fail)]):
            model(ids)
    assert model.list_hooks() == {}
    assert not model._forward_hooks
    assert list(cache) == ["blocks.0.hook_resid_post"]
    _, whole = model.run_with_cache(ids, names_filter="resid_post")
    assert torch.equal(cache["resid_post", 0], whole["resid_post", 0])
    model(loud.tokens(2, P, seed=9))
    assert torch.equal(cache["resid_post", 0], whole["resid_post", 0])


@pytest.mark.parametrize("name", ["hook_embed", "ln_final.hook_scale", "unembed.hook_out"])
def test_the_step_is_that_of_the_beginning_of_a_forward(name: str) -> None:
    """Whoever asks first asks late: behind the last block the cache has counted this forward."""
    model, ids = loud.build(), loud.tokens(1, 6)
    kv, seen = KeyValueCache.init_cache(model.cfg, batch_size=1), []
    with model.hooks([(name, lambda value, hook: seen.append((hook.step.step, hook.step.phase)))]):
        for part in ids.split((4, 1, 1), 1):
            model(part, past_kv_cache=kv)
    assert seen == [(0, "prefill"), (1, "decode"), (2, "decode")]


def test_several_texts_in_one_block_are_several_runs() -> None:
    model = loud.build()
    first, second = loud.tokens(2, P), loud.tokens(1, 3)
    with model.capture("resid_post") as cache:
        model(first)
        assert cache["resid_post", 0].shape == (2, P, 24)
        model(second)
    with pytest.raises(KeyError, match=r"2 texts were run here.*cache\.runs"):
        cache["resid_post", 0]
    one, two = cache.runs
    assert torch.equal(one.tokens, first)
    assert torch.equal(two.tokens, second)
    _, alone = model.run_with_cache(second)
    torch.testing.assert_close(two["resid_post", 2], alone["resid_post", 2], **CLOSE)


def test_a_hook_may_run_the_model_in_the_middle() -> None:
    model, outer, inner = loud.build(), loud.tokens(2, P), loud.tokens(1, 3)
    _, expected = model.run_with_cache(outer, names_filter="resid_post")

    def run_again(value: Tensor, hook: HookPoint) -> None:
        if value.shape[0] == 2:
            model(inner)

    with (
        model.hooks([("blocks.1.hook_resid_pre", run_again)]),
        model.capture("resid_post") as cache,
    ):
        model(outer)
    first, second = cache.runs
    assert torch.equal(first.tokens, outer)
    assert_close(first, expected)
    assert torch.equal(second.tokens, inner)
    assert len(second) == 3


def test_a_logits_processor_may_run_the_model_between_two_steps() -> None:
    model, ids = loud.build(), loud.tokens(1, P)

    def contrast(tokens: Tensor, logits: Tensor) -> Tensor:
        return logits - 0.5 * model(tokens[:, -3:])[:, -1]

    out, cache = generated(model, ids, "resid_post", logits_processor=contrast)
    _, whole = model.run_with_cache(out, names_filter="resid_post")
    assert torch.equal(cache.tokens, out)
    assert_close(cache, whole)
    with model.capture("resid_post") as live:
        generated(model, ids, False, logits_processor=contrast)
    assert len(live.runs) == 1 + N
    assert torch.equal(live.runs[0].tokens, out[:, :-1])


def test_a_capture_hears_its_own_thread() -> None:
    model, rows = loud.build(), [loud.tokens(1, P, seed=seed) for seed in range(3)]
    expected = [generated(model, row, "resid_post") for row in rows]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            results = list(pool.map(lambda row: generated(model, row, "resid_post"), rows))
            for (out, cache), (expected_out, expected_cache) in zip(results, expected, strict=True):
                assert torch.equal(out, expected_out)
                assert_close(cache, expected_cache)


def test_gradients_are_kept_with_the_text_they_are_of() -> None:
    model, first, second = loud.build(), loud.tokens(1, P), loud.tokens(1, P, seed=8)
    with model.capture(CaptureSpec("resid_post", incl_bwd=True)) as cache:
        losses = [model(ids, return_type="loss") for ids in (first, second)]
        losses[0].backward()
        losses[1].backward()
    for run, ids in zip(cache.runs, (first, second), strict=True):
        _, alone = model.run_with_cache(
            ids, names_filter="resid_post", incl_bwd=True, return_type="loss"
        )
        for layer in range(3):
            name = f"blocks.{layer}.hook_resid_post_grad"
            torch.testing.assert_close(run[name], alone[name], **CLOSE)


def test_copies_of_a_model_are_not_listened_to() -> None:
    model, ids = loud.build(), loud.tokens(1, P)
    kept = model.add_hook("hook_embed", lambda value, hook: None)
    with model.capture(["resid_post", "blocks.1.mlp"]) as cache:
        copied, again = copy.deepcopy(model), pickle.loads(pickle.dumps(loud.build()))
        copied(ids)
        again(ids)
        assert len(cache) == 0
        model.reset_hooks()  # and what listens is nobody else's to remove
        model(ids)
    assert len(cache) == 4
    assert list(copied.list_hooks()) == ["hook_embed"]  # hooks of users are copied
    assert not copied._forward_hooks
    assert not copied.blocks[1].mlp._forward_hooks
    assert kept.num_fires == 0


def test_rows_that_change_in_number_are_another_run() -> None:
    model, ids = loud.build(), loud.tokens(1, P)
    with model.capture("resid_post") as cache:
        model.generate(ids, max_new_tokens=3, n=2, stop_at_eos=False)
    assert [run["resid_post", 0].shape[:2] for run in cache.runs] == [(1, P), (2, 2)]
    with model.capture("resid_post") as cache:
        model.generate(ids, max_new_tokens=3, num_beams=2, do_sample=False, stop_at_eos=False)
    assert cache.runs[0]["resid_post", 0].shape[:2] == (1, P)


def test_what_is_kept_of_an_input_does_not_change_with_it() -> None:
    model, start = loud.build(), torch.randn(1, P, 24)
    with torch.no_grad(), model.capture("resid_pre") as cache:
        model(start, start_at_layer=1)
    with torch.no_grad(), model.capture("resid_pre") as named:
        model(input=start, start_at_layer=1)
    how: dict[str, Any] = {"start_at_layer": 1, "names_filter": "resid_pre"}
    _, other = model.run_with_cache(start, **how)
    _, by_name = model.run_with_cache(input=start, **how)
    before = start.clone()
    start.zero_()
    for each in (cache, named, other, by_name):
        assert torch.equal(each["resid_pre", 1], before)


def test_nothing_kept_is_said() -> None:
    model, ids = loud.build(), loud.tokens(1, P)
    with pytest.warns(UserWarning, match="nothing was captured"):
        generated(model, ids, CaptureSpec("resid_post", steps=99))
    with pytest.warns(UserWarning, match="nothing was captured"):  # noqa: SIM117
        with model.capture(CaptureSpec("resid_post", pos_slice=99)):
            model(ids)
    with pytest.raises(ValueError, match="pos_slice=.*99.* is outside of the 5 columns"):
        model.run_with_cache(ids, pos_slice=99)
    with pytest.raises(ValueError, match="a generation keeps no graph"):
        generated(model, ids, CaptureSpec("resid_post", detach=False))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"pos_slice": torch.tensor([True, False])}, r"of a mask: mask.nonzero\(\)"),
        ({"steps": [True, False]}, "of a mask"),
        ({"layers": [False, True]}, "layers must be numbers"),
        ({"layers": 1.0}, "layers must be numbers"),
        ({"layers": "last"}, "layers must be numbers"),
        ({"max_bytes": "1GB"}, "max_bytes"),
        ({"pos_slice": [3, 3]}, "has a number twice"),
    ],
)
def test_choices_that_are_none(spec: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        CaptureSpec("resid_post", **spec).resolve(loud.build())


def test_names_of_every_kind_mean_what_they_say() -> None:
    model = loud.build()
    all_layers = [f"blocks.{layer}.hook_resid_post" for layer in range(3)]
    assert model.resolve_names(("resid_post", None)) == all_layers
    assert model.resolve_names(("resid_post", np.int64(1))) == all_layers[1:2]
    assert model.resolve_names(model.blocks[1].hook_resid_post) == all_layers[1:2]
    assert CaptureSpec("resid_post", layers=np.int64(-1)).resolve(model) == all_layers[2:]
    with pytest.raises(UnknownHookError, match="MLP is no hook point of this model"):
        model.add_hook(model.blocks[0].mlp, zero)


def test_a_text_that_a_cache_continues_by_hand_is_one_run() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, 7)
    kv = KeyValueCache.init_cache(model.cfg, batch_size=2)
    with model.capture() as cache, torch.no_grad():
        for part in ids.split((4, 1, 2), 1):
            model(part, past_kv_cache=kv)
    _, whole = model.run_with_cache(ids)
    assert_close(cache, whole, whole)
    assert torch.equal(cache.tokens, ids)
    assert [step.shape[1] for step in cache.steps("resid_post", 0)] == [4, 1, 2]
    assert cache.prefill.tokens.shape == (2, 4)


def test_chosen_steps_and_columns_of_a_generation() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, P)
    out, whole = generated(model, ids)
    choices: list[tuple[dict[str, Any], list[int]]] = [
        ({"steps": "prefill"}, list(range(P))),
        ({"steps": "decode"}, list(range(P, P + N))),
        ({"steps": 2}, [P + 1]),
        ({"steps": [0, 3]}, [*range(P), P + 2]),
        ({"steps": slice(1, 3)}, [P, P + 1]),
        ({"steps": lambda step: step.start >= P + 1}, list(range(P + 1, P + N))),
        ({"pos_slice": slice(2, 7)}, [2, 3, 4, 5, 6]),
        ({"pos_slice": (1, None, 3)}, [1, 4, 7]),
        ({"pos_slice": [0, 3, P + 1]}, [0, 3, P + 1]),
        ({"pos_slice": P + 2}, [P + 2]),
        ({"pos_slice": slice(3, None), "steps": "decode"}, list(range(P, P + N))),
    ]
    for how, columns in choices:
        spec = CaptureSpec(["resid_post", "pattern"], **how)
        _, cache = generated(model, ids, spec)
        assert cache.columns.tolist() == columns, how
        assert torch.equal(cache.tokens, out[:, columns])
        torch.testing.assert_close(cache["resid_post", 1], whole["resid_post", 1][:, columns])
        pattern = whole["pattern", 1][:, :, columns]
        seen = cache["pattern", 1].shape[-1]  # the keys there were when the last of them was run
        torch.testing.assert_close(cache["pattern", 1], pattern[..., :seen])
        assert not pattern[..., seen:].any()
    with pytest.raises(ValueError, match="counted from the start"):
        CaptureSpec("resid_post", pos_slice=-1)
    with pytest.raises(ValueError, match="Did you mean 'prefill'"):
        CaptureSpec("resid_post", steps="prefil")


def test_what_would_be_too_much_is_refused_before_anything_is_run() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    spec = CaptureSpec(["resid_post", "pattern"])
    _, cache = generated(model, ids, spec)
    size = spec.nbytes(model, 2, P + N)
    assert size == cache.nbytes()
    ran: list[int] = []
    model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: ran.append(1))
    limited = CaptureSpec(["resid_post", "pattern"], max_bytes=size - 1)
    with pytest.raises(ValueError, match=f"would keep {size} bytes"):
        generated(model, ids, limited)
    assert ran == []
    generated(model, ids, CaptureSpec(["resid_post", "pattern"], max_bytes=size))
    half = CaptureSpec("resid_post", dtype=torch.bfloat16, pos_slice=slice(0, 3))
    assert half.nbytes(model, 4, 8) == 3 * 4 * 3 * 24 * 2


@pytest.mark.parametrize(
    ("steps", "columns"),
    [("all", P + N), ("prefill", P), ("decode", N), (0, P), ([1, 3], 2), (slice(2, None), N - 1)],
)
def test_a_limit_counts_the_steps_that_are_kept(steps: Any, columns: int) -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    of_one = 3 * 2 * 24 * 4
    _, cache = generated(model, ids, CaptureSpec("resid_post", steps=steps))
    assert cache.nbytes() == columns * of_one
    generated(model, ids, CaptureSpec("resid_post", steps=steps, max_bytes=columns * of_one))
    with pytest.raises(ValueError, match=f"would keep {columns * of_one} bytes"):
        generated(
            model, ids, CaptureSpec("resid_post", steps=steps, max_bytes=columns * of_one - 1)
        )


def test_single_calls_are_what_the_loss_depends_on() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    kv = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    with model.capture(CaptureSpec(["resid_post", "k"], detach=False)) as cache:
        model(ids[:, :4], past_kv_cache=kv)
        logits = model(ids[:, 4:], past_kv_cache=kv)
    for name in ("resid_post", "k"):
        for number, seen in enumerate(cache.steps(name, 0), 1):
            (gradient,) = torch.autograd.grad(logits.sum(), seen, retain_graph=True)
            assert gradient.abs().max() > 1e-3
            full = f"blocks.0.attn.hook_{name}" if name == "k" else f"blocks.0.hook_{name}"
            assert cache[f"{full}:{number}"] is seen
        torch.testing.assert_close(torch.cat(cache.steps(name, 0), 1), cache[name, 0])
        assert cache.select(pos=slice(0, 5))[name, 0].shape[1] == 5


def test_a_limit_counts_gradients_and_all_forwards_of_a_block() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    of_one = 3 * 2 * 24 * 4 * P
    assert CaptureSpec("resid_post", incl_bwd=True).nbytes(model, 2, P) == 2 * of_one
    with model.capture(CaptureSpec("resid_post", max_bytes=3 * of_one)) as cache:
        for _ in range(3):
            model(ids)
        with pytest.raises(ValueError, match=f"would keep {4 * of_one} bytes"):
            model(ids)
    assert sum(run.nbytes() for run in cache.runs) == 3 * of_one
    kv = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    with model.capture(CaptureSpec("resid_post", max_bytes=of_one)) as cache:
        model(ids[:, :2], past_kv_cache=kv)
        model(ids[:, 2:], past_kv_cache=kv)
        with pytest.raises(ValueError, match="would keep"):
            model(ids[:, :1], past_kv_cache=kv)
    assert cache.nbytes() == of_one


# --- B: records and spans -------------------------------------------------------------------------


def test_B1_a_narrow_spec_keeps_only_its_layers() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    _, whole = model.run_with_cache(ids)
    _, cache = model.run_with_cache(ids, names_filter=CaptureSpec(layers=(0, -1)))
    assert {name.split(".")[1] for name in cache} == {"0", "2"}
    torch.testing.assert_close(cache["resid_post", -1], whole["blocks.2.hook_resid_post"], **CLOSE)
    assert (cache["resid_post", -1] - whole["ln_final.hook_normalized"]).abs().max() > 0.1


def test_B3_spans_are_slices() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    _, cache = generated(model, ids, ["resid_post", "pattern"])
    values = cache["resid_post", 1]
    assert cache.token_span == (P, P + N)
    cache.mark("reasoning", P, P + 2)
    cache.mark("middle", [1, 3], [3, 5])
    assert torch.equal(cache.at("resid_post", 1, span="prompt"), values[:, :P])
    assert torch.equal(cache.at("resid_post", 1, span="answer"), values[:, P:])
    assert torch.equal(cache.at("resid_post", 1, span="reasoning"), values[:, P : P + 2])
    by_row = torch.stack((values[0, 1:3], values[1, 3:5]))
    assert torch.equal(cache.at("resid_post", 1, span="middle"), by_row)
    rows = cache["pattern", 1]
    expected = torch.stack((rows[0][:, 1:3], rows[1][:, 3:5]))
    assert torch.equal(cache.at("pattern", 1, span="middle"), expected)
    assert torch.equal(cache.select(span=(2, 4))["resid_post", 1], values[:, 2:4])
    for bad in ((0, P + N + 1), (-1, 3), (4, 2)):
        with pytest.raises(ValueError, match="outside of the"):
            cache.mark("bad", *bad)
    with pytest.raises(ValueError, match="for 2 rows"):
        cache.mark("bad", [1, 2, 3], 4)
    cache.mark("uneven", [1, 1], [3, 5])
    with pytest.raises(ValueError, match=r"\[2, 4\] columns long"):
        cache.at("resid_post", 1, span="uneven")
    assert cache.select(batch=1).at("resid_post", 1, span="uneven").shape == (1, 4, 24)


def test_B5_steering_is_in_what_is_captured() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    direction = torch.randn(24, generator=torch.Generator().manual_seed(1))

    def steer(value: Tensor, hook: HookPoint) -> Tensor:
        return value + 100 * direction

    name = "blocks.0.hook_resid_post"
    out, clean = generated(model, ids, name)
    with model.hooks([(name, steer)]):
        _, steered = generated(model, ids, name)
    shift = (steered[name] - clean[name])[:, :P] @ direction / direction.norm()
    torch.testing.assert_close(shift, (100 * direction.norm()).expand(2, P), atol=1e-3, rtol=1e-4)
    assert ((steered[name] @ direction)[:, P:] > 50 * direction.norm() ** 2).all()


def test_B6_gradients_reach_the_residual_a_run_started_from() -> None:
    model = loud.build()
    start = torch.randn(2, P, 24, requires_grad=True)
    with model.capture(CaptureSpec(("attn_out", 1), detach=False)) as cache:
        model(start, start_at_layer=1)
    cache["attn_out", 1].sum().backward()
    assert start.grad is not None
    assert start.grad.abs().sum() > 0


def test_B7_parts_share_memory_and_equal_indexing() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    _, cache = generated(model, ids)
    part = cache.select(["resid_post", "q"], layers=[0, 2], steps="decode", span="answer")
    assert set(part) == {
        f"blocks.{i}.{n}" for i in (0, 2) for n in ("hook_resid_post", "attn.hook_q")
    }
    assert torch.equal(part["resid_post", 2], cache["resid_post", 2][:, P:])
    assert part["q", 0].data_ptr() == cache["q", 0][:, P:].data_ptr()
    assert torch.equal(part.tokens, cache.tokens[:, P:])
    last = cache.select("resid_post", pos=-1, batch=1)
    assert torch.equal(last["resid_post", 1], cache["resid_post", 1][1:, -1:])
    assert torch.equal(cache.select(pos=[0, 3])["q", 1], cache["q", 1][:, [0, 3]])
    assert torch.equal(part.step(2)["q", 0], cache["q:3", 0])
    assert set(cache.select(lambda name: name.endswith("hook_z"))) == {
        f"blocks.{i}.attn.hook_z" for i in range(3)
    }
    for bad in ({"pos": 40}, {"batch": 5}):
        with pytest.raises(ValueError, match="outside of the"):
            cache.select(**bad)
    for chooses_nothing, message in (
        ({"names": lambda name: False}, "<lambda> matches none of the"),
        ({"names": "hook_embed", "layers": 1}, "layers=1 has none of .'hook_embed'"),
        ({"steps": 99}, "step 99 is not in this cache"),
    ):
        with pytest.raises(KeyError, match=message):
            cache.select(**chooses_nothing)
    assert not cache.select(steps=slice(50, 60)).columns.numel()  # as a range in Python


# --- C: the past ----------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["hook_v", "hook_k"])
@pytest.mark.parametrize("kind", ["standard", "rotary", "rotary_gqa", "rotary_window"])
def test_C2_an_edit_of_the_past_is_that_of_one_uncached_forward(kind: str, site: str) -> None:
    model, ids = loud.build(kind), loud.tokens(2, P)
    name = f"blocks.0.attn.{site}"

    def edit(value: Tensor, hook: HookPoint) -> Tensor:
        assert value.shape[1] == 1
        return value * -1.5 + 0.3

    with model.hooks([(name, edit)], when="prefill", pos=1):
        out = model.generate(
            ids, max_new_tokens=N, do_sample=False, stop_at_eos=False, output_logits=True
        )

    def edit_column_1(value: Tensor, hook: HookPoint) -> Tensor:
        value = value.clone()
        value[:, 1] = value[:, 1] * -1.5 + 0.3
        return value

    whole = model.run_with_hooks(out.sequences[:, :-1], fwd_hooks=[(name, edit_column_1)])
    torch.testing.assert_close(torch.stack(out.logits, 1), whole[:, P - 1 :], **CLOSE)
    clean = model(out.sequences[:, :-1])
    assert (whole - clean)[:, P - 1 :].abs().max() > 1e-2


def test_C2_columns_of_later_steps_are_not_edited() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, P)
    name = "blocks.1.attn.hook_v"
    with model.hooks([(name, zero)], when="prefill", pos=1):
        out, cache = generated(model, ids, name)
    zeroed = (cache[name] == 0).flatten(2).all(-1)
    assert zeroed.nonzero().tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("limits", "fires"),
    [
        ({"when": "all"}, N),
        ({"when": "prefill"}, 1),
        ({"when": "decode"}, N - 1),
        ({"when": 2}, 1),
        ({"when": [0, 3]}, 2),
        ({"when": lambda step: step.step % 2 == 1}, 2),
        ({"pos": P}, 1),
        ({"pos": slice(3, P + 2)}, 3),
        ({"pos": [0, P, P + 1]}, 3),
    ],
)
def test_C4_fires_are_counted(limits: dict[str, Any], fires: int) -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    name = "blocks.0.hook_resid_post"
    bound = model.bind([(name, zero)], **limits)
    bound.generate(ids, max_new_tokens=N, stop_at_eos=False)
    assert bound.last_report.num_fires == fires
    handle = model.add_hook(name, zero, **limits)
    model.generate(ids, max_new_tokens=N, stop_at_eos=False)
    assert handle.num_fires == fires
    handle.remove()
    assert model.list_hooks() == {}


def test_C4_the_report_tells_every_rule_and_call() -> None:
    model, ids = loud.build(), loud.tokens(2, P)

    def look(value: Tensor, hook: HookPoint) -> None:
        return None

    def in_place(value: Tensor, hook: HookPoint) -> None:
        value.mul_(2)

    bound = model.bind(
        [("blocks.0.attn.hook_v:2", zero), ("resid_post", look), (("mlp_out", 1), in_place)]
    )
    assert bound.last_report is None
    _, cache = bound.generate(
        ids, max_new_tokens=N, stop_at_eos=False, return_cache="blocks.0.attn.hook_v"
    )
    report = bound.last_report
    assert [rule.num_fires for rule in report.rules] == [1, 3 * (N + 1), N + 1]
    assert report.num_fires == 1 + 3 * (N + 1) + N + 1
    (fire,) = report.rules[0].fires
    assert (fire.target, fire.replaced) == ("blocks.0.attn.hook_v:2", True)
    assert not any(fire.replaced for fire in report.rules[1].fires)
    assert all(fire.replaced for fire in report.rules[2].fires)
    assert (cache["v", 0] == 0).flatten(2).all(-1)[0].tolist() == [
        column == P for column in range(P + N)
    ]
    assert "blocks.0.hook_resid_post and 2 more" in str(report)


def test_C4_a_rule_that_never_acted_is_said() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    bound = model.bind([("resid_post", zero), (("resid_pre", 2), zero)], pos=30)
    with pytest.raises(RuntimeError, match="4 hook.* never acted"):
        bound(ids)
    assert bound.last_report.num_fires == 0
    assert len(bound.last_report.unfired) == 4
    with pytest.raises(UnknownHookError, match="Did you mean"):
        model.bind([("blocks.0.hook_resid_pots", zero)])
    with pytest.warns(UserWarning, match="never acted"):  # noqa: SIM117
        with model.hooks([("resid_post", zero)], when="decode"):
            model(ids)
    with model.hooks([("resid_post", zero)], when="decode", on_zero_fire="ignore"):
        model(ids)
    with pytest.raises(ValueError, match="on_zero_fire must be"):
        model.hooks([("resid_post", zero)], on_zero_fire="no").__enter__()
    assert model.list_hooks() == {}


def test_C6_a_hook_on_columns_never_misses_its_place() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, P)
    steering = 3 * torch.randn(24, generator=torch.Generator().manual_seed(4))
    how: dict[str, Any] = {"max_new_tokens": N, "do_sample": False, "stop_at_eos": False}

    def steer(value: Tensor, hook: HookPoint) -> Tensor:
        return value + steering

    def steer_in_place(value: Tensor, hook: HookPoint) -> None:
        value += steering

    clean = model.generate(ids, **how)
    results = []
    for function, pos in itertools.product(
        (steer, steer_in_place), (slice(3, 7), [3, 4, 5, 6], (3, 7, None))
    ):
        with model.hooks([("blocks.1.hook_resid_pre", function)], pos=pos):
            cached = model.generate(ids, **how)
            results.append(cached)
            assert torch.equal(cached, model.generate(ids, use_past_kv_cache=False, **how))
    assert all(torch.equal(each, results[0]) for each in results)
    assert not torch.equal(results[0], clean)


def test_C6_columns_come_in_the_order_they_were_asked_for() -> None:
    model, ids = loud.build(), loud.tokens(1, 8)
    rows = torch.stack([torch.full((24,), 5.0), torch.full((24,), 2.0)])
    name = "blocks.0.hook_resid_post"
    with model.hooks([(name, lambda value, hook: rows[None].clone())], pos=[5, 2]):
        _, cache = model.run_with_cache(ids, names_filter=name)
    assert (cache[name][0, 5] == 5).all()
    assert (cache[name][0, 2] == 2).all()

    def look(value: Tensor, hook: HookPoint) -> None:
        places = hook.step.local([4, 6])
        assert places.tolist() == [1, 3]
        value[:, places] = 0

    with model.hooks([(name, look)], pos=slice(3, None)):
        _, cache = model.run_with_cache(ids, names_filter=name)
    assert (cache[name][0] == 0).all(-1).nonzero().flatten().tolist() == [4, 6]


def test_C6_a_hook_knows_where_it_is() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    seen: list[Any] = []

    def look(value: Tensor, hook: HookPoint) -> None:
        step = hook.step
        columns = [
            None if c is None else c.tolist() for c in (step.local(1), step.local([0, P, 9]))
        ]
        seen.append((step.step, step.phase, step.pos, columns, step.tokens.shape))

    with model.hooks([("blocks.0.hook_resid_pre", look)]):
        model.generate(ids, max_new_tokens=3, stop_at_eos=False)
    assert seen == [
        (0, "prefill", slice(0, P), [[1], [0]], (2, P)),
        (1, "decode", slice(P, P + 1), [None, [0]], (2, 1)),
        (2, "decode", slice(P + 1, P + 2), [None, None], (2, 1)),
    ]
    with pytest.raises(LookupError, match="while a HookedTransformer runs forward"):
        model.hook_dict["hook_embed"].step  # noqa: B018


# --- D: batches, pickles --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["standard", "rotary_gqa", "alibi", "rotary_window"])
def test_D4_a_row_of_a_ragged_batch_is_what_it_is_alone(kind: str) -> None:
    model = loud.build(kind)
    how: dict[str, Any] = {"max_new_tokens": N, "do_sample": False}
    for seed in range(2, 40):
        rows, ids, mask = loud.ragged([3, 6, 5], seed=seed)
        new = [model.generate(r, stop_at_eos=False, **how)[0, r.shape[1] :] for r in rows]
        own = new[1][:-1][~torch.isin(new[1][:-1], torch.cat((new[0], new[2])))]
        if len(own):
            break
    how |= {"eos_token_id": int(own[0]), "pad_token_id": 0}  # ends the second row alone, early
    out, cache = model.generate(ids, attention_mask=mask, return_cache=True, **how)
    for index, row in enumerate(rows):
        own, single = model.generate(row, return_cache=True, **how)
        new = own.shape[1]
        padding = ids.shape[1] - row.shape[1]
        assert torch.equal(out[index, padding : padding + new], own[0])
        view = cache.row(index)
        assert torch.equal(view.tokens[0], own[0])  # without padding, and nothing after the end
        assert set(view) == set(single)
        assert_close(view, single)
        assert view.columns.tolist() == list(range(new))
    assert 0 in cache.attention_mask[1]  # it ended before the others
    assert cache.attention_mask[0, :4].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("first", [0, 1])  # of the columns behind the prefix
def test_D4_a_row_behind_a_padded_prefix_has_no_keys_of_padding(first: int, tmp_path: Path) -> None:
    model, new = loud.build("rotary"), loud.tokens(2, 4, 9)
    rows, ids, mask = loud.ragged([2, 5])
    sites = ["*hook_pattern", "*hook_attn_scores", "*hook_resid_post"]
    how: dict[str, Any] = {"do_sample": False, "stop_at_eos": False}

    def captured(prefix: KeyValueCache, new: Tensor) -> ActivationCache:
        spec = CaptureSpec(sites, pos_slice=slice(prefix.length + first, None))
        return model.generate(new, N, past_kv_cache=prefix, return_cache=spec, **how)[1]

    cache = captured(model.prefix(ids, attention_mask=mask), new)
    cache.save(tmp_path / "cache")
    for kept in (
        cache,
        ActivationCache.load(tmp_path / "cache"),
        pickle.loads(pickle.dumps(cache)),
    ):
        for index, row in enumerate(rows):
            alone = captured(model.prefix(row), new[index : index + 1])
            view, single = kept.row(index), alone.row(0)
            assert_close(view, single)
            assert view.columns.tolist() == single.columns.tolist()
            assert view["pattern", 0].shape[-1] == row.shape[1] + 4 + N
            for step in range(N):
                assert view.step(step)["pattern", 0].shape == single.step(step)["pattern", 0].shape


def test_A6_a_captured_module_answers_to_hugging_faces_path_of_it() -> None:
    model = HookedTransformer.from_pretrained("tiny-lens", device="cpu")
    _, whole = model.run_with_cache("Mary and John")
    _, cache = model.run_with_cache("Mary and John", names_filter=CaptureSpec(["blocks.1.mlp"]))
    paths = [p for p, n in model.outputs_by_module().items() if n == "blocks.1.hook_mlp_out"]
    assert len(paths) > 1
    for path in paths:
        torch.testing.assert_close(cache[path], whole["mlp_out", 1], **CLOSE)
    with pytest.raises(KeyError):
        cache["blocks.2.mlp"]


def test_D6_a_pickled_cache_is_its_values() -> None:
    model = loud.build("standard", d_model=32, d_head=8, d_mlp=128)  # the toy of the specification
    _, cache = generated(model, loud.tokens(1, P))
    cache.mark("start", 0, 2)
    data = pickle.dumps(cache)
    values = sum(value.nbytes for value in cache.values())
    assert len(data) <= 1.1 * values, len(data) / values
    again = pickle.loads(data)
    assert list(again) == list(cache)
    assert all(torch.equal(again[name], cache[name]) for name in cache)
    assert torch.equal(again.tokens, cache.tokens)
    assert torch.equal(again.at("resid_post", 1, span="start"), cache["resid_post", 1][:, :2])
    assert again.blocks[1].mlp.output is again["blocks.1.hook_mlp_out"]
    assert len(again.steps("resid_post", 0)) == N + 1
    again["resid_post", 0].add_(1)  # memory of its own, in the whole of it
    assert torch.equal(again["resid_post", 1], cache["resid_post", 1])
    with pytest.raises(ReferenceError, match="give it one by"):
        again.model  # noqa: B018
    part = pickle.dumps(cache.select("resid_post", layers=0, pos=-1))
    assert len(part) < 0.1 * len(data)


def test_D6_a_saved_cache_is_the_same_cache(tmp_path: Any) -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, P)
    _, cache = generated(model, ids)
    cache.mark("rows", [0, 1], [2, 3])
    cache.save(tmp_path / "cache.safetensors")
    again = ActivationCache.load(tmp_path / "cache.safetensors")
    assert list(again) == list(cache)
    assert all(torch.equal(again[name], cache[name]) for name in cache)
    assert torch.equal(again.step(2)["pattern", 1], cache.step(2)["pattern", 1])
    assert again.spans == cache.spans
    assert torch.equal(again["resid_post", -1], cache["resid_post", 2])
    assert torch.equal(again.blocks[1].mlp.output, cache["mlp_out", 1])  # without the model
    whole = (tmp_path / "cache.safetensors").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "other").write_bytes(b"not at all")
    for bad in ("cut", "other"):
        with pytest.raises(ValueError, match="damaged"):
            ActivationCache.load(tmp_path / bad)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        ActivationCache.load(tmp_path / "nowhere")


# --- nothing lost ---------------------------------------------------------------------------------

FAILURES: list[tuple[int, BaseException]] = [
    (0, RuntimeError("in a hook")),
    (0, KeyboardInterrupt()),
    (1, torch.OutOfMemoryError("out of memory")),
    (2, KeyboardInterrupt()),
    (3, RuntimeError("in a hook")),
    (N, KeyboardInterrupt()),  # the forward of the last token
]


@pytest.mark.parametrize(("broken", "failure"), FAILURES)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_failure_at_any_step_loses_nothing(
    broken: int, frozen: bool, failure: BaseException
) -> None:
    model, prefix, ids = loud.build("rotary_gqa"), loud.tokens(2, 3, seed=5), loud.tokens(2, P)
    kv = KeyValueCache.init_cache(model.cfg, batch_size=2)
    with torch.no_grad():
        model(prefix, past_kv_cache=kv)
    if frozen:
        kv.freeze()
    before = [(entry.past_keys.clone(), entry.past_values.clone()) for entry in kv.entries]
    how: dict[str, Any] = {"max_new_tokens": N, "do_sample": False, "stop_at_eos": False}
    whole, expected = model.generate(
        ids, past_kv_cache=kv if frozen else kv.clone(), return_cache="resid_post", **how
    )

    def fail(value: Tensor, hook: HookPoint) -> None:
        raise failure

    handle = model.add_hook("blocks.1.hook_mlp_out", fail, when=broken)
    with pytest.raises(type(failure)) as raised:
        model.generate(ids, past_kv_cache=kv, return_cache="resid_post", **how)
    handle.remove()
    assert model.list_hooks() == {}
    captured = raised.value.captured
    got_through = P + broken - 1 if broken else 0
    started = P + broken
    assert captured["resid_post", 0].shape[1] == started
    for layer, columns in ((0, started), (1, got_through), (2, got_through)):
        if columns:
            value = captured["resid_post", layer]
            torch.testing.assert_close(value, expected["resid_post", layer][:, :columns], **CLOSE)
        else:
            assert ("resid_post", layer) not in captured
    assert torch.equal(captured.tokens, whole[:, :started])
    if broken:
        assert captured.prefill["resid_post", 2].shape[1] == P
    # the past is what got through: nothing of it where it is frozen
    assert kv.frozen == frozen
    assert kv.length == 3 + (0 if frozen else min(got_through, P + N - 1))
    for entry, (keys, values) in zip(kv.entries, before, strict=True):
        assert torch.equal(entry.past_keys[:, :3], keys)
        assert torch.equal(entry.past_values[:, :3], values)
    if frozen:
        assert torch.equal(model.generate(ids, past_kv_cache=kv, **how), whole)
    else:  # and it goes on from there
        rest = whole[:, kv.length - 3 :]
        again = model.generate(
            rest[:, : max(1, started - got_through)], past_kv_cache=kv,
            **{**how, "max_new_tokens": 1},
        )  # fmt: skip
        assert again.shape[1] == max(1, started - got_through) + 1


def test_C1_a_long_capture_costs_little_more_than_what_it_keeps() -> None:
    """Peak of live tensor bytes, from the allocator's own record."""
    model, ids = loud.build("rotary_gqa", n_ctx=280), loud.tokens(1, 8)
    name = "blocks.1.hook_resid_post"
    how: dict[str, Any] = {"max_new_tokens": 256, "do_sample": False, "stop_at_eos": False}

    def peak(**more: Any) -> int:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            kept = model.generate(ids, **how, **more)
        live = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, live)
        del kept
        return most

    extra = peak(return_cache=name) - peak()
    step = 24 * 4
    assert extra <= 1.2 * (8 + 256) * step + step, extra


def test_a_piece_that_an_interrupt_left_uncounted_is_dropped() -> None:
    model, ids = loud.build(), loud.tokens(2, P)
    kv = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    with model.capture(CaptureSpec("resid_post", detach=False)) as cache:
        for part in ids.split(3, 1):
            model(part, past_kv_cache=kv)
        series = cache._recorder.runs[0].series["blocks.0.hook_resid_post"]
        series.pieces.append(torch.zeros(2, 1, 24))  # as between two lines of `Series.add`
    assert cache["resid_post", 0].shape == (2, P, 24)
    assert len(cache.steps("resid_post", 0)) == 2


# --- after something went wrong, and beside other threads -----------------------------------------


def failing_once(at: int) -> Any:
    """A hook that raises at its `at`-th call."""
    calls = itertools.count(1)

    def hook(value: Tensor, hook: Any) -> None:
        if next(calls) == at:
            raise RuntimeError("broke off")

    return hook


def test_another_text_on_a_cache_that_lost_a_forward_is_a_run_of_its_own() -> None:
    model, ids = loud.build("rotary"), loud.tokens(2, 8)
    cache = KeyValueCache.init_cache(model.cfg, "cpu")
    with model.capture("resid_post") as kept:
        with (
            model.hooks([("blocks.1.hook_resid_post", failing_once(1))]),
            pytest.raises(RuntimeError),
        ):
            model(ids[:1, :5], past_kv_cache=cache)
        model(ids[1:, :8], past_kv_cache=cache)
    _, whole = model.run_with_cache(ids[1:])
    last = kept.runs[-1]
    assert torch.equal(last.tokens, ids[1:])
    torch.testing.assert_close(last["resid_post", 1], whole["resid_post", 1])


@pytest.mark.parametrize("point", ["blocks.1.hook_resid_pre", "blocks.1.attn.hook_z"])
def test_a13_rows_of_a_generation_that_broke_off_between_two_layers(point: str) -> None:
    model, ids = loud.build("rotary"), loud.tokens(2, 5)
    with (
        model.hooks([(point, failing_once(3))]),
        pytest.raises(RuntimeError) as broken,
    ):
        model.generate(
            ids, 6, stop_at_eos=False, verbose=False, return_cache=["resid_post", "pattern"]
        )
    kept = broken.value.captured  # type: ignore[attr-defined]
    row = kept.row(1)
    for name in (("pattern", 0), ("pattern", 1), ("resid_post", 0)):
        assert torch.equal(row[name], kept[name][1:])


def test_what_broke_off_is_put_together_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may have run out."""
    model, ids = loud.build("rotary"), loud.tokens(2, 5)

    def running_out(self: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Recorder, "first", running_out)
    with (
        model.hooks([("blocks.1.hook_resid_pre", failing_once(2))]),
        pytest.raises(RuntimeError, match="broke off") as broken,
    ):
        model.generate(ids, 3, stop_at_eos=False, verbose=False, return_cache="resid_post")
    monkeypatch.undo()
    assert broken.value.captured["resid_post", 0].shape[:2] == (2, 6)  # type: ignore[attr-defined]


def test_forwards_of_other_threads_are_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what passes them nor what they return."""
    model, ids = loud.build("rotary"), loud.tokens(1, 6)
    threads = []

    def noting(value: Any) -> Any:
        threads.append(get_ident())
        return inside(value)

    inside = capture.tensors_in
    monkeypatch.setattr(capture, "tensors_in", noting)
    with ThreadPoolExecutor(1) as pool, model.capture("resid_post") as kept:
        model(ids)
        pool.submit(model, ids).result()
    assert len(kept.runs) == 1
    assert set(threads) == {get_ident()}


@pytest.mark.parametrize(
    "how",
    [
        {"steps": "prefill"}, {"pos_slice": slice(0, 3)}, {"pos_slice": slice(3, 7)},
        {"steps": "decode"}, {"steps": [0, 2]}, {"pos_slice": [1, 6]},
    ],
)  # fmt: skip
def test_patterns_are_counted_with_the_keys_that_are_kept(how: dict[str, Any]) -> None:
    model, ids = loud.build("rotary"), loud.tokens(2, 5)
    spec = CaptureSpec("pattern", **how)
    _, kept = model.generate(
        ids, 4, stop_at_eos=False, verbose=False, return_cache=spec, include_last=False
    )
    memory = {value.untyped_storage().data_ptr(): value for value in kept.values()}
    held = sum(value.untyped_storage().nbytes() for value in memory.values())
    assert spec.nbytes(model, 2, 5, 3) == held


@pytest.mark.parametrize("wrong", [-1, True])
def test_max_bytes_is_a_number_of_bytes(wrong: Any) -> None:
    with pytest.raises(ValueError, match="max_bytes must be a number of bytes"):
        CaptureSpec(max_bytes=wrong)


def test_a_few_columns_do_not_keep_all_of_them_alive() -> None:
    model, ids = loud.build("rotary"), loud.tokens(1, 8)
    _, kept = model.run_with_cache(ids, names_filter="resid_post", pos_slice=-1)
    value = kept["resid_post", 1]
    assert value.untyped_storage().nbytes() == value.nbytes


@pytest.mark.parametrize(
    "how",
    [
        {}, {"steps": "prefill"}, {"steps": [1, 3]}, {"steps": "decode"}, {"pos_slice": [2, 6]},
        {"pos_slice": 1}, {"dtype": torch.float64}, {"clone": True}, {"clone": False},
        {"steps": "decode", "dtype": torch.float64}, {"steps": [1], "dtype": torch.float16},
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("names", "outside", "new"),
    [
        (["resid_post", "pattern", "hook_embed"], False, N),
        (["resid_post", "pattern", "hook_embed"], True, 2),
        ("blocks.1.mlp", False, 2),
    ],
)
def test_what_is_kept_of_a_generation_may_enter_autograd(
    how: dict[str, Any], names: Any, outside: bool, new: int
) -> None:
    """Whatever mode it is run in; and is what a plain run has there."""
    model, ids = loud.build("rotary"), loud.tokens(2, P)
    spec = CaptureSpec(names, **how)
    options: dict[str, Any] = {"stop_at_eos": False, "verbose": False, "do_sample": False}
    if outside:
        with model.capture(spec) as kept:
            out = model.generate(ids, new, **options)
    else:
        out, kept = model.generate(ids, new, return_cache=spec, include_last=False, **options)
    _, whole = model.run_with_cache(out[:, :-1], names_filter=spec.names)
    assert list(kept)
    columns = kept.columns
    for name, value in kept.items():
        assert not value.is_inference()
        scale = torch.ones(1, requires_grad=True)
        (value * scale).sum().backward()
        axis = 2 if "pattern" in name else 1
        expected = whole[name].index_select(axis, columns)[..., : value.shape[-1]]
        tolerance = 2e-2 if value.dtype == torch.float16 else 1e-4
        torch.testing.assert_close(value.float(), expected, atol=tolerance, rtol=tolerance)


def test_caching_hooks_keep_ordinary_tensors_of_a_generation() -> None:
    model, ids = loud.build("rotary"), loud.tokens(1, P)
    kept = model.add_caching_hooks("resid_post")
    model.generate(ids, 2, stop_at_eos=False, verbose=False)
    assert not any(value.is_inference() for value in kept.values())
    (kept["blocks.1.hook_resid_post"] * torch.ones(1, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("is_read_at_once", [True, False])
def test_ids_and_masks_of_a_block_are_those_it_was_called_with(is_read_at_once: bool) -> None:
    model, ids = loud.build("rotary"), loud.tokens(2, P)
    ids, mask = ids.clone(), torch.ones_like(ids)
    mask[1, 0] = 0
    given = ids.clone(), mask.clone()
    with model.capture("resid_post") as cache:
        model(ids, attention_mask=mask)
        if is_read_at_once:
            assert torch.equal(cache.tokens, given[0])
        ids.zero_()
        mask.fill_(1)
    assert torch.equal(cache.tokens, given[0])
    assert torch.equal(cache.attention_mask, given[1])


def test_only_copies_are_taken_by_recorders_that_make_copies() -> None:
    model = loud.build("rotary")
    assert model.only_copies_are_taken()
    with model.capture("resid_post"):
        assert model.only_copies_are_taken()
    for spec in (
        CaptureSpec("resid_post", steps="prefill"),
        CaptureSpec("blocks.0.mlp"),
        CaptureSpec("resid_post", detach=False),
    ):
        with model.capture(spec):
            assert not model.only_copies_are_taken()
    handle = model.add_hook("hook_embed", lambda value, hook: None)
    with model.capture("resid_post"):
        assert not model.only_copies_are_taken()
    handle.remove()
    assert model.only_copies_are_taken()


def test_only_copies_are_taken_where_no_module_is_of_others() -> None:
    class Own(HookedTransformer):
        pass

    class Other(torch.nn.Module):
        def __init__(self, mlp: torch.nn.Module) -> None:
            super().__init__()
            self.mlp = mlp

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x)

    model = loud.build("rotary")

    class Called(Own):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    class Bent(GatedMLP):
        kept: list[Tensor] = []

        def bent(self, pre: Tensor) -> Tensor:
            self.kept.append(pre)
            return super().bent(pre)

    class Noted(GatedMLP):
        """What it adds replaces nothing."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.note = "this"

        def noted(self) -> str:
            return self.note

    assert Own(model.cfg).only_copies_are_taken()
    assert not Called(model.cfg).only_copies_are_taken()
    mlp = model.blocks[0].mlp
    for kind, are_taken in ((Noted, True), (Bent, False)):
        model.blocks[0].mlp = kind(model.cfg, mlp.spec)
        model.blocks[0].mlp.load_state_dict(mlp.state_dict())
        model.setup()
        assert model.only_copies_are_taken() is are_taken
    model.generate(loud.tokens(1, P), 2, stop_at_eos=False, verbose=False)
    assert Bent.kept
    assert not any(value.is_inference() for value in Bent.kept)
    model.blocks[0].mlp = mlp
    model.setup()
    known = mlp.act_fn
    for act_fn in (functools.partial(torch.pow, exponent=2), lambda x: x):
        mlp.act_fn = act_fn
        assert not model.only_copies_are_taken()
    mlp.act_fn = torch.nn.functional.relu
    assert model.only_copies_are_taken()
    mlp.act_fn = known
    mlp.forward = lambda x: type(mlp).forward(mlp, x)
    assert not model.only_copies_are_taken()
    del mlp.forward
    assert model.only_copies_are_taken()
    model.blocks[0].mlp = Other(mlp)  # and no setup()
    assert not model.only_copies_are_taken()
    model.blocks[0].mlp = mlp
    handle = register_module_forward_hook(lambda module, args, out: None)
    assert not model.only_copies_are_taken()
    handle.remove()
    assert model.only_copies_are_taken()


def test_modules_that_are_false_or_hold_each_other_are_looked_into() -> None:
    model = loud.build("rotary")
    nothing = model.blocks[0].note = torch.nn.ModuleList()  # false, as it is empty
    model.blocks[1].owner = model  # which is in a circle then
    assert not model.is_listened()
    assert model.only_copies_are_taken()
    handle = nothing.register_forward_hook(lambda module, args, out: None)
    assert model.is_listened()
    assert not model.only_copies_are_taken()
    handle.remove()


def test_a_wrapper_that_speaks_for_what_it_wraps_is_looked_at_itself() -> None:
    class Speaking(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    model = loud.build("rotary")
    wrapper = model.blocks[0].mlp = Speaking(model.blocks[0].mlp)
    model.setup()
    assert wrapper.listened is False  # says the MLP
    handle = wrapper.register_forward_hook(lambda module, args, out: None)
    assert model.is_listened()
    assert model.edits_are_live()
    handle.remove()


def test_a_hook_that_comes_in_the_middle_of_a_stream_gets_ordinary_tensors() -> None:
    model, ids, seen = loud.build("rotary"), loud.tokens(1, P), []
    with model.capture("resid_post") as kept:
        stream = model.generate_stream(ids, 4, max_tokens_per_yield=1, stop_at_eos=False)
        next(stream)
        handle = model.add_hook("blocks.0.hook_resid_mid", lambda value, hook: seen.append(value))
        rest = list(stream)
    handle.remove()
    assert len(seen) == len(rest) == 3
    assert not any(value.is_inference() for value in (*seen, *kept.values()))


def test_whoever_listens_in_inference_mode_keeps_what_is_made_there() -> None:
    """Without copies."""
    model, ids = loud.build("rotary"), loud.tokens(1, P)
    with torch.inference_mode():
        _, kept = model.run_with_cache(ids, names_filter="resid_post")
    assert all(value.is_inference() for value in kept.values())


def test_a_module_in_a_points_place_gets_ordinary_tensors_of_a_captured_generation() -> None:
    class Keeping(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x

    model, ids, seen = loud.build("rotary"), loud.tokens(1, P), []
    model.blocks[0].hook_resid_mid = Keeping()
    model.setup()
    model.generate(ids, 2, stop_at_eos=False, return_cache="resid_post")
    assert seen
    assert not any(value.is_inference() for value in seen)
