"""Pictures of attention, of the logit lens, of sweeps and of attributions.

Every function returns a plotly figure (`pip install 'transformer_lens_lite[plot]'`), which a
notebook shows; `save_html` writes it as one file that loads nothing from elsewhere. Colours are
blue and vermilion of Okabe and Ito's palette, told apart by everybody, on a transparent ground for
light and dark pages. `cache_html` and `model_html` need no plotly.
"""

import html
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

BLUE, VERMILION = "0, 114, 178", "213, 94, 0"
INK = "#767e87"  # 4 : 1 on white and on a dark page; one colour cannot have more on both
CLEAR = "rgba(0, 0, 0, 0)"
SEQUENTIAL = [[0.0, f"rgba({BLUE}, 0.04)"], [1.0, f"rgba({BLUE}, 1)"]]
# Cells with text in them have a ground of their own, on light pages and on dark ones, whose deepest
# blue still lets black be read.
UNDER_TEXT = [[0.0, "rgb(240, 245, 250)"], [1.0, "rgb(70, 158, 214)"]]
ON_CELLS = "#000000"
DIVERGING = [
    [0.0, f"rgba({VERMILION}, 1)"],
    [0.5, "rgba(128, 128, 128, 0.06)"],
    [1.0, f"rgba({BLUE}, 1)"],
]
LINE_ENDS = str.maketrans({"\n": "⏎", "\t": "⇥"})
VISIBLE = {**LINE_ENDS, ord(" "): "·"}


def attention(
    patterns: Float[Tensor, "... pos key_pos"],
    tokens: Sequence[str],
    heads: Sequence[str] | None = None,
    title: str | None = None,
) -> Any:
    """Who looks at whom: rows attend to columns. Of several heads one is chosen from a menu.

    Args:
        patterns: [pos, key_pos], or [head, pos, key_pos]; a batch axis of 1 is dropped.
        tokens: one label a position, such as `model.to_str_tokens(text)`.
        heads: their names; None: "head 0" and so on.
    Raises: ValueError for labels or axes that do not fit.
    """
    values = patterns.detach().float().cpu()
    while values.ndim > 3 and values.shape[0] == 1:
        values = values[0]
    values = values[None] if values.ndim == 2 else values
    if values.ndim != 3 or values.shape[-2:] != (len(tokens), len(tokens)):
        raise ValueError(
            f"patterns must be [head, {len(tokens)}, {len(tokens)}] for {len(tokens)} tokens, got "
            f"{list(patterns.shape)}"
        )
    names = [f"head {head}" for head in range(len(values))] if heads is None else list(heads)
    if len(names) != len(values):
        raise ValueError(f"there are {len(values)} heads and {len(names)} names")
    traces = [
        heat_map(
            values[head], SEQUENTIAL, zmin=0.0, zmax=1.0, visible=head == 0, name=name,
            hovertemplate="%{y} → %{x}: %{z:.3f}<extra>" + escaped(name) + "</extra>",
        )
        for head, name in enumerate(names)
    ]  # fmt: skip
    figure = figure_of(traces, title or (names[0] if len(names) == 1 else None))
    shown_tokens = [visible(token) for token in tokens]
    label_axis(figure.update_xaxes, shown_tokens, "looked at")
    label_axis(figure.update_yaxes, shown_tokens, "looking", autorange="reversed")
    if len(names) > 1:
        buttons = [
            {"label": name, "method": "restyle", "args": ["visible", shown(head, len(names))]}
            for head, name in enumerate(names)
        ]
        figure.update_layout(updatemenus=[{"buttons": buttons, "x": 1.0, "y": 1.15}])
    return figure


def logit_lens(
    cache: Any, row: int = 0, top: int = 5, incl_mid: bool = False, title: str | None = None
) -> Any:
    """What the model would say if it ended at each layer: the likeliest token at every position,
    and by colour its probability. Hovering lists the `top` ones.

    `cache` has resid_pre of every layer, resid_post of the last, and a model with a tokenizer.
    """
    model = cache.model
    logits = cache.logit_lens(incl_mid=incl_mid)
    _, depths = cache.accumulated_resid(incl_mid=incl_mid, return_labels=True)
    tokens = cache.tokens
    if cache.has_batch_dim:
        logits = logits[:, row]
    if tokens is not None:
        tokens = tokens[row] if cache.has_batch_dim else tokens.flatten()
    probabilities = logits.detach().float().softmax(-1)
    best = probabilities.topk(min(top, probabilities.shape[-1]), -1)
    words = {int(i): visible(text_of(model, int(i))) for i in best.indices.unique()}
    hover = [
        [
            "<br>".join(
                f"{words[int(i)]} {float(p):.1%}" for i, p in zip(indices, values, strict=True)
            )
            for indices, values in zip(*both, strict=True)
        ]
        for both in zip(best.indices, best.values, strict=True)
    ]
    firsts = [[words[int(i)] for i in of_depth] for of_depth in best.indices[..., 0]]
    trace = heat_map(
        best.values[..., 0].cpu(), UNDER_TEXT, zmin=0.0, zmax=1.0, text=firsts,
        texttemplate="%{text}", textfont={"size": 11, "color": ON_CELLS}, customdata=hover,
        hovertemplate="%{y}, after %{x}<br>%{customdata}<extra></extra>",
    )  # fmt: skip
    figure = figure_of([trace], title or "Logit lens")
    labels = [str(i) for i in range(logits.shape[1])]
    if tokens is not None:
        labels = [visible(text_of(model, int(token))) for token in tokens]
    label_axis(figure.update_xaxes, labels, "after")
    label_axis(figure.update_yaxes, depths, "the stream entering")
    return figure


