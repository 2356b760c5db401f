"""What `importlib.metadata` reads of a package that is not on disk."""

from importlib.metadata import Distribution
from os import PathLike
from pathlib import Path
from typing import Any


class TransformerLensDistribution(Distribution):
    """The package `transformer-lens`, of a given version, without files."""

    def __init__(self, version: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: transformer-lens\nVersion: {version}\n",
            "top_level.txt": "transformer_lens\n",
        }

    def read_text(self, filename: str | PathLike[str]) -> str | None:
        """One of its metadata files, or None."""
        return self._texts.get(str(filename))

    def locate_file(self, path: Any) -> Path:
        """Where a file of it would be."""
        return Path(__file__).parent / path
