"""Activations of many runs, found again by what they were tagged with.

A conversation is such a set of runs: one for each message, tagged with who speaks and in which
turn, with spans for the phases of a message.
"""

import itertools
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_lens_lite.activations import ActivationCache, MissingActivation, Span
from transformer_lens_lite.nearest import closest

END_OF_REASONING = "</think>"
STAND_IN = "\u2402stand-in\u2403"  # for a message's content, of which no template says anything


@dataclass(frozen=True)
class ActivationRecord:
    """One value of one run. `layer` is None outside of the blocks."""

    name: str
    layer: int | None
    value: Tensor
    tags: Mapping[str, Any]
    cache: ActivationCache  # the run it is from

    def __repr__(self) -> str:
        tags = ", ".join(f"{name}={value!r}" for name, value in self.tags.items())
        return f"<{self.name} {list(self.value.shape)} of {tags or 'an untagged run'}>"


class ActivationStore:
    """Caches of many runs, with tags.

    store = ActivationStore()
    with model.capture("resid_post", store=store, participant="user", turn=0):
        model(tokens)
    store.at("resid_post", layer=5, participant="user", turn=0)     # [batch, column, d_model]
    """

    def __init__(self) -> None:
        self._runs: list[tuple[ActivationCache, dict[str, Any]]] = []

    def add(self, cache: ActivationCache, **tags: Any) -> None:
        """One more run; of a cache that several texts were run into, each of them."""
        if not isinstance(cache, ActivationCache):
            raise TypeError(f"a store holds ActivationCaches, got {type(cache).__name__}")
        if reserved := sorted({"name", "layer", "span"} & tags.keys()):
            raise TypeError(f"{reserved[0]!r} is how values are asked for, and cannot be a tag")
        self._runs += [(run, dict(tags)) for run in cache.runs]

    def add_batch(
        self,
        runs: Iterable[tuple[ActivationCache, Mapping[str, Any]]],
        device: torch.device | str = "cpu",
    ) -> None:
        """Several runs, each with its tags, all copied to one device: one transfer for all values
        of a shape, dtype and device, and one wait for everything."""
        pairs = list(runs)
        moved = iter(offloaded([v for cache, _ in pairs for v in cache.values()], device))
        for cache, tags in pairs:
            copy = cache.select()
            copy.cache_dict = {name: next(moved) for name in cache}
            self.add(copy, **tags)

    # -- asking --

    def query(
        self, name: str | None = None, layer: int | None = None, **tags: Any
    ) -> list[ActivationRecord]:
        """All values with this name, layer and tags.

        Raises: TypeError for a tag that no run has.
        """
        self._check_tags(tags)
        return [
            record
            for cache, own in self._runs
            if all(tag in own and own[tag] == value for tag, value in tags.items())
            for record in self._records(cache, own, name, layer)
        ]

    def at(
        self,
        name: str = "resid_post",
        layer: int | None = None,
        span: str | Span | None = None,
        **tags: Any,
    ) -> Tensor:
        """The one value that fits, or the columns of a span of it.

        Raises: KeyError when none or several fit, naming them.
        """
        found = self.query(name, layer, **tags)
        if len(found) != 1:
            asked = ", ".join(f"{key}={value!r}" for key, value in tags.items())
            shown = found or [record for _, record in zip(range(6), self, strict=False)]
            which = "they are" if found else "there are, for example,"
            raise MissingActivation(
                f"{len(found)} values fit {name!r}, layer {layer}, {asked or 'no tags'}; {which} "
                f"{shown[:6]}"
            )
        record = found[0]
        return record.value if span is None else record.cache.at(record.name, span=span)

    def _check_tags(self, tags: Mapping[str, Any]) -> None:
        known = {tag for _, own in self._runs for tag in own}
        for tag in tags:
            if tag not in known:
                raise TypeError(
                    f"no run is tagged with {tag!r}; tags are {sorted(known)}.{closest(tag, known)}"
                )

    @staticmethod
    def _records(
        cache: ActivationCache, tags: Mapping[str, Any], name: str | None, layer: int | None
    ) -> Iterator[ActivationRecord]:
        try:
            names = cache.select(name, layer)
        except (KeyError, ValueError):  # another run may have it
            return
        for full, value in names.items():
            parts = full.split(".")
            number = int(parts[1]) if parts[0] == "blocks" else None
            yield ActivationRecord(full, number, value, tags, cache)

    def __iter__(self) -> Iterator[ActivationRecord]:
        return itertools.chain.from_iterable(
            self._records(cache, tags, None, None) for cache, tags in self._runs
        )

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def runs(self) -> list[tuple[ActivationCache, dict[str, Any]]]:
        """Every cache, with its tags."""
        return list(self._runs)

    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(cache.nbytes() for cache, _ in self._runs)

    def __repr__(self) -> str:
        tags = sorted({tag for _, own in self._runs for tag in own})
        return f"ActivationStore({len(self)} runs, tags {tags}, {self.nbytes() / 2**20:.2f} MiB)"

    # -- conversations --

    def add_conversation(
        self,
        model: Any,
        messages: Sequence[Mapping[str, str]],
        spec: Any = "resid_post",
        **tags: Any,
    ) -> ActivationCache:
        """One forward over a conversation, added as one run for each message: its columns, tagged
        with `participant` (its role) and `turn` (its number), in views of one cache.

        The messages are found through the tokenizer's chat template. A message that contains
        "</think>", as the tokenizer gives it back, has the spans "reasoning" and "answer".

        Returns: the cache of the whole conversation, with a span "turn 0", "turn 1" … for each.
        """
        if reserved := sorted({"participant", "turn"} & tags.keys()):
            raise TypeError(f"{reserved[0]!r} is the tag that each message gets by itself")
        tokens, spans = message_spans(model, messages)
        with torch.no_grad(), model.capture(spec) as live:
            model(tokens, return_type=None)
        whole = live.runs[0]
        for turn, (message, (first, last)) in enumerate(zip(messages, spans, strict=True)):
            whole.mark(f"turn {turn}", first, last)
            part = whole.select(pos=slice(first, last))
            thought = end_of_reasoning(model, tokens[0, first:last])
            if thought is not None:
                part.mark("reasoning", 0, thought)
                part.mark("answer", thought, last - first)
            self.add(part, participant=message["role"], turn=turn, **tags)
        return whole

    # -- keeping --

    def save(self, folder: str | PathLike[str]) -> None:
        """Every run as a safetensors file in a new folder; tags must be plain data. The folder is
        there when all of it is."""
        place = Path(folder)
        unfinished = place.with_name(f"{place.name}.unfinished")
        for _, tags in self._runs:  # before anything is written
            for tag, value in tags.items():
                if not survives_json(value):
                    raise TypeError(
                        f"the tag {tag}={value!r} would not come back from a file as it is; tags "
                        "that are saved are texts, numbers, None, and lists and dicts of them"
                    )
        if place.exists():
            raise FileExistsError(f"{place} exists")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for number, (cache, tags) in enumerate(self._runs):
            cache._save(unfinished / f"run-{number:06d}.safetensors", tags=tags)
        unfinished.rename(place)

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> "ActivationStore":
        """A store that was saved. Its values are mapped from the files, not read."""
        place = Path(folder)
        if not place.is_dir():
            raise FileNotFoundError(f"there is no folder {place}")
        store = cls()
        for path in sorted(place.glob("run-*.safetensors")):
            cache, about = ActivationCache._load(path)
            store.add(cache, **about.get("tags", {}))
        return store


