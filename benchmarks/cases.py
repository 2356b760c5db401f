"""What is measured, against Hugging Face in the same process; returns rows of a table."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.models import hugging_face, prompt
from benchmarks.pairs import compare, cpu_time
from transformer_lens_lite import HookedTransformer, KeyValueCache

Row = tuple[str, str, str, str]  # what, measured, reach, note
BATCHES = [(1, 16), (1, 512), (8, 128)]


def ours_from(hf_model: torch.nn.Module) -> HookedTransformer:
    """The same weights in our model."""
    return HookedTransformer.from_pretrained_no_processing(hf_model=hf_model, device="cpu")


@torch.no_grad()
def forward() -> Iterator[Row]:
    """A forward pass, nobody listening."""
    hf_model = hugging_face("gpt2-small")
    model = ours_from(hf_model)
    for batch, length in BATCHES:
        tokens = prompt("gpt2-small", batch, length)
        ratio = compare(lambda: model(tokens), lambda: hf_model(tokens), 15 if length < 100 else 7)
        yield f"forward {batch}×{length}", f"{ratio} × HF", "≤ 1.00", milliseconds(ratio)


@torch.no_grad()
def cached_run() -> Iterator[Row]:
    """run_with_cache of everything against HF's bare forward, and of resid_post against our own."""
    hf_model = hugging_face("gpt2-small")
    model = ours_from(hf_model)
    for (batch, length), reach in zip(BATCHES, ("1.25", "1.25", "1.08"), strict=True):
        tokens = prompt("gpt2-small", batch, length)
        pairs = 15 if length < 100 else 7
        ratio = compare(lambda: model.run_with_cache(tokens), lambda: hf_model(tokens), pairs)
        what = f"run_with_cache, everything, {batch}×{length}"
        yield what, f"{ratio} × HF", f"≤ {reach}", milliseconds(ratio)
        ratio = compare(
            lambda: model.run_with_cache(tokens, names_filter="*hook_resid_post"),
            lambda: model(tokens),
            pairs,
        )
        what = f"run_with_cache, all resid_post, {batch}×{length}"
        yield what, f"{ratio} × own forward", "≤ 1.03", milliseconds(ratio)


def generate() -> Iterator[Row]:
    """Greedy generation, 64 tokens of prompt and 48 new ones."""
    for shape, pairs, reach in (("gpt2-small", 5, "0.95"), ("toy", 15, "0.40")):
        hf_model = hugging_face(shape)
        model = ours_from(hf_model)
        tokens = prompt(shape, 1, 64)
        ratio = compare(
            lambda: model.generate(tokens, 48, stop_at_eos=False, do_sample=False, verbose=False),
            lambda: hf_model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=48, do_sample=False
            ),
            pairs,
        )
        yield f"generate 64 + 48, {shape}", f"{ratio} × HF", f"≤ {reach}", milliseconds(ratio)


@torch.no_grad()
def prefix() -> Iterator[Row]:
    """32 suffixes of 16 tokens after a frozen prefix of 512, and 32 runs of the whole."""
    model = ours_from(hugging_face("gpt2-small"))
    start, suffixes = prompt("gpt2-small", 1, 512), prompt("gpt2-small", 32, 16)
    whole = torch.cat((start.expand(32, -1), suffixes), 1)
    cache = KeyValueCache.init_cache(model.cfg, "cpu")
    model(start, past_kv_cache=cache)
    cache.freeze()
    ratio = compare(
        lambda: [model(row[None]) for row in whole],
        lambda: model(suffixes, past_kv_cache=cache),
        3,
    )
    yield "frozen prefix 512, 32 × 16", f"{ratio} × faster", "≥ 15", milliseconds(ratio)


@torch.no_grad()
def bandwidth() -> Iterator[Row]:
    """How much of the machine's read bandwidth a decode step uses."""
    model = ours_from(hugging_face("gpt2-small"))
    cache = KeyValueCache.init_cache(model.cfg, "cpu", max_len=1024)
    model(prompt("gpt2-small", 1, 64), past_kv_cache=cache)
    one = prompt("gpt2-small", 1, 1)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    big = torch.ones(weight_bytes // 4)
    token = min(cpu_time(lambda: model.next_logits(one, past_kv_cache=cache)) for _ in range(15))
    read = min(cpu_time(big.sum) for _ in range(15))
    yield (
        "decode bandwidth, gpt2-small",
        f"{read / token:.2f} of reading the weights once",
        "≥ 0.8",
        f"{weight_bytes / 1e6:.0f} MB; {token * 1e3:.0f} ms of CPU a token",
    )


LOAD = """
import resource, sys
import torch
from transformer_lens_lite import HookedTransformer
import transformers.tokenization_utils_base
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = HookedTransformer.from_pretrained_no_processing(sys.argv[1], device="cpu")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def load() -> Iterator[Row]:
    """Extra peak memory of loading a 498 MB safetensors folder."""
    with tempfile.TemporaryDirectory() as folder:
        hugging_face("gpt2-small").save_pretrained(folder)
        size = (Path(folder) / "model.safetensors").stat().st_size
        done = subprocess.run(
            [sys.executable, "-c", LOAD, folder], check=True, capture_output=True, text=True
        )
        extra = int(done.stdout.split()[-1]) * 1024
    yield (
        "load, extra peak memory",
        f"{extra / size:.1%} of the file",
        "≤ 5 %",
        f"{size / 1e6:.0f} MB safetensors, mapped",
    )


def idle_hook() -> Iterator[Row]:
    """What a hook point costs when nobody listens."""
    from transformer_lens_lite import HookPoint

    point, x, n = HookPoint(), torch.zeros(1), 200_000

    def calls() -> None:
        for _ in range(n):
            point(x)

    def loop() -> None:
        for _ in range(n):
            pass

    cost = min(cpu_time(calls) for _ in range(5)) - min(cpu_time(loop) for _ in range(5))
    yield "idle hook point", f"{cost / n * 1e6:.2f} µs", "≤ 0.3", ""


def milliseconds(ratio: object) -> str:
    """Both medians."""
    return f"{ratio.ours_ms:.1f} and {ratio.theirs_ms:.1f} ms of CPU"


CASES: dict[str, Callable[[], Iterator[Row]]] = {
    "idle_hook": idle_hook,
    "forward": forward,
    "cached_run": cached_run,
    "generate": generate,
    "prefix": prefix,
    "bandwidth": bandwidth,
    "load": load,
}
