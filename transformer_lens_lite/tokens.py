"""The tokenizer, the BOS rule and padding: everything between text and token ids.

There is one rule about BOS: `Tokens` adds it, or nobody does. The model works on a private copy of
the tokenizer that no longer adds BOS by itself, so a text starts with exactly one BOS
(`prepend_bos=True`) or with whatever it says (`prepend_bos=False`).
"""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

SIDES = ("left", "right")
END_OF_TEXT = "<|endoftext|>"
NO_TOKENIZER = (
    "text needs a tokenizer and this model has none: give one with "
    "HookedTransformer(cfg, tokenizer=...) or model.set_tokenizer(...), or pass token ids"
)

# --- facts about a tokenizer --------------------------------------------------------------------


def special_id(tokenizer: Any, name: str) -> int | None:
    """The id of a special token by its attribute name ("bos_token"), or None when it is not set."""
    # special_tokens_map, because reading an unset `tokenizer.bos_token` logs an error in
    # transformers 4.
    token = tokenizer.special_tokens_map.get(name)
    return None if token is None else tokenizer.convert_tokens_to_ids(token)


def own_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids this tokenizer puts in front of a text, and behind it, by itself."""
    full, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    if not bare:  # no token for "a" and no unk: what is left are the tokenizer's own
        return full, []
    ends = [(i, i + len(bare)) for i in range(len(full))]
    return next(((full[:i], full[j:]) for i, j in ends if full[i:j] == bare), ([], []))


# --- the private copy ---------------------------------------------------------------------------


def _fill_special_tokens(tokenizer: Any, prefix: list[int]) -> None:
    """Missing eos -> "<|endoftext|>" if there is one; missing pad -> eos; missing bos -> eos.

    A tokenizer that names no BOS but puts a token in front of every text has a BOS: that token.
    """
    named = tokenizer.special_tokens_map
    if "eos_token" not in named and END_OF_TEXT in tokenizer.get_vocab():
        tokenizer.eos_token = END_OF_TEXT
    if "bos_token" not in named and prefix:
        tokenizer.bos_token = tokenizer.convert_ids_to_tokens(prefix[0])
    named = tokenizer.special_tokens_map
    for name in ("bos_token", "pad_token"):
        if name not in named and "eos_token" in named:
            setattr(tokenizer, name, named["eos_token"])


def _switch_off_bos(tokenizer: Any, bos_id: int) -> None:
    """Stop a tokenizer from adding BOS, keeping whatever else it adds (an EOS, say)."""
    # Through __dict__: assigning `tokenizer.add_bos_token` rebuilds the post-processor from two
    # flags and would drop everything the flags do not know about.
    for flag in ("add_bos_token", "_add_bos_token"):
        if flag in vars(tokenizer):
            vars(tokenizer)[flag] = False
    without_bos = {"bos": "none", "bos_eos": "eos"}  # tokenizers without a fast backend
    pattern = getattr(tokenizer, "special_tokens_pattern", None)
    if pattern in without_bos:
        tokenizer.special_tokens_pattern = without_bos[pattern]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and backend.post_processor is not None:
        spec = json.loads(backend.post_processor.__getstate__())
        backend.post_processor = _post_processor(_template_without(spec, bos_id))


def _template_without(spec: dict[str, Any], token_id: int) -> dict[str, Any]:
    """A post-processor's JSON with one special token taken out of its templates."""
    if spec["type"] == "Sequence":
        return spec | {"processors": [_template_without(s, token_id) for s in spec["processors"]]}
    if spec["type"] != "TemplateProcessing":
        return spec
    names = {n for n, token in spec["special_tokens"].items() if token["ids"] == [token_id]}
    kept = {
        side: [p for p in spec[side] if p.get("SpecialToken", {}).get("id") not in names]
        for side in ("single", "pair")
    }
    return spec | kept


