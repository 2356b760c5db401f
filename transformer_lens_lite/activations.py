"""What a run left behind: `ActivationCache`, a mapping from hook names to tensors."""

import operator
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from transformer_lens_lite.capture import ARGUMENTS, INPUT, Axes, Call, Forward, Recorder, Recording
from transformer_lens_lite.config import closest
from transformer_lens_lite.steps import StepContext, Steps, When
from transformer_lens_lite.utils import Slice, SliceInput, get_act_name

CacheKey = str | tuple[Any, ...]
# (first, last) columns of all rows, or one pair for each row
Span = tuple[int, int] | list[tuple[int, int]]
NAME_AND_CALL = re.compile(r"(.+):(\d+)")


class ActivationCache(Mapping[str, Tensor]):
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
        self.has_batch_dim = has_batch_dim
        self._model = weakref.ref(model) if model is not None else None
        self._n_layers = None if model is None else model.cfg.n_layers
        self._recorder: Recorder | None = None  # of what is still going on
        self._seen = -1
        self._record = Recording(dict(cache_dict))
        self._spans: dict[str, Span] = {}
        self._points: dict[str, str] = {}  # other names of the values

    @classmethod
    def of_recorder(cls, recorder: Recorder) -> "ActivationCache":
        """What a recorder keeps, and goes on keeping."""
        cache = cls({}, recorder.model)
        cache._recorder = recorder
        return cache

    @classmethod
    def of_one_run(cls, recorder: Recorder) -> "ActivationCache":
        """What a recorder kept of its latest run; it will see no more."""
        recorder.arrived()
        if recorder.into is not None:
            cache = cls({}, recorder.model, not recorder.remove_batch_dim)
            cache._record.values = recorder.into
            return cache
        return cls._of(recorder.run.recording(), recorder.model, not recorder.remove_batch_dim)

    @classmethod
    def _of(cls, record: Recording, model: Any, has_batch_dim: bool) -> "ActivationCache":
        cache = cls({}, model, has_batch_dim)
        cache._record = record
        return cache

    @classmethod
    def of_recording(
        cls, record: Recording, has_batch_dim: bool = True, n_layers: int | None = None
    ) -> "ActivationCache":
        """A recording without a model, such as one that was saved."""
        cache = cls._of(record, None, has_batch_dim)
        cache._n_layers = n_layers
        return cache

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a safetensors file: tensors, tokens, steps and spans. What else there is,
        such as the arguments of modules, is left out."""
        from transformer_lens_lite.activation_files import save_cache

        save_cache(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str], device: Any = None) -> "ActivationCache":
        """A cache that was saved. Its tensors are mapped from the file, not read, until they are
        used or moved to a device."""
        from transformer_lens_lite.activation_files import load_cache

        return load_cache(path, device)

    # -- what is kept --

    @property
    def cache_dict(self) -> dict[str, Tensor]:
        """The tensors by hook name, as a plain dict; what is assigned there is cached."""
        return self._recording().values

    @cache_dict.setter
    def cache_dict(self, values: Mapping[str, Tensor]) -> None:
        self._recording().values = dict(values)

    def _recording(self) -> Recording:
        recorder = self._recorder
        if recorder is not None and recorder.version != self._seen:
            if len(recorder.runs) > 1:
                raise KeyError(
                    f"{len(recorder.runs)} texts were run here, one after the other: "
                    "cache.runs has a cache for each of them"
                )
            recorder.arrived()
            self._record = recorder.run.recording()
            self._seen = recorder.version
        return self._record

    @property
    def runs(self) -> list["ActivationCache"]:
        """One cache for each text that was run while this one was listening."""
        recorder = self._recorder
        if recorder is None:
            return [self]
        recorder.arrived()
        return [self._of(run.recording(), recorder.model, True) for run in recorder.runs]

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
        """The model the activations came from. ReferenceError when it is gone."""
        model = self._model_or_none()
        if model is None:
            raise ReferenceError(
                "the model this cache came from is gone, or was dropped by pickling"
            )
        return model

    def _model_or_none(self) -> Any:
        return self._model() if self._model is not None else None

    def __getstate__(self) -> dict[str, Any]:
        record = self._recording()
        owned = {name: compact(value) for name, value in record.values.items()}
        left = Recording(**{**record.__dict__, "values": owned})
        left.tokens, left.attention_mask = compact(left.tokens), compact(left.attention_mask)
        points = {**self._points, **self._point_names()}
        points = {path: name for path, name in points.items() if name in record.calls}
        return self.__dict__ | {
            "_model": None, "_recorder": None, "_record": left, "_points": points,
        }  # fmt: skip

    __eq__ = object.__eq__  # two caches are equal when they are the same one
    __hash__ = object.__hash__

    # -- looking up --

    def full_name(self, key: CacheKey) -> str:
        """The hook name a key stands for, whether or not it is cached."""
        values = self.cache_dict
        if isinstance(key, str):
            if key in values:
                return key
            point = self._point_names().get(key) or self._points.get(key)
            return point if point is not None else get_act_name(key)
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
        return model.outputs_by_module() if hasattr(model, "outputs_by_module") else {}

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

    def _value(self, name: str) -> Any:
        """What is kept under a full name, tensor or not."""
        others = self._recording().others
        return others[name] if name in others else self[name]

    def _paths(self) -> list[str]:
        """All names that lead to something cached."""
        record = self._recording()
        points = {**self._points, **self._point_names()}
        cached = list(dict.fromkeys([*record.calls, *record.values, *record.others]))
        return cached + [path for path, name in points.items() if name in record.calls]

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

    def __getattr__(self, part: str) -> "Node":
        if part.startswith("_"):
            raise AttributeError(part)
        model = self._model_or_none()
        aliases = getattr(model, "aliases", {})
        node = Node(self, "")
        for each in aliases.get(part, part).split("."):
            node = node._child(each)
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
        if name not in record.values:
            return self._value(f"{name}:{number}")
        return self._part_of(record, name, calls.index(call), call)

    def _part_of(self, record: Recording, name: str, place: int, call: Call) -> Tensor:
        value, axes = record.values[name], record.axes[name]
        if axes.pos is None:
            return value if len(record.calls[name]) == 1 else value[place]
        if not record.forwards:
            return value
        forward = record.forwards[call.forward]
        part = value.narrow(self._axis(axes.pos), forward.first, forward.n_kept)
        return part if axes.unseen is None else part[..., : forward.stop]

    def _axis(self, axis: int) -> int:
        return axis if self.has_batch_dim else axis - 1

    def steps(self, name: str, layer: Any = None, layer_type: str | None = None) -> list[Tensor]:
        """What each call of a point saw, prefill first. Views of `cache[name]`."""
        full = self.full_name(name if layer is None else (name, layer, layer_type))
        calls = self._recording().calls.get(full)
        if calls is None:
            raise MissingActivation(self._why_missing(full))
        return [self._piece(full, call.number) for call in calls]

    def step(self, number: int) -> "ActivationCache":
        """Only what one step saw; 0 is the prefill. KeyError when there is no such step."""
        forwards = self._recording().forwards
        if not any(forward.step == number and forward.n_kept for forward in forwards):
            kept = [forward.step for forward in forwards if forward.n_kept]
            raise MissingActivation(f"step {number} is not in this cache; it has {kept[:8]}")
        return self.select(steps=number)

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
        return prompt, forwards[-1].last if forwards else 0

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
        record = self._recording()
        if record.attention_mask is not None:
            return record.attention_mask.shape[0]
        return next((len(value) for value in record.values.values()), 0)

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
            names: short or full names, or a list of them.
            layers: a layer, a list or a slice of them; negative numbers count from the end.
            steps: see `When`.
            span: a name in `spans`, or (first, last) columns, or one such pair for each row.
            pos: columns: a number (the axis stays), a slice, or a list; negative numbers count from
                the end.
            batch: rows, likewise.
        Raises: KeyError, ValueError for what is not there.
        """
        record = self._recording()
        wanted = self._names_of(names, layers)
        if steps is None and span is None and pos is None:
            left = part_of_record(record, wanted)
        else:
            columns = self._columns_of(record, steps, span, pos)
            if record.columns is None:
                raise ValueError("this cache was made from tensors alone, and knows no columns")
            left = self._at_columns(part_of_record(record, wanted), columns)
        new = self._like(left)
        new._spans = {} if span is not None or pos is not None or steps else dict(self._spans)
        if batch is not None:
            if not self.has_batch_dim:
                raise ValueError("this cache has no batch axis to select from")
            new._take_rows(Slice.unwrap(batch))
        return new

    def _like(self, record: Recording) -> "ActivationCache":
        new = self._of(record, None, self.has_batch_dim)
        new._model, new._n_layers = self._model, self._n_layers
        new._points = self._points
        return new

    def _names_of(self, names: Any, layers: Any) -> list[str]:
        record = self._recording()
        known = list(dict.fromkeys([*record.calls, *(n for n in record.values if ":" not in n)]))
        if names is None:
            chosen = known
        else:
            several = [names] if isinstance(names, str | tuple) else list(names)
            chosen = [full for each in several for full in self._full_names(each, known)]
        if layers is None:
            return chosen
        n = self._n_layers or 1 + max((layer_of(name, -1) for name in known), default=-1)
        if isinstance(layers, slice):
            numbers = list(range(n)[layers])
        else:
            numbers = [layers] if isinstance(layers, int) else list(layers)
            wrong = [layer for layer in numbers if not -n <= layer < n]
            if wrong:
                raise ValueError(f"layers={layers!r}: there is no layer {wrong[0]} among {n}")
        inside = {layer % n for layer in numbers}
        return [name for name in chosen if layer_of(name, -1) in inside]

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

    def _columns_of(
        self, record: Recording, steps: When, span: str | Span | None, pos: Any
    ) -> Int[Tensor, "*row column"]:
        """Which of the kept columns a selection means: [column], or [batch, column]."""
        total = self.token_span[1]
        keep = torch.ones(total, dtype=torch.bool)
        if steps is not None:
            chosen, keep = Steps(steps, "steps"), torch.zeros(total, dtype=torch.bool)
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

    def _at_columns(self, record: Recording, columns: Int[Tensor, "*row column"]) -> Recording:
        """Only these of the kept columns: a view where they are a range."""
        assert record.columns is not None
        values = {}
        for name, value in record.values.items():
            base, _ = name_and_call(name)
            axes = record.axes.get(str(base), Axes(None))
            if name in record.calls and axes.pos is not None:
                axis = self._axis(axes.pos)
                # the last forward may have broken off before it came here
                here = columns if columns.ndim > 1 else columns[columns < value.shape[axis]]
                values[name] = at(value, axis, here)
            else:
                kept = self._calls_at(record, str(base), columns)
                if name in record.calls or any(f"{base}:{call.number}" == name for call in kept):
                    values[name] = value
        flat = columns if columns.ndim == 1 else columns[0]
        forwards, place = [], 0
        for forward in record.forwards:
            n = int(((flat >= forward.first) & (flat < forward.last)).sum())
            ends = {"first": place, "last": place + n}
            forwards.append(Forward(**{**forward.__dict__, **ends}))
            place += n
        present = {number for number, forward in enumerate(forwards) if forward.n_kept}
        calls = {}
        for name, every in record.calls.items():
            left = [call for call in every if call.forward in present]
            if left:
                calls[name] = left
        values = {name: v for name, v in values.items() if str(name_and_call(name)[0]) in calls}
        others = {n: v for n, v in record.others.items() if str(name_and_call(n)[0]) in calls}
        of_rows = {
            field: None if given is None else at(given, 1, columns)
            for field, given in (
                ("tokens", record.tokens),
                ("attention_mask", record.attention_mask),
            )
        }
        return Recording(
            values, others, calls, record.axes, forwards, record.columns[flat], **of_rows
        )

    @staticmethod
    def _calls_at(record: Recording, name: str, columns: Int[Tensor, "*row column"]) -> list[Call]:
        kept = []
        for call in record.calls.get(name, ()):
            forward = record.forwards[call.forward]
            if bool(((columns >= forward.first) & (columns < forward.last)).any()):
                kept.append(call)
        return kept

    def _take_rows(self, rows: Slice) -> None:
        record = self._record
        batch = self.batch_size
        try:
            indices = rows.apply(torch.arange(batch))
        except IndexError:
            raise ValueError(f"batch={rows.slice!r} is outside of the {batch} rows") from None
        for name, value in record.values.items():
            if is_of_one_expert(name):
                raise ValueError(f"{name} holds the tokens of one expert: it has no batch axis")
            if isinstance(value, Tensor):
                record.values[name] = at(value, 0, indices)
        for field in ("tokens", "attention_mask"):
            given = getattr(record, field)
            setattr(record, field, None if given is None else given[indices.to(given.device)])
        for name, span in self._spans.items():
            if isinstance(span, list):
                own = [span[row] for row in indices.tolist()]
                self._spans[name] = own[0] if len(own) == 1 else own

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
        one = self.select(batch=index)
        assert one._record.attention_mask is not None
        real = one._record.attention_mask[0].bool()
        columns = real.nonzero().flatten()
        before = int(record.columns[0]) if len(record.columns) else 0
        hidden = record.columns[~real].tolist()
        keys = [key for key in range(record.forwards[-1].stop) if key not in set(hidden)]
        cut = one._at_columns(one._record, columns)
        for name, value in cut.values.items():
            axes = cut.axes.get(name)
            if axes is not None and axes.unseen is not None:
                value = value[..., torch.tensor(keys, device=value.device)]
            cut.values[name] = value.clone() if isinstance(value, Tensor) else value
        # columns count from this row's own beginning
        cut.columns = before + torch.arange(len(columns))
        cut.forwards = [
            Forward(f.step, f.phase, before + f.first, before + f.last, f.first, f.last)
            for f in cut.forwards
        ]
        new = self._like(cut)
        moved = torch.cat((torch.zeros(1, dtype=torch.long), real.long().cumsum(0)))
        new._spans = {
            name: (int(moved[span[0]]), int(moved[span[1]]))
            for name, span in one._spans.items()
            if isinstance(span, tuple)
        }
        return new

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


