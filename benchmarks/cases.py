"""What is measured, against Hugging Face in the same process; returns rows of a table."""

import functools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import torch

from benchmarks.models import hugging_face, large_llama, mixture, prompt
from benchmarks.pairs import compare, cpu_time
from transformer_lens_lite import HookedTransformer, KeyValueCache
from transformer_lens_lite import patching as sweeps

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
        pairs = 101 if length < 100 else 7
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
    for shape, pairs, reach in (("gpt2-small", 5, "0.95"), ("toy", 31, "0.40")):
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


def generate_ragged() -> Iterator[Row]:
    """Greedy generation of a batch of 8 prompts of 8 to 64 tokens, padded on the left, 48 new."""
    for shape, pairs, reach in (("gpt2-small", 5, "1.11"), ("toy", 31, "0.50")):
        hf_model = hugging_face(shape)
        model = ours_from(hf_model)
        tokens, mask = prompt(shape, 8, 64), torch.ones(8, 64, dtype=torch.long)
        for row in range(8):
            mask[row, : 8 * row] = 0
        how = {"attention_mask": mask, "max_new_tokens": 48, "do_sample": False}
        ratio = compare(
            functools.partial(model.generate, tokens, stop_at_eos=False, verbose=False, **how),
            functools.partial(hf_model.generate, tokens, **how),
            pairs,
        )
        note = f"{1 / ratio.median:.2f} × its throughput; {milliseconds(ratio)}"
        yield f"generate 8 ragged, 48 new, {shape}", f"{ratio} × HF", f"≤ {reach}", note


@torch.no_grad()
def experts() -> Iterator[Row]:
    """Mixtures of few large and of many small experts, beside Hugging Face's own kernels."""
    for name in ("mixtral", "qwen3_moe"):
        hf_model = mixture(name)
        model = ours_from(hf_model)
        for batch, length in ((1, 1), (1, 16), (8, 64)):
            tokens = torch.randint(1000, (batch, length))
            ratio = compare(
                functools.partial(model, tokens), functools.partial(hf_model, tokens), 15
            )
            yield f"{name} {batch}×{length}", f"{ratio} × HF", "≤ 1.00", milliseconds(ratio)


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
    saved = (512 + 16) / 16
    note = f"tokens alone would make it {saved:.0f} × faster"
    yield "its saving", f"{ratio.median / saved:.2f} of that in tokens", "≥ 0.7", note


def continuations() -> Iterator[Row]:
    """16 tokens given and 16 generated in 32 rows after a prefix of 512, shared and not.

    A decode step of 32 tokens costs more a token than a prefill, with a prefix or without: what is
    saved in time stays below what is saved in tokens.
    """
    model = ours_from(hugging_face("gpt2-small"))
    rows, given, new = 32, 16, 16
    start, prompts = prompt("gpt2-small", 1, 512), prompt("gpt2-small", rows, given)
    whole = torch.cat((start.expand(rows, -1), prompts), 1)
    shared = KeyValueCache.init_cache(model.cfg, "cpu")
    with torch.no_grad():
        model(start, past_kv_cache=shared)
    shared.freeze()
    greedy = {"max_new_tokens": new, "stop_at_eos": False, "do_sample": False, "verbose": False}
    ratio = compare(
        lambda: model.generate(whole, **greedy),
        lambda: model.generate(prompts, past_kv_cache=shared, **greedy),
        3,
    )
    fed = given + new - 1  # a row, beside the prefix
    ideal = (512 + fed) / fed
    yield "32 continuations of 512, 16 + 16", f"{ratio} × faster", "–", milliseconds(ratio)
    note = f"tokens alone would make it {ideal:.1f} × faster"
    yield "their saving", f"{ratio.median / ideal:.2f} of that in tokens", "–", note


def capture() -> Iterator[Row]:
    """Every layer's resid_post through a generation, against the same generation."""
    hf_model = hugging_face("gpt2-small")
    model = ours_from(hf_model)
    tokens = prompt("gpt2-small", 1, 64)
    for new, pairs in ((16, 15), (256, 5)):
        how = {"max_new_tokens": new, "do_sample": False, "stop_at_eos": False, "verbose": False}
        ratio = compare(
            lambda how=how: model.generate(
                tokens, return_cache="resid_post", include_last=False, **how
            ),
            lambda how=how: model.generate(tokens, **how),
            pairs,
        )
        what = f"capture 12 resid_post, 64 + {new}"
        yield what, f"{ratio} × own generate", "≤ 1.03", milliseconds(ratio)


