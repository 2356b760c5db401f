"""python -m benchmarks [CASE …] [--page FILE]: print the table, or write the page of the docs."""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.cases import CASES
from benchmarks.curves import CURVES
from benchmarks.pairs import keep_freed_memory

ROOT = Path(__file__).parent.parent


def classic_figures() -> dict[str, float]:
    """TransformerLens 3.9's ratios, from the environment TL_PYTHON names; empty without one."""
    python = os.environ.get("TL_PYTHON")
    if not python:
        return {}
    done = subprocess.run(
        [python, "-m", "benchmarks.classic"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def rows(names: list[str], classic: dict[str, float]) -> Iterator[str]:
    """The table of the named cases, line by line, each as soon as it is measured."""
    yield "| what | measured | reach | TransformerLens 3.9 | |"
    yield "|---|---|---|---|---|"
    for name in names:
        for what, measured, reach, note in CASES[name]():
            theirs = f"{classic[what]:.2f} × HF" if what in classic else "–"
            yield f"| {what} | {measured} | {reach} | {theirs} | {note} |"


def curve(name: str) -> Iterator[str]:
    """One table of how a cost grows."""
    title, columns, cells = CURVES[name]()
    yield from (f"### {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")
    for each in cells:
        yield f"| {' | '.join(each)} |"
    yield ""


def machine() -> str:
    """What was measured, and on what."""
    packages = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    return (
        f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; "
        f"{platform.system()}, Python {platform.python_version()}, {', '.join(packages)}"
    )


def processor() -> str:
    """The name the system gives it."""
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def page(classic: dict[str, float]) -> Iterator[str]:
    """`docs/benchmarks.md`."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    made = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"
    yield from ("# Benchmarks", "")
    yield (
        "Written by `make bench-page`, never by hand: run it to have the page for your machine. "
        f"This copy: {made}, {f'commit {commit}, ' if commit else ''}{machine()}."
    )
    yield from ("", *HOW, "", "## What is promised", "")
    yield from rows(list(CASES), classic)
    yield from ("", "## How costs grow", "")
    yield from ("A random GPT-2 of width 384, 4 layers unless they are what grows, fp32.", "")
    for name in CURVES:
        yield from curve(name)


HOW = """Every figure is a ratio of CPU times (all threads together) of two things run in turn in
one process, the median over several pairs with the quartiles in brackets: the machine's speed
drifts, and a ratio drifts less. Weights are random: speed does not depend on them. "HF" is Hugging
Face transformers with fused attention (`sdpa`). The column of TransformerLens 3.9 is measured in an
environment of its own against the same HF model (`TL_PYTHON=path/to/python make bench-page`); its
generation is timed without its cache, since it needs a tokenizer to be right with one.

The allocator of the process keeps what it frees, for both sides. With glibc's defaults every run
that keeps activations gets fresh pages from the system, which costs nothing on one machine and
half a forward pass on a virtual one that returns memory to its host; the three
`run_with_cache, everything` rows are where it shows.
""".splitlines()


def main(arguments: list[str]) -> None:
    """Measure the named cases, or all of them, printing each row as it comes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CASE", help=f"of {[*CASES, *CURVES]}")
    parser.add_argument("--page", metavar="FILE", help="measure all and write the docs page here")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - CASES.keys() - CURVES.keys():
        parser.error(f"unknown cases {sorted(unknown)}; there are {[*CASES, *CURVES]}")
    if chosen.page and chosen.names:
        parser.error("--page measures everything: name no cases beside it")
    classic = classic_figures()
    keep_freed_memory()
    if chosen.page:
        lines = []
        for line in page(classic):
            print(line, flush=True)
            lines.append(line)
        Path(chosen.page).write_text("\n".join(lines).rstrip() + "\n")
        return
    print(f"{machine()}; medians of CPU-time ratios (quartiles in brackets)\n")
    names = chosen.names or list(CASES)
    if cases := [name for name in names if name in CASES]:
        for line in rows(cases, classic):
            print(line, flush=True)
    for name in names:
        if name in CURVES:
            print("\n".join(curve(name)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
