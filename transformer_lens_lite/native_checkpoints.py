"""Checkpoints in this library's own names: config.json with our fields, safetensors with our names.

What no checkpoint format of Hugging Face can say is kept in them too: processed weights, configs of
no family. `loading` reads and writes the files.
"""

import json
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from transformer_lens_lite.config import HookedTransformerConfig

# Beside the fields of the config.
PROCESSED, ZEROS = "processed", "zero_parameters"


def is_native(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of ours: Hugging Face's say which model type they are of."""
    return "model_type" not in config and {"n_layers", "d_model", "d_head"} <= config.keys()


class NativeTable:
    """Stands where a family's table does: every parameter has its own name."""

    def __init__(
        self,
        cfg: HookedTransformerConfig,
        zeros: Mapping[str, Any],
        where: str,
        n_layers_in_file: int,
    ) -> None:
        self.where, self.n_layers_in_file = where, n_layers_in_file
        tied = SimpleNamespace(hf="unembed.W_U", native="unembed.W_U", source="embed.W_E")
        self.tied = [tied] if cfg.tie_word_embeddings else []
        self.n_layers = cfg.n_layers
        self.zeros = {
            name: tuple(shape) for name, shape in zeros.items() if self._layer(name) < cfg.n_layers
        }
        self.family = "native"

    @staticmethod
    def _layer(name: str) -> int:
        parts = name.split(".")
        return int(parts[1]) if parts[0] == "blocks" and parts[1].isdigit() else -1

    def to_native(self, source: Any) -> Iterator[tuple[str, Float[Tensor, "..."]]]:
        """The tensors of the layers there are, one by one."""
        for name in sorted(source.names()):
            if self._layer(name) >= self.n_layers_in_file:
                raise ValueError(
                    f"{source.describe(name)} holds {name}, but {self.where} speaks of "
                    f"{self.n_layers_in_file} layers"
                )
        names = sorted(name for name in source.names() if self._layer(name) < self.n_layers)
        for name in names:
            yield name, source.read(name)


def understood(
    config: Mapping[str, Any], where: str, overrides: Mapping[str, Any]
) -> tuple[HookedTransformerConfig, dict[str, Any]]:
    """The config, and the shapes of the parameters that are zero and so not in the file.

    Raises: ValueError for a field that is unknown, or values that contradict each other.
    """
    fields = {k: v for k, v in config.items() if k not in (PROCESSED, ZEROS)}
    try:
        cfg = HookedTransformerConfig.from_dict({**fields, **overrides})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    return cfg, dict(config.get(ZEROS) or {})


def written(
    model: Any,
) -> tuple[dict[str, Any], dict[str, Float[Tensor, "..."]]]:
    """(config.json, tensors) of a model; contiguous, and without what is zero by nature."""
    zeros = {
        name: list(parameter.shape)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and not bool(parameter.any())
    }
    state = {
        name: tensor.detach().contiguous()
        for name, tensor in model.state_dict().items()
        if name not in zeros
    }
    if model.cfg.tie_word_embeddings:
        del state["unembed.W_U"]
    config = {
        **json.loads(model.cfg.to_json()),
        PROCESSED: sorted(model.processed),
        ZEROS: zeros,
    }
    del config["device"]  # a folder does not know where it will be loaded
    return config, state
