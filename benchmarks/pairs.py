"""Timing two things in turn, so that a machine whose speed drifts slows both. Needs only the
stdlib."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Ratio:
    """Median ratio of CPU times over the pairs, with the quartiles and both medians in
    milliseconds."""

    median: float
    low: float
    high: float
    ours_ms: float
    theirs_ms: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def compare(ours: Callable[[], object], theirs: Callable[[], object], pairs: int) -> Ratio:
    """Run both in turn, `pairs` times after two for warming up."""
    measured = [(cpu_time(ours), cpu_time(theirs)) for _ in range(pairs + 2)][2:]
    ratios = [a / b for a, b in measured]
    low, _, high = statistics.quantiles(ratios, n=4) if pairs > 1 else (ratios[0],) * 3
    ours_ms, theirs_ms = (statistics.median(times) * 1e3 for times in zip(*measured, strict=True))
    return Ratio(statistics.median(ratios), low, high, ours_ms, theirs_ms)


def cpu_time(run: Callable[[], object]) -> float:
    """Seconds of CPU, all threads together."""
    start = time.process_time()
    run()
    return time.process_time() - start
