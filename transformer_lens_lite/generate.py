"""Continuing a prompt: prefill, then one token at a time.

`Generation` holds what changes between steps and is an iterator over new tokens; `generate` and
`generate_stream` are two ways to consume it.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_lens_lite.config import names_the_nearest
from transformer_lens_lite.kv_cache import KeyValueCache
from transformer_lens_lite.sampling import Number, check_sampling, next_tokens
from transformer_lens_lite.tokens import is_text

RETURN_TYPES = ("input", "str", "tokens", "embeds")


@dataclass
class GenerateOutput:
    """What `output_logits=True` returns."""

    sequences: Tensor  # [batch, pos], as without it
    logits: tuple[Tensor, ...]  # one [batch, d_vocab_out] per new token, before any warping


@dataclass(frozen=True)
class Ending:
    """When a row is finished, and what fills it up afterwards."""

    eos_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    pad_id: int

    def reached(
        self, model: Any, newest: Int[Tensor, " batch"], generated: Int[Tensor, "batch new"]
    ) -> Bool[Tensor, " batch"]:
        """Which rows end with their newest token."""
        ended = torch.zeros_like(newest, dtype=torch.bool)
        for eos in self.eos_ids:
            ended |= newest == eos
        if self.stop_strings:
            # a token is at least one character, so an occurrence that ends now starts within this
            # tail
            tail = max(len(stop.encode()) for stop in self.stop_strings) + 1
            texts = [text_after_text(model, row) for row in generated[:, -tail:]]
            found = [any(stop in text for stop in self.stop_strings) for text in texts]
            ended |= torch.tensor(found, device=newest.device)
        return ended


def text_after_text(model: Any, ids: Int[Tensor, " pos"]) -> str:
    """What ids add to a text before them: alone, a decoder may drop the space of the first word."""
    before, both = model.to_string(ids[:1]), model.to_string(torch.cat((ids[:1], ids)))
    return both[len(before) :] if both.startswith(before) else model.to_string(ids)


class Generation:
    """One generation in progress. Iterating yields new tokens, [batch] at a time, until all rows
    end.

    The prompt is ids or embeddings; `cache` is None when every step runs the whole sequence anew.
    """

    def __init__(
        self,
        model: Any,
        prompt: Tensor,
        mask: Int[Tensor, "batch key_pos"] | None,
        cache: KeyValueCache | None,
        max_new_tokens: int,
        ending: Ending,
        sampling: dict[str, Any],
        own_cache: bool,
    ) -> None:
        self.model = model
        self.prompt = prompt
        self.mask = mask
        self.cache = cache
        self.max_new_tokens = max_new_tokens
        self.ending = ending
        self.sampling = sampling
        self.logits: Float[Tensor, "batch d_vocab_out"] | None = None  # of the latest step
        self.can_end = bool(ending.eos_ids or ending.stop_strings)
        # inference mode is faster, but its tensors cannot enter autograd: only where nobody gets
        # one
        keeps_to_itself = own_cache and not model.is_listened()
        self.mode = torch.inference_mode if keeps_to_itself else torch.no_grad
        batch = prompt.shape[0]
        self.finished = torch.zeros(batch, dtype=torch.bool, device=prompt.device)
        self._buffer = torch.empty(batch, max_new_tokens, dtype=torch.long, device=prompt.device)
        self._n_new = 0

    @property
    def generated(self) -> Int[Tensor, "batch new"]:
        """The new tokens so far."""
        return self._buffer[:, : self._n_new]

    def __iter__(self) -> Iterator[Int[Tensor, " batch"]]:
        while not self.ended():
            with self.mode():
                self.step()
            yield self._buffer[:, self._n_new - 1]

    def ended(self) -> bool:
        """Whether there is nothing left to do."""
        full = self._n_new >= self.max_new_tokens
        return full or (self.can_end and bool(self.finished.all()))

    def step(self) -> None:
        """One more token for every row. To be called in the mode `mode`."""
        self.logits = self._next_logits()
        self._append(self._picked(self.logits))

    def _next_logits(self) -> Float[Tensor, "batch d_vocab_out"]:
        """Logits for the next position: of the prompt first, of the newest token from then on."""
        if self.cache is not None and self._n_new:
            newest = self._buffer[:, self._n_new - 1 : self._n_new]
            return self.model.next_logits(newest, past_kv_cache=self.cache)
        return self.model.next_logits(
            self._whole_input(), attention_mask=self._whole_mask(), past_kv_cache=self.cache
        )

    def _whole_input(self) -> Tensor:
        if self.prompt.is_floating_point():
            new = self.model.embed(self.generated) if self._n_new else self.prompt[:, :0]
            return torch.cat((self.prompt, new), 1)
        return torch.cat((self.prompt, self.generated), 1)

    def _whole_mask(self) -> Int[Tensor, "batch key_pos"] | None:
        if self.mask is None:
            return None
        return torch.cat((self.mask, torch.ones_like(self.generated)), 1)

    def _picked(self, logits: Float[Tensor, "batch d_vocab_out"]) -> Int[Tensor, " batch"]:
        """The next token of each row; rows that have ended get padding."""
        tokens = next_tokens(logits, **self.sampling, **self._seen())
        return tokens.masked_fill(self.finished, self.ending.pad_id) if self.can_end else tokens

    def _append(self, tokens: Int[Tensor, " batch"]) -> None:
        self._buffer[:, self._n_new] = tokens
        self._n_new += 1
        if self.can_end:
            self.finished = self.finished | self.ending.reached(self.model, tokens, self.generated)

    def _seen(self) -> dict[str, Any]:
        """What the penalties count: prompt and new tokens, padding excepted."""
        penalised = (
            self.sampling["freq_penalty"] != 0.0 or self.sampling["repetition_penalty"] != 1.0
        )
        if not penalised:
            return {}
        mask = self._whole_mask()
        tokens = self._whole_input()
        return {"tokens": tokens, "mask": None if mask is None else mask[:, -tokens.shape[1] :]}


# --- from arguments to a generation ---------------------------------------------------------------


@names_the_nearest
def start_generation(
    model: Any,
    input: Any,
    *,
    max_new_tokens: int = 10,
    stop_at_eos: bool = True,
    eos_token_id: int | Sequence[int] | None = None,
    do_sample: bool = True,
    top_k: int | None = None,
    top_p: Number | None = None,
    temperature: Number = 1.0,
    freq_penalty: Number = 0.0,
    use_past_kv_cache: bool = True,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,  # accepted as classic callers pass it; prompts are padded left
    past_kv_cache: KeyValueCache | None = None,
    attention_mask: Int[Tensor, "batch key_pos"] | None = None,
    min_p: Number | None = None,
    repetition_penalty: Number = 1.0,
    stop: str | Sequence[str] | None = None,
    pad_token_id: int | None = None,
    generator: torch.Generator | None = None,
    verbose: bool | None = None,
) -> Generation:
    """Check every argument before anything is run, and set the generation up."""
    if not model.is_causal:
        raise ValueError(
            "generation with attention_dir='bidirectional': such a model says what stands at a "
            "place from both sides of it, not what comes next"
        )
    if (
        isinstance(max_new_tokens, bool)
        or not isinstance(max_new_tokens, int)
        or max_new_tokens < 0
    ):
        raise ValueError(f"max_new_tokens must be an integer of at least 0, got {max_new_tokens!r}")
    warping: dict[str, Any] = {
        "top_k": top_k,
        "top_p": top_p,
        "temperature": temperature,
        "freq_penalty": freq_penalty,
        "repetition_penalty": repetition_penalty,
        "min_p": min_p,
    }
    check_sampling(**warping)
    sampling = {**warping, "do_sample": do_sample, "generator": generator}
    prompt, mask = prompt_and_mask(model, input, prepend_bos, attention_mask, past_kv_cache)
    if prompt.is_floating_point() and (freq_penalty != 0.0 or repetition_penalty != 1.0):
        raise ValueError(
            "freq_penalty and repetition_penalty count tokens; the prompt is embeddings"
        )
    if past_kv_cache is not None and not use_past_kv_cache:
        raise ValueError("past_kv_cache was given together with use_past_kv_cache=False")
    batch, length = prompt.shape[:2]
    if length == 0:
        raise ValueError("the prompt is empty; generation needs at least one token to start from")
    check_fits(model, prompt, mask, max_new_tokens, past_kv_cache)
    ending = ending_of(model, stop_at_eos, eos_token_id, stop, pad_token_id)
    room = length + max_new_tokens
    cache = None
    if use_past_kv_cache:
        cache = continued_cache(model, past_kv_cache, batch, room, prompt.device)
    own_cache = cache is None or cache is not past_kv_cache
    return Generation(model, prompt, mask, cache, max_new_tokens, ending, sampling, own_cache)


def prompt_and_mask(
    model: Any,
    input: Any,
    prepend_bos: bool | None,
    attention_mask: Tensor | None,
    cache: KeyValueCache | None,
) -> tuple[Tensor, Tensor | None]:
    """The prompt as ids [batch, pos] or embeddings [batch, pos, d_model], and its mask.

    Several texts are padded on the left whatever the default, since generation continues from the
    last column. Raises ValueError when a row ends in padding.
    """
    if isinstance(input, Tensor) and input.is_floating_point():
        if input.ndim != 3 or input.shape[-1] != model.cfg.d_model:
            raise ValueError(
                f"the prompt must be token ids, which are integers, or embeddings [batch, pos, "
                f"{model.cfg.d_model}]; got {input.dtype} of shape {list(input.shape)}"
            )
        return input, attention_mask
    side = "left" if is_text(input) else None
    return model._tokens_and_mask(input, prepend_bos, side, attention_mask, cache)


def check_fits(
    model: Any, prompt: Tensor, mask: Tensor | None, new: int, cache: KeyValueCache | None
) -> None:
    """ValueError when mask or cache do not fit the prompt, or the last token fed would not fit
    them."""
    batch, length = prompt.shape[:2]
    fed = length + max(new - 1, 0)  # the last token is never fed
    past = model._past_length(cache, range(model.cfg.n_layers), batch, fed)
    joined = model._joined_mask(mask, batch, length, past, cache)
    if joined is not None and not bool(joined[:, -1].all()):
        rows = (joined[:, -1] == 0).nonzero().flatten().tolist()
        raise ValueError(f"row(s) {rows} end in padding; pad prompts on the left to generate")
    longest = past + fed - (0 if joined is None else int((joined == 0).sum(1).min()))
    limited = model.cfg.positional_embedding_type not in ("alibi", "none")
    if limited and longest > model.cfg.n_ctx:
        raise ValueError(
            f"{past + length} tokens of prompt and {new} new ones do not fit into "
            f"n_ctx={model.cfg.n_ctx}"
        )


def ending_of(
    model: Any,
    stop_at_eos: bool,
    eos_token_id: int | Sequence[int] | None,
    stop: str | Sequence[str] | None,
    pad_token_id: int | None,
) -> Ending:
    """Which tokens and texts end a row; the tokenizer's EOS and pad where none are given."""
    if eos_token_id is None:
        eos_token_id = model.text.eos_token_id
    eos_ids = ids_of("eos_token_id", eos_token_id, model.cfg.d_vocab)
    if stop_at_eos and not eos_ids:
        raise ValueError(
            "stop_at_eos=True needs eos_token_id=, because there is no tokenizer that names "
            "one; or "
            "pass stop_at_eos=False"
        )
    given = [stop] if isinstance(stop, str) else stop
    stops = tuple(() if given is None else given) if is_list_of(str, given) else None
    if stops is None:
        raise ValueError(f"stop must be a text or a list of texts, got {stop!r}")
    if stops and model.tokenizer is None:
        raise ValueError("stop strings need a tokenizer")
    if "" in stops:
        raise ValueError("an empty stop string would stop everywhere")
    ids_of("pad_token_id", pad_token_id, model.cfg.d_vocab)
    pad = next(x for x in (pad_token_id, model.text.pad_token_id, *eos_ids, 0) if x is not None)
    return Ending(tuple(eos_ids) if stop_at_eos else (), stops, pad)


