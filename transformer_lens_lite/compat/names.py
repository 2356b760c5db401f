"""What the classic modules hold, and where that is here.

Three tables: where a name is defined in this library, which names each classic module has, and
what is not offered.
"""

UTILITIES = "utilities"
# the functions and constants of `transformer_lens.utils`, in any of its submodules
HELPERS = [
    "DATASETS",
    "LocallyOverridenDefaults",
    "SOFTCAP_DISABLED",
    "SUPPORTED_ACTIVATIONS",
    "Slice",
    "SliceInput",
    "TypedModuleList",
    "USE_DEFAULT_VALUE",
    "apply_softcap",
    "calc_fan_in_and_fan_out",
    "calculate_available_device_cuda_memory",
    "check_structure",
    "clear_huggingface_cache",
    "composition_scores",
    "determine_available_memory_for_available_devices",
    "download_file_from_hf",
    "filter_dict_by_prefix",
    "gelu_fast",
    "gelu_new",
    "get_act_name",
    "get_attention_mask",
    "get_best_available_cuda_device",
    "get_best_available_device",
    "get_corner",
    "get_cumsum_along_dim",
    "get_dataset",
    "get_device",
    "get_device_for_block_index",
    "get_input_with_manually_prepended_bos",
    "get_matrix_corner",
    "get_nested_attr",
    "get_offset_position_ids",
    "get_pos_offset",
    "get_tokenizer_with_bos",
    "get_tokens_with_bos_removed",
    "init_kaiming_normal_",
    "init_kaiming_uniform_",
    "init_xavier_normal_",
    "init_xavier_uniform_",
    "is_library_available",
    "is_lower_triangular",
    "is_square",
    "keep_single_column",
    "lm_accuracy",
    "lm_cross_entropy_loss",
    "logits_to_df",
    "move_to_and_update_config",
    "override_or_use_default_value",
    "print_gpu_mem",
    "remove_batch_dim",
    "repeat_along_head_dimension",
    "sample_logits",
    "select_compatible_kwargs",
    "set_nested_attr",
    "softcap_enabled",
    "solu",
    "sort_devices_based_on_available_memory",
    "temporarily_swap_parameter",
    "test_prompt",
    "to_numpy",
    "tokenize_and_concatenate",
    "transpose",
    "warn_if_mps",
]

# name -> "module" of this library that has it, or "module:another_name"
HOME: dict[str, str] = {
    "AbstractAttention": "components",
    "ActivationCache": "activations",
    "Attention": "components",
    "CanBeUsedAsMLP": "components",
    "DTYPE_FROM_STRING": "config:DTYPES",
    "DATASET_LOADERS": "evals",
    "DATASET_NAMES": "evals",
    "Embed": "components",
    "FactoredMatrix": "factored_matrix",
    "GatedMLP": "components",
    "GroupedQueryAttention": "components",
    "HEAD_NAMES": "head_detector",
    "HookFunction": "hooks",
    "HookPoint": "hooks",
    "HookedRootModule": "root_module",
    "HookedTransformer": "model",
    "HookedTransformerConfig": "config",
    "HookedTransformerKeyValueCache": "kv_cache",
    "HookedTransformerKeyValueCacheEntry": "kv_cache",
    "HookedTransformerTrainConfig": "train",
    "IOIDataset": "evals",
    "LayerNorm": "components",
    "LayerNormPre": "components",
    "LensHandle": "hooks",
    "Loss": "model",
    "LossPerToken": "compat.types",
    "MLP": "components",
    "MODEL_ALIASES": "model_names",
    "MoE": "components",
    "NamesFilter": "root_module",
    "OFFICIAL_MODEL_NAMES": "model_names",
    "Output": "model",
    "PYTHIA_CHECKPOINTS": "model_names",
    "PosEmbed": "components",
    "RMSNorm": "components",
    "RMSNormPre": "components",
    "SVDInterpreter": "svd_interpreter",
    "SingleLoss": "compat.types",
    "TokenTypeEmbed": "components",
    "TransformerBlock": "components",
    "TransformerLensConfig": "config:HookedTransformerConfig",
    "TransformerLensKeyValueCache": "kv_cache",
    "TransformerLensKeyValueCacheEntry": "kv_cache",
    "Unembed": "components",
    "XIELU": "components.activations",
    "compute_head_attention_similarity_score": "head_detector",
    "detect_head": "head_detector",
    "evaluate": "evals",
    "evaluate_on_dataset": "evals",
    "gelu_pytorch_tanh": "components.activations:gelu_tanh",
    "get_checkpoint_labels": "model_names",
    "get_duplicate_token_head_detection_pattern": "head_detector",
    "get_induction_head_detection_pattern": "head_detector",
    "get_official_model_name": "model_names",
    "get_pretrained_model_config": "compat.configs",
    "get_previous_token_head_detection_pattern": "head_detector",
    "get_supported_heads": "head_detector",
    "induction_loss": "evals",
    "ioi_eval": "evals",
    "make_code_data_loader": "evals",
    "make_owt_data_loader": "evals",
    "make_pile_data_loader": "evals",
    "make_wiki_data_loader": "evals",
    "relu2": "components.activations",
    "sanity_check": "evals",
    "train": "train",
}
HOME |= dict.fromkeys(HELPERS, UTILITIES)

