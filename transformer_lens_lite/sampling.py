"""From logits to the next token: pure functions on one step of a batch.

Everything is as in Hugging Face's `generate`, in its order: repetition penalty, (frequency
penalty,) repeated n-grams, bad words, EOS too early, suppressed tokens, the caller's own
processors, temperature, top-k, top-p, min-p, typical-p, epsilon, eta. Filters combine: each one
works on what the last one left, so `top_k=50, top_p=0.9` is the nucleus of the fifty best. (The
classic class let `top_k` win and ignored `top_p`.) Nothing here waits for an accelerator.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

Logits = Float[Tensor, "batch d_vocab"]
Tokens = Int[Tensor, "batch pos"]
Mask = Int[Tensor, "batch pos"]
Number = float | int  # spelled out: run-time checks refuse `temperature=0` for a float
Words = tuple[tuple[int, ...], ...]
Processor = Callable[[Tensor, Tensor], Tensor]  # (tokens [batch, pos], logits) -> logits

# --- arguments ----------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """Whether it is a number; True and False are none."""
    return isinstance(value, (float, int)) and not isinstance(value, bool)


def is_count(value: Any, least: int = 1) -> bool:
    """Whether it is a whole number of at least so much."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# what each argument must be: in words, and as a test
PROBABILITY = ("a number in (0, 1] or None", lambda p: p is None or (is_number(p) and 0 < p <= 1))
CUTOFF = ("a number in [0, 1] or None", lambda p: p is None or (is_number(p) and 0 <= p <= 1))
BELOW_ONE = ("a number in [0, 1) or None", lambda p: p is None or (is_number(p) and 0 <= p < 1))
MUST_BE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": (
        "a number, finite and at least 0",
        lambda t: is_number(t) and t >= 0 and math.isfinite(t),
    ),
    "top_k": ("a whole number of at least 1 or None", lambda k: k is None or is_count(k)),
    "top_p": PROBABILITY,
    "min_p": CUTOFF,
    "typical_p": PROBABILITY,
    "epsilon_cutoff": BELOW_ONE,
    "eta_cutoff": BELOW_ONE,
    "freq_penalty": ("a finite number", lambda f: is_number(f) and math.isfinite(f)),
    "repetition_penalty": (
        "a number, finite and above 0",
        lambda f: is_number(f) and f > 0 and math.isfinite(f),
    ),
    "no_repeat_ngram_size": ("a whole number of at least 0", lambda n: is_count(n, 0)),
    "min_new_tokens": ("a whole number of at least 0", lambda n: is_count(n, 0)),
    "generator": (
        "a torch.Generator or None",
        lambda given: given is None or isinstance(given, torch.Generator),
    ),
}


def check_sampling(arguments: Mapping[str, Any]) -> None:
    """Refuse sampling arguments that mean nothing: a ValueError that names the argument."""
    for name, (words, is_right) in MUST_BE.items():
        if name in arguments and not is_right(arguments[name]):
            raise ValueError(f"{name} must be {words}, got {arguments[name]!r}")


# --- penalties, and tokens that may not come ------------------------------------------------------


def token_counts(tokens: Tokens, d_vocab: int, mask: Mask | None = None) -> Int[Tensor, "batch _"]:
    """How often each token occurs in each row, where `mask` is 1, [batch, d_vocab].

    Ids that the model has no logit for are left out.
    """
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


def ban_repeated_ngrams(
    logits: Logits, tokens: Tokens, size: int, mask: Mask | None = None
) -> Logits:
    """-inf for tokens that would complete an n-gram of this size that the row has already.

    n-grams with padding in them (`mask` 0) are none.
    """
    if tokens.shape[1] < size:
        return logits
    known = tokens.unfold(1, size, 1)  # [batch, window, size]
    begun = tokens[:, tokens.shape[1] + 1 - size :]  # what the next token completes
    again = (known[..., :-1] == begun[:, None]).all(-1)
    if mask is not None:
        is_real = mask.bool()
        again &= is_real.unfold(1, size, 1).all(-1)
        again &= is_real[:, tokens.shape[1] + 1 - size :].all(-1, keepdim=True)
    banned = token_counts(known[..., -1], logits.shape[-1], again.long()) > 0
    return logits.masked_fill(banned, -torch.inf)