class Node:
    """A place in the model's structure, in a cache: `cache.blocks[5].mlp`.

    `output` is what the module or point there returned, `input` what it got first, `inputs` all it
    got as (args, kwargs). `len(node)` counts its calls; `node.keys()` are the cached names there.
    """

    def __init__(self, cache: ActivationCache, path: str) -> None:
        self._cache = cache
        self._path = path

    def _child(self, part: str) -> "Node":
        path = f"{self._path}.{part}" if self._path else part
        names = self._cache._paths()
        if not any(name == path or name.startswith(f"{path}.") for name in names):
            start = f"{self._path}." if self._path else ""
            below = {n[len(start) :].split(".")[0] for n in names if n.startswith(start)}
            raise AttributeError(f"this cache has nothing at {path!r}.{closest(part, below)}")
        return Node(self._cache, path)

    def __getattr__(self, part: str) -> "Node":
        if part.startswith("_"):
            raise AttributeError(part)
        return self._child(part)

    def __getitem__(self, index: int) -> "Node":
        if index < 0:
            start = f"{self._path}."
            below = [n[len(start) :].split(".")[0] for n in self._cache._paths()]
            n = 1 + max((int(each) for each in below if each.isdigit()), default=-1)
            index += self._cache._n_layers or n
        return self._child(str(index))

    @property
    def _name(self) -> str:
        return self._cache.full_name(self._path)

    @property
    def output(self) -> Any:
        """What was returned, columns joined."""
        return self._cache._value(self._name)

    @property
    def input(self) -> Any:
        """The first argument; None when there was none."""
        return self._cache._value(self._path + INPUT)

    @property
    def inputs(self) -> Any:
        """(args, kwargs) of the one call there was."""
        return self._cache._value(self._path + ARGUMENTS)

    def keys(self) -> list[str]:
        """The cached names here and below."""
        start = f"{self._path}."
        return [n for n in self._cache if n == self._name or n.startswith(start)]

    def __contains__(self, part: object) -> bool:
        try:
            self._child(str(part))
        except AttributeError:
            return False
        return True

    def __len__(self) -> int:
        calls = self._cache._recording().calls
        return len(calls.get(self._name) or calls.get(self._path + INPUT) or ())

    def __repr__(self) -> str:
        return f"<{self._path}: {len(self)} calls; {', '.join(self.keys()[:6])}>"


