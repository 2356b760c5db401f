"""Reading a Hugging Face config: typed, every read recorded, the rest refused by name.

`Reading` is the only way a family looks at a config, so a field that nobody looked at is known at
the end. Both spellings of rotary positions (transformers 4 and 5) are read by `rope`.
"""

import copy
import dataclasses
import importlib.util
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.config_checks import ACTIVATIONS
from transformer_lens_lite.nearest import closest

_REQUIRED: Any = object()
_OFF: tuple[Any, ...] = (None, False, [], {})  # what a field holds when its feature is not used


def because(reason: str, names: str) -> dict[str, str]:
    """{name: reason} for several names that share one."""
    return dict.fromkeys(names.split(), reason)


# Fields that change no logit of a causal model, and why. Families add their own.
COSMETIC = {
    **because(
        "says where the model came from",
        "model_type architectures _name_or_path name_or_path transformers_version auto_map "
        "tokenizer_class _commit_hash unsloth_version unsloth_fixed is_llama_config "
        "transformers.js_config",
    ),
    **because(
        "how Hugging Face computes or stores the same numbers",
        "dtype torch_dtype use_bfloat16 torchscript pretraining_tp tf_legacy_loss "
        "attn_implementation _attn_implementation _attn_implementation_autoset "
        "_attn_implementation_internal _experts_implementation _experts_implementation_internal "
        "gradient_checkpointing chunk_size_feed_forward use_cache cache_implementation is_decoder",
    ),
    **because(
        "what Hugging Face's forward returns",
        "output_hidden_states output_attentions return_dict return_dict_in_generate "
        "output_scores output_past tie_last_hidden_states",
    ),
    **because(
        "belongs to the tokenizer, or only limits it",
        "max_sequence_length model_max_length bos_token_id eos_token_id pad_token_id sep_token_id "
        "unk_token_id mask_token_id decoder_start_token_id prefix",
    ),
    **because(
        "belongs to generation, not to the forward pass",
        "max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups "
        "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
        "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
        "forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens "
        "begin_suppress_tokens exponential_decay_length_penalty",
    ),
    **because(
        "only matters for training: initial weights and dropout",
        "initializer_range attention_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout "
        "summary_first_dropout",
    ),
    **because(
        "belongs to heads and models other than the causal language model",
        "id2label label2id num_labels _num_labels problem_type finetuning_task "
        "task_specific_params "
        "summary_type summary_use_proj summary_activation summary_proj_to_labels "
        "tie_encoder_decoder cross_attention_hidden_size",
    ),
}