@functools.lru_cache(maxsize=8)
def words_by_length(words: Words, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Words of one length together: all but their last ids [word, pos], and the last [word]."""
    lengths = sorted({len(word) for word in words})
    groups = [torch.tensor([w for w in words if len(w) == n], device=device) for n in lengths]
    return [(group[:, :-1], group[:, -1]) for group in groups]


def ban_words(logits: Logits, tokens: Tokens, words: Words, mask: Mask | None = None) -> Logits:
    """-inf for tokens that would complete one of these words, sequences of one or more ids."""
    banned = torch.zeros_like(logits, dtype=torch.long)
    for starts, last in words_by_length(words, logits.device):
        n = starts.shape[1]
        if n > tokens.shape[1]:
            continue
        here = slice(tokens.shape[1] - n, None)
        begun = (tokens[:, None, here] == starts).all(-1)  # [batch, word]
        if mask is not None:
            begun &= mask[:, here].bool().all(-1, keepdim=True)
        banned.index_add_(1, last, begun.long())
    return logits.masked_fill(banned > 0, -torch.inf)


def ban_tokens(logits: Logits, ids: tuple[int, ...]) -> Logits:
    """-inf for these tokens."""
    return logits.index_fill(1, torch.tensor(ids, device=logits.device), -torch.inf)


def processed_by(processor: Processor, tokens: Tokens, logits: Logits) -> Logits:
    """What a caller's processor makes of the logits. ValueError unless that is logits again."""
    result: Any = processor(tokens.clone(), logits.clone())  # it may edit what it gets
    if isinstance(result, Tensor) and result.shape == logits.shape and result.is_floating_point():
        return result
    got = (
        f"{result.dtype} of shape {list(result.shape)}"
        if isinstance(result, Tensor)
        else type(result).__name__
    )
    raise ValueError(
        f"logits_processor {name_of(processor)} returned {got}, expected logits of shape "
        f"{list(logits.shape)}"
    )


def name_of(function: Any) -> str:
    """A function's name, or that of an object's class."""
    return str(getattr(function, "__name__", type(function).__name__))


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


def keep_typical_p(logits: Logits, p: Number) -> Logits:
    """-inf for all but the typical tokens: the fewest whose surprise is nearest to the entropy and
    whose probabilities reach p (locally typical sampling, arXiv 2202.00666)."""
    if p == 1:
        return logits
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(log_probs * probs).nansum(-1, keepdim=True)  # 0 · -inf is nothing
    distance = (-log_probs - entropy).abs()
    nearest, order = distance.sort()
    enough = (probs.gather(1, order).cumsum(-1) < p).sum(-1, keepdim=True)
    farthest = nearest.gather(1, enough.clamp(max=logits.shape[-1] - 1))
    return logits.masked_fill(distance > farthest, -torch.inf)


def keep_above(logits: Logits, cutoff: Number | Float[Tensor, "batch 1"]) -> Logits:
    """-inf for tokens less probable than the cutoff, the most probable ones excepted (epsilon
    sampling, arXiv 2210.15191)."""
    rare = logits.softmax(-1) < cutoff
    return logits.masked_fill(rare & (logits < logits.amax(-1, keepdim=True)), -torch.inf)


def keep_eta(logits: Logits, epsilon: Number) -> Logits:
    """As `keep_above`, with a cutoff that falls where the distribution is flat: the smaller of
    epsilon and sqrt(epsilon) · exp(-entropy) (eta sampling, arXiv 2210.15191)."""
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1, keepdim=True)
    return keep_above(logits, (math.sqrt(epsilon) * (-entropy).exp()).clamp(max=epsilon))


def warp_logits(
    logits: Logits,
    top_k: int | None = None,
    top_p: Number | None = None,
    temperature: Number = 1.0,
    min_p: Number | None = None,
    typical_p: Number | None = None,
    epsilon_cutoff: Number | None = None,
    eta_cutoff: Number | None = None,
) -> Logits:
    """The logits a token is drawn from: temperature, then the filters in the module's order."""
    logits = apply_temperature(logits, temperature)
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    if min_p is not None:
        logits = keep_min_p(logits, min_p)
    if typical_p is not None:
        logits = keep_typical_p(logits, typical_p)
    if epsilon_cutoff:
        logits = keep_above(logits, epsilon_cutoff)
    if eta_cutoff:
        logits = keep_eta(logits, eta_cutoff)
    return logits


# --- drawing ------------------------------------------------------------------------------------


def largest(logits: Logits) -> Int[Tensor, " batch"]:
    """The token with the largest logit in each row.

    ValueError for rows without a distribution; only where looking needs no synchronisation.
    """
    values, tokens = logits.max(-1)  # NaN counts as the largest; -inf is when nothing is left
    if logits.device.type == "cpu":
        found = values.tolist()
        if not all(map(math.isfinite, found)):
            rows = [row for row, value in enumerate(found) if not math.isfinite(value)]
            raise ValueError(f"logits are NaN, +inf or all -inf in batch row(s) {rows}")
    return tokens


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


