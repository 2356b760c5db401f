"""run_with_cache, ActivationCache: what is asked for, on the right axis, never changed later."""

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loud
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from transformer_lens_lite import recording
from transformer_lens_lite.activations import ActivationCache
from transformer_lens_lite.kv_cache import KeyValueCache
from transformer_lens_lite.model import HookedTransformer
from transformer_lens_lite.utils import get_act_name

KINDS = pytest.mark.parametrize("kind", list(loud.KINDS))
ALL_POINTS = {
    "use_attn_result": True,
    "use_split_qkv_input": True,
    "use_attn_in": True,
    "use_hook_mlp_in": True,
    "use_hook_tokens": True,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only lose by threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def with_all_points(kind: str) -> HookedTransformer:
    """A model whose blanket capture includes every optional point it can have."""
    overrides = dict(ALL_POINTS)
    if loud.KINDS[kind].get("attn_only"):
        del overrides["use_hook_mlp_in"]
    if loud.KINDS[kind].get("n_key_value_heads"):
        del overrides["use_attn_in"]
    return loud.build(kind, **overrides)


def assert_same(cache: Any, other: Any) -> None:
    assert list(cache) == list(other)
    for name in cache:
        assert torch.equal(cache[name], other[name]), name


# --- which ----------------------------------------------------------------------------------------


def test_report_088_the_default_keys_and_shapes_of_a_gpt2_like_model() -> None:
    model = loud.build("standard", n_layers=1)
    _, cache = model.run_with_cache(loud.tokens(2, 5))
    assert {name: tuple(tensor.shape) for name, tensor in cache.items()} == {
        "hook_embed": (2, 5, 24),
        "hook_pos_embed": (2, 5, 24),
        "blocks.0.hook_resid_pre": (2, 5, 24),
        "blocks.0.ln1.hook_scale": (2, 5, 1),
        "blocks.0.ln1.hook_normalized": (2, 5, 24),
        "blocks.0.attn.hook_q": (2, 5, 4, 10),
        "blocks.0.attn.hook_k": (2, 5, 4, 10),
        "blocks.0.attn.hook_v": (2, 5, 4, 10),
        "blocks.0.attn.hook_attn_scores": (2, 4, 5, 5),
        "blocks.0.attn.hook_pattern": (2, 4, 5, 5),
        "blocks.0.attn.hook_z": (2, 5, 4, 10),
        "blocks.0.hook_attn_out": (2, 5, 24),
        "blocks.0.hook_resid_mid": (2, 5, 24),
        "blocks.0.ln2.hook_scale": (2, 5, 1),
        "blocks.0.ln2.hook_normalized": (2, 5, 24),
        "blocks.0.mlp.hook_pre": (2, 5, 38),
        "blocks.0.mlp.hook_post": (2, 5, 38),
        "blocks.0.hook_mlp_out": (2, 5, 24),
        "blocks.0.hook_resid_post": (2, 5, 24),
        "ln_final.hook_scale": (2, 5, 1),
        "ln_final.hook_normalized": (2, 5, 24),
        "unembed.hook_in": (2, 5, 24),
        "unembed.hook_out": (2, 5, 61),
    }


def test_report_088_the_default_keys_of_a_llama_like_model_in_firing_order() -> None:
    _, cache = loud.build("rotary_gqa", n_layers=1).run_with_cache(loud.tokens(2, 5))
    assert " ".join(name.removeprefix("blocks.0.") for name in cache) == (
        "hook_embed hook_resid_pre ln1.hook_scale ln1.hook_normalized "
        "attn.hook_q attn.hook_k attn.hook_v attn.hook_rot_q attn.hook_rot_k "
        "attn.hook_attn_scores attn.hook_pattern attn.hook_z hook_attn_out hook_resid_mid "
        "ln2.hook_scale ln2.hook_normalized mlp.hook_pre mlp.hook_pre_linear mlp.hook_post "
        "hook_mlp_out hook_resid_post "
        "ln_final.hook_scale ln_final.hook_normalized unembed.hook_in unembed.hook_out"
    )
    assert cache["k", 0].shape == cache["rot_k", 0].shape == (2, 5, 2, 10)


@KINDS
def test_report_073_every_point_fires_once_unless_a_flag_turns_it_off(kind: str) -> None:
    model, fired = loud.build(kind), []
    for point in model.hook_points():
        if not point.optional:
            point.add_hook(lambda x, hook: fired.append(hook.name))
    model(loud.tokens(2, 5))
    model.reset_hooks()
    assert sorted(fired) == sorted(n for n, p in model.hook_dict.items() if not p.optional)
    _, cache = model.run_with_cache(loud.tokens(2, 5))
    assert list(cache) == fired


NAMES = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_pattern"]


@pytest.mark.parametrize(
    "names_filter",
    [
        NAMES,
        tuple(NAMES),
        set(NAMES),
        frozenset(NAMES),
        dict.fromkeys(NAMES),
        lambda name: name in NAMES,
        [NAMES[1], lambda name: name == NAMES[0]],
        ["blocks.0.hook_resid_p?st", "blocks.[1]*pattern"],
    ],
    ids=["list", "tuple", "set", "frozenset", "dict", "predicate", "mixed", "globs"],
)
def test_report_071_filters_of_every_form_give_exactly_the_named(names_filter: Any) -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, 5)
    _, everything = model.run_with_cache(ids)
    _, cache = model.run_with_cache(ids, names_filter=names_filter)
    assert list(cache) == NAMES
    for name in NAMES:
        torch.testing.assert_close(cache[name], everything[name], atol=1e-5, rtol=0)


