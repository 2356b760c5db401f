"""Sweeps of edits against one full forward a cell, in every kind of model."""

import itertools
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import loud, native
from transformer_lens_lite import HookedTransformer, patching
from transformer_lens_lite.lazy_logits import LazyLogits, columns_read
from transformer_lens_lite.patch_engine import Edit, PatchEngine

REFERENCE = json.loads((Path(__file__).parent / "patching_reference.json").read_text())
LENGTH = native.LENGTH
# padding, capacity and positions meet differently in each of these
PADDED = ("plain", "rotary", "alibi", "window_rotary_grouped", "shortformer", "experts", "dynamic")


def metric(logits: Tensor) -> Tensor:
    """Reads the last column, one in the middle and one at the beginning."""
    return (logits[:, -1, 3] - logits[:, -1, 5] + 0.1 * logits[:, 2, 7] + logits[0, 6, 1]).mean()


@torch.no_grad()
def by_hand(
    model: HookedTransformer, tokens: Tensor, edits: Sequence[Edit], mask: Tensor | None = None
) -> Tensor:
    """Logits of one full forward with the edits as plain hooks."""

    def hook_for(edit: Edit) -> Callable[..., Tensor]:
        def assign(value: Tensor, hook: Any) -> Tensor:
            value = value.clone()
            value[edit.index] = (
                edit.value(value[edit.index]) if callable(edit.value) else edit.value
            )
            return value

        return assign

    hooks = [(edit.name, hook_for(edit)) for edit in edits]
    return model.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=hooks)


def some_cells(model: HookedTransformer) -> list[list[Edit]]:
    """Edits of all kinds of places: single ones, several together, none."""
    last = model.cfg.n_layers - 1
    every = slice(None)
    cells = [
        [Edit("blocks.0.hook_resid_pre", (every, 4), 1.5)],
        [Edit(f"blocks.{last}.hook_resid_pre", (every, 4), -1.0)],
        [Edit(f"blocks.{last}.hook_resid_post", (every, LENGTH - 1), 2.0)],
        [Edit("blocks.0.attn.hook_z", (every, every, 1), 0.0)],
        [Edit(f"blocks.{last}.attn.hook_v", (every, [3, 8], 0), torch.randn(2, 2, 1))],
        [Edit("blocks.0.attn.hook_k", (every, -5, 0), lambda k: 1 - k)],
        [Edit(f"blocks.{last}.attn.hook_pattern", (every, 2, slice(5, 8), 4), 0.5)],
        [Edit("blocks.0.attn.hook_attn_scores", (0, 1, 9, slice(0, 9)), 0.0)],
        [Edit("blocks.0.hook_attn_out", (1, slice(2, None, 3)), 0.0)],
        [Edit("hook_embed", (every, 7), 0.7)],
        [Edit("unembed.hook_in", (every, 8), 1.0)],
        [Edit("unembed.hook_out", (every, 5, 3), 9.0)],
        [
            Edit("blocks.0.attn.hook_q", (every, 6, 1), 0.0),
            Edit(f"blocks.{last}.hook_attn_out", (every, slice(3, 5)), 1.0),
        ],
        [Edit("hook_embed", (1, 3), 0.0), Edit("unembed.hook_out", (every, -1), lambda x: -x)],
        [],
    ]
    if "hook_pos_embed" in model.hook_dict:
        cells.append([Edit("hook_pos_embed", (every, 5), 0.7)])
    if not model.cfg.attn_only:
        cells.append([Edit("blocks.0.hook_mlp_out", (every, slice(6, 9)), 0.3)])
    return cells


def assert_like_full_forwards(
    model: HookedTransformer, tokens: Tensor, mask: Tensor | None = None, **how: Any
) -> None:
    cells = some_cells(model)
    engine = PatchEngine(model, tokens, mask)
    base = by_hand(model, tokens, [], mask)
    expected = [by_hand(model, tokens, cell, mask) for cell in cells]
    # the comparison below could not fail where an edit does nothing
    effects = [float((each - base).abs().max()) for each in expected]
    assert min(effect for effect, cell in zip(effects, cells, strict=True) if cell) > 1e-3
    # without norms, logits are large, and so is their rounding
    atol = 1e-5 * max(2.0, float(base.abs().max()))
    seen = set()
    for outcome in engine.run(cells, **how):
        seen.add(outcome.number)
        torch.testing.assert_close(
            outcome.logits.clone(), expected[outcome.number], rtol=1e-5, atol=atol
        )
    assert seen == set(range(len(cells)))