# --- the whole step -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Arguments are checked once, when this is made.

    Raises ValueError for arguments out of range, naming them.
    """

    do_sample: bool = True
    top_k: int | None = None
    top_p: Number | None = None
    temperature: Number = 1.0
    freq_penalty: Number = 0.0
    repetition_penalty: Number = 1.0
    min_p: Number | None = None
    typical_p: Number | None = None
    epsilon_cutoff: Number | None = None
    eta_cutoff: Number | None = None
    no_repeat_ngram_size: int = 0
    bad_words_ids: Words = ()
    suppress_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0
    logits_processor: tuple[Processor, ...] = ()
    generator: torch.Generator | None = None
    eos_ids: tuple[int, ...] = ()  # what `min_new_tokens` keeps from coming too early

    def __post_init__(self) -> None:
        check_sampling(vars(self))

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit is taken."""
        return self.temperature == 0 or not self.do_sample

    @property
    def counts_tokens(self) -> bool:
        """Whether it matters how often a token has occurred."""
        return bool(
            self.freq_penalty or self.repetition_penalty != 1.0 or self.no_repeat_ngram_size
        )

    @functools.cached_property
    def is_processing(self) -> bool:
        """Whether anything happens to logits before the warpers."""
        return bool(
            self.counts_tokens
            or self.bad_words_ids
            or self.suppress_tokens
            or self.min_new_tokens
            or self.logits_processor
        )

    def processed(
        self, logits: Logits, tokens: Tokens, mask: Mask | None = None, n_new: int = 0
    ) -> Logits:
        """Penalties, bans, and the caller's processors; these happen without sampling, too.

        Args:
            tokens, mask: the row so far, and where it is not padding (None: nowhere).
            n_new: how many of the tokens were generated.
        """
        if self.freq_penalty or self.repetition_penalty != 1.0:
            counts = token_counts(tokens, logits.shape[-1], mask)
            logits = penalize(logits, counts, self.freq_penalty, self.repetition_penalty)
        if self.no_repeat_ngram_size:
            logits = ban_repeated_ngrams(logits, tokens, self.no_repeat_ngram_size, mask)
        if self.bad_words_ids:
            logits = ban_words(logits, tokens, self.bad_words_ids, mask)
        if n_new < self.min_new_tokens and self.eos_ids:
            logits = ban_tokens(logits, self.eos_ids)
        if self.suppress_tokens:
            logits = ban_tokens(logits, self.suppress_tokens)
        for processor in self.logits_processor:
            logits = processed_by(processor, tokens, logits)
        return logits

    def warped(self, logits: Logits) -> Logits:
        """See `warp_logits`."""
        return warp_logits(
            logits, self.top_k, self.top_p, self.temperature, self.min_p, self.typical_p,
            self.epsilon_cutoff, self.eta_cutoff,
        )  # fmt: skip

    def next_tokens(
        self,
        logits: Logits,
        tokens: Tokens | None = None,
        mask: Mask | None = None,
        n_new: int = 0,
    ) -> Int[Tensor, " batch"]:
        """The next token of each row; arguments as of `processed`, needed if it does anything.

        Raises ValueError, on the CPU, for logits that are NaN or infinite, or all forbidden.
        """
        # In half precision neither the nucleus' cumulative sum nor the noise is good enough.
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        greedy = largest(logits)
        if self.is_processing:
            assert tokens is not None
            logits = self.processed(logits, tokens, mask, n_new)
            greedy = largest(logits)
        return greedy if self.is_greedy else draw(self.warped(logits), self.generator)


def sample_logits(
    final_logits: Logits,
    top_k: int | None = None,
    top_p: Number | None = None,
    temperature: Number = 1.0,
    freq_penalty: Number = 0.0,
    repetition_penalty: Number = 1.0,
    tokens: Tokens | None = None,
    min_p: Number | None = None,
    generator: torch.Generator | None = None,
    do_sample: bool = True,
    mask: Mask | None = None,
    typical_p: Number | None = None,
    epsilon_cutoff: Number | None = None,
    eta_cutoff: Number | None = None,
    no_repeat_ngram_size: int = 0,
) -> Int[Tensor, " batch"]:
    """The next token of each row, from the logits of its last position.

    `temperature=0` or `do_sample=False` takes the largest logit, after the penalties (as Hugging
    Face does). The penalties look at `tokens`, where `mask` is 1 (no mask: everywhere). A
    `generator` must live on the logits' device.

    Raises ValueError for arguments out of range (see `check_sampling`), for a penalty without
    `tokens`, and, on the CPU, for logits that are NaN or infinite.
    """
    sampling = Sampling(
        do_sample, top_k, top_p, temperature, freq_penalty, repetition_penalty, min_p, typical_p,
        epsilon_cutoff, eta_cutoff, no_repeat_ngram_size, generator=generator,
    )  # fmt: skip
    if tokens is None:
        if sampling.counts_tokens:
            raise ValueError(
                "freq_penalty, repetition_penalty and no_repeat_ngram_size need tokens=, the "
                "tokens so far"
            )
        tokens = torch.zeros(len(final_logits), 0, dtype=torch.long, device=final_logits.device)
    return sampling.next_tokens(final_logits, tokens, mask)
