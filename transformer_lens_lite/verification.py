"""A microscope for trust: Hugging Face's model and ours, side by side on the same tokens.

    print(verify("tiny-lens"))

compares logits, loss, greedy continuations and every place inside that the checkpoint's own table
names: the row that maps `…q_proj.weight` to `W_Q` says that the output of that module is `hook_q`.
So it works for families a user registers, and names the first place at which the two part.
"""

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_lens_lite.config import parse_dtype
from transformer_lens_lite.model import HookedTransformer
from transformer_lens_lite.model_names import BOXED
from transformer_lens_lite.nearest import names_the_nearest
from transformer_lens_lite.saving import as_checkpoint
from transformer_lens_lite.utils import lm_cross_entropy_loss

TEXT = "When Mary and John went to the store, John gave a drink to Mary. After that, Mary"
# The largest relative error that counts as equal: rounding of the dtype over some tens of layers.
# (Some norms of Hugging Face's compute in fp32 whatever the model's dtype, so fp64 is no better.)
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

Side = Literal["in", "out"]


@dataclass(frozen=True)
class Place:
    """One value and its two names: our hook, and what goes in or out of a module of theirs."""

    hook: str
    module: str
    side: Side

    def __str__(self) -> str:
        return f"{self.hook} = {self.side}put of {self.module}"


@dataclass(frozen=True)
class Verification:
    """What `verify` found. Errors are the largest difference over the largest value of theirs; NaN
    where either side has one."""

    family: str
    dtype: torch.dtype
    tolerance: float
    errors: dict[str, float]  # by our hook name, in the order of the forward pass
    places: dict[str, Place]
    logits: float  # of a model without an unembedding: its last residual stream
    loss: float | None  # difference, nats; None for models that see both ways
    their_loss: float | None
    greedy: int  # tokens that agree …
    of_greedy: int  # … of these
    # Where they part, how far our token is behind the best by their logits, over the largest of
    # these; 0 when all agree. A near tie is decided by one rounding error.
    greedy_gap: float
    n_layers: int

    @property
    def first_difference(self) -> str | None:
        """The first hook, in the order of the forward pass, whose error is past the tolerance."""
        return next((name for name, e in self.errors.items() if not e <= self.tolerance), None)

    @property
    def differing(self) -> list[str]:
        """What is not equal up to the tolerance, of "places", "logits", "loss" and "greedy".

        The loss may differ by the tolerance times itself, or times one nat where it is smaller;
        greedy tokens where their logits are no further apart than the tolerance.
        """
        found = [] if self.first_difference is None else ["places"]
        if not self.logits <= self.tolerance:
            found.append("logits")
        if self.loss is not None and self.their_loss is not None:
            if not self.loss <= self.tolerance * max(1.0, self.their_loss):
                found.append("loss")
            if not self.greedy_gap <= self.tolerance:
                found.append("greedy")
        return found

    @property
    def passed(self) -> bool:
        """Whether everything inside, logits, loss and greedy tokens are equal up to the
        tolerance."""
        return not self.differing

    def of_layer(self, layer: int) -> float | None:
        """The largest error inside one layer; None when nothing in it was compared."""
        prefix = f"blocks.{layer}."
        errors = [e for name, e in self.errors.items() if name.startswith(prefix)]
        return max(errors, key=lambda e: math.inf if math.isnan(e) else e, default=None)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        lines = [f"{self.family}, {dtype}: {len(self.errors)} places inside compared"]
        for layer in range(self.n_layers):
            error = self.of_layer(layer)
            lines.append(f"  layer {layer:>3}  {'–' if error is None else f'{error:.1e}'}")
        lines.append(f"  logits     {self.logits:.1e}")
        if self.loss is not None:
            lines += [
                f"  loss       {self.loss:.1e} nats",
                f"  greedy     {self.greedy} of {self.of_greedy} tokens equal",
            ]
        if self.passed:
            lines.append(f"equal up to {self.tolerance:.0e}")
        else:
            lines.append(f"NOT equal up to {self.tolerance:.0e}; they part first at {self._where}")
        return "\n".join(lines)

    @property
    def _where(self) -> str:
        first = self.first_difference
        if first is not None:
            return f"{self.places[first]} ({self.errors[first]:.1e})"
        if self.differing[0] == "greedy":
            return f"the greedy tokens, by {self.greedy_gap:.1e} of the largest logit"
        return f"the {self.differing[0]}"


