"""Many small changes of one run, computed without repeating what they leave as it is.

A *cell* is a set of edits of one base run: it begins where the first edit does. What lies before
that layer, and before that position, is the base run's own: the stream that enters the layer, and
the keys and values that later positions look back at. Cells that begin near each other run as one
batch, which grows from layer to layer as cells join it: no block runs for a cell that has not
begun, and each block reads its weights once for all of them.

The results are those of one full forward a cell.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_lens_lite.kv_cache import KeyValueCache, KeyValueCacheEntry
from transformer_lens_lite.lazy_logits import LazyLogits, ManyLogits, ordinary

Metric = Callable[[Tensor], Any]
Index = tuple[Any, ...]
EMBEDDING = -1  # the stage before the first layer
TOKENS_AT_ONCE = 2048  # positions of all cells of a batch together, by default
SHORTFORMER_POINT = "hook_pos_embed"


class Edit(NamedTuple):
    """One assignment to one activation, `activation[index] = value`.

    name: the hook point.
    index: ints, slices and lists of ints along the axes of the activation of the whole text, batch
        axis first; a shorter tuple leaves the last axes whole.
    value: a number, what broadcasts to `activation[index]`, or a function of `activation[index]`.
    """

    name: str
    index: Index  # type: ignore[assignment]
    value: Any


class Cell(NamedTuple):
    """Edits that act together, and where they begin to."""

    number: int
    edits: tuple[Edit, ...]
    layer: int
    first: int


class Outcome(NamedTuple):
    """What became of a cell: its logits, [batch, pos, d_vocab_out] made when somebody reads them,
    and what the observed points saw, of the whole text."""

    number: int
    logits: Tensor
    observed: dict[str, Tensor]


class PatchEngine:
    """A base run, ready to be run again with edits.

    Hook points are as they are in a plain forward: hooks that others have attached and that could
    edit make every cell a full forward of its own, as they may depend on shapes. Those that only
    listen hear of the base run, and nothing of the cells.

    Args:
        tokens: what `forward` takes as input, [batch, pos] or text.
        attention_mask: [batch, pos], 0 for padding; None: as `forward` finds it.
        names: points whose activations in the base run are wanted, in `base`.
        heard: points that were listened to in another run, which what it has in common with this
            one is to be compared with: listening can change the last bit (attention is fused where
            nobody does).
    Raises: UnknownHookError for names that are none; ValueError for a model without logits.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        tokens: Any,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        names: Iterable[str] = (),
        heard: Iterable[str] = (),
    ) -> None:
        if not model.cfg.unembedding:
            raise ValueError("this model has no logits for a metric to read")
        self.model = model
        self.n_layers = model.cfg.n_layers
        wanted = list(dict.fromkeys(names))
        model.resolve_names(wanted)  # raises
        _, self.tokens, _, self.mask = model.input_to_embed(tokens, attention_mask=attention_mask)
        self.batch, self.n_pos = self.tokens.shape
        # a forward of one's own may do anything with what the layers give it; what stands where
        # the stream enters a layer would act again on a stream that was taken behind it
        self.reuses_nothing = (
            model.edits_are_live()
            or model._is_replaced("forward")
            or any(getattr(b.hook_resid_pre, "computes", True) for b in model.blocks)
        )
        streams = [f"blocks.{layer}.hook_resid_pre" for layer in range(self.n_layers)]
        inside = [name for name in wanted if self.model.stage(name) < self.n_layers]
        behind = [name for name in wanted if self.model.stage(name) == self.n_layers]
        with model.hooks([(name, only_listen) for name in heard if name in model.hook_dict]):
            final, values = model.run_with_cache(
                self.tokens,
                attention_mask=self.mask,
                stop_at_layer=self.n_layers,
                names_filter=[*streams, *inside],
            )
        self._streams = [values[name] for name in streams] + [final]
        self.base: dict[str, Tensor] = {name: values[name] for name in inside}
        if behind:
            _, values = model.run_with_cache(
                final, start_at_layer=self.n_layers, names_filter=behind
            )
            self.base |= {name: values[name] for name in behind}
        self._of_base = ManyLogits(model, final[:, None], 0, None)
        self._prefixes: dict[int, KeyValueCache | None] = {0: None}

    # -- about points --

    def pos_axis(self, name: str) -> int:
        """Which axis counts positions. ValueError where none does."""
        axis = self.model.hook_dict[name].pos_axis
        if axis is None:
            raise ValueError(f"{name!r} has no position axis: it cannot be edited by position")
        return int(axis)

    @property
    def base_logits(self) -> Tensor:
        """Of the base run, [batch, pos, d_vocab_out], made when somebody reads them."""
        return self._whole_base.clone() if self.reuses_nothing else LazyLogits(self._of_base, 0)

    @cached_property
    @torch.no_grad()
    def _whole_base(self) -> Tensor:
        logits: Tensor = self.model(self.tokens, attention_mask=self.mask)
        return logits

    # -- running --

    def metrics(
        self,
        cells: Sequence[Sequence[Edit]],
        metric: Metric,
        batch_size: int | None = None,
        verbose: bool = False,
    ) -> Float[Tensor, "cell *result"]:
        """What `metric` says of each cell's logits [batch, pos, d_vocab_out]: a number, or a tensor
        of one shape. fp32 at least. Other arguments: see `run`."""
        results: dict[int, Tensor] = {}
        for outcome in self.run(cells, batch_size=batch_size, verbose=verbose):
            results[outcome.number] = as_result(metric(outcome.logits))
        if not results:
            return torch.zeros(0)
        return torch.stack([results[number] for number in range(len(cells))])

    @torch.no_grad()
    def run(
        self,
        cells: Sequence[Sequence[Edit]],
        observe: Sequence[str] = (),
        stop_at_layer: int | None = None,
        batch_size: int | None = None,
        verbose: bool = False,
    ) -> Iterator[Outcome]:
        """Every cell's outcome, in the order in which they are computed.

        Args:
            observe: points inside layers whose values, after the edits, are wanted. They were among
                `names` when the engine was made.
            stop_at_layer: no layer from this one on is run, and the logits mean nothing.
            batch_size: cells in one batch; None: as many as come to 2048 positions.
            verbose: a progress bar, in terminals.
        Raises: UnknownHookError, ValueError, IndexError for edits of points, or at positions, that
            are not there, before any cell is run.
        """
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        for name in observe:
            if name not in self.base or not 0 <= self.model.stage(name) < self.n_layers:
                raise ValueError(f"{name!r} cannot be observed: name a point inside a layer first")
        planned = [self.planned(number, edits) for number, edits in enumerate(cells)]
        stop = self.n_layers if stop_at_layer is None else stop_at_layer
        return self._outcomes(planned, list(observe), stop, batch_size, verbose)

    def _outcomes(
        self,
        cells: list[Cell],
        observe: list[str],
        stop: int,
        batch_size: int | None,
        verbose: bool,
    ) -> Iterator[Outcome]:
        from tqdm.auto import tqdm

        # disable=None: only where there is a terminal to show it in
        with tqdm(total=len(cells), disable=None if verbose else True, leave=False) as bar:
            idle = [cell for cell in cells if not cell.edits]
            for cell in idle:
                yield Outcome(cell.number, self.base_logits, {n: self.base[n] for n in observe})
            bar.update(len(idle))
            for bunch in self._bunches([cell for cell in cells if cell.edits], batch_size):
                with torch.no_grad():
                    outcomes = self._run_bunch(bunch, observe, stop)
                for outcome in outcomes:
                    yield outcome
                    bar.update()

    def planned(self, number: int, edits: Sequence[Edit]) -> Cell:
        """Where a cell begins; checked."""
        begins, layers = [self.n_pos], [self.n_layers]
        for edit in edits:
            if edit.name not in self.model.hook_dict:
                self.model.resolve_names([edit.name])  # raises, with the nearest names
            axis = self.pos_axis(edit.name)
            columns = edit.index[axis] if axis < len(edit.index) else slice(None)
            begins.append(first_of(columns, self.n_pos, edit.name))
            layers.append(self.model.stage(edit.name))
        first = min(begins) if self.model.is_causal else 0
        return Cell(number, tuple(edits), min(layers), first)

    def _bunches(self, cells: list[Cell], batch_size: int | None) -> Iterator[list[Cell]]:
        """Cells that begin near each other, those of the same layers together."""
        if self.reuses_nothing:
            yield from ([cell] for cell in cells)
            return
        bunch: list[Cell] = []
        for cell in sorted(cells, key=lambda each: (each.first, each.layer)):
            if bunch:
                start = bunch[0].first
                left = self.n_pos - start
                most = batch_size or max(1, TOKENS_AT_ONCE // (self.batch * left))
                # a few positions computed in vain cost less than one more pass over the weights
                if len(bunch) >= most or cell.first - start > left // 8:
                    yield bunch
                    bunch = []
            bunch.append(cell)
        if bunch:
            yield bunch

    def _run_bunch(self, cells: list[Cell], observe: list[str], stop: int) -> list[Outcome]:
        """All cells of a bunch as one batch, which grows by those that begin in each layer."""
        if self.reuses_nothing or any(self._is_shortformer_position(cell) for cell in cells):
            return [self._run_alone(cell, observe) for cell in cells]
        cells = sorted(cells, key=lambda cell: cell.layer)
        with self.model.hooks_set_aside():
            batch = Bunch(self, cells, min(cell.first for cell in cells), observe)
            for layer in range(cells[0].layer, stop):
                batch.step(layer)
            return batch.outcomes()

    def _is_shortformer_position(self, cell: Cell) -> bool:
        """An edit of what is added in every layer anew, and so begins nowhere."""
        is_shortformer = self.model.cfg.positional_embedding_type == "shortformer"
        return is_shortformer and any(edit.name == SHORTFORMER_POINT for edit in cell.edits)

    def _run_alone(self, cell: Cell, observe: list[str]) -> Outcome:
        """One full forward, whatever is attached to the model."""
        seen: dict[str, Tensor] = {}
        hooks = [
            *editing_hooks(enumerate([cell]), self.batch, 1, 0, self),
            *observing_hooks(observe, seen, self.batch, 1),
        ]
        with self.model.hooks(fwd_hooks=hooks, on_zero_fire="error"):
            logits = self.model(self.tokens, attention_mask=self.mask)
        return Outcome(cell.number, logits, {name: value[:, 0] for name, value in seen.items()})

    # -- what the cells share --

    def stream(self, layer: int, first: int, n: int) -> Float[Tensor, "batch n pos d_model"]:
        """What enters a layer in the base run, from a position on, once for each of n cells."""
        return self._streams[layer][:, None, first:].expand(-1, n, -1, -1)

    def prefix(self, length: int) -> KeyValueCache | None:
        """The base run's keys and values before a position: views, frozen."""
        if length not in self._prefixes:
            entries = []
            for entry in self._keys_and_values.entries:
                ((keys, values),) = entry.segments
                part = keys[:, :, :length], values[:, :, :length]
                entries.append(KeyValueCacheEntry.holding(*part))
            padding = self._keys_and_values.padding
            prefix = KeyValueCache(entries, None if padding is None else padding[:, :length])
            prefix.freeze()
            self._prefixes[length] = prefix
        return self._prefixes[length]

    @cached_property
    def _keys_and_values(self) -> KeyValueCache:
        """Of the whole base run. A run of its own: that which the activations are from computes
        them as any plain forward does, to the last bit, so that what a clean run has in common with
        it is found to be equal."""
        cache = KeyValueCache.init_cache(
            self.model.cfg, self.tokens.device, self.batch, max_len=self.n_pos
        )
        self.model(
            self.tokens,
            attention_mask=self.mask,
            past_kv_cache=cache,
            stop_at_layer=self.n_layers,
        )
        return cache

    def mask_of(self, n: int) -> Int[Tensor, "row pos"]:
        """The mask of n cells, [batch x n, pos]. All ones are given too: without a mask, `forward`
        would look for padding among tokens that are only the end of a text."""
        mask = torch.ones_like(self.tokens) if self.mask is None else self.mask
        return mask.repeat_interleave(n, 0)


class Bunch:
    """Cells on their way through the layers as one batch, [batch, cell] rows.

    The cells of a batch row are neighbours, so that the base run's keys and values serve them
    without being repeated.
    """

    def __init__(
        self, engine: PatchEngine, cells: list[Cell], first: int, observe: list[str]
    ) -> None:
        self.engine = engine
        self.cells = cells  # by the layer they begin in
        self.first = first
        self.observe = observe
        self.prefix = engine.prefix(first)
        self.stream = engine.stream(0, first, 0)
        self.seen: dict[str, Tensor] = {}

    def step(self, layer: int) -> None:
        """Through one layer, or the embedding; who begins there joins."""
        if layer == EMBEDDING:
            self._embed()
            return
        n = sum(cell.layer == layer for cell in self.cells)
        if n:
            joining = self.engine.stream(layer, self.first, n)
            self.stream = torch.cat((self.stream, joining), 1)
        self.stream = self._through(layer, self.stream.flatten(0, 1), layer)

    def _embed(self) -> None:
        n = sum(cell.layer == EMBEDDING for cell in self.cells)
        tokens = self.engine.tokens[:, self.first :].repeat_interleave(n, 0)
        self.stream = self._through(EMBEDDING, tokens, None)

    def _through(
        self, stage: int, rows: Tensor, start_at_layer: int | None
    ) -> Float[Tensor, "batch n pos d_model"]:
        engine = self.engine
        n = len(rows) // engine.batch
        active = enumerate(self.cells[:n])
        seen_here = [name for name in self.observe if engine.model.stage(name) == stage]
        hooks = [
            *editing_hooks(active, engine.batch, n, self.first, engine, stage),
            *observing_hooks(seen_here, self.seen, engine.batch, n),
        ]
        with engine.model.hooks(fwd_hooks=hooks, on_zero_fire="error"):
            out = engine.model(
                rows,
                start_at_layer=start_at_layer,
                stop_at_layer=stage + 1,
                past_kv_cache=self.prefix,
                attention_mask=engine.mask_of(n),
            )
        return out.unflatten(0, (engine.batch, n))

    def outcomes(self) -> list[Outcome]:
        """What became of the cells."""
        shared = ManyLogits(self.engine.model, self.stream, self.first, self.engine._of_base)
        return [
            Outcome(cell.number, self._logits(shared, place, cell), self._observed(place))
            for place, cell in enumerate(self.cells)
        ]

    def _logits(self, shared: "ManyLogits", place: int, cell: Cell) -> Tensor:
        engine = self.engine
        behind = [edit for edit in cell.edits if engine.model.stage(edit.name) == engine.n_layers]
        if not behind:
            return LazyLogits(shared, place)
        joined = cell.layer < engine.n_layers
        stream = self.stream[:, place] if joined else engine.stream(-1, self.first, 1)[:, 0]
        alone = [(0, cell._replace(edits=tuple(behind)))]
        hooks = editing_hooks(alone, engine.batch, 1, self.first, engine)
        with engine.model.hooks(fwd_hooks=hooks, on_zero_fire="error"):
            logits = engine.model(stream, start_at_layer=engine.n_layers)
        before = engine._of_base.columns(0, list(range(self.first)))
        return torch.cat((before, logits), 1)

    def _observed(self, place: int) -> dict[str, Tensor]:
        observed = {}
        for name in self.observe:
            value = self.engine.base[name]
            if name in self.seen and place < self.seen[name].shape[1]:
                axis = self.engine.pos_axis(name)
                before = value.narrow(axis, 0, self.first)
                value = torch.cat((before, self.seen[name][:, place]), axis)
            observed[name] = value
        return observed


# --- hooks ----------------------------------------------------------------------------------------


def editing_hooks(
    cells: Iterable[tuple[int, Cell]],
    batch: int,
    n: int,
    first: int,
    engine: PatchEngine,
    stage: int | None = None,
) -> list[tuple[str, Callable[..., Tensor]]]:
    """One hook a point for the edits of all cells there, each on its own rows. `first` is the
    position the forward begins at; `stage`: only points of this one."""
    by_name: dict[str, list[tuple[int, Index, Any]]] = {}
    for place, cell in cells:
        for edit in cell.edits:
            if stage is None or engine.model.stage(edit.name) == stage:
                index = shifted(edit.index, engine.pos_axis(edit.name), first, engine.n_pos)
                by_name.setdefault(edit.name, []).append((place, index, edit.value))

    def hook_for(edits: list[tuple[int, Index, Any]]) -> Callable[..., Tensor]:
        def assign(value: Tensor, hook: Any) -> Tensor:
            value = value.clone()  # others may hold the same memory
            by_cell = value.unflatten(0, (batch, n))
            for place, index, new in edits:
                mine = by_cell[:, place]
                mine[index] = new(mine[index]) if callable(new) else new
            return value

        return assign

    return [(name, hook_for(edits)) for name, edits in by_name.items()]


def observing_hooks(
    names: Iterable[str], seen: dict[str, Tensor], batch: int, n: int
) -> list[tuple[str, Callable[..., None]]]:
    """Hooks that keep what passes, [batch, cell, …], under the name of their point."""

    def keep_as(name: str) -> Callable[..., None]:
        def keep(value: Tensor, hook: Any) -> None:
            seen[name] = value.unflatten(0, (batch, n)).clone()

        return keep

    return [(name, keep_as(name)) for name in names]


def n_positions(model: Any, tokens: Any) -> int:
    """How many positions a text has, by what `forward` makes of it."""
    return int((tokens if isinstance(tokens, Tensor) else model.to_tokens(tokens)).shape[-1])


def only_listen(value: Tensor, hook: Any) -> None:
    """A hook that does nothing."""


only_listen.is_listener = True  # type: ignore[attr-defined]


def first_of(columns: Any, n_pos: int, name: str) -> int:
    """The first position that an index chooses. IndexError for one that is not there, ValueError
    for what is no int, slice or list of ints."""
    if isinstance(columns, slice):
        if columns.step is not None and columns.step < 1:
            raise ValueError(f"positions of an edit of {name!r} are counted backwards: {columns!r}")
        return min(range(n_pos)[columns], default=n_pos)
    several = columns.tolist() if isinstance(columns, Tensor) else columns
    several = several if isinstance(several, list) else [several]
    for each in several:
        if isinstance(each, bool) or not isinstance(each, int):
            raise ValueError(
                f"positions of an edit of {name!r} are an int, a slice or a list, got {columns!r}"
            )
        if not -n_pos <= each < n_pos:
            raise IndexError(f"position {each} of {name!r} is outside a text of {n_pos}")
    return min((each % n_pos for each in several), default=n_pos)


def shifted(index: Index, axis: int, first: int, n_pos: int) -> Index:
    """An index into a whole text, for activations that begin at position `first`."""
    if axis >= len(index):
        return index
    columns = index[axis]
    here: Any
    if isinstance(columns, slice):
        chosen = range(n_pos)[columns]
        start = chosen.start if chosen else n_pos
        here = slice(start - first, max(chosen.stop, start) - first, chosen.step)
    elif isinstance(columns, int):
        here = columns % n_pos - first
    else:
        here = torch.as_tensor(columns) % n_pos - first
    return (*index[:axis], here, *index[axis + 1 :])


def as_result(result: Any) -> Tensor:
    """What a metric returned, as a tensor; of a single element, without axes. TypeError for what is
    no number."""
    try:
        tensor = torch.as_tensor(ordinary(result)).detach()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"a metric must return a number or a tensor, got {type(result).__name__}"
        ) from None
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return wide.reshape(()) if wide.numel() == 1 else wide
