"""Tiny Hugging Face models for tests, with weights loud enough to show every mistake.

Hugging Face's own initialisation is quiet: norm weights of one, biases of zero, attention close to
uniform. A dropped bias or a wrong rotary scaling then moves no logit. `loud` changes that.

    hf_model = tiny.build("llama_gqa")
"""

import copy
from typing import Any

import torch
from families import FIELDS, FIRST_VARIANTS, SIZES, VARIANTS  # noqa: F401 (tests take them from here)
from families.llama import LLAMA, LLAMA3, LONG, ORIGINAL, YARN, rope  # noqa: F401
from torch import Tensor, nn


def config(name: str, **overrides: Any):
    """The Hugging Face config of a variant."""
    from transformers import CONFIG_MAPPING

    model_type, changes = VARIANTS[name]
    # HF writes into the rope dict it is given
    values = copy.deepcopy({**SIZES[model_type], **changes, **overrides})
    hf_config = CONFIG_MAPPING[model_type](**values)
    hf_config._attn_implementation = attention(hf_config)
    return hf_config


def attention(hf_config: Any) -> str:
    """Which of Hugging Face's attentions is compared with: the eager one, unless it is wrong."""
    # Falcon's eager attention adds ALiBi twice: to the scores and with the mask
    return "sdpa" if hf_config.model_type == "falcon" and hf_config.alibi else "eager"


@torch.no_grad()
def loud(model: nn.Module, seed: int = 0) -> nn.Module:
    """Matrices N(0, .25), norm weights += N(0, .3), all other vectors N(0, .3); then ties again."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        if parameter.ndim >= 2:
            parameter.copy_(0.25 * noise)
        else:
            parameter.copy_(0.3 * noise + (parameter if is_norm else 0))
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model.eval()


def from_config(hf_config: Any, seed: int = 0):
    """A loud Hugging Face model of any causal config."""
    from transformers import AutoModelForCausalLM

    kind = hf_config._attn_implementation = attention(hf_config)
    if hasattr(hf_config, "_experts_implementation"):  # its fast one wants sizes that are not odd
        hf_config._experts_implementation = "eager"
    return loud(AutoModelForCausalLM.from_config(hf_config, attn_implementation=kind), seed)


def read(folder: Any, dtype: torch.dtype | None = None):
    """A saved Hugging Face model, with eager attention and experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    extra: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    extra["attn_implementation"] = attention(AutoConfig.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, **extra)
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"
    return model.eval()


def build(name: str, seed: int = 0, **overrides: Any):
    """A loud Hugging Face model of a variant."""
    return from_config(config(name, **overrides), seed)


def file_state(hf_model: Any) -> dict[str, Tensor]:
    """The tensors of a model as a file has them: transformers 5 fuses experts in memory."""
    state = dict(hf_model.state_dict())
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return state
    return dict(revert_weight_conversion(hf_model, state))


def tokens(hf_config: Any, batch: int = 2, length: int | None = None) -> torch.Tensor:
    """Random tokens: long enough to pass every variant's original context length."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(hf_config.vocab_size, (batch, length or 40), generator=generator)
