"""HookedTransformer: a decoder whose every intermediate value has a name."""

import inspect
import itertools
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_lens_lite.activation_store import ActivationStore
from transformer_lens_lite.activations import ActivationCache
from transformer_lens_lite.capture import CaptureSpec, PartsFromOutput, Recorder
from transformer_lens_lite.checkpoints import CheckpointMethods
from transformer_lens_lite.components.block import build_block
from transformer_lens_lite.components.context import ForwardContext
from transformer_lens_lite.components.embed import (
    NO_LOGITS,
    Embed,
    PosEmbed,
    Projection,
    TokenTypeEmbed,
    Unembed,
    build_unembed,
)
from transformer_lens_lite.components.norm import build_norm
from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.generate import GenerationMethods
from transformer_lens_lite.hooks import Absent, ComponentList, HookPoint
from transformer_lens_lite.initialisation import initialise, parameters_come_later
from transformer_lens_lite.interventions import BoundIntervention
from transformer_lens_lite.kv_cache import KeyValueCache, serving
from transformer_lens_lite.kv_formats import as_mask
from transformer_lens_lite.module_paths import outputs_by_module
from transformer_lens_lite.nearest import closest
from transformer_lens_lite.prefixes import PrefixMethods
from transformer_lens_lite.root_module import NamedHooks, UnknownHookError
from transformer_lens_lite.steps import Pos, StepContext, When, running
from transformer_lens_lite.text import TextMethods
from transformer_lens_lite.tokens import is_text
from transformer_lens_lite.utils import get_act_name, lm_cross_entropy_loss, warn_if_mps

RETURN_TYPES = ("logits", "loss", "both", "residual", None)
# optional hook points a blanket capture includes when the flag is on
FLAG_OF_OPTIONAL_POINT = {
    "hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_attn_in": "use_attn_in",
    "hook_mlp_in": "use_hook_mlp_in",
    "hook_tokens": "use_hook_tokens",
}
# what some people call a place in every layer
SITES = {"residual": "resid_post", "mlp": "mlp_out"}

Logits = Float[Tensor, "batch pos d_vocab_out"]
Loss = Float[Tensor, ""] | Float[Tensor, "batch next_pos"]
Residual = Float[Tensor, "batch pos d_model"]
Input = str | list[str] | Tensor


class Output(NamedTuple):
    """What `return_type="both"` returns."""

    logits: Tensor
    loss: Tensor


# (model, generation) while a forward that stands in place of ours is to make a step
_generation: ContextVar[tuple[Any, Any]] = ContextVar("generation", default=(None, None))


