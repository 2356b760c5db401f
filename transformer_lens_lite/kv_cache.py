"""The keys and values of positions already seen, so that they are computed once.

A `KeyValueCache` has one entry per layer. An entry is a tuple of shared *prefix* segments, which it
never writes, and a growing *tail* of its own. Freezing makes the tail read-only too: a frozen cache
is a prefix, and any number of forwards, or `branch()`es, read it without copying.

Memory is [batch, kv_head, pos, d_head], so that a batched product reads it in place. What users see
is the classic [batch, pos, kv_head, d_head].
"""

import copy
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from transformer_lens_lite import kv_formats
from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.fingerprint import EditingHooks, Filling, Fingerprint
from transformer_lens_lite.padding import Padding, with_ones

NewKeys = Float[Tensor, "batch kv_head new_pos d_head"]
NewValues = Float[Tensor, "batch kv_head new_pos d_value"]
StoredKeys = Float[Tensor, "_row kv_head _key_pos d_head"]  # _: sizes differ by segment
StoredValues = Float[Tensor, "_row kv_head _key_pos d_value"]
Segment = tuple[StoredKeys, StoredValues]
FIRST_CAPACITY = 64


def divides(rows: int, batch: int) -> bool:
    """Whether `rows` rows can serve `batch`, the same number of times each."""
    return batch > 0 and rows > 0 and batch % rows == 0


