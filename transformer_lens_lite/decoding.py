"""The decode loop: what changes between the steps of a generation, and when a row is finished."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_lens_lite.kv_cache import KeyValueCache
from transformer_lens_lite.sampling import Sampling, name_of

Criterion = Callable[[Tensor, Tensor], Any]  # (tokens [batch, pos], logits) -> bool or [batch]


@dataclass(frozen=True)
class Ending:
    """When a row is finished, and what fills it up afterwards."""

    eos_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    pad_id: int
    criteria: tuple[Criterion, ...] = ()

    @property
    def is_possible(self) -> bool:
        """Whether a row can end before there are as many tokens as there may be."""
        return bool(self.eos_ids or self.stop_strings or self.criteria)

    def reached(
        self,
        model: Any,
        tokens: Int[Tensor, "batch pos"],
        n_new: int,
        logits: Float[Tensor, "batch d_vocab_out"],
    ) -> Bool[Tensor, " batch"]:
        """Which rows end with their newest token, given the logits it was chosen from."""
        newest = tokens[:, -1]
        ended = torch.zeros_like(newest, dtype=torch.bool)
        for eos in self.eos_ids:
            ended |= newest == eos
        if self.stop_strings:
            # a token is at least one character, so an occurrence that ends now starts within this
            # tail
            tail = max(len(stop.encode()) for stop in self.stop_strings) + 1
            texts = [text_after_text(model, row[-min(tail, n_new) :]) for row in tokens]
            found = [any(stop in text for stop in self.stop_strings) for text in texts]
            ended |= torch.tensor(found, device=newest.device)
        for criterion in self.criteria:
            ended |= met(criterion, tokens, logits)
        return ended


def met(
    criterion: Criterion,
    tokens: Int[Tensor, "batch pos"],
    logits: Float[Tensor, "batch d_vocab_out"],
) -> Bool[Tensor, "*batch"]:
    """Where a caller's criterion says stop: everywhere, nowhere, or [batch]; else ValueError."""
    result = criterion(tokens.clone(), logits.clone())  # it may edit what it gets
    if isinstance(result, bool):
        result = torch.tensor(result)
    rows = len(tokens)
    if isinstance(result, Tensor) and result.dtype == torch.bool and result.shape in ((), (rows,)):
        return result.to(tokens.device)
    got = (
        f"{result.dtype} of shape {list(result.shape)}"
        if isinstance(result, Tensor)
        else type(result).__name__
    )
    raise ValueError(
        f"stopping_criteria {name_of(criterion)} returned {got}, expected a bool or torch.bool of "
        f"shape [{rows}]"
    )


def text_after_text(model: Any, ids: Int[Tensor, " pos"]) -> str:
    """What ids add to a text before them: alone, a decoder may drop the space of the first word."""
    before, both = model.to_string(ids[:1]), model.to_string(torch.cat((ids[:1], ids)))
    return both[len(before) :] if both.startswith(before) else model.to_string(ids)


def repeated(rows: Tensor, times: int) -> Tensor:
    """Every row so many times in a row."""
    return rows if times == 1 else rows.repeat_interleave(times, 0)


