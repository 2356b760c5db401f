"""Path patching, attribution and ablation, each against a version that spells it out."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import loud, native
from transformer_lens_lite import HookedTransformer
from transformer_lens_lite.ablation import ablate, ablate_heads, ablate_neurons, ablate_positions
from transformer_lens_lite.attribution import attribution_patch, edge_attribution, gradients_of
from transformer_lens_lite.patching import get_act_patch_attn_head_out_by_pos
from transformer_lens_lite.path_patching import path_patch, path_patch_heads
from transformer_lens_lite.sites import Site

KINDS = ("plain", "grouped_rotary", "parallel", "window_alibi", "experts", "everything")
LENGTH = 8


def metric(logits: Tensor) -> Tensor:
    return (logits[:, -1, 3] - logits[:, -1, 5]).mean() + 0.3 * logits[:, 3, 1].mean()


def texts() -> tuple[Tensor, Tensor]:
    """The base text and another one."""
    return native.tokens(2, LENGTH), native.tokens(4, LENGTH)[2:]


def run(model: HookedTransformer, tokens: Tensor, hooks: Sequence[tuple[str, Any]] = ()) -> Tensor:
    with torch.no_grad():
        return model.run_with_hooks(tokens, fwd_hooks=hooks)


def setting(index: Any, new: Any) -> Callable[..., Tensor]:
    """A hook that assigns."""

    def assign(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        value[index] = new(value[index]) if callable(new) else new
        return value

    return assign


def close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert expected.std() > 1e-3
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=5e-5)


# --- path patching --------------------------------------------------------------------------------


def path_by_hand(
    model: HookedTransformer,
    sender: tuple[str, Any],
    receivers: list[tuple[str, Any]] | None,
    freeze_mlps: bool = False,
) -> Tensor:
    """Both runs of the paper, with nothing but hooks; `sender` and `receivers` are (point,
    index)."""
    base, other = texts()
    _, of_base = model.run_with_cache(base)
    _, of_other = model.run_with_cache(other)
    frozen = [name for name in of_base if name.endswith("hook_z")]
    frozen += [name for name in of_base if freeze_mlps and name.endswith("hook_mlp_out")]
    name, index = sender
    hooks = [(each, setting(..., of_base[each])) for each in frozen]
    hooks.append((name, setting(index, of_other[name][index])))
    if receivers is None:
        return metric(run(model, base, hooks))
    seen: dict[str, Tensor] = {}
    for point, _ in receivers:
        hooks.append((point, lambda value, hook: seen.update({hook.name: value.clone()})))
    run(model, base, hooks)
    again = [(point, setting(where, seen[point][where])) for point, where in receivers]
    return metric(run(model, base, again))


@pytest.mark.parametrize("freeze_mlps", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_direct_paths_to_the_logits(kind: str, freeze_mlps: bool) -> None:
    model = native.build(kind)
    base, other = texts()
    _, source = model.run_with_cache(other)
    got = path_patch_heads(model, base, source, metric, freeze_mlps=freeze_mlps)
    every = slice(None)
    expected = [
        [
            path_by_hand(
                model, (f"blocks.{layer}.attn.hook_z", (every, every, head)), None, freeze_mlps
            )
            for head in range(4)
        ]
        for layer in range(2)
    ]
    close(got, torch.tensor(expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("receiver", ["q", "k", "v", "mlp_in"])
def test_paths_into_heads_and_mlps(kind: str, receiver: str) -> None:
    model = native.build(kind, n_layers=3) if kind in ("plain", "parallel") else native.build(kind)
    last = model.cfg.n_layers - 1
    base, other = texts()
    _, source = model.run_with_cache(other)
    every = slice(None)
    if receiver == "mlp_in":
        into, by_hand = [Site("mlp_in", last)], [(f"blocks.{last}.hook_mlp_in", ...)]
    else:
        into = [Site(receiver, last, head=1), Site(receiver, last, pos=4, head=0)]
        point = f"blocks.{last}.attn.hook_{receiver}"
        by_hand = [(point, (every, every, 1)), (point, (every, 4, 0))]
    senders = [
        Site("z", 0, head=2), Site("z", 0, head=1, pos=3), Site("mlp_out", 0, pos=[2, 5]),
        Site("z", last, head=0), Site("resid_pre", 0, pos=4),
    ]  # fmt: skip
    spelled = [
        ("blocks.0.attn.hook_z", (every, every, 2)), ("blocks.0.attn.hook_z", (every, 3, 1)),
        ("blocks.0.hook_mlp_out", (every, [2, 5])),
        (f"blocks.{last}.attn.hook_z", (every, every, 0)),
        ("blocks.0.hook_resid_pre", (every, 4)),
    ]  # fmt: skip
    got = path_patch(model, base, source, metric, senders, into, batch_size=2)
    close(got, torch.stack([path_by_hand(model, each, by_hand) for each in spelled]))


def test_freezing_is_what_makes_a_path_direct() -> None:
    model = native.build(n_layers=3)
    base, other = texts()
    _, source = model.run_with_cache(other)
    sender = Site("z", 0, head=2)
    direct = path_patch(model, base, source, metric, [sender])
    frozen = path_patch(model, base, source, metric, [sender], freeze_mlps=True)
    every = (slice(None), slice(None), 2)
    name = "blocks.0.attn.hook_z"
    total = metric(run(model, base, [(name, setting(every, source[name][every]))]))
    assert len({round(float(each), 3) for each in (direct, frozen, total)}) == 3


def test_path_patching_says_what_does_not_fit() -> None:
    model = native.build()
    base, other = texts()
    _, source = model.run_with_cache(other)
    heads = [Site("z", 0, head=2)]
    for error, words, senders, receivers in (
        (ValueError, "'logits' or a list", heads, "logit"),
        (ValueError, "'logits' or a list", heads, []),
        (TypeError, "a site is", [("z", 0)], "logits"),
        (ValueError, "no head axis", [Site("mlp_out", 0, head=1)], "logits"),
        (IndexError, "outside of 4", [Site("z", 0, head=4)], "logits"),
        (KeyError, "hook_zz", [Site("blocks.0.attn.hook_zz")], "logits"),
        (ValueError, "lists along several", [Site("z", 0, [1, 2], [0, 1])], "logits"),
    ):
        with pytest.raises(error, match=words):
            path_patch(model, base, source, metric, senders, receivers)
    _, short = model.run_with_cache(other[:, :5])
    with pytest.raises(ValueError, match="the source's"):
        path_patch(model, base, short, metric, heads)


# --- attribution ----------------------------------------------------------------------------------

ATTRIBUTED = [
    ("resid_pre", ("layer", "pos")),
    ("mlp_out", ("layer", "pos")),
    ("z", ("layer", "pos", "head")),
    ("z", ("layer", "head")),
    ("pattern", ("layer", "head_index", "dest_pos", "src_pos")),
    ("attn_scores", ("layer", "dest_pos", "head")),
]


@pytest.mark.parametrize("kind", ["plain", "grouped_rotary", "everything"])
@pytest.mark.parametrize(("name", "axes"), ATTRIBUTED)
def test_attribution_is_the_slope_of_a_patch(kind: str, name: str, axes: tuple[str, ...]) -> None:
    model = native.build(kind).double()
    base, other = texts()
    _, clean = model.run_with_cache(other)
    _, corrupted = model.run_with_cache(base)
    got = attribution_patch(model, base, clean, metric, name, axes)
    eps, unpatched = 1e-6, metric(run(model, base))
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        place = [int(torch.randint(size, (), generator=generator)) for size in got.shape]
        at = dict(zip(axes, place, strict=True))
        full = f"blocks.{at['layer']}." + (
            f"hook_{name}" if name in ("resid_pre", "mlp_out") else f"attn.hook_{name}"
        )
        head = at.get("head", at.get("head_index"))
        index: list[Any] = [slice(None)] * corrupted[full].ndim
        if name in ("pattern", "attn_scores"):
            index[1], index[2] = head, at["dest_pos"]
            index[3] = at.get("src_pos", slice(0, at["dest_pos"] + 1))
        else:
            index[1] = at.get("pos", slice(None))
            if head is not None:
                index[2] = head
        where = tuple(index)
        step = eps * (clean[full][where] - corrupted[full][where]).nan_to_num(0.0)
        patched = metric(run(model, base, [(full, setting(where, lambda x, s=step: x + s))]))
        slope = (patched - unpatched) / eps
        assert float(got[tuple(place)]) == pytest.approx(float(slope), rel=1e-3, abs=1e-5)
    assert got.abs().max() > 1e-2


def test_attribution_is_exact_where_the_metric_is_linear() -> None:
    model = native.build("no_norm", attn_only=True, n_layers=1)
    base, other = texts()
    _, clean = model.run_with_cache(other)
    got = attribution_patch(model, base, clean, metric, "z", ("layer", "pos", "head"))
    swept = get_act_patch_attn_head_out_by_pos(model, base, clean, metric)
    close(got, swept - metric(run(model, base)))


def test_attribution_leaves_no_gradients_and_needs_none() -> None:
    model = native.build()
    base, other = texts()
    _, clean = model.run_with_cache(other)
    got = attribution_patch(model, base, clean, metric, "z", ("layer", "head"))
    assert all(parameter.grad is None for parameter in model.parameters())
    frozen = native.build().requires_grad_(False)
    with torch.no_grad():
        torch.testing.assert_close(
            attribution_patch(frozen, base, clean, metric, "z", ("layer", "head")), got
        )
    assert not model.is_listened()


def test_attribution_says_what_does_not_fit() -> None:
    model = native.build()
    base, other = texts()
    _, clean = model.run_with_cache(other)
    with pytest.raises(ValueError, match="'z' has axes.*'pos'"):
        attribution_patch(model, base, clean, metric, "z", ("layer", "po"))
    with pytest.raises(ValueError, match="first axis"):
        attribution_patch(model, base, clean, metric, "z", ("pos",))
    with pytest.raises(KeyError, match="hook_resid_pree"):
        attribution_patch(model, base, clean, metric, "resid_pree")
    _, shorter = model.run_with_cache(other[:, :-1])
    for attributed in (
        lambda: attribution_patch(model, base, shorter, metric, "z"),
        lambda: edge_attribution(model, base, shorter, metric),
    ):
        with pytest.raises(ValueError, match="clean 'blocks.0.*must have as many tokens"):
            attributed()
    with pytest.raises(ValueError, match="differentiable"):
        gradients_of(model, base, lambda logits: logits.argmax(), ["hook_embed"])


@pytest.mark.parametrize(
    "kind", ["plain", "grouped_rotary", "parallel", "residual_scale", "attn_only"]
)
def test_edge_attribution_is_the_slope_of_one_edge(kind: str) -> None:
    model = native.build(kind).double()
    base, other = texts()
    _, clean = model.run_with_cache(other)
    points = ["*hook_result", "*hook_mlp_out", "*hook_resid_pre"]
    points = points[:1] + points[2:] if kind == "attn_only" else points
    _, written_clean = model.run_with_cache(other, names_filter=points)
    _, written = model.run_with_cache(base, names_filter=points)
    edges = edge_attribution(model, base, clean, metric)
    eps, unpatched = 1e-6, metric(run(model, base))
    scale = model.cfg.residual_scale if kind == "residual_scale" else 1.0
    checked = 0
    for sender in ("embed", "0.h1", "0.h3", "0.mlp", "1.h2"):
        for receiver in ("0.k1", "1.q2", "1.v0", "0.mlp", "1.mlp", "logits"):
            if kind == "attn_only" and "mlp" in sender + receiver:
                continue
            found = float(
                edges.scores[edges.senders.index(sender), edges.receivers.index(receiver)]
            )
            if is_no_edge(sender, receiver, kind == "parallel"):
                assert found != found
                continue
            layer = sender[0]
            if sender == "embed":
                change = written_clean["resid_pre", 0] - written["resid_pre", 0]
            elif sender.endswith("mlp"):
                change = written_clean["mlp_out", 0] - written["mlp_out", 0]
            else:
                name, head = f"blocks.{layer}.attn.hook_result", int(sender[-1])
                change = (written_clean[name] - written[name])[:, :, head] * scale
            if receiver == "logits":
                point, where = "blocks.1.hook_resid_post", (...,)
            elif receiver.endswith("mlp"):
                point, where = f"blocks.{receiver[0]}.hook_mlp_in", (...,)
            else:
                point = f"blocks.{receiver[0]}.hook_{receiver[2]}_input"
                where = (slice(None), slice(None), int(receiver[3]))
            add = setting(where, lambda x, c=change: x + eps * c)
            slope = (metric(run(model, base, [(point, add)])) - unpatched) / eps
            assert found == pytest.approx(float(slope), rel=1e-3, abs=1e-5), (sender, receiver)
            checked += abs(found) > 1e-3
    assert checked >= 8
    sender, receiver, top = edges.strongest(1)[0]
    assert abs(top) == edges.scores.abs().nan_to_num(0).max()
    assert edges.scores[edges.senders.index(sender), edges.receivers.index(receiver)] == top


def is_no_edge(sender: str, receiver: str, parallel: bool) -> bool:
    if sender == "embed" or receiver == "logits":
        return False
    if sender[0] < receiver[0]:
        return False
    into_own_mlp = sender[0] == receiver[0] and receiver.endswith("mlp") and "h" in sender
    return not (into_own_mlp and not parallel)


@pytest.mark.parametrize("kind", ["sandwich", "post_norm", "stream_norm", "skip_norm"])
def test_edges_need_a_stream_that_is_a_sum(kind: str) -> None:
    model = native.build(kind)
    _, cache = model.run_with_cache(texts()[0])
    with pytest.raises(ValueError, match="norms act on that sum"):
        edge_attribution(model, texts()[1], cache, metric)


# --- ablation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_zero_ablation_of_heads(kind: str) -> None:
    model, (base, _) = native.build(kind), texts()
    expected = [
        [
            metric(run(model, base, [(f"blocks.{layer}.attn.hook_z", setting(where, 0.0))]))
            for where in [(slice(None), slice(None), head) for head in range(4)]
        ]
        for layer in range(2)
    ]
    close(ablate_heads(model, base, metric), torch.tensor(expected))


def test_mean_ablation_leaves_padding_out() -> None:
    model, (base, _) = native.build("rotary"), texts()
    ids, mask = native.tokens(3, 11), torch.ones(3, 11, dtype=torch.long)
    mask[0, :4] = 0
    _, reference = model.run_with_cache(ids, attention_mask=mask)
    got = ablate(
        model,
        base,
        metric,
        [Site("z", 1, head=2), Site("mlp_out", 0, pos=[3, 5])],
        "mean",
        reference,
    )
    z = torch.cat([reference["z", 1][0, 4:], reference["z", 1][1], reference["z", 1][2]])
    out = torch.cat([reference["mlp_out", 0][i][mask[i].bool()] for i in range(3)])
    expected = [
        [("blocks.1.attn.hook_z", setting((slice(None), slice(None), 2), z.mean(0)[2]))],
        [("blocks.0.hook_mlp_out", setting((slice(None), [3, 5]), out.mean(0)))],
    ]
    close(got, torch.stack([metric(run(model, base, hooks)) for hooks in expected]))


def test_mean_over_rows_keeps_each_position_apart() -> None:
    model, (base, _) = native.build("rotary"), texts()
    _, reference = model.run_with_cache(native.tokens(5, LENGTH))
    got = ablate_positions(
        model, base, metric, "attn_out", "mean", reference=reference, mean_over="rows"
    )
    expected = torch.zeros(2, LENGTH)
    for layer in range(2):
        for pos in range(LENGTH):
            new = reference["attn_out", layer][:, pos].mean(0)
            hook = (f"blocks.{layer}.hook_attn_out", setting((slice(None), pos), new))
            expected[layer, pos] = metric(run(model, base, [hook]))
    close(got, expected)


def test_resampling_takes_whole_rows_of_the_reference() -> None:
    model, (base, _) = native.build("rotary"), texts()
    _, reference = model.run_with_cache(native.tokens(5, LENGTH))
    rows = torch.randint(5, (2,), generator=torch.Generator().manual_seed(3))
    got = ablate_neurons(
        model, base, metric, 1, [4, 0, 11], "resample", pos=slice(2, None),
        reference=reference, generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    expected = []
    for neuron in (4, 0, 11):
        where = (slice(None), slice(2, None), neuron)
        hook = setting(where, reference["post", 1][rows][where])
        expected.append(metric(run(model, base, [("blocks.1.mlp.hook_post", hook)])))
    assert torch.stack(expected).std() > 1e-4
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-4, atol=2e-5)


def test_several_sites_go_together_and_none_is_the_run_as_it_is() -> None:
    model, (base, _) = loud.build("rotary_gqa"), texts()
    pair = [Site("z", 0, head=1), Site("z", -1, head=0, pos=-1)]
    got = ablate(model, base, metric, [[], pair, pair[0]], 2.5)
    every = slice(None)
    hooks = [
        ("blocks.0.attn.hook_z", setting((every, every, 1), 2.5)),
        ("blocks.2.attn.hook_z", setting((every, LENGTH - 1, 0), 2.5)),
    ]
    close(got, torch.stack([metric(run(model, base, hooks[:n])) for n in (0, 2, 1)]))


def test_ablation_says_what_does_not_fit() -> None:
    model, (base, _) = native.build(), texts()
    _, reference = model.run_with_cache(native.tokens(5, LENGTH - 1))
    site = [Site("z", 0, head=1)]
    with pytest.raises(ValueError, match="'means'.*'mean'"):
        ablate(model, base, metric, site, "means")
    with pytest.raises(ValueError, match="needs reference"):
        ablate(model, base, metric, site, "mean")
    with pytest.raises(ValueError, match="does not fit"):
        ablate(model, base, metric, site, "resample", reference)
    with pytest.raises(IndexError, match="outside of 8"):
        ablate(model, base, metric, [Site("z", 0, pos=8)])
    with pytest.raises(KeyError, match="hook_zz"):
        ablate(model, base, metric, [Site("blocks.0.attn.hook_zz")])
