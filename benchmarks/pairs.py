"""Timing two things in turn, so that a machine whose speed drifts slows both. Needs only the
stdlib."""

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # names of glibc's malloc.h


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


def keep_freed_memory() -> None:
    """Let this process keep what it frees, where its allocator is glibc's.

    By default glibc gives large blocks back to the system and gets them anew. What a fresh page
    costs is a property of the machine (between nothing and half of a forward pass where a virtual
    machine returns it to its host), and not of either of the two things compared.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        for option, value in ((M_TRIM_THRESHOLD, 2**31 - 1), (M_MMAP_MAX, 0)):
            if mallopt is not None:
                mallopt(option, value)


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