CACHE = "TransformerLensKeyValueCache HookedTransformerKeyValueCache"
ENTRY = "TransformerLensKeyValueCacheEntry HookedTransformerKeyValueCacheEntry"
EMBEDDINGS = "Embed PosEmbed Unembed"
NORMS = "LayerNorm LayerNormPre RMSNorm RMSNormPre"
ATTENTIONS = "AbstractAttention Attention GroupedQueryAttention"
MLPS = "MLP GatedMLP MoE CanBeUsedAsMLP"
MATRICES = "get_corner get_matrix_corner composition_scores FactoredMatrix"

# classic module -> its names; every one is a submodule of `transformer_lens`, and, unless a file of
# that name is here, of `transformer_lens_lite`
MODULES: dict[str, str] = {
    "ActivationCache": "ActivationCache Slice warn_if_mps",
    "FactoredMatrix": "FactoredMatrix",
    "HookedRootModule": "HookedRootModule HookPoint HookFunction Slice",
    "HookedTransformer": (
        "HookedTransformer HookedTransformerConfig HookedRootModule HookPoint ActivationCache "
        "FactoredMatrix Output Loss SingleLoss LossPerToken USE_DEFAULT_VALUE DTYPE_FROM_STRING "
        f"TransformerBlock {EMBEDDINGS} {NORMS} MLP GatedMLP {CACHE}"
    ),
    "HookedTransformerConfig": "HookedTransformerConfig SUPPORTED_ACTIVATIONS",
    "SVDInterpreter": "SVDInterpreter FactoredMatrix",
    "cache": f"{CACHE} {ENTRY}",
    "cache.key_value_cache": f"{CACHE} {ENTRY}",
    "cache.key_value_cache_entry": ENTRY,
    "components": f"{ATTENTIONS} {EMBEDDINGS} {NORMS} {MLPS} TokenTypeEmbed TransformerBlock",
    "components.abstract_attention": "AbstractAttention",
    "components.attention": "Attention",
    "components.embed": "Embed",
    "components.grouped_query_attention": "GroupedQueryAttention",
    "components.layer_norm": "LayerNorm",
    "components.layer_norm_pre": "LayerNormPre",
    "components.mlps": MLPS,
    "components.mlps.can_be_used_as_mlp": "CanBeUsedAsMLP",
    "components.mlps.gated_mlp": "GatedMLP",
    "components.mlps.mlp": "MLP",
    "components.mlps.moe": "MoE",
    "components.pos_embed": "PosEmbed",
    "components.rms_norm": "RMSNorm",
    "components.rms_norm_pre": "RMSNormPre",
    "components.token_typed_embed": "TokenTypeEmbed",
    "components.transformer_block": "TransformerBlock",
    "components.unembed": "Unembed",
    "config": "HookedTransformerConfig TransformerLensConfig",
    "config.hooked_transformer_config": "HookedTransformerConfig SUPPORTED_ACTIVATIONS",
    "config.transformer_lens_config": "TransformerLensConfig",
    "evals": (
        "DATASET_LOADERS DATASET_NAMES IOIDataset evaluate evaluate_on_dataset induction_loss "
        "ioi_eval make_code_data_loader make_owt_data_loader make_pile_data_loader "
        "make_wiki_data_loader sanity_check"
    ),
    "factories": "",
    "factories.activation_function_factory": "SUPPORTED_ACTIVATIONS XIELU",
    "head_detector": (
        "HEAD_NAMES compute_head_attention_similarity_score detect_head "
        "get_duplicate_token_head_detection_pattern get_induction_head_detection_pattern "
        "get_previous_token_head_detection_pattern get_supported_heads"
    ),
    "hook_points": "HookPoint HookedRootModule LensHandle HookFunction NamesFilter",
    "loading": (
        "MODEL_ALIASES OFFICIAL_MODEL_NAMES PYTHIA_CHECKPOINTS get_checkpoint_labels "
        "get_official_model_name get_pretrained_model_config"
    ),
    "past_key_value_caching": f"{CACHE} {ENTRY}",
    "patching": "*",
    "pretrained": "",
    "supported_models": "MODEL_ALIASES OFFICIAL_MODEL_NAMES",
    "train": "HookedTransformerTrainConfig train",
    "utilities": "*",
    "utilities.activation_functions": (
        "SOFTCAP_DISABLED SUPPORTED_ACTIVATIONS XIELU apply_softcap gelu_fast gelu_new "
        "gelu_pytorch_tanh relu2 softcap_enabled solu"
    ),
    "utilities.cache": "get_pos_offset",
    "utilities.attribute_utils": "get_nested_attr set_nested_attr",
    "utilities.components_utils": "get_act_name",
    "utilities.defaults_utils": (
        "LocallyOverridenDefaults USE_DEFAULT_VALUE override_or_use_default_value"
    ),
    "utilities.devices": "get_device move_to_and_update_config warn_if_mps",
    "utilities.exploratory_utils": "test_prompt",
    "utilities.gpu_utils": "print_gpu_mem",
    "utilities.hf_utils": (
        "clear_huggingface_cache download_file_from_hf get_dataset keep_single_column "
        "select_compatible_kwargs"
    ),
    "utilities.initialization_utils": (
        "calc_fan_in_and_fan_out init_kaiming_normal_ init_kaiming_uniform_ init_xavier_normal_ "
        "init_xavier_uniform_"
    ),
    "utilities.library_utils": "is_library_available",
    "utilities.lm_utils": "lm_accuracy lm_cross_entropy_loss",
    "utilities.logits_utils": "logits_to_df sample_logits",
    "utilities.matrix": MATRICES,
    "utilities.multi_gpu": (
        "calculate_available_device_cuda_memory determine_available_memory_for_available_devices "
        "get_best_available_cuda_device get_best_available_device get_device_for_block_index "
        "sort_devices_based_on_available_memory"
    ),
    "utilities.parameter_swap": "temporarily_swap_parameter",
    "utilities.slice": "Slice SliceInput to_numpy",
    "utilities.tensors": (
        "check_structure filter_dict_by_prefix get_corner get_cumsum_along_dim "
        "get_offset_position_ids is_lower_triangular is_square remove_batch_dim "
        "repeat_along_head_dimension to_numpy transpose"
    ),
    "utilities.tokenize_utils": (
        "get_attention_mask get_input_with_manually_prepended_bos get_tokenizer_with_bos "
        "get_tokens_with_bos_removed keep_single_column tokenize_and_concatenate"
    ),
    "utilities.typed_module_list": "TypedModuleList",
}
MODULES["loading_from_pretrained"] = MODULES["loading"]
MODULES["utils"] = MODULES["utilities"]

