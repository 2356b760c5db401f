"""All layers' weights at once, as fresh tensors, and what to call the heads."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.factored_matrix import FactoredMatrix, composition_scores
from transformer_lens_lite.root_module import HookedRootModule


class StackedWeights(HookedRootModule):
    """Read access to a model's weights. Per-layer ones are stacked anew on every access, so editing
    the result never changes the model; grouped keys and values are repeated for every query
    head."""

    cfg: HookedTransformerConfig
    embed: Any
    pos_embed: Any
    unembed: Any
    blocks: Any

    def _stacked(self, path: str) -> Tensor:
        module_name, name = path.split(".")
        return torch.stack([getattr(getattr(block, module_name), name) for block in self.blocks])

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """Token embedding."""
        return self.embed.W_E

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """Position embedding. AttributeError in models without a learned one."""
        return self.pos_embed.W_pos

    @property
    def W_E_pos(self) -> Float[Tensor, "d_vocab_and_n_ctx d_model"]:
        """Token and position embedding, one below the other."""
        return torch.cat((self.W_E, self.W_pos))

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab_out"]:
        """Unembedding."""
        return self.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, " d_vocab_out"]:
        """Unembedding bias."""
        return self.unembed.b_U

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Query weights."""
        return self._stacked("attn.W_Q")

    @property
    def W_K(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Key weights."""
        return self._stacked("attn.W_K")

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Value weights."""
        return self._stacked("attn.W_V")

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        """Output weights of attention."""
        return self._stacked("attn.W_O")

    @property
    def b_Q(self) -> Float[Tensor, "layer head d_head"]:
        """Query biases."""
        return self._stacked("attn.b_Q")

    @property
    def b_K(self) -> Float[Tensor, "layer head d_head"]:
        """Key biases."""
        return self._stacked("attn.b_K")

    @property
    def b_V(self) -> Float[Tensor, "layer head d_head"]:
        """Value biases."""
        return self._stacked("attn.b_V")

    @property
    def b_O(self) -> Float[Tensor, "layer d_model"]:
        """Output biases of attention."""
        return self._stacked("attn.b_O")

    @property
    def W_in(self) -> Float[Tensor, "layer d_model d_mlp"]:
        """Input weights of the MLPs."""
        return self._stacked("mlp.W_in")

    @property
    def W_gate(self) -> Float[Tensor, "layer d_model d_mlp"] | None:
        """Gate weights of the MLPs; None when they have no gate."""
        return self._stacked("mlp.W_gate") if self.cfg.gated_mlp else None

    @property
    def W_out(self) -> Float[Tensor, "layer d_mlp d_model"]:
        """Output weights of the MLPs."""
        return self._stacked("mlp.W_out")

    @property
    def b_in(self) -> Float[Tensor, "layer d_mlp"]:
        """Input biases of the MLPs."""
        return self._stacked("mlp.b_in")

    @property
    def b_out(self) -> Float[Tensor, "layer d_model"]:
        """Output biases of the MLPs."""
        return self._stacked("mlp.b_out")

    @property
    def QK(self) -> FactoredMatrix:
        """What every head scores: W_Q W_Kᵀ, [layer, head, d_model, d_model]. ValueError for latent
        attention."""
        return stacked([block.attn.QK for block in self.blocks])

    @property
    def OV(self) -> FactoredMatrix:
        """What every head moves: W_V W_O, [layer, head, d_model, d_model]. ValueError for latent
        attention."""
        return stacked([block.attn.OV for block in self.blocks])

    def all_composition_scores(
        self, mode: str
    ) -> Float[Tensor, "left_layer left_head right_layer right_head"]:
        """How much every head reads, in its queries ("Q"), keys ("K") or values ("V"), of what
        every earlier head writes: see `composition_scores`. 0 unless left_layer < right_layer.

        Raises: ValueError for another mode, and for latent attention.
        """
        reads = {"Q": lambda: self.QK, "K": lambda: self.QK.T, "V": lambda: self.OV}
        if mode not in reads:
            raise ValueError(f"mode must be 'Q', 'K' or 'V', got {mode!r}")
        scores = composition_scores(self.OV, reads[mode]())
        layers = torch.arange(self.cfg.n_layers, device=scores.device)
        earlier = layers[:, None, None, None] < layers[:, None]
        return torch.where(earlier, scores, torch.zeros_like(scores))

    @property
    def n_params_total(self) -> int:
        """Numbers in all parameters, each shared tensor counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """The sum of output biases of the layers before `layer` (and of its attention, for
        `mlp_input`)."""
        total = torch.zeros(self.cfg.d_model, dtype=self.W_E.dtype, device=self.W_E.device)
        for block in list(self.blocks)[:layer]:
            total = total + block.attn.b_O
            if include_mlp_biases and not self.cfg.attn_only:
                total = total + block.mlp.b_out
        return total + self.blocks[layer].attn.b_O if mlp_input else total

    def all_head_labels(self) -> list[str]:
        """["L0H0", "L0H1", …]."""
        cfg = self.cfg
        return [f"L{layer}H{head}" for layer in range(cfg.n_layers) for head in range(cfg.n_heads)]


def stacked(matrices: Sequence[FactoredMatrix]) -> FactoredMatrix:
    """Factored matrices of one shape as one, with a new first axis."""
    return FactoredMatrix(
        torch.stack([each.A for each in matrices]), torch.stack([each.B for each in matrices])
    )
