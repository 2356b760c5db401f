"""What a run left behind: `ActivationCache`, a mapping from hook names to tensors."""

import copy
import operator
import re
import weakref
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from transformer_lens_lite.capture import Recorder
from transformer_lens_lite.decomposition import ResidualDecomposition
from transformer_lens_lite.navigation import Node
from transformer_lens_lite.nearest import closest
from transformer_lens_lite.recording import (
    Recording,
    is_of_one_expert,
    name_and_call,
    packed,
    unpacked,
)
from transformer_lens_lite.recording_files import load_recording, save_recording
from transformer_lens_lite.steps import StepContext, Steps, When
from transformer_lens_lite.utils import Slice, SliceInput, get_act_name, layer_numbers

CacheKey = str | tuple[Any, ...]
# (first, last) columns of all rows, or one pair for each row
Span = tuple[int, int] | list[tuple[int, int]]


class ActivationCache(ResidualDecomposition, Mapping[str, Tensor]):
    """Activations of one run, by hook name.

        cache["blocks.5.attn.hook_pattern"]     the full name
        cache["pattern", 5]                     name and layer; negative layers count from the end
        cache["scale", 3, "ln1"]                name, layer and layer type
        cache["embed"]                          what `get_act_name` makes of a string
        cache["resid_post:2", 5]                what the second call saw: the first decode step
        cache.blocks[5].mlp.output              by the model's structure

    A run is one forward, or all forwards of a generation. Column j of every tensor is then column j
    of `tokens` [batch, column], padding included; `attention_mask` says which are real. Attention
    patterns have the keys of the whole text, those a query has not seen being 0 (scores: -inf).

    The model is held weakly: a cache does not keep it alive, and pickling drops it.
    """

    def __init__(
        self, cache_dict: Mapping[str, Tensor], model: Any = None, has_batch_dim: bool = True
    ) -> None:
        for name, value in cache_dict.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"activations are tensors; {name!r} is a {type(value).__name__}")
        self._model = weakref.ref(model) if model is not None else None
        self._n_layers = None if model is None else model.cfg.n_layers
        self._record = Recording(dict(cache_dict), has_batch_dim=has_batch_dim)
        self._recorder: Recorder | None = None  # while there may be more to come
        self._seen = -1
        self._unread: Recorder | None = None  # of which the recording is to be made once
        self._spans: dict[str, Span] = {}
        self._points: dict[str, str] = {}  # other names of the values, when the model is gone

    @classmethod
    def of_recorder(cls, recorder: Recorder) -> "ActivationCache":
        """What a recorder keeps, and goes on keeping."""
        cache = cls({}, recorder.model)
        cache._recorder = recorder
        return cache

    @classmethod
    def of_one_run(cls, recorder: Recorder, late: bool = False) -> "ActivationCache":
        """What a recorder kept of a generation, or of the one forward it was there for; it will see
        no more.

        late: put it together when it is first read.
        """
        if not late:
            return cls.of_recording(recorder.first(), recorder.model)
        cache = cls({}, recorder.model)
        cache._unread = recorder
        return cache

    @classmethod
    def of_recording(
        cls, record: Recording, model: Any = None, n_layers: int | None = None
    ) -> "ActivationCache":
        """A recording, with or without the model it is from."""
        cache = cls({}, model)
        cache._record = record
        cache._n_layers = cache._n_layers or n_layers
        return cache

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a safetensors file: tensors, tokens, steps and spans. What else there is,
        such as the arguments of modules, is left out."""
        self._save(path)

    def _save(self, path: str | PathLike[str], **about: Any) -> None:
        own = {"spans": self._spans, "n_layers": self._n_layers, "points": self._kept_points()}
        about = {**own, **about}
        save_recording(self._recording(), Path(path), about)

    @classmethod
    def load(cls, path: str | PathLike[str], device: Any = None) -> "ActivationCache":
        """A cache that was saved. Its tensors are mapped from the file, not read, until they are
        used or moved to a device."""
        cache, _ = cls._load(path)
        return cache if device is None else cache.to(device)

    @classmethod
    def _load(cls, path: str | PathLike[str]) -> tuple["ActivationCache", dict[str, Any]]:
        record, about = load_recording(Path(path))
        cache = cls.of_recording(record, n_layers=about["n_layers"])
        cache._points = about.get("points", {})
        for name, span in about["spans"].items():
            is_pair = isinstance(span[0], int)
            cache._spans[name] = tuple(span) if is_pair else [tuple(each) for each in span]
        return cache, about

    # -- what is kept --

    @property
    def cache_dict(self) -> dict[str, Tensor]:
        """The tensors by hook name, as a plain dict; what is assigned there is cached."""
        return self._recording().values

    @cache_dict.setter
    def cache_dict(self, values: Mapping[str, Tensor]) -> None:
        self._recording().values = dict(values)

    @property
    def has_batch_dim(self) -> bool:
        """Whether the first axis counts rows."""
        return self._recording().has_batch_dim

    @has_batch_dim.setter
    def has_batch_dim(self, has_batch_dim: bool) -> None:
        self._recording().has_batch_dim = has_batch_dim

    def _recording(self) -> Recording:
        if self._unread is not None:
            self._record, self._unread = self._unread.first(), None
        recorder = self._recorder
        if recorder is not None and recorder.version != self._seen:
            if len(recorder.runs) > 1:
                raise KeyError(
                    f"{len(recorder.runs)} texts were run here, one after the other: "
                    "cache.runs has a cache for each of them"
                )
            self._record = recorder.latest()
            self._seen = recorder.version
        return self._record

    @property
    def runs(self) -> list["ActivationCache"]:
        """One cache for each text that was run while this one was listening."""
        recorder = self._recorder
        if recorder is None:
            return [self]
        return [self.of_recording(record, recorder.model) for record in recorder.recordings()]

    @property
    def has_embed(self) -> bool:
        """Whether the token embedding is cached."""
        return "hook_embed" in self.cache_dict

    @property
    def has_pos_embed(self) -> bool:
        """Whether the position embedding is cached."""
        return "hook_pos_embed" in self.cache_dict

    @property
    def model(self) -> Any:
        """The model the activations came from. ReferenceError when it is gone; a cache that was
        saved is given one by `cache.model = model`."""
        model = self._model_or_none()
        if model is None:
            raise ReferenceError(
                "the model this cache came from is gone, or was left behind when the cache was "
                "saved or pickled: give it one by `cache.model = model`"
            )
        return model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._n_layers = model.cfg.n_layers

    def _model_or_none(self) -> Any:
        return self._model() if self._model is not None else None

    def __getstate__(self) -> dict[str, Any]:
        record = self._recording()
        return self.__dict__ | {
            "_model": None,
            "_recorder": None,
            "_record": packed(record),
            "_points": self._kept_points(),
        }

    def _kept_points(self) -> dict[str, str]:
        """Other names of what is kept: those of modules of ours and of Hugging Face's."""
        kept = self._recording().calls
        return {path: name for path, name in self._point_names().items() if name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_record": unpacked(state["_record"])})

    def __deepcopy__(self, memo: dict[int, Any]) -> "ActivationCache":
        record = copy.deepcopy(self._recording(), memo)
        return self._like(record, copy.deepcopy(self._spans, memo))

    __eq__ = object.__eq__  # two caches are equal when they are the same one
    __hash__ = object.__hash__

    # -- looking up --

    def full_name(self, key: CacheKey) -> str:
        """The hook name a key stands for, whether or not it is cached."""
        values = self.cache_dict
        if isinstance(key, str):
            if key in values:
                return key
            # as its points are called when the model is a part of another module
            outer = f"{getattr(self._model_or_none(), 'name', None)}."
            if key.startswith(outer) and key.removeprefix(outer) in values:
                return key.removeprefix(outer)
            points = self._point_names()
            if key not in points:
                return get_act_name(key)
            point = points[key]  # or the module of ours itself, where that was captured
            held = (path for path, same in points.items() if same == point and path in values)
            return point if point in values else next(held, point)
        if not isinstance(key, tuple) or not 1 <= len(key) <= 3:
            raise KeyError(f"a key is a name or (name, layer[, layer_type]), got {key!r}")
        name, layer, layer_type = (*key, None, None)[:3]
        if hasattr(layer, "__index__"):  # int, or a number of numpy or torch
            layer = operator.index(layer)
            layer += self._n_layers if layer < 0 and self._n_layers is not None else 0
        elif not isinstance(layer, str | None):
            raise KeyError(f"a layer is a number, got {key!r}")
        if not isinstance(name, str) or not isinstance(layer_type, str | None):
            raise KeyError(f"names and layer types are strings, got {key!r}")
        return get_act_name(name, layer, layer_type)

    def _point_names(self) -> dict[str, str]:
        """Hook names by the module whose output they hold, ours and Hugging Face's."""
        model = self._model_or_none()
        return model.outputs_by_module() if hasattr(model, "outputs_by_module") else self._points

    def __getitem__(self, key: CacheKey) -> Tensor:
        values = self.cache_dict
        if isinstance(key, str) and key in values:
            return values[key]
        key, call = name_and_call(key)
        name = self.full_name(key)
        if call is not None:
            return self._piece(name, call)
        if name not in values:
            raise MissingActivation(self._why_missing(name))
        return values[name]

    def value(self, name: str) -> Any:
        """What is kept under a full name, a tensor or not."""
        others = self._recording().others
        return others[name] if name in others else self[name]

    def paths(self) -> list[str]:
        """All full names that lead to something cached: of points, and of modules whose output a
        cached point holds."""
        record = self._recording()
        cached = dict.fromkeys([*record.calls, *record.values, *record.others])
        points = self._point_names().items()
        return [*cached, *(path for path, name in points if name in record.calls)]

    def n_calls(self, name: str) -> int:
        """How many calls of a point or module are cached."""
        return len(self._recording().calls.get(name, ()))

    def _why_missing(self, name: str) -> str:
        message = f"{name!r} is not in this cache"
        if calls := self._recording().calls.get(name):
            return (
                f"{name!r} was called {len(calls)} times, and its values are not consecutive "
                f"columns of one text: take one of them, {name}:{calls[0].number}, or all by "
                f"cache.steps({name!r})"
            )
        model = self._model_or_none()
        if model is not None and name in model.hook_dict:
            return (
                f"{message}: the model has that hook point, but it was not captured or did not fire"
            )
        layers = [n for n in self.cache_dict if layer_of(n) is not None and inside(n) == name]
        if layers:  # as get_act_name makes it of a name without a layer
            short = name.rpartition(".")[2].removeprefix("hook_")
            return f"{message}: give a layer, such as cache[{short!r}, {layer_of(layers[0])}]"
        n, number = self._n_layers, re.match(r"blocks\.(\d+)\.", name)
        if n is not None and number is not None and int(number[1]) >= n:
            return f"{message}: the model has {n} layers, 0 to {n - 1}"
        if name.endswith("hook_resid_mid"):
            message += " (parallel and attention-only blocks have no resid_mid)"
        return f"{message}.{closest(name, self.cache_dict)}"

    def __contains__(self, key: object) -> bool:
        try:
            self[key]  # type: ignore[index]
        except (KeyError, TypeError):
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def __len__(self) -> int:
        return len(self.cache_dict)

    def keys(self) -> Any:
        """The hook names, in firing order."""
        return self.cache_dict.keys()

    def values(self) -> Any:
        """The tensors, in firing order."""
        return self.cache_dict.values()

    def items(self) -> Any:
        """Pairs of name and tensor, in firing order."""
        return self.cache_dict.items()

    # -- by the model's structure --

    def __getattr__(self, part: str) -> Node:
        if part.startswith("_"):
            raise AttributeError(part)
        node = Node(self, "")
        for each in getattr(self._model_or_none(), "aliases", {}).get(part, part).split("."):
            node = node.child(each)
        return node

    # -- one call, one step --

    def _piece(self, name: str, number: int) -> Tensor:
        """What one call of a point saw; calls count from 1."""
        record = self._recording()
        calls = record.calls.get(name)
        if calls is None:
            raise MissingActivation(self._why_missing(name))
        call = next((each for each in calls if each.number == number), None)
        if call is None:
            kept = ", ".join(str(each.number) for each in calls[:8])
            raise MissingActivation(
                f"call {number} of {name!r} was not kept: there are {len(calls)} calls ({kept}"
                f"{', …' if len(calls) > 8 else ''})"
            )
        return record.piece(name, call)

    def steps(self, name: str, layer: Any = None, layer_type: str | None = None) -> list[Tensor]:
        """What each call of a point saw, prefill first. Views of `cache[name]`."""
        full = self.full_name(name if layer is None else (name, layer, layer_type))
        calls = self._recording().calls.get(full)
        if calls is None:
            raise MissingActivation(self._why_missing(full))
        return [self._piece(full, call.number) for call in calls]

    def step(self, number: int) -> "ActivationCache":
        """Only what one step saw; 0 is the prefill. KeyError when there is no such step."""
        return self.select(steps=number)

    def _check_step(self, number: int) -> None:
        forwards = self._recording().forwards
        if not any(forward.step == number and forward.n_kept for forward in forwards):
            kept = [forward.step for forward in forwards if forward.n_kept]
            raise MissingActivation(f"step {number} is not in this cache; it has {kept[:8]}")

    @property
    def prefill(self) -> "ActivationCache":
        """Only what the first forward saw."""
        return self.select(steps="prefill")

    @property
    def decode(self) -> "ActivationCache":
        """Only what the forwards after the first saw."""
        return self.select(steps="decode")

    # -- columns --

    @property
    def tokens(self) -> Int[Tensor, "batch column"] | None:
        """The ids of the cached columns; None when the input was no ids."""
        return self._recording().tokens

    @property
    def attention_mask(self) -> Int[Tensor, "batch column"] | None:
        """1 for real tokens, 0 for padding and for what follows the end of a row; None in a cache
        made from tensors alone."""
        return self._recording().attention_mask

    @property
    def columns(self) -> Int[Tensor, " column"] | None:
        """The absolute numbers of the cached columns: those in a key-value cache come before."""
        return self._recording().columns

    @property
    def token_span(self) -> tuple[int, int]:
        """(columns of the prompt, columns in all)."""
        forwards = self._recording().forwards
        prompt = sum(forward.n_kept for forward in forwards if forward.phase == "prefill")
        return prompt, self._recording().n_columns

    @property
    def spans(self) -> dict[str, Span]:
        """Named ranges of columns: "prompt", "answer", and those given by `mark`."""
        prompt, total = self.token_span
        return {"prompt": (0, prompt), "answer": (prompt, total), **self._spans}

    def mark(self, name: str, first: Any, last: Any) -> None:
        """Call columns `first:last` by a name; lists of numbers are for each row its own.

        Raises: ValueError for columns outside of the cache, or not as many as there are rows.
        """
        total = self.token_span[1]
        span: Span
        if isinstance(first, int) and isinstance(last, int):
            span = (first, last)
            pairs = [(first, last)]
        else:
            rows = self.batch_size
            firsts, lasts = (
                [each] * rows if isinstance(each, int) else [int(one) for one in each]
                for each in (first, last)
            )
            if len(firsts) != rows or len(lasts) != rows:
                raise ValueError(
                    f"the span {name!r} has {len(firsts)} and {len(lasts)} ends for {rows} rows"
                )
            pairs = list(zip(firsts, lasts, strict=True))
            span = pairs
        for pair in pairs:
            if not 0 <= pair[0] <= pair[1] <= total:
                raise ValueError(f"the span {name!r} {pair} is outside of the {total} columns")
        self._spans[name] = span

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self._recording().batch_size

    # -- parts --

    def select(
        self,
        names: Any = None,
        layers: Any = None,
        steps: When = None,
        span: str | Span | None = None,
        pos: Any = None,
        batch: SliceInput = None,
    ) -> "ActivationCache":
        """A cache of a part of this one. It shares memory where the part is a range.

        Args:
            names: short or full names, a list of them, or a predicate on full names.
            layers: a layer, a list or a slice of them; negative numbers count from the end.
            steps: see `When`.
            span: a name in `spans`, or (first, last) columns, or one such pair for each row.
            pos: columns: a number (the axis stays), a slice, or a list; negative numbers count from
                the end.
            batch: rows, likewise.
        Raises: KeyError, ValueError for what is not there. Ranges, lists and conditions may choose
            nothing of the steps and columns there are: that is an empty part.
        """
        record = self._recording().of_names(self._names_of(names, layers))
        some_columns = not (steps is None and span is None and pos is None)
        if some_columns:
            if record.columns is None:
                raise ValueError("this cache was made from tensors alone, and knows no columns")
            record = record.of_columns(self._places(record, steps, span, pos))
        spans = {} if some_columns else dict(self._spans)
        if batch is not None:
            if not record.has_batch_dim:
                raise ValueError("this cache has no batch axis to select from")
            rows = self._rows(record, Slice.unwrap(batch))
            record = record.of_rows(rows)
            spans = {name: of_rows(span, rows) for name, span in spans.items()}
        return self._like(record, spans)

    def _like(self, record: Recording, spans: dict[str, Span]) -> "ActivationCache":
        new = self.of_recording(record, self._model_or_none(), self._n_layers)
        new._points, new._spans = self._points, spans
        return new

    def _names_of(self, names: Any, layers: Any) -> list[str]:
        record = self._recording()
        known = list(dict.fromkeys([*record.calls, *(n for n in record.values if ":" not in n)]))
        if names is None:
            chosen = known
        elif callable(names):
            chosen = [name for name in known if names(name)]
            if not chosen:
                called = getattr(names, "__name__", names)
                raise MissingActivation(f"{called} matches none of the {len(known)} names here")
        else:
            several = [names] if isinstance(names, str | tuple) else list(names)
            chosen = [full for each in several for full in self._full_names(each, known)]
        if layers is None:
            return chosen
        n = self._n_layers or 1 + max((layer_of(name, -1) for name in known), default=-1)
        numbers = layer_numbers(layers, n)
        left = [name for name in chosen if layer_of(name, -1) in numbers]
        if chosen and numbers and not left:
            raise MissingActivation(f"layers={layers!r} has none of {chosen[:4]}")
        return left

    def _full_names(self, name: Any, known: list[str]) -> list[str]:
        if not isinstance(name, tuple):
            if name in known:
                return [name]
            short = get_act_name(name, 0).removeprefix("blocks.0.")
            found = [each for each in known if layer_of(each) is not None and inside(each) == short]
            if found:
                return found
        full = self.full_name(name)
        if full not in known:
            raise MissingActivation(self._why_missing(full))
        return [full]

    def _places(
        self, record: Recording, steps: When, span: str | Span | None, pos: Any
    ) -> Int[Tensor, "*row column"]:
        """Which of the kept columns a selection means: [column], or [batch, column]."""
        total = record.n_columns
        keep = torch.ones(total, dtype=torch.bool)
        if steps is not None:
            chosen, keep = Steps(steps, "steps"), torch.zeros(total, dtype=torch.bool)
            if isinstance(steps, int):
                self._check_step(steps)
            for forward in record.forwards:
                place = StepContext(forward.step, forward.start, forward.stop)
                if place in chosen:
                    keep[forward.first : forward.last] = True
        if pos is not None:
            at = torch.arange(total)
            try:
                here = Slice.unwrap(pos).apply(at)
            except IndexError:
                raise ValueError(f"pos={pos!r} is outside of the {total} columns") from None
            keep &= torch.isin(at, here)
        if span is None:
            return keep.nonzero().flatten()
        pairs = self._pairs(span, total)
        rows = [keep[first:last].nonzero().flatten() + first for first, last in pairs]
        if len({len(row) for row in rows}) > 1:
            raise ValueError(
                f"the span is {[len(row) for row in rows]} columns long in the rows, which do not "
                "fit into one tensor; take them one by one, cache.select(batch=i, span=…)"
            )
        return rows[0] if len(pairs) == 1 else torch.stack(rows)

    def _pairs(self, span: str | Span, total: int) -> list[tuple[int, int]]:
        if isinstance(span, str):
            if span not in self.spans:
                raise MissingActivation(
                    f"there is no span {span!r}; there are {list(self.spans)}."
                    f"{closest(span, self.spans)}"
                )
            span = self.spans[span]
        pairs = [span] if isinstance(span, tuple) else list(span)
        for first, last in pairs:
            if not 0 <= first <= last <= total:
                raise ValueError(f"the span {(first, last)} is outside of the {total} columns")
        return pairs

    @staticmethod
    def _rows(record: Recording, chosen: Slice) -> Int[Tensor, " row"]:
        try:
            return chosen.apply(torch.arange(record.batch_size))
        except IndexError:
            raise ValueError(
                f"batch={chosen.slice!r} is outside of the {record.batch_size} rows"
            ) from None

    def at(
        self,
        name: str = "resid_post",
        layer: int | None = None,
        step: int | None = None,
        span: str | Span | None = None,
    ) -> Tensor:
        """The one tensor that fits. KeyError when none or several do, naming them."""
        names = self._names_of(name, layer)
        if len(names) != 1:
            raise MissingActivation(f"{len(names)} values fit {name!r}, layer {layer}: {names[:6]}")
        if step is not None:
            self.step(step)  # raises when it is not there
        return self.select(names[0], steps=step, span=span)[names[0]]

    def row(self, index: int) -> "ActivationCache":
        """One row without its padding: a copy, as if it had been run alone."""
        record = self._recording()
        if record.attention_mask is None or record.columns is None:
            raise ValueError("this cache does not know which columns are padding")
        if not record.has_batch_dim:
            raise ValueError("this cache has no batch axis to take a row of")
        (row,) = self._rows(record, Slice([index])).tolist()
        # where each column comes to stand
        before = [0, *record.attention_mask[row].cumsum(0).tolist()]
        spans: dict[str, Span] = {}
        for name, span in self._spans.items():
            first, last = span if isinstance(span, tuple) else span[row]
            spans[name] = (before[first], before[last])
        return self._like(record.unpadded(row), spans)

    # -- changing place or shape --

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> "ActivationCache":
        """Move to a device, and floating tensors to a dtype, in place; returns the cache."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        for name, tensor in self.cache_dict.items():
            wanted = dtype if tensor.is_floating_point() else None
            self.cache_dict[name] = tensor.to(device=device, dtype=wanted)
        return self

    def remove_batch_dim(self) -> "ActivationCache":
        """Drop the batch axis of a batch of one, in place. ValueError for larger batches."""
        if self.has_batch_dim:
            batched = {n: t for n, t in self.cache_dict.items() if not is_of_one_expert(n)}
            for name, tensor in batched.items():
                if tensor.shape[0] != 1:
                    raise ValueError(f"cannot drop a batch of {tensor.shape[0]} ({name})")
            for name, tensor in batched.items():
                self.cache_dict[name] = tensor[0]
            self.has_batch_dim = False
        return self

    def apply_slice_to_batch_dim(self, batch_slice: SliceInput) -> "ActivationCache":
        """A new cache of some rows; an int drops the batch axis. ValueError when there is none."""
        chosen = batch_slice if isinstance(batch_slice, Slice) else Slice(batch_slice)
        if not self.has_batch_dim:
            raise ValueError("this cache has no batch axis to slice")
        if chosen.mode == "int":
            return self.select(batch=chosen.slice).remove_batch_dim()
        return self.select(batch=chosen)

    def nbytes(self) -> int:
        """Bytes of the cached values."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.cache_dict.values())

    def _repr_html_(self) -> str:
        from transformer_lens_lite.plot import cache_html

        return cache_html(self)

    def __repr__(self) -> str:
        if self._recorder is not None and len(self._recorder.runs) > 1:
            return f"ActivationCache of {len(self._recorder.runs)} runs: see its .runs"
        lines = [
            f"ActivationCache: {len(self)} activations, {self.nbytes() / 2**20:.2f} MiB"
            + ("" if self.has_batch_dim else ", without batch axis")
        ]
        shown = list(self.cache_dict.items())
        for name, tensor in shown[:8] + shown[-2:] if len(shown) > 12 else shown:
            dtype = str(tensor.dtype).removeprefix("torch.")
            lines.append(f"  {name:<36} {dtype} {list(tensor.shape)}")
        if len(shown) > 12:
            lines.insert(9, f"  … {len(shown) - 10} more")
        return "\n".join(lines)


# --- small things ---------------------------------------------------------------------------------


def of_rows(span: Span, rows: Int[Tensor, " row"]) -> Span:
    """A span, for these rows."""
    if isinstance(span, tuple):
        return span
    own = [span[row] for row in rows.tolist()]
    return own[0] if len(own) == 1 else own


def layer_of(name: str, default: Any = None) -> Any:
    """The layer in a hook name."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blocks" and len(parts) > 2 else default


def inside(name: str) -> str:
    """A hook name without the layer it is in."""
    return name.split(".", 2)[2]


class MissingActivation(KeyError):
    """A KeyError that shows its message as it is."""

    def __str__(self) -> str:
        return str(self.args[0])