# Hugging Face's name of an activation -> ours. Names that are equal need no line.
ACTIVATION_NAMES = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_new",  # the same formula
    **{
        name: name
        for name in ACTIVATIONS
        # solu has no Hugging Face name; xielu has parameters, which no family here maps
        if not name.startswith(("solu", "xielu"))
    },
}


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class Reading:
    """One Hugging Face config being read: `reading.size("hidden_size")`.

    A missing field, or one that holds null, takes the default, as in Hugging Face's classes; a
    value of another type than asked for is a ValueError that names the field.

    `aliases` maps another spelling of a name to the one the family reads.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        where: str = "the config",
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        renamed = {(aliases or {}).get(name, name): value for name, value in config.items()}
        # The family's own spelling wins over an alias, whatever the order in the file.
        self.config = {**renamed, **{n: v for n, v in config.items() if n in renamed}}
        self.where = where
        self.was_read: set[str] = set()

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it is, a copy."""
        self.was_read.add(name)
        value = self.config.get(name)
        return default if value is None else copy.deepcopy(value)

    def _typed(self, name: str, default: Any, what: str, accepts: Callable[[Any], bool]) -> Any:
        value = self.raw(name, default)
        if value is _REQUIRED:
            raise ValueError(f"{self.where} has no {name!r}, which must be {what}")
        if value is not None and not accepts(value):
            raise ValueError(f"{self.where}: {name!r} must be {what}, got {value!r}")
        return value

    def if_missing(self, name: str, default: Any) -> Any:
        """The default of a field in which null is a value of its own, most often "off"."""
        return None if name in self.config else default

    def size(self, name: str, default: Any = _REQUIRED) -> Any:
        return self._typed(name, default, "a positive integer", _is_size)

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self._typed(name, default, "a finite number", _is_number)
        return None if value is None else float(value)

    def flag(self, name: str, default: bool) -> bool:
        return self._typed(name, default, "true or false", lambda v: isinstance(v, bool))

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        return self._typed(name, default, "a string", lambda v: isinstance(v, str))

    def names(self, name: str) -> list[str]:
        def accepts(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(item, str) for item in value)

        return self._typed(name, [], "a list of strings", accepts)

    def mapping(self, name: str) -> dict[str, Any]:
        return self._typed(name, {}, "a JSON object", lambda v: isinstance(v, dict))

    def require(self, name: str, value: Any, reason: str) -> None:
        """Refuse the model unless the field is absent or holds the one value that is supported."""
        given = self.raw(name, value)
        both_off = given in _OFF and value in _OFF
        if given != value and not both_off:
            raise ValueError(f"{self.where}: {name}={given!r} is not supported: {reason}")

    def activation(self, name: str, default: str) -> str:
        """Our name of the activation that field `name` holds."""
        theirs = self.text(name, default)
        if theirs not in ACTIVATION_NAMES:
            raise ValueError(
                f"{self.where}: {name}={theirs!r} is not a supported activation."
                f"{closest(theirs, ACTIVATION_NAMES)} Supported: {sorted(ACTIVATION_NAMES)}"
            )
        return ACTIVATION_NAMES[theirs]

    def refuse_unread(self, cosmetic: Iterable[str] = ()) -> None:
        """Stop if a field that nobody read could change Hugging Face's numbers.

        Harmless are: cosmetic fields, and the default of Hugging Face's config class. A field that
        neither that class nor the model's code knows is ignored there; that it is here too is said,
        unless it is empty.
        """
        known = self.was_read | set(COSMETIC) | set(cosmetic)
        left = {name: value for name, value in self.config.items() if name not in known}
        if not left:
            return
        defaults = hf_class_defaults(self.config.get("model_type"))
        strange = {n: v for n, v in left.items() if n not in defaults and v not in _OFF}
        wrong = {n: v for n, v in left.items() if n in defaults and v != defaults[n]}
        for name in in_hf_code(self.config.get("model_type"), strange):
            wrong[name] = strange.pop(name)
        if wrong:
            raise ValueError(
                f"{self.where} has fields this conversion does not know, so the model could "
                f"compute something else than Hugging Face's: {_shown(wrong)}. If they change "
                "nothing, pass hf_config= a copy of the config without them."
            )
        if strange:
            warnings.warn(
                f"{self.where} has fields that neither this conversion nor transformers' code "
                f"knows. They are ignored, as they are there: {_shown(strange)}",
                stacklevel=2,
            )


def _shown(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sorted(fields.items()))


