"""Open language models with every intermediate value named: HookedTransformer, small, exact and
fast."""

from typing import Any

from transformer_lens_lite.activation_dataset import ActivationDataset
from transformer_lens_lite.activation_store import ActivationRecord, ActivationStore
from transformer_lens_lite.activations import ActivationCache
from transformer_lens_lite.capture import CaptureSpec
from transformer_lens_lite.compat.aliasing import install_as_transformer_lens, uninstall
from transformer_lens_lite.compat.modules import own_attribute, register_own
from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.factored_matrix import FactoredMatrix
from transformer_lens_lite.hooks import HookPoint, LensHandle
from transformer_lens_lite.interventions import BoundIntervention, InterventionReport
from transformer_lens_lite.kv_cache import (
    HookedTransformerKeyValueCache,
    HookedTransformerKeyValueCacheEntry,
    KeyValueCache,
    KeyValueCacheEntry,
    TransformerLensKeyValueCache,
    TransformerLensKeyValueCacheEntry,
)
from transformer_lens_lite.model import HookedTransformer, Output
from transformer_lens_lite.prefixes import PrefixCache
from transformer_lens_lite.root_module import HookedRootModule, UnknownHookError
from transformer_lens_lite.steps import StepContext
from transformer_lens_lite.svd_interpreter import SVDInterpreter
from transformer_lens_lite.utils import Slice, get_act_name
from transformer_lens_lite.verification import Verification, verify

__all__ = [
    "ActivationCache",
    "ActivationDataset",
    "ActivationRecord",
    "ActivationStore",
    "BoundIntervention",
    "CaptureSpec",
    "FactoredMatrix",
    "HookPoint",
    "HookedRootModule",
    "HookedTransformer",
    "HookedTransformerConfig",
    "HookedTransformerKeyValueCache",
    "HookedTransformerKeyValueCacheEntry",
    "InterventionReport",
    "KeyValueCache",
    "KeyValueCacheEntry",
    "LensHandle",
    "Output",
    "PrefixCache",
    "SVDInterpreter",
    "Slice",
    "StepContext",
    "TransformerLensKeyValueCache",
    "TransformerLensKeyValueCacheEntry",
    "UnknownHookError",
    "Verification",
    "get_act_name",
    "install_as_transformer_lens",
    "uninstall",
    "verify",
]


register_own()


def __getattr__(name: str) -> Any:
    """The version, and classic names and modules, when somebody asks: both are slow to import."""
    if name != "__version__":
        return own_attribute(name)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("transformer_lens_lite")
    except PackageNotFoundError:
        return "0+unknown"