def is_list_of(kind: type, values: Any) -> bool:
    """Whether it is None, or a list or tuple of such things."""
    return values is None or (
        isinstance(values, (list, tuple)) and all(isinstance(each, kind) for each in values)
    )


def ids_of(name: str, given: Any, d_vocab: int) -> list[int]:
    """The token ids in an argument: none, one or several. ValueError for what is no id."""
    if isinstance(given, Tensor) and not given.is_floating_point():
        given = given.tolist()
    ids = [given] if isinstance(given, int) else given
    if not is_list_of(int, ids) or any(isinstance(each, bool) for each in ids or ()):
        raise ValueError(f"{name} must be a token id or a list of them, got {given!r}")
    wrong = [each for each in ids or () if not 0 <= each < d_vocab]
    if wrong:
        raise ValueError(f"{name}={wrong[0]} is outside the vocabulary of {d_vocab}")
    return list(ids or ())


def continued_cache(
    model: Any,
    past_kv_cache: KeyValueCache | None,
    batch: int,
    room: int,
    device: torch.device,
) -> KeyValueCache:
    """The cache to fill: a new one, the given one, or a branch of a frozen one that leaves it as it
    is."""
    if past_kv_cache is None:
        return KeyValueCache.init_cache(model.cfg, device, batch, max_len=room)
    if past_kv_cache.frozen:
        return past_kv_cache.branch(batch, max_len=room)
    return past_kv_cache


