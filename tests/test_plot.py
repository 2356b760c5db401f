"""Figures hold the numbers they are given, at the places of their labels."""

import re
from pathlib import Path

import pytest
import torch

from tests import native
from transformer_lens_lite import HookedTransformer, plot

plotly = pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("tiny-lens")


def test_attention_has_a_choice_for_every_head(model: HookedTransformer) -> None:
    text = "Mary saw John and Mary saw the store"
    _, cache = model.run_with_cache(text)
    pattern = cache["pattern", 0]
    tokens = model.to_str_tokens(text)
    figure = plot.attention(pattern, tokens)
    n_heads = model.cfg.n_heads
    assert len(figure.data) == n_heads
    for head, trace in enumerate(figure.data):
        torch.testing.assert_close(torch.tensor(trace.z), pattern[0, head], rtol=0, atol=1e-6)
    assert [trace.visible for trace in figure.data] == [True] + [False] * (n_heads - 1)
    (menu,) = figure.layout.updatemenus
    assert list(menu.buttons[1].args[1]) == [head == 1 for head in range(n_heads)]
    # equal tokens keep their own places
    assert list(figure.layout.xaxis.tickvals) == list(range(len(tokens)))
    assert figure.layout.xaxis.ticktext[-1] == plot.visible(tokens[-1])
    assert figure.layout.yaxis.autorange == "reversed"


def test_one_pattern_needs_no_menu() -> None:
    figure = plot.attention(torch.eye(3), ["a", "<b>", "a"], title="L0H1")
    assert not figure.layout.updatemenus
    assert list(figure.layout.xaxis.ticktext) == ["a", "&lt;b&gt;", "a"]
    with pytest.raises(ValueError, match=r"\[head, 2, 2\]"):
        plot.attention(torch.eye(3), ["a", "b"])
    with pytest.raises(ValueError, match="2 heads and 1 names"):
        plot.attention(torch.zeros(2, 3, 3), ["a"] * 3, heads=["x"])


@pytest.mark.parametrize("batched", [True, False])
def test_the_lens_shows_the_likeliest_token_everywhere(
    model: HookedTransformer, batched: bool
) -> None:
    text = "When Mary and John went to the store,"
    _, cache = model.run_with_cache(text, remove_batch_dim=not batched)
    figure = plot.logit_lens(cache, top=3)
    (trace,) = figure.data
    lens = cache.logit_lens()
    best = (lens[:, 0] if batched else lens).softmax(-1).max(-1)
    torch.testing.assert_close(torch.tensor(trace.z), best.values.detach(), rtol=1e-5, atol=1e-6)
    assert len(trace.z) == model.cfg.n_layers + 1
    expected = model.to_string(best.indices[-1, -1:]).replace(" ", "·")
    assert trace.text[-1][-1] == plot.escaped(expected)
    assert trace.customdata[-1][-1].startswith(f"{plot.escaped(expected)} ")
    assert trace.customdata[-1][-1].count("<br>") == 2
    assert figure.layout.yaxis.ticktext[-1] == "final_post"
    assert len(figure.layout.xaxis.ticktext) == len(model.to_str_tokens(text))


def test_the_lens_needs_no_tokenizer() -> None:
    model = native.build()
    tokens = native.tokens()
    logits, cache = model.run_with_cache(tokens)
    (trace,) = plot.logit_lens(cache, row=1).data
    assert list(trace.text[-1]) == [str(int(i)) for i in logits[1].argmax(-1)]


def test_sweeps_share_a_scale_around_the_baseline() -> None:
    results = torch.randn(3, 2, 5)
    figure = plot.patching(results, baseline=0.5, names=["q", "k", "v"], columns=list("abcde"))
    assert len(figure.data) == 3
    reach = float((results - 0.5).abs().max())
    for place, trace in enumerate(figure.data):
        torch.testing.assert_close(torch.tensor(trace.z), results[place])
        assert (trace.zmin, trace.zmax) == pytest.approx((0.5 - reach, 0.5 + reach))
    assert [note.text for note in figure.layout.annotations] == ["q", "k", "v"]
    for axis in (figure.layout.xaxis, figure.layout.xaxis3):
        assert list(axis.ticktext) == list("abcde")
    (trace,) = plot.patching(torch.full((2, 5), torch.nan)).data
    assert trace.hovertemplate.startswith("layer ")
    named = plot.patching(torch.ones(2, 5), rows=["attention", "MLP"])  # these are no layers
    assert named.layout.yaxis.title.text is None
    assert "layer" not in named.data[0].hovertemplate
    assert trace.zmax == 1.0
    with pytest.raises(ValueError, match="columns has 1 labels for 5"):
        plot.patching(results, columns=["a"])
    with pytest.raises(ValueError, match="2 or 3 axes"):
        plot.patching(results[0, 0])