# "*" above: all of that module of ours
WHOLE = {"utils": "utilities", "utilities": "utilities", "patching": "patching"}

# what `transformer_lens` itself has, beside its submodules and all of ours
TOP = (
    "ActivationCache FactoredMatrix HookPoint HookedRootModule HookedTransformer "
    f"HookedTransformerConfig SVDInterpreter {CACHE} {ENTRY}"
)

# modules and names that are not offered, and what to use
ENCODERS = "BERT and its kin load as a HookedTransformer: HookedTransformer.from_pretrained(name)"
BRIDGE = "HookedTransformer.from_pretrained loads any supported checkpoint, with all hook points"
T5 = "encoder-decoder models are not supported; decoders and encoders are, as HookedTransformer"
AUDIO = "audio models are not supported; the nearest thing is HookedTransformer"
PROCESSING = "use transformer_lens_lite.weight_processing or HookedTransformer.process_weights_"
ANALYSIS = "use ActivationCache.logit_attrs, decompose_resid and transformer_lens.patching"
NOT_OFFERED: dict[str, str] = {
    "BertBlock": ENCODERS,
    "BertEmbed": ENCODERS,
    "BertMLMHead": ENCODERS,
    "BertNSPHead": ENCODERS,
    "BertNextSentencePrediction": ENCODERS,
    "BertPooler": ENCODERS,
    "HookedAudioEncoder": AUDIO,
    "HookedEncoder": ENCODERS,
    "HookedEncoderDecoder": T5,
    "T5Attention": T5,
    "T5Block": T5,
    "TransformerBridge": BRIDGE,
    "TransformerBridgeConfig": BRIDGE,
    "ProcessWeights": PROCESSING,
    "benchmarks": BRIDGE,
    "conversion_utils": "conversions are tables in weights_conversion; see its families",
    "factories.architecture_adapter_factory": BRIDGE,
    "factories.mlp_factory": "use transformer_lens_lite.components.block.build_mlp",
    "lit": "the LIT server is not part of this library",
    "make_mmlu_data_loader": "evaluate token batches of your own with evals.evaluate_on_dataset",
    "mmlu_eval": "evaluate token batches of your own with evals.evaluate_on_dataset",
    "model_bridge": BRIDGE,
    "pretrained.weight_conversions": "conversions are tables in weights_conversion.families",
    "tools": ANALYSIS,
    "weight_processing": PROCESSING,
}
