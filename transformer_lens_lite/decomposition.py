"""The residual stream as a sum, and what each summand does to the logits.

What enters a layer is the embeddings plus what every sublayer before it has added, and what a
sublayer adds is a sum over heads or neurons. All of it is exact: with the norm's scale held fixed,
so are the logits (arXiv 2209.10652; direct logit attribution).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_lens_lite.components.moe import MixtureOfExperts
from transformer_lens_lite.components.norm import Norm
from transformer_lens_lite.hooks import Absent
from transformer_lens_lite.utils import Slice, SliceInput

Stack = Float[Tensor, "component *batch_and_pos d_model"]
Labelled = Stack | tuple[Stack, list[str]]


class ResidualDecomposition:
    """What an `ActivationCache` offers about the residual stream.

    `layer` is the layer the stream enters, None or -1 the end of the last one. With `mlp_input` it
    is the stream that enters that layer's MLP. `pos_slice` chooses columns; an int drops the axis.
    """

    model: Any
    has_batch_dim: Any

    def __getitem__(self, key: Any) -> Tensor:
        raise NotImplementedError

    # -- parts of the sum --

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Slice | SliceInput = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Labelled:
        """The stream as it enters each layer up to this one: [component, …, d_model]. Labels are
        "0_pre", "0_mid" … "final_post".

        `apply_ln` takes each through the norm that comes next; at the end of the model that is the
        whole final norm by each one's own statistics, so that `W_U` and `b_U` make logits of it
        (the logit lens).
        """
        last, chosen = self._layer(layer), as_slice(pos_slice)
        entries = []
        for number in range(last + 1):
            if number == self._depth:
                entries.append((self["resid_post", number - 1], "final_post"))
                continue
            entries.append((self["resid_pre", number], f"{number}_pre"))
            if incl_mid and number < last:
                entries.append((self["resid_mid", number], f"{number}_mid"))
        if self._attention_comes_first(last, mlp_input):
            entries.append((self["resid_mid", last], f"{last}_mid"))
        return self._stacked(
            entries, chosen, apply_ln, layer, mlp_input, return_labels,
            recompute_ln=last == self._depth,
        )  # fmt: skip

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: str = "all",
        apply_ln: bool = False,
        pos_slice: Slice | SliceInput = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Labelled:
        """What the embeddings and every sublayer added: [component, …, d_model], labels "embed",
        "pos_embed", "0_attn_out", "0_mlp_out" … With mode "all" they sum to the stream.

        Args:
            mode: "all", "attn" or "mlp".
        """
        if mode not in ("all", "attn", "mlp"):
            raise ValueError(f"mode must be 'all', 'attn' or 'mlp', got {mode!r}")
        last, chosen = self._layer(layer), as_slice(pos_slice)
        entries = list(self._embeddings()) if incl_embeds else []
        for number in range(last):
            if mode != "mlp":
                entries.append((self["attn_out", number], f"{number}_attn_out"))
            if mode != "attn" and not self.model.cfg.attn_only:
                entries.append((self["mlp_out", number], f"{number}_mlp_out"))
        if mode != "mlp" and self._attention_comes_first(last, mlp_input):
            entries.append((self["attn_out", last], f"{last}_attn_out"))
        return self._stacked(entries, chosen, apply_ln, layer, mlp_input, return_labels)

    def stack_activation(
        self, activation_name: str, layer: int = -1, sublayer_type: str | None = None
    ) -> Float[Tensor, "layer *shape"]:
        """One activation of every layer before this one."""
        return torch.stack(
            [self[activation_name, each, sublayer_type] for each in range(self._layer(layer))]
        )

    def compute_head_results(self) -> None:
        """Put what every head adds into the cache, as `hook_result` [batch, pos, head, d_model]:
        before any norm behind attention. What is there already stays."""
        for layer in range(self._depth):
            name = f"blocks.{layer}.attn.hook_result"
            if name not in self.cache_dict:  # type: ignore[attr-defined]
                W_O = self.model.blocks[layer].attn.W_O
                self.cache_dict[name] = torch.einsum(  # type: ignore[attr-defined]
                    "...nh,nhm->...nm", self["z", layer], W_O
                )

    def stack_head_results(
        self,
        layer: int | None = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Slice | SliceInput = None,
        apply_ln: bool = False,
    ) -> Labelled:
        """What every head before this layer added: [layer * head, …, d_model], labels "L0H0" …, and
        with `incl_remainder` all the rest of the stream as "remainder".

        Behind a norm (Gemma 2, OLMo 2) a head's part is taken at the scale the norm had.
        """
        last, chosen = self._layer(layer), as_slice(pos_slice)
        entries = [
            (head, f"L{number}H{index}")
            for number in range(last)
            for index, head in enumerate(self._heads(number, chosen))
        ]
        return self._with_remainder(entries, chosen, incl_remainder, apply_ln, layer, return_labels)

    def get_neuron_results(
        self,
        layer: int,
        neuron_slice: Slice | SliceInput = None,
        pos_slice: Slice | SliceInput = None,
        project_output_onto: Float[Tensor, "d_model *output"] | None = None,
    ) -> Float[Tensor, "*batch_pos_neuron d_out"] | Float[Tensor, "*batch_pos_neuron"]:
        """What each neuron of a layer adds: […, neuron, d_model]; with `project_output_onto`, only
        the dot product with it, […, neuron] or […, neuron, output]. One neuron, by an int, has no
        axis of its own."""
        neurons, onto = as_slice(neuron_slice), project_output_onto
        results = self._neurons(layer, neurons, as_slice(pos_slice), onto)
        return results.squeeze(neuron_axis(onto)) if neurons.mode == "int" else results

    def stack_neuron_results(
        self,
        layer: int | None = -1,
        pos_slice: Slice | SliceInput = None,
        neuron_slice: Slice | SliceInput = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
        project_output_onto: Float[Tensor, "d_model *output"] | None = None,
    ) -> Any:
        """What each neuron before this layer added: [layer * neuron, …, d_model], labels "L0N1" …;
        projected, and with a remainder, if asked."""
        last, chosen, neurons = self._layer(layer), as_slice(pos_slice), as_slice(neuron_slice)
        if apply_ln and project_output_onto is not None:
            raise ValueError("apply_ln needs whole vectors; project the stack afterwards")
        entries = [
            (value, label)
            for number in range(last)
            for value, label in self._labelled_neurons(number, neurons, chosen, project_output_onto)
        ]
        return self._with_remainder(
            entries, chosen, incl_remainder, apply_ln, layer, return_labels, project_output_onto
        )

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: Slice | SliceInput = None,
        return_labels: bool = False,
        project_output_onto: Float[Tensor, "d_model *output"] | None = None,
    ) -> Any:
        """Everything the stream is the sum of: heads, neurons (or MLPs, and always the MLPs that
        are mixtures of experts), embeddings, and all biases together as "bias"."""
        last, chosen = self._layer(layer), as_slice(pos_slice)
        if apply_ln and project_output_onto is not None:
            raise ValueError("apply_ln needs whole vectors; project the stack afterwards")
        projection = project_output_onto
        extra = [last] if self._attention_comes_first(last, mlp_input) else []
        entries = [
            (projected(head, projection), f"L{number}H{index}")
            for number in [*range(last), *extra]
            for index, head in enumerate(self._heads(number, chosen))
        ]
        biases = [self._attention_bias(number, chosen) for number in [*range(last), *extra]]
        for number in range(last):
            mlp = getattr(self.model.blocks[number], "mlp", None)
            if mlp is None:
                continue
            if expand_neurons and not isinstance(mlp, MixtureOfExperts):
                entries += self._labelled_neurons(number, Slice(None), chosen, projection)
                biases.append(self._mlp_bias(number, chosen))
            else:
                out = chosen.apply(self["mlp_out", number], -2)
                entries.append((projected(out, projection), f"{number}_mlp_out"))
        shape = chosen.apply(self._stream(last, mlp_input), -2)
        for value, label in self._embeddings():
            entries.append((projected(chosen.apply(value, -2), projection), label))
        bias = sum(biases, torch.zeros_like(shape))
        entries.append((projected(bias, projection), "bias"))
        return self._stacked(
            entries, Slice(None), apply_ln, layer, mlp_input, return_labels, pos_slice=chosen
        )

    # -- towards the logits --

    def apply_ln_to_stack(
        self,
        residual_stack: Stack,
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: Slice | SliceInput = None,
        batch_slice: Slice | SliceInput = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Stack:
        """Each component through the norm that reads the stream there, at the scale the norm had in
        the run: centred (LayerNorm) and divided, without weight and bias. So the sum of components
        becomes the sum of what they become.

        Args:
            pos_slice, batch_slice: which columns and rows the stack is of.
            has_batch_dim: whether the stack has a batch axis.
            recompute_ln: through the whole norm instead, by the components' own statistics, as if
                each were the stream.
        """
        norm, name = self._norm_reading(layer, mlp_input)
        if isinstance(norm, Absent):
            return residual_stack
        if recompute_ln:
            return normed(norm, residual_stack)
        scale = as_slice(pos_slice).apply(self[name], -2)
        if self.has_batch_dim:
            rows = as_slice(batch_slice)
            scale = rows.apply(scale, 0)
            if not has_batch_dim and rows.mode != "int":
                scale = scale[0]
        if norm.centred:
            residual_stack = residual_stack - residual_stack.mean(-1, keepdim=True)
        return residual_stack / scale.to(residual_stack.device)

    def logit_attrs(
        self,
        residual_stack: Stack,
        tokens: Any,
        incorrect_tokens: Any = None,
        pos_slice: Slice | SliceInput = None,
        batch_slice: Slice | SliceInput = None,
        has_batch_dim: bool = True,
    ) -> Float[Tensor, "component *batch_and_pos"]:
        """How much each component raises the logit of `tokens` (less that of `incorrect_tokens`),
        with the final norm's scale as it was: direct logit attribution.

        Over the components of a full decomposition it sums to the logit without b_U and the norm's
        bias. A softcap is not linear: what is attributed then is the logit before the cap.

        Args:
            tokens: a token, or ids that broadcast against [batch, pos]; a text of one token.
        """
        directions = self._directions(tokens)
        if incorrect_tokens is not None:
            wrong = self._directions(incorrect_tokens)
            if wrong.shape != directions.shape:
                raise ValueError(
                    f"tokens {list(directions.shape[:-1])} and incorrect_tokens "
                    f"{list(wrong.shape[:-1])} must have the same shape"
                )
            directions = directions - wrong
        scaled = self.apply_ln_to_stack(
            residual_stack, None, False, pos_slice, batch_slice, has_batch_dim
        )
        norm = self.model.ln_final
        if hasattr(norm, "w"):
            scaled = scaled * norm.weight()
        try:
            return (scaled * directions).sum(-1)
        except RuntimeError:
            raise ValueError(
                f"tokens {list(directions.shape[:-1])} do not broadcast against the stack "
                f"{list(residual_stack.shape[:-1])}; for one token per row choose a column by "
                "pos_slice"
            ) from None

    def logit_lens(
        self, layer: int | None = None, incl_mid: bool = False, pos_slice: Slice | SliceInput = None
    ) -> Float[Tensor, "component *batch_and_pos d_vocab_out"]:
        """The logits there would be if the model ended at each layer: the stream, through the final
        norm by its own statistics, the unembedding and the softcap (nostalgebraist, 2020)."""
        stack = self.accumulated_resid(layer, incl_mid, pos_slice=pos_slice)
        assert isinstance(stack, Tensor)
        model = self.model
        logits: Tensor = model.logits_of(normed(model.ln_final, stack))
        return logits

    # -- inside --

    @property
    def _depth(self) -> int:
        n_layers: int = self.model.cfg.n_layers
        return n_layers

    def _layer(self, layer: int | None) -> int:
        n = self._depth
        number = n if layer is None or layer == -1 else layer
        if not 0 <= number <= n:
            raise ValueError(f"layer={layer} is outside of a model of {n} layers")
        place = self.model.cfg.norm_place
        if place in ("stream", "skip"):
            raise ValueError(
                f"norm_place={place!r}: norms hold the stream itself, so that it is no sum of what "
                "was added"
            )
        return number

    def _stream(self, layer: int, mlp_input: bool) -> Tensor:
        if layer == self._depth:
            return self["resid_post", layer - 1] if layer else self["resid_pre", 0]
        has_mid = self._attention_comes_first(layer, mlp_input)
        return self["resid_mid" if has_mid else "resid_pre", layer]

    def _attention_comes_first(self, layer: int, mlp_input: bool) -> bool:
        """Whether what is wanted is the input of a layer's MLP, and its attention is in it: in
        parallel blocks it is not."""
        return mlp_input and layer < self._depth and not self.model.cfg.parallel_attn_mlp

    def _embeddings(self) -> Iterator[tuple[Tensor, str]]:
        """What the stream starts as: one summand where a norm follows the embeddings."""
        cfg = self.model.cfg
        if not isinstance(self.model.ln_embed, Absent):
            yield self["resid_pre", 0], "embed"
            return
        yield self["hook_embed"], "embed"
        if cfg.positional_embedding_type == "standard":
            yield self["hook_pos_embed"], "pos_embed"
        if cfg.n_token_types:
            yield self["hook_token_type_embed"], "token_type_embed"

    def _behind(self, layer: int, sublayer: str, part: Tensor, chosen: Slice, bias: bool) -> Tensor:
        """What becomes of a summand of a sublayer's output on its way into the stream: the norm
        behind the sublayer at the scale it had, and the residual multiplier. `bias`: the summand
        takes the norm's own bias along."""
        block = self.model.blocks[layer]
        norm, name = self._norm_behind(layer, sublayer)
        if norm is not None:
            if norm.centred:
                part = part - part.mean(-1, keepdim=True)
            part = part / chosen.apply(self[name], -2)
            if hasattr(norm, "w"):
                part = part * norm.weight()
            if bias and hasattr(norm, "b"):
                part = part + norm.get_parameter("b")
        return part * block.spec.residual_scale

    def _norm_behind(self, layer: int, sublayer: str) -> tuple[Any, str]:
        """The norm between a sublayer and the stream, or None, and where its scale is kept."""
        block = self.model.blocks[layer]
        name = "ln1" if sublayer == "attn" else "ln2"
        name += "" if block.spec.norm_place == "post" else "_post"
        norm = getattr(block, name, None)
        return norm if isinstance(norm, Norm) else None, f"blocks.{layer}.{name}.hook_scale"

    def _heads(self, layer: int, chosen: Slice) -> Iterator[Tensor]:
        attn = self.model.blocks[layer].attn
        z = self["z", layer]
        z = chosen.apply(z, -3)
        for head in range(z.shape[-2]):
            yield self._behind(layer, "attn", z[..., head, :] @ attn.W_O[head], chosen, False)

    def _attention_bias(self, layer: int, chosen: Slice) -> Tensor:
        bias = self.model.blocks[layer].attn.b_O
        return self._behind(layer, "attn", bias, chosen, True)

    def _mlp_bias(self, layer: int, chosen: Slice) -> Tensor:
        bias = self.model.blocks[layer].mlp.b_out
        return self._behind(layer, "mlp", bias, chosen, True)

    def _neurons(
        self, layer: int, neurons: Slice, chosen: Slice, projection: Tensor | None
    ) -> Tensor:
        block = self.model.blocks[layer]
        mlp = getattr(block, "mlp", None)
        if mlp is None:
            raise ValueError("an attention-only model has no neurons")
        if isinstance(mlp, MixtureOfExperts):
            raise ValueError(
                f"layer {layer} is a mixture of experts, whose neurons are those of each expert; "
                "take 'mlp_out' as a whole"
            )
        acts = neurons.apply(chosen.apply(self["post", layer], -2), -1)
        W_out = neurons.apply(mlp.W_out, 0)
        if neurons.mode == "int":  # a single neuron: its axis stays
            acts, W_out = acts[..., None], W_out[None]
        if projection is not None:  # without ever making the vectors
            norm, name = self._norm_behind(layer, "mlp")
            if norm is not None:
                acts, projection = acts / chosen.apply(self[name], -2), through(norm, projection)
            weights = W_out @ projection
            product = acts[..., None] * weights if projection.ndim == 2 else acts * weights
            return product * block.spec.residual_scale
        # a row per neuron: [..., neuron, d_model]; the norm's scale has no neuron axis
        out = acts[..., None] * W_out
        parts = [self._behind(layer, "mlp", each, chosen, False) for each in out.unbind(-2)]
        return torch.stack(parts, -2)

    def _labelled_neurons(
        self, layer: int, neurons: Slice, chosen: Slice, projection: Tensor | None
    ) -> Iterator[tuple[Tensor, str]]:
        results = self._neurons(layer, neurons, chosen, projection)
        d_mlp = self.model.blocks[layer].mlp.W_out.shape[0]
        numbers = neurons.apply(torch.arange(d_mlp)).reshape(-1).tolist()
        for number, value in zip(numbers, results.unbind(neuron_axis(projection)), strict=True):
            yield value, f"L{layer}N{number}"

    def _with_remainder(
        self,
        entries: list[tuple[Tensor, str]],
        chosen: Slice,
        incl_remainder: bool,
        apply_ln: bool,
        layer: int | None,
        return_labels: bool,
        projection: Tensor | None = None,
    ) -> Any:
        stream = projected(chosen.apply(self._stream(self._layer(layer), False), -2), projection)
        if incl_remainder:
            rest = stream - sum((value for value, _ in entries), torch.zeros_like(stream))
            entries = [*entries, (rest, "remainder")]
        if not entries:
            empty = stream.new_zeros((0, *stream.shape))
            return (empty, []) if return_labels else empty
        return self._stacked(
            entries, Slice(None), apply_ln, layer, False, return_labels, pos_slice=chosen
        )

    def _stacked(
        self,
        entries: Sequence[tuple[Tensor, str]],
        chosen: Slice,
        apply_ln: bool,
        layer: int | None,
        mlp_input: bool,
        return_labels: bool,
        recompute_ln: bool = False,
        pos_slice: Slice | None = None,
    ) -> Any:
        """Entries as one tensor. `chosen` is still to be applied; `pos_slice` has been already."""
        stack = torch.stack([chosen.apply(value, -2) for value, _ in entries])
        if apply_ln:
            stack = self.apply_ln_to_stack(
                stack, layer, mlp_input, pos_slice or chosen, None, self.has_batch_dim, recompute_ln
            )
        return (stack, [label for _, label in entries]) if return_labels else stack

    def _norm_reading(self, layer: int | None, mlp_input: bool) -> tuple[Any, str]:
        """The norm that reads the stream there, and where its scale is kept."""
        number = self._layer(layer)
        if number == self._depth:
            return self.model.ln_final, "ln_final.hook_scale"
        name = "ln2" if mlp_input else "ln1"
        return getattr(self.model.blocks[number], name), f"blocks.{number}.{name}.hook_scale"

    def _directions(self, tokens: Any) -> Float[Tensor, "*shape d_model"]:
        """What the normed stream is dotted with to give these tokens' logits."""
        directions: Tensor = self.model.logit_directions(tokens)
        return directions


def as_slice(given: Slice | SliceInput) -> Slice:
    """A Slice as it was written: an int drops its axis."""
    return given if isinstance(given, Slice) else Slice(given)


def neuron_axis(onto: Tensor | None) -> int:
    """Where neurons are counted, in their parts or in those projected onto a vector or several."""
    return -1 if onto is not None and onto.ndim == 1 else -2


def projected(value: Tensor, onto: Tensor | None) -> Tensor:
    """The dot product with vectors, where there are any."""
    return value if onto is None else value @ onto


def through(norm: Norm, onto: Float[Tensor, "d_model *output"]) -> Float[Tensor, "d_model *output"]:
    """What a vector is dotted with to give the dot product of `onto` with what the norm makes of
    it, but for its scale and bias."""
    if hasattr(norm, "w"):
        onto = torch.einsum("m,m...->m...", norm.weight(), onto)
    return onto - onto.mean(0, keepdim=True) if norm.centred else onto


def normed(norm: Any, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
    """The vectors through a norm, whose hooks do not see them."""
    result: Tensor = norm.fused(x) if isinstance(norm, Norm) else norm(x)
    return result
