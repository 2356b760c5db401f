"""From token ids into the residual stream, and out of it to logits."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_lens_lite.components.activations import build_activation
from transformer_lens_lite.components.context import ForwardContext
from transformer_lens_lite.components.norm import build_norm
from transformer_lens_lite.components.storage import transposed
from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.hooks import Absent, Component, HookPoint

NO_LOGITS = (
    "this model has no unembedding, so it has no logits and no loss: it ends with its residual "
    "stream. Ask for return_type='residual', or for None and look at the hooks"
)


class Embed(Component):
    """Token embedding `W_E` [d_vocab, d_model], or [d_vocab, d_embed], which `widen` brings to
    d_model; `ln` follows it in models with `post_embedding_ln`,
    unless that norm waits for the positions."""

    def __init__(self, cfg: HookedTransformerConfig) -> None:
        super().__init__()
        self.cfg = cfg
        width = cfg.d_embed or cfg.d_model
        self.W_E = nn.Parameter(torch.empty(cfg.d_vocab, width))
        self.scale = cfg.embed_scale
        self.widen = Absent() if cfg.d_embed is None else Projection(width, cfg.d_model)
        follows = cfg.post_embedding_ln and not cfg.post_embedding_ln_last
        self.ln = build_norm(cfg.norm_spec(kind="LN")) if follows else Absent()

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """Rows of `W_E`. ValueError naming the id when one is not in the vocabulary (on the
        CPU)."""
        try:
            embedded = torch.embedding(self.W_E, tokens)
        except IndexError:
            low, high = int(tokens.min()), int(tokens.max())
            wrong = low if low < 0 else high
            raise ValueError(
                f"token id {wrong} is outside the vocabulary of {self.W_E.shape[0]}"
            ) from None
        return self.ln(self.widen(self.scaled(embedded)))

    def scaled(
        self, embedded: Float[Tensor, "batch pos d_embed"]
    ) -> Float[Tensor, "batch pos d_embed"]:
        """Times the embedding multiplier, rounded to the model's dtype as checkpoints expect."""
        if self.scale == 1.0:
            return embedded
        return embedded * torch.tensor(self.scale, dtype=embedded.dtype, device=embedded.device)


class Projection(Component):
    """A matrix between embeddings and a wider stream: x `W_project` [d_in, d_out]."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.W_project = transposed(d_in, d_out)

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """From one width to the other."""
        return F.linear(x, self.W_project.T)


class PosEmbed(Component):
    """Learned positions, `W_pos` [n_ctx, d_model].

    `W_reserved` [n, d_model], where a checkpoint has rows before that of position 0: read by
    nobody, and kept for writing the checkpoint back.
    """

    def __init__(self, cfg: HookedTransformerConfig) -> None:
        super().__init__()
        self.cfg = cfg
        if cfg.reserved_positions:
            reserved = torch.zeros(cfg.reserved_positions, cfg.d_model)
            self.W_reserved = nn.Parameter(reserved, requires_grad=False)
        self.W_pos = nn.Parameter(torch.empty(cfg.n_ctx, cfg.d_model))

    def forward(
        self, context: ForwardContext | Int[Tensor, "batch pos"]
    ) -> Float[Tensor, "row pos d_model"]:
        """The rows of `W_pos` for the new positions; zero for padding. Of tokens alone: for whole
        texts."""
        if isinstance(context, Tensor):
            return self(ForwardContext.alone(context)).expand(len(context), -1, -1)
        mask = context.new_tokens_mask
        if mask is None:
            return self.W_pos.narrow(0, context.n_past, context.n_new).unsqueeze(0)
        rows = torch.embedding(self.W_pos, context.positions)
        return rows * mask[..., None].to(rows.dtype) if context.has_padded_queries else rows


class TokenTypeEmbed(Component):
    """What kind of token stands where, `W_token_type` [type, d_model]: the first or second of two
    texts, in BERT."""

    def __init__(self, cfg: HookedTransformerConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_token_type = nn.Parameter(torch.empty(cfg.n_token_types, cfg.d_model))

    def forward(self, context: ForwardContext) -> Float[Tensor, "row pos d_model"]:
        """The rows of the new tokens' types; the first for all when none are given."""
        if context.token_type_ids is None:
            return self.W_token_type[:1, None]
        return torch.embedding(self.W_token_type, context.token_type_ids)


