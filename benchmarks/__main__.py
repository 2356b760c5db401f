"""python -m benchmarks [CASE …]: print the table."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.cases import CASES
from benchmarks.pairs import keep_freed_memory


def classic_figures() -> dict[str, float]:
    """TransformerLens 3.9's ratios, from the environment TL_PYTHON names; empty without one."""
    python = os.environ.get("TL_PYTHON")
    if not python:
        return {}
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [python, "-m", "benchmarks.classic"], cwd=root, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(names: list[str]) -> None:
    """Run the named cases, or all of them, printing each row as it comes."""
    if unknown := set(names) - set(CASES):
        sys.exit(f"unknown cases {sorted(unknown)}; there are {list(CASES)}")
    classic = classic_figures()
    keep_freed_memory()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__} on")
    print(
        f"{torch.get_num_threads()} threads; medians of CPU-time ratios (quartiles in brackets)\n"
    )
    print("| what | measured | reach | TransformerLens 3.9 | |\n|---|---|---|---|---|")
    for name in names or CASES:
        for what, measured, reach, note in CASES[name]():
            theirs = f"{classic[what]:.2f} × HF" if what in classic else "–"
            print(f"| {what} | {measured} | {reach} | {theirs} | {note} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
