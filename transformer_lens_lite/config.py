"""The flat configuration users write, and the frozen per-layer specs a model is built from.

`HookedTransformerConfig` keeps HookedTransformer's flat field names. It is expanded once, by
`cfg.block_specs()`, into one frozen `BlockSpec` per layer; modules are built from those and never
count layers or look at an architecture's name.
"""

import copy
import difflib
import functools
import inspect
import json
import math
import numbers
import pprint
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from transformer_lens_lite.rope_scaling import RotaryScaling, scaling_from_dict

ACTIVATIONS = (
    "solu", "solu_ln", "gelu_new", "gelu_fast", "silu", "relu", "gelu", "gelu_pytorch_tanh",
    "xielu", "relu2", "quick_gelu",
)  # fmt: skip
NORMALIZATIONS = ("LN", "LNPre", "RMS", "RMSPre", None)
POSITION_KINDS = ("standard", "rotary", "shortformer", "alibi", "none")
INIT_MODES = (
    "gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "muP",
)  # fmt: skip
POSITIVE = (
    "eps", "rotary_base", "rotary_scaling_factor", "NTK_by_parts_factor", "yarn_factor",
    "embed_scale", "residual_scale", "logit_scale", "expert_gate_slope",
)  # fmt: skip
NORM_PLACES = ("pre", "post", "both", "stream", "skip")
ROUTER_TYPES = ("softmax", "sigmoid", "sparsemixer")
EXPERT_FIELDS = (
    "norm_topk_prob", "d_expert", "d_shared_expert", "shared_expert_gate", "expert_layers",
    "expert_limit", "expert_offset", "expert_gate_slope", "router_type", "router_scale",
    "router_groups", "router_top_groups", "router_group_members", "router_bias",
    "router_selection_bias", "router_on_input", "router_jitter",
)  # fmt: skip
QK_NORM_OVER = ("head", "each_head", "all_heads")
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


def closest(name: str, known: Iterable[str], n: int = 3, cutoff: float = 0.5) -> str:
    """The tail of an error message: " Did you mean 'a' or 'b'?", or nothing."""
    matches = difflib.get_close_matches(name, [str(k) for k in known], n=n, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, matches))}?" if matches else ""


Function = TypeVar("Function", bound=Callable[..., Any])


def names_the_nearest(function: Function) -> Function:
    """The TypeError for an unknown keyword argument says which known one comes closest."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{function.__name__}() has no argument {name!r}.{closest(name, known)}"
                )
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


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


# --- the frozen specs ---------------------------------------------------------------------------


@dataclass(frozen=True)
class NormSpec:
    """One normalisation: `kind` LN, LNPre, RMS or RMSPre; `offset` is added to the weight (Gemma:
    1); with `n_heads`, every head has weights of its own, [n_heads, width]."""

    kind: str
    width: int
    eps: float
    offset: float = 0.0
    n_heads: int | None = None

    def widened_to(self, width: int) -> "NormSpec":
        """The same norm over another width."""
        return replace(self, width=width)


@dataclass(frozen=True)
class RotarySpec:
    """Rotary positions on the first `dim` channels of each head, or the last."""

    dim: int
    base: float
    adjacent_pairs: bool  # True: channels (2i, 2i+1) turn together (GPT-J); False: (i, i + dim/2)
    scaling: RotaryScaling
    at_end: bool = False


@dataclass(frozen=True)
class LatentSpec:
    """Keys and values are made from a narrow latent, queries perhaps from another (DeepSeek-V2,
    arXiv 2405.04434)."""

    kv_rank: int
    q_rank: int | None  # None: queries are made from the stream
    d_value: int  # of each head; keys have d_head, of which the last channels turn
    eps: float  # of the latents' norms


@dataclass(frozen=True)
class QueryGrowth:
    """Queries grow with their position: times 1 + scale * log(1 + floor((pos + start) / length))
    (Llama 4; arXiv 2501.19399)."""

    scale: float
    length: float
    start: int = 0


@dataclass(frozen=True)
class Alibi:
    """Scores fall by `slopes` of each head times the distance (arXiv 2108.12409), times `scale`.

    `in_bfloat16`: slope times position is rounded, position by position, whatever the model's dtype
    (Falcon).
    """

    slopes: tuple[float, ...]
    scale: float = 1.0
    in_bfloat16: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """Everything one attention layer is built from."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    grouped: bool  # parameters are named _W_K, _W_V and may have fewer heads
    scale: float  # multiplies q·k
    causal: bool
    window: int | None  # a query sees this many keys, itself included; None: all
    chunk: int | None  # a query sees only its own stretch of this many positions (Llama 4)
    rotary: RotarySpec | None
    alibi: Alibi | None
    growth: QueryGrowth | None
    softcap: float | None
    qk_norm: NormSpec | None
    qk_norm_joins_heads: bool  # one norm over all heads together
    qk_norm_after_rotary: bool
    clip_qkv: float | None
    sinks: bool
    latent: LatentSpec | None

    @property
    def d_value(self) -> int:
        """Channels of one head's values."""
        return self.d_head if self.latent is None else self.latent.d_value


