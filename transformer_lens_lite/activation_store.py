"""Activations of many runs, found again by what they were tagged with."""

from typing import Any

from transformer_lens_lite.activations import ActivationCache


class ActivationStore:
    """Caches with tags."""

    def __init__(self) -> None:
        self.records: list[tuple[ActivationCache, dict[str, Any]]] = []

    def add(self, cache: ActivationCache, **tags: Any) -> None:
        """One more run."""
        self.records.append((cache, tags))
