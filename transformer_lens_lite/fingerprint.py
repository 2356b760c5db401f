"""Which model, and which hooks, keys and values were computed by.

A cache is only a continuation for the model that filled it: another one, or the same one with other
weights, would read it as noise and say nothing.
"""

import hashlib
import json
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from transformer_lens_lite.watched import edits_of, is_listener

# fields of a config that change no activation
NO_MATTER = frozenset({
    "model_name", "tokenizer_name", "default_prepend_bos", "tokenizer_prepends_bos",
    "trust_remote_code", "use_attn_result", "use_split_qkv_input", "use_attn_in",
    "use_hook_mlp_in", "use_hook_tokens", "init_weights", "init_mode", "initializer_range", "seed",
    "device", "n_devices", "original_architecture", "from_checkpoint", "checkpoint_index",
    "checkpoint_label_type", "checkpoint_value", "n_params",
})  # fmt: skip
INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**16  # elements hashed by one product: they stay in a core's cache
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
SEVERAL = "of several models or versions"
WITHOUT_CHECK = "Fill it anew, or use cache.unchecked() to go without this check"

WeightsVersion = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Fingerprint:
    """The config that matters, field by field, and a digest of all weights' bytes and of what
    computes beside the model's own parts."""

    config: dict[str, Any]
    weights: str

    def beside(self, other: "Fingerprint") -> "Fingerprint":
        """Of what both have filled: itself, or one that fits no model."""
        return self if self == other else Fingerprint(self.config, SEVERAL)

    def check(self, model: Any) -> None:
        """ValueError unless the model is of this config and these weights, saying what differs."""
        if (its := fingerprint(model)) == self:
            return
        fields = self.config.keys() | its.config.keys()
        differ = [
            f"{name} was {self.config.get(name)!r} and is {its.config.get(name)!r}"
            for name in sorted(fields)
            if self.config.get(name) != its.config.get(name)
        ]
        what = "; ".join(differ) or "its weights or parts are others than this model has now"
        raise ValueError(f"this cache was filled by another model: {what}. {WITHOUT_CHECK}")


class Taken(NamedTuple):
    """A fingerprint, and of what state of the model."""

    version: WeightsVersion
    fields: dict[str, Any]
    fingerprint: Fingerprint


# a fingerprint is taken once per version of the weights; beside the models, which are pickled
_taken: "weakref.WeakKeyDictionary[Any, Taken]" = weakref.WeakKeyDictionary()


def fingerprint(model: Any) -> Fingerprint:
    """The fingerprint of a model as it is now.

    Weights are read again when a parameter is another tensor than at the last reading, or its
    version has moved, as in-place operations move it. Exceptions: operations on `parameter.data`
    and fused optimizers move no version; after them, `forget(model)`.
    """
    version = weights_version(model)
    fields = dict(vars(model.cfg))
    known = _taken.get(model)
    if known is not None and known.version != version:
        known = None
    if known is not None and known.fields == fields:
        return known.fingerprint
    digest = weights_digest(model) if known is None else known.fingerprint.weights
    config = json.loads(model.cfg.to_json())
    mine = Fingerprint({k: v for k, v in config.items() if k not in NO_MATTER}, digest)
    _taken[model] = Taken(version, fields, mine)
    return mine


def forget(model: Any) -> None:
    """Have the weights read again at the next look: after edits that move no version."""
    _taken.pop(model, None)


def weights_version(model: Any) -> WeightsVersion:
    """What changes, and costs little to read, when a weight is assigned or edited in place, or
    another module, or a forward of its own, takes the place of a part."""
    version: list[Any] = []
    waiting = [model]
    while waiting:  # model.parameters() makes names too, which is most of its time
        module = waiting.pop()
        waiting += [child for child in module._modules.values() if child is not None]
        own = module.__dict__
        # by references, which die with what they are to: addresses are given out again
        functions = [weakref.ref(own[name]) for name in ("forward", "act_fn") if name in own]
        if functions or not is_ours(type(module)):
            version.append((weakref.ref(module), *functions))
        for p in module._parameters.values():
            if p is not None:
                memory = weakref.ref(p.untyped_storage())
                version.append((id(p), memory, p.data_ptr(), edits_of(p)))
    return tuple(version)