@torch.no_grad()
def patching() -> Iterator[Row]:
    """Sweeps over 32 tokens, all of which differ, against one full forward with a hook for each
    cell: every 16th of those is run."""
    model = ours_from(hugging_face("gpt2-small"))
    corrupted, clean = prompt("gpt2-small", 2, 32).split(1)
    _, cache = model.run_with_cache(clean)

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, -1, 11] - logits[0, -1, 23]

    every = slice(None)
    layers, heads, positions = range(12), range(12), range(32)
    for name, sweep, point, cells, reach in (
        ("resid_pre", sweeps.get_act_patch_resid_pre, "hook_resid_pre",
         [(layer, (every, pos)) for layer in layers for pos in positions], "≥ 6"),
        ("attention heads", sweeps.get_act_patch_attn_head_out_all_pos, "attn.hook_z",
         [(layer, (every, every, head)) for layer in layers for head in heads], "≥ 4"),
        ("attention patterns", sweeps.get_act_patch_attn_head_pattern_all_pos, "attn.hook_pattern",
         [(layer, (every, head)) for layer in layers for head in heads], "–"),
    ):  # fmt: skip

        def one_by_one() -> None:
            for layer, index in cells[::16]:
                full = f"blocks.{layer}.{point}"

                def patch(value: torch.Tensor, hook: object) -> torch.Tensor:
                    value[index] = cache[full][index]
                    return value

                metric(model.run_with_hooks(corrupted, fwd_hooks=[(full, patch)]))

        ratio = compare(one_by_one, lambda: sweep(model, corrupted, cache, metric), 3)
        faster = 16 * ratio.median
        note = f"{len(cells)} cells, {ratio.theirs_ms / 1e3:.1f} s of CPU"
        yield f"patching sweep, {name}", f"{faster:.1f} × faster", reach, note


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
import sys, time, warnings
import torch, transformers.tokenization_utils_base
from transformers import AutoModelForCausalLM
import safetensors.torch, transformer_lens_lite.loading, weights_conversion  # code is no weight
from transformer_lens_lite import HookedTransformer
warnings.simplefilter("ignore")
def megabytes(field):
    with open("/proc/self/status") as status:
        return next(int(l.split()[1]) for l in status if l.startswith(field + ":")) / 1024
how, folder, dtype = sys.argv[1:]
before, start = megabytes("VmRSS"), time.perf_counter()
if how == "hf":
    model = AutoModelForCausalLM.from_pretrained(folder)
else:
    plain = HookedTransformer.from_pretrained_no_processing
    load = plain if how == "plain" else HookedTransformer.from_pretrained
    model = load(folder, device="cpu", dtype=dtype)
wall, peak = time.perf_counter() - start, megabytes("VmHWM") - before
size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
print(wall, peak, size)
"""


def loaded(how: str, folder: str, dtype: str = "float32") -> tuple[float, float, float]:
    """(seconds, extra peak memory in MiB, size of the model in MiB), in a process of its own."""
    command = [sys.executable, "-c", LOAD, how, folder, dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, peak, size = map(float, done.stdout.split())
    return seconds, peak, size


def load() -> Iterator[Row]:
    """Time and extra peak memory of loading a folder of safetensors shards."""
    with tempfile.TemporaryDirectory() as folder:
        large_llama().save_pretrained(folder, max_shard_size="150MB")
        times = [(loaded("plain", folder)[0], loaded("hf", folder)[0]) for _ in range(3)]
        ratio = statistics.median(ours / theirs for ours, theirs in times)
        yield "load, wall time", f"{ratio:.2f} × HF", "≤ 0.70", ""
        _, peak, size = loaded("plain", folder)
        note = f"{size:.0f} MiB, mapped"
        yield "load, extra peak memory", f"{peak / size:.0%} of the file", "≤ 5 %", note
        for how, dtype in (("processed", "float32"), ("plain", "bf16"), ("processed", "bf16")):
            _, peak, size = loaded(how, folder, dtype)
            over, note = peak / size - 1, f"{size:.0f} MiB model"
            yield f"load {how}, {dtype}, peak", f"{over:+.0%} over the model", "≤ +15 %", note


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
    "generate_ragged": generate_ragged,
    "capture": capture,
    "experts": experts,
    "prefix": prefix,
    "continuations": continuations,
    "patching": patching,
    "bandwidth": bandwidth,
    "load": load,
}