def survives_json(value: Any) -> bool:
    """Whether it is the same after it was written as JSON and read."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def offloaded(values: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Copies of tensors on a device: one transfer per shape, dtype and device, one wait."""
    place = torch.device(device)
    groups: dict[Any, list[int]] = defaultdict(list)
    for number, value in enumerate(values):
        groups[value.shape, value.dtype, value.device].append(number)
    moved: list[Any] = [None] * len(values)
    accelerators = set()
    for (shape, dtype, source), members in groups.items():
        stacked = torch.stack([values[number].detach() for number in members])
        if source != place:
            pinned = place.type == "cpu" and source.type == "cuda"
            target = torch.empty(
                (len(members), *shape), dtype=dtype, device=place, pin_memory=pinned
            )
            stacked = target.copy_(stacked, non_blocking=True)
            accelerators |= {each for each in (source, place) if each.type != "cpu"}
        for number, value in zip(members, stacked, strict=True):
            moved[number] = value
    for each in accelerators:
        torch.accelerator.synchronize(each)
    return moved


# --- conversations --------------------------------------------------------------------------------


def message_spans(
    model: Any, messages: Sequence[Mapping[str, str]]
) -> tuple[Tensor, list[tuple[int, int]]]:
    """The ids [1, pos] of a conversation, and for each message the columns of its content.

    Raises: ValueError for what is no chat, or without a chat template, or when the template
        rewrites what is said so that a message cannot be found.
    """
    text, tokens, offsets = model.text.encode_conversation(messages)
    spans = []
    for turn, message in enumerate(messages):
        content = message["content"].strip()
        # where a stand-in for it would stand: the content itself may occur anywhere
        marked = [{**m, "content": STAND_IN} if m is message else m for m in messages]
        start = model.text.encode_conversation(marked)[0].find(STAND_IN)
        if start < 0 or not text.startswith(content, start):
            raise ValueError(
                f"message {turn} does not stand in what the chat template makes of the "
                f"conversation: {content[:60]!r}"
            )
        stop = start + len(content)
        inside = [
            column for column, (a, b) in enumerate(offsets) if a < stop and b > start and b > a
        ]
        spans.append((inside[0], inside[-1] + 1) if inside else (0, 0))
    return tokens.to(model.W_E.device), spans


def end_of_reasoning(model: Any, ids: Tensor) -> int | None:
    """How many of these ids it takes to say "</think>"; None when they do not."""
    if END_OF_REASONING not in model.to_string(ids):
        return None
    return next(n for n in range(1, len(ids) + 1) if END_OF_REASONING in model.to_string(ids[:n]))
