"""InternLM 3. (The older ones have no class in transformers: test_internlm.py.)"""

from families.llama import LLAMA, rope

BIASES = {"attention_bias": True, "mlp_bias": True}
SIZES = {
    "internlm3": {
        **LLAMA,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
}
VARIANTS = {
    "internlm3": ("internlm3", {}),
    "internlm3_biases": ("internlm3", {**BIASES, "head_dim": 10}),
    "internlm3_mqa_tied": ("internlm3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "internlm3_mha_gelu": ("internlm3", {"num_key_value_heads": 4, "hidden_act": "gelu", **BIASES}),
    "internlm3_linear": ("internlm3", rope("linear", factor=2.5)),
}
FIELDS = [
    ("internlm3", {"rms_norm_eps": 1e-5}),
    ("internlm3", {"hidden_act": "gelu"}),
    ("internlm3", rope("default")),
    ("internlm3_linear", rope("linear", factor=1.5)),
]