def test_bars_say_the_sign_by_colour() -> None:
    values = torch.tensor([0.5, -3.0, 0.0, 2.0])
    (bars,) = plot.attribution(values, list("abcd"), top=2).data
    assert list(bars.x) == [-3.0, 2.0]
    assert list(bars.customdata) == ["b", "d"]
    assert list(bars.marker.color) == [f"rgb({plot.VERMILION})", f"rgb({plot.BLUE})"]
    (bars,) = plot.attribution(values, list("abcd")).data
    assert list(bars.customdata) == list("abcd")
    with pytest.raises(ValueError, match="3 labels"):
        plot.attribution(values, list("abc"))


def test_a_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    figure = plot.patching(torch.randn(2, 5))
    plot.save_html(figure, tmp_path / "sweep.html")
    page = (tmp_path / "sweep.html").read_text(encoding="utf-8")
    assert len(page) > 10**6  # plotly itself is inside
    assert not re.search(r"<script[^>]*\ssrc=|<link[^>]*\shref=", page)
    assert "light dark" in page


def test_only_tokens_show_their_spaces_as_dots() -> None:
    columns = ["head 0", " John", " ", "a\n", "<b> c "]
    shown = ["head 0", "·John", "·", "a⏎", "&lt;b&gt; c·"]
    figure = plot.patching(
        torch.ones(1, 2, 5), columns=columns, rows=["as it is", " to"], names=["erased at rest"]
    )
    assert list(figure.layout.xaxis.ticktext) == shown
    assert list(figure.layout.yaxis.ticktext) == ["as it is", "·to"]
    assert figure.layout.annotations[0].text == "erased at rest"
    figure = plot.attribution(torch.ones(5), columns)
    assert list(figure.layout.yaxis.ticktext) == list(figure.data[0].customdata) == shown
    figure = plot.attention(torch.eye(2), [" a b", "c "])
    assert list(figure.layout.xaxis.ticktext) == ["·a·b", "c·"]


def test_figures_have_no_ground_of_their_own() -> None:
    for figure in (
        plot.attention(torch.eye(3), list("abc")),
        plot.patching(torch.randn(2, 5)),
        plot.attribution(torch.ones(2), list("ab")),
    ):
        assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == plot.CLEAR
        assert figure.layout.font.color == plot.INK


def luminance(colour: str) -> float:
    """WCAG's relative luminance of "#rrggbb" or "rgb(r, g, b)"."""
    if colour.startswith("#"):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    else:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_ink_is_legible_on_light_and_dark() -> None:
    ink = luminance(plot.INK)  # WCAG 2.2 asks 3 of large text and graphics, 4.5 of small text
    assert 1.05 / (ink + 0.05) > 4
    assert (ink + 0.05) / (luminance("#1e1e1e") + 0.05) > 4


def test_words_in_cells_are_legible_at_every_probability(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache("When Mary and John went to the store,")
    (trace,) = plot.logit_lens(cache).data
    ends = [luminance(colour) for _, colour in trace.colorscale]  # luminance falls between them
    assert (min(ends) + 0.05) / (luminance(trace.textfont.color) + 0.05) > 4.5
    assert max(ends) - min(ends) > 0.5  # and likelier is darker, visibly


def test_html_of_caches_and_models() -> None:
    model = native.build("grouped_rotary")
    _, cache = model.run_with_cache(native.tokens(), names_filter="*hook_z")
    shown = cache._repr_html_()
    assert "2 activations" in shown
    assert "<code>blocks.1.attn.hook_z</code><td>[2, 13, 4, 6]<td>float32" in shown
    shown = model._repr_html_()
    assert "<th>key-value heads<td>2" in shown
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in shown
    assert shown.count("<li>") == len(model.hook_dict)


def test_without_plotly_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.graph_objects", None)
    with pytest.raises(ImportError, match=r"pip install 'transformer_lens_lite\[plot\]'"):
        plot.attribution(torch.ones(2), list("ab"))
