"""Hook points: which there are, when they fire, what attaching and detaching does."""

import copy
import functools
import inspect
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import native
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from transformer_lens_lite import CaptureSpec, HookedTransformer, hooks, root_module
from transformer_lens_lite.components.norm import LayerNorm
from transformer_lens_lite.hooks import (
    Component,
    ComponentList,
    HookPoint,
    editors_somewhere,
)
from transformer_lens_lite.root_module import UnknownHookError
from transformer_lens_lite.specs import NormSpec

OPTIONAL = {"hook_tokens", "hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input"}
OPTIONAL |= {"hook_result", "hook_mlp_in"}
PATTERN, Z = "blocks.1.attn.hook_pattern", "blocks.1.attn.hook_z"


@pytest.fixture(scope="module")
def shared_model() -> HookedTransformer:
    return native.build()


@pytest.fixture
def model(shared_model: HookedTransformer) -> Iterator[HookedTransformer]:
    """A plain model that a test has to leave without hooks."""
    shared_model.zero_grad(set_to_none=True)
    yield shared_model
    assert shared_model.list_hooks() == {}
    assert shared_model.context_level == 0
    assert not any(point.ctx for point in shared_model.hook_points())


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return native.tokens()


def ignore(value: Tensor, hook: HookPoint) -> None:
    """A hook that only looks."""


