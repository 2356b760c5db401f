"""Chunks of a generation as they come: ids, or their text."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from transformer_lens_lite.decoding import Generation

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder shows for a part of a character


def streamed(
    generation: Generation, at_least: int, as_text: bool, single: bool = False
) -> Iterator[Any]:
    """Chunks of at least so many tokens; the last one may be shorter.

    `single`: text as a str and not as a list of one.
    """
    text = TextChunks(generation.model, single)
    form = text if as_text else lambda chunk: chunk
    pending = [generation.tokens] if generation.tokens.shape[1] else []
    for tokens in generation:
        pending.append(tokens[:, None])
        if sum(part.shape[1] for part in pending) >= at_least:
            yield form(torch.cat(pending, 1))
            pending = []
    if pending:
        yield form(torch.cat(pending, 1))
    if any(text.held_back):
        yield text.rest()


class TextChunks:
    """Chunks of ids as text: what each adds to the text so far, spaces included.

    What later tokens may still change is held back. That is a character of which bytes are missing
    and, where bytes are tokens of their own ("<0xE2>", byte fallback), every byte at the end: such
    decoders turn a whole run of them into replacement characters when one is wrong.
    """

    def __init__(self, model: Any, single: bool = False) -> None:
        self.text = model.text
        self.single = single
        self.tokens: Tensor | None = None
        self.sent: list[str] = []
        self.held_back: list[str] = []
        self._bytes = byte_tokens(model.tokenizer)

    def __call__(self, chunk: Int[Tensor, "row pos"]) -> str | list[str]:
        self.tokens = chunk if self.tokens is None else torch.cat((self.tokens, chunk), 1)
        whole = self.text.to_string(self.tokens, skip_special_tokens=True)
        sent = self.sent or [""] * len(whole)
        self.sent = [
            self._final_part(row, text) for row, text in zip(self.tokens, whole, strict=True)
        ]
        self.held_back = [text[len(kept) :] for text, kept in zip(whole, self.sent, strict=True)]
        new = [text[len(before) :] for text, before in zip(self.sent, sent, strict=True)]
        return new[0] if self.single else new

    def _final_part(self, row: Int[Tensor, " pos"], text: str) -> str:
        """The beginning of a row's text that stays whatever comes."""
        if self._bytes:
            special = set(self.text.tokenizer.all_special_ids)  # not in the text, nor in the way
            ids = [token for token in row.tolist() if token not in special]
            backwards = enumerate(reversed(ids))
            n_bytes = next((n for n, token in backwards if token not in self._bytes), len(ids))
            text = self.text.to_string(ids[: len(ids) - n_bytes]) if n_bytes else text
        return text.rstrip(UNFINISHED)

    def rest(self) -> str | list[str]:
        """What is still held back at the end."""
        return self.held_back[0] if self.single else self.held_back


def byte_tokens(tokenizer: Any) -> frozenset[int]:
    """The ids that stand for one byte each in a tokenizer with byte fallback; none in others."""
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    return frozenset(i for token, i in vocabulary.items() if re.fullmatch("<0x[0-9A-F]{2}>", token))