def serving(shared: Shaped[Tensor, "row *rest"], batch: int) -> Shaped[Tensor, "batch *rest"]:
    """Shared rows, each as often as it takes to be `batch`, neighbours alike; one row is not
    copied."""
    rows = shared.shape[0]
    if rows in (1, batch):
        return shared.expand(batch, *shared.shape[1:])
    return shared.repeat_interleave(batch // rows, 0)


def columns_of(pos: Any, length: int) -> list[int]:
    """The absolute columns that an int, a slice or a list chooses among `length`.

    Raises: IndexError for one that is not there; ValueError for none, for the same one twice and
        for what is no choice.
    """
    if isinstance(pos, slice):
        columns = list(range(length))[pos]
    else:
        given = pos.tolist() if isinstance(pos, Tensor) else pos
        given = [given] if isinstance(given, int) else given
        whole = isinstance(given, list | range) and all(type(each) is int for each in given)
        if not whole:
            raise ValueError(f"pos must be an int, a slice or a list of ints, got {pos!r}")
        for each in given:
            if not -length <= each < length:
                raise IndexError(f"pos {each} is outside a cache of {length} positions")
        columns = [each % length for each in given]
    if not columns:
        raise ValueError(f"pos={pos!r} chooses none of {length} positions")
    if len(set(columns)) < len(columns):
        raise ValueError(f"pos={pos!r} names a position twice")
    return columns


def overwritten(
    stored: Float[Tensor, "row kv_head key_pos inner"],
    places: Int[Tensor, " n_pos"],
    new: Float[Tensor, "#row kv_head n_pos inner"],
) -> Float[Tensor, "row kv_head key_pos inner"]:
    """A copy with `new` at these places."""
    return stored.index_copy(2, places, new.expand(len(stored), -1, -1, -1))


def padded_left(
    stored: Float[Tensor, "_row kv_head key_pos _"], length: int
) -> Float[Tensor, "_row kv_head length _"]:
    """Zeros in front, up to that many positions."""
    return F.pad(stored, (0, 0, length - stored.shape[2], 0))


def check_size(name: str, value: Any) -> None:
    """Raise ValueError unless it is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def check_like(
    new: Float[Tensor, "batch kv_head pos d"],
    stored: Float[Tensor, "_row _kv_head _slot _d"],
    what: str,
) -> None:
    """Raise ValueError unless new keys or values are of the shape, dtype and device stored."""
    expected, got = (stored.shape[1], stored.shape[3]), (new.shape[1], new.shape[3])
    if got != expected:
        raise ValueError(f"the cache holds (heads, d_head) {expected}, got {got}")
    if new.dtype != stored.dtype:
        raise ValueError(f"the cache is {stored.dtype}, the {what} are {new.dtype}")
    if new.device != stored.device:
        raise ValueError(f"the cache is on {stored.device}, the {what} on {new.device}")


def compact(t: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """The same values without a graph, in memory that holds nothing else."""
    t = t.detach()
    return t if t.untyped_storage().nbytes() == t.nbytes else t.contiguous().clone()


class KeyValueCacheEntry:
    """One layer's keys (rotated, as attention uses them) and values."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        max_len: int | None = None,
        d_value: int | None = None,
    ) -> None:
        batch, n_kv_heads, d_head = shape
        self.max_len = max_len
        self.frozen = False
        self.prefix: tuple[Segment, ...] = ()
        self._length = 0  # of the tail
        empty = torch.empty(batch, n_kv_heads, max_len or 0, d_head, dtype=dtype, device=device)
        values_shape = (*empty.shape[:3], d_value or d_head)
        self._keys, self._values = empty, empty.new_empty(values_shape)
        self._joined_with_graph: Segment | None = None  # what `advance` will make the tail

    # -- reading --

    @property
    def length(self) -> int:
        """Positions stored, prefix included."""
        if not self.prefix:
            return self._length
        return sum(keys.shape[2] for keys, _ in self.prefix) + self._length

    @property
    def batch_size(self) -> int:
        """Rows of the tail."""
        return self._keys.shape[0]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What is stored, without copying: the prefix's segments, then the tail if it holds
        anything."""
        tail = (self._keys[:, :, : self._length], self._values[:, :, : self._length])
        return (*self.prefix, tail) if self._length or not self.prefix else self.prefix

    @property
    def past_keys(self) -> Float[Tensor, "batch pos kv_head d_head"]:
        """The stored keys: a view, unless they lie in several segments."""
        return self._joined(0)

    @property
    def past_values(self) -> Float[Tensor, "batch pos kv_head d_value"]:
        """The stored values: a view, unless they lie in several segments."""
        return self._joined(1)

    def _joined(self, which: int) -> Float[Tensor, "batch pos kv_head _"]:
        parts = [serving(segment[which], self.batch_size) for segment in self.segments]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).transpose(1, 2)

    # -- growing --

    def append(
        self,
        new_keys: Float[Tensor, "batch new_pos kv_head d_head"],
        new_values: Float[Tensor, "batch new_pos kv_head d_value"],
    ) -> tuple[
        Float[Tensor, "batch pos kv_head d_head"], Float[Tensor, "batch pos kv_head d_value"]
    ]:
        """Stored and new keys and values, joined along pos; kept unless frozen.

        Raises: ValueError when full, or for a wrong batch, heads, dtype or device, before writing.
        """
        keys, values = new_keys.transpose(1, 2), new_values.transpose(1, 2)
        self.check_batch(keys.shape[0])
        self.check_kind(keys)
        check_like(values, self._values, "values")
        if (values.shape[0], values.shape[2]) != (keys.shape[0], keys.shape[2]):
            raise ValueError(
                f"keys are of (batch, pos) {tuple(new_keys.shape[:2])}, values of "
                f"{tuple(new_values.shape[:2])}"
            )
        self.check_room(keys.shape[2])
        segments = self.extend(keys, values)
        self.advance(keys.shape[2])
        if len(segments) == 1:
            joined_keys, joined_values = segments[0]
        else:
            batch = keys.shape[0]
            joined_keys, joined_values = (
                torch.cat([serving(segment[i], batch) for segment in segments], 2) for i in (0, 1)
            )
        return joined_keys.transpose(1, 2), joined_values.transpose(1, 2)

    def extend(self, keys: NewKeys, values: NewValues) -> tuple[Segment, ...]:
        """The segments attention reads: what is stored, and the new positions.

        Nothing counts as stored until `advance`: a forward that fails half way leaves no trace.
        """
        self._joined_with_graph = None
        if torch.is_grad_enabled():
            self._leave_inference_mode()
        if self.frozen:
            return (*self.segments, (keys, values)) if self.length else ((keys, values),)
        if torch.is_grad_enabled():
            # writing in place would break the graphs of earlier steps, so join into new tensors
            self._joined_with_graph = (
                torch.cat((self._keys[:, :, : self._length], keys), 2),
                torch.cat((self._values[:, :, : self._length], values), 2),
            )
            return (*self.prefix, self._joined_with_graph)
        start, end = self._length, self._length + keys.shape[2]
        self._make_room(end)
        self._keys.narrow(2, start, end - start).copy_(keys)
        self._values.narrow(2, start, end - start).copy_(values)
        return (*self.prefix, (self._keys.narrow(2, 0, end), self._values.narrow(2, 0, end)))

    def advance(self, n_new: int) -> None:
        """Count `n_new` extended positions as stored; a frozen entry stays."""
        if not self.frozen:
            self._hold(self._length + n_new)

    def _hold(self, length: int) -> None:
        """Make the tail this long, of what `extend` has written; doing it twice is the same."""
        if self._joined_with_graph is not None:
            self._keys, self._values = self._joined_with_graph
            self._joined_with_graph = None
        self._length = length

    def _leave_inference_mode(self) -> None:
        """Copy what was made in inference mode, once: autograd refuses to save such tensors."""
        if torch.compiler.is_compiling():  # a graph could not ask
            return
        if self._keys.is_inference():
            self._keys, self._values = self._keys.clone(), self._values.clone()
        if any(keys.is_inference() for keys, _ in self.prefix):
            self.prefix = tuple((keys.clone(), values.clone()) for keys, values in self.prefix)

    def _make_room(self, needed: int) -> None:
        capacity = self._keys.shape[2]
        stale = (
            not torch.compiler.is_compiling()
            and self._keys.is_inference()
            and not torch.is_inference_mode_enabled()
        )
        if needed <= capacity and not self._keys.requires_grad and not stale:
            return
        capacity = max(needed, capacity if needed <= capacity else 2 * capacity, FIRST_CAPACITY)
        larger = []
        for old in (self._keys, self._values):
            new = old.new_empty(*old.shape[:2], self.max_len or capacity, old.shape[3])
            new[:, :, : self._length] = old[:, :, : self._length].detach()
            larger.append(new)
        self._keys, self._values = larger  # both at once: memory may run out before the second

    def check_kind(self, keys: NewKeys) -> None:
        """Raise ValueError unless these keys are of the shape, dtype and device stored here."""
        mine = self._keys
        new, stored = keys.shape, mine.shape
        is_alike = keys.dtype == mine.dtype and keys.device == mine.device
        if not is_alike or new[1] != stored[1] or new[3] != stored[3]:
            check_like(keys, mine, "keys")  # which says what differs

    def check_next(self, batch: int, n_new: int) -> None:
        """Raise ValueError unless an input [batch, n_new] may follow here."""
        fits = self.max_len is None or self._length + n_new <= self.max_len
        if not fits or batch != self._keys.shape[0]:
            self.check_batch(batch)  # which, if anything, is wrong
            self.check_room(n_new)

    def check_batch(self, batch: int) -> None:
        """Raise ValueError unless an input of `batch` rows may continue, or read, this entry."""
        if batch == self.batch_size or (self.frozen and divides(self.batch_size, batch)):
            return
        if self.frozen:
            hint = " (a frozen cache serves as many rows as it has, or a multiple of that)"
        else:
            hint = " (freeze() it to share it, or expand(n) it)" if self.batch_size == 1 else ""
        raise ValueError(f"the cache holds {self.batch_size} rows, the input has {batch}{hint}")

    def check_room(self, n_new: int) -> None:
        """Raise ValueError when `n_new` more positions would not fit into `max_len`."""
        if self.max_len is not None and not self.frozen and self._length + n_new > self.max_len:
            raise ValueError(
                f"the cache is full: {self._length} of max_len={self.max_len} positions are "
                "taken and "
                f"{n_new} more were given"
            )

    # -- editing at rest --

    def edit(self, pos: Any, keys: Any = None, values: Any = None) -> None:
        """See `KeyValueCache.edit`."""
        if self.frozen:
            raise ValueError("a frozen cache is read only: edit a clone() or a branch() of it")
        if keys is None and values is None:
            raise ValueError("there is nothing to write: give keys=, values= or both")
        columns = columns_of(pos, self.length)
        like_tail = (self._keys, self._values)
        new = [
            None if given is None else self._written(name, given, stored, len(columns))
            for name, given, stored in zip(
                ("keys", "values"), (keys, values), like_tail, strict=True
            )
        ]
        differ = any(given is not None and given.shape[0] > 1 for given in new)
        edited, end = [], 0
        for segment in self.segments:
            start, end = end, end + segment[0].shape[2]
            chosen = [i for i, column in enumerate(columns) if start <= column < end]
            if chosen:
                rows = self.batch_size if differ else segment[0].shape[0]
                index = torch.tensor(
                    [columns[i] - start for i in chosen], device=like_tail[0].device
                )
                changed_keys, changed_values = (
                    serving(stored, rows)
                    if given is None
                    else overwritten(serving(stored, rows), index, given[:, :, chosen])
                    for stored, given in zip(segment, new, strict=True)
                )
                segment = (changed_keys, changed_values)
            edited.append(segment)
        has_tail = len(edited) > len(self.prefix)
        keys, values = edited.pop() if has_tail else (self._keys, self._values)
        # together: an interrupt in between would leave half of the edit
        self._keys, self._values, self.prefix = keys, values, tuple(edited)

    def _written(
        self, name: str, given: Any, stored: StoredKeys, n_pos: int
    ) -> Float[Tensor, "_row kv_head n_pos _"]:
        """What is to be written: of one row, or of as many as the batch. ValueError when it does
        not fit."""
        if isinstance(given, int | float):
            given = stored.new_tensor(given)
        if not isinstance(given, Tensor):
            raise ValueError(f"{name} must be a tensor or a number, got {type(given).__name__}")
        if given.dtype != stored.dtype or given.device != stored.device:
            raise ValueError(
                f"{name} are {given.dtype} on {given.device}, the cache is {stored.dtype} on "
                f"{stored.device}"
            )
        rows = given.shape[0] if given.ndim == 4 else 1
        shape = (rows, n_pos, stored.shape[1], stored.shape[3])
        try:
            if rows not in (1, self.batch_size):
                raise RuntimeError
            return given.expand(shape).transpose(1, 2)
        except RuntimeError:
            wanted = [self.batch_size, *shape[1:]]
            raise ValueError(
                f"{name} must be, or broadcast to, [batch, n_pos, kv_head, d_head] = {wanted}; got "
                f"{list(given.shape)}"
            ) from None

    # -- other entries from this one --

    def select_rows(self, indices: Int[Tensor, " new_batch"]) -> "KeyValueCacheEntry":
        """See `KeyValueCache.select_rows`."""
        new = copy.copy(self)
        new._joined_with_graph = None
        new._keys, new._values = (t.index_select(0, indices) for t in (self._keys, self._values))
        new.prefix = tuple(self._rows_of(segment, indices) for segment in self.prefix)
        return new

    def _rows_of(self, shared: Segment, indices: Int[Tensor, " new_batch"]) -> Segment:
        keys, values = shared
        if len(keys) == 1:
            return shared
        rows = indices // (self.batch_size // len(keys))
        return keys.index_select(0, rows), values.index_select(0, rows)

    @classmethod
    def holding(cls, keys: StoredKeys, values: StoredValues) -> "KeyValueCacheEntry":
        """An entry of these."""
        batch, n_kv_heads, length, d_head = keys.shape
        shape = (batch, n_kv_heads, d_head)
        new = cls(shape, keys.dtype, keys.device, d_value=values.shape[3])
        new._keys, new._values, new._length = keys, values, length
        return new

    def branch(self, batch_size: int, max_len: int | None = None) -> "KeyValueCacheEntry":
        """A growing entry whose prefix is what this one holds, shared and not copied."""
        if not torch.is_inference_mode_enabled():
            self._leave_inference_mode()
        shape = (batch_size, self._keys.shape[1], self._keys.shape[3])
        d_value = self._values.shape[3]
        new = KeyValueCacheEntry(shape, self._keys.dtype, self._keys.device, max_len, d_value)
        new.prefix = tuple((k.detach(), v.detach()) for k, v in self.segments if k.shape[2])
        return new

    def reading(self) -> "KeyValueCacheEntry":
        """A frozen entry of what is stored, in the same memory: without the room, in which this one
        goes on."""
        new = copy.copy(self)
        new._joined_with_graph = None
        new._keys, new._values = (t[:, :, : self._length] for t in (self._keys, self._values))
        new.frozen = True
        return new

    def replaced(self, keys: StoredKeys, values: StoredValues) -> "KeyValueCacheEntry":
        """An entry like this one, room included, that holds exactly these."""
        new = copy.copy(self)
        new.prefix = ()
        if self.max_len is not None:
            new.max_len = self.length - self._length + self.max_len
        new._joined_with_graph = None
        new._keys, new._values, new._length = keys, values, keys.shape[2]
        return new

    def __copy__(self) -> "KeyValueCacheEntry":
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """What deepcopy and pickle take: what is stored, without the room to grow, or a graph."""
        state = dict(self.__dict__, _joined_with_graph=None)
        state["prefix"] = tuple((compact(keys), compact(values)) for keys, values in self.prefix)
        for name in ("_keys", "_values"):
            state[name] = compact(state[name][:, :, : self._length])
        return state

    def nbytes(self) -> int:
        """Bytes of memory this entry keeps alive, shared prefixes included."""
        tensors = [self._keys, self._values] + [t for segment in self.prefix for t in segment]
        return sum(t.untyped_storage().nbytes() for t in tensors)


class KeyValueCache:
    """Keys, values and the attention mask of what a model has seen, per layer.

    Pass it as `past_kv_cache=`: every forward appends to it, until it is frozen; then forwards read
    it as a prefix and leave it unchanged. A prefix of r rows serves every batch that is a multiple
    of r: row i of it continues as rows i*n, …, i*n + n - 1.
    """

    def __init__(
        self,
        entries: list[KeyValueCacheEntry],
        previous_attention_mask: Int[Tensor, "batch pos"] | None = None,
        frozen: bool = False,
    ) -> None:
        self.entries = entries
        self.frozen = frozen
        # None: no position is padding. Kept so, the common case needs no mask anywhere.
        self._mask = previous_attention_mask
        self._padding: Padding | None = None  # made of the mask when a step first needs it
        self.n_forwards = 0  # that were stored here
        self._origin: Fingerprint | None = None  # known once frozen, saved or pickled
        self._filling: Filling | None = None
        self._hooks: EditingHooks | None = None
        self._trusted: Callable[[], Any] | None = None  # the model last checked, if it still lives
        self._is_checked = True
        self._is_owned = False

    @classmethod
    def init_cache(
        cls,
        cfg: HookedTransformerConfig,
        device: torch.device | str | None = None,
        batch_size: int = 1,
        max_len: int | None = None,
    ) -> "KeyValueCache":
        """An empty cache for a model with this config.

        Args:
            max_len: room for exactly this many positions, allocated now; None: grow geometrically.
        Raises: TypeError for what is no config; ValueError for sizes that are no positive integers.
        """
        if not isinstance(cfg, HookedTransformerConfig):
            raise TypeError(
                f"init_cache needs a config, such as model.cfg; got {type(cfg).__name__}"
            )
        check_size("batch_size", batch_size)
        if max_len is not None:
            check_size("max_len", max_len)
        assert isinstance(cfg.dtype, torch.dtype)
        where = torch.device(device or cfg.device or "cpu")
        if where == torch.device("cuda"):  # tensors there will say which one
            where = torch.device("cuda", torch.cuda.current_device())
        entries = []
        for spec in cfg.block_specs():
            attention = spec.attention
            heads = (
                attention.n_heads if cfg.ungroup_grouped_query_attention else attention.n_kv_heads
            )
            shape = (batch_size, heads, attention.d_head)
            entries.append(KeyValueCacheEntry(shape, cfg.dtype, where, max_len, attention.d_value))
        return cls(entries)

    def __getitem__(self, layer: int) -> KeyValueCacheEntry:
        return self.entries[layer]

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def length(self) -> int:
        """Positions stored."""
        return self.entries[0].length if self.entries else 0

    def length_before(self, layers: range, batch: int, n_new: int) -> int:
        """Positions stored in these layers; ValueError unless an input [batch, n_new] may follow
        them in each."""
        entries = self.entries[layers.start : layers.stop]
        lengths = {entry.length for entry in entries}
        if len(lengths) > 1:
            raise ValueError(f"the cache holds different lengths in different layers: {lengths}")
        for entry in entries:
            entry.check_next(batch, n_new)
        return lengths.pop() if lengths else self.length

    @property
    def batch_size(self) -> int:
        """Rows stored."""
        return self.entries[0].batch_size if self.entries else 0

    @property
    def previous_attention_mask(self) -> Int[Tensor, "batch pos"]:
        """[batch, pos] of 0 (padding) and 1."""
        if self._mask is not None:
            self._padding = None  # whoever has the mask may edit it
            return self._mask
        entry = self.entries[0]
        device = entry._keys.device
        return torch.ones(self.batch_size, self.length, dtype=torch.long, device=device)

    @previous_attention_mask.setter
    def previous_attention_mask(self, mask: Int[Tensor, "..."]) -> None:
        mask = kv_formats.as_mask(mask)
        expected = [self.batch_size, self.length]
        if list(mask.shape) != expected:
            raise ValueError(f"the mask of this cache is {expected}, got {list(mask.shape)}")
        self._mask = mask

    @property
    def padding(self) -> Int[Tensor, "batch pos"] | None:
        """The mask where any position is padding; None where none is."""
        return self._mask

    @padding.setter
    def padding(self, mask: Int[Tensor, "batch pos"] | None) -> None:
        self._mask = mask

    def mask_ahead(self, batch: int, n: int) -> Int[Tensor, "batch n"] | None:
        """The mask of the first n columns, those that are not stored yet being real; None: no
        padding."""
        mask = self._mask
        if mask is None:
            return None
        if len(mask) != batch or torch.compiler.is_compiling():
            return with_ones(serving(mask, batch), n)
        padding = self._padding
        if padding is None or not padding.stands_for(mask):
            padding = self._padding = Padding(mask)
        return padding.up_to(n)

    def padding_of(self, mask: Int[Tensor, "batch pos"] | None) -> Padding | None:
        """What was worked out of a mask that came from `mask_ahead`; None: nothing yet."""
        padding = self._padding
        return padding if padding is not None and padding.latest is mask else None

    def append_attention_mask(
        self, attention_mask: Int[Tensor, "batch new_pos"]
    ) -> Int[Tensor, "batch pos"]:
        """The stored mask and this one, joined; kept unless frozen.

        Raises: ValueError for anything but [batch, new_pos] of 0 (padding) and 1, or a batch that
            does not continue the rows stored.
        """
        previous = self.previous_attention_mask
        new = kv_formats.as_mask(attention_mask).to(previous.device)
        if new.ndim != 2:
            raise ValueError(f"attention_mask must be [batch, new_pos], got {list(new.shape)}")
        for entry in self.entries[:1]:
            entry.check_batch(new.shape[0])
        joined = torch.cat((serving(previous, new.shape[0]), new), 1)
        if not self.frozen:
            self._mask = joined
        return joined

    def advance(self, layers: range, n_new: int, padding: Int[Tensor, "batch pos"] | None) -> None:
        """Count a forward's positions as stored in these layers: in all of them, or, where an
        interrupt comes before the first, in none.

        padding: the mask of everything stored then, as the property of that name.
        """
        entries = self.entries[layers.start : layers.stop]
        longer = [entry._length + n_new for entry in entries]
        n_forwards = self.n_forwards + 1
        try:
            self._count(entries, longer, n_forwards, padding)
        except BaseException:  # Ctrl-C between two layers: one would be longer than the next
            self._count(entries, longer, n_forwards, padding)
            raise

    def _count(
        self,
        entries: list[KeyValueCacheEntry],
        lengths: list[int],
        n_forwards: int,
        mask: Int[Tensor, "batch pos"] | None,
    ) -> None:
        """May be run twice."""
        for entry, length in zip(entries, lengths, strict=True):
            if not entry.frozen:
                entry._hold(length)
        padding = self.padding_of(mask)
        if padding is not None and mask is not None:
            padding.stand_for(mask)
        self.n_forwards, self._mask = n_forwards, mask

    # -- whose it is --

    @property
    def origin(self) -> Fingerprint | None:
        """The model that filled this cache. None: nobody has, it is gone, or it is not asked."""
        if self._filling is None:
            return self._origin
        grown = self._filling.fingerprint()
        if self._origin is None or grown is None:
            return grown or self._origin
        return grown.beside(self._origin)

    def check_model(self, model: Any) -> None:
        """ValueError when a frozen or loaded cache, or a branch of one, was filled by another
        model, by other weights, or under other hooks than there are now.

        Called before every forward. A cache that grows is checked when a model first reads it.
        """
        if not self._is_checked or torch.compiler.is_compiling():
            return
        is_trusted = not self.frozen and self._trusted is not None and self._trusted() is model
        if self._origin is not None and not is_trusted:
            self._origin.check(model)
            if self._hooks is not None:
                self._hooks.check(model)
            self._trusted = weakref.ref(model)

    def note_filling(self, model: Any) -> None:
        """A forward of this model got through: what it computed is stored from now on."""
        if self.frozen or not self._is_checked or torch.compiler.is_compiling():
            return
        if self._filling is None or not self.length:
            is_known = self._origin is not None or not self.length
            self._filling = Filling.by(model, self._is_owned) if is_known else None
        elif self._filling.model() is not model:
            self._filling = replace(self._filling, is_mixed=True)

    def remember_hooks(self, hooks: EditingHooks) -> None:
        """Refuse hooks from now on that are not among these and would have acted here, and to go on
        without those that would act on what follows."""
        self._hooks = hooks

    def owned(self) -> "KeyValueCache":
        """Itself, for whoever fills it in one go: the model's weights are not looked at for changes
        in between, which takes a while."""
        self._is_owned = True
        return self

    def unchecked(self) -> "KeyValueCache":
        """What is stored here, in the same memory, for any model whose sizes fit. Where it grows,
        it grows by itself."""
        view = self.reading()
        view._mark(self.frozen)
        view._is_checked = False
        return view

    def reading(self) -> "KeyValueCache":
        """A frozen cache of what is stored now, in the same memory; of a growing one, whose weights
        nobody has read yet, it is not known whose it is."""
        view = copy.copy(self)
        view.entries = [entry.reading() for entry in self.entries]
        view.frozen = True
        return view

    # -- editing at rest --

    def edit(self, layer: Any, pos: Any, keys: Any = None, values: Any = None) -> None:
        """Overwrite what one layer stores at some columns. What was computed from it already, here
        and in later layers, stays as it is.

        Prefixes shared with other caches are copied first: they see nothing of it.

        Args:
            layer: negatives count from the last.
            pos: an absolute column, prefixes included, a slice or a list; negatives count from the
                end of what is stored.
            keys, values: [batch, n_pos, kv_head, d_head], what broadcasts to that, or a number.
                Keys are stored rotated, as queries meet them: they replace what `hook_rot_k` saw.
        Raises:
            IndexError: no such layer or column.
            ValueError: a frozen cache; a wrong shape, dtype or device; columns named twice or none.
                Nothing was written then.
        """
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise ValueError(f"layer must be an int, got {layer!r}")
        if not -len(self) <= layer < len(self):
            raise IndexError(f"layer {layer} is outside a cache of {len(self)} layers")
        self.entries[layer].edit(pos, keys, values)

    # -- freezing and copies --

    def freeze(self) -> None:
        """Stop storing: from now on forwards read this cache as a prefix and leave it as it is."""
        self._set_frozen(True)

    def unfreeze(self) -> None:
        """Let forwards append again."""
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        if frozen:
            # takes a while: an interrupt here changes nothing
            self._origin, self._filling = self.origin, None
        try:
            self._mark(frozen)
        except BaseException:  # Ctrl-C between two layers: they are all frozen, or none is
            self._mark(frozen)
            raise

    def _mark(self, frozen: bool) -> None:
        """May be run twice."""
        for entry in self.entries:
            entry.frozen = frozen
            if frozen:  # a prefix is data: graphs that made it are not kept alive through it
                entry._keys, entry._values = entry._keys.detach(), entry._values.detach()
        self.frozen = frozen

    def clone(self) -> "KeyValueCache":
        """A copy that shares no memory with this one."""
        return self._with(lambda keys: keys.clone(), lambda mask: mask.clone())

    def crop(self, length: int) -> "KeyValueCache":
        """A copy of the first `length` positions. ValueError when there are fewer."""
        if type(length) is not int or not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} positions to {length}")
        new = self._with(
            lambda keys: keys[:, :, :length].clone(), lambda mask: mask[:, :length].clone()
        )
        new._hooks = None if self._hooks is None else self._hooks.of_first(length)
        return new

    def expand(self, batch_size: int) -> "KeyValueCache":
        """A copy with every row repeated so that there are `batch_size` rows (a multiple of the
        present)."""
        check_size("batch_size", batch_size)
        times, rest = divmod(batch_size, self.batch_size)
        if rest or times < 1:
            raise ValueError(f"cannot expand a cache of {self.batch_size} rows to {batch_size}")
        return self._with(
            lambda keys: keys.repeat_interleave(times, 0),
            lambda mask: mask.repeat_interleave(times, 0),
        )

    def select_rows(self, indices: Any) -> "KeyValueCache":
        """A cache of these rows, in this order, as often as they are named; a list or [new_batch].

        A prefix that all rows share stays shared; the rest is copied, with its room.
        Raises: IndexError for a row that is not there, ValueError for what are no rows.
        """
        device = self.entries[0]._keys.device
        rows = torch.as_tensor(indices, device=device)
        if rows.ndim != 1 or not rows.numel() or rows.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"rows must be a list of ints, or [new_batch] of them; got {indices!r}"
            )
        if bool(((rows < 0) | (rows >= self.batch_size)).any()):
            raise IndexError(f"{rows.tolist()} names rows outside a cache of {self.batch_size}")
        return self._made_of(
            [entry.select_rows(rows) for entry in self.entries],
            None if self._mask is None else self._mask.index_select(0, rows.to(self._mask.device)),
        )

    @classmethod
    def stack(cls, caches: "Sequence[KeyValueCache]") -> "KeyValueCache":
        """One cache of the rows of several, in their order, that continues each of them as if it
        were alone: shorter ones are padded on the left. A copy; frozen if all of them are.

        Raises: ValueError for caches of different kinds, or none.
        """
        if not caches:
            raise ValueError("there are no caches to stack")
        first, length = caches[0], max(cache.length for cache in caches)
        for i, cache in enumerate(caches):
            if len(cache) != len(first):
                raise ValueError(f"cache {i} has {len(cache)} layers, the first {len(first)}")
            for mine, its in zip(first.entries, cache.entries, strict=True):
                mine.check_kind(its._keys)
        origins = [cache.origin for cache in caches if cache.origin is not None]
        for i, origin in enumerate(origins):
            if origin != origins[0]:
                raise ValueError(f"cache {i} was filled by another model than those before it")
        entries = []
        for layers in zip(*(cache.entries for cache in caches), strict=True):
            keys, values = (
                torch.cat([padded_left(each, length) for each in parts])
                for parts in (
                    [entry.past_keys.transpose(1, 2) for entry in layers],
                    [entry.past_values.transpose(1, 2) for entry in layers],
                )
            )
            entry = layers[0].replaced(keys, values)
            entry.max_len = None
            entries.append(entry)
        masks = [F.pad(c.previous_attention_mask, (length - c.length, 0)) for c in caches]
        mask = torch.cat(masks)
        stacked = first._made_of(entries, None if bool(mask.all()) else mask)
        stacked._filling, stacked._origin = None, origins[0] if origins else None
        stacked._hooks = EditingHooks.shared([cache._hooks for cache in caches if cache._hooks])
        stacked._set_frozen(all(cache.frozen for cache in caches))
        return stacked

    def _made_of(
        self, entries: list[KeyValueCacheEntry], mask: Int[Tensor, "batch pos"] | None
    ) -> "KeyValueCache":
        """A cache like this one, with other contents."""
        new = copy.copy(self)
        new.entries, new._mask = entries, mask
        new._trusted = None  # whoever reads it first is checked
        return new

    def __copy__(self) -> "KeyValueCache":
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __getstate__(self) -> dict[str, Any]:
        mask = None if self._mask is None else compact(self._mask)
        own = {"_mask": mask, "_origin": self.origin}
        own |= dict.fromkeys(("_padding", "_filling", "_trusted"))
        return {**self.__dict__, **own}

    def _with(self, on_keys: Any, on_mask: Any) -> "KeyValueCache":
        entries = [
            entry.replaced(
                on_keys(entry.past_keys.transpose(1, 2)), on_keys(entry.past_values.transpose(1, 2))
            )
            for entry in self.entries
        ]
        return self._made_of(entries, None if self._mask is None else on_mask(self._mask))

    def branch(self, batch_size: int, max_len: int | None = None) -> "KeyValueCache":
        """A growing cache that continues this one for `batch_size` rows, sharing what is stored.

        `batch_size` is a multiple of the rows here: n at a time continue the same row. ValueError
        otherwise.
        """
        check_size("batch_size", batch_size)
        if not divides(self.batch_size, batch_size):
            raise ValueError(
                f"a cache of {self.batch_size} rows cannot continue as {batch_size}, which is not "
                "a multiple"
            )
        if max_len is not None:
            check_size("max_len", max_len)
        entries = [entry.branch(batch_size, max_len) for entry in self.entries]
        mask = None if self._mask is None else serving(self._mask, batch_size).clone()
        branch = self._made_of(entries, mask)
        branch.frozen, branch.n_forwards = False, 0
        return branch

    # -- files, and Hugging Face --

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what is stored to a safetensors file, with all there is to know about it. Shared
        prefixes are written once. An existing file is replaced when the new one is whole."""
        tensors, origin = {}, self.origin
        for layer, entry in enumerate(self.entries):
            tail = (entry._keys[:, :, : entry._length], entry._values[:, :, : entry._length])
            for part, (keys, values) in enumerate((*entry.prefix, tail)):
                tensors[f"{layer}.{part}.keys"] = compact(keys)
                tensors[f"{layer}.{part}.values"] = compact(values)
        if self._mask is not None:
            tensors["mask"] = compact(self._mask)
        facts = {
            "frozen": self.frozen,
            "is_checked": self._is_checked,
            "hooks_of": None if self._hooks is None else self._hooks.length,
            "max_len": [entry.max_len for entry in self.entries],
            "n_prefixes": [len(entry.prefix) for entry in self.entries],
            "origin": None if origin is None else vars(origin),
        }
        kv_formats.write(path, tensors, facts)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], device: torch.device | str | None = None
    ) -> "KeyValueCache":
        """What `save` wrote. On the CPU its memory is the file's, read where it is looked at.

        Raises: FileNotFoundError; ValueError for a damaged file, or one of something else.
        """
        tensors, facts = kv_formats.read(path, device)
        entries = []
        for layer, (n_prefixes, max_len) in enumerate(
            zip(facts["n_prefixes"], facts["max_len"], strict=True)
        ):
            *prefix, tail = [
                (tensors[f"{layer}.{part}.keys"], tensors[f"{layer}.{part}.values"])
                for part in range(n_prefixes + 1)
            ]
            entry = KeyValueCacheEntry.holding(*tail)
            entry.prefix, entry.max_len = tuple(prefix), max_len
            entries.append(entry)
        cache = cls(entries, tensors.get("mask"))
        cache._set_frozen(facts["frozen"])
        cache._is_checked = facts["is_checked"]
        if facts["origin"] is not None:
            cache._origin = Fingerprint(**facts["origin"])
        if facts["hooks_of"] is not None:
            cache._hooks = EditingHooks(facts["hooks_of"])
        return cache

    def to_hf(
        self, cfg: HookedTransformerConfig | None = None, per_query_head: bool = False
    ) -> Any:
        """A transformers DynamicCache of copies of all positions, windows or not, from which a
        Hugging Face model continues. Give that model `previous_attention_mask` and its own.

        Args:
            cfg: needed of a model with `ungroup_grouped_query_attention`: it says how many heads
                keys and values have in Hugging Face's; and with `per_query_head`.
            per_query_head: a copy for every query head of a group, as Falcon's newer decoder keeps
                them.
        Raises: ValueError when the heads of a group differ, which an edit can make; of latent
            attention, where this version of transformers caches latents.
        """
        if per_query_head and cfg is None:
            raise ValueError("per_query_head=True needs cfg=, which says how many those are")
        if self._is_latent(cfg) and kv_formats.hf_caches_latents():
            raise ValueError(
                "latent attention: this version of transformers caches the latents that keys and "
                "values are made from, which cannot be read off keys and values"
            )
        layers = []
        for i, entry in enumerate(self.entries):
            pair = [t.transpose(1, 2) for t in (entry.past_keys, entry.past_values)]
            if cfg is not None and per_query_head:
                times = cfg.block_specs()[i].attention.n_heads // pair[0].shape[1]
                pair = [stored.repeat_interleave(times, 1) for stored in pair]
            elif cfg is not None and cfg.ungroup_grouped_query_attention:
                n_kv_heads = cfg.block_specs()[i].attention.n_kv_heads
                pair = [kv_formats.grouped(stored, n_kv_heads) for stored in pair]
            layers.append((pair[0].clone(), pair[1].clone()))
        return kv_formats.hf_cache(layers)

    def _is_latent(self, cfg: HookedTransformerConfig | None) -> bool:
        """Whether the model it is of has latent attention, as far as anybody knows."""
        origin = {} if self._origin is None else self._origin.config
        config = origin if cfg is None else vars(cfg)
        return config.get("latent_kv_rank") is not None

    @classmethod
    def from_hf(
        cls,
        cache: Any,
        cfg: HookedTransformerConfig,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> "KeyValueCache":
        """A growing cache of copies of what a transformers DynamicCache holds.

        Args:
            cfg: of the model that is to continue.
            attention_mask: 0 where it holds padding; None: nowhere.
        Raises: ValueError when it holds a window only, or is of other sizes than `cfg`.
        """
        entries = [
            KeyValueCacheEntry.holding(keys.clone(), values.clone())
            for keys, values in kv_formats.layers_of_hf(cache, cfg)
        ]
        new = cls(entries)
        new.padding = kv_formats.checked_mask(attention_mask, new.batch_size, new.length)
        return new

    def nbytes(self) -> int:
        """Bytes of memory this cache keeps alive."""
        return sum(entry.nbytes() for entry in self.entries)

    def __repr__(self) -> str:
        state = "frozen" if self.frozen else "growing"
        return (
            f"KeyValueCache({len(self)} layers, {self.batch_size} x {self.length} positions, "
            f"{state}, "
            f"{self.nbytes() / 2**20:.2f} MiB)"
        )


TransformerLensKeyValueCache = KeyValueCache
HookedTransformerKeyValueCache = KeyValueCache
HookedTransformerKeyValueCacheEntry = KeyValueCacheEntry
TransformerLensKeyValueCacheEntry = KeyValueCacheEntry
