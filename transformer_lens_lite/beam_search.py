"""Beam search, as in Hugging Face's `generate(num_beams=...)`: the same sequences and scores."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from transformer_lens_lite.decoding import Generation, repeated
from transformer_lens_lite.kv_cache import KeyValueCache
from transformer_lens_lite.sampling import Number

# The score of what is no sequence (yet): finite, so that such a beam can still be told from one
# that the logits processors forbid.
NEVER = -1e9


@dataclass(frozen=True)
class Beams:
    """How wide to search, when to stop, and how many of the best to give back."""

    num_beams: int
    length_penalty: Number = 1.0
    early_stopping: bool | Literal["never"] = False
    n: int = 1


class BeamSearch(Generation):
    """A generation that keeps, for each prompt, the `num_beams` most probable continuations.

    A finished one scores the sum of its log-probabilities over its length ** length_penalty. The
    running ones are the rows of a generation with `num_beams` copies; they change places from step
    to step, so nothing is final before the end.
    """

    def __init__(self, beams: Beams, **arguments: Any) -> None:
        super().__init__(**arguments, copies=beams.num_beams)
        self.beams = beams
        batch, width, device = self.prompt.shape[0], beams.num_beams, self.prompt.device
        # all copies of a prompt are the same at first: only one of them counts
        self.scores = torch.full((batch, width), NEVER, device=device)
        self.scores[:, 0] = 0.0
        self.best_scores = torch.full((batch, width), NEVER, device=device)
        shape = (batch, width, self.max_new_tokens)
        self.best = torch.full(shape, self.ending.pad_id, device=device)
        self.best_lengths = torch.zeros((batch, width), dtype=torch.long, device=device)
        self.is_filled = torch.zeros((batch, width), dtype=torch.bool, device=device)
        self.can_improve = torch.ones((batch, 1), dtype=torch.bool, device=device)
        self._has_ended = self.max_new_tokens == 0

    def ended(self) -> bool:
        """Whether no prompt's best can get better or, with `early_stopping`, all are found."""
        return self._has_ended

    def step(self) -> None:
        """Every beam one token longer. To be called in the mode `mode`."""
        self.logits = self._next_logits()
        totals, origin, token = self._candidates(self.logits)
        rows = (
            origin + self.beams.num_beams * torch.arange(len(origin), device=origin.device)[:, None]
        )
        longer = torch.cat((self.tokens[rows.flatten()], token.flatten()[:, None]), 1)
        ends = self._ends(longer, rows.flatten()).view_as(token)
        new = longer[:, self._n_prompt :].unflatten(0, token.shape)
        chosen = (totals + NEVER * ends).topk(self.beams.num_beams).indices
        self.n_new += 1
        self._keep_finished(totals, new, ends)
        self._go_on((totals + NEVER * ends).gather(1, chosen), new, rows, chosen)
        self._has_ended = self._is_over(ends)

    def _candidates(
        self, logits: Float[Tensor, "row d_vocab_out"]
    ) -> tuple[
        Float[Tensor, "batch candidate"],
        Int[Tensor, "batch candidate"],
        Int[Tensor, "batch candidate"],
    ]:
        """The likeliest ways on: scores, beams they continue, tokens.

        So many that `num_beams` are left to go on with when every EOS ends one of each beam.
        """
        log_probs = self.sampling.processed(
            logits.float().log_softmax(-1), self.tokens, self._token_mask(), self.n_new
        )
        d_vocab, width = logits.shape[-1], self.beams.num_beams
        totals = self.scores[..., None] + log_probs.unflatten(0, (-1, width))
        n_candidates = max(2, 1 + len(self.ending.eos_ids)) * width
        best = totals.flatten(1).topk(min(n_candidates, width * d_vocab))
        return best.values, best.indices // d_vocab, best.indices % d_vocab

    def _ends(
        self, longer: Int[Tensor, "row_candidate pos"], rows: Int[Tensor, " row_candidate"]
    ) -> Bool[Tensor, " row_candidate"]:
        """Which candidates are finished: by their ending, or because there is no room for more."""
        assert self.logits is not None
        if self.n_new + 1 >= self.max_new_tokens:
            return torch.ones(len(longer), dtype=torch.bool, device=longer.device)
        return self.ending.reached(self.model, longer, self.n_new + 1, self.logits[rows])

    def _keep_finished(
        self,
        totals: Float[Tensor, "batch candidate"],
        new: Int[Tensor, "batch candidate new"],
        ends: Bool[Tensor, "batch candidate"],
    ) -> None:
        """Of the finished so far and those that end now, the best `num_beams`.

        Only candidates that would be running beams count: the rest are there to fill their places.
        """
        width = self.beams.num_beams
        counts = ends.clone()
        counts[:, width:] = False
        is_open = self.can_improve
        if self.beams.early_stopping is True:
            is_open = is_open & ~self.is_filled.all(1, keepdim=True)
        scores = totals / self.n_new**self.beams.length_penalty
        scores = torch.where(counts & is_open, scores, scores + NEVER)
        new = nn.functional.pad(
            new, (0, self.max_new_tokens - self.n_new), value=self.ending.pad_id
        )
        lengths = torch.full_like(counts, self.n_new, dtype=torch.long)
        best = torch.cat((self.best_scores, scores), 1).topk(width)
        self.best_scores, kept = best.values, best.indices
        self.is_filled = torch.cat((self.is_filled, counts), 1).gather(1, kept)
        self.best_lengths = torch.cat((self.best_lengths, lengths), 1).gather(1, kept)
        self.best = torch.cat((self.best, new), 1).take_along_dim(kept[..., None], 1)

    def _go_on(
        self,
        scores: Float[Tensor, "batch beam"],
        new: Int[Tensor, "batch candidate new"],
        rows: Int[Tensor, "batch candidate"],
        chosen: Int[Tensor, "batch beam"],
    ) -> None:
        """The chosen candidates become the running beams, and the cache follows them."""
        self.scores = scores
        running = new.take_along_dim(chosen[..., None], 1).flatten(0, 1)
        self._ids[:, self._n_prompt : self._n_prompt + self.n_new] = running
        if self.cache is not None and self.n_new > 1:  # until then there is only the prompt
            follow(self.cache, rows.gather(1, chosen).flatten())

    def _is_over(self, ends: Bool[Tensor, "batch candidate"]) -> bool:
        """Whether to stop, once this step's finished ones are in.

        A running beam can at best keep its score. What length that is divided by is a guess:
        `early_stopping="never"` takes the one that flatters it most.
        """
        penalty, filled = self.beams.length_penalty, self.is_filled
        hopeful = self.beams.early_stopping == "never" and penalty > 0
        length = self.max_new_tokens if hopeful else self.n_new
        worst = self.best_scores.amin(1, keepdim=True)
        attainable = self.scores[:, :1] / length**penalty
        better = attainable > torch.where(filled, worst, NEVER)
        self.can_improve = self.can_improve & better.any(1, keepdim=True)
        enough = self.beams.early_stopping is True and bool(filled.all())
        return enough or bool(ends.all()) or not bool(self.can_improve.any())

    def result(self) -> tuple[Tensor, Int[Tensor, "row new"]]:
        """Prompts and the best `n` continuations of each, best first; shorter ones padded."""
        n = self.beams.n
        longest = int(self.best_lengths[:, :n].max())
        return repeated(self.prompt, n), self.best[:, :n, :longest].flatten(0, 1)

    @property
    def sequences_scores(self) -> Float[Tensor, " row"]:
        """The scores of the result's rows."""
        return self.best_scores[:, : self.beams.n].flatten()


def follow(cache: KeyValueCache, rows: Int[Tensor, " row"]) -> None:
    """What was added to the prompts moves so that row i holds what row `rows[i]` held.

    Beams stay with their prompt, so the prefix, which all beams of a prompt share, need not move.
    """
    for entry in cache.entries:
        for tail in entry.segments[-1]:
            tail.copy_(tail.index_select(0, rows))
