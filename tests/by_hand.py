"""A transformer written out by its formulas: one row and one head at a time, no cache, in fp64.

Slow and plain on purpose: it shares nothing with the library but the names of weights and fields,
and the frequencies of scaled rotations (which are held against Hugging Face's).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from transformer_lens_lite import HookedTransformer, HookedTransformerConfig


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def solu(x: Tensor) -> Tensor:
    return x * x.exp() / x.exp().sum(-1, keepdim=True)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: (x * (x > 0)) ** 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "solu": solu,
    "solu_ln": solu,
}
SLOPES = {  # ALiBi, as its authors list them
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
}


class ByHand:
    """The formulas over one model's weights."""

    def __init__(self, model: HookedTransformer) -> None:
        self.cfg: HookedTransformerConfig = model.cfg
        self.model = model
        self.weights = {name: tensor.double() for name, tensor in model.state_dict().items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name]

    @torch.no_grad()
    def logits(self, row: Tensor, types: Tensor | None = None) -> Tensor:
        """[pos, d_vocab_out] for ids [pos]."""
        cfg = self.cfg
        x = self["embed.W_E"][row] * cfg.embed_scale
        if cfg.d_embed is not None:
            x = x @ self["embed.widen.W_project"]
        if cfg.post_embedding_ln and not cfg.post_embedding_ln_last:
            x = self.norm(x, "embed.ln", "LN")
        if cfg.n_token_types:
            kinds = torch.zeros_like(row) if types is None else types
            x = x + self["token_type_embed.W_token_type"][kinds]
        if cfg.positional_embedding_type == "standard":
            x = x + self["pos_embed.W_pos"][: len(row)]
        if cfg.post_embedding_ln_last:
            x = self.norm(x, "ln_embed", "LN")
        for layer in range(cfg.n_layers):
            if cfg.norm_place == "skip":
                x = self.norm(x, f"blocks.{layer}.ln1", cfg.normalization_type)
            attn_out = self.sublayer(x, layer, "ln1", self.attention)
            if cfg.norm_place == "stream":
                x = self.norm(x + attn_out, f"blocks.{layer}.ln1", cfg.normalization_type)
                if not cfg.attn_only:
                    x = x + self.sublayer(x, layer, "ln2", self.mlp)
                    x = self.norm(x, f"blocks.{layer}.ln2", cfg.normalization_type)
            elif cfg.attn_only:
                x = x + attn_out
            elif cfg.parallel_attn_mlp:
                x = x + attn_out + self.sublayer(x, layer, "ln2", self.mlp)
            else:
                x = x + attn_out
                if cfg.norm_place == "skip":
                    x = self.norm(x, f"blocks.{layer}.ln2", cfg.normalization_type)
                x = x + self.sublayer(x, layer, "ln2", self.mlp)
        kind = cfg.normalization_type
        if cfg.final_rms:
            kind = kind.replace("LN", "RMS")
        if cfg.final_norm:
            x = self.norm(x, "ln_final", kind)
        if not cfg.unembedding:
            return x
        if cfg.unembed_act_fn is not None:
            dense = x @ self["unembed.transform.W_dense"] + self["unembed.transform.b_dense"]
            dense = ACTIVATIONS[cfg.unembed_act_fn](dense)
            x = self.norm(dense, "unembed.transform.ln", "LN")
        if cfg.d_embed is not None:
            x = x @ self["unembed.transform.W_project"]
        out = (x @ self["unembed.W_U"] + self["unembed.b_U"]) * cfg.logit_scale
        cap = cfg.output_logits_soft_cap
        return cap * torch.tanh(out / cap) if cap > 0 else out

    def sublayer(self, x: Tensor, layer: int, norm: str, function: Callable) -> Tensor:
        place, name = self.cfg.norm_place, f"blocks.{layer}.{norm}"
        kind = self.cfg.normalization_type
        if place == "post":
            out = self.norm(function(x, layer), name, kind)
        elif place in ("stream", "skip"):
            out = function(x, layer)
        else:
            bare = norm == "ln1" and layer == 0 and not self.cfg.first_norm
            out = function(x if bare else self.norm(x, name, kind), layer)
        if place == "both":
            out = self.norm(out, f"{name}_post", kind.removesuffix("Pre"))
        return out * self.cfg.residual_scale

    def norm(self, x: Tensor, name: str, kind: str | None, head: int | None = None) -> Tensor:
        if kind is None:
            return x
        if kind.startswith("LN"):
            x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.cfg.eps)
        if kind.endswith("Pre"):
            return x
        offset = 0.0 if name.endswith("mlp.ln") else self.cfg.norm_weight_offset
        w, b = self[f"{name}.w"], self.weights.get(f"{name}.b", torch.zeros(()))
        if head is not None and w.ndim == 2:
            w, b = w[head], b[head] if b.ndim else b
        return x * (w + offset) + b

    # -- attention --

    def attention(self, x: Tensor, layer: int) -> Tensor:
        cfg, name = self.cfg, f"blocks.{layer}.attn"
        kv_heads = cfg.n_key_value_heads or cfg.n_heads
        prefix = "_" if cfg.n_key_value_heads else ""
        if cfg.latent_kv_rank is not None:
            return self.latent_attention(x, layer)
        qk_input = x
        if cfg.positional_embedding_type == "shortformer":
            qk_input = x + self["pos_embed.W_pos"][: len(x)]
        q = [qk_input @ self[f"{name}.W_Q"][h] + self[f"{name}.b_Q"][h] for h in range(cfg.n_heads)]
        w_k, b_k = self[f"{name}.{prefix}W_K"], self[f"{name}.{prefix}b_K"]
        w_v, b_v = self[f"{name}.{prefix}W_V"], self[f"{name}.{prefix}b_V"]
        k = [qk_input @ w_k[h] + b_k[h] for h in range(kv_heads)]
        v = [x @ w_v[h] + b_v[h] for h in range(kv_heads)]
        if cfg.use_qk_norm and not cfg.qk_norm_after_rotary:
            q, k = self.qk_norm(q, f"{name}.q_norm"), self.qk_norm(k, f"{name}.k_norm")
        if cfg.clip_qkv is not None:
            q, k, v = ([t.clamp(-cfg.clip_qkv, cfg.clip_qkv) for t in part] for part in (q, k, v))
        out = self[f"{name}.b_O"].repeat(len(x), 1)
        if cfg.positional_embedding_type == "rotary":
            q, k = [self.turned(x, layer) for x in q], [self.turned(x, layer) for x in k]
        turns = self.model.blocks[layer].attn.spec.rotary is not None
        if cfg.use_qk_norm and cfg.qk_norm_after_rotary and turns:
            q, k = self.qk_norm(q, f"{name}.q_norm"), self.qk_norm(k, f"{name}.k_norm")
        growth = cfg.query_growth
        if growth and not (growth.get("unrotated_only") and turns):
            steps = (torch.arange(len(x)) + growth.get("start", 0)) // growth["length"]
            q = [one * (1 + growth["scale"] * torch.log(1 + steps.double()))[:, None] for one in q]
        for head in range(cfg.n_heads):
            shared = head * kv_heads // cfg.n_heads
            pattern = self.pattern(q[head], k[shared], layer, head)
            out = out + pattern @ v[shared] @ self[f"{name}.W_O"][head]
        return out

    def latent_attention(self, x: Tensor, layer: int) -> Tensor:
        cfg, name = self.cfg, f"blocks.{layer}.attn"

        def latent(which: str, norm: str) -> Tensor:
            down = x @ self[f"{name}.W_{which}_down"] + self[f"{name}.b_{which}_down"]
            down = down / torch.sqrt((down * down).mean(-1, keepdim=True) + cfg.latent_eps)
            return down * self[f"{name}.{norm}.w"]

        of_keys = latent("KV", "kv_latent_norm")
        of_queries = x if cfg.latent_q_rank is None else latent("Q", "q_latent_norm")
        shared = x @ self[f"{name}.W_K_rotary"] + self[f"{name}.b_K_rotary"]
        still = cfg.d_head - cfg.rotary_dim
        out = self[f"{name}.b_O"].repeat(len(x), 1)
        for head in range(cfg.n_heads):
            q = of_queries @ self[f"{name}.W_Q"][head]
            if cfg.latent_q_rank is None:
                q = q + self[f"{name}.b_Q"][head]
            k = of_keys @ self[f"{name}.W_K"][head]
            q = torch.cat((q[:, :still], self.turned(q[:, still:], layer)), -1)
            k = torch.cat((k, self.turned(shared, layer)), -1)
            v = of_keys @ self[f"{name}.W_V"][head]
            out = out + self.pattern(q, k, layer, head) @ v @ self[f"{name}.W_O"][head]
        return out

    def qk_norm(self, heads: list[Tensor], name: str) -> list[Tensor]:
        kind = self.cfg.qk_norm_type
        if self.cfg.qk_norm_over != "all_heads":
            return [self.norm(head, name, kind, i) for i, head in enumerate(heads)]
        together = self.norm(torch.cat(heads, -1), name, "RMS")
        return list(together.split(self.cfg.d_head, -1))

    def pattern(self, q: Tensor, k: Tensor, layer: int, head: int) -> Tensor:
        cfg = self.cfg
        slopes = cfg.alibi_slopes or SLOPES.get(cfg.n_heads)
        scale = 1.0
        if cfg.use_attn_scale:
            scale = math.sqrt(cfg.d_head) if cfg.attn_scale == -1 else cfg.attn_scale
        if cfg.scale_attn_by_inverse_layer_idx:
            scale *= layer + 1
        local = cfg.use_local_attn and cfg.attn_types[layer] == "local"
        n = len(q)
        weights = torch.zeros(n, n, dtype=torch.float64)
        for i in range(n):
            total = torch.zeros((), dtype=torch.float64)
            if cfg.use_attention_sinks:
                total = total + self[f"blocks.{layer}.attn.sinks"][head].exp()
            for j in range(n):
                if cfg.attention_dir == "causal" and j > i:
                    continue
                if local and not cfg.chunked_attention and abs(i - j) >= cfg.window_size:
                    continue
                if local and cfg.chunked_attention and i // cfg.window_size != j // cfg.window_size:
                    continue
                score = q[i] @ k[j] / scale
                if cfg.attn_scores_soft_cap > 0:
                    score = cfg.attn_scores_soft_cap * torch.tanh(score / cfg.attn_scores_soft_cap)
                if cfg.positional_embedding_type == "alibi":
                    penalty = slopes[head] * (i - j)
                    if cfg.alibi_in_bfloat16:
                        rounded = torch.tensor(slopes[head]).bfloat16() * j
                        penalty = slopes[head] * i - float(rounded)
                    score = score - penalty / (scale if cfg.alibi_scaled else 1)
                weights[i, j] = score.exp()
            weights[i] /= total + weights[i].sum()
        return weights

    def turned(self, x: Tensor, layer: int) -> Tensor:
        """Channel pairs as complex numbers, times e^(i · position · frequency)."""
        spec = self.model.blocks[layer].attn.spec.rotary
        if spec is None:
            return x
        length = torch.tensor([len(x)])
        frequencies = spec.scaling.inverse_frequencies(spec.base, spec.dim, length).view(-1)
        angles = torch.arange(len(x))[:, None] * frequencies.double()
        factor = spec.scaling.attention_factor
        if (long := getattr(spec.scaling, "long_attention_factor", None)) is not None:
            is_long = len(x) > spec.scaling.original_max_position_embeddings
            factor = long if is_long else factor
        turn = torch.polar(torch.full_like(angles, factor), angles)
        rotated, rest = x[:, : spec.dim], x[:, spec.dim :]
        if self.cfg.rotary_adjacent_pairs:
            first, second = rotated[:, 0::2], rotated[:, 1::2]
        else:
            first, second = rotated.chunk(2, -1)
        result = torch.complex(first, second) * turn
        if self.cfg.rotary_adjacent_pairs:
            parts = torch.stack((result.real, result.imag), -1).flatten(1)
        else:
            parts = torch.cat((result.real, result.imag), -1)
        return torch.cat((parts, rest), -1)

    # -- the MLP --

    def mlp(self, x: Tensor, layer: int) -> Tensor:
        has_experts = self.cfg.num_experts and (self.cfg.expert_layers or [True] * 9)[layer]
        name = f"blocks.{layer}.mlp"
        return self.mixture(x, name) if has_experts else self.one_mlp(x, name)

    def mixture(self, x: Tensor, name: str) -> Tensor:
        """Every expert on every token; what is not chosen counts nothing."""
        cfg, out = self.cfg, []
        for token in x:
            logits = token @ self[f"{name}.W_router"]
            if cfg.router_bias:
                logits = logits + self[f"{name}.b_router"]
            weights = self.expert_weights(logits, name)
            total = torch.zeros_like(token)
            for e, weight in weights.items():
                given = token * weight if cfg.router_on_input else token
                said = self.expert(given, f"{name}.experts.{e}")
                total = total + (said if cfg.router_on_input else said * weight)
            if cfg.d_shared_expert:
                shared = self.one_mlp(token[None], f"{name}.shared")[0]
                if cfg.shared_expert_gate:
                    shared = shared / (1 + torch.exp(-token @ self[f"{name}.W_shared_gate"]))
                total = total + shared
            out.append(total)
        return torch.stack(out)

    def expert_weights(self, logits: Tensor, name: str) -> dict[int, Tensor]:
        cfg = self.cfg
        if cfg.router_type == "sparsemixer":
            first = int(logits.argmax())
            rest = logits.clone()
            rest[first] = -math.inf
            second = int(rest.argmax())
            result = {}
            for expert, left in ((first, logits), (second, rest)):
                best = left.max()
                scale = torch.maximum(logits.abs(), best)
                near = [
                    e
                    for e in range(len(logits))
                    if left[e] > -math.inf
                    and (best - logits[e]) / scale[e] <= 2 * cfg.router_jitter
                ]
                result[expert] = left[expert].exp() / sum(left[e].exp() for e in near)
            return result
        if cfg.router_type == "sigmoid":
            scores = 1 / (1 + torch.exp(-logits))
        else:
            scores = logits.exp() / logits.exp().sum()
        ranked = scores + (self[f"{name}.selection_bias"] if cfg.router_selection_bias else 0)
        size = len(scores) // cfg.router_groups
        groups = [list(range(g * size, (g + 1) * size)) for g in range(cfg.router_groups)]

        def worth(group: list[int]) -> float:
            return sum(sorted(float(ranked[e]) for e in group)[-cfg.router_group_members :])

        best = sorted(groups, key=worth)[-cfg.router_top_groups :]
        allowed = [e for group in best for e in group]
        chosen = sorted(allowed, key=lambda e: float(ranked[e]))[-cfg.experts_per_token :]
        total = sum(scores[e] for e in chosen) if cfg.norm_topk_prob else 1
        return {e: scores[e] / total * cfg.router_scale for e in chosen}

    def expert(self, x: Tensor, name: str) -> Tensor:
        cfg = self.cfg
        gate, linear = x @ self[f"{name}.W_gate"], x @ self[f"{name}.W_in"]
        if cfg.gated_mlp_biases:
            gate, linear = gate + self[f"{name}.b_gate"], linear + self[f"{name}.b_up"]
        if cfg.expert_limit is not None:
            gate = torch.where(gate > cfg.expert_limit, cfg.expert_limit, gate)
            linear = linear.clamp(-cfg.expert_limit, cfg.expert_limit)
        slope = cfg.expert_gate_slope
        post = ACTIVATIONS[cfg.act_fn](gate * slope) / slope * (linear + cfg.expert_offset)
        out = post @ self[f"{name}.W_out"]
        return out + self[f"{name}.b_out"] if cfg.gated_mlp_biases else out

    def one_mlp(self, x: Tensor, name: str) -> Tensor:
        cfg = self.cfg
        linear = x @ self[f"{name}.W_in"]
        if not cfg.gated_mlp:
            post = self.bent(linear + self[f"{name}.b_in"], name)
        else:
            gate = x @ self[f"{name}.W_gate"]
            if cfg.gated_mlp_biases:
                gate, linear = gate + self[f"{name}.b_gate"], linear + self[f"{name}.b_up"]
            post = self.bent(gate, name) * linear + self[f"{name}.b_in"]
        return post @ self[f"{name}.W_out"] + self[f"{name}.b_out"]

    def bent(self, x: Tensor, name: str) -> Tensor:
        act_fn = self.cfg.act_fn
        if act_fn == "xielu":
            return self.xielu(x, f"{name}.act_fn")
        x = ACTIVATIONS[act_fn](x)
        return self.norm(x, f"{name}.ln", "LN") if act_fn.endswith("_ln") else x

    def xielu(self, x: Tensor, name: str) -> Tensor:
        beta = self[f"{name}.beta"]
        alpha_p = torch.log1p(self[f"{name}.alpha_p"].exp())
        alpha_n = beta + torch.log1p(self[f"{name}.alpha_n"].exp())
        left = (torch.expm1(x.clamp(max=-1e-6)) - x) * alpha_n + beta * x
        return torch.where(x > 0, alpha_p * x * x + beta * x, left)


def logits(model: HookedTransformer, tokens: Tensor) -> Tensor:
    """[batch, pos, d_vocab_out]: each row by itself."""
    formulas = ByHand(model)
    return torch.stack([formulas.logits(row) for row in tokens])