def patching(
    results: Float[Tensor, "..."],
    columns: Sequence[str] | None = None,
    rows: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    baseline: float = 0.0,
    title: str | None = None,
) -> Any:
    """A sweep as a heat map, blue above the baseline and vermilion below it.

    Args:
        results: [layer, column], or [sweep, layer, column] for several beside each other.
        columns: labels of positions or heads; rows: of what is no plain layer; names: of sweeps.
        baseline: the metric without any patch.
    Raises: ValueError for labels or axes that do not fit.
    """
    values = results.detach().float().cpu()
    values = values[None] if values.ndim == 2 else values
    if values.ndim != 3:
        raise ValueError(f"results must have 2 or 3 axes, got {list(results.shape)}")
    n_sweeps, n_rows, n_columns = values.shape
    columns = [str(i) for i in range(n_columns)] if columns is None else columns
    kind = "layer" if rows is None else ""
    rows = [str(i) for i in range(n_rows)] if rows is None else rows
    names = [""] * n_sweeps if names is None else names
    for what, given, n in (
        ("columns", columns, n_columns),
        ("rows", rows, n_rows),
        ("names", names, n_sweeps),
    ):
        if len(given) != n:
            raise ValueError(f"{what} has {len(given)} labels for {n}")
    _, subplots = plotly()
    figure = subplots.make_subplots(
        cols=n_sweeps, subplot_titles=[labelled(name) for name in names], shared_yaxes=True
    )
    reach = float((values - baseline).abs().nan_to_num(0.0).max()) or 1.0
    for place in range(n_sweeps):
        trace = heat_map(
            values[place], DIVERGING, zmin=baseline - reach, zmax=baseline + reach,
            showscale=place == n_sweeps - 1,
            hovertemplate=f"{kind} %{{y}}, %{{x}}: %{{z:.4g}}<extra></extra>".lstrip(),
        )  # fmt: skip
        figure.add_trace(trace, row=1, col=place + 1)
    finish(figure, title)
    label_axis(figure.update_xaxes, [labelled(column) for column in columns])
    label_axis(figure.update_yaxes, [labelled(row) for row in rows])
    figure.update_yaxes(title_text=kind or None, col=1)
    return figure


def attribution(
    values: Float[Tensor, " component"],
    labels: Sequence[str],
    top: int | None = None,
    title: str | None = None,
) -> Any:
    """Bars of what each component contributes, in the order given, or the `top` largest of either
    sign. ValueError when there are not as many labels."""
    flat = values.detach().float().cpu()
    if flat.ndim != 1 or len(flat) != len(labels):
        raise ValueError(f"{len(labels)} labels for values of shape {list(values.shape)}")
    chosen = list(range(len(flat)))
    if top is not None:
        chosen = flat.abs().topk(min(top, len(flat))).indices.tolist()
    shown_values = [float(flat[i]) for i in chosen]
    shown_labels = [labelled(labels[i]) for i in chosen]
    objects, _ = plotly()
    bars = objects.Bar(
        x=shown_values,
        y=list(range(len(shown_values))),
        orientation="h",
        marker_color=[f"rgb({BLUE if value >= 0 else VERMILION})" for value in shown_values],
        customdata=shown_labels,
        hovertemplate="%{customdata}: %{x:.4g}<extra></extra>",
    )
    figure = figure_of([bars], title)
    label_axis(figure.update_yaxes, shown_labels, autorange="reversed")
    figure.update_xaxes(zeroline=True, zerolinecolor=INK)
    return figure


def to_html(figure: Any) -> str:
    """A whole page with plotly's code in it: it needs no network."""
    page: str = figure.to_html(include_plotlyjs=True, full_html=True)
    scheme = '<meta name="color-scheme" content="light dark">'
    return page.replace("<head>", f"<head>{scheme}", 1)


