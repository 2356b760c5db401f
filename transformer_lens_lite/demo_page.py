"""The demo as one self-contained HTML page: no network, no scripts from elsewhere."""

import html
import json
from collections.abc import Sequence
from string import Template
from typing import Any

from jaxtyping import Float
from torch import Tensor

from transformer_lens_lite.demo import Demo, HeadScores, LensRow, PrefixReuse

# Red, green, blue of both schemes. `mark` and `warm` are laid over the paper, the denser the larger
# a value is, and the text on them is black or white, whichever is read more easily.
COLOURS = {
    "light": {"paper": (252, 252, 250), "mark": (16, 92, 168), "warm": (196, 100, 10)},
    "dark": {"paper": (20, 25, 31), "mark": (104, 176, 255), "warm": (255, 176, 84)},
}

PAGE = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1c2530; --soft: #5d6a78; --line: #d9dee3; $light }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --soft: #9aa7b4; --line: #313a44; $dark } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: rgb(var(--paper));
  max-width: 60rem; margin: 2.5rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .4rem; }
p, caption { color: var(--soft); margin: .2rem 0 .8rem; text-align: left; }
code, .token { font-family: ui-monospace, monospace; font-size: .88em; }
.prompt { padding: .7rem .9rem; border: 1px solid var(--line); border-radius: .5rem; }
.new { background: rgba(var(--warm), .22); border-radius: .25rem; }
table { border-collapse: collapse; font-size: .9rem; }
th { font-weight: 600; text-align: left; } td, th { padding: .25rem .6rem; border-bottom: 1px solid
var(--line); } td.cell { text-align: center; min-width: 3.2rem; }
.light-black { color: #000; } .light-white { color: #fff; }
@media (prefers-color-scheme: dark) {
  .dark-black { color: #000; } .dark-white { color: #fff; } }
.scroll { overflow-x: auto; }
.grid { display: grid; gap: 1px; width: max-content; }
.grid div { width: .95rem; height: .95rem; } .grid .label { width: auto; text-align: right;
  padding-right: .5rem; font: .72rem/.95rem ui-monospace, monospace; white-space: pre; }
.grid .below { height: auto; padding: .5rem 0 0; writing-mode: vertical-rl; text-align: left; }
select { font: inherit; padding: .15rem .4rem; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: .35rem .8rem;
max-width: 36rem; } .bar { background: rgba(var(--mark), .75); border-radius: .2rem; height: 1.1rem;
align-self: center; } </style>
</head>
<body>
<h1>$title</h1>
<p>$about</p>
<div class="prompt token">$continuation</div>
$sections
<p>Written by <code>python -m transformer_lens_lite</code>. Every number was computed for this
page.</p> <script>
const data = $data;
function add(box, name, text) {
  const label = document.createElement("div");
  label.className = name; label.textContent = text; box.append(label);
}
function draw(box, tokens, pattern) {
  box.replaceChildren();
  box.style.gridTemplateColumns = `max-content repeat($${tokens.length}, .95rem)`;
  pattern.forEach((row, i) => {
    add(box, "label", tokens[i]);
    row.forEach((weight, j) => {
      const cell = document.createElement("div");
      const ahead = j > i && !weight;
      cell.style.background = ahead ? "transparent" : `rgba(var(--mark), $${0.06 + 0.94 * weight /
      100})`; cell.title = `$${tokens[i]} → $${tokens[j]}: $${weight} %`; box.append(cell);
    });
  });
  add(box, "label", "");
  tokens.forEach((token) => add(box, "label below", token));
}
for (const box of document.querySelectorAll("[data-pattern]")) {
  const shown = data[box.dataset.pattern];
  const choice = document.getElementById("choose-" + box.dataset.pattern);
  const redraw = () => draw(box, shown.tokens, shown.patterns[choice ? choice.value :
  Object.keys(shown.patterns)[0]]); if (choice) choice.addEventListener("change", redraw);
  redraw();
}
</script>
</body>
</html>
"""
)


def html_page(demo: Demo) -> str:
    """The whole page."""
    cfg = demo.model.cfg
    sections = [lens_section(demo.lens), prompt_section(demo)]
    data: dict[str, Any] = {"prompt": {"tokens": demo.tokens, "patterns": all_patterns(demo)}}
    if demo.heads is not None:
        sections.append(heads_section(demo.heads))
        label = demo.heads.strongest(1)[0][0]
        data["repeated"] = {
            "tokens": demo.heads.tokens,
            "patterns": {label: percent(demo.heads.pattern)},
        }
    if demo.reuse is not None:
        sections.append(reuse_section(demo.reuse))
    new = (demo.continuation or "").removeprefix(demo.prompt)
    return PAGE.substitute(
        title=html.escape(f"Inside {cfg.model_name}"),
        about=f"{cfg.n_layers} layers, {cfg.n_heads} heads, d_model {cfg.d_model}, "
        f"{demo.model.n_params_total:,} parameters; {len(demo.cache)} named activations.",
        continuation=f'{html.escape(demo.prompt)}<span class="new">{html.escape(new)}</span>',
        sections="\n".join(sections),
        **{scheme: declared(colours) for scheme, colours in COLOURS.items()},
        data=json.dumps(data).replace("</", "<\\\\/"),
    )


def percent(pattern: Float[Tensor, "pos pos"]) -> list[list[int]]:
    """A pattern in whole percents, small enough to put into a page."""
    return (pattern.float() * 100).round().int().tolist()


def all_patterns(demo: Demo) -> dict[str, list[list[int]]]:
    """Every head's pattern on the prompt, by label."""
    cfg = demo.model.cfg
    return {
        f"L{layer}H{head}": percent(demo.cache["pattern", layer][0, head])
        for layer in range(cfg.n_layers)
        for head in range(cfg.n_heads)
    }


def shaded(value: float, text: str, colour: str = "mark") -> str:
    """A table cell whose background says how large a value between 0 and 1 is."""
    share = round(0.75 * value, 2)
    names = " ".join(f"{scheme}-{text_colour(scheme, colour, share)}" for scheme in COLOURS)
    background = f"background: rgba(var(--{colour}), {share:.2f})"
    return f'<td class="cell {names}" style="{background}">{text}</td>'


def declared(colours: dict[str, tuple[int, int, int]]) -> str:
    """Colours as variables of CSS."""
    return " ".join(f"--{name}: {r}, {g}, {b};" for name, (r, g, b) in colours.items())


def text_colour(scheme: str, colour: str, share: float) -> str:
    """What can be read on the paper with that share of a colour over it: black or white."""
    paper, over = COLOURS[scheme]["paper"], COLOURS[scheme][colour]
    ground = [share * o + (1 - share) * p for o, p in zip(over, paper, strict=True)]
    above_black, below_white = luminance(ground) + 0.05, 1.05
    return "black" if above_black / 0.05 >= below_white / above_black else "white"


def luminance(colour: Sequence[float]) -> float:
    """Relative luminance, 0 to 1, of red, green and blue of 0 to 255 (WCAG 2.2)."""
    parts = [part / 255 for part in colour]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def lens_section(rows: list[LensRow]) -> str:
    """The logit lens."""
    body = []
    for row in rows:
        cells = [
            shaded(p, f"{html.escape(text)} <small>{p:.0%}</small>") for text, p in row.guesses
        ]
        last = shaded(row.final_probability, f"{row.final_probability:.1%}", "warm")
        body.append(f"<tr><th scope=row>{row.depth}</th>{''.join(cells)}{last}</tr>")
    final = html.escape(rows[-1].guesses[0][0])
    return (
        "<h2>Logit lens</h2><p>What the residual stream would predict after each layer, at the "
        "last "
        f"position. The last column is the probability of the final answer, “{final}”.</p>"
        "<div class=scroll><table><tr><th>after<th colspan=3>likeliest tokens"
        f"<th>{final}</tr>{''.join(body)}</table></div>"
    )


def prompt_section(demo: Demo) -> str:
    """Any head's pattern on the prompt."""
    shown = demo.heads.strongest(1)[0][0] if demo.heads is not None else None
    options = "".join(
        f"<option{' selected' if label == shown else ''}>{label}</option>"
        for label in demo.model.all_head_labels()
    )
    return (
        "<h2>Attention on the prompt</h2><p><label>Head <select id=choose-prompt>"
        f"{options}</select></label> Rows attend to columns; hover for the numbers.</p>"
        '<div class=scroll><div class=grid data-pattern="prompt" role="img" '
        'aria-label="Attention pattern of the chosen head on the prompt"></div></div>'
    )


def heads_section(heads: HeadScores) -> str:
    """Induction scores of all heads, and the strongest head's pattern."""
    header = "".join(f"<th>H{head}" for head in range(heads.induction.shape[1]))
    body = "".join(
        f"<tr><th scope=row>layer {layer}</th>"
        + "".join(shaded(score, f"{score:.2f}") for score in row)
        + "</tr>"
        for layer, row in enumerate(heads.induction.tolist())
    )
    label, score, _ = heads.strongest(1)[0]
    return (
        "<h2>Induction heads</h2><p>On a random sequence said twice, how much each head "
        "attends to the "
        "token that followed last time.</p>"
        f"<div class=scroll><table><tr><th>{header}</tr>{body}</table></div>"
        f"<p>The strongest is {label}, at {score:.2f}. Its stripe in the second half is "
        "induction:</p>"
        '<div class=scroll><div class=grid data-pattern="repeated" role="img" '
        f'aria-label="Attention pattern of {label} on the repeated sequence: a diagonal '
        'stripe"></div></div>'
    )


def reuse_section(reuse: PrefixReuse) -> str:
    """How much a frozen prefix saves."""
    slowest = max(reuse.seconds_full, reuse.seconds_frozen)
    bars = "".join(
        f'<span>{name}</span><span class="bar" style="width: '
        f'{100 * seconds / slowest:.1f}%"></span>'
        f"<span>{seconds * 1e3:.1f} ms</span>"
        for name, seconds in (
            ("from scratch", reuse.seconds_full),
            ("frozen prefix", reuse.seconds_frozen),
        )
    )
    return (
        f"<h2>One prefix, {len(reuse.suffixes)} continuations</h2><p>The keys and values of "
        f"{reuse.prefix_length} tokens, computed once, frozen and shared: {reuse.speed_up:.1f} "
        "times "
        f"faster, with logits equal to {reuse.difference:.0e}.</p><div class=bars>{bars}</div>"
    )
