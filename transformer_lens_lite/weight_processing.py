"""Rewriting weights so that they read more simply while the model says the same.

    cfg, state = process_weights(model.cfg, model.state_dict())

Pure functions from a config and a state dict to new ones; nothing given is changed. Tensors that
need no change are passed on as they are, not copied; the others keep their dtype and their memory
layout. A step that would change what a model says is left out, and a warning names the reason; a
step that has nothing to do (folding a model without norm weights, centring for RMS norms) is left
out silently.

Everything is computed in `dtype` (float32, or float64 for float64 weights) and rounded back once,
one section at a time (the embeddings, each attention and MLP, the unembedding): only one is ever
held wide.
"""

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from transformer_lens_lite.components.storage import matmul_ready
from transformer_lens_lite.config import HookedTransformerConfig

State = dict[str, Tensor]  # by name


class Section(State):
    """The tensors of one section while they are rewritten, without "blocks.3." in their names.

    `narrow` holds what was given of those nobody has asked to own, `given` the same as wide as they
    are computed with.
    """

    def __init__(self, narrow: State, dtype: torch.dtype) -> None:
        super().__init__({name: widened(tensor, dtype) for name, tensor in narrow.items()})
        self.narrow, self.given = narrow, dict(self)

    def own(self, name: str) -> Tensor:
        """A tensor that may be changed in place. What was given is let go, so that its memory, a
        checkpoint's pages most often, is free before the next one's are read."""
        if self[name] is self.given.get(name):
            given, narrow = self.given.pop(name), self.narrow.pop(name)
            is_shared = given is narrow  # else widening has copied it
            self[name] = given.clone(memory_format=torch.preserve_format) if is_shared else given
        return self[name]


Processed = tuple[HookedTransformerConfig, State]


# --- what there is to call ----------------------------------------------------------------------


def process_weights(
    cfg: HookedTransformerConfig,
    state: State,
    *,
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    fold_value_biases: bool = True,
    refactor_factored_attn_matrices: bool = False,
    dtype: torch.dtype = torch.float32,
    rounded_to: torch.dtype | None = None,
    consume: bool = False,
    progress: Callable[[int], Any] | None = None,
    taken: set[str] | None = None,
) -> Processed:
    """Apply the steps that are asked for, in this order; log-probabilities stay as they are.

    Doing it twice does no more than doing it once.

    dtype: the least precision to compute in.
    rounded_to: the dtype of the results (None: each tensor keeps its own).
    consume: empty `state` on the way, so that it and the results are never in memory together.
    progress: is told how many bytes of `state` have been rewritten, section by section.
    taken: gets the names of the steps that were not left out.
    """
    wanted: list[tuple[bool, type[Step]]] = [
        (fold_ln, FoldLayerNorm),
        (center_writing_weights, CenterWritingWeights),
        (center_unembed, CenterUnembed),
        (fold_value_biases, FoldValueBiases),
        (refactor_factored_attn_matrices, RefactorFactoredAttnMatrices),
    ]
    steps = [step() for flag, step in wanted if flag]
    return rewritten(cfg, state, steps, dtype, rounded_to, consume, progress, taken)


def fold_layer_norm(
    cfg: HookedTransformerConfig, state: State, dtype: torch.dtype = torch.float32
) -> Processed:
    """Move each norm's weight and bias into the matrices that read the norm.

        (n * w + b) W + c  =  n (diag(w) W) + (c + b W)        n: the normalised stream
        and for LayerNorm  =  n (diag(w) W - column means) + …     as the entries of n sum to zero

    `hook_normalized` is n, so it stays as it was. A gated MLP gets `b_gate` and `b_up` when a norm
    has a bias to hand over. Norms behind sublayers (`ln1_post`, `norm_place="post"`), on the stream
    itself (`"stream"`, `"skip"`), inside attention (`q_norm`, `k_norm`) and behind the embedding
    are followed by more than a matrix and keep their weights. The LayerNorm inside a "solu_ln" MLP
    goes into `W_out`; it stays, with weight one and bias zero.
    """
    return rewritten(cfg, state, [FoldLayerNorm()], dtype)