def test_report_071_a_name_and_a_glob_are_filters() -> None:
    model, ids = loud.build(), loud.tokens()
    assert list(model.run_with_cache(ids, names_filter=NAMES[0])[1]) == [NAMES[0]]
    _, cache = model.run_with_cache(ids, names_filter="blocks.*.hook_resid_post")
    assert list(cache) == [f"blocks.{i}.hook_resid_post" for i in range(3)]
    assert len(model.run_with_cache(ids, names_filter=[])[1]) == 0


@pytest.mark.parametrize("kind", ["standard", "rotary_gqa", "rotary_pairs", "shortformer"])
def test_report_072_any_single_point_can_be_captured_alone(kind: str) -> None:
    model, ids = loud.build(kind), loud.tokens(1, 4)
    for name in model.hook_dict:
        if name.endswith("hook_attn_in") and loud.KINDS[kind].get("n_key_value_heads"):
            continue  # refused: see test_hooks
        _, cache = model.run_with_cache(ids, names_filter=name, remove_batch_dim=True)
        assert list(cache) == [name]
        assert not cache.has_batch_dim


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("blocks.0.hook_resid_pots", "Did you mean 'blocks.0.hook_resid_post'"),
        ("blocks.7.hook_resid_post", "Did you mean"),
        ("hook_resid_post", "Did you mean 'blocks.*hook_resid_post'"),
        ("residpost", "no hook point is called 'residpost'"),
        (["hook_embed", "blocks.1.hook_patern"], "no hook point is called 'blocks.1.hook_patern'"),
        ("blocks.*.hook_rezid", "matches none of the"),
        (lambda name: False, "matches none of the"),
    ],
)
def test_unknown_names_raise_before_the_forward(wrong: Any, message: str) -> None:
    model, ran = loud.build(), []
    model.add_hook("hook_embed", lambda x, hook: ran.append(1))
    for error in (KeyError, ValueError):
        with pytest.raises(error, match=message):
            model.run_with_cache(loud.tokens(), names_filter=wrong)
    assert ran == []
    assert len(model.list_hooks()) == 1


def test_unknown_arguments_are_type_errors() -> None:
    model = loud.build()
    with pytest.raises(TypeError, match="name_filter"):
        model.run_with_cache(loud.tokens(), name_filter="hook_embed")
    assert model.list_hooks() == {}


# --- the numbers ----------------------------------------------------------------------------------


@KINDS
def test_capturing_does_not_change_the_output(kind: str) -> None:
    model, ids = with_all_points(kind), loud.tokens(2, 7)
    logits, _ = model.run_with_cache(ids)
    torch.testing.assert_close(logits, model(ids), atol=1e-5, rtol=0)


@KINDS
def test_what_is_kept_without_a_copy_is_what_a_copy_would_have_kept(kind: str) -> None:
    """The library's own arithmetic edits nothing in place that somebody has been shown."""
    model, ids = with_all_points(kind), loud.tokens(2, 7)
    _, uncopied = model.run_with_cache(ids)
    copied, hooks, _ = model.get_caching_hooks()
    with torch.no_grad():
        model.run_with_hooks(ids, fwd_hooks=hooks)
    # a norm that is called once for queries, keys and values each; the hooks keep the latest
    latest = {name.split(":")[0]: value for name, value in uncopied.items()}
    assert_same(latest, copied)


