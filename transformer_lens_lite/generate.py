"""Continuing a prompt: from arguments to a generation, and its results.

`decoding.Generation` (and `BeamSearch`, which is one) makes the steps; `generate` and
`generate_stream` are two ways to consume it.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_lens_lite.activations import ActivationCache
from transformer_lens_lite.beam_search import Beams, BeamSearch
from transformer_lens_lite.capture import CaptureSpec, Recorder
from transformer_lens_lite.decoding import Criterion, Ending, Generation, repeated
from transformer_lens_lite.kv_cache import KeyValueCache
from transformer_lens_lite.nearest import closest, names_the_nearest
from transformer_lens_lite.sampling import Number, Processor, Sampling, is_count, is_number
from transformer_lens_lite.streaming import streamed
from transformer_lens_lite.tokens import check_side, is_chat, is_text

RETURN_TYPES = ("input", "str", "tokens", "embeds")
SAMPLING_ARGUMENTS = tuple(f.name for f in fields(Sampling) if f.name != "eos_ids")


@dataclass
class GenerateOutput:
    """What `output_logits=True` or `output_scores=True` returns."""

    sequences: Any  # as without it: [batch, pos], texts or embeddings
    logits: tuple[Tensor, ...] = ()  # one [batch, d_vocab_out] per new token, before any warping
    sequences_scores: Tensor | None = None  # of a beam search, [batch]


# --- from arguments to a generation ---------------------------------------------------------------


def start_generation(
    model: Any,
    input: Any,
    is_captured: bool = False,
    feeds_last: bool = False,
    /,
    *,
    max_new_tokens: Any = 10,  # Any: its kind, too, is checked here
    stop_at_eos: bool = True,
    eos_token_id: Any = None,
    use_past_kv_cache: bool = True,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    past_kv_cache: KeyValueCache | None = None,
    attention_mask: Int[Tensor, "batch key_pos"] | None = None,
    stop: Any = None,
    stopping_criteria: Any = None,
    pad_token_id: Any = None,
    n: Any = 1,
    num_return_sequences: Any = None,
    num_beams: Any = 1,
    length_penalty: Any = 1.0,
    early_stopping: Any = False,
    verbose: bool | None = None,
    **sampling: Any,
) -> Generation:
    """Check every argument before anything is run, and set the generation up.

    is_captured: all forwards have the same rows, so that what hooks keep fits together.
    feeds_last: the last token will be run too.
    """
    check_names(sampling)
    if not model.is_causal:
        raise ValueError(
            "generation with attention_dir='bidirectional': such a model says what stands at a "
            "place from both sides of it, not what comes next"
        )
    if padding_side is not None:
        check_side(padding_side)
    if not is_count(max_new_tokens, 0):
        raise ValueError(f"max_new_tokens must be an integer of at least 0, got {max_new_tokens!r}")
    beams = checked_beams(n, num_return_sequences, num_beams, length_penalty, early_stopping)
    ending = ending_of(model, stop_at_eos, eos_token_id, stop, pad_token_id, stopping_criteria)
    chosen_by = sampling_of(model, sampling, ending.eos_ids, max_new_tokens)
    if num_beams > 1 and not chosen_by.is_greedy:
        raise ValueError(f"num_beams={num_beams} searches and does not draw: pass do_sample=False")
    prompt, mask = prompt_and_mask(
        model, input, prepend_bos, attention_mask, past_kv_cache, padding_side
    )
    check_prompt(prompt, chosen_by)
    copies = num_beams if num_beams > 1 else beams.n
    check_cache(past_kv_cache, use_past_kv_cache, copies)
    if is_captured:
        if num_beams > 1:
            raise ValueError(
                f"return_cache with num_beams={num_beams}: a search drops and reorders its rows. "
                "Capture the result: model.run_with_cache(sequences)"
            )
        prompt, mask = repeated(prompt, copies), None if mask is None else repeated(mask, copies)
        copies = 1
    check_fits(model, prompt, mask, max_new_tokens, past_kv_cache, feeds_last)
    cache = None
    if use_past_kv_cache and (model.cfg.n_layers or past_kv_cache is not None):
        # where copies share the prompt, each has its own room behind it
        room = prompt.shape[1] + (max_new_tokens if copies == 1 else 0)
        cache = continued_cache(model, past_kv_cache, prompt.shape[0], room, prompt.device)
    parts: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "mask": mask,
        "cache": cache,
        "max_new_tokens": max_new_tokens,
        "ending": ending,
        "sampling": chosen_by,
        "own_cache": cache is None or cache is not past_kv_cache,
    }
    if num_beams > 1:
        return BeamSearch(beams, **parts)
    return Generation(**parts, copies=copies, feeds_last=feeds_last)


NAMED_ARGUMENTS = tuple(
    name
    for name, parameter in inspect.signature(start_generation).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)


def check_names(sampling: dict[str, Any]) -> None:
    """TypeError for an argument that nobody knows, with the nearest known one."""
    known = [*NAMED_ARGUMENTS, *SAMPLING_ARGUMENTS]
    for name in sampling:
        if name not in SAMPLING_ARGUMENTS:
            raise TypeError(f"generate() has no argument {name!r}.{closest(name, known)}")


def checked_beams(
    n: Any,
    num_return_sequences: Any,
    num_beams: Any,
    length_penalty: Any,
    early_stopping: Any,
) -> Beams:
    """How many continuations of each prompt, and how they are searched for."""
    given = {"n": n, "num_return_sequences": num_return_sequences, "num_beams": num_beams}
    for name, value in given.items():
        if not is_count(value) and not (name == "num_return_sequences" and value is None):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if num_return_sequences is not None:
        if n not in (1, num_return_sequences):
            raise ValueError(f"n={n} and num_return_sequences={num_return_sequences} are the same")
        n = num_return_sequences
    if not is_number(length_penalty) or not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty must be a finite number, got {length_penalty!r}")
    if early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping must be True, False or 'never', got {early_stopping!r}")
    if num_beams == 1 and (length_penalty != 1.0 or early_stopping):
        raise ValueError("length_penalty and early_stopping are for beam search: pass num_beams=")
    if 1 < num_beams < n:
        raise ValueError(f"n={n} is more than there are beams, num_beams={num_beams}")
    return Beams(num_beams, length_penalty, early_stopping, n)


def sampling_of(
    model: Any, given: dict[str, Any], eos_ids: tuple[int, ...], max_new_tokens: int
) -> Sampling:
    """The sampling arguments, checked, with ids and processors as tuples."""
    d_vocab = model.cfg.d_vocab_out
    words = given.get("bad_words_ids")
    if words is not None and not is_list_of((list, tuple), words):
        raise ValueError(f"bad_words_ids must be a list of lists of token ids, got {words!r}")
    banned = [tuple(ids_of("bad_words_ids", word, d_vocab)) for word in words or ()]
    if () in banned:
        raise ValueError("bad_words_ids has an empty word in it")
    sampling = Sampling(
        **{
            **given,
            # as in Hugging Face, EOS is no word
            "bad_words_ids": tuple(w for w in banned if w not in [(eos,) for eos in eos_ids]),
            "suppress_tokens": tuple(
                ids_of("suppress_tokens", given.get("suppress_tokens"), d_vocab)
            ),
            "logits_processor": callables("logits_processor", given.get("logits_processor")),
            "eos_ids": eos_ids,
        }
    )
    if sampling.min_new_tokens > max_new_tokens:
        raise ValueError(
            f"min_new_tokens={sampling.min_new_tokens} is more than max_new_tokens={max_new_tokens}"
        )
    return sampling


def callables(name: str, given: Any) -> tuple[Callable[..., Any], ...]:
    """The functions in an argument: none, one or several. TypeError for what cannot be called."""
    # a list may be callable itself: Hugging Face's LogitsProcessorList
    several = [] if given is None else given if isinstance(given, (list, tuple)) else [given]
    for each in several:
        if not callable(each):
            raise TypeError(
                f"{name} must be a function of (tokens, logits), or a list of them, got {each!r}"
            )
    return tuple(several)


def prompt_and_mask(
    model: Any,
    input: Any,
    prepend_bos: bool | None,
    attention_mask: Tensor | None,
    cache: KeyValueCache | None,
    padding_side: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The prompt as ids [batch, pos] or embeddings [batch, pos, d_model], and its mask.

    Several texts are padded on the left whatever the default, since generation continues from the
    last column; `padding_side` says where ids have been. Raises ValueError when a row ends in
    padding.
    """
    if isinstance(input, Tensor) and input.is_floating_point():
        if input.ndim != 3 or input.shape[-1] != model.cfg.d_model:
            raise ValueError(
                f"the prompt must be token ids, which are integers, or embeddings [batch, pos, "
                f"{model.cfg.d_model}]; got {input.dtype} of shape {list(input.shape)}"
            )
        return input, attention_mask
    if is_chat(input):
        ids, made = model._text().encode_chats(input, prepend_bos, "left")
        device = model.a_weight.device
        return ids.to(device), made.to(device) if attention_mask is None else attention_mask
    if isinstance(input, (list, tuple)) and not is_text(input):
        raise TypeError(
            "a list as prompt is one of texts, or of messages; got "
            + (
                f"one of {type(input[0]).__name__}: make ids a tensor [batch, pos]"
                if input
                else "[]"
            )
        )
    side = "left" if is_text(input) else padding_side
    prompt, mask = model._tokens_and_mask(input, prepend_bos, side, attention_mask, cache)
    text = model.text
    names_nothing_else = text.pad_token_id not in (None, text.eos_token_id, text.bos_token_id)
    if mask is None and names_nothing_else and prompt.shape[1]:
        refuse_padding_at_the_end(prompt[:, -1] != text.pad_token_id)
    return prompt, mask


