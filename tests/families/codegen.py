"""CodeGen."""

from families.gptj import SIZES as GPTJ

SIZES = {"codegen": {**GPTJ["gptj"], "n_embd": 48, "n_head": 8}}
VARIANTS = {
    "codegen": ("codegen", {}),
    "codegen_tied": ("codegen", {"tie_word_embeddings": True, "n_head": 4}),
    "codegen_gelu": ("codegen", {"activation_function": "gelu", "n_inner": None}),
}
FIELDS = [
    ("codegen", {"layer_norm_epsilon": 1e-5}),
    ("codegen", {"activation_function": "relu"}),
    ("codegen", {"rotary_dim": 2}),
    ("codegen", {"n_head": 4}),
]