# --- exact, everywhere ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", native.VARIANTS)
def test_every_cell_equals_a_full_forward(name: str) -> None:
    assert_like_full_forwards(native.build(name), native.tokens())


@pytest.mark.parametrize("name", PADDED)
def test_padding_on_the_left_is_padding_in_every_cell(name: str) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :4] = 0
    assert_like_full_forwards(native.build(name), native.tokens(), mask)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_any_number_of_cells_at_once(batch_size: int) -> None:
    model = native.build("window_rotary_grouped")
    assert_like_full_forwards(model, native.tokens(), batch_size=batch_size)


def test_a_processed_model() -> None:
    model = loud.build("rotary_gqa")
    model.load_and_process_state_dict(model.state_dict())
    tokens = loud.tokens(2, LENGTH)
    assert_like_full_forwards(model, tokens)


def test_texts_of_different_lengths() -> None:
    model = HookedTransformer.from_pretrained("tiny-lens", default_padding_side="left")
    texts = ["Mary went to the store", "When Mary and John went to the store, John gave a book to"]
    ids = model.to_tokens(texts)
    n_pos = ids.shape[1]
    cells = [
        [Edit("blocks.1.hook_resid_pre", (slice(None), n_pos - 2), 1.0)],
        [Edit("hook_embed", (slice(None), n_pos - 3), 0.0)],
        [Edit("blocks.0.attn.hook_z", (slice(None), slice(None), 1), 0.0)],
    ]
    for given in (texts, ids):
        engine = PatchEngine(model, given)
        assert engine.mask is not None
        assert engine.mask[0, 0] == 0
        for outcome in engine.run(cells):
            expected = by_hand(model, ids, cells[outcome.number], engine.mask)
            real = engine.mask.bool()
            torch.testing.assert_close(
                outcome.logits.clone()[real], expected[real], rtol=1e-5, atol=1e-4
            )


def test_the_bar_is_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    model, (corrupted, clean) = native.build(), native.tokens(2, 10).split(5, 1)
    _, cache = model.run_with_cache(clean)
    patching.get_act_patch_resid_pre(model, corrupted, cache, metric_5, verbose=True)
    said = capsys.readouterr()
    assert said.out + said.err == ""


def test_hooks_of_the_users_own_act_in_every_cell() -> None:
    model, tokens = native.build("rotary"), native.tokens()

    def only_of_whole_texts(value: Tensor, hook: Any) -> Tensor:
        assert value.shape[:2] == tokens.shape
        value[0, 5] *= 3
        return value

    plain = by_hand(model, tokens, [])
    with model.hooks([("blocks.1.hook_resid_pre", only_of_whole_texts)]):
        assert not torch.allclose(plain, model(tokens))
        assert_like_full_forwards(model, tokens)


def test_who_only_listens_hears_nothing_of_the_cells() -> None:
    model, tokens = native.build("rotary"), native.tokens()
    cell = [Edit("blocks.0.hook_resid_pre", (slice(None), 4), 1.5)]
    engine = PatchEngine(model, tokens)
    with model.capture("resid_pre") as cache:
        model(tokens)
        logits = engine.metrics([cell], lambda logits: logits[:, -1])
    assert len(cache.runs) == 1
    assert logits.shape == (1, 2, 23)
    assert not model.is_listened()


# --- what is saved --------------------------------------------------------------------------------


class Counter:
    """Positions that each block computed, [layer]."""

    def __init__(self, model: HookedTransformer) -> None:
        self.positions = [0] * model.cfg.n_layers
        for layer, block in enumerate(model.blocks):
            block.register_forward_pre_hook(self._counting(layer))

    def _counting(self, layer: int) -> Callable[..., None]:
        def count(block: Any, inputs: tuple[Any, ...]) -> None:
            self.positions[layer] += inputs[0].shape[0] * inputs[0].shape[1]

        count.is_listener = True  # type: ignore[attr-defined]
        return count


def test_no_block_runs_before_its_cells_begin_and_no_position_twice() -> None:
    model, tokens = native.build(n_layers=3), native.tokens(1)
    cells = [
        [Edit(f"blocks.{layer}.hook_resid_pre", (slice(None), pos), 1.0)]
        for layer in range(3)
        for pos in (0, LENGTH - 1)
    ]
    engine = PatchEngine(model, tokens)
    counter = Counter(model)
    engine.metrics(cells, metric)
    one = LENGTH + 1  # from the first position, and from the last
    # once more for the keys and values of the base run
    assert counter.positions == [LENGTH + one, LENGTH + 2 * one, LENGTH + 3 * one]