def refuse_padding_at_the_end(ends: Bool[Tensor, " batch"]) -> None:
    """ValueError for rows whose last column is not real."""
    if not bool(ends.all()):
        rows = (~ends).nonzero().flatten().tolist()
        raise ValueError(f"row(s) {rows} end in padding; pad prompts on the left to generate")


def check_prompt(prompt: Tensor, sampling: Sampling) -> None:
    """ValueError for a prompt that there is nothing to continue of, or nothing to count in."""
    batch, length = prompt.shape[:2]
    if batch == 0:
        raise ValueError("the batch is empty; generation needs at least one prompt")
    if length == 0:
        raise ValueError("the prompt is empty; generation needs at least one token to start from")
    if prompt.is_floating_point() and sampling.counts_tokens:
        raise ValueError(
            "freq_penalty, repetition_penalty and no_repeat_ngram_size count tokens; the prompt is "
            "embeddings"
        )


def check_cache(cache: KeyValueCache | None, use_past_kv_cache: bool, copies: int) -> None:
    """ValueError for a cache that is not to be used, or that several copies would grow."""
    if cache is None:
        return
    if not use_past_kv_cache:
        raise ValueError("past_kv_cache was given together with use_past_kv_cache=False")
    if copies > 1 and isinstance(cache, KeyValueCache) and not cache.frozen:
        raise ValueError(
            f"{copies} continuations of a prompt cannot all be appended to past_kv_cache; "
            "freeze() it to start each of them from it"
        )


