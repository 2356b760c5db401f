"""The demo: what it computes is true, and what it writes stands alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import loud
import pytest
import torch
from tokenizers_for_tests import gpt2_like

from transformer_lens_lite import HookedTransformer
from transformer_lens_lite.__main__ import BOXED_PROMPT, main
from transformer_lens_lite.demo import Demo, logit_lens, report, run
from transformer_lens_lite.demo_page import html_page, shaded


@pytest.fixture(scope="module")
def demo() -> Demo:
    return run(HookedTransformer.from_pretrained_no_processing("tiny-lens"), BOXED_PROMPT)


def test_the_lens_ends_where_the_model_does(demo: Demo) -> None:
    logits = demo.model(demo.prompt)[0, -1]
    guess, probability = demo.lens[-1].guesses[0]
    assert guess == demo.model.to_single_str_token(int(logits.argmax()))
    assert probability == pytest.approx(logits.softmax(-1).max().item(), abs=1e-5)
    assert demo.lens[-1].final_rank == 1
    assert len(demo.lens) == demo.model.cfg.n_layers + 1


def test_the_lens_scales_and_caps_as_the_model_does() -> None:
    model = HookedTransformer.from_pretrained_no_processing("tiny-lens")
    model.cfg.output_logits_soft_cap, model.cfg.logit_scale = 2.0, 0.5
    _, cache = model.run_with_cache(BOXED_PROMPT)
    expected = model(BOXED_PROMPT)[0, -1].softmax(-1).max().item()
    assert logit_lens(model, cache)[-1].guesses[0][1] == pytest.approx(expected, abs=1e-5)


def test_the_model_in_the_box_answers_mary(demo: Demo) -> None:
    assert demo.lens[-1].guesses[0][0].strip() == "Mary"


def test_induction_scores_are_what_the_patterns_say(demo: Demo) -> None:
    assert demo.heads is not None
    half = (demo.heads.pattern.shape[0] - 1) // 2
    label, score, _ = demo.heads.strongest(1)[0]
    by_hand = [demo.heads.pattern[q, q - half + 1].item() for q in range(half + 1, 2 * half + 1)]
    assert score > 0.5
    assert sum(by_hand) / half == pytest.approx(score, abs=0.2)  # one row of the batch's mean
    assert re.fullmatch(r"L\d+H\d+", label)
    assert demo.heads.tokens[1 : half + 1] == demo.heads.tokens[half + 1 :]


def test_models_that_look_both_ways_are_shown_without_a_continuation() -> None:
    model = loud.build("standard", gpt2_like(), attention_dir="bidirectional", n_ctx=64)
    demo = run(model, "Hello there")
    assert demo.reuse is None
    assert demo.continuation is None
    assert demo.heads is not None
    assert demo.heads.pattern.triu(1).max() > 0  # of what comes later, too
    text = report(demo)
    assert "looks both ways" in text
    assert "Logit lens" in text
    assert "frozen" not in text
    assert "Hello there" in html_page(demo)


def test_the_frozen_prefix_changes_nothing(demo: Demo) -> None:
    assert demo.reuse is not None
    assert demo.reuse.difference < 1e-3
    assert len(demo.reuse.predictions) == len(demo.reuse.suffixes) == 16


def test_the_report_says_it_all(demo: Demo) -> None:
    text = report(demo)
    for part in (
        "Logit lens",
        "attends to what followed last time",
        "times faster",
        "hook_pattern",
    ):
        assert part in text


def test_the_page_stands_alone(demo: Demo) -> None:
    page = html_page(demo)
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", page)
    data = json.loads(re.search(r"const data = (.*);\n", page)[1].replace("<\\/", "</"))
    n_heads = demo.model.cfg.n_layers * demo.model.cfg.n_heads
    assert len(data["prompt"]["patterns"]) == n_heads
    pattern = torch.tensor(data["prompt"]["patterns"]["L0H0"])
    assert torch.equal(pattern, (demo.cache["pattern", 0][0, 0] * 100).round().int())


def luminance(colour: list[float]) -> float:
    """WCAG's relative luminance."""
    parts = [part / 255 for part in colour]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_text_in_cells_is_legible(demo: Demo, scheme: str) -> None:
    """At least 4.5 : 1 (WCAG 2.2, AA), on every ground a cell can have, in both schemes."""
    page = html_page(demo)
    declared = {
        name: [int(part) for part in values.split(",")]
        for name, values in re.findall(
            r"--(\w+): (\d+, \d+, \d+)",
            re.findall(r":root \{([^}]*)\}", page)[scheme == "dark"],
        )
    }
    every = "".join(
        shaded(value / 200, "", colour) for value in range(201) for colour in ("mark", "warm")
    )
    cells = re.findall(r'<td class="cell ([^"]*)" style="background: rgba\((.*?)\)"', page + every)
    assert len(cells) > 402 + 20
    for names, background in cells:
        colour, share = re.fullmatch(r"var\(--(\w+)\), ([\d.]+)", background).groups()
        ground = [
            float(share) * over + (1 - float(share)) * paper
            for over, paper in zip(declared[colour], declared["paper"], strict=True)
        ]
        text = luminance([255.0 * (f"{scheme}-white" in names.split())] * 3)
        darker, lighter = sorted((text + 0.05, luminance(ground) + 0.05))
        assert lighter / darker >= 4.5, (names, background)
    for name in ("light-black", "light-white", "dark-black", "dark-white"):
        assert f".{name} {{ color: #{'000' if 'black' in name else 'fff'}; }}" in page


def test_a_prompt_with_markup_stays_text() -> None:
    model = HookedTransformer.from_pretrained_no_processing("tiny-lens")
    page = html_page(run(model, "</script><b>Mary</b> likes"))
    assert "<b>Mary" not in page
    assert page.count("</script>") == 1


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["tiny-lens", "Mary likes", "--page", str(page)]) == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert str(page) in capsys.readouterr().out


def test_an_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no/such-model", "--no-page"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
def test_the_module_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "transformer_lens_lite"],
        cwd=tmp_path,
        env={"PATH": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo.html").exists()