def hf_class_defaults(model_type: Any) -> dict[str, Any]:
    """What Hugging Face's config class of this model type holds by itself; {} for unknown types."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return {}
    return CONFIG_MAPPING[model_type]().to_dict()


def in_hf_code(model_type: Any, names: Collection[str]) -> list[str]:
    """The fields that the code of Hugging Face's model reads although its config class does not
    declare them; all of them where transformers does not have the type."""
    from transformers import CONFIG_MAPPING

    if not names or model_type not in CONFIG_MAPPING:
        return list(names)
    model = CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_")
    text = ""
    for module in (model, "transformers.modeling_rope_utils", "transformers.masking_utils"):
        found = importlib.util.find_spec(module)
        if found is not None and found.origin is not None:
            text += Path(found.origin).read_text(encoding="utf-8")
    read = set(re.findall(r"config\.(\w+)|[\"'](\w+)[\"']", text))
    return sorted(set(names) & {name for pair in read for name in pair})


# --- rotary positions ---------------------------------------------------------------------------

# Per type: what a checkpoint must give, and what it may. Keys of another type are ignored, as
# Hugging Face does; keys of no type are refused.
_ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        (),
        ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
}
_ROPE_KEYS = {
    *(key for required, optional in _ROPE_TYPES.values() for key in (*required, *optional)),
    "original_max_position_embeddings",
    "truncate",
}


def rope(
    reading: Reading,
    d_head: int,
    max_positions: int,
    theta: float = 10000.0,
    partial: float | None = None,
) -> dict[str, Any]:
    """Our config's rotary fields, from either spelling of Hugging Face's.

    transformers 4 writes `rope_theta` and `rope_scaling={"type" or "rope_type": …}`, transformers
    5 one `rope_parameters`. Defaults that Hugging Face takes from other fields are written out, so
    that a later change of n_ctx changes no angle.

    `partial`: the family turns only `partial_rotary_factor` of each head, by default this much.

    Raises:
        ValueError: unknown rope type or key, a key that is missing, or a value that is no number.
    """
    where = f"{reading.where}: rope parameters"
    values = _rope_values(reading, theta, 1.0 if partial is None else partial)
    base = _number(where, "rope_theta", values.pop("rope_theta"))
    part = _number(where, "partial_rotary_factor", values.pop("partial_rotary_factor"))
    if part != 1.0 and partial is None:
        # transformers' Llama ignores it (default type) or fails on it (every other type)
        raise ValueError(f"{where}: partial_rotary_factor={part} is not a feature of this family")
    outer_original = reading.size("original_max_position_embeddings", None)
    kind = values.pop("rope_type")
    _check_rope_keys(where, kind, values)
    return {
        "positional_embedding_type": "rotary",
        "rotary_base": base,
        "rotary_dim": int(d_head * part),
        "rotary_scaling": _scaling(where, kind, values, max_positions, outer_original),
    }


def _rope_values(reading: Reading, theta: float, partial: float) -> dict[str, Any]:
    """Both spellings as one flat dict, in Hugging Face's order of precedence."""
    new, old = reading.mapping("rope_parameters"), reading.mapping("rope_scaling")
    inside = dict(old or new)
    if "truncate" in inside:  # for Hugging Face null is false here; elsewhere it is "not given"
        inside["truncate"] = bool(inside["truncate"])
    kind = inside.pop("type", None)
    beside = {
        "rope_theta": reading.number("rope_theta", theta),
        "partial_rotary_factor": reading.number("partial_rotary_factor", partial),
        "rope_type": "default" if kind is None else kind,
    }
    return {**beside, **{name: value for name, value in inside.items() if value is not None}}


def _check_rope_keys(where: str, kind: Any, values: dict[str, Any]) -> None:
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        raise ValueError(
            f"{where}: unknown type {kind!r}.{closest(str(kind), _ROPE_TYPES)} "
            f"Supported: {sorted(_ROPE_TYPES)}"
        )
    if unknown := sorted(set(values) - _ROPE_KEYS):
        hint = closest(unknown[0], _ROPE_KEYS)
        raise ValueError(f"{where} of type {kind!r}: unknown keys {unknown}.{hint}")
    required, _ = _ROPE_TYPES[kind]
    if missing := [key for key in required if key not in values]:
        raise ValueError(f"{where} of type {kind!r}: {missing} missing")


def _number(where: str, name: str, value: Any) -> float:
    if not _is_number(value):
        raise ValueError(f"{where}: {name} must be a finite number, got {value!r}")
    return float(value)


def _scaling(
    where: str, kind: str, values: dict[str, Any], max_positions: int, outer_original: int | None
) -> dict[str, Any] | None:
    """The `rotary_scaling` of our config, with every length and factor explicit."""
    if kind == "default":
        return None
    required, optional = _ROPE_TYPES[kind]
    found: dict[str, Any] = {"rope_type": kind}
    for name in (*required, *optional):
        if name in ("short_factor", "long_factor"):
            found[name] = _numbers(where, name, values[name])
        elif name in values:
            found[name] = _number(where, name, values[name])
    if kind == "linear":
        return found
    original = values.get("original_max_position_embeddings", max_positions)
    # Dynamic scaling starts at max_position_embeddings, whatever the dict says; for the others
    # a field beside the dict (Phi-3) wins over the one in it.
    original = max_positions if kind == "dynamic" else outer_original or original
    if not _is_size(original):
        raise ValueError(
            f"{where}: original_max_position_embeddings must be a positive integer, "
            f"got {original!r}"
        )
    found["original_max_position_embeddings"] = original
    if kind in ("yarn", "longrope"):
        found.setdefault("factor", max_positions / original)
    if kind == "yarn":
        found["truncate"] = values.get("truncate", True)
        for name in ("beta_fast", "beta_slow"):
            if not found.get(name, True):
                del found[name]  # 0 means the default
    return found