@dataclass(frozen=True)
class MLPSpec:
    """A plain or gated MLP. `norm` is the LayerNorm inside "*_ln" activations."""

    d_model: int
    d_mlp: int
    act_fn: str
    gated: bool
    gated_biases: bool  # biases on the two inner projections of a gated MLP (b_gate, b_up)
    norm: NormSpec | None


@dataclass(frozen=True)
class RouterSpec:
    """How a mixture of experts chooses `top_k` of them, and weighs what they say."""

    n_experts: int
    top_k: int
    kind: str  # "softmax", "sigmoid" or "sparsemixer"
    normalised: bool  # the weights of the chosen sum to one
    scale: float  # multiplies the weights
    n_groups: int  # experts come in groups, and only those of the best groups are chosen from
    top_groups: int
    group_members: int  # a group is as good as the sum of this many of its best
    bias: bool  # of the logits
    selection_bias: bool  # added to scores where experts are chosen, not where they are weighed
    on_input: bool  # weights multiply what goes into an expert
    jitter: float  # sparsemixer: how far from the best counts as close


@dataclass(frozen=True)
class MoESpec:
    """A mixture of gated MLPs. `shared` is one that every token passes."""

    d_model: int
    d_mlp: int
    act_fn: str
    gated_biases: bool
    limit: float | None  # clamps both branches of an expert
    offset: float  # added to the branch beside the gate
    gate_slope: float  # the gate is act_fn(slope * x) / slope
    router: RouterSpec
    shared: MLPSpec | None
    shared_gate: bool  # the shared expert is weighed by a sigmoid of its own


@dataclass(frozen=True)
class BlockSpec:
    """One layer; without `mlp` in attention-only models."""

    layer: int
    attention: AttentionSpec
    mlp: MLPSpec | MoESpec | None
    norm: NormSpec | None
    attention_norm: NormSpec | None  # the same, or none
    post_norm: NormSpec | None  # a second norm behind each sublayer; never folded
    norm_place: str  # "pre", "post", "both", "stream" or "skip"
    parallel: bool
    residual_scale: float


