"""GraniteMoE."""

from families.granite import SIZES as GRANITE

SIZES = {"granitemoe": {**GRANITE["granite"], "num_local_experts": 5, "num_experts_per_tok": 2}}
del SIZES["granitemoe"]["head_dim"]
VARIANTS = {
    "granitemoe": ("granitemoe", {}),
    "granitemoe_tied": ("granitemoe", {"tie_word_embeddings": True, "num_experts_per_tok": 3}),
    "granitemoe_biases": ("granitemoe", {"attention_bias": True, "hidden_act": "gelu"}),
}
FIELDS = [
    ("granitemoe", {"num_experts_per_tok": 3}),
    ("granitemoe", {"attention_multiplier": 0.3}),
    ("granitemoe", {"residual_multiplier": 0.3}),
    ("granitemoe", {"rms_norm_eps": 1e-5}),
]
