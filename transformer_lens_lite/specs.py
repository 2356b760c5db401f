"""The frozen per-layer specs a model is built from.

`HookedTransformerConfig.block_specs()` expands the flat configuration into one `BlockSpec` per
layer, once; modules are built from those.
"""

import math
from dataclasses import dataclass, field, replace

from transformer_lens_lite.rope_scaling import RotaryScaling


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


class Keyed:
    """What a forward works out once for all layers that ask for the same. `key` says what that is:
    a string, which is quickly found, and which compilers can compare."""

    key: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", repr(self))  # these are frozen


@dataclass(frozen=True)
class RotarySpec(Keyed):
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
class QueryGrowth(Keyed):
    """Queries grow with their position: times 1 + scale * log(1 + floor((pos + start) / length))
    (Llama 4; arXiv 2501.19399)."""

    scale: float
    length: float
    start: int = 0


@dataclass(frozen=True)
class Alibi(Keyed):
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
    sight: str = field(init=False, repr=False, compare=False)  # what its mask depends on

    def __post_init__(self) -> None:
        sight = repr((self.causal, self.window, self.chunk, self.alibi))
        object.__setattr__(self, "sight", sight)

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
