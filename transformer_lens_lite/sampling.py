"""From logits to the next token: pure functions on one step of a batch.

Everything is as in Hugging Face's `generate`, in its order: repetition penalty, (frequency
penalty,) temperature, top-k, top-p, min-p. Filters combine: each one works on what the last one
left, so `top_k=50, top_p=0.9` is the nucleus of the fifty best. (The classic class let `top_k` win
and ignored `top_p`.) Nothing here waits for an accelerator.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

Logits = Float[Tensor, "batch d_vocab"]
Number = float | int  # spelled out: run-time checks refuse `temperature=0` for a float

# --- arguments ----------------------------------------------------------------------------------


def check_sampling(
    top_k: int | None = None,
    top_p: Number | None = None,
    temperature: Number = 1.0,
    freq_penalty: Number = 0.0,
    repetition_penalty: Number = 1.0,
    min_p: Number | None = None,
) -> None:
    """Refuse sampling arguments that mean nothing: a ValueError that names the argument."""
    numbers = {
        "top_p": top_p,
        "min_p": min_p,
        "temperature": temperature,
        "freq_penalty": freq_penalty,
        "repetition_penalty": repetition_penalty,
    }
    for name, value in numbers.items():
        if value is None and name in ("top_p", "min_p"):
            continue
        if isinstance(value, bool) or not isinstance(value, (float, int)):
            raise ValueError(f"{name} must be a number, got {value!r}")
    if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
        raise ValueError(f"top_k must be a whole number of at least 1 or None, got {top_k!r}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1] or None, got {top_p!r}")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be in [0, 1] or None, got {min_p!r}")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be finite and at least 0, got {temperature!r}")
    if not math.isfinite(freq_penalty):
        raise ValueError(f"freq_penalty must be finite, got {freq_penalty!r}")
    if not (repetition_penalty > 0 and math.isfinite(repetition_penalty)):
        raise ValueError(f"repetition_penalty must be finite, above 0, got {repetition_penalty!r}")


def largest(logits: Logits) -> Int[Tensor, " batch"]:
    """The token with the largest logit in each row.

    ValueError for rows without a distribution; only where looking needs no synchronisation.
    """
    values, tokens = logits.max(-1)  # NaN counts as the largest; -inf is when nothing is left
    if logits.device.type == "cpu":
        rows = [row for row, value in enumerate(values.tolist()) if not math.isfinite(value)]
        if rows:
            raise ValueError(f"logits are NaN, +inf or all -inf in batch row(s) {rows}")
    return tokens


# --- penalties for tokens that occurred already ---------------------------------------------------


def token_counts(
    tokens: Int[Tensor, "batch pos"],
    d_vocab: int,
    mask: Int[Tensor, "batch pos"] | None = None,
) -> Int[Tensor, "batch d_vocab"]:
    """How often each token occurs in each row, where `mask` is 1; only ids below `d_vocab`."""
    weight = torch.ones_like(tokens) if mask is None else mask
    counts = tokens.new_zeros((tokens.shape[0], d_vocab + 1), dtype=torch.long)
    # One column more takes the ids the model has no logit for.
    counts.scatter_add_(1, tokens.clamp(max=d_vocab).long(), weight.long())
    return counts[:, :d_vocab]


def penalize(
    logits: Logits,
    counts: Int[Tensor, "batch d_vocab"],
    freq_penalty: Number = 0.0,
    repetition_penalty: Number = 1.0,
) -> Logits:
    """Lower the logits of tokens that occurred: by a factor, and by `freq_penalty` per time."""
    if repetition_penalty != 1.0:
        less = torch.where(logits < 0, logits * repetition_penalty, logits / repetition_penalty)
        logits = torch.where(counts > 0, less, logits)
    if freq_penalty != 0.0:
        logits = logits - freq_penalty * counts
    return logits


# --- warpers ------------------------------------------------------------------------------------


def apply_temperature(logits: Logits, temperature: Number) -> Logits:
    """Sharpen (below 1) or flatten (above 1) the distribution; 0 leaves only the largest logits."""
    if temperature == 0:
        return keep_top_k(logits, 1)
    if temperature == 1:
        return logits
    # Measured from the largest, which stays 0 however small the temperature is.
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def keep_top_k(logits: Logits, k: int) -> Logits:
    """-inf for all but the k largest logits; those equal to the k-th stay."""
    kth = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def keep_top_p(logits: Logits, p: Number) -> Logits:
    """-inf for all but the nucleus: the fewest tokens whose probabilities reach p, at least one."""
    if p == 1:
        return logits
    ascending, order = logits.sort()
    drop = ascending.softmax(-1).cumsum(-1) <= 1 - p
    drop[:, -1] = False
    return logits.masked_fill(drop.scatter(1, order, drop), -torch.inf)


def keep_min_p(logits: Logits, p: Number) -> Logits:
    """-inf for tokens less probable than p times the most probable one."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -torch.inf)


