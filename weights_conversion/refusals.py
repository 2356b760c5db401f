"""What cannot be a HookedTransformer: its name, why, and the nearest thing that can.

`unsupported` is about the `model_type` and the form of the weights; `foreign_code` about
checkpoints whose config names other code than the class a table was written after.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from transformer_lens_lite.nearest import closest
from weights_conversion.table import Architecture

_HYBRID = "it is a hybrid, with state-space or linear-attention layers beside attention"
_ENCODER_DECODER = "it is an encoder-decoder"
_OTHER_SENSES = "it sees images or hears sounds"
_REMOTE = "it needs remote code"
# why -> (the nearest thing in general, model types with the nearest family where one is nearer)
_OUT_OF_REACH = {
    "it has state-space layers, and no attention": (
        "a decoder with attention, such as pythia ('gpt_neox')",
        "mamba mamba2 falcon_mamba:falcon",
    ),
    "it has recurrent layers, and no attention": (
        "a decoder with attention, such as pythia ('gpt_neox')",
        "rwkv rwkv5 xlstm",
    ),
    _HYBRID: (
        "a decoder with attention alone, such as 'llama'",
        "jamba:mixtral zamba:mistral zamba2:mistral bamba:llama nemotron_h:nemotron "
        "falcon_h1:falcon recurrent_gemma:gemma2 granitemoehybrid:granitemoe qwen3_next:qwen3_moe "
        "qwen3_5:qwen3 qwen3_5_text:qwen3 qwen3_5_moe:qwen3_moe lfm2:llama lfm2_moe:mixtral "
        "olmo_hybrid:olmo3 minimax:mixtral kimi_linear:deepseek_v3",
    ),
    _ENCODER_DECODER: (
        "'bert' for an encoder, 'gpt2' for a decoder",
        "t5 mt5 umt5 longt5 switch_transformers bart mbart plbart pegasus pegasus_x "
        "bigbird_pegasus blenderbot led marian m2m_100 nllb-moe prophetnet fsmt whisper "
        "speech_to_text encoder-decoder vision-encoder-decoder t5gemma:gemma2",
    ),
    _OTHER_SENSES: (
        "a language model alone, such as 'llama'",
        "blip:bert blip-2:opt instructblip:llama clip:bert siglip:bert git:bert llava:llama "
        "llava_next:mistral llava_onevision:qwen2 video_llava:llama vipllava:llama "
        "paligemma:gemma idefics:llama idefics2:mistral idefics3:llama smolvlm:llama mllama:llama "
        "llama4:llama4_text fuyu:persimmon chameleon:llama qwen2_vl:qwen2 qwen2_5_vl:qwen2 "
        "qwen3_vl:qwen3 qwen3_vl_moe:qwen3_moe qwen2_audio:qwen2 internvl_chat:qwen2 "
        "gemma3n:gemma3_text phi4_multimodal:phi3",
    ),
    _REMOTE: (
        "a family whose code transformers has, such as 'llama'",
        "chatglm:glm qwen:qwen2 baichuan:llama xverse:llama aquila:llama orion:llama "
        "minicpm:llama minicpm3:deepseek_v2 deepseek:qwen2_moe kimi_k2:deepseek_v3 exaone:exaone4 "
        "stablelm_epoch:stablelm RefinedWeb:falcon RefinedWebModel:falcon phi-msft:phi "
        "mixformer-sequential:phi",
    ),
}
_BY_TYPE = {
    model_type: (why, f"{near!r}" if near else in_general)
    for why, (in_general, kinds) in _OUT_OF_REACH.items()
    for model_type, _, near in (kind.partition(":") for kind in kinds.split())
}
# how the configs of the other parts are called in a model that sees or hears
_OTHER_PARTS = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower")

# and how the fields and kinds of layers are called that attend in another way, or not at all
_OF_OTHER_LAYERS = ("mamba_", "ssm_", "linear_num_", "linear_key_", "linear_conv_", "kda_")
_OTHER_LAYERS = frozenset({"linear_attention", "conv", "mamba", "recurrent"})


def unsupported(hf_config: Mapping[str, Any], known: Collection[str]) -> str | None:
    """Why a config has no table, with the nearest thing that has one; None where it has.

    known: the `model_type`s that have a table.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        return f"the config has no model_type, so its family is unknown; supported: {sorted(known)}"
    if model_type not in known or hf_config.get("is_encoder_decoder"):
        return _of_type(model_type, hf_config, known)
    return _quantised(hf_config)


