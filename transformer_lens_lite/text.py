"""A model's methods about text. The work is done by `Tokens`."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_lens_lite.nearest import names_the_nearest
from transformer_lens_lite.tokens import Tokens
from transformer_lens_lite.weights import StackedWeights


class TextMethods(StackedWeights):
    """Between text and token ids, by the model's tokenizer and its rule about BOS."""

    text: Tokens

    @property
    def tokenizer(self) -> Any:
        """The model's own copy of its tokenizer, which adds no BOS by itself; None without one."""
        return self.text.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self.set_tokenizer(tokenizer)

    def set_tokenizer(self, tokenizer: Any, default_padding_side: str | None = None) -> None:
        """Use a (copy of a) transformers tokenizer. TypeError for anything else but None."""
        cfg = self.cfg
        self.text = Tokens(tokenizer, cfg.default_prepend_bos, default_padding_side, cfg.n_ctx)
        if tokenizer is not None:
            cfg.tokenizer_prepends_bos = self.text.tokenizer_prepends_bos
            cfg.tokenizer_name = cfg.tokenizer_name or getattr(tokenizer, "name_or_path", None)

    @names_the_nearest
    def to_tokens(
        self,
        input: str | list[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Int[Tensor, "batch pos"]:
        """Token ids of one text or several: exactly one BOS, or none of ours.

        Raises ValueError without a tokenizer, TypeError for what is not text.
        """
        tokens = self._text().to_tokens(input, prepend_bos, padding_side, truncate)
        return tokens.to(self.a_weight.device) if move_to_device else tokens  # type: ignore[arg-type]

    def to_string(self, tokens: Any) -> str | list[str]:
        """The text of token ids; a list of texts for 2-D input. ValueError for an id the model
        does not have."""
        return self._text().to_string(tokens)

    def to_str_tokens(
        self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None
    ) -> list[str] | list[list[str]]:
        """The text of each token of a text, or of token ids [pos]; a list of lists for several
        texts."""
        return self._text().to_str_tokens(input, prepend_bos, padding_side)

    def to_single_token(self, string: str) -> int:
        """The id of a text that is one token. AssertionError when it is not."""
        return self.text.to_single_token(string)

    def to_single_str_token(self, int_token: int) -> str:
        """The text of one token id."""
        return self._text().to_single_str_token(int_token)

    def get_token_position(
        self,
        single_token: Any,
        input: Any,
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Where a token occurs "first" or "last" in a text or in tokens. AssertionError when it
        doesn't."""
        return self._text().get_token_position(single_token, input, mode, prepend_bos, padding_side)

    def tokens_to_residual_directions(self, tokens: Any) -> Float[Tensor, "*batch d_model"]:
        """Columns of W_U: what the final residual stream is dotted with to give these tokens'
        logits.

        `tokens` is a single-token text, an int, or a tensor [], [pos] or [batch, pos].
        """
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        ids = torch.as_tensor(tokens, device=self.W_U.device)
        directions = self.W_U.T[ids]
        return directions[0] if ids.ndim == 1 and ids.numel() == 1 else directions

    def _text(self) -> Tokens:
        """The rule about BOS, n_ctx and the vocabulary as the config has them now: they may be
        assigned at run time."""
        self.text.default_prepend_bos = self.cfg.default_prepend_bos
        self.text.n_ctx = self.cfg.n_ctx
        self.text.n_ids = max(self.cfg.d_vocab, self.cfg.d_vocab_out)
        return self.text
