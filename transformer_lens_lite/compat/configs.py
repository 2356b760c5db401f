"""The config of a pretrained model by its name, as classic code asks for it."""

from os import PathLike
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig, parse_dtype
from transformer_lens_lite.loading import on_the_hub, read_config


def get_pretrained_model_config(
    model_name: str | PathLike[str],
    device: Any = None,
    default_prepend_bos: bool | None = None,
    dtype: Any = "float32",
    first_n_layers: int | None = None,
    n_ctx: int | None = None,
) -> HookedTransformerConfig:
    """The config a model would have, from its config.json: no weights are read or downloaded.

    Raises: FileNotFoundError or ValueError, as `from_pretrained`.
    """
    name = on_the_hub(model_name)
    overrides: dict[str, Any] = {"dtype": parse_dtype(dtype), "model_name": str(name)}
    given = {"device": device, "default_prepend_bos": default_prepend_bos}
    overrides |= {name: value for name, value in given.items() if value is not None}
    cfg = read_config(name, first_n_layers, overrides)
    if n_ctx is not None:
        cfg.n_ctx = n_ctx
    return cfg