def weights_digest(model: Any) -> str:
    """A digest of names, shapes, dtypes and bytes of all parameters, wherever they lie, and of
    `foreign_parts`.

    The bytes are hashed where the weights are, as integers, so that the digest of the same weights
    is the same on every device.
    """
    parameters = list(model.named_parameters())
    sums = [int(each) for each in torch.stack([hashed(p).cpu() for _, p in parameters]).tolist()]
    parts = [
        f"{name} {list(p.shape)} {p.dtype} {total}"
        for (name, p), total in zip(parameters, sums, strict=True)
    ]
    parts += foreign_parts(model)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def is_ours(thing: Any) -> bool:
    """Whether a class or a function is what this library builds models of, or torch's container of
    them."""
    where = getattr(thing, "__module__", None) or ""
    return thing is nn.ModuleList or where.startswith("transformer_lens_lite.")


def computes_as_ours(kind: type[nn.Module]) -> bool:
    """Whether modules of this class compute by code of this library alone: it is ours, or adds to a
    class of ours without taking the place of any method."""
    if is_ours(kind):
        return True
    ours = next((each for each in kind.__mro__ if is_ours(each)), nn.Module)
    methods = {
        name
        for each in ours.__mro__
        for name, value in vars(each).items()
        if is_ours(each) and isinstance(value, FunctionType)
    }
    replaced = {name for name in methods if getattr(kind, name) is not getattr(ours, name)}
    hidden = {name for name in replaced if name.startswith("__") and name != "__call__"}
    return bool(methods) and replaced <= hidden


def has_function_of_others(module: nn.Module) -> bool:
    """Whether a function was assigned that stands in the place of its `forward`, or of a known
    activation function."""
    own = module.__dict__
    if "forward" in own:
        return True
    act_fn = own.get("act_fn")
    if act_fn is None or is_ours(act_fn):
        return False
    return not (getattr(act_fn, "__module__", None) or "").startswith("torch.")


def foreign_parts(model: Any) -> list[str]:
    """What computes in a model beside its own parts: modules of other classes, and functions in
    place of a `forward` or another attribute, by where they are defined."""
    parts = []
    for name, module in model.named_modules():
        kind = type(module)
        if not is_ours(kind):
            parts.append(f"{name} is {kind.__module__}.{kind.__qualname__}")
        for attribute, value in module.__dict__.items():
            if isinstance(value, FUNCTIONS) and not is_ours(value):
                code = getattr(value, "__code__", None)
                line = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
                called = getattr(value, "__qualname__", type(value))
                parts.append(f"{name}.{attribute} is {called} {line}")
    return parts