def center_writing_weights(
    cfg: HookedTransformerConfig, state: State, dtype: torch.dtype = torch.float32
) -> Processed:
    """Take the mean over d_model out of everything that is added to the residual stream.

        LN(x + c 1)  =  LN(x)                 so a mean written into the stream is never read
        W  ->  W - W.mean(-1),  b  ->  b - b.mean()         for W_E, W_pos, W_O, b_O, W_out, b_out

    The stream then has mean zero everywhere. Only for models in which every reader is a LayerNorm.
    With `post_embedding_ln` the embedding is the output of a norm, whose mean no weight can remove:
    its bias and everything else are centred.
    """
    return rewritten(cfg, state, [CenterWritingWeights()], dtype)


def center_unembed(
    cfg: HookedTransformerConfig, state: State, dtype: torch.dtype = torch.float32
) -> Processed:
    """Take the mean over the vocabulary out of the logits.

        log_softmax(l - c 1)  =  log_softmax(l)      with c the mean logit, linear in the stream
        W_U  ->  W_U - W_U.mean(-1),  b_U  ->  b_U - b_U.mean()

    Not for capped logits: the cap is not linear.
    """
    return rewritten(cfg, state, [CenterUnembed()], dtype)


def fold_value_biases(
    cfg: HookedTransformerConfig, state: State, dtype: torch.dtype = torch.float32
) -> Processed:
    """Move the value biases into the output bias of attention.

        sum_j p_j (v_j + b_V)  =  sum_j p_j v_j + b_V       since a pattern's row sums to one
        b_O  ->  b_O + sum over heads of b_V W_O,   b_V  ->  0

    Rows of padding look at nothing and are the exception: their output, read by nobody, changes.
    """
    return rewritten(cfg, state, [FoldValueBiases()], dtype)


def refactor_factored_attn_matrices(
    cfg: HookedTransformerConfig, state: State, dtype: torch.dtype = torch.float32
) -> Processed:
    """Give the two low-rank products of each head their singular value decomposition.

        [W_Q; b_Q] [W_K; b_K]^T = U S V^T:   [W_Q; b_Q] -> U sqrt(S),   [W_K; b_K] -> V sqrt(S)
        [W_V; b_V]  W_O         = U S V^T:   [W_V; b_V] -> U S,         W_O -> V^T

    Query heads that share a key and value head are decomposed together: one basis per group. Each
    basis vector's largest entry on the right (V) is positive. ValueError for models that rotate,
    normalise or clip between projection and product, where the factors are not free.
    """
    return rewritten(cfg, state, [RefactorFactoredAttnMatrices()], dtype)


# --- the steps ----------------------------------------------------------------------------------


class Step:
    """One rewriting: whether it has something to do, whether it may, and what changes."""

    name = ""

    def applies(self, cfg: HookedTransformerConfig) -> bool:
        """Whether models like this have anything for the step to do."""
        return True

    def objection(self, cfg: HookedTransformerConfig, state: State) -> str | None:
        """Why the step would change what the model says; None when it would not."""
        return None

    def changes(self, cfg: HookedTransformerConfig, state: State) -> dict[str, Any]:
        """Fields of the config that the new weights need otherwise."""
        return {}

    def rewrite(self, cfg: HookedTransformerConfig, weights: Section) -> None:
        """Replace tensors of one section, given the new config; no tensor is changed itself."""
        raise NotImplementedError