def check_fits(
    model: Any,
    prompt: Tensor,
    mask: Tensor | None,
    new: int,
    cache: KeyValueCache | None,
    feeds_last: bool = False,
) -> None:
    """ValueError when mask or cache do not fit the prompt, or the last token fed would not fit
    them."""
    batch, length = prompt.shape[:2]
    fed = length + max(new - (not feeds_last), 0)
    stored = length + max(new - 1, 0)  # a given cache is not fed the last one
    past = model._past_length(cache, range(model.cfg.n_layers), batch, stored)
    joined = model._joined_mask(mask, batch, length, past, cache)
    if joined is not None:
        refuse_padding_at_the_end(joined[:, -1].bool())
    longest = past + fed - (0 if joined is None else int((joined == 0).sum(1).min()))
    limited = model.cfg.positional_embedding_type not in ("alibi", "none")
    if limited and longest > model.cfg.n_ctx:
        raise ValueError(
            f"{past + length} tokens of prompt and {new} new ones do not fit into "
            f"n_ctx={model.cfg.n_ctx}"
            + (" (the last one is run too: include_last=False)" if feeds_last else "")
        )


def ending_of(
    model: Any,
    stop_at_eos: bool,
    eos_token_id: Any,
    stop: Any,
    pad_token_id: Any,
    stopping_criteria: Any,
) -> Ending:
    """What ends a row; the tokenizer's EOS and pad where none are given."""
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
    if not is_list_of(str, given):
        raise ValueError(f"stop must be a text or a list of texts, got {stop!r}")
    stops = tuple(given or ())
    if stops and model.tokenizer is None:
        raise ValueError("stop strings need a tokenizer")
    if "" in stops:
        raise ValueError("an empty stop string would stop everywhere")
    ids_of("pad_token_id", pad_token_id, model.cfg.d_vocab)
    pad = next(x for x in (pad_token_id, model.text.pad_token_id, *eos_ids, 0) if x is not None)
    criteria = callables("stopping_criteria", stopping_criteria)
    return Ending(tuple(eos_ids) if stop_at_eos else (), stops, pad, criteria)


def is_list_of(kind: type | tuple[type, ...], values: Any) -> bool:
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
        return KeyValueCache.init_cache(model.cfg, device, batch, max_len=room).owned()
    if past_kv_cache.frozen:
        return past_kv_cache.branch(batch, max_len=room).owned()
    return past_kv_cache