@torch.no_grad()
def hashed(weights: Shaped[Tensor, "..."]) -> Int[Tensor, ""]:
    """A sum of the elements' bits, each times an odd number of its place, modulo 2**64."""
    bits = weights.detach().contiguous().view(INTEGER_OF_SIZE[weights.element_size()]).flatten()
    places = multipliers(CHUNK, bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(CHUNK):
        total = total * 6364136223846793005 + (chunk.long() * places[: len(chunk)]).sum()
    return total


def multipliers(n: int, device: torch.device) -> Int[Tensor, " n"]:
    """Odd numbers without a pattern (SplitMix64's mixing of the place, Steele et al. 2014)."""
    x = torch.arange(1, n + 1, dtype=torch.int64, device=device) * -7046029254386353131
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return (x ^ ((x >> 31) & (2**33 - 1))) | 1


@dataclass(frozen=True)
class Filling:
    """Who has been filling a cache that still grows: a model, at one version of its weights."""

    model: Callable[[], Any]  # None when it is gone
    version: WeightsVersion | None  # None: it stays as it is
    is_mixed: bool = False  # others have been at it too

    @classmethod
    def by(cls, model: Any, it_stays: bool = False) -> "Filling":
        """From now on by this model, as it is now; `it_stays` as it is until nobody fills it any
        more, so that nothing has to be compared."""
        return cls(weakref.ref(model), None if it_stays else weights_version(model))

    def fingerprint(self) -> Fingerprint | None:
        """Of the model; None when it is gone, and one that fits no model when it has changed."""
        model = self.model()
        if model is None:
            return None
        mine = fingerprint(model)
        changed = self.version is not None and self.version != weights_version(model)
        mixed = self.is_mixed or changed
        return Fingerprint(mine.config, SEVERAL) if mixed else mine


# --- hooks ----------------------------------------------------------------------------------------


class EditingHooks:
    """The hooks that could edit the columns of a prefix while it was computed.

    `lasting` are those which would act on what follows it, too.
    """

    def __init__(
        self,
        length: int,
        hooks: Iterable[tuple[str, "Limited"]] = (),
        lasting: Iterable[tuple[str, "Limited"]] | None = None,
    ) -> None:
        self.length = length
        self.hooks = list(hooks)
        mine = [each for each in self.hooks if each[1].lasts]
        self.lasting = mine if lasting is None else list(lasting)

    @classmethod
    def shared(cls, several: "list[EditingHooks]") -> "EditingHooks | None":
        """Those under which all of several prefixes were computed; what lasts of any lasts."""
        if not several:
            return None
        common = [hook for hook in several[0].hooks if all(hook in each.hooks for each in several)]
        lasting = [hook for each in several for hook in each.lasting]
        return cls(max(each.length for each in several), common, lasting)

    def of_first(self, length: int) -> "EditingHooks":
        """Those of the first `length` columns alone."""
        others = [each for each in self.lasting if each not in self.hooks]
        hooks, others = (
            [(name, hook.of_first(length)) for name, hook in each if acts_on(hook.where, length)]
            for each in (self.hooks, others)
        )
        lasting = [each for each in (*hooks, *others) if each[1].lasts]
        return EditingHooks(length, hooks, lasting)

    def check(self, model: Any) -> None:
        """ValueError when the model now has others, which would have acted on the prefix too, or
        lacks some, which would act on what follows."""
        here = list(editing_hooks(model, self.length))
        for name, hook in here:
            if (name, hook) not in self.hooks:
                raise ValueError(
                    f"the hook {hook.called} on {name!r} was not there when this prefix was "
                    f"computed, and would have acted on its {self.length} positions. Compute the "
                    f"prefix with it, limit it to later ones (pos=slice({self.length}, None)), "
                    "or use cache.unchecked() to go without this check"
                )
        for name, hook in self.lasting:
            if (name, hook) not in here:
                raise ValueError(
                    f"this prefix was computed under the hook {hook.called} on {name!r}, which is "
                    "not there now. Attach it for what follows too, limit it to the prefix when "
                    f"computing it (when='prefill' or pos=slice({self.length})), or use "
                    "cache.unchecked() to go without this check"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> "EditingHooks":
        return self  # nobody changes it, and the hooks are the same functions

    def __getstate__(self) -> dict[str, Any]:
        # functions do not outlive their process
        return {"length": self.length, "hooks": [], "lasting": []}


@dataclass(frozen=True)
class Limited:
    """A hook, where it acts, and whether that is behind the prefix too."""

    function: Any
    limits: str = ""
    lasts: bool = True
    where: Any = field(default=None, compare=False)  # the Limits themselves; None: everywhere

    @classmethod
    def by(cls, handle: Any, length: int) -> "Limited":
        """What a handle attaches, for a prefix of `length` columns."""
        limits = handle.limits
        return cls(handle.user_hook, repr(limits), acts_behind(limits, length), limits)

    def of_first(self, length: int) -> "Limited":
        """The same, for another length."""
        return replace(self, lasts=acts_behind(self.where, length))

    @property
    def called(self) -> str:
        """What an error calls it."""
        return getattr(self.function, "__qualname__", repr(self.function))


def editing_hooks(model: Any, length: int) -> Iterator[tuple[str, Limited]]:
    """(name, hook) of the forward hooks of points and modules that may act on the first `length`
    columns, torch's own among them; those marked as listeners only look."""
    for name, point in model.hook_dict.items():
        if not point.listened:
            continue
        for hook in (*point._forward_pre_hooks.values(), *point._forward_hooks.values()):
            yield name, Limited(hook)
        for handle in point.fwd_hooks:
            if not handle.is_listener and acts_on(handle.limits, length):
                yield name, Limited.by(handle, length)
    for name, module in (("", model), *model.mod_dict.items()):
        if name not in model.hook_dict:
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                if not is_listener(hook):
                    yield name, Limited(hook)


def acts_on(limits: Any, length: int) -> bool:
    """Whether limits let a hook act in a prefill of `length` columns; when in doubt, yes."""
    if limits is None:
        return True
    if limits.call is not None and limits.call > 1:
        return False
    when, columns = limits.steps.when, limits.columns
    if columns is not None and columns.within(0, length) is None:
        return False
    if isinstance(when, int):
        return when == 0
    if isinstance(when, slice):
        return 0 in range(1)[when]
    return 0 in when if isinstance(when, list | range) else when != "decode"


def acts_behind(limits: Any, length: int) -> bool:
    """Whether limits let a hook act after a prefill of `length` columns; when in doubt, yes."""
    if limits is None:
        return True
    when, columns = limits.steps.when, limits.columns
    if columns is not None and columns.within(length, sys.maxsize) is None:
        return False
    if isinstance(when, int):
        return when > 0
    if isinstance(when, slice):
        return when.stop is None or when.stop > 1
    return max(when) > 0 if isinstance(when, list | range) else when != "prefill"