def alibi_slopes(n_heads: int) -> list[float]:
    """The penalty per position of each head (ALiBi, arXiv 2108.12409).

    A geometric series for a power of two; other counts take every second slope of the next one.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-4 * (2 * i + 1) / power) for i in range(n_heads - power)]


# --- the flat configuration ---------------------------------------------------------------------


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
    initializer_range: float = -1.0
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
        self._check_types()
        self._check_sizes()
        self._fill_in_sizes()
        self._check_choices()
        self._check_contradictions()
        self._check_latent()
        self._check_experts()
        self._check_ends()
        self._check_unsupported()
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

    # -- validation --

    def _check_types(self) -> None:
        """Flags are flags and numbers are numbers: True is no number, and "false" would be true."""
        for name, each in self.__dataclass_fields__.items():
            value = getattr(self, name)
            if each.type is bool and not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
            if each.type is float or (each.type == (float | None) and value is not None):
                is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
                if not is_number or math.isnan(value):
                    raise ValueError(f"{name} must be a number, got {value!r}")
        for name in ("attn_scores_soft_cap", "output_logits_soft_cap"):
            value = getattr(self, name)
            if value < 0 and value != -1.0:
                raise ValueError(f"{name} must be positive, or -1 for no cap; got {value!r}")

    def _check_sizes(self) -> None:
        may_be_zero = ("n_layers", "reserved_positions", "n_token_types")
        for name in (*may_be_zero, "d_model", "n_ctx", "d_head"):
            value = getattr(self, name)
            least = 0 if name in may_be_zero else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        for name in ("n_heads", "d_vocab", "d_vocab_out"):
            value = getattr(self, name)
            if not isinstance(value, int) or (value < 1 and value != -1):
                raise ValueError(
                    f"{name} must be a positive integer, or -1 for its default; got {value!r}"
                )
        for name in (
            "d_mlp", "n_key_value_heads", "rotary_dim", "window_size", "num_experts",
            "experts_per_token", "d_expert", "d_shared_expert", "latent_kv_rank",
            "latent_q_rank", "d_value", "d_embed",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be None or a positive integer, got {value!r}")
        for name in POSITIVE:
            value = getattr(self, name)
            if not value > 0 or value == float("inf"):  # NaN is not > 0
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        for name, none in (("clip_qkv", None), ("rotary_base_local", None), ("attn_scale", -1.0)):
            value = getattr(self, name)
            if value != none and not value > 0:
                raise ValueError(f"{name} must be {none} or a positive number, got {value!r}")

    def _fill_in_sizes(self) -> None:
        if self.n_heads == -1:
            if self.d_model % self.d_head:
                raise ValueError(
                    f"n_heads is not given and d_model={self.d_model} is not divisible by "
                    f"d_head={self.d_head}"
                )
            self.n_heads = self.d_model // self.d_head
        if self.d_mlp is None and not self.attn_only:
            self.d_mlp = 4 * self.d_model
        if self.d_vocab_out == -1:
            self.d_vocab_out = self.d_vocab
        if self.positional_embedding_type == "rotary" and self.rotary_dim is None:
            self.rotary_dim = self.d_head
        if self.use_normalization_before_and_after:
            if self.norm_place in ("post", "stream", "skip"):
                raise ValueError(
                    "use_normalization_before_and_after=True contradicts "
                    f"norm_place={self.norm_place!r}"
                )
            self.norm_place = "both"
        self.use_normalization_before_and_after = self.norm_place == "both"

    def _check_choices(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "normalization_type": NORMALIZATIONS,
            "positional_embedding_type": POSITION_KINDS,
            "init_mode": INIT_MODES,
            "attention_dir": ("causal", "bidirectional"),
            "norm_place": NORM_PLACES,
            "qk_norm_type": NORMALIZATIONS[:-1],
            "qk_norm_over": QK_NORM_OVER,
            "router_type": ROUTER_TYPES,
        }
        if not self.attn_only:
            choices["act_fn"] = ACTIVATIONS
        if self.unembed_act_fn is not None:
            # of those without parameters or a norm of their own
            choices["unembed_act_fn"] = tuple(
                name for name in ACTIVATIONS if name not in ("solu_ln", "xielu")
            )
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                hint = closest(str(value), [str(a) for a in allowed])
                raise ValueError(f"{name}={value!r} is not one of {list(allowed)}.{hint}")

    def _check_contradictions(self) -> None:
        kv = self.n_key_value_heads
        if kv is not None and self.n_heads % kv:
            raise ValueError(f"n_heads={self.n_heads} is not a multiple of n_key_value_heads={kv}")
        if self.use_local_attn and (self.window_size is None or self.attn_types is None):
            raise ValueError(
                "use_local_attn=True needs both window_size and attn_types; got "
                f"window_size={self.window_size!r}, attn_types={self.attn_types!r}"
            )
        if self.window_size is not None and not self.use_local_attn:
            raise ValueError(
                f"window_size={self.window_size} has no effect with use_local_attn=False"
            )
        self._check_per_layer("attn_types", ("global", "local"))
        self._check_per_layer("rotary_layers", (True, False))
        if self.use_local_attn and "local" not in (self.attn_types or ()):
            raise ValueError(f"window_size={self.window_size} but attn_types has no 'local' layer")
        if self.positional_embedding_type == "rotary":
            assert self.rotary_dim is not None
            if self.rotary_dim > self.d_head or self.rotary_dim % 2:
                raise ValueError(
                    f"rotary_dim={self.rotary_dim} must be even and at most d_head={self.d_head}"
                )
            self.rotary_spec("global")  # raises on bad scaling parameters
        elif given := list(self._rotary_scalings()) or self.rotary_layers and ["rotary_layers"]:
            raise ValueError(
                f"{' and '.join(given)} without positional_embedding_type='rotary'; it is "
                f"{self.positional_embedding_type!r}"
            )
        if self.tie_word_embeddings and self.d_vocab_out != self.d_vocab:
            raise ValueError(
                f"tie_word_embeddings=True needs d_vocab_out={self.d_vocab_out} == "
                f"d_vocab={self.d_vocab}"
            )
        shares_keys = kv not in (None, self.n_heads) and not self.ungroup_grouped_query_attention
        if self.use_attn_in and shares_keys:
            raise ValueError(
                f"use_attn_in=True needs as many key as query heads: n_key_value_heads={kv}, "
                f"n_heads={self.n_heads}; use_split_qkv_input has no such limit"
            )
        if self.use_attention_sinks and self.attn_scores_soft_cap > 0:
            raise ValueError("use_attention_sinks and attn_scores_soft_cap > 0 cannot be combined")
        if self.attn_only and (self.gated_mlp or self.parallel_attn_mlp):
            raise ValueError("attn_only=True contradicts gated_mlp=True or parallel_attn_mlp=True")
        if self.gated_mlp_biases and not self.gated_mlp:
            raise ValueError("gated_mlp_biases=True contradicts gated_mlp=False")
        if self.norm_place != "pre" and self.normalization_type is None:
            raise ValueError(f"norm_place={self.norm_place!r} contradicts normalization_type=None")
        for name, default in (
            ("qk_norm_type", "RMS"),
            ("qk_norm_over", "head"),
            ("qk_norm_after_rotary", False),
        ):
            value = getattr(self, name)
            if value != default and not self.use_qk_norm:
                raise ValueError(f"{name}={value!r} contradicts use_qk_norm=False")
        if self.qk_norm_over == "all_heads" and self.qk_norm_type != "RMS":
            raise ValueError(
                f"qk_norm_over='all_heads' needs qk_norm_type='RMS', got {self.qk_norm_type!r}"
            )
        kind = self.positional_embedding_type
        for name in ("alibi_slopes", "alibi_scaled", "alibi_in_bfloat16"):
            if getattr(self, name) and kind != "alibi":
                raise ValueError(
                    f"{name} without positional_embedding_type='alibi'; it is {kind!r}"
                )
        if self.alibi_slopes is not None and len(self.alibi_slopes) != self.n_heads:
            raise ValueError(
                f"alibi_slopes has {len(self.alibi_slopes)} entries but n_heads={self.n_heads}"
            )
        if self.reserved_positions and kind not in ("standard", "shortformer"):
            raise ValueError(
                f"reserved_positions={self.reserved_positions} without learned positions; "
                f"positional_embedding_type is {kind!r}"
            )
        if self.chunked_attention and not self.use_local_attn:
            raise ValueError("chunked_attention=True has no effect with use_local_attn=False")
        self._query_growth(turns=False)  # raises on bad parameters

    def _check_latent(self) -> None:
        if self.latent_kv_rank is None:
            for name in ("latent_q_rank", "d_value"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)!r} without latent_kv_rank")
            return
        if self.positional_embedding_type != "rotary":
            raise ValueError(
                "latent_kv_rank needs positional_embedding_type='rotary', got "
                f"{self.positional_embedding_type!r}"
            )
        assert self.rotary_dim is not None
        if self.rotary_dim >= self.d_head:
            raise ValueError(
                f"latent_kv_rank needs channels that do not turn: rotary_dim={self.rotary_dim} "
                f"must be less than d_head={self.d_head}"
            )
        if self.n_key_value_heads is not None:
            raise ValueError(
                f"latent_kv_rank gives every head its keys; n_key_value_heads="
                f"{self.n_key_value_heads} contradicts it"
            )

    def _check_experts(self) -> None:
        n, k = self.num_experts, self.experts_per_token
        if (n is None) != (k is None):
            raise ValueError(f"num_experts={n} and experts_per_token={k} go together")
        if n is None or k is None:
            for name in EXPERT_FIELDS:
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise ValueError(f"{name}={getattr(self, name)!r} without num_experts")
            return
        if not 1 <= k <= n:
            raise ValueError(f"experts_per_token={k} must be between 1 and num_experts={n}")
        if not self.gated_mlp or self.attn_only:
            raise ValueError("num_experts needs gated_mlp=True: experts are gated MLPs")
        groups = self.router_groups
        if n % groups or not 1 <= self.router_top_groups <= groups:
            raise ValueError(
                f"num_experts={n} must be a multiple of router_groups={groups}, and "
                f"router_top_groups={self.router_top_groups} between 1 and it"
            )
        if k > (n // groups) * self.router_top_groups:
            raise ValueError(
                f"experts_per_token={k} is more than router_top_groups="
                f"{self.router_top_groups} groups of {n // groups} hold"
            )
        if self.router_group_members > n // groups:
            raise ValueError(
                f"router_group_members={self.router_group_members} is more than a group holds: "
                f"num_experts={n}, router_groups={groups}"
            )
        if self.router_type == "sparsemixer" and k != 2:
            raise ValueError(f"router_type='sparsemixer' chooses two, experts_per_token={k}")
        if self.shared_expert_gate and self.d_shared_expert is None:
            raise ValueError("shared_expert_gate=True without d_shared_expert")
        self._check_per_layer("expert_layers", (True, False))

    def _check_ends(self) -> None:
        if self.d_embed is not None and self.unembed_act_fn is not None:
            raise ValueError(
                f"d_embed={self.d_embed} and unembed_act_fn={self.unembed_act_fn!r} cannot be "
                "combined"
            )
        if self.norm_place in ("stream", "skip") and self.parallel_attn_mlp:
            raise ValueError(f"norm_place={self.norm_place!r} contradicts parallel_attn_mlp=True")
        if self.post_embedding_ln_last and not self.post_embedding_ln:
            raise ValueError("post_embedding_ln_last=True without post_embedding_ln=True")
        if not self.first_norm and self.norm_place != "pre":
            raise ValueError(f"first_norm=False contradicts norm_place={self.norm_place!r}")
        if self.final_rms and not self.final_norm:
            raise ValueError("final_rms=True contradicts final_norm=False")
        if not self.unembedding:
            for name, off in (("tie_word_embeddings", False), ("unembed_act_fn", None)):
                if getattr(self, name) != off:
                    raise ValueError(f"{name}={getattr(self, name)!r} without an unembedding")

    def _check_per_layer(self, name: str, allowed: tuple[Any, ...]) -> None:
        values = getattr(self, name)
        if values is None:
            return
        if len(values) != self.n_layers:
            raise ValueError(f"{name} has {len(values)} entries but n_layers={self.n_layers}")
        if wrong := [v for v in values if v not in allowed]:
            raise ValueError(f"{name} may hold {list(allowed)}, got {wrong[0]!r}")

    def _check_unsupported(self) -> None:
        if self.n_devices != 1:
            raise ValueError(
                f"n_devices={self.n_devices}: splitting a model over devices is not supported"
            )
        if self.load_in_4bit or self.quantization_method:
            raise ValueError(
                "load_in_4bit / quantization_method: quantised weights are not supported"
            )
        if self.use_dynamic_ntk_rope or self.use_logn_attn:
            raise ValueError(
                "use_dynamic_ntk_rope / use_logn_attn (Qwen-1) are not supported; for dynamic "
                "NTK use "
                "rotary_scaling={'rope_type': 'dynamic', 'factor': …}"
            )

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
        if not given or (unrotated_only and turns):
            return None
        try:
            growth = QueryGrowth(**given)
        except TypeError as error:
            raise ValueError(f"query_growth={self.query_growth!r}: {error}") from None
        if not growth.length > 0:
            raise ValueError(f"query_growth: length must be positive, got {growth.length!r}")
        return growth

    def _score_scale(self, layer: int) -> float:
        divisor = 1.0
        if self.use_attn_scale:
            divisor = self.d_head**0.5 if self.attn_scale == -1.0 else self.attn_scale
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