@pytest.mark.parametrize("kind", ["standard", "rotary_window", "alibi_gqa", "shortformer"])
def test_report_031_padded_rows_have_the_activations_they_have_alone(kind: str) -> None:
    model = loud.build(kind)
    rows, ids, mask = loud.ragged([3, 6])
    _, cache = model.run_with_cache(ids, attention_mask=mask)
    for i, row in enumerate(rows):
        n = row.shape[1]
        _, alone = model.run_with_cache(row)
        for name, value in alone.items():
            padded = cache[name][i : i + 1]
            axis = model.hook_dict[name].pos_axis
            padded = padded.narrow(axis, padded.shape[axis] - n, n)
            if axis == 2:
                padded = padded[..., -n:]
            torch.testing.assert_close(padded, value, atol=1e-4, rtol=0, msg=name)


def test_additive_identities_hold_in_the_cache() -> None:
    _, cache = with_all_points("standard").run_with_cache(loud.tokens(2, 5))
    for layer in range(3):
        assert torch.equal(
            cache["resid_pre", layer] + cache["attn_out", layer], cache["resid_mid", layer]
        )
        assert torch.equal(
            cache["resid_mid", layer] + cache["mlp_out", layer], cache["resid_post", layer]
        )
        assert torch.equal(cache["mlp_in", layer], cache["resid_mid", layer])
        assert torch.equal(cache["q_input", layer][:, :, 1], cache["resid_pre", layer])


# --- which part: positions, batch, device ---------------------------------------------------------


@KINDS
def test_pos_slice_takes_the_query_positions_of_every_point(kind: str) -> None:
    model, ids = with_all_points(kind), loud.tokens(2, 6)
    prefix = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    with torch.no_grad():
        model(loud.tokens(2, 3, 4), past_kv_cache=prefix)
    prefix.freeze()
    _, whole = model.run_with_cache(ids, past_kv_cache=prefix)
    axes = {name: 2 if name.endswith(("scores", "pattern")) else 1 for name in whole}
    assert all(value.shape[axes[name]] == 6 for name, value in whole.items())
    for pos_slice, index in {
        -1: [5],
        (1, 4): [1, 2, 3],
        (None, None, 2): [0, 2, 4],
        "list": [0, 3],
        "tensor": [2],
    }.items():
        given = {"list": [0, 3], "tensor": torch.tensor([2])}.get(pos_slice, pos_slice)
        _, cache = model.run_with_cache(ids, past_kv_cache=prefix, pos_slice=given)
        assert list(cache) == list(whole)
        for name, value in whole.items():
            wanted = value.index_select(axes[name], torch.tensor(index))
            assert torch.equal(cache[name], wanted), name


def test_a_slice_does_not_keep_the_whole_alive() -> None:
    _, cache = loud.build().run_with_cache(loud.tokens(1, 40), pos_slice=(0, 2))
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in cache.values())


@KINDS
def test_every_value_has_the_batch_first_and_it_can_be_removed(kind: str) -> None:
    model = with_all_points(kind)
    _, whole = model.run_with_cache(loud.tokens(3, 5))
    assert all(value.shape[0] == 3 for value in whole.values())
    ids = loud.tokens(1, 5)
    _, cache = model.run_with_cache(ids)
    _, removed = model.run_with_cache(ids, remove_batch_dim=True)
    for name, value in cache.items():
        assert torch.equal(removed[name], value[0])
    assert_same(cache.remove_batch_dim(), removed)
    assert cache.remove_batch_dim() is cache  # a second time changes nothing
    with pytest.raises(ValueError, match="batch of 1, hook_embed has 3"):
        model.run_with_cache(loud.tokens(3, 5), remove_batch_dim=True, names_filter="hook_embed")
    with pytest.raises(ValueError, match="cannot drop a batch of 3"):
        whole.remove_batch_dim()
    assert whole.has_batch_dim
    assert model.list_hooks() == {}


def test_report_076_and_077_a_device_for_what_is_kept_moves_nothing_else() -> None:
    model = loud.build()
    before = [(p.device, p.data_ptr()) for p in model.parameters()]
    logits, cache = model.run_with_cache(loud.tokens(), device="meta")
    assert {t.device.type for t in cache.values()} == {"meta"}
    assert logits.device.type == model.cfg.device == "cpu"
    assert [(p.device, p.data_ptr()) for p in model.parameters()] == before
    assert {t.device.type for t in model.run_with_cache(loud.tokens())[1].values()} == {"cpu"}


