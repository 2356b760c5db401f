"""The Python blocks of README and docs run: README's each by itself, those of a page in order."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


FAILING = re.compile(
    r"^```python\n([^`]*?)^```\n\n```text\n(\w*(?:Error|Activation): .*)\n```$", re.M
)
SAYING = re.compile(r"^```python\n([^`]*?)^```\n\n```text\n([^`]*?)^```$", re.M)
README = blocks(ROOT / "README.md")
WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they write is not written here, what they register is forgotten."""
    import weights_conversion

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights_conversion, "_REGISTRY", dict(weights_conversion._REGISTRY))


@pytest.mark.parametrize("number", range(len(README)))
def test_a_block_of_the_readme_runs(number: int) -> None:
    exec(compile(README[number], "block", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_in_order(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A block of text behind one of Python is what it prints, or the error it raises."""
    namespace = {"__name__": "__main__"}
    errors = dict(FAILING.findall(page.read_text()))
    printed = dict(SAYING.findall(page.read_text()))
    for code in blocks(page):
        program = compile(code, page.name, "exec")
        if code not in errors:
            capsys.readouterr()
            exec(program, namespace)
            if code in printed:
                assert capsys.readouterr().out == printed[code]
            continue
        with pytest.raises(Exception) as raised:  # noqa: PT011 - the page says which
            exec(program, namespace)
        message = str(raised.value.args[0])
        assert f"{raised.type.__name__}: {message}" == errors[code]


def test_pages_have_errors_and_output() -> None:
    assert len(SAYING.findall((ROOT / "docs" / "getting_started.md").read_text())) >= 4
    assert len(FAILING.findall((ROOT / "docs" / "errors.md").read_text())) >= 10


def test_there_are_blocks_to_run() -> None:
    assert len(README) >= 4
    assert "adding_an_architecture" in [page.stem for page in WITH_CODE]


def test_the_page_of_hook_points_is_what_the_models_have() -> None:
    """After a new hook point: make hook-points. (What it says of Hugging Face's modules is checked
    by test_families and test_verification.)"""
    written = runpy.run_path(str(ROOT / "scripts" / "write_hook_points.py"))
    assert (ROOT / "docs" / "hook_points.md").read_text() == written["page"]()
