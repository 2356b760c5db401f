"""Tiny Hugging Face encoders, loud and of awkward sizes: what `tiny` is for causal models.

hf_model = encoders.build("bert")                      # with the masked language model's head
hf_model = encoders.build("bert", headless=True)       # the encoder alone
"""

import copy
from typing import Any

import tiny
import torch
from families.gemma import LATER, MIXED, ropes
from torch import Tensor, nn

BERT = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 38,
    "max_position_embeddings": 48,
    "type_vocab_size": 4,
    "layer_norm_eps": 1e-3,
}
SIZES: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "roberta": {**BERT, "type_vocab_size": 1},
    "xlm-roberta": {**BERT, "type_vocab_size": 1},
    "camembert": {**BERT, "type_vocab_size": 1},
    "modernbert": {
        "vocab_size": 61,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 38,
        "max_position_embeddings": 48,
        "local_attention": 8,
        "norm_eps": 1e-3,
        "global_attn_every_n_layers": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
        "pad_token_id": 0,
    },
    "gemma3_text": {
        **LATER,
        **ropes({}, {}),
        "vocab_size": 61,
        "layer_types": MIXED,
        "sliding_window": 15,
        "use_bidirectional_attention": True,
    },
    "distilbert": {
        "vocab_size": 61,
        "dim": 24,
        "n_layers": 3,
        "n_heads": 3,
        "hidden_dim": 38,
        "max_position_embeddings": 48,
    },
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "bert_untied": ("bert", {"tie_word_embeddings": False}),
    "bert_relu": ("bert", {"hidden_act": "relu", "num_attention_heads": 4}),
    "roberta": ("roberta", {}),
    "roberta_relu": ("roberta", {"hidden_act": "relu"}),  # not in its head
    "roberta_pad_0": ("roberta", {"pad_token_id": 0, "type_vocab_size": 3}),
    "roberta_pad_4": ("roberta", {"pad_token_id": 4, "tie_word_embeddings": False}),
    "xlm_roberta": ("xlm-roberta", {}),
    "camembert": ("camembert", {}),
    "modernbert": ("modernbert", {}),
    "modernbert_untied": ("modernbert", {"tie_word_embeddings": False}),
    "modernbert_biases": (
        "modernbert",
        {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True},
    ),
    "modernbert_bare": (
        "modernbert",
        {"decoder_bias": False, "hidden_activation": "relu", "classifier_activation": "silu"},
    ),
    "modernbert_global": ("modernbert", {"layer_types": ["full_attention"] * 3}),
    "gemma3": ("gemma3_text", {}),
    "gemma3_untied": ("gemma3_text", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3_global": ("gemma3_text", {"layer_types": ["full_attention"] * 3}),
    "distilbert": ("distilbert", {}),
    "distilbert_relu": ("distilbert", {"activation": "relu", "n_heads": 4}),
    "distilbert_untied": ("distilbert", {"tie_word_embeddings": False}),
}
FAMILIES = {model_type: name for name, (model_type, _) in reversed(VARIANTS.items())}
# changes of a config that change what the model computes
FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"hidden_act": "gelu_new"}),
    ("bert", {"layer_norm_eps": 1e-5}),
    ("bert", {"num_attention_heads": 4}),
    ("roberta", {"hidden_act": "relu"}),
    ("roberta", {"pad_token_id": 3}),
    ("modernbert", {"norm_eps": 1e-5}),
    ("modernbert", {"local_attention": 12}),
    ("modernbert", {"hidden_activation": "silu"}),
    ("modernbert", {"classifier_activation": "silu"}),
    ("modernbert", {"global_attn_every_n_layers": 3}),
    ("gemma3", {"use_bidirectional_attention": False, "sliding_window": 8}),
    ("gemma3", {"sliding_window": 9}),
    ("distilbert", {"activation": "relu"}),
    ("distilbert", {"n_heads": 4}),
]


def config(name: str, **changes: Any) -> Any:
    """The Hugging Face config of a variant."""
    from transformers import CONFIG_MAPPING

    model_type, own = VARIANTS[name]
    return CONFIG_MAPPING[model_type](**copy.deepcopy({**SIZES[model_type], **own, **changes}))


def class_of(model_type: str, headless: bool) -> Any:
    """Hugging Face's automatic class: Gemma's head is a causal model's, whichever way it sees."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    if headless:
        return AutoModel
    return AutoModelForCausalLM if model_type == "gemma3_text" else AutoModelForMaskedLM


def build(name: str, headless: bool = False, seed: int = 0, **changes: Any) -> Any:
    """A loud Hugging Face model of a variant."""
    kind = class_of(VARIANTS[name][0], headless)
    made = kind.from_config(config(name, **changes), attn_implementation="eager")
    return tiny.loud(made, seed)


def read(folder: Any, headless: bool = False, **arguments: Any) -> Any:
    """A saved Hugging Face model."""
    from transformers import AutoConfig

    kind = class_of(AutoConfig.from_pretrained(folder).model_type, headless)
    return kind.from_pretrained(folder, attn_implementation="eager", **arguments).eval()


def tokens(batch: int = 2, length: int = 31) -> Tensor:
    """Random ids, none of which is a padding token: RoBERTa counts positions by those."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(7, 61, (batch, length), generator=generator)


@torch.no_grad()
def run(hf_model: nn.Module, ids: Tensor, mask: Tensor | None = None, **arguments: Any) -> Any:
    """A Hugging Face forward in which positions count the tokens that the mask leaves."""
    if mask is not None:
        hf_config: Any = hf_model.config
        counted_from_zero = hf_config.model_type in (
            "bert",
            "distilbert",
            "modernbert",
            "gemma3_text",
        )
        first = 0 if counted_from_zero else hf_config.pad_token_id + 1
        positions = (mask.cumsum(1) - 1).clamp(min=0) + first
        arguments |= {"attention_mask": mask, "position_ids": positions}
    return hf_model(ids, output_hidden_states=True, output_attentions=True, **arguments)
