"""Which columns of a text are padding, for steps that add real tokens behind them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_lens_lite.watched import edits_of

FIRST_ROOM = 64


class Padding:
    """A mask, and what attention and positions make of it, with the columns of tokens to come.

    Those are no padding, so nothing of this is made anew from step to step: it is there already,
    and a step takes a longer part of it.

    Args:
        mask: [batch, pos] of 0 (padding) and 1.
    """

    def __init__(self, mask: Int[Tensor, "batch pos"]) -> None:
        self.stand_for(mask)
        self.latest = mask  # what was last given out, as long as the step that asked
        self._room = with_ones(mask, mask.shape[1] + FIRST_ROOM)
        self._n_padding = (1 - mask).sum(1)
        self._bias: Float[Tensor, "batch room"] | None = None

    def stand_for(self, mask: Int[Tensor, "batch pos"]) -> None:
        """Be that of this mask from now on: it came from `up_to`."""
        self._mask, self._n_edits = mask, edits_of(mask)

    def stands_for(self, mask: Int[Tensor, "batch pos"]) -> bool:
        """Whether this is that of this very mask, as it is now, and may be used in this mode."""
        mine = (self._room, self._n_padding, self._bias)
        made_in_inference = any(each is not None and each.is_inference() for each in mine)
        return (
            self._mask is mask
            and edits_of(mask) == self._n_edits
            and (torch.is_inference_mode_enabled() or not made_in_inference)
        )

    def up_to(self, n: int) -> Int[Tensor, "batch n"]:
        """The mask of the first n columns."""
        self.latest = self._room_for(n)[:, :n]
        return self.latest

    def _room_for(self, n: int) -> Int[Tensor, "batch room"]:
        room = self._room  # the same one to the end, whatever other threads do
        if room.shape[1] < n:
            room = self._room = with_ones(room, 2 * n)
        return room

    def lengths(self, n: int) -> Int[Tensor, " batch"]:
        """How many of the first n columns are real."""
        return n - self._n_padding

    def bias(self, n: int, dtype: torch.dtype) -> Float[Tensor, "batch 1 1 n"]:
        """What is added to the scores of the first n columns: -inf where they are padding."""
        bias = self._bias
        if bias is None or bias.shape[1] < n or bias.dtype != dtype:
            bias = self._bias = self._room_for(n).to(dtype).log()  # of 1 and 0
        return bias[:, None, None, :n]


def with_ones(mask: Int[Tensor, "batch pos"], n: int) -> Int[Tensor, "batch n"]:
    """The mask, and ones behind it up to n columns."""
    return torch.cat((mask, mask.new_ones(len(mask), n - mask.shape[1])), 1)