def warp_logits(
    logits: Logits,
    top_k: int | None = None,
    top_p: Number | None = None,
    temperature: Number = 1.0,
    min_p: Number | None = None,
) -> Logits:
    """The logits a token is drawn from: temperature, then top-k, top-p and min-p."""
    logits = apply_temperature(logits, temperature)
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    if min_p is not None:
        logits = keep_min_p(logits, min_p)
    return logits


# --- drawing ------------------------------------------------------------------------------------


def draw(logits: Logits, generator: torch.Generator | None = None) -> Int[Tensor, " batch"]:
    """One token per row, with the probabilities softmax(logits).

    Noise is drawn for every logit of every row, so a row's tokens depend on the seed, its place
    and its own logits, never on what the rest of the batch does.
    """
    # Gumbel's trick: the largest of (logit + Gumbel noise) is distributed like softmax(logits), and
    # -log of an exponential variable is Gumbel noise. torch.multinomial would wait for the device.
    noise = torch.empty_like(logits).exponential_(generator=generator)
    noise = noise.clamp_min(torch.finfo(noise.dtype).tiny)  # log(0) would turn -inf into NaN
    return (logits - noise.log()).argmax(-1)


def sample_logits(
    final_logits: Logits,
    top_k: int | None = None,
    top_p: Number | None = None,
    temperature: Number = 1.0,
    freq_penalty: Number = 0.0,
    repetition_penalty: Number = 1.0,
    tokens: Int[Tensor, "batch pos"] | None = None,
    min_p: Number | None = None,
    generator: torch.Generator | None = None,
    do_sample: bool = True,
    mask: Int[Tensor, "batch pos"] | None = None,
) -> Int[Tensor, " batch"]:
    """The next token of each row, from the logits of its last position.

    `temperature=0` or `do_sample=False` takes the largest logit, after the penalties (as Hugging
    Face does). The penalties look at `tokens`, where `mask` is 1 (no mask: everywhere). A
    `generator` must live on the logits' device.

    Raises ValueError for arguments out of range (see `check_sampling`), for a penalty without
    `tokens`, and, on the CPU, for logits that are NaN or infinite.
    """
    check_sampling(top_k, top_p, temperature, freq_penalty, repetition_penalty, min_p)
    return next_tokens(
        final_logits, top_k, top_p, temperature, freq_penalty, repetition_penalty, tokens, min_p,
        generator, do_sample, mask,
    )  # fmt: skip


def next_tokens(
    final_logits: Logits,
    top_k: int | None,
    top_p: Number | None,
    temperature: Number,
    freq_penalty: Number,
    repetition_penalty: Number,
    tokens: Int[Tensor, "batch pos"] | None = None,
    min_p: Number | None = None,
    generator: torch.Generator | None = None,
    do_sample: bool = True,
    mask: Int[Tensor, "batch pos"] | None = None,
) -> Int[Tensor, " batch"]:
    """`sample_logits` for arguments that `check_sampling` has seen: for every step of a loop."""
    # In half precision neither the nucleus' cumulative sum nor the noise is good enough.
    logits = final_logits.float() if final_logits.dtype.itemsize < 4 else final_logits
    greedy = largest(logits)
    if freq_penalty != 0.0 or repetition_penalty != 1.0:
        if tokens is None:
            raise ValueError("freq_penalty and repetition_penalty need tokens=, the tokens so far")
        counts = token_counts(tokens, logits.shape[-1], mask)
        logits = penalize(logits, counts, freq_penalty, repetition_penalty)
        greedy = logits.argmax(-1)
    if temperature == 0 or not do_sample:
        return greedy
    return draw(warp_logits(logits, top_k, top_p, temperature, min_p), generator)