# --- the two ways to consume one ------------------------------------------------------------------


def generate(
    model: Any,
    input: Any,
    return_type: str | None,
    verbose: bool | None,
    output_logits: bool,
    output_scores: bool,
    return_cache: Any,
    names_filter: Any,
    device: Any,
    include_last: bool,
    **arguments: Any,
) -> Any:
    """See `GenerationMethods.generate`."""
    return_type = return_type or "input"
    if return_type not in RETURN_TYPES:
        raise ValueError(f"return_type must be one of {list(RETURN_TYPES)}, got {return_type!r}")
    if return_type == "str" and model.tokenizer is None:
        raise ValueError("return_type='str' needs a tokenizer")
    if output_scores and arguments["num_beams"] == 1:
        raise ValueError("output_scores=True is about beam search: pass num_beams=")
    recorder = recorder_of(model, return_cache, names_filter, device)
    with listening(recorder):
        captured = recorder is not None
        feeds_last = captured and include_last
        generation = start_generation(model, input, captured, feeds_last, **arguments)
        if recorder is not None:
            start = 0 if generation.cache is None else generation.cache.length
            prefilled = start + generation.prompt.shape[1]
            rows, stop = len(generation.tokens), generation.expected_stop
            recorder.check_budget(rows, start, prefilled, stop)
        logits = run_through(generation, verbose, output_logits)
    result = finished_form(generation, input, return_type)
    if output_logits or output_scores:
        scores = generation.sequences_scores.clone() if isinstance(generation, BeamSearch) else None
        result = GenerateOutput(result, logits, scores)
    if recorder is None:
        return result
    recorder.warn_if_empty()
    return result, ActivationCache.of_one_run(recorder)


@contextmanager
def listening(recorder: Recorder | None) -> Iterator[None]:
    """Whatever breaks the block off has what was captured until then as its `captured`."""
    if recorder is None:
        yield
        return
    try:
        with recorder.listening():
            yield
    except BaseException as error:
        # not put together yet: that takes memory, and there may be none
        error.captured = ActivationCache.of_one_run(recorder, late=True)  # type: ignore[attr-defined]
        raise


def recorder_of(model: Any, return_cache: Any, names_filter: Any, device: Any) -> Recorder | None:
    """What listens to a generation; None where nothing is to be captured."""
    if return_cache is False or return_cache is None:
        if names_filter is not None or device is not None:
            raise ValueError("names_filter= and device= are for what return_cache=True returns")
        return None
    if return_cache is True:
        return_cache, names_filter = names_filter, None
    if names_filter is not None:
        raise ValueError("return_cache= and names_filter= both say what to keep; give one of them")
    spec = CaptureSpec.of(return_cache, device=device)
    if not spec.detach:
        raise ValueError(
            "detach=False: a generation keeps no graph. Run its result again: "
            "`with model.capture(spec): model(sequences)`"
        )
    return Recorder(model, spec)


def run_through(
    generation: Generation, verbose: bool | None, wants_logits: bool
) -> tuple[Float[Tensor, "row d_vocab_out"], ...]:
    """All steps of a generation; returns the logits of each, if they are wanted."""
    logits: list[Any] = []
    # the mode is entered once, not at every step: nothing leaves before the end
    with progress(generation.max_new_tokens, verbose) as bar, generation.mode():
        while not generation.ended():
            generation.step()
            bar.update()
            if wants_logits:
                logits.append(generation.logits)
        if generation.feeds_last:
            generation.feed_last()
    return tuple(each.clone() for each in logits)  # ordinary tensors, whatever the mode was


def finished_form(generation: Generation, input: Any, return_type: str) -> Any:
    """Prompt and new tokens as text, ids or embeddings."""
    model = generation.model
    prompt, generated = generation.result()
    if return_type == "input":
        from_text = is_text(input) or is_chat(input)
        return_type = "str" if from_text else "embeds" if generation.from_embeddings else "tokens"
    if return_type == "embeds":
        start = prompt if generation.from_embeddings else model.embed(prompt)
        return torch.cat((start, model.embed(generated)), 1).detach()
    # a copy in either case: an ordinary tensor, whatever the mode was
    whole = generated.clone() if generation.from_embeddings else torch.cat((prompt, generated), 1)
    if return_type == "tokens":
        return whole
    texts = model.text.to_string(whole, skip_special_tokens=True)
    return texts[0] if is_single(input, len(whole)) else texts


