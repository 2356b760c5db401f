"""Speed and memory beside plain transformers (and the classic class, where it is installed).

    make bench                                      everything
    python -m benchmarks forward generate           some of it
    TL_PYTHON=/path/to/python make bench            with TransformerLens 3.9 from that environment

All comparisons are ratios of CPU time, measured in turn in one process; the median of the pairs
counts.
"""
