"""A model's methods about checkpoints: loading, processing and saving. `loading` does the work."""

import copy
import warnings
from os import PathLike
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_lens_lite.components.moe import MixtureOfExperts
from transformer_lens_lite.config import HookedTransformerConfig, parse_dtype
from transformer_lens_lite.model_names import get_checkpoint_labels
from transformer_lens_lite.nearest import names_the_nearest


class CheckpointMethods:
    """Loading checkpoints, with and without processing, and writing them back."""

    cfg: HookedTransformerConfig
    # which steps of weight processing these weights went through; no checkpoint format describes
    # those
    processed: frozenset[str] = frozenset()

    @classmethod
    @names_the_nearest
    def from_pretrained(
        cls,
        model_name: str | PathLike[str] | None = None,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        checkpoint_label: int | None = None,
        hf_model: nn.Module | None = None,
        device: str | torch.device | None = None,
        n_devices: int = 1,
        tokenizer: Any = None,
        move_to_device: bool = True,
        fold_value_biases: bool = True,
        default_prepend_bos: bool | None = None,
        default_padding_side: str | None = None,
        dtype: str | torch.dtype = "float32",
        first_n_layers: int | None = None,
        n_ctx: int | None = None,
        revision: str | None = None,
        torch_dtype: str | torch.dtype | None = None,
        hf_config: Any = None,
        trust_remote_code: bool = False,
        token: str | bool | None = None,
        cache_dir: str | PathLike[str] | None = None,
        local_files_only: bool = False,
        attn_implementation: str | None = None,
        low_cpu_mem_usage: bool = True,
    ) -> Any:
        """A model from a checkpoint, its weights simplified in ways that leave log-probabilities as
        they are.

        `from_pretrained_no_processing` loads the weights as they are, and gives Hugging Face's
        logits.

        Args:
            model_name: "tiny-lens" (the model in the box), a folder, or a name on the hub.
            fold_ln, center_writing_weights, center_unembed, fold_value_biases,
            refactor_factored_attn_matrices: see `weight_processing`.
            hf_model: take the weights of this Hugging Face model; they are copied.
            tokenizer: default: the checkpoint's own.
            n_ctx: another context length than the checkpoint's.
            first_n_layers: load only these.
            revision: of a hub checkpoint; `checkpoint_value=n` (or `checkpoint_label`) is
                "step{n}"; `checkpoint_index` counts the steps that `get_checkpoint_labels` lists.
            token, cache_dir, local_files_only: of the hub, see `hub.Hub`.
            attn_implementation: which of Hugging Face's kernels classic code wanted. Nothing here
                depends on it: attention is fused until somebody listens to scores or pattern.
            low_cpu_mem_usage: nothing depends on it either: weights are never held twice.
        Raises:
            FileNotFoundError: no such model.
            ValueError: a damaged or unsupported checkpoint, or contradicting arguments.
        """
        from transformer_lens_lite.hub import Hub
        from transformer_lens_lite.loading import load_pretrained

        if n_devices != 1:
            raise ValueError(
                f"n_devices={n_devices}: splitting a model over devices is not supported"
            )
        wanted = parse_dtype(torch_dtype or dtype)
        processing = {
            "fold_ln": fold_ln,
            "center_writing_weights": center_writing_weights,
            "center_unembed": center_unembed,
            "fold_value_biases": fold_value_biases,
            "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
        }
        return load_pretrained(
            cls,
            model_name,
            hf_model=hf_model,
            hf_config=hf_config,
            device=device,
            dtype=wanted,
            n_ctx=n_ctx,
            first_n_layers=first_n_layers,
            tokenizer=tokenizer,
            default_padding_side=default_padding_side,
            default_prepend_bos=default_prepend_bos,
            hub=Hub(
                revision_of(
                    model_name, revision, checkpoint_index, checkpoint_value, checkpoint_label
                ),
                token,
                cache_dir,
                local_files_only,
            ),
            trust_remote_code=trust_remote_code,
            move_to_device=move_to_device,
            processing=processing,
        )

    @classmethod
    def from_pretrained_no_processing(
        cls,
        model_name: str | PathLike[str] | None = None,
        fold_ln: bool = False,
        center_writing_weights: bool = False,
        center_unembed: bool = False,
        refactor_factored_attn_matrices: bool = False,
        fold_value_biases: bool = False,
        **arguments: Any,
    ) -> Any:
        """A model that is exactly the checkpoint: Hugging Face's logits. Arguments as
        `from_pretrained`."""
        return cls.from_pretrained(
            model_name,
            fold_ln=fold_ln,
            center_writing_weights=center_writing_weights,
            center_unembed=center_unembed,
            refactor_factored_attn_matrices=refactor_factored_attn_matrices,
            fold_value_biases=fold_value_biases,
            **arguments,
        )

    # -- processing --

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,  # the classic order of these two
        fold_value_biases: bool = True,
    ) -> None:
        """Simplify this model's weights in place; hooks stay attached. See `weight_processing`."""
        own = dict(self.state_dict())  # type: ignore[attr-defined]
        flags = {
            "fold_ln": fold_ln,
            "center_writing_weights": center_writing_weights,
            "center_unembed": center_unembed,
            "fold_value_biases": fold_value_biases,
            "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
        }
        self._process(own, flags)

    def load_and_process_state_dict(
        self,
        state_dict: dict[str, Tensor],
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Load weights, simplified. `state_dict` must be as this model's `cfg` describes it.

        Raises: ValueError when a weight matrix is missing; other missing parameters keep this
            model's values, with a warning. RuntimeError for unexpected keys or wrong shapes.
        """
        flags = {
            "fold_ln": fold_ln,
            "center_writing_weights": center_writing_weights,
            "center_unembed": center_unembed,
            "fold_value_biases": fold_value_biases,
            "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
        }
        # copied, so that the model never shares memory with the caller's dictionary
        self._process({n: t.clone() for n, t in self._completed(state_dict).items()}, flags)

    def _process(self, state: dict[str, Tensor], flags: dict[str, Any]) -> None:
        from transformer_lens_lite.weight_processing import process_weights

        taken: set[str] = set()
        cfg, processed = process_weights(self.cfg, state, **flags, taken=taken)
        self._become(cfg, processed)
        self.processed = self.processed | taken

    def _completed(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        own, state_dict = dict(self.state_dict()), dict(state_dict)  # type: ignore[attr-defined]
        for name, module in self.named_modules():  # type: ignore[attr-defined]
            if isinstance(module, MixtureOfExperts):
                module.take_classic_names(state_dict, f"{name}.")
        missing = own.keys() - state_dict.keys()
        if matrices := sorted(name for name in missing if "W_" in name.rsplit(".", 1)[-1]):
            raise ValueError(f"the state dict lacks {matrices[:3]}")
        if missing:
            warnings.warn(
                f"the state dict lacks {sorted(missing)[:3]}, {len(missing)} in all; the "
                "model's own "
                "values are kept there",
                stacklevel=4,
            )
        return {**{name: own[name] for name in missing}, **state_dict}

    def _become(self, cfg: HookedTransformerConfig, state: dict[str, Tensor]) -> None:
        """Take another config and its weights; what is attached to hook points stays attached."""
        attached = {
            name: (point.fwd_hooks, point.bwd_hooks, point.ctx)
            for name, point in self.hook_dict.items()  # type: ignore[attr-defined]
        }
        before, modules = self.cfg, dict(self._modules)  # type: ignore[attr-defined]
        try:
            self.cfg = copy.copy(cfg)
            with torch.device("meta"):
                self._build()  # type: ignore[attr-defined]
            self.load_state_dict(state, strict=True, assign=True)  # type: ignore[attr-defined]
        except BaseException:
            self.cfg = before
            for name, module in modules.items():
                setattr(self, name, module)
            raise
        self.setup()  # type: ignore[attr-defined]
        for name, (forward, backward, ctx) in attached.items():
            if (point := self.hook_dict.get(name)) is not None:  # type: ignore[attr-defined]
                point.fwd_hooks, point.bwd_hooks, point.ctx = forward, backward, ctx

    # -- writing --

    def to_hf_state_dict(self) -> dict[str, Float[Tensor, "..."]]:
        """The weights under Hugging Face's names: bit for bit those that were loaded.

        Raises: ValueError for processed models, which no checkpoint format describes.
        """
        from transformer_lens_lite.saving import to_hf_state_dict

        return to_hf_state_dict(self)

    def save_pretrained(self, folder: str | PathLike[str], native: bool = False) -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` and `from_pretrained` load.

        native: write config.json and weights in this library's own names instead. Hugging Face
            cannot read that, but every model can be written so, processed or of no family.
        Raises: ValueError, unless `native`, for processed models and for configs no supported
            family has.
        """
        from transformer_lens_lite.saving import save_pretrained

        save_pretrained(self, folder, native=native)


def revision_of(
    model_name: str | PathLike[str] | None,
    revision: str | None,
    index: int | None,
    value: int | None,
    label: int | None,
) -> str | None:
    """The hub revision that a training checkpoint is kept under."""
    given = [x for x in (revision, index, value, label) if x is not None]
    if len(given) > 1:
        raise ValueError(
            "give only one of revision, checkpoint_index, checkpoint_value and checkpoint_label"
        )
    if index is not None:
        steps, _ = get_checkpoint_labels(str(model_name))
        if not -len(steps) <= index < len(steps):
            raise IndexError(f"checkpoint_index={index} is outside of {len(steps)} checkpoints")
        value = steps[index]
    step = value if value is not None else label
    return revision if step is None else f"step{step}"