def short(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def counts(model: HookedTransformer) -> Counter[str]:
    """How many hooks each point has."""
    return Counter({name: len(handles) for name, handles in model.list_hooks().items()})


def shares_keys(model: HookedTransformer) -> bool:
    """Whether there are fewer key than query heads, so that `hook_attn_in` has no shape."""
    cfg = model.cfg
    fewer = cfg.n_key_value_heads not in (None, cfg.n_heads)
    return fewer and not cfg.ungroup_grouped_query_attention


def scaled_by(factor: float) -> Callable[..., Tensor]:
    return lambda value, hook: value * factor


# --- which points fire, in which order, with which shape ------------------------------------------


def norm(name: str) -> str:
    return f"{name}.hook_scale {name}.hook_normalized"


LN1, LN2 = norm("ln1"), norm("ln2")
QKV = "attn.hook_q attn.hook_k attn.hook_v"
QK_NORM = f"{norm('attn.q_norm')} {norm('attn.k_norm')}"
TURNED = "attn.hook_rot_q attn.hook_rot_k"
LOOKING = "attn.hook_attn_scores attn.hook_pattern attn.hook_z"
MLP, GATED = "mlp.hook_pre mlp.hook_post", "mlp.hook_pre mlp.hook_pre_linear mlp.hook_post"
SOLU = f"mlp.hook_pre mlp.hook_mid {norm('mlp.ln')} mlp.hook_post"
OUT = "unembed.hook_in unembed.hook_out"
END = f"{norm('ln_final')} {OUT}"
AFTER = f"{LOOKING} hook_attn_out hook_resid_mid {LN2}"  # where nothing unusual comes between
EMBED = "hook_embed hook_pos_embed"
START = "hook_resid_pre"
# variant -> before the blocks, in each block, after the blocks
GOLDEN = {
    "plain": (EMBED, f"{START} {LN1} {QKV} {AFTER} {MLP} hook_mlp_out hook_resid_post", END),
    "tied": (EMBED, f"{START} {LN1} {QKV} {AFTER} {MLP} hook_mlp_out hook_resid_post", END),
    "rotary": (
        "hook_embed",
        f"{START} {LN1} {QKV} {TURNED} {AFTER} {MLP} hook_mlp_out hook_resid_post",
        END,
    ),
    "qk_norm": (
        "hook_embed",
        f"{START} {LN1} {QKV} {QK_NORM} {TURNED} {AFTER} {MLP} hook_mlp_out hook_resid_post",
        END,
    ),
    "alibi": ("hook_embed", f"{START} {LN1} {QKV} {AFTER} {MLP} hook_mlp_out hook_resid_post", END),
    "shortformer": (
        EMBED,
        f"{START} {LN1} {QKV} {AFTER} {MLP} hook_mlp_out hook_resid_post",
        END,
    ),
    "no_norm": (
        EMBED,
        f"{START} {QKV} {LOOKING} hook_attn_out hook_resid_mid {MLP} hook_mlp_out hook_resid_post",
        OUT,
    ),
    "post_embedding_ln": (
        f"{norm('embed.ln')} {EMBED}",
        f"{START} {LN1} {QKV} {AFTER} {MLP} hook_mlp_out hook_resid_post",
        END,
    ),
    "sandwich": (
        EMBED,
        f"{START} {LN1} {QKV} {LOOKING} {norm('ln1_post')} hook_attn_out hook_resid_mid "
        f"{LN2} {MLP} {norm('ln2_post')} hook_mlp_out hook_resid_post",
        END,
    ),
    "stream_norm": (
        EMBED,
        f"{START} {QKV} {LOOKING} hook_attn_out {LN1} hook_resid_mid "
        f"{MLP} hook_mlp_out {LN2} hook_resid_post",
        OUT,
    ),
    "bidirectional_encoder": (
        f"hook_embed hook_token_type_embed hook_pos_embed {norm('ln_embed')}",
        f"{START} {QKV} {LOOKING} hook_attn_out {LN1} hook_resid_mid "
        f"{MLP} hook_mlp_out {LN2} hook_resid_post",
        "unembed.transform.hook_pre unembed.transform.hook_post "
        f"{norm('unembed.transform.ln')} {OUT}",
    ),
    "post_norm": (
        EMBED,
        f"{START} {QKV} {LOOKING} {LN1} hook_attn_out hook_resid_mid "
        f"{MLP} {LN2} hook_mlp_out hook_resid_post",
        END,
    ),
    "gated": (EMBED, f"{START} {LN1} {QKV} {AFTER} {GATED} hook_mlp_out hook_resid_post", END),
    "solu_ln": (EMBED, f"{START} {LN1} {QKV} {AFTER} {SOLU} hook_mlp_out hook_resid_post", END),
    "attn_only": (EMBED, f"{START} {LN1} {QKV} {LOOKING} hook_attn_out hook_resid_post", END),
    "parallel": (
        EMBED,
        f"{START} {LN1} {QKV} {LOOKING} hook_attn_out {LN2} {MLP} hook_mlp_out hook_resid_post",
        END,
    ),
}


def in_full(golden: tuple[str, str, str], n_layers: int = 2) -> list[str]:
    before, block, after = (part.split() for part in golden)
    blocks = [f"blocks.{layer}.{name}" for layer in range(n_layers) for name in block]
    return before + blocks + after


@pytest.mark.parametrize("name", GOLDEN)
@torch.no_grad()
def test_report_088_a_blanket_capture_holds_the_documented_points_in_order(name: str) -> None:
    _, cache = native.build(name).run_with_cache(native.tokens())
    assert list(cache) == in_full(GOLDEN[name])


# batch 2, pos 13, d_model 14, 4 heads (2 for keys), d_head 6, d_mlp 19, 23 ids
SHAPES = {
    "embed": (2, 13, 14), "pos_embed": (2, 13, 14), "resid_pre": (2, 13, 14),
    "q": (2, 13, 4, 6), "k": (2, 13, 2, 6), "v": (2, 13, 2, 6),
    "rot_q": (2, 13, 4, 6), "rot_k": (2, 13, 2, 6),
    "attn_scores": (2, 4, 13, 13), "pattern": (2, 4, 13, 13), "z": (2, 13, 4, 6),
    "attn_out": (2, 13, 14), "resid_mid": (2, 13, 14), "mlp_out": (2, 13, 14),
    "pre": (2, 13, 19), "pre_linear": (2, 13, 19), "mid": (2, 13, 19), "post": (2, 13, 19),
    "resid_post": (2, 13, 14), "in": (2, 13, 14), "out": (2, 13, 23),
    # optional
    "tokens": (2, 13), "attn_in": (2, 13, 4, 14), "q_input": (2, 13, 4, 14),
    "k_input": (2, 13, 2, 14), "v_input": (2, 13, 2, 14), "mlp_in": (2, 13, 14),
    "result": (2, 13, 4, 14),
}  # fmt: skip


@pytest.mark.parametrize("name", ["grouped", "qk_norm", "gated_solu_ln", "everything"])
@torch.no_grad()
def test_report_088_shapes_are_the_documented_ones(name: str) -> None:
    changes = {} if "n_key_value_heads" in native.VARIANTS[name] else native.GROUPED
    model = native.build(name, **changes)
    wanted = [n for n in model.hook_dict if not n.endswith("attn_in")]
    _, cache = model.run_with_cache(native.tokens(), names_filter=wanted)
    for full, value in cache.items():
        width = {"ln": 19, "q_norm": 6, "k_norm": 6}.get(full.split(".")[-2:][0], 14)
        heads = {"q_norm": (4,), "k_norm": (2,)}.get(full.split(".")[-2:][0], ())
        if "ln1.hook" in full:  # split inputs are normalised one by one, those of queries first
            heads = (4,) if full.endswith(":1") else (2,)
            full = full.split(":")[0]
        special = {"hook_scale": (2, 13, *heads, 1), "hook_normalized": (2, 13, *heads, width)}
        shape = special.get(short(full)) or SHAPES[short(full).removeprefix("hook_")]
        assert tuple(value.shape) == shape, full


@torch.no_grad()
def test_full_width_qk_norm_shows_one_vector_per_position() -> None:
    _, cache = native.build("qk_norm_full_width").run_with_cache(native.tokens())
    assert cache["blocks.0.attn.q_norm.hook_scale"].shape == (2, 13, 1)
    assert cache["blocks.0.attn.k_norm.hook_normalized"].shape == (2, 13, 12)


@pytest.mark.parametrize("name", native.VARIANTS)
@torch.no_grad()
def test_report_073_and_099_every_point_but_the_optional_fires_exactly_once(name: str) -> None:
    model = native.build(name)
    fired: Counter[str] = Counter()

    def count(value: Tensor, hook: HookPoint) -> None:
        fired[hook.name] += 1

    mandatory = [n for n, point in model.hook_dict.items() if not point.optional]
    points = {n: point for n, point in model.hook_dict.items() if ".experts." not in n}
    optional = [n for n, point in points.items() if point.optional]
    assert {short(n) for n in optional} == OPTIONAL - (
        {"hook_mlp_in"} if name.endswith("attn_only") else set()
    )
    model.run_with_hooks(native.tokens(), fwd_hooks=[(n, count) for n in mandatory])
    assert fired == dict.fromkeys(mandatory, 1)
    fired.clear()
    optional = [n for n in optional if not (shares_keys(model) and n.endswith("attn_in"))]
    model.run_with_hooks(native.tokens(), fwd_hooks=[(n, count) for n in optional])
    assert fired == dict.fromkeys(optional, 1)


EXPERT_POINTS = ("hook_gate", "hook_pre", "hook_post")


@torch.no_grad()
def test_points_of_an_expert_see_its_own_tokens_and_fire_only_when_it_has_any() -> None:
    model, tokens = native.build("experts"), native.tokens()
    routing = ["blocks.1.mlp.hook_expert_weights", "blocks.1.mlp.hook_expert_indices"]
    inside = "blocks.1.mlp.experts.*"
    _, cache = model.run_with_cache(tokens, names_filter=[*routing, inside])
    weights, chosen = (cache[name] for name in routing)
    assert weights.shape == (*tokens.shape, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(tokens.shape))
    assert torch.equal(chosen, weights.topk(2).indices)
    x = model.run_with_cache(tokens)[1]["normalized", 1, "ln2"] * model.blocks[1].ln2.w
    for e, expert in enumerate(model.blocks[1].mlp.experts):
        mine = (chosen == e).any(-1)
        names = [f"blocks.1.mlp.experts.{e}.{point}" for point in EXPERT_POINTS]
        assert all((name in cache) == bool(mine.any()) for name in names)
        if mine.any():
            gate, pre, post = (cache[name] for name in names)
            torch.testing.assert_close(gate, x[mine] @ expert.W_gate)
            torch.testing.assert_close(pre, x[mine] @ expert.W_in)
            torch.testing.assert_close(post, F.silu(gate) * pre)
    blanket = model.run_with_cache(tokens)[1]
    assert not any(".experts." in name for name in blanket)
    _, one = model.run_with_cache(
        tokens[:1], names_filter=[inside, "*expert_weights"], remove_batch_dim=True, pos_slice=-1
    )
    assert one["blocks.1.mlp.hook_expert_weights"].shape == (1, 6)
    rows = [t.shape[0] for n, t in one.items() if n.endswith("hook_post")]
    assert sum(rows) == 2 * tokens.shape[1]  # of every position: there is no axis to slice
    with pytest.raises(ValueError, match="tokens of one expert"):
        cache.apply_slice_to_batch_dim(0)


@torch.no_grad()
def test_an_edit_of_router_scores_or_choices_takes_effect() -> None:
    model, tokens = native.build("experts"), native.tokens()
    name = "blocks.0.mlp.hook_expert_{}"
    _, cache = model.run_with_cache(tokens)
    chosen = cache[name.format("indices")]

    def forbid_zero(scores: Tensor, hook: HookPoint) -> Tensor:
        return scores.index_fill(-1, torch.tensor([0]), 0.0)

    def only_zero_and_one(indices: Tensor, hook: HookPoint) -> Tensor:
        return torch.tensor([0, 1]).expand_as(indices)

    with model.hooks(fwd_hooks=[(name.format("weights"), forbid_zero)]):
        _, without = model.run_with_cache(tokens)
    assert (chosen == 0).any()
    assert not (without[name.format("indices")] == 0).any()
    with model.hooks(fwd_hooks=[(name.format("indices"), only_zero_and_one)]):
        _, forced = model.run_with_cache(tokens, names_filter=lambda n: "experts" in n)
    assert {n.split(".")[4] for n in forced if n.startswith("blocks.0.")} == {"0", "1"}


@torch.no_grad()
def test_the_order_of_points_with_every_optional_one() -> None:
    model = native.build(use_hook_tokens=True, use_attn_result=True, use_hook_mlp_in=True)
    model.cfg.use_split_qkv_input = model.cfg.use_attn_in = True
    _, cache = model.run_with_cache(native.tokens())
    split = "hook_attn_in hook_q_input hook_k_input hook_v_input"
    # the norm is called three times, which no bare name stands for
    norms = " ".join(f"{name}:{call}" for name in LN1.split() for call in (1, 2, 3))
    block = f"{START} {split} {norms} {QKV} {LOOKING} attn.hook_result hook_attn_out hook_resid_mid"
    block += f" hook_mlp_in {LN2} {MLP} hook_mlp_out hook_resid_post"
    assert list(cache) == in_full((f"hook_tokens {EMBED}", block, END))
    assert torch.equal(cache["hook_tokens"], native.tokens())


def test_points_are_registered_under_their_names(model: HookedTransformer) -> None:
    for name, point in model.hook_dict.items():
        assert point.name == name
        assert model.mod_dict[name] is point
        assert model.get_submodule(name) is point
    assert [p for p in model.modules() if isinstance(p, HookPoint)] == list(model.hook_points())
    assert model.hook_dict[Z].layer() == 1
    with pytest.raises((IndexError, ValueError)):
        model.hook_dict["hook_embed"].layer()


# --- what is captured is what the model used ------------------------------------------------------


@pytest.mark.parametrize("name", native.VARIANTS)
@torch.no_grad()
def test_the_stream_is_the_exact_sum_of_what_is_added(name: str) -> None:
    model = native.build(name)
    _, cache = model.run_with_cache(native.tokens())
    holds = model.cfg.norm_place == "stream"  # its norms hold the sum itself
    skips = model.cfg.norm_place == "skip"  # what goes past a sublayer is normalised too
    for layer in range(2):
        block = model.blocks[layer]
        pre, attn_out = cache["resid_pre", layer], cache["attn_out", layer]
        post = cache["resid_post", layer]
        pre = block.ln1.explicit(pre) if skips else pre
        mid = block.ln1.explicit(pre + attn_out) if holds else pre + attn_out
        if model.cfg.attn_only:
            assert torch.equal(mid, post)
            continue
        if not model.cfg.parallel_attn_mlp:
            assert torch.equal(mid, cache["resid_mid", layer])
        end = (block.ln2.explicit(mid) if skips else mid) + cache["mlp_out", layer]
        assert torch.equal(block.ln2.explicit(end) if holds else end, post)
    assert torch.equal(cache["resid_post", 0], cache["resid_pre", 1])


def test_report_090_parallel_and_attention_only_blocks_have_no_resid_mid() -> None:
    for name in ("parallel", "attn_only"):
        model = native.build(name)
        assert "blocks.0.hook_resid_mid" not in model.hook_dict
        _, cache = model.run_with_cache(native.tokens())
        with pytest.raises(KeyError, match="parallel and attention-only"):
            cache["resid_mid", 0]


@pytest.mark.parametrize("name", ["plain", "grouped_rotary", "sinks", "attn_only", "parallel"])
@torch.no_grad()
def test_report_084_results_of_the_heads_sum_to_attn_out(name: str) -> None:
    model = native.build(name)
    without = model(native.tokens())
    with pytest.raises(KeyError):
        model.run_with_cache(native.tokens())[1]["result", 0]
    model.cfg.use_attn_result = True
    logits, cache = model.run_with_cache(native.tokens())
    torch.testing.assert_close(logits, without, atol=2e-5, rtol=0)
    assert torch.equal(model(native.tokens()), without)  # the flag alone costs and changes nothing
    for layer in range(2):
        total = cache["result", layer].sum(2) + model.blocks[layer].attn.b_O
        torch.testing.assert_close(total, cache["attn_out", layer], atol=1e-5, rtol=0)
        alone = torch.einsum("bpnh,nhm->bpnm", cache["z", layer], model.W_O[layer])
        torch.testing.assert_close(cache["result", layer], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name", ["plain", "rotary", "grouped", "ungrouped", "post_norm", "no_norm"]
)
@torch.no_grad()
def test_report_096_split_inputs_are_the_stream_before_the_norm(name: str) -> None:
    model = native.build(name)
    model.set_use_split_qkv_input(True)
    model.set_use_hook_mlp_in(True)
    without = model(native.tokens())
    logits, cache = model.run_with_cache(native.tokens())
    torch.testing.assert_close(logits, without, atol=2e-5 * float(without.std()), rtol=0)
    kv_heads = 2 if name == "grouped" else 4
    for layer in range(2):
        stream = cache["resid_pre", layer][:, :, None]
        for letter, heads in (("q", 4), ("k", kv_heads), ("v", kv_heads)):
            split = cache[f"{letter}_input", layer]
            assert torch.equal(split, stream.expand(-1, -1, heads, -1))
        assert torch.equal(cache["mlp_in", layer], cache["resid_mid", layer])


@torch.no_grad()
def test_report_096_attn_in_is_the_stream_before_the_norm(model: HookedTransformer) -> None:
    tokens = native.tokens()
    _, cache = model.run_with_cache(tokens, names_filter=["*hook_attn_in", "*hook_resid_pre"])
    for layer in range(2):
        stream = cache["resid_pre", layer][:, :, None].expand(-1, -1, 4, -1)
        assert torch.equal(cache["attn_in", layer], stream)


@pytest.mark.parametrize("name", ["plain", "rms", "sandwich", "qk_norm"])
@torch.no_grad()
def test_report_096_norm_points_are_after_the_norm_and_before_its_weight(name: str) -> None:
    model = native.build(name)
    _, cache = model.run_with_cache(native.tokens())
    stream = cache["resid_mid", 1]
    if model.cfg.normalization_type == "LN":
        stream = stream - stream.mean(-1, keepdim=True)
    scale, normalized = cache["scale", 1, "ln2"], cache["normalized", 1, "ln2"]
    expected = (stream.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(scale, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(normalized, stream / scale, atol=1e-6, rtol=1e-6)


def inputs_of(letter: str) -> str:
    return f"blocks.1.hook_{letter}_input"


@pytest.mark.parametrize("letter", ["q", "k", "v"])
@torch.no_grad()
def test_editing_a_split_input_reaches_one_head_of_one_kind(letter: str) -> None:
    model = native.build("grouped")
    tokens = native.tokens()
    names = [f"blocks.1.attn.hook_{x}" for x in "qkv"]
    _, before = model.run_with_cache(tokens, names_filter=names)

    def edit(value: Tensor, hook: HookPoint) -> None:
        value[:, :, 1] += torch.randn(14)  # in place: the others must have their own copy

    with model.hooks(fwd_hooks=[(inputs_of(letter), edit)]):
        _, after = model.run_with_cache(tokens, names_filter=names)
    for name in names:
        changed = (after[name] - before[name]).abs().amax((0, 1, 3)) > 1e-3
        expected = [name.endswith(letter) and head == 1 for head in range(changed.numel())]
        assert changed.tolist() == expected, name


@torch.no_grad()
def test_editing_attn_in_reaches_queries_keys_and_values_of_that_head(
    model: HookedTransformer, tokens: Tensor
) -> None:
    names = [f"blocks.1.attn.hook_{x}" for x in "qkv"]
    _, before = model.run_with_cache(tokens, names_filter=names)

    def edit(value: Tensor, hook: HookPoint) -> None:
        value[:, :, 1] += torch.randn(14)

    with model.hooks(fwd_hooks=[("blocks.1.hook_attn_in", edit)]):
        _, after = model.run_with_cache(tokens)
    for name in names:
        changed = (after[name] - before[name]).abs().amax((0, 1, 3)) > 1e-3
        assert changed.tolist() == [False, True, False, False], name
    stream = after["resid_pre", 1] + after["attn_out", 1]  # itself not edited
    assert torch.equal(stream, after["resid_mid", 1])


def test_attn_in_of_grouped_heads_says_what_to_use_instead() -> None:
    model = native.build("grouped")
    with pytest.raises(ValueError, match="ungroup"):
        model.set_use_attn_in(True)
    with pytest.raises(ValueError, match=r"hook_q_input.*ungroup"):
        model.run_with_hooks(native.tokens(), fwd_hooks=[("blocks.0.hook_attn_in", ignore)])
    model.set_ungroup_grouped_query_attention(True)
    model.set_use_attn_in(True)
    _, cache = model.run_with_cache(native.tokens())
    assert cache["attn_in", 0].shape == (2, 13, 4, 14)


@torch.no_grad()
def test_report_101_key_and_value_points_of_grouped_models_have_their_own_heads() -> None:
    model = native.build("grouped_rotary")
    logits, grouped = model.run_with_cache(native.tokens())
    assert grouped["k", 0].shape[2] == grouped["v", 0].shape[2] == grouped["rot_k", 0].shape[2] == 2
    model.set_ungroup_grouped_query_attention(True)
    again, ungrouped = model.run_with_cache(native.tokens())
    torch.testing.assert_close(again, logits, atol=2e-5, rtol=0)
    for name in ("k", "v", "rot_k"):
        copies = grouped[name, 1].repeat_interleave(2, dim=2)
        torch.testing.assert_close(ungrouped[name, 1], copies, atol=1e-5, rtol=0)


@torch.no_grad()
def test_report_102_grouped_weights_are_repeated_for_the_heads_they_serve() -> None:
    model = native.build("grouped")
    attention = model.blocks[1].attn
    for head in range(4):
        assert torch.equal(attention.W_K[head], attention._W_K[head // 2])
        assert torch.equal(model.W_V[1, head], attention._W_V[head // 2])
        assert torch.equal(model.b_V[1, head], attention._b_V[head // 2])
    _, cache = model.run_with_cache(native.tokens())
    x = model.blocks[1].ln1(cache["resid_pre", 1])
    queries = torch.einsum("bpm,nmh->bnph", x, model.W_Q[1]) + model.b_Q[1][:, None]
    keys = torch.einsum("bpm,nmh->bnph", x, model.W_K[1]) + model.b_K[1][:, None]
    values = torch.einsum("bpm,nmh->bnph", x, model.W_V[1]) + model.b_V[1][:, None]
    scores = cache["attn_scores", 1]
    mine = (queries @ keys.mT / 6**0.5).masked_fill(scores.isneginf(), -torch.inf)
    torch.testing.assert_close(mine, scores, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        (scores.softmax(-1) @ values).transpose(1, 2), cache["z", 1], atol=1e-5, rtol=0
    )


# --- edits ----------------------------------------------------------------------------------------

EDITED = ["plain", "grouped_rotary", "qk_norm", "gated_solu_ln", "sandwich", "parallel", "sinks"]
EDITED += ["post_embedding_ln", "shortformer", "attn_only", "ungrouped", "everything"]


@pytest.mark.parametrize("name", EDITED)
@torch.no_grad()
def test_an_edit_at_any_point_in_any_form_reaches_the_logits(name: str) -> None:
    model = native.build(name)
    tokens = native.tokens()
    before = model(tokens)

    def replace(value: Tensor, hook: HookPoint) -> Tensor:
        return value.roll(1, dims=-1) * 1.5 if value.is_floating_point() else value.roll(1, dims=-1)

    def in_place(value: Tensor, hook: HookPoint) -> None:
        value.copy_(replace(value, hook))

    for point in model.hook_dict:
        if short(point) == "hook_attn_in" and shares_keys(model):
            continue
        after = model.run_with_hooks(tokens, fwd_hooks=[(point, replace)])
        assert not torch.allclose(after, before, atol=1e-3), point
        if short(point) != "hook_tokens":  # those are the caller's
            edited = model.run_with_hooks(tokens, fwd_hooks=[(point, in_place)])
            torch.testing.assert_close(edited, after, msg=point)
    assert torch.equal(model(tokens), before)


def test_report_095_a_later_hook_that_returns_nothing_keeps_an_earlier_edit(
    model: HookedTransformer, tokens: Tensor
) -> None:
    seen = []
    hooks = [(Z, scaled_by(2.0)), (Z, lambda value, hook: seen.append(value))]
    edited = model.run_with_hooks(tokens, fwd_hooks=hooks)
    assert torch.equal(edited, model.run_with_hooks(tokens, fwd_hooks=hooks[:1]))
    assert not torch.equal(edited, model(tokens))
    assert torch.equal(seen[0], 2 * model.run_with_cache(tokens, names_filter=Z)[1][Z])


def test_report_095_order_is_that_of_registration_and_prepend_goes_first(
    model: HookedTransformer, tokens: Tensor
) -> None:
    order = []
    point = model.hook_dict[Z]
    point.add_hook(lambda value, hook: order.append("a"))
    point.add_hook(lambda value, hook: order.append("b"))
    model.add_hook(Z, lambda value, hook: order.append("first"), prepend=True)
    model(tokens)
    assert order == ["first", "a", "b"]
    model.reset_hooks()


def test_hook_is_passed_by_keyword_and_is_the_point(
    model: HookedTransformer, tokens: Tensor
) -> None:
    def takes_more(value: Tensor, *, extra: list[Any], hook: HookPoint) -> None:
        extra.append(hook)

    seen: list[Any] = []
    model.run_with_hooks(tokens, fwd_hooks=[(Z, functools.partial(takes_more, extra=seen))])
    assert seen == [model.hook_dict[Z]]


def test_aliases_are_called_one_by_one_under_their_names(
    model: HookedTransformer, tokens: Tensor
) -> None:
    seen = []

    def grow(value: Tensor, hook: HookPoint) -> Tensor:
        seen.append((hook.name, hook.layer(), float(value.detach().sum())))
        return value + 1

    model.hook_dict[Z].add_hook(grow, alias_names=["one", "two"])
    model(tokens)
    assert [(name, layer) for name, layer, _ in seen] == [("one", 1), ("two", 1)]
    assert seen[1][2] == pytest.approx(seen[0][2] + 2 * 13 * 4 * 6, rel=1e-4)
    model.reset_hooks()


@pytest.mark.parametrize("name", [Z, PATTERN, "hook_embed"])
def test_a_result_of_another_shape_or_kind_is_refused(
    model: HookedTransformer, tokens: Tensor, name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        model.run_with_hooks(tokens, fwd_hooks=[(name, lambda value, hook: value[:1])])
    with pytest.raises(TypeError, match=f"{name}.*returned a int"):
        model.run_with_hooks(tokens, fwd_hooks=[(name, lambda value, hook: 3)])


@pytest.mark.parametrize("name", ["plain", "sinks", "softcap"])
def test_a_query_from_which_a_hook_hides_everything_gets_a_zero_pattern(name: str) -> None:
    model, tokens = native.build(name), native.tokens()
    patterns = []

    def hide(scores: Tensor, hook: HookPoint) -> Tensor:
        return torch.where(torch.arange(13)[:, None] == 5, -torch.inf, scores)

    def keep(pattern: Tensor, hook: HookPoint) -> None:
        patterns.append(pattern)

    loss = model.run_with_hooks(
        tokens,
        return_type="loss",
        fwd_hooks=[("blocks.1.attn.hook_attn_scores", hide), (PATTERN, keep)],
    )
    loss.backward()
    assert not patterns[0][:, :, 5].any()
    assert patterns[0][:, :, 4].any()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_torchs_own_hooks_on_a_point_work_too(model: HookedTransformer, tokens: Tensor) -> None:
    before = model(tokens)
    handle = model.hook_dict[PATTERN].register_forward_hook(lambda module, args, out: out * 0)
    after = model(tokens)
    handle.remove()
    assert not torch.allclose(after, before, atol=1e-3)
    expected = model.run_with_hooks(tokens, fwd_hooks=[(PATTERN, scaled_by(0.0))])
    torch.testing.assert_close(after, expected)


# --- names are resolved first ---------------------------------------------------------------------


@pytest.fixture
def never_run(model: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> HookedTransformer:
    """A model whose forward must not be reached."""

    def forward(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the forward was reached")

    monkeypatch.setattr(model, "forward", forward)
    return model


USES: dict[str, Callable[[HookedTransformer, Any], Any]] = {
    "run_with_hooks": lambda m, name: m.run_with_hooks(
        native.tokens(), fwd_hooks=[(Z, ignore), (name, ignore)]
    ),
    "bwd_hooks": lambda m, name: m.run_with_hooks(
        native.tokens(), bwd_hooks=[(Z, ignore), (name, ignore)], reset_hooks_end=False
    ),
    "run_with_cache": lambda m, name: m.run_with_cache(native.tokens(), names_filter=name),
    "hooks": lambda m, name: m.hooks(fwd_hooks=[(Z, ignore), (name, ignore)]).__enter__(),
    "add_hook": lambda m, name: m.add_hook(name, ignore),
    "add_perma_hook": lambda m, name: m.add_perma_hook(name, ignore),
    "add_caching_hooks": lambda m, name: m.add_caching_hooks(name),
    "get_caching_hooks": lambda m, name: m.get_caching_hooks(name),
    "list_hooks": lambda m, name: m.list_hooks(name),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("blocks.1.attn.hook_zz", r"Did you mean .*'blocks\.1\.attn\.hook_z'"),
        ("blocks.2.hook_resid_pre", r"Did you mean .*'blocks\.1\.hook_resid_pre'"),
        ("blocks.*.hook_nothing", "matches none"),
        (lambda name: False, "matches none"),
    ],
)
def test_report_071_unknown_names_raise_before_the_forward_with_close_matches(
    never_run: HookedTransformer, use: str, name: Any, suggested: str
) -> None:
    with pytest.raises(KeyError, match=suggested) as error:
        USES[use](never_run, name)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("use", [use for use in USES if use != "run_with_cache"])
def test_a_module_is_captured_and_not_hooked(never_run: HookedTransformer, use: str) -> None:
    with pytest.raises(KeyError, match=r"no hook point is called 'blocks\.1\.attn'"):
        USES[use](never_run, "blocks.1.attn")


CHOICES: list[tuple[Any, int]] = [
    (Z, 1),
    ([Z, PATTERN], 2),
    ((Z, PATTERN), 2),
    ({Z, PATTERN}, 2),
    ("blocks.*.hook_resid_p*", 4),
    (["hook_embed", "blocks.?.attn.hook_[qkv]"], 7),
    (lambda name: name.endswith("hook_z"), 2),
    ([lambda name: "mlp" in name, "hook_embed", "*hook_embed"], 2 * 3 + 1),
    ([], 0),
    ("*hook_result", 2),  # a pattern that matches optional points only
    (lambda name: name.endswith("_input"), 6),
    ("blocks.0.hook_q_input", 1),
    (lambda name: name.startswith("blocks.0.hook"), 5),  # which leaves optional points out
]


@pytest.mark.parametrize(("chosen", "n"), CHOICES)
def test_report_071_names_may_be_given_in_every_form(
    model: HookedTransformer, tokens: Tensor, chosen: Any, n: int
) -> None:
    _, cache = model.run_with_cache(tokens, names_filter=chosen)
    assert len(cache) == n
    assert list(cache) == [name for name in cache if name in model.hook_dict]
    if n:
        assert sorted(cache) == sorted(model.resolve_names(chosen))


def test_a_name_given_twice_is_captured_once_and_in_order(model: HookedTransformer) -> None:
    assert model.resolve_names([Z, "hook_embed", Z, "*hook_z"]) == [
        "hook_embed",
        "blocks.0.attn.hook_z",
        Z,
    ]


# --- attaching and detaching ----------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("how", ["run_with_hooks", "hooks", "run_with_cache"])
def test_report_091_nothing_is_left_after_an_exception(
    model: HookedTransformer, tokens: Tensor, error: type[BaseException], how: str
) -> None:
    before = model(tokens)

    def fail(value: Tensor, hook: HookPoint) -> None:
        raise error

    edit = [(PATTERN, scaled_by(0.0))]
    if how == "run_with_hooks":
        with pytest.raises(error):
            model.run_with_hooks(tokens, fwd_hooks=[*edit, (Z, fail)])
    elif how == "hooks":
        with pytest.raises(error), model.hooks(fwd_hooks=edit, bwd_hooks=[(Z, ignore)]):
            raise error
    else:
        handle = model.add_hook(Z, fail)
        with pytest.raises(error):
            model.run_with_cache(tokens)
        handle.remove()
    assert model.list_hooks() == {}
    assert model.context_level == 0
    assert torch.equal(model(tokens), before)


def test_report_091_a_closed_generator_takes_its_hooks_along(
    model: HookedTransformer, tokens: Tensor
) -> None:
    def experiment() -> Iterator[Tensor]:
        with model.hooks(fwd_hooks=[(Z, scaled_by(0.0))]):
            while True:
                yield model(tokens)

    running = experiment()
    next(running)
    assert counts(model)[Z] == 1
    running.close()
    assert model.list_hooks() == {}


def test_report_092_backward_hooks_go_with_their_context(
    model: HookedTransformer, tokens: Tensor
) -> None:
    with model.hooks(bwd_hooks=[(Z, ignore)]):
        assert model.hook_dict[Z].has_hooks("bwd")
        assert not model.hook_dict[Z].has_hooks("fwd")
    assert model.list_hooks() == {}


def test_report_093_helpers_leave_hooks_of_others_alone(
    model: HookedTransformer, tokens: Tensor
) -> None:
    mine = model.add_hook(Z, scaled_by(0.5))
    bwd = model.add_hook(Z, ignore, dir="bwd")
    edited = model(tokens)
    model.run_with_hooks(tokens, fwd_hooks=[(Z, ignore)])
    model.run_with_cache(tokens)
    model.run_with_cache(tokens, return_type="loss", incl_bwd=True)
    with model.hooks(fwd_hooks=[(Z, ignore)], bwd_hooks=[(Z, ignore)], clear_contexts=True):
        pass
    assert model.list_hooks() == {Z: [mine, bwd]}
    assert torch.equal(model(tokens), edited)
    mine.remove()
    mine.remove()  # twice is harmless
    bwd.remove()
    assert not torch.equal(model(tokens), edited)


def test_report_093_nested_contexts_remove_only_their_own(model: HookedTransformer) -> None:
    with model.hooks(fwd_hooks=[(Z, ignore)]):
        with model.hooks(fwd_hooks=[(Z, ignore), ("hook_embed", ignore)]):
            assert counts(model) == {Z: 2, "hook_embed": 1}
            assert [handle.context_level for handle in model.list_hooks(Z)[Z]] == [1, 2]
        assert counts(model) == {Z: 1}
        added_inside = model.add_hook("hook_embed", ignore)
    assert counts(model) == {"hook_embed": 1}
    added_inside.remove()


def test_reset_hooks_end_false_keeps_and_permanent_hooks_survive_a_reset(
    model: HookedTransformer, tokens: Tensor
) -> None:
    model.run_with_hooks(tokens, fwd_hooks=[(Z, ignore)], reset_hooks_end=False)
    permanent = model.add_perma_hook(PATTERN, ignore)
    assert counts(model) == {Z: 1, PATTERN: 1}
    assert permanent.is_permanent
    model.reset_hooks()
    assert model.list_hooks() == {PATTERN: [permanent]}
    assert model.list_hooks(including_permanent=False) == {}
    model.reset_hooks(including_permanent=True)
    assert model.list_hooks() == {}


def test_hooks_are_removed_by_direction_and_level(model: HookedTransformer) -> None:
    point = model.hook_dict[Z]
    point.add_hook(ignore, level=1)
    point.add_hook(ignore, level=2)
    point.add_hook(ignore, dir="bwd", level=1)
    assert point.has_hooks(level=2)
    assert not point.has_hooks("bwd", level=2)
    model.reset_hooks(level=1)
    assert [handle.context_level for handle in point.fwd_hooks] == [2]
    assert not point.has_hooks("bwd")
    point.add_hook(ignore, dir="bwd", is_permanent=True)
    assert not point.has_hooks("bwd", including_permanent=False)
    point.remove_hooks("both")
    assert (len(point.fwd_hooks), len(point.bwd_hooks)) == (0, 1)
    point.remove_hooks("bwd", including_permanent=True)


def test_a_group_of_handles_is_removed_at_once(model: HookedTransformer) -> None:
    group = model.add_hook(lambda name: name.endswith("hook_z"), ignore)
    assert sum(counts(model).values()) == len(group) == 2
    group.remove()
    assert model.list_hooks() == {}


def test_contexts_of_points_are_kept_until_cleared(
    model: HookedTransformer, tokens: Tensor
) -> None:
    def remember(value: Tensor, hook: HookPoint) -> None:
        hook.ctx["calls"] = hook.ctx.get("calls", 0) + 1

    for _ in range(2):
        model.run_with_hooks(tokens, fwd_hooks=[(Z, remember)])
    assert model.hook_dict[Z].ctx == {"calls": 2}
    with model.hooks(fwd_hooks=[(Z, remember)], clear_contexts=True):
        model(tokens)
    assert model.hook_dict[Z].ctx == {}
    model.run_with_hooks(tokens, fwd_hooks=[(Z, remember)])
    model.reset_hooks(clear_contexts=False)
    assert model.hook_dict[Z].ctx == {"calls": 1}
    model.reset_hooks()
    assert model.hook_dict[Z].ctx == {}


def test_report_105_list_hooks_shows_what_is_attached_where(model: HookedTransformer) -> None:
    assert model.list_hooks() == {}
    model.add_hook(Z, ignore)
    model.add_hook(Z, ignore, dir="bwd", is_permanent=True)
    with model.hooks(fwd_hooks=[("hook_embed", ignore)]):
        listed = model.list_hooks()
        assert list(listed) == ["hook_embed", Z]
        shown = repr(listed)
        assert "fwd hook ignore" in shown
        assert "level 1" in shown
        assert "bwd hook ignore permanent" in shown
        assert list(model.list_hooks(dir="bwd")) == [Z]
        assert list(model.list_hooks("hook_*")) == ["hook_embed"]
        assert listed[Z][0].user_hook is ignore
    model.reset_hooks(including_permanent=True)


def test_what_is_no_hook_is_refused(model: HookedTransformer) -> None:
    """The run-time type check of the tests comes first; `__wrapped__` goes around it."""
    add = inspect.unwrap(HookPoint.add_hook)
    with pytest.raises((ValueError, TypeError), match="'sideways'"):
        add(model.hook_dict[Z], ignore, dir="sideways")
    with pytest.raises(TypeError, match="callable"):
        add(model.hook_dict[Z], None)


def test_a_hook_may_remove_itself_while_it_runs(model: HookedTransformer, tokens: Tensor) -> None:
    ran = []

    def once(value: Tensor, hook: HookPoint) -> None:
        ran.append("once")
        handle.remove()

    handle = model.add_hook(Z, once)
    other = model.add_hook(Z, lambda value, hook: ran.append("other"))
    model(tokens)
    model(tokens)
    assert ran == ["once", "other", "other"]
    other.remove()


@torch.no_grad()
def test_report_109_stopping_early_runs_nothing_behind_and_ends_no_context(
    model: HookedTransformer, tokens: Tensor
) -> None:
    _, whole = model.run_with_cache(tokens)
    fired = []
    with model.hooks(fwd_hooks=[(lambda name: True, lambda v, hook: fired.append(hook.name))]):
        for _ in range(2):
            fired.clear()
            residual = model(tokens, stop_at_layer=1)
            assert torch.equal(residual, whole["resid_post", 0])
            assert fired
            assert not [name for name in fired if "blocks.1" in name or "ln_final" in name]
        model(tokens)
        assert "unembed.hook_out" in fired


# --- optional points ------------------------------------------------------------------------------


def test_optional_points_always_exist_and_are_reached_only_when_listened_to(
    model: HookedTransformer, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    costly = OPTIONAL - {"hook_tokens"}  # ids cost nothing to show
    called = []
    original = HookPoint.__call__

    def spy(self: HookPoint, x: Tensor) -> Tensor:
        called.append(self.name)
        return original(self, x)

    monkeypatch.setattr(HookPoint, "__call__", spy)
    assert {short(n) for n in model.hook_dict} >= OPTIONAL
    model(tokens)
    model.run_with_cache(tokens)
    assert not [name for name in called if short(name) in costly]
    for point in sorted(costly):
        called.clear()
        model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.1.{point}", ignore)]
                             if point != "hook_result"
                             else [("blocks.1.attn.hook_result", ignore)])  # fmt: skip
        reached = {name for name in called if short(name) in costly}
        assert {name for name in reached if name.startswith("blocks.1")} == reached, point
        assert short(next(iter(reached))) in costly


FLAGS = {
    "use_attn_result": ("set_use_attn_result", {"hook_result"}),
    "use_split_qkv_input": ("set_use_split_qkv_input", OPTIONAL - {"hook_tokens", "hook_attn_in",
                                                                   "hook_result", "hook_mlp_in"}),
    "use_attn_in": ("set_use_attn_in", {"hook_attn_in"}),
    "use_hook_mlp_in": ("set_use_hook_mlp_in", {"hook_mlp_in"}),
    "use_hook_tokens": (None, {"hook_tokens"}),
}  # fmt: skip


WAYS = [(flag, way) for flag in FLAGS for way in ("config", "setter", "assignment")]
WAYS.remove(("use_hook_tokens", "setter"))  # the classic class has none


@pytest.mark.parametrize(("flag", "way"), WAYS)
@torch.no_grad()
def test_flags_decide_what_a_blanket_capture_includes(flag: str, way: str) -> None:
    setter, points = FLAGS[flag]
    model = native.build(**({flag: True} if way == "config" else {}))
    before = model(native.tokens())

    def switch(value: bool) -> None:
        if way == "setter":
            getattr(model, setter)(value)
        else:
            setattr(model.cfg, flag, value)

    def captured() -> set[str]:
        return {short(name) for name in model.run_with_cache(native.tokens())[1]} & OPTIONAL

    if way != "config":
        assert captured() == set()
        switch(True)
    assert captured() == points
    assert torch.equal(model(native.tokens()), before)
    assert {short(n) for n in model.resolve_names(lambda name: True)} & OPTIONAL == points
    switch(False)
    assert captured() == set()


def test_flags_that_mean_nothing_for_a_model_are_refused() -> None:
    with pytest.raises(ValueError, match="attention-only"):
        native.build("attn_only").set_use_hook_mlp_in(True)


# --- fused until somebody looks -------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of every call of the fused kernel."""
    calls: list[dict[str, Any]] = []
    fused = F.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs)
        return fused(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return calls


@pytest.mark.parametrize("name", ["plain", "grouped_rotary", "window", "alibi", "bidirectional"])
def test_attention_is_fused_in_every_layer_but_the_one_looked_at(
    name: str, kernels: list[dict[str, Any]]
) -> None:
    model = native.build(name, n_layers=3, **_three_types(name))
    tokens = native.tokens()

    def n_fused(run: Callable[[], Any]) -> int:
        kernels.clear()
        run()
        return len(kernels)

    assert n_fused(lambda: model(tokens)) == 3
    for point in ("hook_attn_scores", "hook_pattern"):
        full = f"blocks.1.attn.{point}"
        hooked = [(full, ignore)]
        assert n_fused(lambda hooked=hooked: model.run_with_hooks(tokens, fwd_hooks=hooked)) == 2
        with model.hooks(bwd_hooks=hooked):
            assert n_fused(lambda: model(tokens)) == 2
    assert n_fused(lambda: model.run_with_cache(tokens)) == 0
    others = [n for n in model.hook_dict if not n.endswith(("scores", "pattern", "attn_in"))]
    assert n_fused(lambda: model.run_with_cache(tokens, names_filter=others)) == 3
    assert n_fused(lambda: model(tokens)) == 3


def _three_types(name: str) -> dict[str, Any]:
    return {"attn_types": ["local", "global", "local"]} if name == "window" else {}


def test_plain_attention_gives_the_kernel_no_mask(kernels: list[dict[str, Any]]) -> None:
    for name in ("plain", "rotary", "grouped", "bidirectional"):
        model = native.build(name)
        kernels.clear()
        model(native.tokens())
        assert all(call.get("attn_mask") is None for call in kernels)
        assert [call.get("is_causal", False) for call in kernels] == [name != "bidirectional"] * 2
    ones = torch.ones_like(native.tokens())
    kernels.clear()
    native.build()(native.tokens(), attention_mask=ones)  # all ones is no mask
    assert all(call.get("attn_mask") is None for call in kernels)


@torch.no_grad()
def test_grouped_attention_does_not_repeat_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = []
    fused = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        heads.append((k.shape[1], v.shape[1], kwargs.get("enable_gqa")))
        return fused(q, k, v, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    native.build("grouped")(native.tokens())
    assert heads == [(2, 2, True)] * 2


def test_norms_are_fused_until_somebody_looks(
    model: HookedTransformer, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fused = LayerNorm.fused
    monkeypatch.setattr(LayerNorm, "fused", lambda self, x: (calls.append(1), fused(self, x))[1])
    for looked_at, expected in ((None, 5), ("blocks.1.ln2.hook_scale", 4), (Z, 5)):
        calls.clear()
        hooks = [(looked_at, ignore)] if looked_at else []
        model.run_with_hooks(tokens, fwd_hooks=hooks)
        assert len(calls) == expected


# --- backward hooks -------------------------------------------------------------------------------


def gradients(model: HookedTransformer) -> dict[str, Tensor]:
    """Parameter gradients, and none of them left behind."""
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def backward_of_loss(model: HookedTransformer) -> dict[str, Tensor]:
    model(native.tokens(), return_type="loss").backward()
    return gradients(model)


FORMS = {
    "itself": lambda grad, hook: grad,
    "in a tuple": lambda grad, hook: (grad,),
    "nothing": lambda grad, hook: None,
}


@pytest.mark.parametrize("form", FORMS)
def test_report_110_and_111_identity_hooks_leave_gradients_bit_equal(
    model: HookedTransformer, form: str
) -> None:
    fused_points = [n for n in model.hook_dict if not n.endswith(("scores", "pattern", "tokens"))]
    fused_points = [n for n in fused_points if "ln" not in n and short(n) not in OPTIONAL]
    before = backward_of_loss(model)
    with model.hooks(bwd_hooks=[(n, FORMS[form]) for n in fused_points]):
        after = backward_of_loss(model)
    assert before.keys() == after.keys()
    for name, grad in before.items():
        assert torch.equal(grad, after[name]), name


def test_identity_hooks_on_the_explicit_path_leave_its_gradients_bit_equal(
    model: HookedTransformer,
) -> None:
    points = [n for n in model.hook_dict if short(n) not in OPTIONAL]
    with model.hooks(fwd_hooks=[(n, ignore) for n in points]):
        before = backward_of_loss(model)
        with model.hooks(bwd_hooks=[(n, FORMS["itself"]) for n in points]):
            after = backward_of_loss(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("form", ["tensor", "tuple"])
def test_report_111_a_doubled_gradient_doubles_what_lies_before(
    model: HookedTransformer, form: str
) -> None:
    def double(grad: Tensor, hook: HookPoint) -> Any:
        return 2 * grad if form == "tensor" else (2 * grad,)

    before = backward_of_loss(model)
    with model.hooks(bwd_hooks=[("blocks.1.hook_resid_pre", double)]):
        after = backward_of_loss(model)
    for name, grad in before.items():
        upstream = name.startswith(("embed", "pos_embed", "blocks.0"))
        assert torch.equal(after[name], 2 * grad if upstream else grad), name


def test_report_095_backward_hooks_chain(model: HookedTransformer) -> None:
    before = backward_of_loss(model)
    hooks = [("blocks.1.hook_resid_pre", h) for h in (scaled_by(2.0), ignore, scaled_by(4.0))]
    with model.hooks(bwd_hooks=hooks):
        after = backward_of_loss(model)
    assert torch.equal(after["embed.W_E"], 8 * before["embed.W_E"])


def test_two_points_on_one_tensor_have_gradients_of_their_own(model: HookedTransformer) -> None:
    """resid_post of one layer is resid_pre of the next; what is done at the first comes after."""
    first, second = "blocks.0.hook_resid_post", "blocks.1.hook_resid_pre"
    seen: dict[str, Tensor] = {}

    def keep(grad: Tensor, hook: HookPoint) -> None:
        seen[hook.name] = grad.clone()

    before = backward_of_loss(model)
    with model.hooks(bwd_hooks=[(second, keep), (first, scaled_by(2.0)), (first, keep)]):
        after = backward_of_loss(model)
    assert torch.equal(seen[first], 2 * seen[second])
    assert torch.equal(after["embed.W_E"], 2 * before["embed.W_E"])
    assert torch.equal(after["blocks.1.attn.W_Q"], before["blocks.1.attn.W_Q"])


def test_report_114_backward_hooks_run_in_the_backward_pass_only(
    model: HookedTransformer, tokens: Tensor
) -> None:
    seen = []

    def count(value: Tensor, hook: HookPoint) -> None:
        seen.append(hook.name)

    with model.hooks(bwd_hooks=[(Z, count), ("hook_embed", count)]):
        loss = model(tokens, return_type="loss")
        assert seen == []
        loss.backward()
        assert seen == [Z, "hook_embed"]
        with torch.no_grad():
            model(tokens)
        assert seen == [Z, "hook_embed"]
    model.zero_grad(set_to_none=True)


def test_backward_hooks_see_the_gradients_of_the_forwards_they_were_there_for(
    model: HookedTransformer, tokens: Tensor
) -> None:
    """Also when they are detached before backward, as circuit-tracer does."""
    seen: list[str] = []

    def note(what: str) -> Callable[..., None]:
        return lambda gradient, hook: seen.append(what)

    first = model.run_with_hooks(tokens, return_type="loss", bwd_hooks=[(Z, note("run"))])
    with model.hooks(bwd_hooks=[(Z, note("block"))]):
        second = model(tokens, return_type="loss")
    model.add_hook(Z, note("added"), dir="bwd")
    third = model(tokens, return_type="loss")
    model.reset_hooks()
    model.add_hook(Z, note("later"), dir="bwd")
    assert seen == []
    for loss, expected in ((second, "block"), (first, "run"), (third, "added")):
        loss.backward()
        assert seen.pop() == expected
    assert seen == []
    model(tokens, return_type="loss").backward()
    assert seen == ["later"]
    model.reset_hooks()
    stays = [(Z, note("stays"))]
    model.run_with_hooks(tokens, bwd_hooks=stays, reset_hooks_end=False)
    model(tokens, return_type="loss").backward()
    assert seen == ["later", "stays"]
    model.reset_hooks()
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", ["plain", "grouped_rotary", "everything", "parallel"])
def test_report_112_captured_gradients_are_autograds(name: str, split: bool) -> None:
    model = native.build(name)
    names = [n for n in model.hook_dict if not n.endswith(("attn_in", "hook_tokens"))]
    # a norm of split inputs is called three times
    names = [n for n in names if ("ln1.hook" not in n if split else not n.endswith("_input"))]
    _, cache = model.run_with_cache(
        native.tokens(), names_filter=names, return_type="loss", incl_bwd=True
    )
    live: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: HookPoint) -> None:
        live[hook.name] = value

    loss = model.run_with_hooks(
        native.tokens(), return_type="loss", fwd_hooks=[(n, keep) for n in names]
    )
    expected = torch.autograd.grad(loss, list(live.values()))
    assert set(cache) == set(names) | {f"{n}_grad" for n in names}
    for point, grad in zip(live, expected, strict=True):
        # split inputs are normalised one by one: these points fire for q, k and v, the last stays
        if "ln1.hook" not in point:
            torch.testing.assert_close(
                cache[f"{point}_grad"], grad, atol=1e-6, rtol=1e-5, msg=point
            )
            assert grad.abs().max() > 0, point


def test_report_112_gradients_need_a_scalar_and_unknown_arguments_raise(
    model: HookedTransformer, tokens: Tensor
) -> None:
    with pytest.raises(ValueError, match="scalar"):
        model.run_with_cache(tokens, incl_bwd=True)
    with pytest.raises(TypeError, match="incl_backward"):
        model.run_with_cache(tokens, incl_backward=True)
    assert model.list_hooks() == {}


@pytest.mark.parametrize("name", ["plain", "grouped", "ungrouped", "rms"])
def test_report_115_gradients_of_split_inputs_add_up_to_that_of_the_stream(name: str) -> None:
    """d loss / d resid_pre = by the skip connection + by every head's q, k and v input."""
    model = native.build(name)
    names = ["*resid_*", "*_input", "*mlp_in"]
    _, cache = model.run_with_cache(
        native.tokens(), names_filter=names, return_type="loss", incl_bwd=True
    )
    heads = {"q": 4, "k": 2 if name == "grouped" else 4, "v": 2 if name == "grouped" else 4}

    def grad(point: str, layer: int) -> Tensor:
        return cache[f"blocks.{layer}.hook_{point}_grad"]

    for layer in range(2):
        total = grad("resid_mid", layer)
        for letter, n in heads.items():
            split = grad(f"{letter}_input", layer)
            assert split.shape == (2, 13, n, 14)
            total = total + split.sum(2)
        torch.testing.assert_close(total, grad("resid_pre", layer), atol=1e-6, rtol=1e-4)
        through = grad("resid_post", layer) + grad("mlp_in", layer)
        torch.testing.assert_close(through, grad("resid_mid", layer), atol=1e-6, rtol=1e-4)


def test_report_115_edge_scores_of_a_linear_model_sum_to_the_difference(tokens: Tensor) -> None:
    """Attention-only, no norm, patterns held: the metric is linear in what each edge carries."""
    model = native.build("attn_only", normalization_type=None, use_attn_result=True)
    names = ["hook_embed", "*hook_result", "*hook_pattern", "*v_input", "*resid_post"]
    other = native.tokens(length=2 * native.LENGTH)[:, native.LENGTH :]
    _, clean = model.run_with_cache(tokens, names_filter=names)
    held = [(n, lambda v, hook: clean[hook.name]) for n in clean if n.endswith("pattern")]

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 3].sum()

    with model.hooks(fwd_hooks=held):
        cached, forward, backward = model.get_caching_hooks(names, incl_bwd=True)
        with model.hooks(fwd_hooks=forward, bwd_hooks=backward):
            start = metric(model(tokens))
            start.backward()
        logits, corrupt = model.run_with_cache(other, names_filter=names)
    model.zero_grad(set_to_none=True)
    to_logits = cached["blocks.1.hook_resid_post_grad"]
    to_layer = [cached[f"blocks.{layer}.hook_v_input_grad"].sum(2) for layer in range(2)]

    def delta(name: str) -> Tensor:
        difference = corrupt[name] - clean[name]
        return difference.sum(2) if name.endswith("result") else difference

    embed, first = delta("hook_embed"), delta("blocks.0.attn.hook_result")
    # every path from the embedding: straight, by one layer, by both
    paths = (embed * (to_logits + to_layer[0] + to_layer[1])).sum()
    torch.testing.assert_close(metric(logits) - start, paths, atol=1e-3, rtol=1e-4)
    by_node = (embed * (to_logits + to_layer[1]) + first * (to_logits + to_layer[1])).sum()
    torch.testing.assert_close(metric(logits) - start, by_node, atol=1e-3, rtol=1e-4)


# --- parameters are plain attributes --------------------------------------------------------------


def test_parameters_follow_every_way_of_replacing_them():
    norm = LayerNorm(NormSpec("LN", 3, 1e-5))
    x = torch.tensor([[1.0, 2.0, 4.0]])
    before = norm(x)
    doubled = {"w": 2 * torch.ones(3), "b": torch.zeros(3)}
    assert torch.equal(torch.func.functional_call(norm, doubled, (x,)), 2 * before)
    assert torch.equal(norm(x), before)
    norm._parameters["w"] = nn.Parameter(3 * torch.ones(3))
    assert torch.equal(norm(x), 3 * before)
    for copied in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        copied._parameters["w"] = nn.Parameter(torch.ones(3))
        assert torch.equal(copied(x), before)
        assert torch.equal(norm(x), 3 * before)
    assert norm.to(torch.float64).w.dtype == torch.float64
    taken = norm._parameters.pop("w")
    assert not hasattr(norm, "w")
    norm.w = taken
    assert norm.w is norm._parameters["w"] is taken
    del norm.w
    assert not hasattr(norm, "w")
    assert "w" not in norm._parameters
    norm._parameters.update(w=taken)
    assert norm.w is norm._parameters.setdefault("w", None) is taken
    norm._parameters.clear()
    assert not hasattr(norm, "w")
    assert not hasattr(norm, "b")


# --- points a forward does not come to ------------------------------------------------------------

STREAM = torch.randn(2, 5, native.config("plain").d_model)
UNREACHED: list[tuple[Any, str, str, dict[str, Any]]] = [
    (native.tokens(), "blocks.1.hook_resid_post", "stop_at_layer=1", {"stop_at_layer": 1}),
    (native.tokens(), "blocks.1.hook_resid_post", "stop_at_layer=-1", {"stop_at_layer": -1}),
    (native.tokens(), "ln_final.hook_normalized", "stop_at_layer=2", {"stop_at_layer": 2}),
    (STREAM, "hook_embed", "start_at_layer=0", {"start_at_layer": 0}),
    (STREAM, "blocks.0.hook_resid_pre", "start_at_layer=1", {"start_at_layer": 1}),
    (STREAM, "hook_pos_embed", "start_at_layer=1", {"start_at_layer": 1}),
]


@pytest.mark.parametrize(("given", "name", "why", "arguments"), UNREACHED)
def test_a_point_the_forward_does_not_come_to_is_named_before_anything_runs(
    given: Any, name: str, why: str, arguments: dict[str, Any]
) -> None:
    model = native.build("plain")
    ran: list[str] = []
    model.add_hook(lambda name: True, lambda act, hook: ran.append(hook.name))
    message = f"{name}.* not reached with {why}"
    for names in (name, [name], [name], lambda each: each == name):
        with pytest.raises(UnknownHookError, match=message):
            model.run_with_cache(given, names_filter=names, **arguments)
    with pytest.raises(UnknownHookError, match=message):
        model.run_with_cache(given, names_filter=CaptureSpec(name), **arguments)
    with pytest.raises(UnknownHookError, match=message):
        model.run_with_hooks(given, fwd_hooks=[(name, lambda act, hook: None)], **arguments)
    with pytest.raises(UnknownHookError, match=message):
        model.run_with_hooks(given, bwd_hooks=[(name, lambda act, hook: None)], **arguments)
    start, stop = arguments.get("start_at_layer"), arguments.get("stop_at_layer")
    rest = ("logits", False, None, None, start, None, None, None, stop)  # by their places
    with pytest.raises(UnknownHookError, match=message):
        model.run_with_cache(given, *rest, names_filter=name)
    assert not ran
    assert all(len(point.fwd_hooks) <= 1 for point in model.hook_points())


def test_what_a_forward_comes_to_in_part_is_no_error() -> None:
    model = native.build("plain")
    _, cache = model.run_with_cache(native.tokens(), names_filter="resid_post", stop_at_layer=1)
    assert list(cache) == ["blocks.0.hook_resid_post"]
    seen: list[str] = []
    model.run_with_hooks(
        STREAM,
        fwd_hooks=[("blocks.*.hook_resid_pre", lambda act, hook: seen.append(hook.name))],
        start_at_layer=1,
    )
    assert seen == ["blocks.1.hook_resid_pre"]
    _, cache = model.run_with_cache(STREAM, start_at_layer=1, stop_at_layer=1)
    assert not len(cache)
    shortformer = native.build("shortformer")
    _, cache = shortformer.run_with_cache(
        STREAM, start_at_layer=1, stop_at_layer=2, names_filter="hook_pos_embed"
    )
    assert list(cache) == ["hook_pos_embed"]


def test_the_unembedding_is_not_reached_without_logits() -> None:
    model = native.build("unembed_transform")
    names = [name for name in model.hook_dict if name.startswith("unembed")]
    assert names
    for return_type in (None, "residual"):
        with pytest.raises(UnknownHookError, match=f"return_type={return_type!r}"):
            model.run_with_cache(native.tokens(), return_type=return_type, names_filter=names[0])
    model.run_with_cache(native.tokens(), names_filter=names[0])


# --- what is attached is known at once ------------------------------------------------------------


def twice(value: Tensor, hook: Any) -> Tensor:
    return value * 2


def test_points_hear_of_whatever_is_done_to_their_lists() -> None:
    point, x = HookPoint(), torch.ones(2)
    handle = point.add_hook(twice)
    changes: list[Callable[[list[Any]], Any]] = [
        lambda hooks: hooks.clear(),
        lambda hooks: hooks.append(handle),
        lambda hooks: hooks.pop(),
        lambda hooks: hooks.extend([handle]),
        lambda hooks: hooks.remove(handle),
        lambda hooks: hooks.insert(0, handle),
        lambda hooks: hooks.__delitem__(0),
        lambda hooks: hooks.__iadd__([handle]),
        lambda hooks: hooks.__setitem__(slice(None), []),
    ]
    for number, change in enumerate(changes):
        change(point.fwd_hooks)
        attached = number % 2 == 1
        assert point.listened is attached
        assert torch.equal(point(x), x * 2 if attached else x)
    for handles, attached in (([handle], True), ([], False), ([handle], True)):
        point.fwd_hooks = handles
        assert point.listened is attached
    handle.remove()  # also after its list was replaced
    assert not point.listened
    assert not point.fwd_hooks


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_what_a_copy_is_told_is_its_own(copied: Callable[[Any], Any]) -> None:
    model, ids = native.build("rotary"), native.tokens(1, 4)
    plain = model(ids)
    model.add_hook("blocks.0.hook_mlp_out", twice)
    other = copied(model)
    assert torch.equal(other(ids), model(ids))
    other.hook_dict["blocks.0.hook_mlp_out"].fwd_hooks[0].remove()
    assert torch.equal(other(ids), plain)
    assert not torch.equal(model(ids), plain)
    handle = other.blocks[1].register_forward_hook(lambda module, args, out: out * 2)
    assert not torch.equal(other(ids), plain)
    handle.remove()
    assert torch.equal(other(ids), plain)
    assert not other.is_listened()


def test_a_point_to_which_several_threads_attach_is_not_deaf_in_the_end() -> None:
    point, before = HookPoint(), sys.getswitchinterval()
    wrong = []

    def attach_and_remove() -> None:
        for _ in range(2000):
            handle = point.add_hook(twice)
            if not (point.listened and id(point) in editors_somewhere):
                wrong.append(1)
            handle.remove()

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=attach_and_remove) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    assert not point.listened
    assert id(point) not in editors_somewhere


def only_looks(*args: Any, **kwargs: Any) -> None:
    pass


only_looks.is_listener = True


def edits_are_live_by_both_ways(model: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """`edits_are_live`, asked at once and, as beside a model with foreign parts, part by part."""
    at_once = model.edits_are_live()
    with monkeypatch.context() as patched:
        patched.setattr(root_module, "strangers_somewhere", {"a part of another model"})
        assert model.edits_are_live() == at_once
    return at_once


@pytest.mark.parametrize("dir", ["fwd", "bwd"])
def test_functions_that_could_edit_are_known(dir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = native.build("rotary"), native.build("rotary")
    live = functools.partial(edits_are_live_by_both_ways, model, monkeypatch)
    with model.capture(), model.hooks([("hook_embed", only_looks)]):
        assert not live()
        handle = model.hook_embed.add_hook(twice, dir)
        assert live()
        assert not other.edits_are_live()
        copied = copy.deepcopy(model)
        handle.remove()
        assert not live()
        assert copied.edits_are_live()
        assert edits_are_live_by_both_ways(pickle.loads(pickle.dumps(copied)), monkeypatch)
        copied.reset_hooks()
        assert not copied.edits_are_live()


def test_functions_attached_in_torchs_way_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = native.build("rotary")
    live = functools.partial(edits_are_live_by_both_ways, model, monkeypatch)
    for module in (model, model.blocks, model.blocks[0].mlp, model.blocks[0].attn.hook_q):
        handle = module.register_forward_hook(only_looks)
        assert not live()
        handle.remove()
        for register in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
            handle = getattr(module, f"register_{register}")(lambda *args: None)
            assert live()
            handle.remove()
            assert not live()
    handle = torch_module.register_module_forward_hook(lambda *args: None)
    assert live()
    handle.remove()
    assert not live()


def test_points_that_compute_could_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = native.build("rotary")
    model.blocks[0].hook_mlp_out.forward = lambda x: x.mul_(2)
    assert edits_are_live_by_both_ways(model, monkeypatch)
    _, cache = model.run_with_cache(native.tokens(1, 4))
    torch.testing.assert_close(
        cache["resid_post", 0], cache["resid_mid", 0] + cache["mlp_out", 0], atol=1e-6, rtol=0
    )


@pytest.fixture
def nobody_edits(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[WeakValueDictionary[int, Component], ...]:
    """The editors and the strangers of all models that are built from now on."""
    sets = WeakValueDictionary(), WeakValueDictionary()
    for module in (hooks, root_module):
        monkeypatch.setattr(module, "editors_somewhere", sets[0])
        monkeypatch.setattr(module, "strangers_somewhere", sets[1])
    return sets


class Within(nn.Module):
    """A module of others, around one of ours."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Tensor:
        return self.inner(*args)


@pytest.mark.parametrize("place", ["block", "mlp", "expert"])
def test_functions_attached_to_parts_of_others_are_known(
    place: str, nobody_edits: tuple[WeakValueDictionary[int, Component], ...]
) -> None:
    model = native.build("experts" if place == "expert" else "rotary")
    block = model.blocks[0]
    where, name = {"block": (model.blocks, "0"), "mlp": (block, "mlp")}.get(
        place, (getattr(block.mlp, "experts", None), "0")
    )
    other = Within(getattr(where, name))
    setattr(where, name, other)
    assert list(nobody_edits[1].values()) == [where]
    assert not model.edits_are_live()
    handle = other.register_forward_hook(lambda module, args, out: out.zero_() and None)
    assert model.edits_are_live()
    handle.remove()
    assert not model.edits_are_live()


def test_no_part_is_looked_at_where_nobody_could_edit(
    monkeypatch: pytest.MonkeyPatch, nobody_edits: tuple[WeakValueDictionary[int, Component], ...]
) -> None:
    kinds = ("rotary", "experts", "xielu")
    models = [native.build(kind) for kind in kinds]

    def fail(self: Any) -> Any:
        raise AssertionError("the parts were walked over")

    monkeypatch.setattr(root_module.HookedRootModule, "_parts", fail)
    for model in models:
        model.run_with_cache(native.tokens(1, 4))
    handle = models[0].add_hook("hook_embed", twice)
    with pytest.raises(AssertionError, match="walked"):
        models[1].run_with_cache(native.tokens(1, 4))
    handle.remove()
    models[1].run_with_cache(native.tokens(1, 4))
    assert not any(nobody_edits)


def test_values_are_kept_from_torchs_global_hooks() -> None:
    model, ids = native.build("rotary"), native.tokens(1, 4)
    _, plain = model.run_with_cache(ids)

    def zero(module: nn.Module, args: Any, out: Any) -> None:
        if module is model.blocks[0]:
            out.zero_()

    handle = torch_module.register_module_forward_hook(zero)
    try:
        _, cache = model.run_with_cache(ids)
    finally:
        handle.remove()
    assert torch.equal(cache["resid_post", 0], plain["resid_post", 0])
    assert not cache["resid_pre", 1].any()


def test_a_list_of_components_is_a_module_list() -> None:
    model, ids = native.build("rotary"), native.tokens(1, 4)
    first, second = model.blocks
    assert isinstance(model.blocks, ComponentList)
    assert isinstance(model.blocks, nn.ModuleList)
    assert type(model.blocks[:1]) is nn.ModuleList
    logits = model(ids)
    model.blocks.append(first)
    assert list(model.blocks) == [first, second, first]
    assert model.blocks.pop(0) is first
    assert list(model.blocks) == [second, first]
    assert "2" not in vars(model.blocks)
    assert list(model.state_dict(prefix="m."))[1].startswith("m.blocks.0.")
    model.blocks.insert(0, first)
    del model.blocks[2]
    assert torch.equal(model(ids), logits)
    handle = model.blocks.register_forward_hook(twice)
    assert model.blocks.listened
    handle.remove()


def test_what_a_destructor_attaches_while_a_point_looks_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point, x = HookPoint(), torch.ones(2)
    handle = point.add_hook(only_looks)
    looks, plain = [], HookPoint.attached_here

    def attached_here(self: HookPoint) -> list[Any]:
        found = plain(self)
        looks.append(1)
        if len(looks) == 1:  # a collection may come here
            point.add_hook(twice)
        return found

    monkeypatch.setattr(HookPoint, "attached_here", attached_here)
    handle.remove()
    assert point.listened
    assert id(point) in editors_somewhere
    assert torch.equal(point(x), x * 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_the_child_of_a_fork_attaches_while_another_thread_did() -> None:
    script = """
        import os, threading, time
        from transformer_lens_lite import hooks
        point, held, ready = hooks.HookPoint(), threading.Event(), threading.Event()
        def hold():
            with hooks.LOOKING:
                ready.set()
                held.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        ready.wait()
        child = os.fork()
        if not child:
            point.add_hook(lambda x, hook: None)
            os._exit(7)
        held.set()
        thread.join()
        for _ in range(100):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                raise SystemExit(os.waitstatus_to_exitcode(status))
            time.sleep(0.1)
        os.kill(child, 9)
    """
    script = textwrap.dedent(script)
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", script]).returncode == 7


def test_an_interrupt_between_flag_and_entry_leaves_no_editor_out() -> None:
    def zero(x: Tensor, hook: Any) -> None:
        x.zero_()

    class Interrupting(WeakValueDictionary):
        def pop(self, *args: Any) -> Any:
            raise KeyboardInterrupt

    model, ids = native.build("rotary"), native.tokens(1, 4)
    _, clean = model.run_with_cache(ids)
    point = model.blocks[1].hook_resid_pre
    with pytest.MonkeyPatch.context() as patched:
        handle = point.add_hook(zero)
        patched.setattr(hooks, "editors_somewhere", Interrupting())
        with pytest.raises(KeyboardInterrupt):
            handle.remove()
    assert not point._edited
    point.add_hook(zero)
    _, cache = model.run_with_cache(ids)
    assert torch.equal(cache["resid_post", 0], clean["resid_post", 0])


def test_a_point_whose_class_is_changed_computes() -> None:
    class Doubled(HookPoint):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    model, ids = native.build("rotary"), native.tokens(1, 4)
    expected = model.run_with_hooks(ids, fwd_hooks=[("blocks.0.attn.hook_pattern", twice)])
    model.blocks[0].attn.hook_pattern.__class__ = Doubled
    torch.testing.assert_close(model(ids), expected)
    assert model.edits_are_live()


def test_points_are_told_apart_whatever_they_are_equal_to() -> None:
    class Alike(HookPoint):
        __hash__ = None

        def __eq__(self, other: object) -> bool:
            return True

    one, other = Alike(), Alike()
    handle = one.add_hook(twice)
    other.add_hook(twice)
    handle.remove()
    assert id(one) not in editors_somewhere
    assert id(other) in editors_somewhere


def test_attributes_of_ones_own_may_be_called_anything_public() -> None:
    class Own(HookedTransformer):
        def edited(self) -> str:
            return "mine"

    model = Own(native.config("rotary"))
    model.register_forward_hook(only_looks).remove()
    model.computes = 3
    assert model.edited() == "mine"
    assert copy.deepcopy(model).computes == 3


def test_a_slice_of_the_blocks_compiles(project_root: Path) -> None:
    """In a process of its own: compilers cannot trace the run-time checks of shapes."""
    script = """
        import native, torch
        model, ids = native.build("rotary"), native.tokens(1, 4)
        def last_mlps(ids):
            x = model.embed(ids)
            for block in model.blocks[1:]:
                x = x + block.mlp(x)
            return x
        compiled = torch.compile(last_mlps, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(ids), last_mlps(ids))
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    paths = os.pathsep.join([str(project_root), str(project_root / "tests")])
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths})


def test_globs_match_the_points_there_are_now() -> None:
    shallow, model = native.build("rotary", n_layers=1), native.build("rotary", n_layers=2)
    for _ in range(2):
        assert shallow.resolve_names("*resid_post") == ["blocks.0.hook_resid_post"]
        assert len(model.resolve_names("*resid_post")) == 2
    assert "blocks.0.attn.hook_result" not in model.resolve_names("*.attn.*")
    model.set_use_attn_result(True)
    assert "blocks.0.attn.hook_result" in model.resolve_names("*.attn.*")
    model.blocks[0].hook_new_resid_post = HookPoint()
    model.setup()
    assert model.resolve_names("*resid_post")[1] == "blocks.0.hook_new_resid_post"
    both = ["blocks.*.hook_resid_mid", "hook_embed"]
    assert model.resolve_names(both)[0] == "hook_embed"
    assert CaptureSpec(both).resolve(model)[0] == "hook_embed"


def test_hooks_are_set_aside_for_one_thread_alone() -> None:
    model, ids = native.build("rotary"), native.tokens(1, 4)
    plain = model(ids)
    model.add_hook("blocks.0.hook_mlp_out", twice)
    edited = model(ids)
    with ThreadPoolExecutor(1) as pool, model.hooks_set_aside():
        assert torch.equal(model(ids), plain)
        assert torch.equal(pool.submit(model, ids).result(), edited)
        with model.hooks([("blocks.0.hook_mlp_out", twice)]):  # attached since then
            assert torch.equal(model(ids), edited)
    assert torch.equal(model(ids), edited)


def test_levels_come_back_to_none_in_whatever_order_blocks_end() -> None:
    """As those of several threads do."""
    model = native.build("rotary")
    blocks = [model.hooks([("hook_embed", twice)]) for _ in range(3)]
    for block in blocks:
        block.__enter__()
    for block in blocks:
        block.__exit__(None, None, None)
    assert model.context_level == 0
    assert not model.is_listened()


def test_a_part_of_ours_in_place_of_a_point_gets_every_value_whatever_is_attached_to_it() -> None:
    class Doubling(Component):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model, ids = native.build("rotary"), native.tokens(1, 4)
    with model.hooks([("blocks.0.hook_mlp_in", twice)]):
        doubled = model(ids)
    model.blocks[0].hook_mlp_in = Doubling()
    assert torch.equal(model(ids), doubled)
    model.blocks[0].hook_mlp_in.register_forward_hook(lambda module, args, out: None).remove()
    assert torch.equal(model(ids), doubled)
    assert torch.equal(copy.deepcopy(model)(ids), doubled)


@pytest.mark.parametrize(
    ("container", "register"),
    [
        ("_forward_hooks", "register_forward_hook"),
        ("_forward_pre_hooks", "register_forward_pre_hook"),
        ("_backward_hooks", "register_full_backward_hook"),
    ],
)
@pytest.mark.parametrize("name", ["blocks.0", "blocks.0.hook_mlp_out"])
def test_a_container_put_in_the_place_of_torchs_own_is_heard_too(
    container: str, register: str, name: str
) -> None:
    model, hits = native.build("rotary"), []
    module = model.get_submodule(name)
    setattr(module, container, OrderedDict())
    handle = getattr(module, register)(lambda *args: hits.append(1))
    model(native.tokens(1, 4)).sum().backward()
    assert hits == [1]
    handle.remove()
    model(native.tokens(1, 4)).sum().backward()
    assert hits == [1]
    assert not module.listened


def test_copies_of_parametrized_models_are_heard() -> None:
    """torch copies those in a way of its own."""

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model, ids, hits = native.build("rotary"), native.tokens(1, 4), []
    parametrize.register_parametrization(model.blocks[0].attn, "b_O", Doubled())
    other = copy.deepcopy(model)
    assert torch.equal(other(ids), model(ids))
    other.blocks[0].attn.register_forward_hook(lambda *args: hits.append(1))
    model(ids)
    assert not hits
    other(ids)
    assert hits == [1]


@pytest.mark.parametrize("by", ["setattr", "add_module", "dict", "whole dict", "after none"])
def test_what_takes_the_place_of_a_points_replacement_stands_there_too(by: str) -> None:
    model, ids = native.build("rotary"), native.tokens(1, 4)
    plain = model(ids)
    for _ in range(2):
        for name in list(model.hook_dict):
            path, _, leaf = name.rpartition(".")
            parent, module = model.get_submodule(path), nn.Identity()
            if by == "setattr":
                setattr(parent, leaf, module)
            elif by == "add_module":
                parent.add_module(leaf, module)
            elif by == "dict":
                parent._modules[leaf] = module
            elif by == "whole dict":
                parent._modules = {**parent._modules, leaf: module}
            else:
                delattr(parent, leaf)
                setattr(parent, leaf, None)
                setattr(parent, leaf, module)
        torch.testing.assert_close(model(ids), plain)


def test_a_shallow_copy_of_a_point_leaves_the_handles_of_the_original() -> None:
    point, x = HookPoint(), torch.ones(2)
    handle = point.add_hook(twice)
    other = copy.copy(point)
    handle.remove()
    assert torch.equal(point(x), x)
    assert torch.equal(other(x), 2 * x)