def save_html(figure: Any, path: str | PathLike[str]) -> None:
    """Write `to_html` to a file."""
    Path(path).write_text(to_html(figure), encoding="utf-8")


# --- without plotly -------------------------------------------------------------------------------


def cache_html(cache: Any) -> str:
    """What a notebook shows of an `ActivationCache`: its activations, with shapes, in a fold."""
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code><td>{list(tensor.shape)}"
        f"<td>{str(tensor.dtype).removeprefix('torch.')}</tr>"
        for name, tensor in cache.cache_dict.items()
    )
    size = f"{cache.nbytes() / 2**20:.2f} MiB"
    batch = "" if cache.has_batch_dim else ", without batch axis"
    return (
        f"<details><summary><b>ActivationCache</b>: {len(cache)} activations, {size}{batch}"
        f"</summary><table><tr><th>name<th>shape<th>dtype</tr>{rows}</table></details>"
    )


def model_html(model: Any) -> str:
    """What a notebook shows of a model: its sizes, and its hook points in a fold."""
    cfg = model.cfg
    facts = {
        "layers": cfg.n_layers,
        "d_model": cfg.d_model,
        "heads": cfg.n_heads,
        "key-value heads": cfg.n_key_value_heads or cfg.n_heads,
        "d_head": cfg.d_head,
        "d_mlp": "–" if cfg.attn_only else cfg.d_mlp,
        "context": cfg.n_ctx,
        "vocabulary": cfg.d_vocab,
        "positions": cfg.positional_embedding_type,
        "normalisation": cfg.normalization_type,
        "dtype": str(cfg.dtype).removeprefix("torch."),
        "device": cfg.device,
    }
    rows = "".join(
        f"<tr><th>{key}<td>{html.escape(str(value))}</tr>" for key, value in facts.items()
    )
    points = "".join(
        f"<li><code>{html.escape(name)}</code>{' (when listened to)' if point.optional else ''}"
        for name, point in model.hook_dict.items()
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"<b>HookedTransformer</b> {html.escape(str(cfg.model_name))}, {parameters:,} parameters"
        f"<table>{rows}</table>"
        f"<details><summary>{len(model.hook_dict)} hook points</summary><ul>{points}</ul></details>"
    )


# --- parts ----------------------------------------------------------------------------------------


def plotly() -> tuple[Any, Any]:
    """plotly's graph objects and subplots. ImportError that says how to get it."""
    try:
        import plotly.graph_objects as objects
        import plotly.subplots as subplots
    except ImportError as error:
        raise ImportError("plots need plotly: pip install 'transformer_lens_lite[plot]'") from error
    return objects, subplots


def heat_map(values: Float[Tensor, "row column"], scale: list[list[Any]], **how: Any) -> Any:
    """One trace; cells at whole numbers, so that equal labels stay apart."""
    objects, _ = plotly()
    return objects.Heatmap(
        z=values.tolist(), colorscale=scale, xgap=1, ygap=1, hoverongaps=False, **how
    )


def figure_of(traces: list[Any], title: str | None) -> Any:
    """A figure in the common style."""
    objects, _ = plotly()
    return finish(objects.Figure(traces), title)


def finish(figure: Any, title: str | None) -> Any:
    """The common style: no ground of its own, ink for both light and dark."""
    figure.update_layout(
        title=None if title is None else escaped(title),
        font={"color": INK},
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
        margin={"t": 60, "r": 20},
    )
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_yaxes(showgrid=False, zeroline=False)
    return figure


def label_axis(update: Any, labels: Sequence[str], title: str | None = None, **how: Any) -> None:
    """Ticks at whole numbers, with these labels, whose markup is plotly's."""
    ticks = {"tickvals": list(range(len(labels))), "ticktext": list(labels)}
    update(tickmode="array", title_text=title, **ticks, **how)


def shown(which: int, n: int) -> list[bool]:
    """Only that one of n."""
    return [place == which for place in range(n)]


def text_of(model: Any, token: int) -> str:
    """A token's text; its number for a model without a tokenizer."""
    if model.tokenizer is None:
        return str(token)
    text: str = model.to_string(torch.tensor([token]))
    return text


def escaped(text: str) -> str:
    """plotly reads some tags in labels; this shows them."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def visible(text: str) -> str:
    """A token whose spaces and line ends can be seen."""
    return escaped(str(text).translate(VISIBLE))


def labelled(text: str) -> str:
    """A label that may be a token or words: spaces at its ends can be seen, those between words
    stay."""
    words = str(text).strip(" ")
    if not words:
        return visible(text)
    before, _, after = str(text).partition(words)
    return visible(before) + escaped(words.translate(LINE_ENDS)) + visible(after)