class Generation:
    """One generation in progress. Iterating yields new tokens, [row], until all rows end.

    Args:
        prompt: ids [batch, pos] or embeddings [batch, pos, d_model].
        mask: [batch, pos], or with what is cached in front; None: nothing is padding.
        cache: takes the prompt in; None: every step runs the whole sequence anew.
        own_cache: nobody else sees the cache.
        copies: rows that continue each prompt, next to each other. The prompt is run once, and with
            several copies the cache, which is our own then, becomes a prefix that they share.
        feeds_last: `feed_last` will be called at the end.
    """

    def __init__(
        self,
        model: Any,
        prompt: Tensor,
        mask: Int[Tensor, "batch key_pos"] | None,
        cache: KeyValueCache | None,
        max_new_tokens: int,
        ending: Ending,
        sampling: Sampling,
        own_cache: bool,
        copies: int = 1,
        feeds_last: bool = False,
    ) -> None:
        self.model = model
        self.prompt = prompt
        self.cache = cache
        self.own_cache = own_cache
        self.expected_stop = (0 if cache is None else cache.length) + prompt.shape[1]
        self.expected_stop += max_new_tokens - (not feeds_last)
        self.feeds_last = feeds_last
        self.max_new_tokens = max_new_tokens
        self.ending = ending
        self.sampling = sampling
        self.copies = copies
        self.n_new = 0
        self.logits: Float[Tensor, "row d_vocab_out"] | None = None  # of the latest step
        rows, device = prompt.shape[0] * copies, prompt.device
        self.finished = torch.zeros(rows, dtype=torch.bool, device=device)
        # ids of the prompt, where it has any, then room for the new ones
        ids = (
            prompt.new_zeros(prompt.shape[0], 0, dtype=torch.long)
            if self.from_embeddings
            else prompt
        )
        self._n_prompt = ids.shape[1]
        self._ids = torch.empty(
            rows, self._n_prompt + max_new_tokens, dtype=torch.long, device=device
        )
        self._ids[:, : self._n_prompt] = repeated(ids, copies)
        # new tokens that belong to their row, and do not only fill it up behind its end
        self._real = torch.ones(rows, max_new_tokens, dtype=torch.long, device=device)
        self._mask = None
        if mask is not None:  # new tokens are never padding to each other
            room = mask.new_ones(rows, max_new_tokens)
            self._mask = torch.cat((repeated(mask, copies), room), 1)
        self._runs_anew = self._steps_that_run_anew(mask)

    def _steps_that_run_anew(self, mask: Int[Tensor, "batch key_pos"] | None) -> set[int]:
        """By how many new tokens there are: the steps at which some row becomes too long for what
        is cached of it (LongRoPE). There everything is run again, as Hugging Face does."""
        limit = self.model.cfg.turns_anew_past()
        if limit is None or self.cache is None or self.cache.length or not self.own_cache:
            return set()  # what is behind a prefix has no ids to run again
        lengths = {self.prompt.shape[1]} if mask is None else set(mask.sum(1).tolist())
        return {limit + 1 - length for length in lengths if length <= limit}

    def mode(self) -> Any:
        """The mode for the next steps. That of inference is faster, but its tensors cannot enter
        autograd: only where nobody gets one."""
        are_shown = self.sampling.logits_processor or self.ending.criteria or not self.own_cache
        stay_here = not are_shown and self.model.only_copies_are_taken()
        return torch.inference_mode() if stay_here else torch.no_grad()

    @property
    def from_embeddings(self) -> bool:
        """Whether the prompt is embeddings, of which nobody knows the ids."""
        return self.prompt.is_floating_point()

    @property
    def tokens(self) -> Int[Tensor, "row pos"]:
        """The prompt's ids and the new tokens so far; these alone after embeddings."""
        return self._ids[:, : self._n_prompt + self.n_new]

    @property
    def generated(self) -> Int[Tensor, "row new"]:
        """The new tokens so far."""
        return self.tokens[:, self._n_prompt :]

    def result(self) -> tuple[Tensor, Int[Tensor, "row new"]]:
        """What it comes to: prompts (ids or embeddings) and new tokens, row by row."""
        return repeated(self.prompt, self.copies), self.generated

    def __iter__(self) -> Iterator[Int[Tensor, " row"]]:
        while not self.ended():
            with self.mode():
                self.step()
            yield self.tokens[:, -1]

    def ended(self) -> bool:
        """Whether there is nothing left to do."""
        full = self.n_new >= self.max_new_tokens
        return full or (self.ending.is_possible and bool(self.finished.all()))

    def step(self) -> None:
        """One more token for every row. To be called in the mode `mode`."""
        self.logits = self._next_logits()
        self._append(self._picked(self.logits), self.logits)

    def _next_logits(self) -> Float[Tensor, "row d_vocab_out"]:
        """Logits for the next position: of the prompt first, of the newest token from then on."""
        if self.cache is None:
            return self.model.next_logits(
                self._whole_input(), attention_mask=self._whole_mask(), generation=self
            )
        if self.n_new in self._runs_anew:
            cfg, rows, room = self.model.cfg, self.tokens.shape[0], self.expected_stop
            self.cache = KeyValueCache.init_cache(cfg, self.tokens.device, rows, room).owned()
            return self.model.next_logits(
                self._whole_input(),
                attention_mask=self._whole_mask(),
                past_kv_cache=self.cache,
                generation=self,
            )
        if self.n_new:
            newest = self._ids.narrow(1, self._n_prompt + self.n_new - 1, 1)
            return self.model.next_logits(newest, past_kv_cache=self.cache, generation=self)
        mask = self._whole_mask()
        logits = self.model.next_logits(
            self.prompt,
            attention_mask=None if mask is None else mask[:: self.copies],
            past_kv_cache=self.cache,
            generation=self,
        )
        if self.copies > 1:
            prefix = self.cache.reading()
            self.cache = prefix.branch(len(self._ids), max_len=self.max_new_tokens)
        return repeated(logits, self.copies)

    def feed_last(self) -> None:
        """Run the newest token too, for those who listen; a cache that others see stays as it is.
        To be called in the mode `mode`."""
        if self.cache is not None and not self.own_cache:
            self.cache = self.cache.reading()
        self._next_logits()

    # -- what a `StepContext` says --

    @property
    def n_fed(self) -> int:
        """How many forwards there have been."""
        return self.n_new

    def real(self, n_columns: int) -> Int[Tensor, "row pos"] | None:
        """1 where the last so many columns are part of their row; None: as the mask says."""
        if not (self.ending.is_possible and self.n_new):
            return None
        new = self._real[:, : self.n_new]
        if n_columns <= self.n_new:
            return new[:, self.n_new - n_columns :]
        before = n_columns - self.n_new  # of the prompt
        if self._mask is None:
            start = new.new_ones(len(new), before)
        else:
            end = self._mask.shape[1] - self.max_new_tokens
            start = self._mask[:, end - before : end]
        return torch.cat((start, new), 1)

    # -- inputs of a step --

    def _whole_input(self) -> Tensor:
        if not self.from_embeddings:
            return self.tokens
        start = repeated(self.prompt, self.copies)
        return torch.cat((start, self.model.embed(self.generated)), 1) if self.n_new else start

    def _whole_mask(self) -> Int[Tensor, "row key_pos"] | None:
        unused = self.max_new_tokens - self.n_new
        return None if self._mask is None else self._mask[:, : self._mask.shape[1] - unused]

    def _token_mask(self) -> Int[Tensor, "row pos"] | None:
        """Where `tokens` are not padding."""
        mask = self._whole_mask()
        return None if mask is None else mask[:, mask.shape[1] - self.tokens.shape[1] :]

    def _picked(self, logits: Float[Tensor, "row d_vocab_out"]) -> Int[Tensor, " row"]:
        """The next token of each row; rows that have ended get padding."""
        seen = self.sampling.is_processing
        tokens, mask = (self.tokens, self._token_mask()) if seen else (None, None)
        picked = self.sampling.next_tokens(logits, tokens, mask, self.n_new)
        if not self.ending.is_possible:
            return picked
        return picked.masked_fill(self.finished, self.ending.pad_id)

    def _append(
        self, picked: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab_out"]
    ) -> None:
        self._ids.select(1, self._n_prompt + self.n_new).copy_(picked)
        self.n_new += 1
        if self.ending.is_possible:
            self._real[:, self.n_new - 1] = ~self.finished
            ended = self.ending.reached(self.model, self.tokens, self.n_new, logits)
            self.finished = self.finished | ended
