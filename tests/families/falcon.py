"""Falcon."""

from families.llama import rope

SIZES = {"falcon": {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_hidden_size": 38,
    "max_position_embeddings": 64,
    "layer_norm_epsilon": 1e-3,
}}  # fmt: skip
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}
SEQUENTIAL = {"parallel_attn": False}
ALIBI = {"alibi": True, "num_attention_heads": 12, "hidden_size": 36}  # slopes that bf16 rounds
RW = {**ALIBI, **SEQUENTIAL, "bias": True, "multi_query": False}
VARIANTS = {
    "falcon": ("falcon", {}),
    "falcon_untied": ("falcon", {"tie_word_embeddings": False, "ffn_hidden_size": None}),
    "falcon_multi_head": ("falcon", {"multi_query": False}),
    "falcon_sequential": ("falcon", {**SEQUENTIAL, "bias": True}),
    "falcon_new": ("falcon", {**NEW, "bias": True}),
    "falcon_new_one_norm": ("falcon", {**NEW, "num_ln_in_parallel_attn": 1}),
    "falcon_new_multi_head": ("falcon", {**NEW, "num_kv_heads": None, "activation": "gelu_fast"}),
    "falcon_linear": ("falcon", rope("linear", factor=2.5)),
    "falcon_alibi": ("falcon", ALIBI),
    "falcon_rw": ("falcon", RW),
}
FIELDS = [
    ("falcon", {"layer_norm_epsilon": 1e-5}),
    ("falcon", {"activation": "relu"}),
    ("falcon_multi_head", {"num_attention_heads": 2}),
    ("falcon_multi_head", {"alibi": True}),
    ("falcon", rope("default")),
    ("falcon", rope("linear", factor=2.5)),
]