@pytest.mark.parametrize("kind", ["rotary_gqa", "alibi_window"])
def test_report_077_what_is_kept_is_where_it_was_made(kind: str) -> None:
    """And not on torch's default device, nor on the one the model was built on."""
    model, ids = loud.build(kind), loud.tokens(2, 6)
    with torch.device("meta"):
        _, cache = model.run_with_cache(ids)
    assert {t.device.type for t in cache.values()} == {"cpu"}
    model.to("meta")
    _, cache = model.run_with_cache(ids)
    assert len(cache) > 30
    assert {t.device.type for t in cache.values()} == {"meta"}


@pytest.mark.parametrize("stop", [0, 1, 2, 3, -1])
def test_report_078_stop_at_layer_stops_there(stop: int) -> None:
    model, ids = loud.build(), loud.tokens(2, 5)
    _, whole = model.run_with_cache(ids)
    residual, cache = model.run_with_cache(ids, stop_at_layer=stop)
    n = stop % 3 if stop < 0 else stop
    expected = whole["resid_pre", n] if n < 3 else whole["resid_post", 2]
    assert torch.equal(residual, expected)
    layers = {int(name.split(".")[1]) for name in cache if name.startswith("blocks")}
    assert layers == set(range(n))
    assert "ln_final.hook_scale" not in cache


def test_a_cached_prefix_gives_the_new_positions() -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(2, 9)
    prefix = KeyValueCache.init_cache(model.cfg, "cpu", 2)
    with torch.no_grad():
        model(ids[:, :4], past_kv_cache=prefix)
    _, whole = model.run_with_cache(ids)
    _, cache = model.run_with_cache(ids[:, 4:], past_kv_cache=prefix)
    assert prefix.length == 9
    for name, value in whole.items():
        part = value[:, :, 4:] if name.endswith(("scores", "pattern")) else value[:, 4:]
        torch.testing.assert_close(cache[name], part, atol=1e-4, rtol=0, msg=name)


def test_a_dict_instead_of_an_object() -> None:
    _, cache = loud.build().run_with_cache(loud.tokens(), return_cache_object=False)
    assert type(cache) is dict
    assert "blocks.0.attn.hook_pattern" in cache


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["standard", "rotary_gqa", "shortformer"])
def test_report_112_incl_bwd_gives_the_gradient_of_each_point(kind: str) -> None:
    # without split inputs, whose norm is visited three times
    model = loud.build(kind, use_attn_result=True, use_hook_mlp_in=True)
    ids, names = loud.tokens(2, 5), model.resolve_names()
    live: dict[str, Tensor] = {}

    def keep(x: Tensor, hook: Any) -> Tensor:
        live[hook.name] = x.view_as(x)
        return live[hook.name]

    loss = model.run_with_hooks(ids, return_type="loss", fwd_hooks=[(n, keep) for n in names])
    gradients = torch.autograd.grad(loss, [live[n] for n in names])
    model.zero_grad()
    out, cache = model.run_with_cache(ids, return_type="loss", incl_bwd=True, names_filter=names)
    assert torch.equal(out, loss)
    for name, gradient in zip(names, gradients, strict=True):
        torch.testing.assert_close(cache[name + "_grad"], gradient, atol=1e-6, rtol=0)
    assert model.blocks[0].attn.W_Q.grad is not None
    assert model.list_hooks() == {}


def test_incl_bwd_with_a_slice_and_without_batch() -> None:
    model, ids = loud.build(), loud.tokens(1, 5)
    how: dict[str, Any] = {"return_type": "loss", "incl_bwd": True, "names_filter": "*hook_q"}
    _, whole = model.run_with_cache(ids, **how)
    _, cache = model.run_with_cache(ids, pos_slice=-1, remove_batch_dim=True, **how)
    name = "blocks.1.attn.hook_q_grad"
    assert torch.equal(cache[name], whole[name][0, -1:])
    assert torch.equal(cache["blocks.1.attn.hook_q"], whole["q", 1][0, -1:])


@pytest.mark.parametrize("return_type", ["logits", "both", None])
def test_incl_bwd_needs_a_scalar(return_type: str | None) -> None:
    model = loud.build()
    with pytest.raises(ValueError, match="incl_bwd needs a scalar output"):
        model.run_with_cache(loud.tokens(), incl_bwd=True, return_type=return_type)
    assert model.list_hooks() == {}


# --- what is kept stays as it was -----------------------------------------------------------------


