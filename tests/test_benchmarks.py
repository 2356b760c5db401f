"""The benchmark command: its tables and its page, on measurements that take no time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.curves import Curve
from benchmarks.pairs import compare


def one_row() -> Iterator[tuple[str, str, str, str]]:
    yield "forward 1×16", "0.90 × HF", "≤ 1.00", "a note"


@pytest.fixture(autouse=True)
def _instant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CASES", {"forward": one_row})
    curve = Curve("Length", ("tokens", "forward"), iter([("8", "0.9"), ("32", "1.0")]))
    monkeypatch.setattr(command, "CURVES", {"length": lambda: curve})
    monkeypatch.setattr(command, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(command, "classic_figures", lambda: {"forward 1×16": 2.5})


def test_a_table_has_what_was_measured_beside_what_is_promised(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command.main(["forward", "length"])
    out = capsys.readouterr().out
    assert "| forward 1×16 | 0.90 × HF | ≤ 1.00 | 2.50 × HF | a note |" in out
    assert "### Length\n\n| tokens | forward |\n|---|---|\n| 8 | 0.9 |\n| 32 | 1.0 |" in out


def test_the_page_says_where_and_when_it_was_made(tmp_path: Path) -> None:
    command.main(["--page", str(tmp_path / "page.md")])
    page = (tmp_path / "page.md").read_text()
    assert command.machine() in page
    assert "| forward 1×16 | 0.90 × HF |" in page
    assert "| 32 | 1.0 |" in page


@pytest.mark.parametrize("arguments", [["forwrad"], ["forward", "--page", "x.md"]])
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert not list(tmp_path.iterdir())


def test_a_ratio_is_of_the_two_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 3.0, 5.0] * 7)  # ours takes three, theirs two
    monkeypatch.setattr("time.process_time", lambda: next(clock))
    ratio = compare(lambda: None, lambda: None, pairs=5)
    assert (ratio.median, ratio.ours_ms, ratio.theirs_ms) == (1.5, 3000.0, 2000.0)