def _numbers(where: str, name: str, values: Any) -> list[float]:
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{where}: {name} must be a list of numbers, got {values!r}")
    return [_number(where, name, value) for value in values]


def check_angles(cfg: HookedTransformerConfig, where: str) -> None:
    """Refuse rotary parameters that are numbers but give angles that are none (a factor of 0 …)."""
    if cfg.positional_embedding_type != "rotary":
        return
    spec = cfg.rotary_spec("global")
    lengths = torch.tensor([cfg.n_ctx]) if spec.scaling.varies_with_length else None
    try:
        frequencies = spec.scaling.inverse_frequencies(spec.base, spec.dim, lengths)
        fine = bool(frequencies.isfinite().all()) and math.isfinite(spec.scaling.attention_factor)
    except (ArithmeticError, ValueError):
        fine = False
    if not fine:
        raise ValueError(
            f"{where}: rope parameters give angles that are no numbers: "
            f"rope_theta={spec.base}, {spec.scaling}"
        )


def write_rope(cfg: HookedTransformerConfig) -> dict[str, Any]:
    """The inverse of `rope`, in the spelling that transformers 4 and 5 both read."""
    if cfg.positional_embedding_type != "rotary":
        kind = cfg.positional_embedding_type
        raise ValueError(f"positional_embedding_type={kind!r} is not 'rotary'")
    spec = cfg.rotary_spec("global")
    scaling = _written_scaling(spec.scaling)
    dynamic = scaling["rope_type"] == "dynamic"
    trained = scaling["original_max_position_embeddings"] if dynamic else cfg.n_ctx
    if dynamic:
        # its training length is max_position_embeddings itself: a changed n_ctx has no place
        del scaling["original_max_position_embeddings"]
    return {
        "max_position_embeddings": trained,
        "rope_theta": spec.base,
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
    }


def _written_scaling(scaling: Any) -> dict[str, Any]:
    written: dict[str, Any] = {"rope_type": scaling.rope_type}
    for field in dataclasses.fields(scaling):
        value = getattr(scaling, field.name)
        if value is not None:
            name = field.name.removeprefix("fixed_")
            written[name] = list(value) if isinstance(value, tuple) else value
    return written


# --- layers of two kinds ------------------------------------------------------------------------

_LAYER_TYPES = {"full_attention": "global", "sliding_attention": "local"}


def attn_types(reading: Reading, n_layers: int, default: Iterable[bool]) -> list[str]:
    """ "global" or "local" for each layer; `default` says which slide when the config does not."""
    names = reading.names("layer_types")
    if unknown := sorted(set(names) - set(_LAYER_TYPES)):
        raise ValueError(f"{reading.where}: layer_types may hold {sorted(_LAYER_TYPES)}: {unknown}")
    if names and len(names) != n_layers:
        raise ValueError(
            f"{reading.where}: layer_types has {len(names)} entries for {n_layers} layers"
        )
    return [_LAYER_TYPES[name] for name in names] or ["local" if x else "global" for x in default]


def windows(types: list[str], window: int | None) -> dict[str, Any]:
    """Our config's fields for layers of which the local ones see `window` positions."""
    if window is None or "local" not in types:
        return {}
    return {"use_local_attn": True, "window_size": window, "attn_types": types}


def write_windows(cfg: HookedTransformerConfig) -> dict[str, Any]:
    """The inverse of `attn_types` and `windows`."""
    names = {ours: theirs for theirs, ours in _LAYER_TYPES.items()}
    types = list(cfg.attn_types or ()) if cfg.use_local_attn else ["global"] * cfg.n_layers
    return {
        # Hugging Face makes the mask even when no layer looks through it
        "sliding_window": cfg.window_size or cfg.n_ctx,
        "layer_types": [names[each] for each in types],
    }


