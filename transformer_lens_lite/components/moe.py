"""Mixtures of experts (arXiv 1701.06538): a router sends each token through a few of many MLPs."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_lens_lite.components.activations import build_activation
from transformer_lens_lite.components.mlp import MLP, GatedMLP
from transformer_lens_lite.components.norm import widened
from transformer_lens_lite.components.storage import transposed
from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.hooks import Absent, Component, ComponentList, HookPoint
from transformer_lens_lite.specs import MoESpec, RouterSpec

Scores = Float[Tensor, "batch pos expert"]
Chosen = Int[Tensor, "batch pos top_k"]
Weights = Float[Tensor, "batch pos top_k"]


class MixtureOfExperts(Component):
    """Router, experts and, in some models, an expert that every token passes.

    Parameters: `W_router` [d_model, expert], `b_router` [expert] and `selection_bias` [expert]
    where the spec has them; `experts.{e}.…`; `shared.…` and `W_shared_gate` [d_model, 1].

    `hook_expert_weights` [batch, pos, expert] are the router's scores in fp32, of all experts;
    `hook_expert_indices` [batch, pos, top_k] the experts that are chosen. What each chosen expert's
    output is multiplied by is worked out from the two, so an edit of either takes effect.
    """

    b_router: nn.Parameter | None
    selection_bias: nn.Parameter | None

    def __init__(self, cfg: HookedTransformerConfig, spec: MoESpec) -> None:
        super().__init__()
        self.cfg = cfg
        self.spec = spec
        router = spec.router
        self.W_router = transposed(spec.d_model, router.n_experts)
        zeros = torch.zeros(router.n_experts)
        self.b_router = nn.Parameter(zeros.clone()) if router.bias else None
        self.selection_bias = nn.Parameter(zeros, False) if router.selection_bias else None
        self.router = ROUTERS[router.kind](router)
        self.hook_expert_weights = HookPoint()
        self.hook_expert_indices = HookPoint()
        self.experts = ComponentList(Expert(spec) for _ in range(router.n_experts))
        self.shared: MLP | Absent = Absent()
        if spec.shared is not None:
            self.shared = GatedMLP(cfg, spec.shared)
            if spec.shared_gate:
                self.W_shared_gate = transposed(spec.d_model, 1)

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What the chosen experts add to the stream, each as much as the router says."""
        logits = widened(F.linear(x, self.W_router.T, self.b_router))
        scores = self.hook_expert_weights(self.router.scores(logits))
        chosen = self.hook_expert_indices(self.router.choose(scores, self.selection_bias))
        weights = self.router.weights(scores, chosen)
        out = self.routed(x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1)).view_as(x)
        return out if self.spec.shared is None else out + self.shared_out(x)

    def routed(
        self,
        x: Float[Tensor, "token d_model"],
        chosen: Int[Tensor, "token top_k"],
        weights: Float[Tensor, "token top_k"],
    ) -> Float[Tensor, "token d_model"]:
        """The weighted sum over each token's experts. Every expert runs once, on all its tokens,
        and not at all when it has none."""
        # sorted by expert, the (token, choice) pairs of one expert are neighbours
        expert_of = chosen.flatten()
        order = expert_of.argsort(stable=True)
        # not bincount: a compiled graph knows how long this is
        none = expert_of.new_zeros(len(self.experts))
        counts = none.scatter_add(0, expert_of, torch.ones_like(expert_of)).tolist()
        rows = order // chosen.shape[1]
        weight = weights.flatten()[order, None].to(x.dtype)
        inputs = x[rows] * weight if self.spec.router.on_input else x[rows]
        parts = zip(self.experts, inputs.split(counts), counts, strict=True)
        # in a compiled graph, which does not know how many, those with none run as well
        always = torch.compiler.is_compiling()
        outputs = [expert(part) for expert, part, n_tokens in parts if always or n_tokens]
        out = torch.cat(outputs) if outputs else inputs  # joined anew, even of one
        if not self.spec.router.on_input:
            out.mul_(weight)  # in place: it is nobody else's
        return torch.zeros_like(x).index_add_(0, rows, out)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.take_classic_names(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def take_classic_names(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Rename, in place, what has the names and layouts of HookedTransformer's mixtures: linear
        layers."""
        linear = {"W_gate": "W_router"}
        for expert in range(len(self.experts)):
            names = (f"experts.{expert}.{name}" for name in ("W_gate", "W_in", "W_out"))
            linear.update((name, name) for name in names)
        for classic, name in linear.items():
            if (weight := state_dict.pop(f"{prefix}{classic}.weight", None)) is not None:
                state_dict[prefix + name] = weight.T

    def shared_out(
        self, x: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The expert of every token, as much as its own gate lets through."""
        out = self.shared(x)
        return out * F.linear(x, self.W_shared_gate.T).sigmoid() if self.spec.shared_gate else out


class Expert(Component):
    """A gated MLP for some of the tokens: `W_gate`, `W_in` [d_model, d_mlp], `W_out` [d_mlp,
    d_model], and biases `b_gate`, `b_up`, `b_out` where the spec has them.

    Its hook points see only its own tokens, [token, d_mlp]: batch and position are one axis, in
    order. They are called only when the expert has any.
    """

    b_gate: nn.Parameter | None
    b_up: nn.Parameter | None
    b_out: nn.Parameter | None

    def __init__(self, spec: MoESpec) -> None:
        super().__init__()
        self.spec = spec
        self.W_gate = transposed(spec.d_model, spec.d_mlp)
        self.W_in = transposed(spec.d_model, spec.d_mlp)
        self.W_out = transposed(spec.d_mlp, spec.d_model)
        for name, width in (("b_gate", spec.d_mlp), ("b_up", spec.d_mlp), ("b_out", spec.d_model)):
            bias = nn.Parameter(torch.zeros(width)) if spec.gated_biases else None
            self.register_parameter(name, bias)
        self.act_fn = build_activation(spec.act_fn)
        self.hook_gate = HookPoint(optional=True, pos_axis=None)  # [token, d_mlp]
        self.hook_pre = HookPoint(optional=True, pos_axis=None)  # [token, d_mlp]
        self.hook_post = HookPoint(optional=True, pos_axis=None)  # [token, d_mlp]

    def forward(self, x: Float[Tensor, "token d_model"]) -> Float[Tensor, "token d_model"]:
        """What the expert has to say about these tokens."""
        gate = self.hook_gate(F.linear(x, self.W_gate.T, self.b_gate))
        pre = self.hook_pre(F.linear(x, self.W_in.T, self.b_up))
        limit, offset, slope = self.spec.limit, self.spec.offset, self.spec.gate_slope
        if limit is not None:
            gate, pre = gate.clamp(max=limit), pre.clamp(-limit, limit)
        gate = self.act_fn(gate) if slope == 1.0 else self.act_fn(gate * slope) / slope
        post = self.hook_post(gate * (pre if offset == 0.0 else pre + offset))
        return F.linear(post, self.W_out.T, self.b_out)


# --- the kinds of router ------------------------------------------------------------------------


class SoftmaxRouter:
    """Scores are probabilities; the most probable experts are chosen."""

    def __init__(self, spec: RouterSpec) -> None:
        self.spec = spec

    def scores(self, logits: Scores) -> Scores:
        """From logits, fp32 at least."""
        return logits.softmax(-1)

    def choose(self, scores: Scores, bias: Float[Tensor, " expert"] | None) -> Chosen:
        """The experts of each token, the best first. `bias` counts here only."""
        if bias is not None:
            scores = scores + bias
        if self.spec.n_groups > 1:
            scores = scores.masked_fill(~self.in_best_groups(scores), self.beyond)
        return scores.topk(self.spec.top_k).indices

    beyond = 0.0  # what experts outside the best groups count as

    def in_best_groups(self, scores: Scores) -> Tensor:
        """True for experts in the groups whose best members score highest."""
        spec = self.spec
        groups = scores.unflatten(-1, (spec.n_groups, -1))
        best = groups.topk(spec.group_members).values.sum(-1).topk(spec.top_groups).indices
        kept = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=scores.device)
        kept.scatter_(-1, best, True)
        return kept[..., None].expand_as(groups).flatten(-2)

    def weights(self, scores: Scores, chosen: Chosen) -> Weights:
        """What the outputs of the chosen experts are multiplied by."""
        weights = scores.gather(-1, chosen)
        if self.spec.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + self.least)
        return weights * self.spec.scale

    least = 0.0  # added to the sum that weights are divided by


