"""What is copied, shared, stored and kept alive: nothing more than there has to be."""

import copy
import gc
import io
import json
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import native
import pytest
import tiny
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, stack_module_state, vjp, vmap
from torch.nn.utils import parametrize
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only

from transformer_lens_lite import HookedTransformer
from transformer_lens_lite.kv_cache import KeyValueCache

# --- no weight is copied in a forward pass --------------------------------------------------------

# the smallest weight has 40 * 16 numbers, more than any activation of one or two tokens
WIDE = {"d_model": 40, "n_heads": 5, "d_head": 16, "d_mlp": 90, "d_vocab": 70, "n_layers": 2}
SMALLEST = 40 * 16
COPIES = ("aten::copy_", "aten::clone", "aten::cat", "aten::stack", "aten::contiguous")
COPIES += ("aten::_to_copy", "aten::repeat", "aten::repeat_interleave")


def hf_wide(name: str, **arguments: Any) -> HookedTransformer:
    gpt2 = {"n_embd": 80, "n_head": 5, "n_inner": 90, "n_layer": 2, "vocab_size": 70}
    llama = {"hidden_size": 40, "intermediate_size": 90, "num_attention_heads": 5, "head_dim": 16}
    llama |= {"num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 70}
    hf_model = tiny.build(name, **(gpt2 if "gpt2" in name else llama))
    return HookedTransformer.from_pretrained_no_processing(
        hf_model=hf_model, device="cpu", **arguments
    )


def reloaded(model: HookedTransformer, assign: bool) -> HookedTransformer:
    """Contiguous weights loaded into it, as an old checkpoint has them."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    return model


def unpickled(model: HookedTransformer) -> HookedTransformer:
    return pickle.loads(pickle.dumps(model))


MODELS: dict[str, Callable[[], HookedTransformer]] = {
    "native": lambda: native.build(**WIDE),
    "native grouped, gated": lambda: native.build("grouped_rotary", **WIDE | {"n_heads": 6,
                                                                              "gated_mlp": True}),
    "native tied": lambda: native.build("tied", **WIDE),
    "native everything": lambda: native.build("everything", **WIDE | {"n_heads": 6}),
    "native ungrouped": lambda: native.build("ungrouped", **WIDE | {"n_heads": 6}),
    "native experts": lambda: native.build("experts_clamped", **WIDE),
    "native experts and a shared one": lambda: native.build(
        "experts_shared", **WIDE | {"d_expert": 50, "d_shared_expert": 60}
    ),
    "native latent": lambda: native.build("latent", **WIDE | {"latent_kv_rank": 30}),
    "native latent queries": lambda: native.build(
        "latent_queries", **WIDE | {"latent_kv_rank": 30, "latent_q_rank": 25}
    ),
    "gpt2": lambda: hf_wide("gpt2"),
    "gpt2 untied": lambda: hf_wide("gpt2_untied"),
    "llama": lambda: hf_wide("llama"),
    "llama with biases": lambda: hf_wide("llama_biases"),
    "llama in bf16": lambda: hf_wide("llama", dtype="bf16"),
    "cast": lambda: native.build(**WIDE).to(torch.float64),
    "copied": lambda: copy.deepcopy(native.build(**WIDE)),
    "pickled": lambda: unpickled(native.build(**WIDE)),
    "from a dict": lambda: reloaded(native.build(**WIDE), assign=False),
    "of a dict": lambda: reloaded(native.build("grouped_rotary", **WIDE | {"n_heads": 6}), True),
    "untied": lambda: _untied(native.build("tied", **WIDE)),
}  # fmt: skip


def _untied(model: HookedTransformer) -> HookedTransformer:
    model.untie()
    return model


def large_copies(run: Callable[[], Any]) -> list[str]:
    """Operations on as many numbers as a weight has that write them elsewhere."""
    run()  # what is prepared once
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        run()
    found = []
    for event in record.events():
        sizes = [torch.Size(shape).numel() for shape in event.input_shapes if shape]
        if event.name in COPIES and max(sizes, default=0) >= SMALLEST:
            found.append(f"{event.name} {event.input_shapes}")
    assert {"aten::addmm", "aten::linear", "aten::mm"} & {event.name for event in record.events()}
    return found


@pytest.mark.parametrize("name", MODELS)
def test_E2_no_forward_step_or_generation_copies_a_weight(name: str) -> None:
    model = MODELS[name]()
    tokens = native.tokens(1, 2)
    assert large_copies(lambda: model(tokens)) == []

    def step() -> None:
        cache = KeyValueCache.init_cache(model.cfg, "cpu", 1, max_len=3)
        model(tokens, past_kv_cache=cache)
        model(tokens[:, :1], past_kv_cache=cache)

    with torch.no_grad():
        assert large_copies(lambda: model(tokens)) == []
        assert large_copies(step) == []
        assert large_copies(lambda: model.run_with_cache(tokens)) == []
    generate = {"max_new_tokens": 2, "stop_at_eos": False, "verbose": False}
    assert large_copies(lambda: model.generate(tokens, **generate)) == []
    captured = {"return_cache": "resid_post", **generate}
    assert large_copies(lambda: model.generate(tokens, **captured)) == []


def test_the_profiler_would_see_a_copied_weight() -> None:
    model = native.build(**WIDE)
    weight = model.blocks[0].attn.W_Q
    model.blocks[0].attn.W_Q = torch.nn.Parameter(weight.detach().contiguous())
    found = large_copies(lambda: model(native.tokens(1, 2)))
    assert any("copy_" in event for event in found)
    assert torch.equal(model(native.tokens()), native.build(**WIDE)(native.tokens()))


def test_weights_have_the_classic_shape_over_a_matrix_in_memory() -> None:
    attention = native.build("grouped").blocks[0].attn
    assert attention.W_Q.shape == (4, 14, 6)
    assert attention.W_Q.transpose(1, 2).is_contiguous()
    assert attention._W_K.transpose(1, 2).is_contiguous()
    assert attention.W_O.permute(2, 0, 1).is_contiguous()
    mlp = native.build("gated").blocks[0].mlp
    for weight in (mlp.W_in, mlp.W_gate, mlp.W_out):
        assert weight.T.is_contiguous()


# --- what is remembered of weights is never stale -------------------------------------------------


def edited_in_place(model: HookedTransformer) -> None:
    with torch.no_grad():
        model.blocks[0].attn.W_Q.mul_(0.5)
        model.blocks[1].attn.b_Q.add_(1.0)


def with_new_data(model: HookedTransformer) -> None:
    model.blocks[0].attn.W_Q.data = model.blocks[0].attn.W_Q.data * 0.5


def with_a_new_parameter(model: HookedTransformer) -> None:
    attention = model.blocks[0].attn
    attention.W_V = torch.nn.Parameter(attention.W_V.detach() * 0.5)


def after_a_step(model: HookedTransformer) -> None:
    with torch.enable_grad():
        model(native.tokens(), return_type="loss").backward()
    torch.optim.SGD(model.parameters(), 1.0).step()


def with_another_dict(model: HookedTransformer, assign: bool = False) -> None:
    model.load_state_dict(native.build(seed=1).state_dict(), assign=assign)


def after_a_round_trip(model: HookedTransformer) -> None:
    model.to(torch.float64).to(torch.float32)
    edited_in_place(model)


def parametrised(model: HookedTransformer) -> None:
    class Halved(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 0.5

    parametrize.register_parametrization(model.blocks[0].attn, "W_Q", Halved())


CHANGES = [edited_in_place, with_new_data, with_a_new_parameter, after_a_step, with_another_dict]
CHANGES += [lambda model: with_another_dict(model, assign=True), after_a_round_trip, parametrised]


@pytest.mark.parametrize("change", CHANGES)
def test_a_forward_follows_every_change_of_the_weights(change: Callable[..., None]) -> None:
    model = native.build()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        before = model(native.tokens())  # which remembers the joined projection
        untouched = copied(native.tokens())
        change(model)
        after = model(native.tokens())
    assert (after - before).abs().max() > 0.01
    torch.testing.assert_close(after, model(native.tokens()).detach(), atol=2e-5, rtol=1e-5)
    with torch.no_grad():
        assert torch.equal(copied(native.tokens()), untouched)
        change(copied)
        assert torch.equal(copied(native.tokens()), after)


MATRICES = ("attn.W_Q", "attn.W_V", "attn.W_O", "mlp.W_gate", "mlp.W_in", "mlp.W_out")
SQUARE = {"d_model": 16, "n_heads": 16, "d_head": 16, "d_mlp": 16, "gated_mlp": True}
EDITS: dict[str, Callable[[Tensor], None]] = {
    "halved in place": lambda weight: weight.mul_(0.5),
    "new data": lambda weight: setattr(weight, "data", weight.data * 0.5),
    "turned over in place": lambda weight: setattr(weight, "data", weight.data.transpose(-1, -2)),
    "contiguous, then halved": lambda weight: (
        setattr(weight, "data", weight.data.contiguous()), weight.mul_(0.5)
    ),
    "heads inmost, then halved": lambda weight: (
        setattr(weight, "data", weight.data.transpose(0, 1).contiguous().transpose(0, 1)),
        weight.mul_(0.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
@pytest.mark.parametrize("name", MATRICES)
def test_every_weight_may_be_edited_or_laid_out_anew_between_forwards(
    name: str, edit: Callable[[Tensor], None]
) -> None:
    model = native.build(**SQUARE)
    weight = model.blocks[0].get_parameter(name)
    how: dict[str, Any] = {"do_sample": False, "stop_at_eos": False, "output_logits": True}
    with torch.no_grad():
        before = model(native.tokens())
        logits = model.generate(native.tokens(), 2, **how).logits
        for _ in range(3):
            edit(weight)
            after = model(native.tokens())
            assert (after - before).abs().max() > 0.01
            before = after
    expected = model(native.tokens()).detach()  # by the weights themselves
    torch.testing.assert_close(after, expected, atol=2e-5, rtol=1e-5)
    again = model.generate(native.tokens(), 2, **how).logits
    torch.testing.assert_close(again[0], expected[:, -1], atol=2e-5, rtol=1e-5)
    assert not torch.equal(again[1], logits[1])


def test_adjoining_weights_of_another_layout_may_be_edited() -> None:
    model = native.build()
    attention = model.blocks[0].attn
    names = ("W_Q", "W_K", "W_V")
    whole = torch.cat([getattr(attention, name).detach() for name in names])  # heads first
    for name, part in zip(names, whole.split([len(whole) // 3] * 3), strict=True):
        setattr(attention, name, torch.nn.Parameter(part))
    with torch.no_grad():
        before = model(native.tokens())
        attention.W_Q.mul_(0.5)
        after = model(native.tokens())
    assert (after - before).abs().max() > 0.01
    torch.testing.assert_close(after, model(native.tokens()).detach(), atol=2e-5, rtol=1e-5)


def test_a_shallow_copy_of_a_layer_uses_its_own_weights() -> None:
    model = native.build()
    mlp = copy.copy(model.blocks[0].mlp)
    mlp.W_in = torch.nn.Parameter(mlp.W_in.detach() * 2)
    model.blocks[1].mlp = mlp
    expected = model(native.tokens()).detach()[:, -1]
    how: dict[str, Any] = {"do_sample": False, "stop_at_eos": False, "output_logits": True}
    logits = model.generate(native.tokens(), 1, **how).logits[0]
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


def test_neurons_may_be_cut_off_in_place() -> None:
    model = native.build()
    with torch.no_grad():
        model(native.tokens())
        mlp = model.blocks[0].mlp
        for name in ("W_in", "b_in", "W_out"):
            weight = getattr(mlp, name)
            weight.data = weight.data[:9] if name == "W_out" else weight.data[..., :9]
        after = model(native.tokens())
    torch.testing.assert_close(after, model(native.tokens()).detach(), atol=2e-5, rtol=1e-5)


class Storageless(torch.Tensor):
    """As quantised weights are: a tensor around others, with no memory of its own."""

    @staticmethod
    def __new__(cls, values: Tensor) -> "Storageless":
        how = {"strides": values.stride(), "dtype": values.dtype}
        return Tensor._make_wrapper_subclass(cls, values.shape, **how)

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        args = tree_map_only(Storageless, lambda each: each.values, args)
        out = function(*args, **(kwargs or {}))
        is_view = function in (torch.ops.aten.t.default, torch.ops.aten.detach.default)
        return Storageless(out) if is_view else out


@torch.no_grad()
def test_weights_may_have_no_memory_of_their_own() -> None:
    model = native.build()
    expected = model(native.tokens())
    mlp = model.blocks[0].mlp
    for name in ("W_in", "W_out"):
        wrapped = Storageless(getattr(mlp, name).detach())
        setattr(mlp, name, torch.nn.Parameter(wrapped, requires_grad=False))
    for _ in range(2):
        torch.testing.assert_close(model(native.tokens()), expected, atol=2e-5, rtol=1e-5)
    mlp.W_in.values.mul_(0.5)
    assert (model(native.tokens()) - expected).abs().max() > 0.01


def test_code_of_others_may_change_weights_between_the_steps_of_a_generation() -> None:
    """As one that adds fresh noise to a weight for every forward does."""
    model, factors = native.build(), iter((1.0, 0.5, 2.0))
    mlp, own = model.blocks[0].mlp, model.blocks[0].mlp.W_out.detach().clone()

    def forward(x: Tensor) -> Tensor:
        mlp.W_out.data = own * next(factors)
        return type(mlp).forward(mlp, x)

    mlp.forward = forward
    how: dict[str, Any] = {"do_sample": False, "stop_at_eos": False, "output_logits": True}
    out = model.generate(native.tokens(), 3, use_past_kv_cache=False, **how)
    del mlp.forward
    for step, factor in enumerate((1.0, 0.5, 2.0)):
        mlp.W_out.data = own * factor
        expected = model(out.sequences[:, : native.tokens().shape[1] + step])[:, -1]
        torch.testing.assert_close(out.logits[step], expected.detach(), atol=2e-5, rtol=1e-5)


def test_inputs_may_be_torch_funcs_before_anything_was_remembered() -> None:
    mlp, stream = native.build().blocks[0].mlp, torch.randn(1, 3, 14)

    def out() -> Tensor:
        return vjp(torch.no_grad()(lambda x: mlp(x)), stream)[0]

    fresh = out()
    with torch.no_grad():
        assert torch.equal(mlp(stream), fresh)
    assert torch.equal(out(), fresh)


def test_tangents_of_weights_come_through_no_grad() -> None:
    model, tokens = native.build(), native.tokens()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    directions = {name: torch.randn_like(weight) for name, weight in weights.items()}

    def tangent() -> Tensor:
        with forward_ad.dual_level():
            dual = {n: forward_ad.make_dual(weights[n], directions[n]) for n in weights}
            # the explicit steps: torch's fused kernel has no forward-mode derivative
            with model.hooks([("blocks.*.attn.hook_pattern", lambda value, hook: None)]):
                return forward_ad.unpack_dual(functional_call(model, dual, tokens)).tangent

    expected = tangent().detach()
    with torch.no_grad():
        model(tokens)
        torch.testing.assert_close(tangent(), expected, atol=1e-3, rtol=1e-4)


def put_elsewhere(model: HookedTransformer) -> None:
    """As those do who keep weights on a disk for a time."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = torch.nn.Parameter(weight.to("meta"))


def test_moved_weights_leave_no_memory_behind() -> None:
    model = native.build("gated")
    with torch.no_grad():
        model(native.tokens())
    old = [weakref.ref(weight.untyped_storage()) for weight in model.parameters()]
    model.to(torch.float64)
    gc.collect()
    assert not any(memory() for memory in old)
    with torch.no_grad():
        model(native.tokens())
    old = [weakref.ref(weight.untyped_storage()) for weight in model.parameters()]
    state = native.build("gated", seed=1).to(torch.float64).state_dict()
    model.load_state_dict(state, assign=True)
    gc.collect()
    assert not any(memory() for memory in old)
    with torch.no_grad():
        model(native.tokens())
    del state
    old = [weakref.ref(weight.untyped_storage()) for weight in model.parameters()]
    put_elsewhere(model)
    gc.collect()
    assert not any(memory() for memory in old)


@pytest.mark.parametrize("name", ["plain", "grouped_rotary", "tied"])
@torch.no_grad()
def test_weights_may_be_handed_in_by_torch_func(name: str) -> None:
    models, tokens = [native.build(name, seed) for seed in range(3)], native.tokens()
    expected = torch.stack([model(tokens) for model in models])
    state = dict(models[2].named_parameters())
    torch.testing.assert_close(functional_call(models[0], state, tokens), expected[2])
    stacked, _ = stack_module_state(models)  # type: ignore[arg-type]
    base = copy.deepcopy(models[0]).to("meta")
    ensemble = vmap(lambda weights: functional_call(base, weights, tokens))
    with pytest.warns(UserWarning, match="batching rule"):  # fused attention is not vectorised
        outputs = ensemble(stacked)
    torch.testing.assert_close(outputs, expected, atol=2e-5, rtol=1e-5)


# --- tied embeddings ------------------------------------------------------------------------------


def test_report_131_a_tied_unembedding_is_the_embedding_until_untied() -> None:
    model = native.build("tied")
    tokens = native.tokens()
    before = model(tokens)
    assert model.W_U.data_ptr() == model.W_E.data_ptr()
    assert torch.equal(model.W_U, model.W_E.T)
    n_untied = sum(p.numel() for p in native.build().parameters())
    assert sum(p.numel() for p in model.parameters()) == n_untied - model.W_E.numel()
    with pytest.raises(AttributeError, match="untie"):
        model.unembed.W_U = torch.nn.Parameter(torch.zeros(14, 23))
    model(tokens, return_type="loss").backward()
    tied_grad = model.W_E.grad.clone()
    seen = []
    model.add_hook("unembed.hook_out", lambda value, hook: seen.append(hook.name))
    model.untie()
    assert model.cfg.tie_word_embeddings is False
    assert torch.equal(model(tokens), before)
    assert seen == ["unembed.hook_out"]  # hooks stay attached
    model.reset_hooks()
    model.zero_grad()
    model(tokens, return_type="loss").backward()
    both = model.W_E.grad + model.unembed.W_U.grad.T
    torch.testing.assert_close(both, tied_grad, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        model.W_E.zero_()
    assert model.W_U.abs().max() > 0
    assert "unembed.W_U" in dict(model.named_parameters())
    model.untie()  # of an untied model: nothing


def test_a_tied_model_stays_tied_through_copies_casts_and_dicts() -> None:
    model = native.build("tied")
    before = model(native.tokens())
    for other in (copy.deepcopy(model), unpickled(model), native.build("tied", seed=1)):
        other.load_state_dict(model.state_dict())
        other.to(torch.float64).to(torch.float32)
        assert other.W_U.data_ptr() == other.W_E.data_ptr() != model.W_E.data_ptr()
        torch.testing.assert_close(other(native.tokens()), before)
        with torch.no_grad():
            other.W_E.add_(1.0)
        assert torch.equal(other.W_U, other.W_E.T)
    state = model.state_dict()
    state["unembed.W_U"] = state["unembed.W_U"] + 1
    with pytest.raises(RuntimeError, match="untie"):
        native.build("tied").load_state_dict(state)
    native.build().load_state_dict(state)  # an untied model takes it


# --- state dicts ----------------------------------------------------------------------------------

CLASSIC = {  # per block; 4 heads, 2 of them for keys and values
    "attn.W_Q": (4, 14, 6), "attn._W_K": (2, 14, 6), "attn._W_V": (2, 14, 6),
    "attn.W_O": (4, 6, 14), "attn.b_Q": (4, 6), "attn._b_K": (2, 6), "attn._b_V": (2, 6),
    "attn.b_O": (14,), "ln1.w": (14,), "ln1.b": (14,), "ln2.w": (14,), "ln2.b": (14,),
    "mlp.W_in": (14, 19), "mlp.b_in": (19,), "mlp.W_out": (19, 14), "mlp.b_out": (14,),
}  # fmt: skip
CLASSIC_OUTSIDE = {
    "embed.W_E": (23, 14), "pos_embed.W_pos": (32, 14), "unembed.W_U": (14, 23),
    "unembed.b_U": (23,), "ln_final.w": (14,), "ln_final.b": (14,),
}  # fmt: skip
EXTRA = {
    "gated": {"mlp.W_gate": (14, 19)},
    "qk_norm": {"attn.q_norm.w": (6,), "attn.k_norm.w": (6,)},
    "sinks": {"attn.sinks": (4,)},
    "solu_ln": {"mlp.ln.w": (19,), "mlp.ln.b": (19,)},
    "sandwich": {"ln1_post.w": (14,), "ln1_post.b": (14,), "ln2_post.w": (14,)},
}


def test_report_149_names_and_shapes_are_the_classic_ones() -> None:
    state = native.build("grouped").state_dict()
    blocks = {f"blocks.{i}.{n}": shape for i in range(2) for n, shape in CLASSIC.items()}
    assert {n: tuple(t.shape) for n, t in state.items()} == {**blocks, **CLASSIC_OUTSIDE}
    for name, extra in EXTRA.items():
        state = native.build(name).state_dict()
        for parameter, shape in extra.items():
            assert state[f"blocks.1.{parameter}"].shape == shape
    plain = native.build().state_dict()
    assert plain["blocks.0.attn.W_K"].shape == plain["blocks.0.attn.W_V"].shape == (4, 14, 6)


@pytest.mark.parametrize("name", native.VARIANTS)
@torch.no_grad()
def test_report_148_a_state_dict_restores_the_model_strictly(name: str) -> None:
    model = native.build(name)
    buffers = [n for n, _ in model.named_buffers() if not n.endswith("act_fn.eps")]  # of xIELU
    assert buffers == []  # so none that grows with n_ctx either
    before = model(native.tokens())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    for parameter in model.parameters():
        parameter.zero_()
    assert not torch.equal(model(native.tokens()), before)
    model.load_state_dict(saved)
    assert torch.equal(model(native.tokens()), before)
    fresh = HookedTransformer(model.cfg)
    fresh.load_state_dict(saved, assign=True)
    assert torch.equal(fresh(native.tokens()), before)


def test_report_148_what_is_missing_or_unknown_is_named() -> None:
    model = native.build()
    state = model.state_dict()
    without = {name: t for name, t in state.items() if name != "blocks.1.attn.W_Q"}
    with pytest.raises(RuntimeError, match=r"Missing.*blocks\.1\.attn\.W_Q"):
        model.load_state_dict(without)
    with pytest.raises(RuntimeError, match=r"Unexpected.*blocks\.1\.attn\.W_X"):
        model.load_state_dict({**state, "blocks.1.attn.W_X": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"size mismatch.*blocks\.0\.mlp\.W_in"):
        model.load_state_dict({**state, "blocks.0.mlp.W_in": torch.ones(19, 14)})


@pytest.mark.parametrize("name", ["plain", "rotary", "grouped_rotary"])
def test_report_149_dicts_of_older_versions_load_strictly(name: str) -> None:
    model = native.build(name)
    state = {n: t.clone().contiguous() for n, t in model.state_dict().items()}
    for layer in range(2):
        state[f"blocks.{layer}.attn.mask"] = torch.ones(32, 32).tril().bool()
        state[f"blocks.{layer}.attn.IGNORE"] = torch.tensor(-torch.inf)
        if name != "plain":
            state[f"blocks.{layer}.attn.rotary_sin"] = torch.zeros(32, 6)
            state[f"blocks.{layer}.attn.rotary_cos"] = torch.ones(32, 6)
    kept = set(state)
    fresh = native.build(name, seed=1)
    result = fresh.load_state_dict(state, strict=True)
    assert result.missing_keys == result.unexpected_keys == []
    torch.testing.assert_close(fresh(native.tokens()), model(native.tokens()))
    assert set(state) == kept


def test_classic_mixtures_are_processed_as_ours() -> None:
    model = native.build("experts")
    classic = {name: t.clone() for name, t in model.state_dict().items()}
    for name in list(classic):
        short = name.rsplit(".", 1)[-1]
        if ".experts." in name and short.startswith("W_"):
            classic[f"{name}.weight"] = classic.pop(name).T.contiguous()
        elif short == "W_router":
            linear = f"{name.removesuffix('W_router')}W_gate.weight"
            classic[linear] = classic.pop(name).T.contiguous()
    kept = set(classic)
    fresh = native.build("experts", seed=1)
    fresh.load_and_process_state_dict(classic)
    assert fresh.processed
    expected, got = (m(native.tokens()).log_softmax(-1) for m in (model, fresh))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert set(classic) == kept


# --- memory ---------------------------------------------------------------------------------------

LONG_CONTEXT = """
import json, resource, sys
import torch
from transformer_lens_lite import HookedTransformer, HookedTransformerConfig

def peak():
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale

small = {"n_layers": 2, "d_model": 32, "d_head": 8, "d_vocab": 50, "device": "cpu"}
def build(n_ctx, **kinds):
    model = HookedTransformer(HookedTransformerConfig(**small, n_ctx=n_ctx, act_fn="gelu", **kinds))
    with torch.no_grad():
        model(torch.arange(20)[None])
        model.run_with_cache(torch.arange(20)[None])
build(64)
build(64, positional_embedding_type="rotary")
used = {}
for kind in ("rotary", "alibi", "none", "standard"):
    before = peak()
    build(131072, positional_embedding_type=kind)
    used[kind] = peak() - before
before = peak()
build(131072, use_local_attn=True, attn_types=["local", "global"], window_size=4096)
used["window"] = peak() - before
print(json.dumps(used))
"""


def test_a_context_of_131072_costs_no_more_than_its_embedding(project_root: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LONG_CONTEXT],
        env={**os.environ, "PYTHONPATH": str(project_root)},
        capture_output=True,
        text=True,
        check=True,
    )
    used = json.loads(run.stdout)
    assert max(used.values()) < 100e6, used
    assert max(used["rotary"], used["alibi"], used["none"]) < 5e6, used


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Without the cycle collector only what is in no cycle dies."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_report_087_model_and_cache_die_with_their_last_name() -> None:
    model = native.build("grouped_rotary")
    tokens = native.tokens()
    cache = model.run_with_cache(tokens)[1]  # the output is a graph, which holds the weights
    model(tokens, return_type="loss").backward()
    with model.hooks(fwd_hooks=[("*hook_z", lambda value, hook: value)]):
        model(tokens)
    model.generate(tokens, max_new_tokens=2, stop_at_eos=False, verbose=False)
    past = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    with torch.no_grad():
        model(tokens, past_kv_cache=past)
    watched = {"model": weakref.ref(model), "cache": weakref.ref(cache)}
    watched["activation"] = weakref.ref(cache["pattern", 0])
    watched["weight"] = weakref.ref(model.W_E)
    watched["point"] = weakref.ref(model.hook_dict["hook_embed"])
    del model
    assert [name for name, ref in watched.items() if ref() is not None] == ["cache", "activation"]
    del cache
    assert watched["activation"]() is None


def resident() -> int:
    """Bytes of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


REPEATED: dict[str, Callable[[HookedTransformer], Any]] = {
    "run_with_cache": lambda model: model.run_with_cache(native.tokens(8, 32)),
    "incl_bwd": lambda model: model.run_with_cache(
        native.tokens(8, 32), return_type="loss", incl_bwd=True
    ),
    "hooks": lambda model: model.run_with_hooks(
        native.tokens(8, 32), fwd_hooks=[("*", lambda value, hook: value)]
    ),
    "build": lambda model: native.build(**WIDE),
}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("what", REPEATED)
def test_report_087_and_130_memory_stays_flat_over_50_runs(what: str) -> None:
    model = native.build(**WIDE | {"d_mlp": 400})
    for _ in range(15):
        REPEATED[what](model)
    before = resident()
    for _ in range(50):
        REPEATED[what](model)
    # one run keeps several megabytes: a leak of a single one of 50 would show
    assert resident() < 1.05 * before


def test_a_weight_of_the_same_memory_in_another_layout_is_another_weight() -> None:
    for name in ("W_Q", "b_Q"):
        model, ids = native.build("rotary"), native.tokens(1, 5)
        parameter = getattr(model.blocks[0].attn, name)
        with torch.no_grad():
            model(ids)
        parameter.data = parameter.data[:1].expand_as(parameter)
        with torch.no_grad():
            torch.testing.assert_close(model(ids), run_with_grad(model, ids))


def run_with_grad(model: HookedTransformer, ids: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return model(ids).detach()