class UnembedTransform(Component):
    """One more layer before the unembedding, in masked language models:
    ln(act(x `W_dense` [d_model, d_model] + `b_dense`))."""

    def __init__(self, cfg: HookedTransformerConfig, act_fn: str) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_dense = transposed(cfg.d_model, cfg.d_model)
        self.b_dense = nn.Parameter(torch.zeros(cfg.d_model))
        self.act_fn = build_activation(act_fn)
        self.hook_pre = HookPoint()  # [batch, pos, d_model]
        self.hook_post = HookPoint()  # [batch, pos, d_model], before the norm
        self.ln = build_norm(cfg.norm_spec(kind="LN"))

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What the unembedding reads."""
        pre = self.hook_pre(F.linear(x, self.W_dense.T, self.b_dense))
        return self.ln(self.hook_post(self.act_fn(pre)))


class Unembed(Component):
    """Logits: x `W_U` [d_model, d_vocab_out] + `b_U`; x goes through `transform` first where there
    is one."""

    def __init__(self, cfg: HookedTransformerConfig) -> None:
        super().__init__()
        self.cfg = cfg
        act_fn = cfg.unembed_act_fn
        self.transform: Component = Absent()
        if act_fn is not None:
            self.transform = UnembedTransform(cfg, act_fn)
        if cfg.d_embed is not None:
            self.transform = Projection(cfg.d_model, cfg.d_embed)
        self._make_weight()
        self.b_U = nn.Parameter(torch.zeros(cfg.d_vocab_out))
        self.hook_in = HookPoint()  # [batch, pos, d_model or d_embed], what W_U multiplies
        self.hook_out = HookPoint()  # [batch, pos, d_vocab_out], before any scaling or softcap

    def _make_weight(self) -> None:
        self.W_U = transposed(self.cfg.d_embed or self.cfg.d_model, self.cfg.d_vocab_out)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_vocab_out"]:
        """Project onto the vocabulary."""
        read = self.hook_in(self.transform(x))
        return self.hook_out(F.linear(read, self.matrix(), self.b_U))

    def matrix(self) -> Float[Tensor, "d_vocab_out d_model"]:
        """What `F.linear` takes."""
        return self.W_U.T


class TiedUnembed(Unembed):
    """An unembedding without a weight of its own: `W_U` is the transpose of `W_E`, the same memory.

    `state_dict` lists `W_U` all the same, as the classic class does; loading compares the two.
    """

    def __init__(self, cfg: HookedTransformerConfig, embed: Embed) -> None:
        self._embed = (embed,)  # in a tuple: not a submodule, or its parameters would count twice
        super().__init__(cfg)

    def _make_weight(self) -> None:
        pass

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab_out"]:  # type: ignore[override]
        return self._embed[0].W_E.T

    def matrix(self) -> Float[Tensor, "d_vocab_out d_model"]:
        return self._embed[0].W_E

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "W_U":
            raise AttributeError(
                "unembed.W_U is tied to embed.W_E; call model.untie() to give it its own weight"
            )
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "W_U"] = self.W_U if keep_vars else self.W_U.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        given = state_dict.pop(prefix + "W_U", None)  # embed comes first, so W_E is loaded by now
        if given is not None and not same_values(given, self.W_U):
            args[-1].append(
                f"{prefix}W_U differs from embed.W_E, but this model ties them; build it with "
                "tie_word_embeddings=False, or call model.untie() first"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal shape and numbers; free when both are the same memory."""
    if a.shape != b.shape:
        return False
    if a.device.type == "meta" or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()):
        return True
    return torch.equal(a.to(b), b)


class NoUnembed(Component):
    """Where a model ends with its stream, as encoders do without a head."""

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """ValueError: there are no logits."""
        raise ValueError(NO_LOGITS)


def build_unembed(cfg: HookedTransformerConfig, embed: Embed) -> Unembed | NoUnembed:
    """Tied to `embed` or with a weight of its own, as the config says."""
    if not cfg.unembedding:
        return NoUnembed()
    return TiedUnembed(cfg, embed) if cfg.tie_word_embeddings else Unembed(cfg)
