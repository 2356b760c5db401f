"""The residual stream as a sum, for every kind of model: exact, and labelled."""

from typing import Any

import native
import pytest
import torch
from torch import Tensor

from transformer_lens_lite import ActivationCache, HookedTransformer

CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-5}
SUMS = [n for n, v in native.VARIANTS.items() if v.get("norm_place") not in ("stream", "skip")]


@torch.no_grad()
def run(name: str, **changes: Any) -> tuple[HookedTransformer, Tensor, ActivationCache]:
    model = native.build(name, **changes)
    logits, cache = model.run_with_cache(native.tokens())
    return model, logits, cache


def stream(cache: ActivationCache, layer: int, n_layers: int, mlp_input: bool) -> Tensor:
    if layer == n_layers:
        return cache["resid_post", n_layers - 1]
    return cache["resid_mid" if mlp_input else "resid_pre", layer]


@pytest.mark.parametrize("name", SUMS)
@torch.no_grad()
def test_report_081_every_decomposition_sums_to_the_stream(name: str) -> None:
    model, _, cache = run(name)
    before = {key: value.clone() for key, value in cache.items()}
    has_mid = not (model.cfg.attn_only or model.cfg.parallel_attn_mlp)
    for layer in range(model.cfg.n_layers + 1):
        for mlp_input in (False, True) if has_mid and layer < model.cfg.n_layers else (False,):
            expected = stream(cache, layer, model.cfg.n_layers, mlp_input)
            how = {"layer": layer, "mlp_input": mlp_input, "return_labels": True}
            parts = [
                cache.decompose_resid(**how),
                cache.get_full_resid_decomposition(**how),
                cache.get_full_resid_decomposition(expand_neurons=False, **how),
            ]
            for stack, labels in parts:
                assert len(stack) == len(labels) == len(set(labels))
                torch.testing.assert_close(stack.sum(0), expected, **CLOSE)
        expected = stream(cache, layer, model.cfg.n_layers, False)
        heads, labels = cache.stack_head_results(layer, return_labels=True, incl_remainder=True)
        assert labels == [f"L{i}H{h}" for i in range(layer) for h in range(model.cfg.n_heads)] + [
            "remainder"
        ]
        torch.testing.assert_close(heads.sum(0), expected, **CLOSE)
    assert list(cache) == list(before)
    assert all(torch.equal(cache[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", [n for n in SUMS if n not in ("unembed_transform",)])
@torch.no_grad()
def test_report_083_attributions_sum_to_the_logits_before_any_cap(name: str) -> None:
    model, logits, cache = run(name)
    full = cache.get_full_resid_decomposition(expand_neurons="experts" not in name)
    token = 7
    attributions = cache.logit_attrs(full, token)
    assert attributions.shape == full.shape[:-1]
    constant = model.b_U[token] * model.cfg.logit_scale
    if hasattr(model.ln_final, "b"):
        constant = constant + model.ln_final.b @ model.logit_directions(token)
    total = attributions.sum(0) + constant
    uncapped = cache["unembed.hook_out"][..., token] * model.cfg.logit_scale
    torch.testing.assert_close(total, uncapped, **CLOSE)
    cap = model.cfg.output_logits_soft_cap
    assert cap <= 0 or (total - logits[..., token]).abs().max() > 0.1
    total = cap * torch.tanh(total / cap) if cap > 0 else total
    torch.testing.assert_close(total, logits[..., token], **CLOSE)
    lens = cache.logit_lens()
    torch.testing.assert_close(lens[-1], logits, **CLOSE)
    assert lens.shape == (model.cfg.n_layers + 1, *logits.shape)


@pytest.mark.parametrize(
    "name", ["plain", "rms", "sandwich_rms", "post_norm", "grouped_rotary", "rms_pre"]
)
@torch.no_grad()
def test_the_norm_that_reads_the_stream(name: str) -> None:
    model, _, cache = run(name)
    stack = cache.decompose_resid(layer=1)
    if model.cfg.norm_place != "post":
        normed = cache.apply_ln_to_stack(stack, layer=1).sum(0)
        torch.testing.assert_close(normed, cache["normalized", 1, "ln1"], **CLOSE)
        stack = cache.decompose_resid(layer=1, mlp_input=True, apply_ln=True)
        torch.testing.assert_close(stack.sum(0), cache["normalized", 1, "ln2"], **CLOSE)
    stack = cache.decompose_resid(apply_ln=True, pos_slice=-1)
    torch.testing.assert_close(stack.sum(0), cache["ln_final.hook_normalized"][:, -1], **CLOSE)
    heads = cache.stack_head_results(apply_ln=True, incl_remainder=True, pos_slice=(2, 5))
    normalized = cache["ln_final.hook_normalized"][:, 2:5]
    torch.testing.assert_close(heads.sum(0), normalized, **CLOSE)
    accumulated = cache.accumulated_resid(apply_ln=True, pos_slice=3)
    logits = accumulated @ model.W_U + model.b_U  # weight and bias of the norm are in it
    torch.testing.assert_close(logits[-1], model(native.tokens())[:, 3], **CLOSE)
    torch.testing.assert_close(logits, cache.logit_lens(pos_slice=3), **CLOSE)
    one = cache.apply_ln_to_stack(
        cache.decompose_resid(pos_slice=2)[:, 1], pos_slice=2, batch_slice=1, has_batch_dim=False
    )
    expected = cache["ln_final.hook_normalized"][1, 2]
    torch.testing.assert_close(one.sum(0), expected, **CLOSE)


def point_of(label: str) -> tuple[str, int | None]:
    """The hook point a label speaks of, and the head."""
    if "embed" in label:
        return f"hook_{label}", None
    if label.startswith("L"):
        layer, head = label[1:].split("H")
        return f"blocks.{layer}.attn.hook_z", int(head)
    layer, _, name = label.partition("_")
    return f"blocks.{layer}.hook_{name}", None


@pytest.mark.parametrize("name", ["plain", "grouped_rotary", "gated", "parallel"])
@torch.no_grad()
def test_report_081_a_label_names_what_is_gone_when_that_place_is_ablated(name: str) -> None:
    model, _, cache = run(name)

    def stacks(of: ActivationCache) -> list[tuple[Tensor, list[str]]]:
        return [of.decompose_resid(return_labels=True), of.stack_head_results(return_labels=True)]

    for before, labels in stacks(cache):
        assert not (before == 0).all(-1).any()
        for label in labels:
            point, head = point_of(label)

            def ablate(value: Tensor, hook: Any, head: int | None = head) -> None:
                value[..., slice(None) if head is None else head, :] = 0

            with model.hooks([(point, ablate)]):
                _, ablated = model.run_with_cache(native.tokens())
            (found,) = (stack for stack, names in stacks(ablated) if names == labels)
            after = dict(zip(labels, found, strict=True))
            gone = [each for each in labels if (after[each] == 0).all()]
            assert gone == [label]
            upstream = labels[: labels.index(label)]
            for each, value in zip(upstream, before, strict=False):
                assert torch.equal(after[each], value)


HELPERS = {
    "accumulated_resid": {"incl_mid": True},
    "decompose_resid": {},
    "stack_head_results": {"incl_remainder": True},
    "stack_neuron_results": {"incl_remainder": True, "neuron_slice": [1, 7]},
    "get_full_resid_decomposition": {},
}


@pytest.mark.parametrize("pos_slice", [None, 3, -1, (2, 9), [1, 12, 4]])
@pytest.mark.parametrize("name", ["plain", "ln_pre", "rms", "rms_pre"])
@torch.no_grad()
def test_report_039_and_080_a_row_of_a_batch_is_what_it_is_alone(name: str, pos_slice: Any) -> None:
    """With a batch of one, and with no batch axis at all; through a norm and not."""
    model, _, cache = run(name)
    row = native.tokens()[1:]
    _, one = model.run_with_cache(row)
    _, bare = model.run_with_cache(row, remove_batch_dim=True)
    alone = cache.apply_slice_to_batch_dim(1)
    for helper, more in HELPERS.items():
        for apply_ln in (False, True):
            how: dict[str, Any] = {**more, "pos_slice": pos_slice, "apply_ln": apply_ln}
            expected = getattr(cache, helper)(**how)[:, 1]
            assert expected.ndim == (2 if isinstance(pos_slice, int) else 3)
            assert expected.abs().mean() > 0.01
            torch.testing.assert_close(getattr(one, helper)(**how)[:, 0], expected, **CLOSE)
            torch.testing.assert_close(getattr(bare, helper)(**how), expected, **CLOSE)
            torch.testing.assert_close(getattr(alone, helper)(**how), expected, **CLOSE)
    neurons = cache.get_neuron_results(1, [2, 5], pos_slice)[1]
    torch.testing.assert_close(one.get_neuron_results(1, [2, 5], pos_slice)[0], neurons, **CLOSE)
    torch.testing.assert_close(bare.get_neuron_results(1, [2, 5], pos_slice), neurons, **CLOSE)
    how = {"pos_slice": pos_slice}
    expected = cache.logit_attrs(cache.decompose_resid(**how), 7, 2, **how)[:, 1]
    attributions = one.logit_attrs(one.decompose_resid(**how), 7, 2, **how)[:, 0]
    torch.testing.assert_close(attributions, expected, **CLOSE)
    attributions = bare.logit_attrs(bare.decompose_resid(**how), 7, 2, has_batch_dim=False, **how)
    torch.testing.assert_close(attributions, expected, **CLOSE)
    torch.testing.assert_close(bare.logit_lens(), cache.logit_lens()[:, 1], **CLOSE)
    sliced = model.run_with_cache(row, pos_slice=pos_slice)[1]
    for key, value in model.run_with_cache(native.tokens(), pos_slice=pos_slice)[1].items():
        torch.testing.assert_close(sliced[key][0], value[1], **CLOSE)


@torch.no_grad()
def test_labels_and_parts() -> None:
    model, _, cache = run("plain")
    stack, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "final_post"]
    assert torch.equal(stack[3], cache["resid_mid", 1])
    stack, labels = cache.accumulated_resid(1, mlp_input=True, return_labels=True)
    assert labels == ["0_pre", "1_pre", "1_mid"]
    _, labels = cache.decompose_resid(1, mlp_input=True, return_labels=True)
    assert labels == ["embed", "pos_embed", "0_attn_out", "0_mlp_out", "1_attn_out"]
    _, labels = cache.decompose_resid(mode="attn", incl_embeds=False, return_labels=True)
    assert labels == ["0_attn_out", "1_attn_out"]
    _, labels = cache.decompose_resid(mode="mlp", return_labels=True)
    assert labels == ["embed", "pos_embed", "0_mlp_out", "1_mlp_out"]
    _, labels = cache.get_full_resid_decomposition(1, return_labels=True)
    neurons = [f"L0N{i}" for i in range(19)]
    assert labels == ["L0H0", "L0H1", "L0H2", "L0H3", *neurons, "embed", "pos_embed", "bias"]
    assert cache.stack_head_results(0).shape == (0, 2, 13, 14)
    assert cache.stack_activation("scale", sublayer_type="ln1").shape == (2, 2, 13, 1)
    assert torch.equal(cache.stack_activation("z", 1)[0], cache["z", 0])
    for bad in ({"layer": 5}, {"layer": -3}, {"mode": "heads"}):
        with pytest.raises(ValueError, match="outside of a model of 2|mode must be"):
            cache.decompose_resid(**bad)


@pytest.mark.parametrize("apply_ln", [False, True])
@torch.no_grad()
def test_the_mlp_of_a_parallel_block_reads_what_attention_reads(apply_ln: bool) -> None:
    model, _, cache = run("parallel")
    assert model.cfg.parallel_attn_mlp
    enters = cache["normalized", 1, "ln2"] if apply_ln else cache["resid_pre", 1]
    how: dict[str, Any] = {"mlp_input": True, "apply_ln": apply_ln, "return_labels": True}
    stack, labels = cache.decompose_resid(1, **how)
    assert "1_attn_out" not in labels
    torch.testing.assert_close(stack.sum(0), enters, **CLOSE)
    stack, labels = cache.get_full_resid_decomposition(1, **how)
    assert "L1H0" not in labels
    torch.testing.assert_close(stack.sum(0), enters, **CLOSE)
    stack, labels = cache.accumulated_resid(1, **how)
    assert labels == ["0_pre", "1_pre"]
    torch.testing.assert_close(stack[-1], enters, **CLOSE)


@pytest.mark.parametrize(
    "name", ["plain", "gated", "sandwich_rms", "residual_scale", "post_norm", "sandwich"]
)
@torch.no_grad()
def test_neurons(name: str) -> None:
    model, _, cache = run(name)
    results = cache.get_neuron_results(1, neuron_slice=(2, 9), pos_slice=(1, 4))
    assert results.shape == (2, 3, 7, 14)
    onto = model.W_U[:, :3]
    projected = cache.get_neuron_results(1, (2, 9), (1, 4), project_output_onto=onto)
    torch.testing.assert_close(projected, results @ onto, **CLOSE)
    single = cache.get_neuron_results(1, (2, 9), (1, 4), project_output_onto=onto[:, 0])
    torch.testing.assert_close(single, projected[..., 0], **CLOSE)
    torch.testing.assert_close(cache.get_neuron_results(1, 3, (1, 4)), results[..., 1, :], **CLOSE)
    torch.testing.assert_close(
        cache.get_neuron_results(1, 3, 2, project_output_onto=onto), projected[:, 1, 1], **CLOSE
    )
    stack, labels = cache.stack_neuron_results(
        2, pos_slice=4, neuron_slice=[0, 5], return_labels=True, incl_remainder=True
    )
    assert labels == ["L0N0", "L0N5", "L1N0", "L1N5", "remainder"]
    torch.testing.assert_close(stack.sum(0), cache["resid_post", 1][:, 4], **CLOSE)
    torch.testing.assert_close(stack[2], cache.get_neuron_results(1, [0], 4)[:, 0], **CLOSE)
    onto_two = cache.stack_neuron_results(
        2, pos_slice=4, neuron_slice=[0, 5], incl_remainder=True, project_output_onto=onto
    )
    torch.testing.assert_close(onto_two, stack @ onto, **CLOSE)


@torch.no_grad()
def test_head_results_go_into_the_cache_when_asked() -> None:
    model, _, cache = run("grouped_rotary")
    _, listened = model.run_with_cache(native.tokens(), names_filter="*hook_result")
    assert ("result", 0) not in cache
    cache.compute_head_results()
    for layer in range(2):
        torch.testing.assert_close(cache["result", layer], listened["result", layer], **CLOSE)


@torch.no_grad()
def test_attributions_of_pairs_of_tokens_and_rows() -> None:
    model, logits, cache = run("plain")
    full = cache.get_full_resid_decomposition(pos_slice=-1)
    right, wrong = torch.tensor([3, 9]), torch.tensor([4, 1])
    difference = cache.logit_attrs(full, right, wrong, pos_slice=-1).sum(0)
    rows = torch.arange(2)
    expected = logits[rows, -1, right] - logits[rows, -1, wrong]
    expected = expected - (model.b_U[right] - model.b_U[wrong])
    expected = expected - model.ln_final.b @ (model.W_U[:, right] - model.W_U[:, wrong])
    torch.testing.assert_close(difference, expected, **CLOSE)
    everywhere = cache.get_full_resid_decomposition()
    ids = native.tokens()
    assert cache.logit_attrs(everywhere, ids).shape == everywhere.shape[:-1]
    with pytest.raises(ValueError, match="choose a column by pos_slice"):
        cache.logit_attrs(everywhere, right)
    with pytest.raises(ValueError, match="must have the same shape"):
        cache.logit_attrs(full, right, torch.tensor([1, 2, 3]), pos_slice=-1)
    alone = cache.apply_slice_to_batch_dim(1)
    parts = alone.get_full_resid_decomposition(pos_slice=-1)
    assert parts.shape == full[:, 1].shape
    attributions = alone.logit_attrs(parts, 9, 1, pos_slice=-1, has_batch_dim=False)
    torch.testing.assert_close(attributions.sum(0), expected[1], **CLOSE)


def test_what_is_no_sum_is_refused() -> None:
    model, _, cache = run("stream_norm")  # which has to be there
    with pytest.raises(ValueError, match="no sum of what was added"):
        cache.decompose_resid()
    model, _, cache = run("skip_norm")
    with pytest.raises(ValueError, match="norm_place='skip'.* no sum of what was added"):
        cache.decompose_resid()
    model, _, cache = run("experts")
    with pytest.raises(ValueError, match="mixture of experts"):
        cache.get_neuron_results(0)
    model, _, cache = run("unembed_transform")
    with pytest.raises(ValueError, match="no linear function of the stream"):
        cache.logit_attrs(cache.decompose_resid(), 3)
    model, _, cache = run("attn_only")
    with pytest.raises(ValueError, match="has no neurons"):
        cache.get_neuron_results(0)
    model = native.build("plain")
    _, few = model.run_with_cache(native.tokens(), names_filter="resid_post")
    with pytest.raises(KeyError, match="was not captured"):
        few.decompose_resid()