@names_the_nearest
@torch.no_grad()
def verify(
    model: str | PathLike[str] | nn.Module,
    *,
    dtype: str | torch.dtype = torch.float32,
    tokens: Int[Tensor, "batch pos"] | None = None,
    n_greedy: int = 20,
    tolerance: float | None = None,
) -> Verification:
    """Run Hugging Face's model and ours on the same tokens and compare them everywhere.

    Args:
        model: a folder, a hub name, a Hugging Face model, or an unprocessed `HookedTransformer`
            (compared with what Hugging Face makes of its export).
        dtype: what both run in; models in memory keep their own.
        tokens: [batch, pos]; by default a sentence, or random ids when there is no tokenizer.
        n_greedy: how many tokens both continue by.
        tolerance: relative error up to which they count as equal (default: by dtype).
    Raises: ValueError when the checkpoint cannot be loaded, or the model was processed; it and
        TypeError, before anything is loaded, for arguments that are none.
    """
    check_arguments(tokens, n_greedy, tolerance)
    ours, theirs = both(model, parse_dtype(dtype))
    tokens = tokens_for(ours) if tokens is None else ours.input_to_embed(tokens)[1]  # checked
    if tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise ValueError(f"tokens must be [batch, pos] with at least two, got {list(tokens.shape)}")
    was_training = theirs.training
    theirs.eval()
    try:
        return compared(ours, theirs, tokens, n_greedy, tolerance)
    finally:
        theirs.train(was_training)


def check_arguments(tokens: Any, n_greedy: Any, tolerance: Any) -> None:
    """TypeError or ValueError for what `verify` cannot use."""
    if isinstance(n_greedy, bool) or not isinstance(n_greedy, int):
        raise TypeError(f"n_greedy must be an integer, got {n_greedy!r}")
    if n_greedy < 0:
        raise ValueError(f"n_greedy must be at least 0, got {n_greedy}")
    if tolerance is not None:
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)):
            raise TypeError(f"tolerance must be a number, got {tolerance!r}")
        if not (tolerance >= 0 and math.isfinite(tolerance)):
            raise ValueError(f"tolerance must be a finite number of at least 0, got {tolerance!r}")
    if tokens is not None and not isinstance(tokens, Tensor):
        raise TypeError(f"tokens must be a tensor [batch, pos], got a {type(tokens).__name__}")


def compared(
    ours: HookedTransformer,
    theirs: Any,
    tokens: Int[Tensor, "batch pos"],
    n_greedy: int,
    tolerance: float | None,
) -> Verification:
    """`verify` for two models that are there."""
    width = theirs.dtype
    _, table = as_checkpoint(ours)
    places = {place.hook: place for place in places_of(table, ours)}
    seen, their_output = run_theirs(theirs, tokens, places.values(), ours.is_causal)
    out: str = "logits" if ours.cfg.unembedding else "residual"
    their_end = their_output.logits if ours.cfg.unembedding else their_output.last_hidden_state
    end, cache = ours.run_with_cache(tokens, return_type=out, names_filter=list(places))
    layers = their_output.hidden_states or ()  # the last one is behind the final norm
    for layer, hidden in enumerate(layers[1:-1] if ours.cfg.final_norm else layers[1:]):
        if hidden.shape[-1] != ours.cfg.d_model:
            continue  # OPT without a final norm: narrowed to the embedding already
        name = f"blocks.{layer}.hook_resid_post"
        seen[name] = hidden
        places[name] = Place(name, f"layer {layer} (hidden_states)", "out")
    missing = [name for name in seen if name not in cache]
    if missing:
        more = ours.run_with_cache(tokens, return_type=out, names_filter=missing)[1]
        cache = {**cache, **more}
    errors = {
        name: relative_error(cache[name], seen[name]) for name in ours.hook_dict if name in seen
    }
    loss, their_loss, equal, of, gap = None, None, 0, 0, 0.0
    if ours.is_causal:
        mine, their_loss = (
            float(lm_cross_entropy_loss(x.float(), tokens)) for x in (end, their_end)
        )
        loss = abs(mine - their_loss)
        # without numbers there is nothing to continue by
        if bool(end.isfinite().all()) and bool(their_end.isfinite().all()):
            equal, of, gap = greedy_agreement(ours, theirs, tokens, n_greedy)
    return Verification(
        family=table.architecture.model_type,
        dtype=width,
        tolerance=TOLERANCES[width] if tolerance is None else tolerance,
        errors=errors,
        places=places,
        logits=relative_error(end, their_end),
        loss=loss,
        their_loss=their_loss,
        greedy=equal,
        of_greedy=of,
        greedy_gap=gap,
        n_layers=ours.cfg.n_layers,
    )