def _post_processor(spec: dict[str, Any]) -> Any:
    """A `tokenizers` post-processor from its JSON, read back as part of an empty tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    empty = json.loads(Tokenizer(BPE()).to_str())
    return Tokenizer.from_str(json.dumps(empty | {"post_processor": spec})).post_processor


# --- text, ids and their checks -----------------------------------------------------------------


def as_texts(input: object) -> list[str]:
    """A list of texts from a text or a list of texts.

    Raises TypeError for anything that is not text, naming its type, and ValueError for no texts.
    """
    if isinstance(input, str):
        return [input]
    if not isinstance(input, (list, tuple)):
        raise TypeError(f"expected a str or a list of str, got {type(input).__name__}")
    for i, text in enumerate(input):
        if not isinstance(text, str):
            raise TypeError(f"expected a list of str, but entry {i} is a {type(text).__name__}")
    if not input:
        raise ValueError("the list of texts is empty")
    return list(input)


def is_text(input: object) -> bool:
    """Whether an input is a text or a list of texts (rather than token ids)."""
    return isinstance(input, str) or (
        isinstance(input, (list, tuple)) and any(isinstance(entry, str) for entry in input)
    )


def is_chat(input: object) -> bool:
    """Whether an input is a list of messages, or a list with such a list in it."""
    return isinstance(input, (list, tuple)) and any(
        isinstance(entry, Mapping) or is_chat(entry) for entry in input
    )


def as_chats(input: Sequence[Any]) -> list[Sequence[Any]]:
    """A list of chats from one chat, a list of messages, or several.

    Raises ValueError unless every message is a dict with a "role" and a "content".
    """
    chats = list(input) if any(is_chat(entry) for entry in input) else [input]
    for i, chat in enumerate(chats):
        if not isinstance(chat, (list, tuple)) or not chat:
            raise ValueError(f"chat {i} must be a list of messages, got {chat!r}")
        for message in chat:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise ValueError(
                    f'a message must be a dict with "role" and "content", got {message!r}'
                )
    return chats


def _plain(tokens: Any) -> Any:
    """Tensors and arrays, and lists of them, as Python numbers and lists."""
    if isinstance(tokens, (list, tuple)):
        return [_plain(entry) for entry in tokens]
    return tokens.tolist() if hasattr(tokens, "tolist") else tokens


def as_ids(tokens: Any) -> list[int]:
    """One sequence of ids, from an int, a list, or a tensor or array of [pos] or [1, pos].

    Raises ValueError for more than one row and TypeError for anything but integers.
    """
    # Through Python's own: torch warns about read-only arrays and does not know all of numpy.
    ids = torch.as_tensor(_plain(tokens))
    if ids.numel() == 0:
        return []
    if ids.dtype != torch.long:
        raise TypeError(f"token ids must be integers, got {ids.dtype}")
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim > 1:
        raise ValueError(f"expected one sequence of tokens, got shape {tuple(ids.shape)}")
    return ids.reshape(-1).tolist()


def check_side(padding_side: str) -> str:
    """The padding side itself; ValueError unless it is "left" or "right"."""
    if padding_side not in SIDES:
        raise ValueError(f"padding_side must be 'left' or 'right', got {padding_side!r}")
    return padding_side


def _number_of_dims(tokens: Any) -> int:
    """Dimensions of a tensor or array, or of a list of ints, 0-d tensors, lists, tensors."""
    if isinstance(tokens, (list, tuple)):
        return 1 + max((_number_of_dims(entry) for entry in tokens), default=0)
    return getattr(tokens, "ndim", 0)


# --- masks and BOS of tokens that somebody else padded --------------------------------------------


def get_attention_mask(
    tokenizer: Any,
    tokens: Int[Tensor, "*batch pos"],
    prepend_bos: bool,
    padding_side: str | None = None,
) -> Int[Tensor, "*batch pos"]:
    """1 for tokens and 0 for padding, guessed from ids: the outer run of pads on the padding side.

    Where pad and BOS are one id, as in GPT-2, `prepend_bos` says that a row starts with BOS, so
    the pad next to the text is it, and stays visible. A right-padded row that ends in EOS loses it
    when EOS is the pad as well: only the lengths could tell, and `encode_batch` knows them.
    Raises ValueError for a padding side other than "left" and "right".
    """
    side = check_side(padding_side or tokenizer.padding_side)
    pad_id = special_id(tokenizer, "pad_token")
    if pad_id is None:
        return torch.ones_like(tokens, dtype=torch.long)
    pads = tokens == pad_id
    run = pads.cumprod(-1) if side == "left" else pads.flip(-1).cumprod(-1).flip(-1)
    if prepend_bos and pad_id == special_id(tokenizer, "bos_token"):
        bos_slot = run.sum(-1, keepdim=True) - 1 if side == "left" else 0
        run = run * (torch.arange(tokens.shape[-1], device=tokens.device) != bos_slot)
    return 1 - run


def get_tokens_with_bos_removed(
    tokenizer: Any, tokens: Int[Tensor, "*batch pos"], padding_side: str | None = None
) -> Int[Tensor, "*batch pos-1"]:
    """The tokens without the BOS each row starts with; padding stays.

    Raises ValueError when a row does not start with BOS: rows could no longer be of one length.
    """
    mask = get_attention_mask(tokenizer, tokens, prepend_bos=True, padding_side=padding_side)
    first = mask.argmax(-1, keepdim=True)
    bos_id = special_id(tokenizer, "bos_token")
    if bos_id is None or not bool((tokens.gather(-1, first) == bos_id).all()):
        raise ValueError("not every row starts with BOS, so there is none to remove")
    stays = torch.arange(tokens.shape[-1], device=tokens.device) != first
    return tokens[stays].reshape(*tokens.shape[:-1], tokens.shape[-1] - 1)


def get_input_with_manually_prepended_bos(
    tokenizer: Any, input: str | Sequence[str]
) -> str | list[str]:
    """The text, or each text of a list, with the tokenizer's BOS written in front.

    Raises ValueError when the tokenizer has no BOS.
    """
    bos = tokenizer.special_tokens_map.get("bos_token")
    if bos is None:
        raise ValueError("the tokenizer has no BOS token to prepend")
    return bos + input if isinstance(input, str) else [bos + text for text in input]


# --- the class the model delegates to -----------------------------------------------------------


class Tokens:
    """What a model knows about text: its tokenizer, the BOS rule, padding and truncation.

    `tokenizer` is a private copy, on which missing special tokens are filled in, the padding side
    is set and adding BOS is switched off; what was passed in (`original`) is never touched. The
    special tokens and `tokenizer.padding_side` are read at every call, so a user may set them, and
    so are `default_prepend_bos` and `n_ctx`.

    Raises TypeError when `tokenizer` is not a transformers tokenizer, and ValueError for a padding
    side other than "left" and "right".
    """

    def __init__(
        self,
        tokenizer: Any = None,
        default_prepend_bos: bool = True,
        padding_side: str | None = None,
        n_ctx: int | None = None,
    ) -> None:
        self.original = tokenizer
        self.tokenizer: Any = None
        self.default_prepend_bos = default_prepend_bos
        self.n_ctx = n_ctx
        self.n_ids: int | None = None  # of the model, which may have more than the tokenizer
        self.tokenizer_prepends_bos = False
        self._suffix: list[int] = []  # what the tokenizer puts behind a text: [SEP], or EOS
        self._stubborn = 0  # BOS tokens the copy still adds although they were switched off
        if padding_side is not None:
            check_side(padding_side)
        if tokenizer is not None:
            self._adopt(tokenizer, padding_side)

    def _adopt(self, tokenizer: Any, padding_side: str | None) -> None:
        from transformers import PreTrainedTokenizerBase

        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(
                f"tokenizer must be a transformers tokenizer (PreTrainedTokenizerBase), "
                f"got {type(tokenizer).__name__}"
            )
        # Copied before anything is asked of it: even encoding changes a fast tokenizer's settings.
        self.tokenizer = copy.deepcopy(tokenizer)
        self.tokenizer.padding_side = padding_side or self.tokenizer.padding_side or "right"
        prefix, self._suffix = own_tokens(self.tokenizer)
        _fill_special_tokens(self.tokenizer, prefix)
        self.tokenizer_prepends_bos = self._copy_prepends_bos()
        if self.tokenizer_prepends_bos and self.bos_token_id is not None:
            _switch_off_bos(self.tokenizer, self.bos_token_id)
            self._stubborn = int(self._copy_prepends_bos())

    def _copy_prepends_bos(self) -> bool:
        return own_tokens(self.tokenizer)[0][:1] == [self.bos_token_id]

    def _needed(self) -> Any:
        if self.tokenizer is None:
            raise ValueError(NO_TOKENIZER)
        return self.tokenizer

    def _id(self, name: str) -> int | None:
        return None if self.tokenizer is None else special_id(self.tokenizer, name)

    # -- facts --

    @property
    def bos_token_id(self) -> int | None:
        """The id of BOS; None without one."""
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of EOS; None without one."""
        return self._id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id that padding uses; None without one."""
        return self._id("pad_token")

    @property
    def d_vocab(self) -> int:
        """How many rows an embedding needs: the largest id plus one.

        Raises ValueError without a tokenizer.
        """
        return max(self._needed().get_vocab().values()) + 1

    def side(self, padding_side: str | None = None) -> str:
        """The padding side in force: the argument, else the tokenizer's, else "right"."""
        return check_side(padding_side or getattr(self.tokenizer, "padding_side", None) or "right")

    def prepends(self, prepend_bos: bool | None = None) -> bool:
        """Whether the rule puts BOS in front of a text: the argument, else the default.

        Raises ValueError when BOS is asked for and the tokenizer has none; as a mere default it is
        left out then.
        """
        has_bos = self.bos_token_id is not None
        if prepend_bos and not has_bos:
            raise ValueError("prepend_bos=True, but the tokenizer has no BOS token")
        return has_bos and (self.default_prepend_bos if prepend_bos is None else prepend_bos)

    # -- text to ids --

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        truncate: bool = True,
    ) -> Int[Tensor, "batch pos"]:
        """Token ids of a text or a list of texts, always with a batch dimension.

        Truncation to `n_ctx` keeps the beginning, BOS included, and the token that the tokenizer
        itself puts at the end, if it does. Raises as `encode_batch` does.
        """
        return self.encode_batch(input, prepend_bos, padding_side, truncate)[0]

    def encode_batch(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        truncate: bool = True,
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """Token ids and their attention mask: 1 for the text's own tokens, 0 for padding put here.

        The mask comes from the lengths, so a BOS or EOS that shares its id with the pad is kept.
        Raises TypeError for input that is not text, and ValueError for an empty list, for texts
        that give no token at all, for texts of different lengths without a pad token, for
        `prepend_bos=True` without a BOS token, and without a tokenizer.
        """
        rows = self._rows(as_texts(input), prepend_bos)
        if truncate:
            rows = [self._cut(row) for row in rows]
        return self._pad(rows, self.side(padding_side))

    def encode_chats(
        self,
        input: Sequence[Any],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """Token ids and mask of a chat, a list of messages, or of several, up to where the
        assistant's next message begins.

        The chat template says everything, BOS included; `prepend_bos=True` adds one only where the
        template has none. Raises ValueError for what is no chat, and for a tokenizer without a
        chat template.
        """
        tokenizer, chats = self._needed(), as_chats(input)
        texts = [self._by_template(chat, add_generation_prompt=True) for chat in chats]
        rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        if prepend_bos and self.prepends(prepend_bos):
            bos = self.bos_token_id
            rows = [row if row[:1] == [bos] else [bos, *row] for row in rows]
        return self._pad(rows, self.side(padding_side))

    def encode_conversation(
        self, messages: Sequence[Any]
    ) -> tuple[str, Int[Tensor, "1 pos"], list[tuple[int, int]]]:
        """A conversation as the chat template writes it, its ids, and which characters each is of.

        Raises ValueError for what is no chat, for a tokenizer without a chat template, and for one
        that does not say where in the text its tokens are.
        """
        tokenizer = self._needed()
        (chat,) = as_chats(messages)
        text = self._by_template(chat)
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} does not say where its tokens are")
        made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return text, torch.tensor([made["input_ids"]]), made["offset_mapping"]

    def _by_template(self, chat: Sequence[Any], **how: Any) -> str:
        """The text a chat is for the model. ValueError for a tokenizer without a chat template."""
        tokenizer = self._needed()
        if not tokenizer.chat_template:
            name = tokenizer.name_or_path or type(tokenizer).__name__
            raise ValueError(
                f"messages need a chat template and the tokenizer {name!r} has none: set "
                "model.tokenizer.chat_template, or pass a text"
            )
        text: str = tokenizer.apply_chat_template(list(chat), tokenize=False, **how)
        return text

    def _rows(self, texts: list[str], prepend_bos: bool | None) -> list[list[int]]:
        """Ids of each text, with one BOS in front where the rule says so."""
        tokenizer = self._needed()
        rows = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        rows = [list(row[self._stubborn :]) for row in rows]
        if self.prepends(prepend_bos):
            bos = self.bos_token_id
            # A text from a chat template may have its BOS written out already.
            rows = [row if row[:1] == [bos] else [bos, *row] for row in rows]
        return rows

    def _pad(
        self, rows: list[list[int]], side: str
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        lengths = [len(row) for row in rows]
        width = max(lengths)
        if width == 0:
            raise ValueError("the text gives no tokens: it is empty and no BOS is prepended to it")
        pad_id = self.pad_token_id
        if min(lengths) < width and pad_id is None:
            raise ValueError(
                "texts of different lengths need a pad token and the tokenizer has none: set "
                "model.tokenizer.pad_token to one of its tokens"
            )
        tokens = torch.full((len(rows), width), 0 if pad_id is None else pad_id)
        mask = torch.zeros_like(tokens)
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            here = slice(width - length, width) if side == "left" else slice(0, length)
            tokens[i, here] = torch.tensor(row, dtype=torch.long)
            mask[i, here] = 1
        return tokens, mask

    def attention_mask(
        self,
        tokens: Int[Tensor, "*batch pos"],
        padding_side: str | None = None,
        prepend_bos: bool | None = None,
    ) -> Int[Tensor, "*batch pos"]:
        """The mask of tokens that were padded elsewhere; see `get_attention_mask`.

        All ones without a tokenizer, where nothing says what a pad is.
        """
        side = self.side(padding_side)
        if self.tokenizer is None:
            return torch.ones_like(tokens, dtype=torch.long)
        starts_with_bos = self.default_prepend_bos if prepend_bos is None else prepend_bos
        return get_attention_mask(self.tokenizer, tokens, starts_with_bos, side)

    # -- ids to text --

    def to_string(self, tokens: Any, skip_special_tokens: bool = False) -> str | list[str]:
        """The text of tokens (int, list, tensor or array); a list of texts for more than one row.

        Raises ValueError without a tokenizer, for more than two dimensions or for an id the model
        does not have, and TypeError for anything but integers.
        """
        if _number_of_dims(tokens) > 1:
            return [self._decode(as_ids(row), skip_special_tokens) for row in tokens]
        return self._decode(as_ids(tokens), skip_special_tokens)

    def _decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        n_ids = math.inf if self.n_ids is None else self.n_ids
        if strange := [i for i in ids if not 0 <= i < n_ids]:
            raise ValueError(f"token id {strange[0]} is not one of the model's {n_ids}")
        return self._needed().decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def to_str_tokens(
        self,
        input: Any,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> list[str] | list[list[str]]:
        """What each token contributes to the text, as strings; a list of them for a list of texts.

        Joined, they are `to_string` of the tokens, spaces included, except that each part of a
        character that several tokens share reads "\N{REPLACEMENT CHARACTER}". `padding_side` is
        accepted for compatibility: nothing is padded here. Raises ValueError for more than one
        row of tokens and without a tokenizer, and TypeError for what is neither text nor tokens.
        """
        if isinstance(input, str):
            return self._pieces(self._truncated(input, prepend_bos))
        if is_text(input):
            return [self._pieces(self._truncated(t, prepend_bos)) for t in as_texts(input)]
        return self._pieces(as_ids(input))

    def _truncated(self, text: str, prepend_bos: bool | None) -> list[int]:
        return self._cut(self._rows([text], prepend_bos)[0])

    def _cut(self, row: list[int]) -> list[int]:
        if self.n_ctx is None or len(row) <= self.n_ctx:
            return row
        kept = row[: max(0, self.n_ctx - len(self._suffix))]
        return (kept + self._suffix)[: self.n_ctx]

    def _pieces(self, ids: list[int]) -> list[str]:
        inner = {token: self._piece_after_text(token) for token in dict.fromkeys(ids[1:])}
        return [self._decode(ids[:1]), *(inner[i] for i in ids[1:])] if ids else []

    def _piece_after_text(self, token: int) -> str:
        """A token's text when something comes before it.

        A decoder may drop the space of a word that comes first. Decoding the token after itself
        shows what it adds elsewhere, without knowing which decoder it is.
        """
        alone, twice = self._decode([token]), self._decode([token, token])
        return twice[len(alone) :] if twice.startswith(alone) else alone

    # -- single tokens --

    def _bare(self, text: str) -> list[int]:
        """The ids of a text alone, without anything the tokenizer adds around it."""
        return self._needed().encode(text, add_special_tokens=False)

    def to_single_token(self, string: str) -> int:
        """The id of a text that is one token. Raises AssertionError when it is not.

        " word" finds the token of a word in the middle of a text under every tokenizer, those
        that put a space in front of the text by themselves included.
        """
        if not isinstance(string, str):
            raise TypeError(f"a single token is named by its text, got {string!r}")
        ids = self._bare(string)
        if len(ids) == 1:
            return ids[0]
        if string.startswith(" "):
            ids = self._bare(string[1:])
            if len(ids) == 1 and self._piece_after_text(ids[0]) == string:
                return ids[0]
        pieces = [self._decode([each]) for each in self._bare(string)]
        raise AssertionError(f"Input string: {string} is not a single token! It is {pieces}")

    def to_single_str_token(self, int_token: Any) -> str:
        """The text of one token id. Raises ValueError for several, TypeError for no integer."""
        ids = as_ids(int_token)
        if len(ids) != 1:
            raise ValueError(f"expected one token, got {len(ids)}")
        return self._decode(ids)

    def get_token_position(
        self,
        single_token: Any,
        input: Any,
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Where a token (text, id or tensor) occurs "first" or "last" in a text or in tokens.

        Raises AssertionError when it does not occur, ValueError for another mode or more than one
        row of tokens.
        """
        if mode not in ("first", "last"):
            raise ValueError(f"mode must be 'first' or 'last', got {mode!r}")
        ids = self._truncated(input, prepend_bos) if isinstance(input, str) else as_ids(input)
        is_str = isinstance(single_token, str)
        token = self.to_single_token(single_token) if is_str else as_ids(single_token)[0]
        places = [i for i, other in enumerate(ids) if other == token]
        if not places:
            raise AssertionError("The token does not occur in the prompt")
        return places[0 if mode == "first" else -1]