# --- parts of tensors, and of names ---------------------------------------------------------------


def at(value: Tensor, axis: int, places: Int[Tensor, "*row place"]) -> Tensor:
    """What stands at these places of an axis: a view where they are a range. With a row axis, each
    row has its own places."""
    places = places.to(value.device)
    if places.ndim == 2:
        moved = value.movedim(axis, 1)
        rows = torch.arange(len(places), device=value.device)[:, None]
        return moved[rows, places].movedim(1, axis)
    n = len(places)
    if n and bool((places == torch.arange(n, device=places.device) + places[0]).all()):
        return value.narrow(axis, int(places[0]), n)
    return value.index_select(axis, places)


def compact(value: Any) -> Any:
    """The tensor, or a copy when it is a part of something bigger that pickling would keep."""
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
        return value.clone()
    return value


def part_of_record(record: Recording, names: Sequence[str]) -> Recording:
    """Only these names of it."""
    wanted = set(names)
    return Recording(
        **{
            **record.__dict__,
            "values": {n: v for n, v in record.values.items() if name_and_call(n)[0] in wanted},
            "others": {n: v for n, v in record.others.items() if name_and_call(n)[0] in wanted},
            "calls": {n: calls for n, calls in record.calls.items() if n in wanted},
        }
    )


def name_and_call(key: Any) -> tuple[Any, int | None]:
    """("name:3", …) -> (("name", …), 3); None without a call."""
    name = key[0] if isinstance(key, tuple) and key else key
    match = NAME_AND_CALL.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return key, None
    return ((match[1], *key[1:]) if isinstance(key, tuple) else match[1]), int(match[2])


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


def is_of_one_expert(name: str) -> bool:
    """Whether a hook's value is [token, …], for the tokens of one expert: without a batch axis."""
    return ".experts." in name