def _of_type(model_type: str, hf_config: Mapping[str, Any], known: Collection[str]) -> str:
    found = _BY_TYPE.get(model_type)
    if found is None and (why := _by_its_signs(hf_config)):
        found = why, _OUT_OF_REACH[why][0]
    if found is None:
        return (
            f"model_type {model_type!r} is not supported.{closest(model_type, known)} "
            f"Supported: {sorted(known)}; weights_conversion.register_architecture adds others"
        )
    why, near = found
    inside = hf_config.get("text_config")
    text_type = inside.get("model_type") if isinstance(inside, Mapping) else None
    if why == _OTHER_SENSES and text_type in known:
        near = f"{text_type!r}, its language model"
    return f"model_type {model_type!r} is not supported: {why}. The nearest supported is {near}"


def _by_its_signs(hf_config: Mapping[str, Any]) -> str | None:
    if hf_config.get("is_encoder_decoder"):
        return _ENCODER_DECODER
    if any(hf_config.get(name) for name in _OTHER_PARTS):
        return _OTHER_SENSES
    kinds = hf_config.get("layer_types")
    if any(name.startswith(_OF_OTHER_LAYERS) for name in hf_config) or (
        isinstance(kinds, list) and not _OTHER_LAYERS.isdisjoint(map(str, kinds))
    ):
        return _HYBRID
    return _REMOTE if hf_config.get("auto_map") else None


def _quantised(hf_config: Mapping[str, Any]) -> str | None:
    for name in ("quantization_config", "compression_config"):
        if given := hf_config.get(name):
            method = given.get("quant_method") if isinstance(given, Mapping) else None
            return (
                f"the config has {name}{f' ({method})' if method else ''}: quantised weights are "
                "not supported. The nearest supported is the same checkpoint unquantised; "
                "dequantise it first (from_pretrained(…).dequantize() in transformers)"
            )
    return None


# --- code that is not transformers' ---------------------------------------------------------------


def foreign_code(hf_config: Mapping[str, Any], architecture: Architecture | None) -> str | None:
    """What in a file's config says that another class made its weights; None where nothing does.

    `auto_map` (code of the checkpoint's own) is fine where that code is known to be what
    transformers has by now (`Architecture.remote_stem`), and where transformers has no such
    `model_type`: then the table was written after that code. `architectures` may name any class
    that transformers has for the `model_type`. Case and underscores do not count:
    LLaMAForCausalLM is LlamaForCausalLM.

    architecture: the table; None for the config around a language model, which has none.
    """
    remote, given = hf_config.get("auto_map") or {}, hf_config.get("architectures") or []
    if not isinstance(remote, Mapping):
        return f"'auto_map' must be a JSON object, got {remote!r}"
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        return f"'architectures' must be a list of strings, got {given!r}"
    own = () if architecture is None else (architecture.hf_class, architecture.headless_class)
    stem = "" if architecture is None else architecture.remote_stem
    # the rest is of tokenizers and processors
    code = [str(value) for key, value in remote.items() if str(key).startswith(_OF_THE_MODEL)]
    foreign = [place for place in code if not _is_of(stem, place.rsplit(".", 1)[-1])]
    strange = [name for name in given if name not in own and not _is_of(stem, name)]
    if not foreign and not strange:
        return None
    model_type = str(hf_config.get("model_type"))
    classes = _classes_of(model_type)
    if not classes:
        return None
    if foreign:
        return (
            f"auto_map says that remote code, {foreign[0]}, makes this model. It is not run, and "
            f"the table of {model_type!r} is of transformers' class. {_how_to_go_on('auto_map')}"
        )
    known = {_plain(name) for name in (*own, *classes)}
    if wrong := [name for name in strange if _plain(name) not in known]:
        return (
            f"architectures names {wrong[0]}, which is no class of model_type {model_type!r} "
            f"({', '.join(sorted(classes))}). {_how_to_go_on('architectures')}"
        )
    return None


_OF_THE_MODEL = ("AutoModel", "AutoConfig")


def _how_to_go_on(field: str) -> str:
    return (
        "If it computes the same, say so with hf_config= a copy of the config without "
        f"{field}, or make the model by its own code and pass it as hf_model="
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def _is_of(stem: str, name: str) -> bool:
    """Whether a class is a model, one with a head, or a config, and its name begins with `stem`."""
    return bool(stem) and re.fullmatch(rf"{stem}(for\w+|model|config)", _plain(name)) is not None


def _classes_of(model_type: str) -> set[str]:
    """All of transformers' automatic classes of a type, by name; none for types it lacks."""
    from transformers.models.auto import modeling_auto

    found: set[str] = set()
    for name, of_types in vars(modeling_auto).items():
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES"):
            each = of_types.get(model_type, ())
            found |= {each} if isinstance(each, str) else set(each)
    return found