class FoldLayerNorm(Step):
    """`fold_layer_norm`."""

    name = "fold_ln"

    def applies(self, cfg: HookedTransformerConfig) -> bool:
        return cfg.norm_place not in ("post", "stream", "skip")

    def objection(self, cfg: HookedTransformerConfig, state: State) -> str | None:
        if cfg.positional_embedding_type == "shortformer" and has_norm_weights(cfg):
            return (
                "positional_embedding_type='shortformer' adds positions between a norm and the "
                "matrices that read it"
            )
        if not cfg.unembedding and cfg.final_norm and has_norm_weights(cfg):
            return "unembedding=False: no matrix reads the final norm"
        if cfg.d_embed is not None:
            return f"d_embed={cfg.d_embed}: what reads the last norm has no place for its bias"
        if cfg.shared_expert_gate and cfg.normalization_type == "LN":
            return "shared_expert_gate=True: that gate has no place for a norm's bias"
        if cfg.router_on_input and cfg.normalization_type == "LN":
            return "router_on_input=True: a norm's bias is weighed before an expert reads it"
        return None

    def changes(self, cfg: HookedTransformerConfig, state: State) -> dict[str, Any]:
        if not has_norm_weights(cfg):
            return {}
        check_norms_are_there(cfg, state)
        has_bias = any(bool(state[name].any()) for name in state if name.endswith(".ln2.b"))
        return {
            "normalization_type": f"{cfg.normalization_type}Pre",
            "tie_word_embeddings": False,
            "gated_mlp_biases": cfg.gated_mlp_biases or (cfg.gated_mlp and has_bias),
            "router_bias": cfg.router_bias or (cfg.num_experts is not None and has_bias),
        }

    def rewrite(self, cfg: HookedTransformerConfig, weights: Section) -> None:
        if cfg.gated_mlp_biases:
            for name in [name for name in weights if name.endswith(".W_gate")]:
                zeros = torch.zeros_like(weights[name][0])
                mlp = name.removesuffix("W_gate")
                for bias in ("b_gate", "b_up"):
                    weights.setdefault(mlp + bias, zeros)
                weights.setdefault(mlp + "b_out", torch.zeros_like(weights[f"{mlp}W_out"][0]))
        if cfg.router_bias and "mlp.W_router" in weights:
            weights.setdefault("mlp.b_router", torch.zeros_like(weights["mlp.W_router"][0]))
        for norm in ("ln1", "ln2", "ln_final"):
            if f"{norm}.w" in weights:
                self.fold(cfg, weights, norm)
        # behind a gate's norm comes a product, not a matrix
        if "mlp.ln.w" in weights and not cfg.gated_mlp:
            self.fold_inner(weights)

    def fold(self, cfg: HookedTransformerConfig, weights: Section, norm: str) -> None:
        """One norm into all its readers."""
        w, b = weights.pop(f"{norm}.w"), weights.pop(f"{norm}.b", None)  # RMSNorms have no bias
        w = w + cfg.norm_weight_offset
        for matrix, bias in readers(cfg, norm, weights):
            if b is not None and bool(b.any()):  # else a gate may have no bias to add to
                weights[bias] = weights[bias] + b @ weights[matrix]
            fold_into(weights.own(matrix), w, sums_to_zero=b is not None)

    def fold_inner(self, weights: Section) -> None:
        """The norm between activation and `W_out`."""
        w, b = weights["mlp.ln.w"], weights["mlp.ln.b"]
        if bool((w == 1).all()) and not bool(b.any()):  # folded before
            return
        weights["mlp.b_out"] = weights["mlp.b_out"] + b @ weights["mlp.W_out"]
        fold_into(weights.own("mlp.W_out"), w, sums_to_zero=True)
        weights["mlp.ln.w"], weights["mlp.ln.b"] = torch.ones_like(w), torch.zeros_like(b)