class SigmoidRouter(SoftmaxRouter):
    """Every expert is scored by itself (DeepSeek-V3, arXiv 2412.19437; Llama 4)."""

    beyond = -torch.inf  # with a bias, scores may be negative
    least = 1e-20

    def scores(self, logits: Scores) -> Scores:
        return logits.sigmoid()


class SparseMixer(SoftmaxRouter):
    """The two best experts, each weighed against those within `jitter` of it (arXiv 2409.12136).

    Scores are the logits.
    """

    def scores(self, logits: Scores) -> Scores:
        return logits

    def weights(self, scores: Scores, chosen: Chosen) -> Weights:
        first, rest = chosen[..., :1], scores.scatter(-1, chosen[..., :1], -torch.inf)
        return torch.cat(
            (
                self.weighed(scores, scores, first),
                self.weighed(scores, rest, chosen[..., 1:]),
            ),
            -1,
        )

    def weighed(self, scores: Scores, left: Scores, expert: Chosen) -> Weights:
        """The probability of an expert among those of `left` that come close to the best."""
        best = left.amax(-1, keepdim=True)
        scale = torch.maximum(scores.abs(), best)
        far = (best - scores) / scale > 2 * self.spec.jitter
        return left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, expert)


ROUTERS = {"softmax": SoftmaxRouter, "sigmoid": SigmoidRouter, "sparsemixer": SparseMixer}