# --- the two ways to consume one ------------------------------------------------------------------


def generate(
    model: Any,
    input: Any,
    return_type: str,
    verbose: bool | None,
    output_logits: bool,
    **arguments: Any,
) -> Any:
    """See `GenerationMethods.generate`."""
    if return_type not in RETURN_TYPES:
        raise ValueError(f"return_type must be one of {list(RETURN_TYPES)}, got {return_type!r}")
    if return_type == "str" and model.tokenizer is None:
        raise ValueError("return_type='str' needs a tokenizer")
    generation = start_generation(model, input, **arguments)
    logits: list[Any] = []
    # the mode is entered once, not at every step: nothing leaves before the end
    with progress(generation.max_new_tokens, verbose) as bar, generation.mode():
        while not generation.ended():
            generation.step()
            bar.update()
            if output_logits:
                logits.append(generation.logits)
    for step, each in enumerate(logits):  # ordinary tensors, whatever the mode was
        logits[step] = each.clone()
    result = finished_form(generation, input, return_type)
    return GenerateOutput(result, tuple(logits)) if output_logits else result


def finished_form(generation: Generation, input: Any, return_type: str) -> Any:
    """Prompt and new tokens as text, ids or embeddings."""
    model, generated = generation.model, generation.generated
    from_embeddings = generation.prompt.is_floating_point()
    if return_type == "input":
        return_type = "str" if is_text(input) else "embeds" if from_embeddings else "tokens"
    if return_type == "embeds":
        start = generation.prompt if from_embeddings else model.embed(generation.prompt)
        return torch.cat((start, model.embed(generated)), 1).detach()
    whole = generated if from_embeddings else torch.cat((generation.prompt, generated), 1)
    if return_type == "tokens":
        return whole
    texts = model.text.to_string(whole, skip_special_tokens=True)
    single = isinstance(input, str) or (isinstance(input, Tensor) and len(whole) == 1)
    return texts[0] if single else texts