def both(model: Any, dtype: torch.dtype) -> tuple[HookedTransformer, Any]:
    """(ours, Hugging Face's) of the same checkpoint."""
    load = HookedTransformer.from_pretrained_no_processing
    if isinstance(model, HookedTransformer):
        if not is_in_transformers(model):
            kind = model.cfg.original_architecture
            raise ValueError(f"transformers has no class for a {kind}: nothing to compare with")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            theirs = hugging_face(folder, model.W_E.dtype, model)
            return model, theirs.to(model.W_E.device)
    if isinstance(model, nn.Module):
        if not hasattr(model, "config"):
            raise ValueError(f"a {type(model).__name__} is no Hugging Face model")
        return load(hf_model=model, dtype=model.dtype, device=model.device), model
    ours = load(model, dtype=dtype)
    place = BOXED.get(str(model), model)
    if ours.checkpoint_config is None or not is_in_transformers(ours):
        raise ValueError(f"{model} is not in a format of Hugging Face's: nothing to compare with")
    return ours, hugging_face(place, dtype, ours).to(ours.W_E.device)


def is_in_transformers(model: HookedTransformer) -> bool:
    """Whether Hugging Face has a class for what the model is as a checkpoint."""
    return bool(as_checkpoint(model)[1].architecture.in_transformers)