class CenterWritingWeights(Step):
    """`center_writing_weights`."""

    name = "center_writing_weights"

    def applies(self, cfg: HookedTransformerConfig) -> bool:
        # where the stream is a norm's output, no weight writes its mean
        held = cfg.norm_place in ("stream", "skip")
        return cfg.normalization_type in ("LN", "LNPre") and not held

    def objection(self, cfg: HookedTransformerConfig, state: State) -> str | None:
        if cfg.d_embed is not None:
            return f"d_embed={cfg.d_embed}: embeddings are not written to the stream directly"
        if cfg.final_rms:
            return "final_rms=True: the last norm is an RMSNorm, which sees the stream's mean"
        if cfg.norm_place == "post":
            return "norm_place='post': attention and MLP read the stream, mean included, directly"
        if not cfg.first_norm:
            return "first_norm=False: the first attention reads the stream, mean included, directly"
        if not cfg.final_norm:
            return "final_norm=False: the stream's mean is read by what follows it"
        if cfg.norm_place == "both":
            return "norm_place='both': what is added is a norm's output; its mean is not a weight's"
        return None

    def changes(self, cfg: HookedTransformerConfig, state: State) -> dict[str, Any]:
        return {} if cfg.post_embedding_ln else {"tie_word_embeddings": False}

    def rewrite(self, cfg: HookedTransformerConfig, weights: Section) -> None:
        after = "ln_embed.b" if cfg.post_embedding_ln_last else "embed.ln.b"
        embedding = after if cfg.post_embedding_ln else "embed.W_E"
        writers = [embedding, "attn.W_O", "attn.b_O"]
        writers += [name for name in weights if name.endswith((".W_out", ".b_out"))]
        if cfg.positional_embedding_type != "shortformer":  # there, added behind a norm
            writers.append("pos_embed.W_pos")
        writers.append("token_type_embed.W_token_type")
        for name in writers:
            if name in weights:
                centre(weights.own(name))


class CenterUnembed(Step):
    """`center_unembed`."""

    name = "center_unembed"

    def applies(self, cfg: HookedTransformerConfig) -> bool:
        return cfg.unembedding

    def objection(self, cfg: HookedTransformerConfig, state: State) -> str | None:
        cap = cfg.output_logits_soft_cap
        return f"output_logits_soft_cap={cap}: the cap bends the shift" if cap > 0 else None

    def changes(self, cfg: HookedTransformerConfig, state: State) -> dict[str, Any]:
        return {"tie_word_embeddings": False}

    def rewrite(self, cfg: HookedTransformerConfig, weights: Section) -> None:
        for name in ("unembed.W_U", "unembed.b_U"):
            if name in weights:
                centre(weights.own(name))


class FoldValueBiases(Step):
    """`fold_value_biases`."""

    name = "fold_value_biases"

    def applies(self, cfg: HookedTransformerConfig) -> bool:
        return cfg.latent_kv_rank is None  # there, values have no biases

    def objection(self, cfg: HookedTransformerConfig, state: State) -> str | None:
        # a norm's bias is about to become one of values'
        biases = [name for name in state if name.endswith(("b_V", ".ln1.b"))]
        if not any(bool(state[name].any()) for name in biases):
            return None
        if cfg.use_attention_sinks:
            return "use_attention_sinks=True: the rows of a pattern sum to less than one"
        if cfg.clip_qkv is not None:
            return f"clip_qkv={cfg.clip_qkv}: values are clipped after their bias is added"
        return None

    def rewrite(self, cfg: HookedTransformerConfig, weights: Section) -> None:
        if "attn.W_O" not in weights:
            return
        b_V = key_value_name(cfg, "b_V")
        per_query_head = weights[b_V].repeat_interleave(group_size(cfg), dim=0)
        # W_O's rows have mean zero if the stream is centred, so b_O keeps its mean of zero
        moved = per_query_head.flatten() @ weights["attn.W_O"].flatten(0, 1)
        weights["attn.b_O"] = weights["attn.b_O"] + moved
        weights[b_V] = torch.zeros_like(weights[b_V])


