"""Checkpoints of other libraries as two-way tables: one small file per family, one engine.

completed(hf_config, names)                     the config with what only the tensors tell
architecture_for(hf_config)                     which family a Hugging Face config belongs to
register_architecture("my_type", architecture)  teach it another one
export_config(cfg, needs, original)             the Hugging Face config of a native model
"""

from collections.abc import Callable, Mapping
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig, closest
from weights_conversion.families import all_architectures
from weights_conversion.families.nanogpt import config_of as config_of_training
from weights_conversion.fields import Reading, check_angles
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
    """Make configs of this `model_type` loadable. A second registration replaces the first."""
    _REGISTRY[model_type] = architecture


# Families that see images, around a language model that is a family of its own: how the names of
# its tensors begin there and in its own files, and how those of the other parts begin.
_AROUND_TEXT = ("gemma3", "mistral3")
TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")


def is_around_text(hf_config: Mapping[str, Any]) -> bool:
    """Whether the config is of a model that has the config of its language model inside."""
    return hf_config.get("model_type") in _AROUND_TEXT and "text_config" in hf_config


# Why some models cannot be a HookedTransformer, and which family comes closest.
_OUT_OF_REACH = {
    "it has state-space layers": "mamba mamba2 falcon_mamba rwkv xlstm recurrent_gemma",
    "it has state-space or linear-attention layers beside attention": (
        "jamba zamba zamba2 bamba nemotron_h falcon_h1 granitemoehybrid qwen3_next qwen3_5 lfm2 "
        "lfm2_moe olmo_hybrid minimax kimi_linear"
    ),
    "it is an encoder-decoder": (
        "t5 mt5 umt5 bart mbart pegasus led marian m2m_100 whisper t5gemma"
    ),
    "it needs remote code": (
        "chatglm qwen baichuan internlm internlm2 xverse deepseek exaone stablelm_epoch"
    ),
}
_NEAREST = {
    "qwen": "qwen2", "chatglm": "glm", "internlm": "llama", "internlm2": "llama",
    "baichuan": "llama", "exaone": "exaone4", "stablelm_epoch": "stablelm", "deepseek": "llama",
    "falcon_mamba": "falcon", "falcon_h1": "falcon", "recurrent_gemma": "gemma",
    "granitemoehybrid": "granitemoe", "nemotron_h": "nemotron", "qwen3_next": "qwen3_moe",
    "qwen3_5": "qwen3", "olmo_hybrid": "olmo3", "t5gemma": "gemma2",
}  # fmt: skip


def architecture_for(hf_config: Mapping[str, Any]) -> Architecture:
    """The family of a Hugging Face config, given as the dict in its config.json.

    Raises:
        ValueError: no `model_type`, an unsupported one, an encoder-decoder, quantised weights.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ValueError(
            f"the config has no model_type, so its family is unknown; supported: {supported()}"
        )
    for name in ("quantization_config", "compression_config"):
        if hf_config.get(name):
            raise ValueError(
                f"the config has {name}: quantised weights are not supported; dequantise them "
                "first (from_pretrained(…).dequantize() in transformers)"
            )
    if model_type in _REGISTRY and not hf_config.get("is_encoder_decoder"):
        return _REGISTRY[model_type]
    near = _NEAREST.get(model_type)
    nearest = "" if near is None else f" The nearest supported family is {near!r}."
    for reason, kinds in _OUT_OF_REACH.items():
        if model_type in kinds.split():
            raise ValueError(f"model_type {model_type!r} is not supported: {reason}.{nearest}")
    if hf_config.get("is_encoder_decoder"):
        raise ValueError(f"{model_type!r} is an encoder-decoder; only decoders are supported")
    if hf_config.get("auto_map"):
        raise ValueError(
            f"model_type {model_type!r} is not supported: it needs remote code. "
            "weights_conversion.register_architecture adds families"
        )
    raise ValueError(
        f"model_type {model_type!r} is not supported.{closest(model_type, _REGISTRY)} "
        f"Supported: {supported()}; weights_conversion.register_architecture adds others"
    )


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