def rope_by_layer_type(
    reading: Reading, fields: Mapping[str, Any], theta: float, local_theta: float
) -> dict[str, Any]:
    """Our rotary fields for a family whose sliding layers turn at a rate of their own.

    `fields`: what is already known of our config: sizes, and which layers are "local".

    transformers 5 writes `rope_parameters` per layer type; 4 wrote `rope_theta`, `rope_scaling`,
    which only full attention has, and `rope_local_base_freq`.
    """
    where = f"{reading.where}: rope parameters"
    nested = reading.mapping("rope_parameters")
    if unknown := sorted(set(nested) - set(_LAYER_TYPES)):
        raise ValueError(f"{where}: unknown layer types {unknown}")
    if "type" in reading.mapping("rope_scaling"):
        raise ValueError(
            f"{where}: Hugging Face's class of this family overlooks rope_scaling of a 'type'; "
            "if it is meant, call it 'rope_type'"
        )
    beside = {
        "full_attention": (reading.number("rope_theta", theta), reading.mapping("rope_scaling")),
        "sliding_attention": (reading.number("rope_local_base_freq", local_theta), {}),
    }
    both = {}
    for name, (base, scaling) in beside.items():
        values = {"rope_theta": base, **(nested.get(name) or {}), **scaling}
        one = Reading({"rope_parameters": values}, f"{reading.where}: {name}")
        both[_LAYER_TYPES[name]] = rope(one, fields["d_head"], fields["n_ctx"])
    kinds = set(fields.get("attn_types", ["global"]))
    if len(kinds) == 1:
        return both[kinds.pop()]
    full, local = both["global"], both["local"]
    scaling, local_scaling = full["rotary_scaling"], local["rotary_scaling"]
    if local_scaling not in (None, scaling):
        raise ValueError(f"{where}: sliding layers are scaled by other rules than full attention")
    global_only = {"rotary_scaling_global_only": local_scaling is None}
    return {
        **full,
        "rotary_base_local": local["rotary_base"],
        **({} if scaling is None else global_only),
    }


def write_rope_by_layer_type(cfg: HookedTransformerConfig) -> dict[str, Any]:
    """The inverse of `rope_by_layer_type`, in the spelling of transformers 5."""
    written = write_rope(cfg)  # for its checks and its length
    rope_parameters = {}
    for theirs, ours in _LAYER_TYPES.items():
        spec = cfg.rotary_spec(ours)
        rope_parameters[theirs] = {"rope_theta": spec.base, **_written_scaling(spec.scaling)}
        if spec.scaling.rope_type == "dynamic":
            del rope_parameters[theirs]["original_max_position_embeddings"]
    return {
        "max_position_embeddings": written["max_position_embeddings"],
        "rope_parameters": rope_parameters,
    }


# --- numbers that Hugging Face keeps the other way round ------------------------------------------


def reciprocal(x: float) -> float:
    """The number whose reciprocal is x, to the last bit where there is one."""
    guess = 1 / x
    near = (guess, math.nextafter(guess, math.inf), math.nextafter(guess, 0.0))
    return next((y for y in near if 1 / y == x), guess)


def score_divisor(cfg: HookedTransformerConfig) -> float:
    """What attention scores are divided by, given or not."""
    return cfg.attn_scale if cfg.use_attn_scale else 1.0


def write_partial(cfg: HookedTransformerConfig) -> float:
    """The `partial_rotary_factor` that int(d_head * factor) turns back into rotary_dim."""
    part = (cfg.rotary_dim or 0) / cfg.d_head
    return part if int(cfg.d_head * part) == cfg.rotary_dim else math.nextafter(part, 1.0)


def write_activation(cfg: HookedTransformerConfig) -> str:
    """Hugging Face's name of the config's activation; ValueError when it has none."""
    if cfg.act_fn not in ACTIVATION_NAMES.values():
        raise ValueError(f"act_fn={cfg.act_fn!r} has no Hugging Face name")
    return str(cfg.act_fn)