class HookedTransformer(TextMethods, GenerationMethods, PrefixMethods, CheckpointMethods):
    """A transformer decoder built from a `HookedTransformerConfig`.

        model = HookedTransformer.from_pretrained("tiny-lens")
        logits, cache = model.run_with_cache("When Mary and John went to the store,")
        cache["pattern", 1]                                    # [batch, head, pos, key_pos]

    Args:
        cfg: a config, or a dict of its fields.
        tokenizer: a transformers tokenizer; it is copied, never changed. Needed for text only.
        move_to_device: put the model on `cfg.device`.
        default_padding_side: "left" or "right", for lists of texts.
    """

    def __init__(
        self,
        cfg: HookedTransformerConfig | dict[str, Any],
        tokenizer: Any = None,
        move_to_device: bool = True,
        default_padding_side: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(cfg, HookedTransformerConfig | dict):
            raise ValueError(
                f"cfg must be a HookedTransformerConfig or a dict, got {type(cfg).__name__}; "
                "to load a "
                "checkpoint by name use HookedTransformer.from_pretrained(name)"
            )
        # a copy: casting or untying one model must not change the config of another
        self.cfg = HookedTransformerConfig.unwrap(cfg).copied()
        self.set_tokenizer(tokenizer, default_padding_side)
        self._vocabulary_from_tokenizer()
        # what a loaded checkpoint's config said, for writing it back; None for models made here
        self.checkpoint_config: dict[str, Any] | None = None
        self.aliases: dict[str, str] = {}
        self._outputs: dict[str, str] | None = None
        warn_if_mps(self.cfg.device)
        with torch.device("meta") if parameters_come_later.get() else nullcontext():
            self._build()
        if self.cfg.init_weights:
            self.init_weights()
        assert isinstance(self.cfg.dtype, torch.dtype)
        # at once: a move in dtype alone would set cfg.device to where the weights are
        super().to(device=self.cfg.device if move_to_device else None, dtype=self.cfg.dtype)
        self.setup()

    def setup(self) -> None:
        """Give every submodule its name and index the hook points, after a submodule was replaced
        too."""
        super().setup()
        self._outputs = None  # may be others now

    def _vocabulary_from_tokenizer(self) -> None:
        if self.cfg.d_vocab == -1:
            if self.tokenizer is None:
                raise ValueError("d_vocab is not given and there is no tokenizer to take it from")
            self.cfg.d_vocab = self.text.d_vocab
        if self.cfg.d_vocab_out == -1:
            self.cfg.d_vocab_out = self.cfg.d_vocab

    def _build(self) -> None:
        cfg = self.cfg
        self.hook_tokens = HookPoint(optional=True)  # [batch, pos], ids
        self.embed = Embed(cfg)
        self.hook_embed = HookPoint()  # [batch, pos, d_model]
        if cfg.n_token_types:
            self.token_type_embed = TokenTypeEmbed(cfg)
            self.hook_token_type_embed = HookPoint()  # [batch, pos, d_model]
        if cfg.positional_embedding_type in ("standard", "shortformer"):
            self.pos_embed = PosEmbed(cfg)
            self.hook_pos_embed = HookPoint()  # [batch, pos, d_model]
        last = cfg.post_embedding_ln and cfg.post_embedding_ln_last
        self.ln_embed = build_norm(cfg.norm_spec(kind="LN")) if last else Absent()
        self.blocks = ComponentList(build_block(cfg, spec) for spec in cfg.block_specs())
        self.ln_final = build_norm(cfg.final_norm_spec())
        self.unembed = build_unembed(cfg, self.embed)

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "input_to_embed" in cls.__dict__:
            warnings.warn(
                f"{cls.__name__}.input_to_embed is called by nobody here: forward embeds "
                "by itself. Hook hook_embed and hook_pos_embed, or replace the module embed",
                stacklevel=2,
            )

    def init_weights(self) -> None:
        """Draw fresh weights by `cfg.init_mode`."""
        initialise(self.cfg, self.named_parameters())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.cfg.positional_embedding_type == "alibi":  # classic models have one, read by nobody
            state_dict.pop(f"{prefix}pos_embed.W_pos", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # -- the forward pass --

    def forward(
        self,
        input: Input,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        start_at_layer: int | None = None,
        tokens: Int[Tensor, "batch pos"] | None = None,
        shortformer_pos_embed: Float[Tensor, "row pos d_model"] | None = None,
        attention_mask: Int[Tensor, "batch key_pos"] | None = None,
        stop_at_layer: int | None = None,
        past_kv_cache: KeyValueCache | None = None,
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
    ) -> Logits | Loss | Output | Residual | None:
        """Run the model.

        Args:
            input: a text, a list of texts, token ids [pos] or [batch, pos]; with `start_at_layer`
                the residual stream [batch, pos, d_model] that enters that layer.
            return_type: "logits" [batch, pos, d_vocab_out]; "loss", the mean next-token
                cross-entropy in nats over real tokens; "both"; "residual" [batch, pos, d_model],
                the stream after the last norm; or None, for the hooks' sake only.
            loss_per_token: loss as [batch, pos - 1].
            tokens: the ids behind a residual input, needed for its loss.
            attention_mask: 0 for padding; [batch, pos], or [batch, past + pos] with a cache. None:
                that of texts padded here, and of ids padded on the left where `padding_side` or
                the model's default says so. Ids padded on the right need it for a loss or a cache
                without padding; their real positions see none of it.
            start_at_layer, stop_at_layer: run only these blocks, the second excluded; negative
                numbers count from the end. With `stop_at_layer` the residual stream is returned.
            past_kv_cache: what came before; appended to, unless it is frozen.
            token_type_ids: of what type each token is, in models with `n_token_types`; None: all
                are of the first.
        Raises:
            ValueError: too long an input, ids outside the vocabulary, a mask or a cache that does
                not fit, an unknown `return_type`, logits or a loss of a model that has none, text
                without a tokenizer. Nothing was run then.
        """
        if return_type not in RETURN_TYPES:
            raise ValueError(
                f"return_type must be one of {list(RETURN_TYPES)}, got {return_type!r}"
            )
        layers = self._layer_range(start_at_layer, stop_at_layer)
        self._check_output(return_type, stop_at_layer)
        if start_at_layer is None:
            tokens, attention_mask = self._tokens_and_mask(
                input, prepend_bos, padding_side, attention_mask, past_kv_cache
            )
            context = self._context(tokens, layers, attention_mask, past_kv_cache)
            context.token_type_ids = self._checked_token_types(token_type_ids, tokens)
            residual = None
        else:
            residual = self._checked_residual(input, tokens, return_type, stop_at_layer)
            if token_type_ids is not None:
                raise ValueError("token_type_ids with start_at_layer: the stream has them in it")
            context = self._context(residual, layers, attention_mask, past_kv_cache)
        wants_loss = return_type in ("loss", "both") and stop_at_layer is None
        if wants_loss and context.n_new < 2 and not loss_per_token:
            raise ValueError("a loss needs at least two positions: one predicts the other")
        with running(partial(step_of, context, tokens, self._generation_at_work())):
            if residual is None:
                assert tokens is not None
                residual = self._embedded(tokens, context)
            residual = self._through_blocks(residual, layers, context, shortformer_pos_embed)
            if stop_at_layer is not None:
                return residual
            residual = self.ln_final(residual)
            if return_type is None:
                return None
            if return_type == "residual":
                return residual
            logits = self.logits_of(residual)
        if return_type == "logits":
            return logits
        assert tokens is not None  # checked before anything was run
        loss = self.loss_fn(logits, tokens, context.new_tokens_mask, loss_per_token)
        return loss if return_type == "loss" else Output(logits, loss)

    def next_logits(
        self,
        start: Tensor,
        attention_mask: Int[Tensor, "batch key_pos"] | None = None,
        past_kv_cache: KeyValueCache | None = None,
        generation: Any = None,
    ) -> Float[Tensor, "batch d_vocab_out"]:
        """Logits for the token after `start`, ids [batch, pos] or embeddings [batch, pos, d_model].

        As the last position of `forward`; other positions are unembedded only if somebody listens
        there. `generation` is the `Generation` this is a step of.
        """
        is_ids = not start.is_floating_point()
        if self._is_replaced("forward"):
            if not is_ids:
                raise ValueError(
                    "a prompt of embeddings, and a forward of one's own: it takes ids or a stream "
                    "(start_at_layer=0), and no embeddings"
                )
            given: dict[str, Any] = {"return_type": "logits", "past_kv_cache": past_kv_cache}
            given |= {} if attention_mask is None else {"attention_mask": attention_mask}
            before = _generation.set((self, generation))
            try:
                logits: Any = self.forward(start, **given)
            finally:
                _generation.reset(before)
            return logits[:, -1]
        layers = range(self.cfg.n_layers)
        context = self._context(start, layers, attention_mask, past_kv_cache)
        with running(partial(step_of, context, start if is_ids else None, generation)):
            if is_ids:
                residual = self._embedded(start, context)
            else:
                residual = self._with_positions(self.hook_embed(start), context)
            residual = self._through_blocks(residual, layers, context)
            if residual.shape[1] > 1 and not self._output_is_listened():
                residual = residual[:, -1:]
            return self.logits_of(self.ln_final(residual)).select(1, -1)

    def _generation_at_work(self) -> Any:
        """The generation whose step a forward of one's own was called for. It is that of the first
        forward of this model alone: others in the same step are runs of their own."""
        if torch.compiler.is_compiling():  # a compiled graph reads no context variables
            return None
        model, generation = _generation.get()
        if model is not self:
            return None
        _generation.set((None, None))
        return generation

    @property
    def a_weight(self) -> Tensor:
        """Of the embedding, or of a module in its place: where the model is, and in what dtype."""
        own: Tensor | None = getattr(self.embed, "W_E", None)
        return next(self.embed.parameters()) if own is None else own

    def _is_replaced(self, method: str) -> bool:
        """Whether a subclass, or an attribute of this very model, stands in place of a method."""
        own = getattr(type(self), method) is not getattr(HookedTransformer, method)
        return own or method in self.__dict__

    def _output_is_listened(self) -> bool:
        return any(
            module._forward_hooks or module._forward_pre_hooks or getattr(module, "listened", False)
            for part in (self.ln_final, self.unembed)
            for module in part.modules()
        )

    def _through_blocks(
        self,
        residual: Residual,
        layers: range,
        context: ForwardContext,
        shortformer_pos_embed: Float[Tensor, "row pos d_model"] | None = None,
    ) -> Residual:
        self._add_shortformer_positions(context, shortformer_pos_embed)
        for block in itertools.islice(self.blocks, layers.start, layers.stop):
            residual = block(residual, context)
        if context.cache is not None:
            context.cache.note_filling(self)
        context.commit(layers)
        return residual

    def logit_directions(self, tokens: Any) -> Float[Tensor, "*shape d_model"]:
        """What the stream behind `ln_final` is dotted with to give these tokens' logits, less b_U
        and before any softcap.

        `tokens` is an id, a text of one token, or a tensor of ids of any shape.
        """
        if not self.cfg.unembedding:
            raise ValueError(NO_LOGITS)
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        directions = self.W_U.T[torch.as_tensor(tokens, device=self.W_U.device)]
        transform = self.unembed.transform
        if isinstance(transform, Projection):
            directions = directions @ transform.W_project.T
        elif not isinstance(transform, Absent):
            raise ValueError(
                f"logits are no linear function of the stream here: {type(transform).__name__} "
                "stands before the unembedding"
            )
        return directions * self.cfg.logit_scale

    def logits_of(
        self, normed: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch d_vocab_out"]:
        """The logits of a stream that has been through `ln_final`, softcap included."""
        logits = self.unembed(normed)
        if self.cfg.logit_scale != 1.0:
            logits = logits * self.cfg.logit_scale
        cap = self.cfg.output_logits_soft_cap
        return cap * torch.tanh(logits / cap) if cap > 0 else logits

    def _embedded(self, tokens: Int[Tensor, "batch pos"], context: ForwardContext) -> Residual:
        return self._with_positions(self.hook_embed(self.embed(self.hook_tokens(tokens))), context)

    def _with_positions(self, residual: Residual, context: ForwardContext) -> Residual:
        if self.cfg.n_token_types:
            residual = residual + self._token_types(context)
        if self.cfg.positional_embedding_type == "standard":
            residual = residual + self._positions(context)
        return self.ln_embed(residual)

    def _token_types(self, context: ForwardContext) -> Float[Tensor, "row pos d_model"]:
        embedded = self.token_type_embed(context)
        if self.hook_token_type_embed.listened:  # on a copy, as positions are
            shape = (context.batch, context.n_new, self.cfg.d_model)
            embedded = self.hook_token_type_embed(embedded.expand(shape).clone())
        return embedded

    def _positions(self, context: ForwardContext) -> Float[Tensor, "row pos d_model"]:
        embedded = self.pos_embed(context)
        if self.hook_pos_embed.listened:  # on a copy: these may be rows of the parameter itself
            embedded = self.hook_pos_embed(embedded.expand(context.batch, -1, -1).clone())
        return embedded

    def _add_shortformer_positions(self, context: ForwardContext, given: Tensor | None) -> None:
        """Shortformer (arXiv 2012.15832): positions join queries and keys in every layer
        instead."""
        if self.cfg.positional_embedding_type == "shortformer":
            context.shortformer_pos_embed = self._positions(context) if given is None else given

    def loss_fn(
        self,
        logits: Logits,
        tokens: Int[Tensor, "batch pos"],
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        per_token: bool = False,
    ) -> Loss:
        """Next-token cross-entropy; see `utils.lm_cross_entropy_loss`."""
        return lm_cross_entropy_loss(logits, tokens, attention_mask, per_token)

    def _repr_html_(self) -> str:
        from transformer_lens_lite.plot import model_html

        return model_html(self)

    # -- what a forward pass comes to --

    def stage(self, name: str) -> int:
        """The layer a hook point or module is in; -1 before the first, `n_layers` behind the
        last."""
        room, _, rest = name.partition(".")
        if room == "blocks":
            return int(rest.partition(".")[0])
        return self.cfg.n_layers if room in ("ln_final", "unembed") else -1

    def unreached_by(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[str], str | None] | None:
        """See `HookedRootModule.unreached_by`."""
        given = kwargs
        if len(args) > 1:
            given = inspect.signature(self.forward).bind_partial(*args, **kwargs).arguments
        start, stop = given.get("start_at_layer"), given.get("stop_at_layer")
        has_logits = given.get("return_type", "logits") not in (None, "residual")
        if start is stop is None and has_logits:
            return None
        layers = self._layer_range(start, stop)
        # where positions join queries and keys, a forward that starts in the middle makes them too
        is_shortformer = self.cfg.positional_embedding_type == "shortformer"
        makes_positions = is_shortformer and given.get("shortformer_pos_embed") is None

        def unreached(name: str) -> str | None:
            stage = self.stage(name)
            if start is not None and stage < layers.start:
                if makes_positions and name.partition(".")[0] in ("pos_embed", "hook_pos_embed"):
                    return None
                return f"start_at_layer={start}"
            if stop is not None and stage >= layers.stop:
                return f"stop_at_layer={stop}"
            if name.startswith("unembed") and not has_logits:
                return f"return_type={given['return_type']!r}"
            return None

        return unreached

    # -- what a forward pass needs to know first --

    @property
    def is_causal(self) -> bool:
        """Whether no position sees a later one: only such models can continue a text, or keep
        keys and values."""
        return self.cfg.attention_dir == "causal"

    def _check_output(self, return_type: str | None, stop_at_layer: int | None) -> None:
        """ValueError for logits or a loss that this model does not have."""
        if stop_at_layer is not None or return_type in (None, "residual"):
            return
        if not self.cfg.unembedding:
            raise ValueError(NO_LOGITS)
        if return_type in ("loss", "both") and not self.is_causal:
            raise ValueError(
                f"return_type={return_type!r} with attention_dir='bidirectional': the loss is that "
                "of the next token, which such a model sees. Take the logits at masked tokens"
            )

    def _checked_token_types(
        self, types: Any, tokens: Int[Tensor, "batch pos"]
    ) -> Int[Tensor, "batch pos"] | None:
        if types is None:
            return None
        n = self.cfg.n_token_types
        if not n:
            raise ValueError("token_type_ids were given, but this model has no token types")
        if not isinstance(types, Tensor) or types.is_floating_point():
            raise ValueError("token_type_ids must be a tensor of integers")
        if types.shape != tokens.shape:
            raise ValueError(
                f"token_type_ids must be {list(tokens.shape)}, as the tokens are, got "
                f"{list(types.shape)}"
            )
        if not torch.compiler.is_compiling() and bool(((types < 0) | (types >= n)).any()):
            raise ValueError(f"token_type_ids must be less than n_token_types={n}")
        return types.to(tokens.device, torch.long)

    def _layer_range(self, start: Any, stop: Any) -> range:
        n = self.cfg.n_layers
        numbers = []
        for name, number, default in (("start_at_layer", start, 0), ("stop_at_layer", stop, n)):
            try:
                value = default if number is None else operator.index(number)  # numpy's too
            except TypeError:
                raise ValueError(f"{name} must be a layer's number, got {number!r}") from None
            value += n if value < 0 else 0
            if not 0 <= value <= n:
                raise ValueError(f"{name}={number} is outside a model of {n} layers")
            numbers.append(value)
        if numbers[0] > numbers[1]:
            raise ValueError(f"start_at_layer={start} is behind stop_at_layer={stop}")
        return range(*numbers)

    def _tokens_and_mask(
        self,
        input: Input,
        prepend_bos: bool | None,
        padding_side: str | None,
        attention_mask: Tensor | None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Int[Tensor, "batch pos"], Tensor | None]:
        """Ids [batch, pos], and the mask: as given, of the padding put here, or of the padding
        that some position would see.

        Text that continues a cache gets no BOS unless it is asked for.
        """
        device = self.a_weight.device
        if cache is not None and not isinstance(cache, KeyValueCache):
            raise ValueError(f"past_kv_cache must be a KeyValueCache, got {type(cache).__name__}")
        if prepend_bos is None and cache is not None and cache.length > 0:
            prepend_bos = False
        if is_text(input) and self._is_replaced("to_tokens"):
            how: dict[str, Any] = {"prepend_bos": prepend_bos, "padding_side": padding_side}
            input = self.to_tokens(input, **how)  # type: ignore[arg-type]
        if is_text(input):
            texts: Any = input
            tokens, made = self._text().encode_batch(
                texts, prepend_bos, padding_side, truncate=False
            )
            tokens = tokens.to(device)
            mask = made.to(device) if attention_mask is None else attention_mask
            return tokens, mask
        tokens = self._checked_tokens(input).to(device)
        unmasked = attention_mask is None and self.tokenizer is not None and len(tokens) > 0
        side = self.text.side(padding_side)
        # behind a text, padding is seen by nobody where attention looks back only
        if unmasked and (side == "left" or not self.is_causal):
            attention_mask = self._text().attention_mask(tokens, side, prepend_bos)
        return tokens, attention_mask

    def _checked_tokens(self, tokens: Any) -> Int[Tensor, "batch pos"]:
        if not isinstance(tokens, Tensor):
            raise TypeError(
                "input must be a text, a list of texts or a tensor of ids, got "
                f"{type(tokens).__name__}{how_to_make_ids(tokens)}"
            )
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise ValueError(
                f"token ids must be integers, got {tokens.dtype}; a residual stream needs "
                "start_at_layer"
            )
        if tokens.ndim not in (1, 2):
            raise ValueError(f"token ids must be [pos] or [batch, pos], got {list(tokens.shape)}")
        tokens = tokens if tokens.dtype in (torch.int32, torch.int64) else tokens.long()
        return tokens if tokens.ndim == 2 else tokens[None]

    def _checked_residual(
        self,
        residual: Any,
        tokens: Tensor | None,
        return_type: str | None,
        stop_at_layer: int | None,
    ) -> Residual:
        d_model = self.cfg.d_model
        if not isinstance(residual, Tensor) or not residual.is_floating_point():
            raise ValueError(
                "with start_at_layer the input is a residual stream, a floating tensor"
            )
        if residual.ndim != 3 or residual.shape[-1] != d_model:
            raise ValueError(
                f"the residual stream must be [batch, pos, {d_model}], got {list(residual.shape)}"
            )
        if (dtype := self.a_weight.dtype) != residual.dtype and not torch.is_autocast_enabled(
            residual.device.type
        ):
            raise ValueError(
                f"the residual stream is {residual.dtype}, the model's weights {dtype}"
            )
        if return_type in ("loss", "both") and stop_at_layer is None and tokens is None:
            raise ValueError("a loss with start_at_layer needs tokens=, the ids behind the input")
        if tokens is not None:
            self._check_ids(tokens, list(residual.shape[:2]))
        return residual

    def _check_ids(self, tokens: Any, shape: list[int]) -> None:
        """ValueError unless these are ids of this vocabulary, in this shape."""
        if not isinstance(tokens, Tensor) or tokens.is_floating_point():
            raise ValueError("tokens= must be token ids, an integer tensor")
        if list(tokens.shape) != shape:
            raise ValueError(f"tokens= must be {shape} as the input, got {list(tokens.shape)}")
        n = self.cfg.d_vocab
        if not torch.compiler.is_compiling() and bool(((tokens < 0) | (tokens >= n)).any()):
            raise ValueError(f"tokens= has ids outside the vocabulary of {n}")

    def _context(
        self,
        start: Tensor,
        layers: range,
        attention_mask: Tensor | None,
        cache: KeyValueCache | None,
    ) -> ForwardContext:
        """Check length, mask and cache of this forward, and gather them for the layers."""
        batch, n_new = start.shape[:2]
        past = self._past_length(cache, layers, batch, n_new)
        mask = self._joined_mask(attention_mask, batch, n_new, past, cache)
        self._check_length(past + n_new, mask)
        known = None if cache is None else cache.padding
        is_known = known is not None and known.shape[1] > past  # other layers have been here
        return ForwardContext(
            batch,
            n_new,
            start.device,
            self.a_weight.dtype,
            past,
            mask,
            cache,
            new_are_real=attention_mask is None and not is_known,
        )

    def _past_length(
        self, cache: KeyValueCache | None, layers: range, batch: int, n_new: int
    ) -> int:
        if cache is None:
            return 0
        if not isinstance(cache, KeyValueCache):
            raise ValueError(f"past_kv_cache must be a KeyValueCache, got {type(cache).__name__}")
        if not self.is_causal:
            raise ValueError(
                "past_kv_cache with attention_dir='bidirectional': what is said later changes the "
                "keys and values of what came before, so there is nothing to keep"
            )
        if not self.cfg.n_layers:
            raise ValueError("past_kv_cache of a model without layers: nothing is kept of a text")
        if len(cache) != self.cfg.n_layers:
            raise ValueError(f"the cache has {len(cache)} layers, the model {self.cfg.n_layers}")
        length = cache.length_before(layers, batch, n_new)
        cache.check_model(self)
        return length

    def _joined_mask(
        self,
        mask: Tensor | None,
        batch: int,
        n_new: int,
        past: int,
        cache: KeyValueCache | None,
    ) -> Int[Tensor, "batch key_pos"] | None:
        """[batch, past + pos], or None when no position is padding."""
        before = None if cache is None else cache.padding
        if mask is not None:
            mask = self._checked_mask(mask, batch, n_new, past)
        elif before is None or cache is None:
            return None
        elif before.shape[1] >= past + n_new:  # other layers have been here, and knew the padding
            return serving(before[:, : past + n_new], batch)
        else:
            return cache.mask_ahead(batch, past + n_new)
        if mask.shape[1] == n_new and past > 0:
            if before is None:
                before = mask.new_ones(1, past)
            mask = torch.cat((serving(before[:, :past], batch).to(mask), mask), 1)
        # all ones is no mask, and keeps the fast path; the test would break a compiled graph
        if not torch.compiler.is_compiling() and bool(mask.all()):
            return None
        return mask

    def _checked_mask(
        self, mask: Any, batch: int, n_new: int, past: int
    ) -> Int[Tensor, "batch key_pos"]:
        allowed = [[batch, n_new]] + ([[batch, past + n_new]] if past else [])
        if not isinstance(mask, Tensor) or list(mask.shape) not in allowed:
            got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask must be {' or '.join(map(str, allowed))} (0 for padding), got "
                f"{got}"
            )
        return as_mask(mask).to(self.a_weight.device)

    def _check_length(self, length: int, mask: Tensor | None) -> None:
        if self.cfg.positional_embedding_type in ("alibi", "none") or length <= self.cfg.n_ctx:
            return
        longest = length if mask is None else int(mask.sum(1).max())
        if longest > self.cfg.n_ctx:
            raise ValueError(
                f"the input reaches {longest} positions, cached ones included, but this model has "
                f"n_ctx={self.cfg.n_ctx} (model.to_tokens(text) cuts a text to that; behind a "
                "cache there is less room)"
            )

    def input_to_embed(
        self,
        input: Input,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | None = None,
        past_kv_cache: KeyValueCache | None = None,
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
    ) -> tuple[Residual, Int[Tensor, "batch pos"], Tensor | None, Tensor | None]:
        """What enters the first block: (residual, tokens, shortformer_pos_embed,
        attention_mask)."""
        tokens, mask = self._tokens_and_mask(
            input, prepend_bos, padding_side, attention_mask, past_kv_cache
        )
        context = self._context(tokens, range(self.cfg.n_layers), mask, past_kv_cache)
        context.token_type_ids = self._checked_token_types(token_type_ids, tokens)
        residual = self._embedded(tokens, context)
        self._add_shortformer_positions(context, None)
        return residual, tokens, context.shortformer_pos_embed, context.attention_mask

    # -- capturing --

    def wants_optional(self, name: str) -> bool:
        flag = FLAG_OF_OPTIONAL_POINT.get(name.rsplit(".", 1)[-1])
        return flag is not None and bool(getattr(self.cfg, flag))

    def run_with_cache(
        self, *model_args: Any, return_cache_object: bool = True, **kwargs: Any
    ) -> tuple[Any, Any]:
        """One forward and its activations, as an `ActivationCache` or, if asked, a plain dict.

        Takes the arguments of `forward` and of `HookedRootModule.run_with_cache`; `names_filter`
        may be a `CaptureSpec`.
        """
        out, cache = super().run_with_cache(*model_args, **kwargs)
        return out, cache if return_cache_object else cache.cache_dict

    def _cache_of(self, recorder: Recorder) -> ActivationCache:
        recorder.warn_if_empty()
        return ActivationCache.of_one_run(recorder)

    @contextmanager
    def capture(
        self, spec: Any = None, store: ActivationStore | None = None, **tags: Any
    ) -> Iterator[ActivationCache]:
        """Keep what a `CaptureSpec` (or names, or None for everything) asks for, of every forward
        and generation in a `with` block.

        Yields an `ActivationCache` that can be read at any time, and after an error too. When the
        block ran several texts, each is one of its `runs`. With `store`, every run is added to it
        at the end, with these tags.
        Raises: UnknownHookError for names that select nothing, before the block is entered.
        """
        if tags and store is None:
            raise TypeError(f"{list(tags)[0]}= is a tag of what is added to store=, which is None")
        if store is not None and not isinstance(store, ActivationStore):
            raise TypeError(f"store must be an ActivationStore, got {type(store).__name__}")
        recorder = Recorder(self, CaptureSpec.of(spec))
        cache = ActivationCache.of_recorder(recorder)
        parting = self.register_forward_hook(PartsFromOutput(recorder), with_kwargs=True)
        try:
            with recorder.listening():
                yield cache
            recorder.warn_if_empty()
        finally:
            parting.remove()
            if store is not None:
                for run in cache.runs:
                    store.add(run, **tags)

    def bind(
        self,
        fwd_hooks: NamedHooks,
        when: When = "all",
        pos: Pos = None,
        on_zero_fire: str = "error",
    ) -> BoundIntervention:
        """The model under an intervention, to be called like the model; see `BoundIntervention`."""
        return BoundIntervention(self, fwd_hooks, when, pos, on_zero_fire)

    # -- other names for the same values --

    def names_meant_by(
        self, name: str, layer: int | None = None, layer_type: str | None = None
    ) -> list[str]:
        """Hook names behind a short one, in one layer or in all, or behind the path of a Hugging
        Face module whose output it is."""
        is_alone = layer is None and layer_type is None
        if is_alone and name not in self.mod_dict and (point := self.point_at(name)) is not None:
            return [point]
        name = SITES.get(name, name)
        n_layers = self.cfg.n_layers
        layers = range(n_layers) if layer is None else [layer + n_layers if layer < 0 else layer]
        meant = [get_act_name(name, each, layer_type) for each in layers]
        if layer is None:
            meant.append(get_act_name(name))
        return [each for each in meant if each in self.hook_dict]

    def alias(self, name: str, path: str) -> None:
        """Let `name` mean `path` at the beginning of names of points and modules: after
        `model.alias("layers", "blocks")`, "layers.3.hook_resid_post" is a name, in `names=` and in
        caches made from then on."""
        if not any(each == path or each.startswith(f"{path}.") for each in self.mod_dict):
            raise UnknownHookError(f"there is no {path!r}.{closest(path, self.mod_dict)}")
        self.aliases = {**self.aliases, name: path}

    def point_at(self, path: str) -> str | None:
        """The hook point that holds what the module at a path returns: a path of ours, an alias, or
        a path of the Hugging Face model this one was made from. None when there is none."""
        for alias, meant in self.aliases.items():
            if path == alias or path.startswith(f"{alias}."):
                path = meant + path[len(alias) :]
                break
        if path in self.hook_dict:
            return path
        return self.outputs_by_module().get(path)

    def outputs_by_module(self) -> dict[str, str]:
        """Paths of modules, ours and Hugging Face's, and the hook points that hold exactly what
        they return."""
        if self._outputs is None:
            self._outputs = outputs_by_module(self)
        return self._outputs

    # -- flags that may be set at run time --

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Whether a blanket capture includes each head's result."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Whether a blanket capture includes the inputs of queries, keys and values by head."""
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Whether a blanket capture includes the MLP's input before its norm."""
        if self.cfg.attn_only:
            raise ValueError("an attention-only model has no hook_mlp_in")
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Whether a blanket capture includes attention's input by head."""
        grouped = self.cfg.n_key_value_heads not in (None, self.cfg.n_heads)
        if use_attn_in and grouped and not self.cfg.ungroup_grouped_query_attention:
            raise ValueError("hook_attn_in needs as many key as query heads; ungroup them first")
        self.cfg.use_attn_in = use_attn_in

    def set_ungroup_grouped_query_attention(self, ungroup_grouped_query_attention: bool) -> None:
        """Whether keys and values are computed once per query head."""
        self.cfg.ungroup_grouped_query_attention = ungroup_grouped_query_attention

    # -- weights as a whole --

    def untie(self) -> None:
        """Give a tied model an unembedding weight of its own, equal to what it shared."""
        if not self.cfg.tie_word_embeddings:
            return
        self.cfg.tie_word_embeddings = False
        shared = self.unembed
        own = Unembed(self.cfg)
        own.W_U = nn.Parameter(shared.W_U.detach().T.clone().T)
        own.b_U, own.hook_in, own.hook_out = shared.b_U, shared.hook_in, shared.hook_out
        own.transform = shared.transform
        self.unembed = own
        self.setup()

    def to(self, *args: Any, print_details: bool = False, **kwargs: Any) -> "HookedTransformer":
        """Move or convert the model in place, as nn.Module.to; `cfg` follows. `print_details` may
        come second, as in classic code."""
        where, *rest = args or (None,)
        if len(rest) == 1 and isinstance(rest[0], bool) and not isinstance(where, Tensor):
            args, print_details = (where,), rest[0]
        super().to(*args, **kwargs)
        if print_details:
            print(f"The model is on {self.cfg.device}, in {self.cfg.dtype}")
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> "HookedTransformer":
        """What `.to()`, `.half()`, `.cuda()` … of this model, or of one around it, come to."""
        super()._apply(*args, **kwargs)
        self._note_place()
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module's; `cfg` follows a model of no memory (on "meta") to where `assign=True`
        brings it."""
        result = super().load_state_dict(*args, **kwargs)
        if self.cfg.device == "meta":
            self._note_place()
        return result

    def _note_place(self) -> None:
        if not self.a_weight.is_meta:  # else the weights are still to come, to the place cfg says
            self.cfg.device = str(self.a_weight.device)
            self.cfg.dtype = self.a_weight.dtype
            warn_if_mps(self.cfg.device)

    def cuda(self, device: Any = None) -> "HookedTransformer":
        """Move to a GPU."""
        return self.to("cuda" if device is None else torch.device("cuda", device))

    def cpu(self) -> "HookedTransformer":
        """Move to the CPU."""
        return self.to("cpu")

    def mps(self) -> "HookedTransformer":
        """Move to Apple's GPU."""
        return self.to("mps")


def how_to_make_ids(given: Any) -> str:
    """The tail of an error: what to write instead of something that is nearly ids."""
    if hasattr(given, "input_ids"):  # what a tokenizer of transformers returns
        return ": pass its .input_ids, made with return_tensors='pt'"
    is_nearly = isinstance(given, list | tuple) or hasattr(given, "__array__")
    return ": make it one by torch.tensor(…)" if is_nearly else ""


def step_of(
    context: ForwardContext, tokens: Int[Tensor, "batch pos"] | None, generation: Any = None
) -> StepContext:
    """Where a forward stands, for whoever asks from inside it."""
    cache = context.cache
    if generation is not None:
        step, expected_stop = generation.n_fed, generation.expected_stop
        sequence, real = generation, generation.real(context.n_new)
    else:
        # a text that was begun elsewhere is continued, whether or not its cache says how often
        step = max(context.n_before, int(context.n_past > 0))
        sequence = None if cache is None or cache.frozen else cache
        expected_stop, real = None, None
    return StepContext(
        step=step,
        start=context.n_past,
        stop=context.n_keys,
        tokens=tokens,
        attention_mask=context.attention_mask,
        sequence=sequence,
        expected_stop=expected_stop,
        real=real,
        batch=context.batch,
    )