def test_cells_where_the_clean_run_is_the_same_are_not_run() -> None:
    model = native.build()
    corrupted, clean = native.tokens(1), native.tokens(1)
    clean[0, -1] = (clean[0, -1] + 1) % 23
    _, cache = model.run_with_cache(clean)
    counter = Counter(model)
    results = patching.get_act_patch_resid_pre(model, corrupted, cache, metric)
    base = float(metric(by_hand(model, corrupted, [])))
    assert (results[:, :-1] == results[0, 0]).all()
    assert results[0, 0] == pytest.approx(base, abs=1e-5)
    assert (results[:, -1] != results[0, 0]).all()
    # the base run, its keys and values, this test's own, and one position in each cell
    assert counter.positions == [3 * LENGTH + 1, 3 * LENGTH + 2]


def test_only_the_columns_that_a_metric_reads_are_unembedded() -> None:
    model, tokens = native.build(), native.tokens()
    rows = []
    model.unembed.register_forward_pre_hook(lambda _, args: rows.append(args[0][..., 0].numel()))
    engine = PatchEngine(model, tokens)
    engine.reuses_nothing = False  # the counter is a hook that might edit
    cells = [[Edit("blocks.0.hook_resid_pre", (slice(None), pos), 1.0)] for pos in (9, 9, 10)]
    list(engine.run(cells))
    assert rows == []
    engine.metrics(cells[:2], lambda logits: logits[:, -1, 3] - logits[:, -1, 5])
    assert rows == [2 * 2]  # both cells at once
    engine.metrics(cells[:1], lambda logits: logits[:, 4:11:3].sum())
    assert rows[1:] == [2 * 2, 2]  # 4 and 7 from the base run, and then 10
    engine.metrics(cells[:1], lambda logits: logits.softmax(-1)[:, 0].sum())
    assert sum(rows[3:]) == 2 * LENGTH


# --- logits that are made when they are read ------------------------------------------------------

INDICES = [
    (slice(None), -1),
    (0, -1),
    (slice(None), slice(2, 9, 2), 3),
    (Ellipsis, 4),
    (slice(None), slice(-3, None)),
    (slice(None), [5, -1, 5]),
    (torch.arange(2), torch.tensor([3, 12]), torch.tensor([1, 2])),
    (torch.arange(2)[:, None], torch.tensor([[3, 12], [0, 6]])),
    (1,),
    (Ellipsis, 8, 3),
    (slice(None), 7, Ellipsis),
    (None, 0, 7),
    (slice(None), torch.arange(LENGTH) > 8),
    (0, 3, [1, 2]),
    (slice(1, 2), 3, torch.tensor([1, 2])),
    (slice(None), slice(5, 5)),
]


@pytest.fixture(scope="module")
def lazy_and_whole() -> tuple[Callable[[], Tensor], Tensor]:
    model, tokens = native.build(), native.tokens()
    cells = [[Edit("blocks.0.hook_resid_pre", (slice(None), 6), 1.0)]] * 2
    engine = PatchEngine(model, tokens)
    return (
        lambda: list(engine.run(cells))[1].logits,
        by_hand(model, tokens, cells[0]),
    )


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_is_that_of_a_tensor(lazy_and_whole: Any, index: Any) -> None:
    make, whole = lazy_and_whole
    logits = make()
    assert isinstance(logits, LazyLogits)
    got = logits[index]
    assert type(got) is Tensor
    torch.testing.assert_close(got, whole[index], rtol=1e-5, atol=1e-5)


def test_an_index_says_which_columns_it_reads() -> None:
    shape = (2, LENGTH, 23)
    assert columns_read((slice(None), -1), shape)[0] == [LENGTH - 1]
    assert columns_read((0, slice(2, 9, 3), 4), shape)[0] == [2, 5, 8]
    assert columns_read((Ellipsis, torch.tensor([4, -1, 4]), 2), shape)[0] == [4, LENGTH - 1]
    assert columns_read((Ellipsis, 4), shape)[0] == list(range(LENGTH))
    assert columns_read((None, 4), shape)[0] is None