def streamed(generation: Generation, at_least: int, as_text: bool) -> Iterator[Any]:
    """Chunks of at least so many tokens; the last one may be shorter."""
    text = TextChunks(generation.model)
    form = text if as_text else lambda chunk: chunk
    pending = [] if generation.prompt.is_floating_point() else [generation.prompt]
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

    A character that the next token may complete is held back until it has.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tokens: Tensor | None = None
        self.sent: list[str] = []
        self.held_back: list[str] = []

    def __call__(self, chunk: Int[Tensor, "batch pos"]) -> str | list[str]:
        self.tokens = chunk if self.tokens is None else torch.cat((self.tokens, chunk), 1)
        texts = self.model.text.to_string(self.tokens, skip_special_tokens=True)
        sent = self.sent or [""] * len(texts)
        self.sent = [text.rstrip("\N{REPLACEMENT CHARACTER}") for text in texts]
        self.held_back = [text[len(kept) :] for text, kept in zip(texts, self.sent, strict=True)]
        new = [text[len(before) :] for text, before in zip(self.sent, sent, strict=True)]
        return new[0] if len(new) == 1 else new

    def rest(self) -> str | list[str]:
        """What is still held back at the end."""
        return self.held_back[0] if len(self.held_back) == 1 else self.held_back


def progress(total: int, verbose: bool | None) -> Any:
    """A bar when asked for, or by default in a terminal."""
    from tqdm import tqdm

    shown = sys.stderr.isatty() if verbose is None else verbose
    return tqdm(total=total, desc="generate", unit="token", leave=False, disable=not shown)