def test_without_hooks_nothing_is_copied() -> None:
    _, cache = loud.build().run_with_cache(loud.tokens())
    for layer in (0, 1):
        assert cache["resid_post", layer].data_ptr() == cache["resid_pre", layer + 1].data_ptr()


@pytest.mark.parametrize("how", ["hook", "permanent", "torch", "pre-hook"])
def test_an_edit_in_place_changes_nothing_that_was_kept_before(how: str) -> None:
    model, ids = loud.build(), loud.tokens()
    _, clean = model.run_with_cache(ids)
    block = model.blocks[1]

    def zero(x: Tensor, hook: Any = None) -> None:
        x.zero_()

    if how == "torch":
        model.blocks[0].register_forward_hook(lambda module, args, out: out.zero_())
    elif how == "pre-hook":
        block.register_forward_pre_hook(lambda module, args: zero(args[0]))
    else:
        model.add_hook("blocks.1.hook_resid_pre", zero, is_permanent=how == "permanent")
    with torch.no_grad():
        _, cache = model.run_with_cache(ids)
    assert torch.equal(cache["resid_post", 0], clean["resid_post", 0])
    assert torch.equal(cache["resid_mid", 0], clean["resid_mid", 0])
    assert cache["resid_pre", 1].eq(0).all()  # what the model carried on with
    assert not torch.equal(cache["resid_post", 1], clean["resid_post", 1])


def test_an_edit_of_a_gradient_in_place_changes_none_kept_before() -> None:
    model, ids = loud.build(), loud.tokens()
    how: dict[str, Any] = {"return_type": "loss", "incl_bwd": True}
    _, clean = model.run_with_cache(ids, **how)

    def zero(gradient: Tensor, hook: Any) -> None:
        gradient.zero_()

    with model.hooks(bwd_hooks=[("blocks.0.hook_resid_post", zero)]):
        _, cache = model.run_with_cache(ids, **how)
    assert cache["blocks.0.hook_resid_post_grad"].eq(0).all()
    for name in ("blocks.1.hook_resid_pre_grad", "blocks.1.hook_resid_mid_grad"):
        assert torch.equal(cache[name], clean[name])


def test_caching_hooks_of_ones_own_always_copy() -> None:
    model, ids = loud.build(), loud.tokens()
    kept = model.add_caching_hooks(["blocks.0.hook_resid_post"])
    model.add_hook("blocks.1.hook_resid_pre", lambda x, hook: x.zero_())
    with torch.no_grad():
        model(ids)
    assert not kept["blocks.0.hook_resid_post"].eq(0).all()
    model.reset_hooks()


@pytest.mark.parametrize("pos_slice", [None, (1, 3), 0])
def test_report_074_caching_hooks_work_in_a_context(pos_slice: Any) -> None:
    model, ids = loud.build(), loud.tokens(2, 5)
    cache, forward, backward = model.get_caching_hooks(
        "*resid_mid", incl_bwd=True, pos_slice=pos_slice
    )
    with model.hooks(forward, backward):
        model(ids, return_type="loss").backward()
    _, expected = model.run_with_cache(
        ids, "loss", names_filter="*resid_mid", incl_bwd=True, pos_slice=pos_slice
    )
    assert set(cache) == set(expected)
    for name in cache:
        torch.testing.assert_close(cache[name], expected[name], atol=1e-6, rtol=0)


def test_what_is_kept_has_no_graph() -> None:
    _, cache = loud.build().run_with_cache(loud.tokens())
    assert not any(value.requires_grad for value in cache.values())


# --- nothing leaks --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_report_091_nothing_is_left_after_an_exception(error: type[BaseException]) -> None:
    model, ids = loud.build(), loud.tokens()
    clean = model(ids)

    def boom(x: Tensor, hook: Any) -> None:
        raise error

    handle = model.add_hook("blocks.1.hook_mlp_out", boom)
    with pytest.raises(error):
        model.run_with_cache(ids)
    assert sum(map(len, model.list_hooks().values())) == 1  # the user's own
    assert model.context_level == 0
    handle.remove()
    assert torch.equal(model(ids), clean)


def test_report_093_run_with_cache_leaves_other_peoples_hooks_alone() -> None:
    model, seen = loud.build(), []
    model.add_hook("hook_embed", lambda x, hook: seen.append("mine"))
    model.add_perma_hook("hook_embed", lambda x, hook: seen.append("permanent"))
    model.run_with_cache(loud.tokens())
    model(loud.tokens())
    assert seen == ["mine", "permanent"] * 2