def test_they_are_a_tensor_to_everybody(lazy_and_whole: Any) -> None:
    make, whole = lazy_and_whole
    logits = make()
    assert logits.shape == whole.shape
    assert (logits.dtype, logits.device, logits.ndim, len(logits)) == (
        torch.float32,
        whole.device,
        3,
        2,
    )
    assert logits._whole is None
    for use in (
        lambda x: x.log_softmax(-1),
        lambda x: torch.stack([x, x]),
        lambda x: x[0].max(),
        lambda x: 2 - x,
        lambda x: torch.einsum("bpv->b", x),
        lambda x: x.float().mean(),
        lambda x: torch.tensor(x.tolist()),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: next(iter(x)),
    ):
        torch.testing.assert_close(use(make()), use(whole), rtol=1e-4, atol=1e-4)
    with pytest.raises(IndexError):
        make()[:, LENGTH]


def test_editing_what_was_read_changes_no_other_cell() -> None:
    model, tokens = native.build(), native.tokens()
    cells = [[Edit("blocks.0.hook_resid_pre", (slice(None), 6), value)] for value in (1.0, 2.0)]

    def careless(logits: Tensor) -> Tensor:
        last, early = logits[:, -1], logits[:, 2]
        last -= last.amax()
        early *= 0
        return last.sum() + logits[:, 2].sum() + logits[:, -1].sum()

    careful = [by_hand(model, tokens, cell) for cell in cells]
    expected = [
        (x[:, -1] - x[:, -1].amax()).sum() + x[:, 2].sum() + x[:, -1].sum() for x in careful
    ]
    got = PatchEngine(model, tokens).metrics(cells, careless)
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-4, atol=1e-3)


def test_what_is_written_into_them_is_read_back(lazy_and_whole: Any) -> None:
    make, whole = lazy_and_whole
    logits = make()
    logits[:, 4, 3] = 50.0
    assert (logits[:, 4, 3] == 50.0).all()
    torch.testing.assert_close(logits[:, 4, 4], whole[:, 4, 4], rtol=1e-4, atol=1e-4)


# --- the sweeps of the field ----------------------------------------------------------------------

RECORDED = [(model, name) for model, sweeps in REFERENCE["sweeps"].items() for name in sweeps]


@pytest.mark.parametrize(("kind", "name"), RECORDED)
def test_sweeps_are_those_of_the_classic_class(kind: str, name: str) -> None:
    model = native.build(kind)
    corrupted, clean = torch.tensor(REFERENCE["corrupted"]), torch.tensor(REFERENCE["clean"])
    _, cache = model.run_with_cache(clean)
    expected = torch.tensor(REFERENCE["sweeps"][kind][name])
    got = getattr(patching, f"get_act_patch_{name}")(
        model, corrupted, cache,
        lambda x: (x[:, -1, 3] - x[:, -1, 5] + 0.1 * x[:, 2, 7]).mean(),
    )  # fmt: skip
    assert expected.std() > 0.01
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


