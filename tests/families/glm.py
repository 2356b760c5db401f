"""GLM and GLM-4."""

from typing import Any

from families.llama import LLAMA, rope

NONE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
GLM = {**LLAMA, "num_key_value_heads": 2, **NONE}
SIZES = {"glm": GLM, "glm4": GLM}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {}
FIELDS: list[tuple[str, dict[str, Any]]] = []
for family in ("glm", "glm4"):
    VARIANTS |= {
        family: (family, {}),
        f"{family}_without_biases": (family, {"attention_bias": False}),
        f"{family}_mha_tied": (family, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        f"{family}_mqa_whole": (
            family,
            {"num_key_value_heads": 1, **rope("default", partial_rotary_factor=1.0)},
        ),
        f"{family}_narrow": (family, {"head_dim": 10, "partial_rotary_factor": 0.61}),
        f"{family}_linear": (family, rope("linear", factor=2.5, partial_rotary_factor=0.5)),
    }
    FIELDS += [
        (family, {"rms_norm_eps": 1e-5}),
        (family, {"hidden_act": "gelu"}),
        (family, rope("default", partial_rotary_factor=0.25)),
        (family, rope("default", partial_rotary_factor=0.5)),
    ]