def hugging_face(place: str | PathLike[str], dtype: torch.dtype, ours: HookedTransformer) -> Any:
    """Hugging Face's model of the kind ours is, its attention (but for ALiBi) and experts computed
    in plain steps."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    # an encoder's head may be a causal model's: Gemma 3 has no other class
    masked = str(ours.cfg.original_architecture).endswith("MaskedLM")
    kind = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    kind = kind if ours.cfg.unembedding else AutoModel
    # where ALiBi is a choice (Falcon), the eager attention of transformers 5 adds it twice
    attention = "sdpa" if ours.cfg.positional_embedding_type == "alibi" else "eager"
    model = kind.from_pretrained(place, dtype=dtype, attn_implementation=attention)
    if hasattr(model.config, "_experts_implementation"):  # the fast one refuses some sizes
        model.config._experts_implementation = "eager"
    return model.eval()


def tokens_for(model: HookedTransformer) -> Int[Tensor, "batch pos"]:
    """A sentence, or 32 random ids in each of two rows."""
    if model.tokenizer is not None:
        return model.to_tokens(TEXT)
    generator = torch.Generator().manual_seed(0)
    length = min(32, max(2, model.cfg.n_ctx // 2))
    ids = torch.randint(model.cfg.d_vocab, (2, length), generator=generator)
    return ids.to(model.W_E.device)


# --- the module map -------------------------------------------------------------------------------


def places_of(table: Any, model: HookedTransformer) -> Iterator[Place]:
    """The values that are an input or an output of one module of theirs, by the table's rows.

    Only rows that map one tensor to one parameter speak of a value by itself.
    """
    for placed in table.maps:
        if len(placed.hf) > 1 or len(placed.native) > 1 or not placed.hf[0].endswith(".weight"):
            continue
        module, native = placed.hf[0].removesuffix(".weight"), placed.native[0]
        for hook, side in hooks_of(native, model):
            if hook in model.hook_dict:
                yield Place(hook, module, side)


def hooks_of(native: str, model: HookedTransformer) -> Iterator[tuple[str, Side]]:
    """The hooks that hold what goes into, or comes out of, the product with a parameter."""
    cfg = model.cfg
    if native == "ln_final.w" and cfg.n_layers:
        yield f"blocks.{cfg.n_layers - 1}.hook_resid_post", "in"
    if native == "ln_embed.w" and cfg.n_layers:
        yield "blocks.0.hook_resid_pre", "out"
    if native == "unembed.transform.W_dense":
        yield "unembed.transform.hook_pre", "out"
    if native == "unembed.transform.ln.w":
        yield "unembed.hook_in", "out"
    if not native.startswith("blocks."):
        return
    block, name = native.rsplit(".", 1)
    layer = ".".join(block.split(".")[:2])
    latent = cfg.latent_kv_rank is not None  # there, q_proj's siblings make parts of heads
    if block.endswith(".attn") and not latent:
        which = {"W_Q": "hook_q", "W_K": "hook_k", "W_V": "hook_v"}.get(name.removeprefix("_"))
        if which is not None:
            yield f"{block}.{which}", "out"
    if native == f"{layer}.attn.W_O":
        yield f"{block}.hook_z", "in"
    if block == f"{layer}.mlp":
        gated = cfg.gated_mlp
        if name == "W_in":
            yield f"{block}.{'hook_pre_linear' if gated else 'hook_pre'}", "out"
        if name == "W_gate":
            yield f"{block}.hook_pre", "out"
        if name == "W_out":
            yield f"{block}.hook_post", "in"
    if name == "w" and cfg.norm_place == "stream":
        norms = {f"{layer}.ln1": "hook_resid_mid", f"{layer}.ln2": "hook_resid_post"}
        if block in norms:
            yield f"{layer}.{norms[block]}", "out"
    elif name == "w" and cfg.norm_place != "post":
        if block == f"{layer}.ln1":
            yield f"{layer}.hook_resid_pre", "in"
        if block == f"{layer}.ln2" and not cfg.parallel_attn_mlp:
            yield f"{layer}.hook_resid_mid", "in"


# --- running and comparing ------------------------------------------------------------------------


def run_theirs(
    theirs: Any, tokens: Tensor, places: Any, is_causal: bool = True
) -> tuple[dict[str, Tensor], Any]:
    """Values by our hook names, and the output. Modules the model does not have are passed over."""
    modules, seen, handles = dict(theirs.named_modules()), {}, []

    def watch(place: Place) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            value = args[0] if place.side == "in" and args else out
            if isinstance(value, Tensor):
                seen[place.hook] = value.detach().clone()  # some are edited in place afterwards

        return keep

    try:
        for place in places:
            if place.module in modules:
                handles.append(modules[place.module].register_forward_hook(watch(place)))
        uncached = {"use_cache": False} if is_causal else {}
        output = theirs(tokens, output_hidden_states=True, **uncached)
    finally:
        for handle in handles:
            handle.remove()
    return seen, output


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """max |ours - theirs| / max |theirs|, whatever the grouping into heads; infinite when sizes
    differ, NaN when either has one."""
    if ours.numel() != theirs.numel():
        return float("inf")
    a, b = ours.double().reshape(-1), theirs.double().reshape(-1)
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def greedy_agreement(
    ours: HookedTransformer, theirs: Any, tokens: Tensor, n: int
) -> tuple[int, int, float]:
    """How many new tokens agree before the first that does not, over all rows; of how many; and
    `Verification.greedy_gap`, the largest of the rows'."""
    n = min(n, ours.cfg.n_ctx + 1 - tokens.shape[1])
    if n < 1:
        return 0, 0, 0.0
    other, logits = their_greedy(theirs, tokens, n)
    if not bool(logits.isfinite().all()):
        return 0, tokens.shape[0] * n, math.nan
    try:
        whole = ours.generate(tokens, n, do_sample=False, stop_at_eos=False, verbose=False)
    except ValueError:  # of logits that are none: everything else was there for the first token
        return 0, tokens.shape[0] * n, math.nan
    mine = whole[:, tokens.shape[1] :]
    equal = (mine == other).long().cumprod(1).sum(1)
    gap = 0.0
    for row, first in enumerate(equal.tolist()):
        if first < n:
            at = logits[row, first]
            behind = at.max() - at[mine[row, first]]
            gap = max(gap, float(behind / at.abs().max().clamp_min(1e-30)))
    return int(equal.sum()), mine.numel(), gap


def their_greedy(
    theirs: Any, tokens: Tensor, n: int
) -> tuple[Int[Tensor, "batch new"], Float[Tensor, "batch new d_vocab"]]:
    """Hugging Face's own continuation by the largest logits alone, and these."""
    given = theirs.generation_config
    # Not as arguments: what is None there is taken from the model's own, which may hold an end of
    # text, penalties and more.
    theirs.generation_config = type(given)(pad_token_id=0)
    try:
        found = theirs.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=n,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    finally:
        theirs.generation_config = given
    new = found.sequences[:, tokens.shape[1] :]
    return new, torch.stack([step.float() for step in found.logits], 1)