NAMED = {  # sweep -> (axes, point, index of a patch)
    "resid_pre": ("lp", "hook_resid_pre", lambda p: (slice(None), p)),
    "resid_mid": ("lp", "hook_resid_mid", lambda p: (slice(None), p)),
    "attn_out": ("lp", "hook_attn_out", lambda p: (slice(None), p)),
    "mlp_out": ("lp", "hook_mlp_out", lambda p: (slice(None), p)),
    **{
        f"attn_head_{what}_by_pos": ("lph", f"attn.hook_{point}", lambda p, h: (slice(None), p, h))
        for what, point in (("out", "z"), ("q", "q"), ("k", "k"), ("v", "v"))
    },
    **{
        f"attn_head_{what}_all_pos": ("lh", f"attn.hook_{p}", lambda h: (slice(None),) * 2 + (h,))
        for what, p in (("out", "z"), ("q", "q"), ("k", "k"), ("v", "v"))
    },
    "attn_head_pattern_all_pos": ("lh", "attn.hook_pattern", lambda h: (slice(None), h)),
    "attn_head_pattern_by_pos": ("lhp", "attn.hook_pattern", lambda h, d: (slice(None), h, d)),
    "attn_head_pattern_dest_src_pos": (
        "lhpp", "attn.hook_pattern", lambda h, d, s: (slice(None), h, d, s),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_named_sweep_patches_what_its_name_says(name: str) -> None:
    axes, point, index_of = NAMED[name]
    model, length = native.build("window_rotary_grouped"), 5
    corrupted, clean = native.tokens(2, 2 * length).split(length, 1)
    _, cache = model.run_with_cache(clean)
    n_heads = 2 if point in ("attn.hook_k", "attn.hook_v") else 4
    sizes = {"l": 2, "p": length, "h": n_heads}
    shape = [sizes[axis] for axis in axes]
    got = getattr(patching, f"get_act_patch_{name}")(model, corrupted, cache, whole_metric)
    assert list(got.shape) == shape
    expected = torch.zeros(shape)
    for layer, *rest in itertools.product(*map(range, shape)):
        full, index = f"blocks.{layer}.{point}", index_of(*rest)
        edit = Edit(full, index, cache[full][index])
        expected[(layer, *rest)] = whole_metric(by_hand(model, corrupted, [edit]))
    assert expected.std() > 1e-3
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


def whole_metric(logits: Tensor) -> float:
    """A plain float, of all the logits."""
    return float(logits.log_softmax(-1)[..., 3].mean())


def test_every_sweeps_pad_missing_heads_with_zeros() -> None:
    model = native.build("grouped_rotary")
    corrupted, clean = native.tokens(2, 10).split(5, 1)
    _, cache = model.run_with_cache(clean)
    everything = patching.get_act_patch_attn_head_all_pos_every(model, corrupted, cache, metric_5)
    assert everything.shape == (5, 2, 4)
    keys = patching.get_act_patch_attn_head_k_all_pos(model, corrupted, cache, metric_5)
    assert torch.equal(everything[2, :, :2], keys)
    assert not everything[2:4, :, 2:].any()


def metric_5(logits: Tensor) -> Tensor:
    return logits[:, -1, 3].mean()


def test_a_setter_of_ones_own_and_a_metric_of_many_numbers() -> None:
    model = native.build("alibi")
    corrupted, clean = native.tokens(2, 10).split(5, 1)
    _, cache = model.run_with_cache(clean)

    def half_way(activation: Tensor, index: Sequence[int], clean: Tensor) -> Tensor:
        layer, pos = index
        new = activation.clone()  # and not in place
        new[:, pos:] = (activation[:, pos:] + clean[:, pos:]) / 2
        return new

    got, rows = patching.generic_activation_patch(
        model, corrupted, cache, lambda logits: logits[:, -1], half_way, "attn_out",
        index_df=[(1, 3), (0, 2)], return_index_df=True,
    )  # fmt: skip
    assert rows == [(1, 3), (0, 2)]
    for number, (layer, pos) in enumerate(rows):
        full = f"blocks.{layer}.hook_attn_out"
        index = (slice(None), slice(pos, None))
        edit = Edit(full, index, lambda x, f=full, i=index: (x + cache[f][i]) / 2)
        expected = by_hand(model, corrupted, [edit])[:, -1]
        torch.testing.assert_close(got[number], expected, rtol=1e-4, atol=1e-5)


def test_results_as_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas")
    model = native.build()
    corrupted, clean = native.tokens(2, 10).split(5, 1)
    _, cache = model.run_with_cache(clean)
    results, df = patching.get_act_patch_resid_pre(
        model, corrupted, cache, metric_5, return_index_df=True
    )
    assert list(df.columns) == ["layer", "pos"]
    assert len(df) == results.numel()
    long = patching.results_to_df(results, ("layer", "pos"))
    assert list(long.columns) == ["layer", "pos", "metric"]
    row = long.iloc[7]
    assert row["metric"] == pytest.approx(float(results[int(row["layer"]), int(row["pos"])]))
    with pytest.raises(ValueError, match="does not name the axes"):
        patching.results_to_df(results, ("layer",))
    chosen = df.iloc[[7, 2]]
    again, same = patching.generic_activation_patch(
        model, corrupted, cache, metric_5, patching.layer_pos_patch_setter, "resid_pre",
        index_df=chosen, return_index_df=True,
    )  # fmt: skip
    assert isinstance(same, pandas.DataFrame)
    torch.testing.assert_close(again, results.flatten()[[7, 2]])


# --- refusals -------------------------------------------------------------------------------------


def test_bad_edits_are_refused_before_anything_is_run() -> None:
    model, tokens = native.build("experts"), native.tokens()
    engine = PatchEngine(model, tokens)
    good = Edit("blocks.0.hook_resid_pre", (slice(None), 4), 1.5)
    counter = Counter(model)
    every = slice(None)
    for bad, error, words in (
        (good._replace(name="blocks.0.hook_resid_per"), KeyError, "hook_resid_pre"),
        (good._replace(index=(every, LENGTH)), IndexError, "position 13"),
        (good._replace(index=(every, 1.5)), ValueError, "positions of an edit"),
        (good._replace(index=(every, slice(None, None, -1))), (ValueError, IndexError), "backw"),
        (Edit("blocks.0.mlp.experts.1.hook_post", (), 0.0), ValueError, "no position axis"),
    ):
        with pytest.raises(error, match=words):
            engine.run([[good], [bad]])
    with pytest.raises(ValueError, match="batch_size"):
        engine.run([[good]], batch_size=0)
    with pytest.raises(ValueError, match="cannot be observed"):
        engine.run([[good]], observe=["blocks.0.hook_mlp_out"])
    assert counter.positions == [0, 0]


def test_bad_sweeps_are_refused_before_anything_is_run() -> None:
    model = native.build()
    corrupted, clean = native.tokens(2, 10).split(5, 1)
    _, cache = model.run_with_cache(clean, names_filter="*hook_z")
    counter = Counter(model)

    def patch(**how: Any) -> None:
        arguments = {
            "patch_setter": patching.layer_pos_patch_setter,
            "activation_name": "z",
            "index_axis_names": ("layer", "pos"),
        }
        patching.generic_activation_patch(model, corrupted, cache, metric_5, **{**arguments, **how})

    with pytest.raises(KeyError, match="resid_pre"):
        patch(activation_name="resid_pre")
    with pytest.raises(ValueError, match="one of them"):
        patch(index_axis_names=None)
    with pytest.raises(ValueError, match="'poss' is no axis.*'pos'"):
        patch(index_axis_names=("layer", "poss"))
    with pytest.raises(ValueError, match="first axis"):
        patch(index_axis_names=("pos", "layer"))
    assert counter.positions == [0, 0]
    _, flat = model.run_with_cache(clean[:1], remove_batch_dim=True)
    with pytest.raises(ValueError, match="lost its batch axis"):
        patching.get_act_patch_attn_head_out_all_pos(model, corrupted, flat, metric_5)
    with pytest.raises(ValueError, match="the patch of"):
        patch(patch_setter=lambda corrupted, index, clean: corrupted[:, :2])
    with pytest.raises(TypeError, match="metric must return"):
        patching.get_act_patch_attn_head_out_all_pos(model, corrupted, cache, lambda x: "high")


def test_texts_of_other_lengths_or_numbers_are_said() -> None:
    model = native.build()
    corrupted, clean = native.tokens(2, 10).split(5, 1)
    sweep = patching.get_act_patch_resid_pre
    _, longer = model.run_with_cache(native.tokens(2, 7))
    with pytest.warns(UserWarning, match="7 positions and the corrupted one 5.*from the left"):
        got = sweep(model, corrupted, longer, metric_5)
    _, cut = model.run_with_cache(native.tokens(2, 7), pos_slice=(0, 5))
    torch.testing.assert_close(got, sweep(model, corrupted, cut, metric_5))
    _, shorter = model.run_with_cache(clean[:, :4])
    _, fewer = model.run_with_cache(native.tokens(3, 5))
    for cache, size in ((shorter, r"\[2, 4, 14\]"), (fewer, r"\[3, 5, 14\]")):
        what = rf"{size}, the corrupted one \[2, 5, 14\].*as many tokens and rows"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match=what):
                sweep(model, corrupted, cache, metric_5)
    _, one = model.run_with_cache(clean[:1])  # serves all rows
    assert sweep(model, corrupted, one, metric_5).shape == (model.cfg.n_layers, 5)


def test_text_is_tokenised_as_forward_does() -> None:
    model = HookedTransformer.from_pretrained("tiny-lens", device="cpu")
    clean, corrupted = "Mary and John went", "Mary and Ann went"
    _, cache = model.run_with_cache(clean)
    tokens = model.to_tokens(corrupted)
    metric = lambda logits: logits[0, -1, 7]  # noqa: E731
    by_tokens = patching.get_act_patch_resid_pre(model, tokens, cache, metric)
    assert by_tokens.shape == (model.cfg.n_layers, tokens.shape[1])
    for text in (corrupted, [corrupted]):
        by_text = patching.get_act_patch_resid_pre(model, text, cache, metric)
        assert torch.equal(by_text, by_tokens)


def test_a_model_without_logits_has_nothing_to_measure() -> None:
    model = native.build("plain", unembedding=False)
    with pytest.raises(ValueError, match="no logits"):
        PatchEngine(model, native.tokens())