class RefactorFactoredAttnMatrices(Step):
    """`refactor_factored_attn_matrices`."""

    name = "refactor_factored_attn_matrices"

    def applies(self, cfg: HookedTransformerConfig) -> bool:
        obstacles = {
            "positional_embedding_type='rotary'": cfg.positional_embedding_type == "rotary",
            "use_qk_norm=True": cfg.use_qk_norm,
            f"clip_qkv={cfg.clip_qkv}": cfg.clip_qkv is not None,
        }
        if found := [name for name, is_there in obstacles.items() if is_there]:
            raise ValueError(
                f"{self.name} needs queries and keys that are multiplied as they are projected; "
                f"this model has {' and '.join(found)}"
            )
        return True

    def rewrite(self, cfg: HookedTransformerConfig, weights: Section) -> None:
        if "attn.W_O" in weights:
            self.refactor_qk(cfg, weights)
            self.refactor_ov(cfg, weights)

    def refactor_qk(self, cfg: HookedTransformerConfig, weights: State) -> None:
        """Half of the singular values to queries, half to keys."""
        queries = with_bias_row(weights["attn.W_Q"], weights["attn.b_Q"])
        W_K, b_K = key_value_name(cfg, "W_K"), key_value_name(cfg, "b_K")
        keys = with_bias_row(weights[W_K], weights[b_K])
        left, values, right = svd_of_product(grouped(queries, len(keys)), keys)
        root = values.sqrt()[:, None]
        queries = (left * root).reshape(queries.shape)
        weights["attn.W_Q"], weights["attn.b_Q"] = without_bias_row(queries)
        weights[W_K], weights[b_K] = without_bias_row(right * root)

    def refactor_ov(self, cfg: HookedTransformerConfig, weights: State) -> None:
        """All of the singular values to values: the rows of `W_O` are orthonormal."""
        W_V, b_V = key_value_name(cfg, "W_V"), key_value_name(cfg, "b_V")
        values = with_bias_row(weights[W_V], weights[b_V])
        outputs = weights["attn.W_O"].transpose(1, 2)
        left, singular, right = svd_of_product(values, grouped(outputs, len(values)))
        weights[W_V], weights[b_V] = without_bias_row(left * singular[:, None])
        weights["attn.W_O"] = right.reshape(outputs.shape).transpose(1, 2).contiguous()


# --- running them -------------------------------------------------------------------------------


@torch.no_grad()
def rewritten(
    cfg: HookedTransformerConfig,
    state: State,
    steps: Iterable[Step],
    dtype: torch.dtype,
    rounded_to: torch.dtype | None = None,
    consume: bool = False,
    progress: Callable[[int], Any] | None = None,
    taken: set[str] | None = None,
) -> Processed:
    """Run the steps that apply on one section after the other.

    rounded_to: the dtype of all results; None: each keeps its own. consume: empty `state`, so that
        a tensor's memory can go once it has been rewritten.
    """
    cfg, own = copy.deepcopy(cfg), with_unembedding(cfg, state)
    had_its_head = "unembed.W_U" in state
    accepted = []
    for step in steps:
        if not step.applies(cfg):
            continue
        if reason := step.objection(cfg, own):
            warnings.warn(f"{step.name} is left out. {reason}", stacklevel=4)  # of no_grad is one
            continue
        accepted.append(step)
        for field, value in step.changes(cfg, own).items():
            setattr(cfg, field, value)
    if taken is not None:
        taken.update(step.name for step in accepted)
    parts = sections(own)
    if consume:
        state.clear()
    del own
    new: State = {}
    while parts:
        prefix, weights = parts.pop(0)
        n_bytes = sum(tensor.nbytes for tensor in weights.values())
        weights = rewritten_section(cfg, weights, accepted, dtype, rounded_to)
        new.update({prefix + name: tensor for name, tensor in weights.items()})
        if progress is not None:
            progress(n_bytes)
    if cfg.tie_word_embeddings and not had_its_head:  # and no step has parted them
        new.pop("unembed.W_U", None)
    return cfg, new


