"""The flat configuration users write.

`HookedTransformerConfig` keeps HookedTransformer's flat field names. It is expanded once, by
`cfg.block_specs()`, into one frozen `BlockSpec` per layer; modules are built from those and never
count layers or look at an architecture's name.
"""

import copy
import json
import math
import pprint
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transformer_lens_lite.config_checks import check_agreement, check_values
from transformer_lens_lite.nearest import closest
from transformer_lens_lite.rope_scaling import scaling_from_dict
from transformer_lens_lite.specs import (
    Alibi,
    AttentionSpec,
    BlockSpec,
    LatentSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    QueryGrowth,
    RotarySpec,
    RouterSpec,
    alibi_slopes,
)

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float64": torch.float64,
    "fp64": torch.float64,
}


def own(value: Any) -> Any:
    """A copy of a list or dictionary and all in it; other values themselves."""
    return copy.deepcopy(value) if isinstance(value, list | dict) else value


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A torch dtype from itself, "bf16", "float32", "torch.float16" …; ValueError otherwise."""
    if isinstance(dtype, torch.dtype):
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point type, got {dtype}")
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {sorted(DTYPES)}")
    return DTYPES[name]


def default_device() -> str:
    """CUDA when there is one, else the CPU. MPS is never chosen by itself: it has been silently
    wrong."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class HookedTransformerConfig:
    """Sizes and variants of a `HookedTransformer`, in the classic flat field names.

    Unknown names are refused, at construction (TypeError) and on assignment (AttributeError), with
    the nearest known name. Values that contradict each other are ValueErrors that name both.

    Fields without a counterpart in the classic class are in the last group; their defaults leave
    the classic behaviour unchanged.
    """

    # sizes
    n_layers: int
    d_model: int
    n_ctx: int
    d_head: int
    model_name: str = "custom"
    n_heads: int = -1  # -1: d_model // d_head
    d_mlp: int | None = None  # None: 4 * d_model
    act_fn: str | None = "relu"
    d_vocab: int = -1  # -1: from the tokenizer
    eps: float = 1e-5
    n_key_value_heads: int | None = None  # not None: grouped-query attention

    # attention
    use_attn_scale: bool = True
    attn_scale: float = -1.0  # scores are divided by it; -1: sqrt(d_head)
    scale_attn_by_inverse_layer_idx: bool = False
    use_local_attn: bool = False
    attn_types: Sequence[str] | None = None  # "global" or "local" per layer
    window_size: int | None = None
    attention_dir: str = "causal"
    attn_only: bool = False
    parallel_attn_mlp: bool = False
    use_qk_norm: bool = False
    clip_qkv: float | None = None
    use_attention_sinks: bool = False
    attn_scores_soft_cap: float = -1.0
    ungroup_grouped_query_attention: bool = False

    # positions
    positional_embedding_type: str = "standard"
    rotary_dim: int | None = None
    rotary_base: float = 10000.0
    rotary_base_local: float | None = None
    rotary_adjacent_pairs: bool = False
    rotary_scaling_factor: float = 1.0
    use_NTK_by_parts_rope: bool = False
    NTK_by_parts_low_freq_factor: float = 1.0
    NTK_by_parts_high_freq_factor: float = 4.0
    NTK_by_parts_factor: float = 8.0
    NTK_original_ctx_len: int = 8192
    use_yarn_rope: bool = False
    yarn_factor: float = 1.0
    yarn_attention_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_truncate: bool = True
    yarn_global_attn_only: bool = False
    use_dynamic_ntk_rope: bool = False
    use_logn_attn: bool = False
    train_seq_length: int | None = None

    # norms, MLP, output
    normalization_type: str | None = "LN"
    final_rms: bool = False
    post_embedding_ln: bool = False
    use_normalization_before_and_after: bool = False
    gated_mlp: bool = False
    num_experts: int | None = None
    experts_per_token: int | None = None
    norm_topk_prob: bool = False
    output_logits_soft_cap: float = -1.0
    d_vocab_out: int = -1  # -1: d_vocab
    tie_word_embeddings: bool = False  # True: W_U is the transpose of W_E, one tensor

    # which optional hook points a blanket run_with_cache includes
    use_attn_result: bool = False
    use_split_qkv_input: bool = False
    use_attn_in: bool = False
    use_hook_mlp_in: bool = False
    use_hook_tokens: bool = False

    # tokenizer
    tokenizer_name: str | None = None
    default_prepend_bos: bool = True
    tokenizer_prepends_bos: bool | None = None
    trust_remote_code: bool = False

    # initialisation, device
    init_weights: bool = True
    init_mode: str = "gpt2"
    initializer_range: float = -1.0  # -1: 0.8 / sqrt(d_model) for "gpt2", 1 for the others
    seed: int | None = None
    device: str | torch.device | None = None
    n_devices: int = 1
    dtype: torch.dtype | str = torch.float32

    # metadata, kept for code that reads it
    original_architecture: str | None = None
    from_checkpoint: bool = False
    checkpoint_index: int | None = None
    checkpoint_label_type: str | None = None
    checkpoint_value: int | None = None
    n_params: int | None = None  # always recomputed
    load_in_4bit: bool = False
    quantization_method: str | None = None
    uses_rms_norm: bool = False
    layer_norm_folding: bool = False
    relative_attention_max_distance: int | None = None
    relative_attention_num_buckets: int | None = None
    decoder_start_token_id: int | None = None

    # beyond the classic fields
    rotary_scaling: dict[str, Any] | None = None  # {"rope_type": …}; see rope_scaling.py
    rotary_scaling_global_only: bool = False  # local layers turn unscaled
    rotary_layers: Sequence[bool] | None = None  # which layers turn at all (None: every one)
    qk_norm_type: str = "RMS"  # or "RMSPre", "LN", "LNPre"
    # "head": the same weight [d_head] for every head; "each_head": [n_heads, d_head]; "all_heads":
    # one norm over all heads together, [n_heads * d_head]
    qk_norm_over: str = "head"
    qk_norm_after_rotary: bool = False  # where nothing turns there is no norm then
    alibi_slopes: Sequence[float] | None = None  # the penalty per position of each head
    alibi_scaled: bool = False  # the penalty is scaled as the scores are (Falcon)
    alibi_in_bfloat16: bool = False  # slope times position is rounded (Falcon)
    reserved_positions: int = 0  # rows of the position matrix before that of position 0
    # local layers see stretches of window_size positions instead of a window that slides
    chunked_attention: bool = False
    d_embed: int | None = None  # embeddings are narrower than the stream; None: they are not
    # latent attention: see LatentSpec
    latent_kv_rank: int | None = None  # None: keys and values are made from the stream
    latent_q_rank: int | None = None
    d_value: int | None = None  # None: d_head
    latent_eps: float = 1e-6
    # mixtures of experts: see RouterSpec and MoESpec
    d_expert: int | None = None  # None: d_mlp
    d_shared_expert: int | None = None  # of the expert every token passes; None: there is none
    shared_expert_gate: bool = False
    expert_layers: Sequence[bool] | None = None  # which layers have experts (None: every one)
    expert_limit: float | None = None
    expert_offset: float = 0.0
    expert_gate_slope: float = 1.0
    router_type: str = "softmax"
    router_scale: float = 1.0
    router_groups: int = 1
    router_top_groups: int = 1
    router_group_members: int = 1
    router_bias: bool = False
    router_selection_bias: bool = False
    router_on_input: bool = False
    router_jitter: float = 0.01
    # {"scale", "length", "start", "unrotated_only"}: see QueryGrowth
    query_growth: dict[str, Any] | None = None
    # "post": only after attention and MLP; "both" = use_normalization_before_and_after; "stream":
    # the stream itself, after each addition, as in the first transformers and BERT; "skip": before
    # each sublayer, and what goes past it is normalised too
    norm_place: str = "pre"
    norm_weight_offset: float = 0.0  # weights of norms mean (offset + w)
    gated_mlp_biases: bool = False  # b_gate and b_up in a gated MLP
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies attn_out and mlp_out
    logit_scale: float = 1.0
    # encoders
    n_token_types: int = 0  # rows of an embedding of token types, added to that of tokens
    post_embedding_ln_last: bool = False  # behind positions and token types, not before them
    first_norm: bool = True  # False: the first attention reads the stream as it is (ModernBERT)
    final_norm: bool = True
    unembedding: bool = True  # False: the stream is all there is; there are no logits
    unembed_act_fn: str | None = None  # dense, this activation, LayerNorm before the unembedding

    def __post_init__(self) -> None:
        self.dtype = parse_dtype(self.dtype)
        if self.device is None:
            self.device = default_device()
        check_values(self)
        self._fill_in_sizes()
        check_agreement(self)
        if self.positional_embedding_type == "rotary":
            self.rotary_spec("global")  # raises on bad scaling parameters
        self.n_params = self._count_params()
        if self.seed is not None:
            self.set_seed_everywhere(self.seed)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            raise AttributeError(
                f"{type(self).__name__} has no field "
                f"{name!r}.{closest(name, self.__dataclass_fields__)}"
            )
        object.__setattr__(self, name, value)

    # -- defaults that depend on other fields --

    def _fill_in_sizes(self) -> None:
        if self.n_heads == -1:
            if self.d_model % self.d_head:
                raise ValueError(
                    f"n_heads is not given and d_model={self.d_model} is not divisible by "
                    f"d_head={self.d_head}"
                )
            self.n_heads = self.d_model // self.d_head
        if self.d_mlp is None:
            self.d_mlp = 4 * self.d_model
        default = math.sqrt(self.d_head)  # goes again with what it is the default of
        if self.attn_scale in (-1.0, default):
            self.attn_scale = default if self.use_attn_scale else -1.0
        if self.initializer_range == -1.0:
            self.initializer_range = (
                0.8 / math.sqrt(self.d_model) if self.init_mode == "gpt2" else 1.0
            )
        if self.d_vocab_out == -1:
            self.d_vocab_out = self.d_vocab
        if self.rotary_dim in (None, self.d_head):
            rotary = self.positional_embedding_type == "rotary"
            self.rotary_dim = self.d_head if rotary else None
        if self.use_normalization_before_and_after:
            if self.norm_place in ("post", "stream", "skip"):
                raise ValueError(
                    "use_normalization_before_and_after=True contradicts "
                    f"norm_place={self.norm_place!r}"
                )
            self.norm_place = "both"
        self.use_normalization_before_and_after = self.norm_place == "both"

    # -- expansion --

    def rotary_spec(self, attn_type: str) -> RotarySpec:
        """Rotary parameters of a "global" or "local" layer."""
        assert self.rotary_dim is not None
        local = attn_type == "local"
        base = self.rotary_base_local if local and self.rotary_base_local else self.rotary_base
        parameters, global_only = self._rotary_scaling_parameters()
        scaling = scaling_from_dict(None if local and global_only else parameters, self.rotary_dim)
        at_end = self.latent_kv_rank is not None
        return RotarySpec(self.rotary_dim, float(base), self.rotary_adjacent_pairs, scaling, at_end)

    def _rotary_scaling_parameters(self) -> tuple[dict[str, Any] | None, bool]:
        """The scaling in force and whether local layers go without it."""
        given = self._rotary_scalings()
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given together; use one")
        return next(iter(given.values()), (None, False))

    def _rotary_scalings(self) -> dict[str, tuple[dict[str, Any], bool]]:
        """By the field that asks for it: the classic flags say what `rotary_scaling` could."""
        given: dict[str, tuple[dict[str, Any], bool]] = {}
        if self.rotary_scaling is not None:
            given["rotary_scaling"] = (self.rotary_scaling, self.rotary_scaling_global_only)
        if self.rotary_scaling_factor != 1.0:
            linear = {"rope_type": "linear", "factor": self.rotary_scaling_factor}
            given["rotary_scaling_factor"] = (linear, True)
        if self.use_NTK_by_parts_rope:
            llama3 = {
                "rope_type": "llama3",
                "factor": self.NTK_by_parts_factor,
                "low_freq_factor": self.NTK_by_parts_low_freq_factor,
                "high_freq_factor": self.NTK_by_parts_high_freq_factor,
                "original_max_position_embeddings": self.NTK_original_ctx_len,
            }
            given["use_NTK_by_parts_rope"] = (llama3, self.rotary_scaling_global_only)
        if self.use_yarn_rope:
            yarn = {
                "rope_type": "yarn",
                "factor": self.yarn_factor,
                "attention_factor": self.yarn_attention_factor,
                "beta_fast": self.yarn_beta_fast,
                "beta_slow": self.yarn_beta_slow,
                "original_max_position_embeddings": self.yarn_original_max_position_embeddings,
                "truncate": self.yarn_truncate,
            }
            given["use_yarn_rope"] = (yarn, self.yarn_global_attn_only)
        return given

    def turns_anew_past(self) -> int | None:
        """The length past which a row's keys, those already cached too, turn in another way."""
        if self.positional_embedding_type != "rotary":
            return None
        return self.rotary_spec("global").scaling.turns_anew_past

    def norm_spec(self, width: int | None = None, kind: str | None = None) -> NormSpec | None:
        """The spec of this model's norm, or of a norm of another `kind` or `width`; None: no
        norm."""
        kind = kind or self.normalization_type
        if kind is None:
            return None
        return NormSpec(kind, width or self.d_model, self.eps, self.norm_weight_offset)

    def final_norm_spec(self) -> NormSpec | None:
        """`final_rms`: a LayerNorm model whose last norm is an RMSNorm."""
        if not self.final_norm:
            return None
        rms = {"LN": "RMS", "LNPre": "RMSPre"}
        kind = self.normalization_type
        return self.norm_spec(kind=rms.get(kind or "", kind) if self.final_rms else kind)

    def block_specs(self) -> tuple[BlockSpec, ...]:
        """One frozen spec per layer: the only place where per-layer variation is worked out."""
        return tuple(self._block_spec(layer) for layer in range(self.n_layers))

    def _block_spec(self, layer: int) -> BlockSpec:
        return BlockSpec(
            layer=layer,
            attention=self._attention_spec(layer),
            mlp=None if self.attn_only else self._mlp_spec(layer),
            norm=self.norm_spec(),
            attention_norm=self.norm_spec() if layer or self.first_norm else None,
            post_norm=self._post_norm_spec(),
            norm_place=self.norm_place,
            parallel=self.parallel_attn_mlp,
            residual_scale=self.residual_scale,
        )

    def _post_norm_spec(self) -> NormSpec | None:
        weighted = (self.normalization_type or "").removesuffix("Pre")
        return self.norm_spec(kind=weighted) if self.norm_place == "both" else None

    def _attention_spec(self, layer: int) -> AttentionSpec:
        attn_type = self.attn_types[layer] if self.use_local_attn and self.attn_types else "global"
        turns = self.positional_embedding_type == "rotary" and (
            self.rotary_layers is None or self.rotary_layers[layer]
        )
        n_kv_heads = self.n_key_value_heads or self.n_heads
        window = self.window_size if attn_type == "local" else None
        return AttentionSpec(
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=n_kv_heads,
            d_head=self.d_head,
            grouped=self.n_key_value_heads is not None,
            scale=self._score_scale(layer),
            causal=self.attention_dir == "causal",
            window=None if self.chunked_attention else window,
            chunk=window if self.chunked_attention else None,
            rotary=self.rotary_spec(attn_type) if turns else None,
            alibi=self._alibi(self._score_scale(layer)),
            growth=self._query_growth(turns),
            softcap=self.attn_scores_soft_cap if self.attn_scores_soft_cap > 0 else None,
            qk_norm=self._qk_norm_spec() if turns or not self.qk_norm_after_rotary else None,
            qk_norm_joins_heads=self.qk_norm_over == "all_heads",
            qk_norm_after_rotary=self.qk_norm_after_rotary,
            clip_qkv=self.clip_qkv,
            sinks=self.use_attention_sinks,
            latent=self._latent_spec(),
        )

    def _qk_norm_spec(self) -> NormSpec | None:
        """Of queries; `n_heads` is that of keys for keys."""
        if not self.use_qk_norm:
            return None
        n_heads = self.n_heads if self.qk_norm_over == "each_head" else None
        return NormSpec(self.qk_norm_type, self.d_head, self.eps, self.norm_weight_offset, n_heads)

    def _latent_spec(self) -> LatentSpec | None:
        if self.latent_kv_rank is None:
            return None
        d_value = self.d_value or self.d_head
        return LatentSpec(self.latent_kv_rank, self.latent_q_rank, d_value, self.latent_eps)

    def _alibi(self, score_scale: float) -> Alibi | None:
        if self.positional_embedding_type != "alibi":
            return None
        slopes = tuple(self.alibi_slopes or alibi_slopes(self.n_heads))
        return Alibi(slopes, score_scale if self.alibi_scaled else 1.0, self.alibi_in_bfloat16)

    def _query_growth(self, turns: bool) -> QueryGrowth | None:
        """That of a layer that turns, or does not."""
        given = dict(self.query_growth or {})
        unrotated_only = given.pop("unrotated_only", False)
        return None if not given or (unrotated_only and turns) else QueryGrowth(**given)

    def _score_scale(self, layer: int) -> float:
        divisor = self.attn_scale if self.use_attn_scale else 1.0
        return 1.0 / (divisor * (layer + 1 if self.scale_attn_by_inverse_layer_idx else 1))

    def _mlp_spec(self, layer: int) -> MLPSpec | MoESpec:
        has_experts = self.expert_layers is None or self.expert_layers[layer]
        return self._moe_spec() if self.num_experts and has_experts else self._one_mlp(self.d_mlp)

    def _moe_spec(self) -> MoESpec:
        assert self.num_experts is not None
        assert self.experts_per_token is not None
        assert self.d_mlp is not None
        assert self.act_fn is not None
        shared = self.d_shared_expert
        return MoESpec(
            d_model=self.d_model,
            d_mlp=self.d_expert or self.d_mlp,
            act_fn=self.act_fn,
            gated_biases=self.gated_mlp_biases,
            limit=self.expert_limit,
            offset=self.expert_offset,
            gate_slope=self.expert_gate_slope,
            router=RouterSpec(
                n_experts=self.num_experts,
                top_k=self.experts_per_token,
                kind=self.router_type,
                normalised=self.norm_topk_prob,
                scale=self.router_scale,
                n_groups=self.router_groups,
                top_groups=self.router_top_groups,
                group_members=self.router_group_members,
                bias=self.router_bias,
                selection_bias=self.router_selection_bias,
                on_input=self.router_on_input,
                jitter=self.router_jitter,
            ),
            shared=None if shared is None else self._one_mlp(shared),
            shared_gate=self.shared_expert_gate,
        )

    def _one_mlp(self, d_mlp: int | None) -> MLPSpec:
        assert d_mlp is not None
        assert self.act_fn is not None
        return MLPSpec(
            d_model=self.d_model,
            d_mlp=d_mlp,
            act_fn=self.act_fn,
            gated=self.gated_mlp,
            gated_biases=self.gated_mlp_biases,
            norm=NormSpec("LN", d_mlp, self.eps) if self.is_layer_norm_activation() else None,
        )

    # -- the classic methods --

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> "HookedTransformerConfig":
        """Build from a plain dict; TypeError on an unknown key, naming the nearest."""
        known = cls.__dataclass_fields__
        for name in config_dict:
            if name not in known:
                raise TypeError(f"{cls.__name__} has no field {name!r}.{closest(name, known)}")
        return cls(**config_dict)

    @classmethod
    def unwrap(
        cls, config: "dict[str, Any] | HookedTransformerConfig"
    ) -> "HookedTransformerConfig":
        """A config from a config or a dict."""
        return cls.from_dict(config) if isinstance(config, dict) else config

    def to_dict(self) -> dict[str, Any]:
        """A copy of the fields, `dtype` as a torch.dtype."""
        return {name: own(getattr(self, name)) for name in self.__dataclass_fields__}

    def copied(self) -> "HookedTransformerConfig":
        """A copy that shares no list or dictionary with this one."""
        twin = copy.copy(self)
        vars(twin).update({name: own(value) for name, value in vars(self).items()})
        return twin

    def to_json(self) -> str:
        """JSON text that `from_json` reads back to an equal config."""
        values = self.to_dict()
        values["dtype"] = str(self.dtype).removeprefix("torch.")
        values["device"] = str(self.device)
        for name in ("attn_types", "rotary_layers", "expert_layers", "alibi_slopes"):
            values[name] = None if values[name] is None else list(values[name])
        return json.dumps(values, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "HookedTransformerConfig":
        """The inverse of `to_json`."""
        return cls.from_dict(json.loads(text))

    def is_layer_norm_activation(self) -> bool:
        """Whether the MLP has a LayerNorm after its activation ("solu_ln")."""
        return self.act_fn is not None and self.act_fn.endswith("_ln")

    def set_seed_everywhere(self, seed: int) -> None:
        """Seed torch, random and numpy (when numpy is there)."""
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            import numpy
        except ImportError:
            return
        numpy.random.seed(seed)

    def _count_params(self) -> int:
        """Weights of attention and MLPs, as the classic class counts them (grouping ignored)."""
        attention = 4 * self.d_model * self.d_head * self.n_heads
        mlp = (
            0 if self.attn_only else self.d_model * (self.d_mlp or 0) * (3 if self.gated_mlp else 2)
        )
        if self.num_experts:  # and a column of the router for each
            mlp = (mlp + self.d_model) * self.num_experts
        return self.n_layers * (attention + mlp)

    def __repr__(self) -> str:
        return f"{type(self).__name__}:\n{pprint.pformat(self.to_dict())}"


def _refuse_unknown_arguments(cls: Any) -> None:
    """Make the constructor's TypeError for an unknown keyword name the nearest field."""
    construct = cls.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        known = type(self).__dataclass_fields__
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{type(self).__name__} has no field {name!r}.{closest(name, known)}"
                )
        construct(self, *args, **kwargs)

    # inspect.signature follows it
    __init__.__wrapped__ = construct  # type: ignore[attr-defined]
    cls.__init__ = __init__


_refuse_unknown_arguments(HookedTransformerConfig)
