"""Open language models with every intermediate value named: HookedTransformer, small, exact and
fast."""

from transformer_lens_lite.activation_files import ActivationDataset
from transformer_lens_lite.activation_store import ActivationRecord, ActivationStore
from transformer_lens_lite.activations import ActivationCache
from transformer_lens_lite.capture import CaptureSpec
from transformer_lens_lite.config import HookedTransformerConfig
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
from transformer_lens_lite.utils import Slice, get_act_name
from transformer_lens_lite.verification import Verification, verify

__all__ = [
    "ActivationCache",
    "ActivationDataset",
    "ActivationRecord",
    "ActivationStore",
    "BoundIntervention",
    "CaptureSpec",
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
    "Slice",
    "StepContext",
    "TransformerLensKeyValueCache",
    "TransformerLensKeyValueCacheEntry",
    "UnknownHookError",
    "Verification",
    "get_act_name",
    "verify",
]


def __getattr__(name: str) -> str:
    """The version, read when somebody asks: importlib.metadata is slow to search at import time."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("transformer_lens_lite")
    except PackageNotFoundError:
        return "0+unknown"