def rewritten_section(
    cfg: HookedTransformerConfig,
    narrow: State,
    steps: Iterable[Step],
    dtype: torch.dtype,
    rounded_to: torch.dtype | None,
) -> State:
    """All steps on one section: widened before, rounded to the dtypes it had after. Empties
    `narrow` on the way."""
    # made before anything wide, so that what is wide does not leave holes between what stays
    places = {
        name: torch.empty_like(tensor, dtype=rounded_to)
        for name, tensor in narrow.items()
        if rounded_to not in (None, tensor.dtype)
    }
    dtypes = {name: rounded_to or tensor.dtype for name, tensor in narrow.items()}
    wide = Section(narrow, dtype)
    for step in steps:
        step.rewrite(cfg, wide)
    new: State = {}
    for name in list(wide):
        tensor = wide.pop(name)
        if tensor is wide.given.pop(name, None):  # unchanged
            tensor = narrow.pop(name)
        wanted = dtypes[name if name in dtypes else matrix_of(name)]
        new[name] = places[name].copy_(tensor) if name in places else tensor.to(wanted)
    return new


def matrix_of(bias: str) -> str:
    """The matrix a new bias belongs to: folding a norm's bias makes some."""
    return bias.replace("b_up", "W_in").replace("b_", "W_")


def widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """At least `dtype`; masks that old checkpoints carry along stay what they are."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, dtype))


def sections(state: State) -> list[tuple[str, State]]:
    """The parts no step looks across, each with the prefix its names have lost. The embeddings come
    first: they are the largest, and the rest is not there yet."""
    parts: dict[tuple[str, str], State] = {}
    for name, tensor in state.items():
        first, *rest = name.split(".")
        prefix = f"blocks.{rest[0]}." if first == "blocks" else ""
        place = "unembedding" if first in ("ln_final", "unembed") else ""
        if first == "blocks":
            place = rest[1].removesuffix("_post").replace("ln1", "attn").replace("ln2", "mlp")
        parts.setdefault((prefix, place), {})[name.removeprefix(prefix)] = tensor
    ordered = sorted(parts.items(), key=lambda part: part[0][0] != "")
    return [(prefix, weights) for (prefix, _), weights in ordered]


def with_unembedding(cfg: HookedTransformerConfig, state: State) -> State:
    """A copy of the dict in which tied models, too, have `W_U`."""
    if cfg.tie_word_embeddings and "unembed.W_U" not in state:
        return {**state, "unembed.W_U": state["embed.W_E"].T}
    return dict(state)


# --- small things -------------------------------------------------------------------------------


def has_norm_weights(cfg: HookedTransformerConfig) -> bool:
    """Whether the norms before the sublayers have weights to fold."""
    return cfg.normalization_type in ("LN", "RMS")


def check_norms_are_there(cfg: HookedTransformerConfig, state: State) -> None:
    """ValueError when the config has norms that the weights lack: they were folded before."""
    first = 0 if cfg.first_norm else 1
    names = [f"blocks.{layer}.ln1.w" for layer in range(first, cfg.n_layers)]
    names += ["ln_final.w"] if cfg.final_norm else []
    if missing := [name for name in names if name not in state]:
        raise ValueError(
            f"normalization_type={cfg.normalization_type!r} but the weights have no {missing[0]}. "
            f"If they were folded before, their config has '{cfg.normalization_type}Pre'"
        )


def readers(cfg: HookedTransformerConfig, norm: str, weights: State) -> list[tuple[str, str]]:
    """(matrix, bias) of every projection that reads a norm."""
    if norm == "ln_final" and cfg.unembed_act_fn is not None:
        return [("unembed.transform.W_dense", "unembed.transform.b_dense")]
    if norm == "ln_final":
        return [("unembed.W_U", "unembed.b_U")]
    if norm == "ln1" and cfg.latent_kv_rank is not None:
        of_queries = [] if cfg.latent_q_rank is None else [("attn.W_Q_down", "attn.b_Q_down")]
        readers_of_keys = [(f"attn.W_{x}", f"attn.b_{x}") for x in ("KV_down", "K_rotary")]
        return [*(of_queries or [("attn.W_Q", "attn.b_Q")]), *readers_of_keys]
    if norm == "ln1":
        keys_and_values = [
            (key_value_name(cfg, f"W_{x}"), key_value_name(cfg, f"b_{x}")) for x in "KV"
        ]
        return [("attn.W_Q", "attn.b_Q"), *keys_and_values]
    routers = [(f"mlp.W_{x}", f"mlp.b_{x}") for x in ("router", "shared_gate")]
    routers = [pair for pair in routers if pair[0] in weights]
    # of one MLP, of experts, or of the shared one
    mlps = [name.removesuffix("W_in") for name in weights if name.endswith(".W_in")]
    if not cfg.gated_mlp:
        return [(f"{mlp}W_in", f"{mlp}b_in") for mlp in mlps]
    # b_in comes after the product of the two branches
    gates = [(f"{mlp}W_gate", f"{mlp}b_gate") for mlp in mlps]
    return [*routers, *gates, *((f"{mlp}W_in", f"{mlp}b_up") for mlp in mlps)]


def key_value_name(cfg: HookedTransformerConfig, name: str) -> str:
    """The full name: "attn.W_K", or "attn._W_K" where several query heads may share it."""
    return f"attn.{name}" if cfg.n_key_value_heads is None else f"attn._{name}"


def group_size(cfg: HookedTransformerConfig) -> int:
    """Query heads per key and value head."""
    return cfg.n_heads // (cfg.n_key_value_heads or cfg.n_heads)


def fold_into(
    matrix: Float[Tensor, "*head d_in d_out"], w: Float[Tensor, " d_in"], sums_to_zero: bool
) -> None:
    """diag(w) W, in place; what only the mean of its input would read is left out when that mean
    is zero."""
    matrix.mul_(w[:, None])
    if sums_to_zero:
        matrix.sub_(matrix.mean(-2, keepdim=True))


def centre(x: Float[Tensor, "*rows width"]) -> None:
    """Take the mean out of each row, in place."""
    x.sub_(x.mean(-1, keepdim=True))


def with_bias_row(
    weight: Float[Tensor, "head d_model d_head"], bias: Float[Tensor, "head d_head"]
) -> Float[Tensor, "head rows d_head"]:
    """The projection of [x, 1]."""
    return torch.cat((weight, bias[:, None]), 1)


def without_bias_row(
    weight: Float[Tensor, "head rows d_head"],
) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "head d_head"]]:
    """Weight and bias again, the weight as the projections want it stored."""
    return matmul_ready(weight[:, :-1]), weight[:, -1].clone()


def grouped(
    per_head: Float[Tensor, "head rows d_head"], n_groups: int
) -> Float[Tensor, "group group_rows d_head"]:
    """The heads of a group, one below the other."""
    return per_head.reshape(n_groups, -1, per_head.shape[-1])


def svd_of_product(
    left: Float[Tensor, "group rows d_head"], right: Float[Tensor, "group columns d_head"]
) -> tuple[
    Float[Tensor, "group rows d_head"],
    Float[Tensor, "group d_head"],
    Float[Tensor, "group columns d_head"],
]:
    """U, S, V with left right^T = U diag(S) V^T, without forming the product.

    QR of both leaves a d_head by d_head matrix to decompose. V's largest entries are positive.
    """
    (q_left, r_left), (q_right, r_right) = torch.linalg.qr(left), torch.linalg.qr(right)
    u, s, vh = torch.linalg.svd(r_left @ r_right.transpose(1, 2), full_matrices=False)
    u, v = q_left @ u, q_right @ vh.transpose(1, 2)
    largest = v.gather(1, v.abs().argmax(1, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).to(v.dtype)
    room = left.shape[-1] - s.shape[-1]  # when d_head is more than d_model can fill
    return F.pad(u * sign, (0, room)), F.pad(s, (0, room)), F.pad(v * sign, (0, room))