def test_reset_hooks_end_false_keeps_capturing_into_the_same_dict() -> None:
    model, first, second = loud.build(), loud.tokens(1, 5), loud.tokens(1, 5, 7)
    how: dict[str, Any] = {"return_cache_object": False, "names_filter": "hook_embed"}
    _, cache = model.run_with_cache(first, reset_hooks_end=False, **how)
    before = cache["hook_embed"].clone()
    model(second)
    assert not torch.equal(cache["hook_embed"], before)
    model.reset_hooks()
    model(first)
    assert not torch.equal(cache["hook_embed"], before)


def test_later_forwards_do_not_change_a_cache() -> None:
    model = loud.build()
    _, cache = model.run_with_cache(loud.tokens())
    kept = {name: value.clone() for name, value in cache.items()}
    model(loud.tokens(1, 9, 8))
    model.run_with_cache(loud.tokens(1, 9, 8))
    assert_same(cache, kept)


def test_report_087_a_cache_does_not_keep_its_model_alive() -> None:
    model = loud.build()
    _, cache = model.run_with_cache(loud.tokens())
    assert cache.model is model
    alive, tensor = weakref.ref(model), weakref.ref(cache["resid_post", 0])
    gc.disable()
    try:
        del model
        assert alive() is None
        assert cache["resid_post", -1] is cache["blocks.2.hook_resid_post"]
        with pytest.raises(ReferenceError, match="gone"):
            _ = cache.model
        with pytest.raises(KeyError, match="not in this cache"):
            _ = cache["resid_post", 9]
        del cache
        assert tensor() is None
    finally:
        gc.enable()


# --- the object -----------------------------------------------------------------------------------


def small_cache() -> ActivationCache:
    return loud.build("qk_norm").run_with_cache(loud.tokens(2, 5))[1]


def test_it_is_a_mapping_in_firing_order() -> None:
    cache = small_cache()
    assert list(cache) == list(cache.keys()) == [name for name, _ in cache.items()]
    assert len(cache) == len(list(cache.values())) == len(dict(cache))
    assert all(a is b for a, b in zip(cache.values(), dict(cache).values(), strict=True))
    assert cache.get("nothing") is None
    assert cache.get("embed") is cache["hook_embed"]
    assert (cache.has_embed, cache.has_pos_embed) == (True, False)


def test_caches_compare_by_identity() -> None:
    cache, other = small_cache(), small_cache()
    assert cache == cache
    assert cache != other
    assert len({cache, other}) == 2


KEYS = [
    (("pattern", 1), "blocks.1.attn.hook_pattern"),
    (("pattern", -1), "blocks.2.attn.hook_pattern"),
    (("pattern", torch.tensor(1)), "blocks.1.attn.hook_pattern"),
    (("attn", 0), "blocks.0.attn.hook_pattern"),
    (("attn_logits", 0), "blocks.0.attn.hook_attn_scores"),
    (("k", 2, "a"), "blocks.2.attn.hook_k"),
    (("key", 2), "blocks.2.attn.hook_k"),
    (("value", -3, "attention"), "blocks.0.attn.hook_v"),
    (("mlp_pre", 1), "blocks.1.mlp.hook_pre"),
    (("post", 1, "m"), "blocks.1.mlp.hook_post"),
    (("scale", 1, "ln1"), "blocks.1.ln1.hook_scale"),
    (("normalized", -1, "ln2"), "blocks.2.ln2.hook_normalized"),
    (("resid_post", 0, "b"), "blocks.0.hook_resid_post"),
    (("scale",), "ln_final.hook_scale"),
    (("scale", None), "ln_final.hook_scale"),
    ("normalized", "ln_final.hook_normalized"),
    ("embed", "hook_embed"),
    ("hook_embed", "hook_embed"),
    ("q1", "blocks.1.attn.hook_q"),
    ("pre2", "blocks.2.mlp.hook_pre"),
    ("scale0ln2", "blocks.0.ln2.hook_scale"),
]


@pytest.mark.parametrize(("key", "name"), KEYS, ids=str)
def test_the_key_grammar(key: Any, name: str) -> None:
    cache = small_cache()
    assert key in cache
    assert cache[key] is cache.cache_dict[name]