class GenerationMethods:
    """What a model offers for continuing prompts."""

    tokenizer: Any

    @names_the_nearest
    def generate(
        self,
        input: Any = "",
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: Number | None = None,
        temperature: Number = 1.0,
        freq_penalty: Number = 0.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        return_type: str | None = "input",
        verbose: bool | None = None,
        past_kv_cache: KeyValueCache | None = None,
        attention_mask: Int[Tensor, "batch key_pos"] | None = None,
        min_p: Number | None = None,
        repetition_penalty: Number = 1.0,
        stop: str | Sequence[str] | None = None,
        pad_token_id: int | None = None,
        generator: torch.Generator | None = None,
        output_logits: bool = False,
    ) -> str | list[str] | Tensor | GenerateOutput:
        """Continue a prompt.

        Args:
            input: a text, several (padded on the left, whatever `padding_side` says), ids
                [batch, pos], or token embeddings [batch, pos, d_model].
            max_new_tokens: at most this many; fewer when all rows end.
            stop_at_eos, eos_token_id, stop: a row ends with one of these ids (the tokenizer's by
                default), or when its new text contains one of these strings.
            do_sample, top_k, top_p, min_p, temperature: how a token is drawn, in Hugging Face's
                order (penalties, temperature, top-k, top-p, min-p); temperature 0 is greedy.
            freq_penalty, repetition_penalty: against tokens that occurred already.
            use_past_kv_cache: False runs the whole sequence at every step.
            past_kv_cache: what came before the prompt. A frozen cache is a prefix: it stays as it
                is and, with one row, serves any batch. Another is appended to, the prompt and all
                new tokens but the last.
            return_type: "input" (the kind the input is), "str", "tokens" (prompt and new; only new
                for embeddings) or "embeds".
            verbose: a progress bar: True, False, or None for one in terminals only.
            pad_token_id: what follows the end of a row (default: the tokenizer's pad, or EOS).
            generator: source of randomness; a row's tokens do not depend on when other rows end.
            output_logits: return a `GenerateOutput` with the logits of every step.
        Raises: ValueError for arguments that mean nothing together, before anything is run.
        """
        return generate(
            self,
            input,
            return_type or "input",
            verbose,
            output_logits,
            max_new_tokens=max_new_tokens,
            stop_at_eos=stop_at_eos,
            eos_token_id=eos_token_id,
            use_past_kv_cache=use_past_kv_cache,
            prepend_bos=prepend_bos,
            past_kv_cache=past_kv_cache,
            attention_mask=attention_mask,
            stop=stop,
            pad_token_id=pad_token_id,
            do_sample=do_sample,
            top_k=top_k,
            top_p=top_p,
            temperature=temperature,
            freq_penalty=freq_penalty,
            repetition_penalty=repetition_penalty,
            min_p=min_p,
            generator=generator,
        )

    def generate_stream(
        self,
        input: Any = "",
        max_new_tokens: int = 10,
        max_tokens_per_yield: int = 25,
        return_type: str | None = "tokens",
        **arguments: Any,
    ) -> Iterator[Any]:
        """Continue a prompt, yielding as tokens come; arguments otherwise as for `generate`.

        Yields ids [batch, chunk], or their text with `return_type="str"`, whenever that many tokens
        have gathered, and the rest at the end. The first chunk starts with the prompt: joined, the
        chunks are what `generate` returns. Arguments are checked at the call, before the first
        chunk is asked for.
        """
        if max_tokens_per_yield < 1:
            raise ValueError(f"max_tokens_per_yield must be at least 1, got {max_tokens_per_yield}")
        if return_type not in ("tokens", "str", "input", None):
            raise ValueError(f"return_type must be 'tokens' or 'str', got {return_type!r}")
        if return_type == "str" and self.tokenizer is None:
            raise ValueError("return_type='str' needs a tokenizer")
        generation = start_generation(self, input, max_new_tokens=max_new_tokens, **arguments)
        return streamed(generation, max_tokens_per_yield, return_type == "str")
