"""Tiny Hugging Face models for tests, with weights loud enough to show every mistake.

Hugging Face's own initialisation is quiet: norm weights of one, biases of zero, attention close to
uniform. A dropped bias or a wrong rotary scaling then moves no logit. `loud` changes that.

    hf_model = tiny.build("llama_gqa")
"""

import copy
from typing import Any

import torch
from torch import nn

# Awkward on purpose: no two sizes are equal, and the vocabulary is odd.
GPT2 = {
    "vocab_size": 61,
    "n_positions": 40,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 3,
    "n_inner": 52,
    "layer_norm_epsilon": 1e-3,
}
LLAMA = {
    "vocab_size": 59,
    "hidden_size": 24,
    "intermediate_size": 38,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
}


def rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 500.0, **values, "rope_type": rope_type}}


LONG = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 3.0, 4.5]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 16}
YARN = {**ORIGINAL, "rope_theta": 20.0}  # so low that truncation moves a boundary between channels

# name -> (model_type, what differs from the sizes above)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2_untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2_gelu": ("gpt2", {"activation_function": "gelu", "n_inner": None}),
    "gpt2_relu": ("gpt2", {"activation_function": "relu"}),
    "gpt2_silu": ("gpt2", {"activation_function": "silu"}),
    "gpt2_unscaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt2_by_layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2_reordered": ("gpt2", {"reorder_and_upcast_attn": True}),
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_gqa": ("llama", {"num_key_value_heads": 2, "head_dim": 10}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1, "head_dim": None}),
    "llama_biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    ),
    "llama_attention_bias": ("llama", {"attention_bias": True}),
    "llama_mlp_bias": ("llama", {"mlp_bias": True}),
    "llama_gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama_theta": ("llama", rope("default")),
    "llama_linear": ("llama", rope("linear", factor=2.5)),
    "llama_dynamic": ("llama", {**rope("dynamic", factor=2.0), "max_position_embeddings": 16}),
    "llama_llama3": ("llama", rope("llama3", **LLAMA3, **ORIGINAL)),
    "llama_yarn": ("llama", rope("yarn", factor=4.0, **YARN)),
    "llama_yarn_all": (
        "llama",
        rope("yarn", factor=4.0, beta_fast=2.0, beta_slow=0.25, mscale=0.7, mscale_all_dim=0.4,
             truncate=False, **YARN),
    ),
    "llama_yarn_fixed": ("llama", rope("yarn", factor=4.0, attention_factor=1.3, **YARN)),
    "llama_longrope": ("llama", rope("longrope", **LONG, **ORIGINAL)),
}  # fmt: skip


def config(name: str, **overrides: Any):
    """The Hugging Face config of a variant."""
    from transformers import CONFIG_MAPPING

    model_type, changes = VARIANTS[name]
    sizes = {"gpt2": GPT2, "llama": LLAMA}[model_type]
    # HF writes into the rope dict it is given
    values = copy.deepcopy({**sizes, **changes, **overrides})
    return CONFIG_MAPPING[model_type](**values, attn_implementation="eager")


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
    """A loud Hugging Face model of any causal config, with eager attention."""
    from transformers import AutoModelForCausalLM

    hf_config._attn_implementation = "eager"
    return loud(AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager"), seed)


def build(name: str, seed: int = 0, **overrides: Any):
    """A loud Hugging Face model of a variant."""
    return from_config(config(name, **overrides), seed)


def tokens(hf_config: Any, batch: int = 2, length: int | None = None) -> torch.Tensor:
    """Random tokens: long enough to pass every variant's original context length."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(hf_config.vocab_size, (batch, length or 40), generator=generator)
