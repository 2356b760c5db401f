"""Beginnings that are computed once: `model.prefix(...)`, and `PrefixCache`, which finds them."""

import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_lens_lite.fingerprint import EditingHooks, editing_hooks, fingerprint
from transformer_lens_lite.generate import is_single, prompt_and_mask
from transformer_lens_lite.kv_cache import (
    KeyValueCache,
    Segment,
    compact,
    serving,
)
from transformer_lens_lite.nearest import names_the_nearest
from transformer_lens_lite.tokens import is_chat, is_text

# arguments of `generate` that look at nothing but new tokens and their logits
OF_NEW_TOKENS = frozenset({
    "do_sample", "top_k", "top_p", "min_p", "temperature", "stop_at_eos", "eos_token_id", "stop",
    "pad_token_id", "generator", "output_logits", "verbose",
})  # fmt: skip


class PrefixMethods:
    """What a model offers for beginnings that are used more than once."""

    @names_the_nearest
    def prefix(
        self,
        input: Any,
        prepend_bos: bool | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> KeyValueCache:
        """The keys and values of a beginning, frozen: `past_kv_cache=` of any number of forwards
        and generations, for any batch that is a multiple of its rows.

        The hooks that edit now have their part in it. Using it while there are others, which would
        have acted on its positions, is refused; so is using it without those that would act on what
        follows (limit a hook by when="prefill" or pos= that is meant for the beginning alone), and
        with other weights.

        Args:
            input: a text, several (padded on the left), or ids [pos] or [batch, pos].
            attention_mask: 0 for padding among the ids.
        Raises: ValueError for an empty beginning, and what `forward` raises.
        """
        model: Any = self
        side = "left" if is_text(input) else None
        tokens, mask = model._tokens_and_mask(input, prepend_bos, side, attention_mask)
        batch, length = tokens.shape
        if not length or not batch:
            raise ValueError("the prefix is empty; it needs at least one token")
        hooks = EditingHooks(length, editing_hooks(model, length))
        cache = KeyValueCache.init_cache(model.cfg, tokens.device, batch, max_len=length)
        with torch.no_grad():
            model(tokens, return_type=None, attention_mask=mask, past_kv_cache=cache)
        for entry in cache.entries:
            entry.max_len = None  # it had to hold this; once unfrozen it may grow
        cache.freeze()
        cache.remember_hooks(hooks)
        return cache


class Run:
    """A node of the trie: some tokens in a row, their keys and values, and what came after them."""

    def __init__(self, tokens: list[int], layers: list[Segment], parent: "Run | None") -> None:
        self.tokens = tokens
        self.layers = layers
        self.parent = parent
        self.children: dict[int, Run] = {}  # by their first token
        self.last_used = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values."""
        return sum(t.nbytes for segment in self.layers for t in segment)

    def split(self, at: int) -> "Run":
        """Part it in two, of which this one is the second; return the first."""
        assert self.parent is not None  # the root has no tokens to part
        # all copies before any link: where memory runs out, the trie stays as it was
        first, second = columns(self.layers, slice(at)), columns(self.layers, slice(at, None))
        head = Run(self.tokens[:at], first, self.parent)
        head.last_used = self.last_used
        head.children[self.tokens[at]] = self
        self.parent.children[head.tokens[0]] = head
        self.tokens, self.layers, self.parent = self.tokens[at:], second, head
        return head


def columns(layers: list[Segment], which: slice) -> list[Segment]:
    """Copies of these columns: memory of a run is freed with the run."""
    return [(compact(k[:, :, which]), compact(v[:, :, which])) for k, v in layers]


def agreeing(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many first elements are the same."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class PrefixCache:
    """Keys and values of prompts seen before: the next prompts that begin alike start from there.

        prefixes = PrefixCache(model, max_bytes=2**30)
        prefixes.generate(prompts, max_new_tokens=20)    # as model.generate, but the beginnings

    A trie of runs of tokens (as RadixAttention, arXiv 2312.07104). A batch starts from the longest
    beginning of each prompt that is there; what all prompts share is read without being copied,
    and computed once even when it is new. Results are the model's own.

    Prompts go to the model as they are, past the trie, where it could not do justice to them: while
    somebody listens or edits, for embeddings, for arguments that look at the prompt (penalties,
    processors), and for models whose rotary frequencies depend on the length. When the model's
    weights or config change, everything is forgotten.

    Args:
        max_bytes: of keys and values kept; the least recently used go first.

    `hits` and `misses` count prompts, by whether any beginning of theirs was there.
    """

    def __init__(self, model: Any, max_bytes: int) -> None:
        if not hasattr(model, "next_logits"):
            raise TypeError(f"a PrefixCache is of a HookedTransformer, got {type(model).__name__}")
        if not model.is_causal:
            raise ValueError("a model that sees both ways keeps no keys and values")
        if not isinstance(max_bytes, int) or max_bytes < 0:
            raise ValueError(f"max_bytes must be a number of bytes, at least 0, got {max_bytes!r}")
        self.model = model
        self.max_bytes = max_bytes
        self.hits = self.misses = 0
        self._lock = threading.Lock()  # of the trie; generations run side by side
        self._uses = 0
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values kept."""
        return sum(run.nbytes for run in self._runs())

    def clear(self) -> None:
        """Forget everything."""
        self._root = Run([], [], None)
        self._of = self._model_now()

    def next_logits(
        self,
        prompts: Any,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        prepend_bos: bool | None = None,
    ) -> Float[Tensor, "batch d_vocab_out"]:
        """Logits for the token after each prompt: texts, or ids [batch, pos] padded on the left."""
        tokens, mask = self._tokens(prompts, attention_mask, prepend_bos)
        with torch.no_grad():
            if (rows := self._rows(tokens, mask)) is None:
                return self.model.next_logits(tokens, attention_mask=mask)
            return self.model.next_logits(tokens[:, -1:], past_kv_cache=self._filled(rows))

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int = 10,
        return_type: str | None = "input",
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        prepend_bos: bool | None = None,
        **arguments: Any,
    ) -> Any:
        """As `model.generate`, with its arguments and its results."""
        tokens, mask = self._tokens(prompts, attention_mask, prepend_bos)
        forms = ("input", "str", "tokens", None)
        known = arguments.keys() <= OF_NEW_TOKENS and return_type in forms
        known = known and isinstance(max_new_tokens, int) and max_new_tokens > 0
        rows = self._rows(tokens, mask) if known else None
        if rows is None:
            given = {"attention_mask": attention_mask, "prepend_bos": prepend_bos, **arguments}
            return self.model.generate(prompts, max_new_tokens, return_type=return_type, **given)
        # what is wrong with the arguments is said before anything is run
        self.model.generate(tokens, 0, attention_mask=mask, **arguments)
        self.model._check_length(max(map(len, rows)) + max_new_tokens - 1, None)
        # the last token of each prompt is left for generation to start from
        continued = {**arguments, "past_kv_cache": self._filled(rows), "return_type": "tokens"}
        out: Any = self.model.generate(tokens[:, -1:], max_new_tokens, **continued)
        sequences = getattr(out, "sequences", out)
        whole: Any = torch.cat((tokens, sequences[:, 1:]), 1)
        from_text = is_text(prompts) or is_chat(prompts)
        if return_type == "str" or (return_type != "tokens" and from_text):
            texts = self.model.text.to_string(whole, skip_special_tokens=True)
            whole = texts[0] if is_single(prompts, len(tokens)) else texts
        return whole if sequences is out else dataclasses.replace(out, sequences=whole)

    # -- prompts as rows of tokens --

    def _tokens(
        self, prompts: Any, mask: Tensor | None, prepend_bos: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        return prompt_and_mask(self.model, prompts, prepend_bos, mask, None)

    def _rows(self, tokens: Tensor, mask: Tensor | None) -> list[list[int]] | None:
        """The tokens of each prompt; None when the trie is not for them."""
        if tokens.is_floating_point() or not tokens.numel():
            return None
        if self.model.is_listened() or self._depends_on_length():
            return None
        mask = torch.ones_like(tokens) if mask is None else mask
        padded_left = mask.shape == tokens.shape and not bool((mask.diff(dim=1) < 0).any())
        outside = bool(((tokens < 0) | (tokens >= self.model.cfg.d_vocab)).any())
        if not padded_left or outside or not bool(mask[:, -1].all()):
            return None  # the model says what is wrong
        pairs = zip(tokens.tolist(), mask.tolist(), strict=True)
        return [[t for t, real in zip(*pair, strict=True) if real] for pair in pairs]

    def _depends_on_length(self) -> bool:
        rotaries = [spec.attention.rotary for spec in self.model.cfg.block_specs()]
        return any(rotary and rotary.scaling.varies_with_length for rotary in rotaries)

    # -- the trie --

    def _filled(self, rows: list[list[int]]) -> KeyValueCache:
        """A frozen cache of all tokens of each row but the last; what was new in it is kept."""
        starts = [row[:-1] for row in rows]
        with self._lock, torch.no_grad():
            if self._of != self._model_now():
                self.clear()
            self._uses += 1
            paths = self._found(starts)
            found = sum(bool(path) for path in paths)
            self.hits, self.misses = self.hits + found, self.misses + len(rows) - found
            shared = min(agreeing(starts[0], start) for start in starts)
            if len(rows) > 1 and length_of(paths[0]) < shared:
                self._extend([starts[0][:shared]], [paths[0]])
                paths = self._found(starts)
            cache = self._extend(starts, paths)
            self._evict()
        cache.freeze()
        return cache

    def _found(self, starts: list[list[int]]) -> list[list[Run]]:
        """The path of each row. Looked for twice: the first time parts runs, maybe one that another
        row has come through already."""
        for start in starts:
            self._find(start)
        return [self._find(start) for start in starts]

    def _find(self, tokens: list[int]) -> list[Run]:
        """The runs that spell the longest beginning of these tokens that is here."""
        run, path, at = self._root, [], 0
        while at < len(tokens) and (child := run.children.get(tokens[at])) is not None:
            n = agreeing(child.tokens, tokens[at:])
            run = child if n == len(child.tokens) else child.split(n)
            run.last_used = self._uses
            path.append(run)
            at += n
        return path

    def _extend(self, starts: list[list[int]], paths: list[list[Run]]) -> KeyValueCache:
        """A cache that holds these rows, of which the paths hold the beginnings; compute and keep
        the rest."""
        rests = [start[length_of(path) :] for start, path in zip(starts, paths, strict=True)]
        cache = self._joined(paths)
        n = max(map(len, rests))
        if n:
            ids, mask = padded_left(rests, n, self._device)
            self.model(ids, return_type=None, attention_mask=mask, past_kv_cache=cache)
        for row, (path, rest) in enumerate(zip(paths, rests, strict=True)):
            tails = [entry.segments[-1] for entry in cache.entries]
            if not rest:
                continue
            own = [(k[row : row + 1], v[row : row + 1]) for k, v in tails]
            self._keep(path, rest, columns(own, slice(own[0][0].shape[2] - len(rest), None)))
        return cache

    def _keep(self, path: list[Run], rest: list[int], layers: list[Segment]) -> None:
        """Hang what follows a path into the trie; rows before this one may have brought some of
        it."""
        parent = path[-1] if path else self._root
        while rest and (child := parent.children.get(rest[0])) is not None:
            n = agreeing(child.tokens, rest)
            parent = child if n == len(child.tokens) else child.split(n)
            rest, layers = rest[n:], columns(layers, slice(n, None))
        if rest:
            run = parent.children[rest[0]] = Run(rest, layers, parent)
            run.last_used = self._uses

    def _joined(self, paths: list[list[Run]]) -> KeyValueCache:
        """A growing cache of a row per path: runs of all rows lie there once, the others beside
        each other."""
        n = min(agreeing(paths[0], path) for path in paths)
        stem, rests = self._of_runs(paths[0][:n]), [path[n:] for path in paths]
        cache = stem.branch(len(paths))
        if any(rests):
            stacked = KeyValueCache.stack([self._of_runs(rest) for rest in rests])
            for entry, rest in zip(cache.entries, stacked.entries, strict=True):
                entry.prefix = (*entry.prefix, *rest.segments)
            if stacked.padding is not None:
                mask = serving(stem.previous_attention_mask, len(paths))
                cache.padding = torch.cat((mask, stacked.padding), 1)
        return cache

    def _of_runs(self, path: list[Run]) -> KeyValueCache:
        """A cache of one row that reads these runs where they lie."""
        cache = KeyValueCache.init_cache(self.model.cfg, self._device)
        for layer, entry in enumerate(cache.entries):
            entry.prefix = tuple(run.layers[layer] for run in path)
        return cache

    def _evict(self) -> None:
        """Drop ends of prompts, the least recently used first, until the rest fits."""
        kept = self.nbytes
        while kept > self.max_bytes:
            leaves = (run for run in self._runs() if not run.children)
            oldest = min(leaves, key=lambda run: run.last_used)
            assert oldest.parent is not None  # the root holds nothing and is no leaf here
            del oldest.parent.children[oldest.tokens[0]]
            kept -= oldest.nbytes

    def _runs(self) -> Iterable[Run]:
        waiting = list(self._root.children.values())
        while waiting:
            yield (run := waiting.pop())
            waiting += run.children.values()

    @property
    def _device(self) -> torch.device:
        return self.model.embed.W_E.device

    def _model_now(self) -> Any:
        return fingerprint(self.model), self._device

    def __repr__(self) -> str:
        mebibytes, limit = self.nbytes / 2**20, self.max_bytes / 2**20
        return (
            f"PrefixCache({sum(len(run.tokens) for run in self._runs())} tokens, {mebibytes:.1f} "
            f"of {limit:.1f} MiB, {self.hits} hits, {self.misses} misses)"
        )


def length_of(path: list[Run]) -> int:
    """How many tokens the runs hold together."""
    return sum(len(run.tokens) for run in path)


def padded_left(
    rows: list[list[int]], length: int, device: torch.device
) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
    """(ids, mask); the padding is token 0."""
    ids = [[0] * (length - len(row)) + row for row in rows]
    mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
