"""Checkpoints of other libraries as two-way tables: one small file per family, one engine.

completed(hf_config, names)                     the config with what only the tensors tell
architecture_for(hf_config)                     which family a Hugging Face config belongs to
refuse_foreign_code(hf_config)                  whether it is of the class the table is of
register_architecture("my_type", architecture)  teach it another one
export_config(cfg, needs, original)             the Hugging Face config of a native model
"""

from collections.abc import Callable, Mapping
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import all_architectures
from weights_conversion.families.nanogpt import config_of as config_of_training
from weights_conversion.fields import Reading, check_angles
from weights_conversion.refusals import foreign_code, unsupported
from weights_conversion.table import (
    Architecture,
    Map,
    Table,
    TensorSource,
    Tied,
    Zeros,
    differences,
    first_layers,
    natives_of,
)

__all__ = [
    "OTHER_PARTS",
    "TEXT_PREFIXES",
    "Architecture",
    "Map",
    "Reading",
    "Table",
    "TensorSource",
    "Tied",
    "Zeros",
    "architecture_for",
    "check_angles",
    "config_of_training",
    "completed",
    "differences",
    "export_config",
    "first_layers",
    "is_around_text",
    "refuse_foreign_code",
    "register_architecture",
    "supported",
]

_REGISTRY: dict[str, Architecture] = {each.model_type: each for each in all_architectures()}
# What a model made here is written as, if that family can say it all; the others come after them.
_FIRST_CHOICES = ("gpt2", "llama")


def supported() -> list[str]:
    """The `model_type`s that can be converted."""
    return sorted(_REGISTRY)


def register_architecture(model_type: str, architecture: Architecture) -> None:
    """Make configs of this `model_type` loadable. A second registration replaces the first.

    Raises:
        TypeError: `architecture` is no `Architecture`, or something in it is of another type than
            it has to be.
        ValueError: an empty name.
    """
    if not isinstance(model_type, str):
        raise TypeError(f"model_type must be a str, got {model_type!r}")
    if not model_type:
        raise ValueError("model_type is empty: give the one that config.json has")
    if not isinstance(architecture, Architecture):
        raise TypeError(
            f"the table of {model_type!r} must be a weights_conversion.Architecture, got "
            f"{architecture!r}"
        )
    architecture.check()
    _REGISTRY[model_type] = architecture


# Families that see images, around a language model that is a family of its own: how the names of
# its tensors begin there and in its own files, and how those of the other parts begin.
_AROUND_TEXT = ("gemma3", "mistral3")
TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")


def is_around_text(hf_config: Mapping[str, Any]) -> bool:
    """Whether the config is of a model that has the config of its language model inside."""
    return hf_config.get("model_type") in _AROUND_TEXT and "text_config" in hf_config


def architecture_for(hf_config: Mapping[str, Any]) -> Architecture:
    """The family of a Hugging Face config, given as the dict in its config.json.

    Raises:
        ValueError: no `model_type`, an unsupported one, an encoder-decoder, quantised weights; with
            the nearest thing that is supported.
    """
    if reason := unsupported(hf_config, _REGISTRY):
        raise ValueError(reason)
    return _REGISTRY[hf_config["model_type"]]


def refuse_foreign_code(hf_config: Mapping[str, Any], where: str = "the config") -> None:
    """ValueError if a file's config says that its weights belong to another class than the one its
    family's table was written after."""
    architecture = None if is_around_text(hf_config) else architecture_for(hf_config)
    if reason := foreign_code(hf_config, architecture):
        raise ValueError(f"{where}: {reason}")


def completed(hf_config: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """A Hugging Face config, its `architectures` true to the names of the checkpoint's tensors.

    A config can name the class that a checkpoint was cut out of; nothing else in it tells whether
    the head is there.
    """
    architecture = _REGISTRY.get(str(hf_config.get("model_type")))
    if architecture is None or not architecture.headless_class:
        return dict(hf_config)
    return {**hf_config, "architectures": [architecture.class_of(names)]}


def export_config(
    cfg: HookedTransformerConfig,
    needs: Callable[[str], bool],
    original: Mapping[str, Any] | None = None,
) -> tuple[Architecture, dict[str, Any]]:
    """The family and the Hugging Face config that describe a native model.

    A model that came from a checkpoint keeps that checkpoint's config as long as it says what
    `cfg` says; fields are rewritten only after a change (fewer layers, another n_ctx, an untied
    head). For a model that was built natively the families are tried in turn.

    `needs`: whether a native parameter, named with `{i}`, has to have a place in the checkpoint.

    Raises:
        ValueError: no config says what `cfg` does; the message names what is in the way.
    """
    if original is not None:
        architecture = architecture_for(original)
        return architecture, _updated(architecture, cfg, needs, original)
    reasons = []
    for architecture in _candidates(cfg.original_architecture):
        try:
            return architecture, _written(architecture, cfg, needs, {})
        except ValueError as error:
            reasons.append(f"{architecture.model_type}: {error}")
    raise ValueError("no Hugging Face config describes this model. " + "; ".join(reasons))


def _candidates(hf_class: str | None) -> list[Architecture]:
    named = [family for family in _REGISTRY.values() if family.hf_class == hf_class]
    return named or sorted(_REGISTRY.values(), key=lambda x: x.model_type not in _FIRST_CHOICES)


def _updated(
    architecture: Architecture,
    cfg: HookedTransformerConfig,
    needs: Callable[[str], bool],
    original: Mapping[str, Any],
) -> dict[str, Any]:
    reading = architecture.reading(original)
    before = architecture.read(reading)
    if not differences(cfg, before) and cfg.n_ctx == before.n_ctx:
        return dict(original)
    rows = architecture.rows(before, reading)
    had = {name for row in rows if isinstance(row, Map) for name in natives_of(row)}
    kept = {name: value for name, value in reading.config.items() if name not in reading.was_read}
    kept["architectures"] = original.get("architectures")
    return _written(architecture, cfg, lambda name: name in had or needs(name), kept)


def _written(
    architecture: Architecture,
    cfg: HookedTransformerConfig,
    needs: Callable[[str], bool],
    kept: Mapping[str, Any],
) -> dict[str, Any]:
    config = {
        "architectures": [architecture.hf_class],
        **kept,
        "model_type": architecture.model_type,
        **architecture.write_config(cfg, needs),
    }
    lost = differences(cfg, architecture.read(architecture.reading(config)))
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise ValueError(f"has no place for {', '.join(lost[:3])}{more}")
    return config
