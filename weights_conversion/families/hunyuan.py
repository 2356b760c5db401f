"""HunYuan (dense): queries and keys are normed after they turn; a base stretched by `alpha`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.families.qwen3 import qk_norms
from weights_conversion.fields import Reading, because
from weights_conversion.table import Row


def read_config(reading: Reading) -> dict[str, Any]:
    reading.require("mlp_bias", False, "MLPs of this family have no biases")
    config, alpha = without_alpha(reading)
    own = Reading(config, reading.where)
    fields = llama.read_config(own)
    reading.was_read |= own.was_read
    if alpha is not None:
        dim = fields["d_head"]
        fields["rotary_base"] *= alpha ** (dim / (dim - 2))
    return {
        **fields,
        "eps": reading.number("rms_norm_eps", 1e-5),
        "use_qk_norm": True,
        "qk_norm_after_rotary": True,
    }


def without_alpha(reading: Reading) -> tuple[dict[str, Any], float | None]:
    """The config in Llama's words, and `alpha`: dynamic scaling with one is a larger base."""
    name = "rope_scaling" if reading.mapping("rope_scaling") else "rope_parameters"
    scaling = reading.mapping(name)
    alpha = scaling.pop("alpha", None)
    if scaling.get("rope_type", scaling.get("type")) != "dynamic" or not alpha:
        return {**reading.config, name: scaling}, None
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not alpha > 0:
        raise ValueError(f"{reading.where}: {name}: alpha must be a positive number, got {alpha!r}")
    theta = {key: scaling[key] for key in ("rope_theta",) if key in scaling}
    return {**reading.config, name: {"rope_type": "default", **theta}}, alpha


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = llama.write_config(cfg, needs)
    return {name: value for name, value in written.items() if name != "mlp_bias"}


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return [*llama.rows(cfg, reading), *qk_norms("query_layernorm", "key_layernorm")]


HUNYUAN = replace(
    llama.LLAMA,
    model_type="hunyuan_v1_dense",
    hf_class="HunYuanDenseV1ForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    cosmetic={
        **because("belongs to the tokenizer", "eod_token_id org_vocab_size mask_init_id pad_id"),
        **because(
            "is in the first files, and Hugging Face's class does not look at it",
            "add_classification_head anyres_pooling_size attention_head_dim cla_share_factor "
            "class_num dense_list im_end_id im_newline_id im_start_id norm_type pool_type "
            "position_embedding_xdrope text_end_id text_start_id use_cla use_qk_norm "
            "use_rotary_pos_emb",
        ),
        **because(
            "is of this family's mixtures of experts, whose type is another one",
            "moe_topk norm_topk_prob num_experts num_shared_expert routed_scaling_factor",
        ),
    },
)
ARCHITECTURES = (HUNYUAN,)
