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