def is_single(input: Any, rows: int) -> bool:
    """Whether the text that comes of this input is a str, and not a list of them."""
    if rows > 1:
        return False
    return isinstance(input, (str, Tensor)) or (is_chat(input) and not is_chat(input[0]))


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
        *,
        n: int = 1,
        num_return_sequences: int | None = None,
        num_beams: int = 1,
        length_penalty: Number = 1.0,
        early_stopping: bool | Literal["never"] = False,
        output_scores: bool = False,
        min_new_tokens: int = 0,
        typical_p: Number | None = None,
        epsilon_cutoff: Number | None = None,
        eta_cutoff: Number | None = None,
        no_repeat_ngram_size: int = 0,
        bad_words_ids: Sequence[Sequence[int]] | None = None,
        suppress_tokens: Sequence[int] | None = None,
        logits_processor: Processor | Sequence[Processor] | None = None,
        stopping_criteria: Criterion | Sequence[Criterion] | None = None,
        return_cache: Any = False,
        names_filter: Any = None,
        device: torch.device | str | None = None,
        include_last: bool = True,
    ) -> Any:
        """Continue a prompt.

        Args:
            input: a text, several (padded on the left, whatever `padding_side` says), ids
                [batch, pos] (padded on the side that `padding_side`, or else the model's default,
                says, unless there is an `attention_mask`), token embeddings [batch, pos, d_model],
                or a chat: a list of messages {"role": ..., "content": ...}, or several such lists,
                for the tokenizer's template.
            max_new_tokens, min_new_tokens: at most this many, fewer when all rows end, and no EOS
                among the first so many.
            stop_at_eos, eos_token_id, stop: a row ends with one of these ids (the tokenizer's by
                default), or when its new text contains one of these strings.
            stopping_criteria: functions of (tokens [batch, pos], logits [batch, d_vocab_out]) that
                say whether to stop: a bool, or one for each row. Hugging Face's fit.
            do_sample, temperature, top_k, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff: how
                a token is drawn, in Hugging Face's order, which is this; temperature 0 is greedy.
            repetition_penalty, freq_penalty, no_repeat_ngram_size: against what occurred already.
            bad_words_ids, suppress_tokens: sequences of ids, and ids, that must not come.
            logits_processor: functions of (tokens, logits) that return other logits, called after
                the penalties and before the temperature. Hugging Face's fit.
            n, num_return_sequences: so many continuations of each prompt, next to each other, that
                share its keys and values: hooks see a prompt once, and then all its continuations.
            num_beams, length_penalty, early_stopping: beam search for the `n` best, with
                do_sample=False; early_stopping is False, True or "never", as in Hugging Face.
            use_past_kv_cache: False runs the whole sequence at every step.
            past_kv_cache: what came before the prompt. A frozen cache is a prefix: it stays as it
                is and serves any batch that is a multiple of its rows. Another is appended to, the
                prompt and all new tokens but the last.
            return_type: "input" (the kind the input is; text for a chat), "str", "tokens" (prompt
                and new; only new for embeddings) or "embeds".
            verbose: a progress bar: True, False, or None for one in terminals only.
            pad_token_id: what follows the end of a row (default: the tokenizer's pad, or EOS).
            generator: source of randomness; a row's tokens do not depend on when other rows end.
            output_logits, output_scores: return a `GenerateOutput` with the logits of every step,
                and the scores a beam search gave its sequences.
            return_cache: return (result, `ActivationCache`), the activations of every step as they
                were computed, hooks included, aligned to the columns of prompt and new tokens: True
                (what `names_filter` says, kept on `device`), names, or a `CaptureSpec`. An error
                on the way has what was captured until then as its attribute `captured`.
            include_last: run the last token too, which nothing needs but its activations.
        Raises: ValueError (or TypeError, for things of the wrong kind) for arguments that mean
            nothing, alone or together, before anything is run.
        """
        arguments = dict(locals())  # all of them, as they were given
        return generate(arguments.pop("self"), **arguments)

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
        if not is_count(max_tokens_per_yield):
            raise ValueError(f"max_tokens_per_yield must be at least 1, got {max_tokens_per_yield}")
        if return_type not in ("tokens", "str", "input", None):
            raise ValueError(f"return_type must be 'tokens' or 'str', got {return_type!r}")
        if return_type == "str" and self.tokenizer is None:
            raise ValueError("return_type='str' needs a tokenizer")
        if arguments.get("num_beams", 1) != 1:
            raise ValueError("a beam search knows its tokens at the end only: use generate")
        generation = start_generation(self, input, max_new_tokens=max_new_tokens, **arguments)
        single = is_single(input, len(generation.tokens))
        return streamed(generation, max_tokens_per_yield, return_type == "str", single)