CACHE: list[ActivationCache] = []


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_name_is_found_by_its_parts_and_from_the_end(data: st.DataObject) -> None:
    if not CACHE:
        CACHE.append(small_cache())
    cache = CACHE[0]
    full = data.draw(st.sampled_from(list(cache)))
    if not full.startswith("blocks."):
        assert cache[full] is cache.cache_dict[full]
        return
    _, layer, *place, last = full.split(".")
    number = data.draw(st.sampled_from([int(layer), int(layer) - 3]))
    short = last.removeprefix("hook_")
    assert cache[short, number, ".".join(place) or None] is cache[full]
    assert get_act_name(short, int(layer), ".".join(place) or None) == full


ATOMS = st.one_of(
    st.none(), st.integers(-9, 9), st.floats(allow_nan=False), st.text(max_size=8),
    st.binary(max_size=3),
    st.sampled_from(["q", "pattern", "scale", "ln1", "resid_post", "embed"]),
    st.lists(st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(key=st.one_of(st.text(max_size=8), st.lists(ATOMS, max_size=4).map(tuple)))
def test_whatever_is_no_key_is_a_key_error(key: Any) -> None:
    if not CACHE:
        CACHE.append(small_cache())
    try:
        found = CACHE[0][key]
    except KeyError:
        assert key not in CACHE[0]
    else:
        assert isinstance(found, Tensor)
        assert key in CACHE[0]


def test_a_miss_says_why() -> None:
    model = loud.build("rotary_pairs")
    _, cache = model.run_with_cache(loud.tokens(), names_filter="*hook_resid*")
    with pytest.raises(KeyError, match="the model has that hook point, but it was not captured"):
        _ = cache["q", 0]
    with pytest.raises(KeyError, match="parallel and attention-only blocks have no resid_mid"):
        _ = cache["resid_mid", 0]
    with pytest.raises(KeyError, match="Did you mean 'blocks.0.hook_resid_post'"):
        _ = cache["blocks.0.hook_resid_pst"]


def test_to_converts_floats_and_returns_itself() -> None:
    model = loud.build(use_hook_tokens=True)
    _, cache = model.run_with_cache(loud.tokens())
    expected = cache["resid_post", 1].to(torch.bfloat16)
    assert cache.to(torch.bfloat16) is cache
    assert torch.equal(cache["resid_post", 1], expected)
    assert cache["hook_tokens"].dtype == torch.int64
    cache.to("meta", torch.float32)
    assert {t.device.type for t in cache.values()} == {"meta"}
    assert cache["hook_tokens"].dtype == torch.int64
    assert cache["resid_post", 1].dtype == torch.float32
    cache.to("meta")


@pytest.mark.parametrize("rows", [0, -1, (0, 1), [1, 0], slice(1, 2), torch.tensor([1])])
def test_slicing_rows_gives_a_new_cache(rows: Any) -> None:
    cache = small_cache()
    part = cache.apply_slice_to_batch_dim(rows)
    index = slice(*rows) if isinstance(rows, tuple) else rows
    assert list(part) == list(cache)
    assert all(torch.equal(part[name], cache[name][index]) for name in cache)
    assert part.has_batch_dim == (not isinstance(rows, int))
    assert torch.equal(part["z", -1], part["z", 2])
    assert cache.has_batch_dim
    if not part.has_batch_dim:
        with pytest.raises(ValueError, match="no batch axis"):
            part.apply_slice_to_batch_dim(0)


def test_a_sliced_cache_still_knows_its_model() -> None:
    model = loud.build()
    _, cache = model.run_with_cache(loud.tokens(2, 5))
    assert cache.apply_slice_to_batch_dim(0).model is model


def test_pickling_drops_the_model_and_nothing_else() -> None:
    model = loud.build("rotary_gqa", d_model=96, n_ctx=200)
    _, cache = model.run_with_cache(loud.tokens(2, 150))
    for kept in (cache, cache.apply_slice_to_batch_dim(1)):
        data = pickle.dumps(kept)
        assert len(data) <= 1.1 * kept.nbytes()
        again = pickle.loads(data)
        assert_same(kept, again)
        assert again.has_batch_dim == kept.has_batch_dim
        assert torch.equal(again["q", -1], kept["q", -1])
        with pytest.raises(ReferenceError):
            _ = again.model
    assert cache.model is model
    assert_same(copy.deepcopy(cache), cache)


def test_the_repr_counts_and_weighs() -> None:
    cache = small_cache()
    text = repr(cache)
    assert (
        text.splitlines()[0]
        == f"ActivationCache: {len(cache)} activations, {cache.nbytes() / 2**20:.2f} MiB"
    )
    assert cache.nbytes() == sum(t.numel() * 4 for t in cache.values())
    assert "hook_embed" in text
    assert "float32 [2, 5, 24]" in text
    assert f"{len(cache) - 10} more" in text
    assert len(text.splitlines()) == 12
    assert "without batch axis" in repr(cache.apply_slice_to_batch_dim(0))


def test_editing_the_output_leaves_the_cache_alone() -> None:
    model = loud.build()
    logits, cache = model.run_with_cache(loud.tokens(2, 6))
    kept = cache["unembed.hook_out"].clone()
    logits.fill_(0)
    assert torch.equal(cache["unembed.hook_out"], kept)
    residual, cache = model.run_with_cache(loud.tokens(2, 6), stop_at_layer=2)
    kept = cache["resid_post", 1].clone()
    residual.fill_(0)
    assert torch.equal(cache["resid_post", 1], kept)


@pytest.mark.parametrize("through", ["view", "numpy", "set_item", "out"])
def test_the_logits_are_copied_when_they_are_first_written_to(through: str) -> None:
    model = loud.build()
    with torch.no_grad():
        logits, cache = model.run_with_cache(loud.tokens(2, 6))
    kept = cache["unembed.hook_out"]
    if recording.COPY_ON_WRITE is not None:
        assert torch._C._is_cow_tensor(kept)  # a long batch's logits are not held twice
    before = torch.tensor(logits.tolist())
    if through == "view":
        logits[:, -1].fill_(7)
    elif through == "numpy":
        logits.numpy()[:] = 7
    elif through == "set_item":
        logits[0, 0, 0] = 7
    else:
        torch.neg(logits.clone(), out=logits)
    assert not torch.equal(logits, before)
    assert torch.equal(kept, before)
    kept.fill_(3)  # nor does the cache write into what was handed out
    assert not (logits == 3).any()


def test_a_copy_on_write_is_a_plain_copy_where_torch_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    array = torch.from_numpy(np.ones((2, 3)))  # memory of another owner
    part = torch.ones(4, 3)[:2]  # not all of its memory
    for value in (array, part):
        copy = recording.parted(value)
        assert copy.untyped_storage().nbytes() == copy.nbytes
        value.fill_(2)
        assert (copy == 1).all()
    monkeypatch.setattr(recording, "COPY_ON_WRITE", None)
    whole = torch.ones(3)
    copy = recording.parted(whole)
    whole.fill_(2)
    assert (copy == 1).all()


def test_report_089_caches_are_cast_stored_and_put_together(tmp_path: Path) -> None:
    model, ids = loud.build("rotary_gqa"), loud.tokens(3, 6)
    _, whole = model.run_with_cache(ids)
    rows = [model.run_with_cache(ids[i : i + 1])[1] for i in range(3)]
    together = ActivationCache(
        {name: torch.cat([row[name] for row in rows]) for name in whole}, model
    )
    assert list(together) == list(whole)
    for name, value in whole.items():
        torch.testing.assert_close(together[name], value, atol=1e-5, rtol=1e-5)
    lens = whole.logit_lens()
    torch.testing.assert_close(together.logit_lens(), lens, atol=1e-4, rtol=1e-4)
    whole.to(torch.bfloat16)
    whole.save(tmp_path / "cache.safetensors")
    again = ActivationCache.load(tmp_path / "cache.safetensors")
    assert {value.dtype for value in again.values()} == {torch.bfloat16}
    again.to(torch.float32)
    for name, value in together.items():
        assert (again[name] - value.nan_to_num(neginf=0)).abs().nan_to_num(posinf=0).max() < 0.1
        assert torch.equal(again[name], whole[name].float())


def test_report_089_older_spellings_fill_the_given_dictionary() -> None:
    model = loud.build()
    everything: dict[str, Tensor] = {}
    some: dict[str, Tensor] = {}
    model.cache_all(everything)
    model.cache_some(
        some, lambda name: name.endswith("hook_z"), incl_bwd=True, remove_batch_dim=True
    )
    tokens = loud.tokens(1, 4)
    model(tokens, return_type="loss").backward()
    _, expected = model.run_with_cache(tokens)
    assert everything.keys() == expected.keys()
    layers = range(model.cfg.n_layers)
    names = {f"blocks.{layer}.attn.hook_z" for layer in layers}
    assert some.keys() == names | {name + "_grad" for name in names}
    for name in names:
        assert torch.equal(some[name], expected[name][0])
        assert torch.equal(everything[name], expected[name])
    model.reset_hooks()
    everything.clear()
    model(tokens)
    assert not everything
