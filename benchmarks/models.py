"""The random models that are measured: the same shape as Hugging Face's GPT-2, and as ours."""

from typing import Any

import torch

SHAPES = {
    "gpt2-small": {
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
    },
    "toy": {"n_layer": 3, "n_embd": 96, "n_head": 4, "vocab_size": 512, "n_positions": 256},
}


def hugging_face(shape: str) -> Any:
    """A random GPT-2 with fused attention, that never stops early."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**SHAPES[shape], bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").eval()
    model.generation_config.pad_token_id = 0
    return model


def prompt(shape: str, batch: int, length: int) -> torch.Tensor:
    """Random ids [batch, length]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SHAPES[shape]["vocab_size"], (batch, length), generator=generator)


def mixture(model_type: str) -> Any:
    """A random mixture of experts of four layers: Mixtral's shape, or Qwen3-MoE's."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {
        "vocab_size": 1000, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 512, "head_dim": 64,
    }  # fmt: skip
    kinds = {
        "mixtral": {"intermediate_size": 1024, "num_local_experts": 8},
        "qwen3_moe": {"moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 4},
    }
    config = CONFIG_MAPPING[model_type](**sizes, **kinds[model_type])
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def large_llama() -> Any:
    """A random Llama of 767 MiB in fp32, 24 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16000, hidden_size=768, intermediate_size=2048, num_hidden_layers=24,
        num_attention_heads=12, num_key_value_heads=4, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)
