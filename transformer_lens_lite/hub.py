"""Files of models on the Hugging Face hub, through its cache.

Hub(revision="step1000").checkpoint("EleutherAI/pythia-70m")    the folder they are in
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformer_lens_lite.checkpoint_files import WEIGHT_FILES, first_line, read_json
from transformer_lens_lite.model_names import BOXED, nearest_names


@dataclass(frozen=True)
class Hub:
    """How names of the hub are looked up.

    Args:
        revision: a branch, tag or commit; None: the main branch.
        token: of who asks; None: of who is logged in, if anybody is; False: nobody.
        cache_dir: where files are kept; None: the hub's own cache (HF_HOME).
        local_files_only: ask nobody; what is in the cache has to do.
    """

    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """For functions of huggingface_hub and transformers."""
        return asdict(self)

    def file(self, name: str, file: str) -> Path:
        """One file of a model, downloaded if it is not in the cache. Raises what the hub's package
        raises."""
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, file, **self.arguments))

    def config(self, name: str) -> Path:
        """The folder config.json is in.

        Raises: FileNotFoundError: no such model, no access or no network.
        """
        from huggingface_hub.errors import EntryNotFoundError

        try:
            return self.file(name, "config.json").parent
        except (OSError, ValueError, EntryNotFoundError) as error:
            raise FileNotFoundError(self._why_not(name, error)) from error

    def checkpoint(self, name: str) -> Path:
        """The folder of config and weights.

        Raises: FileNotFoundError: as `config`, or no weights in a format we read.
        """
        from huggingface_hub.errors import EntryNotFoundError

        folder = self.config(name)
        for file in WEIGHT_FILES:
            try:
                path = self.file(name, file)
            except EntryNotFoundError:
                continue
            if path.suffix == ".json":
                self._shards(name, read_json(path))
            return folder
        raise FileNotFoundError(
            f"the hub (or its local cache) has none of {', '.join(WEIGHT_FILES)} for {name!r}"
        )

    def _shards(self, name: str, index: Mapping[str, Any]) -> None:
        from huggingface_hub.errors import EntryNotFoundError

        weight_map = index.get("weight_map")
        shards = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        for shard in sorted(str(shard) for shard in shards):
            try:
                self.file(name, shard)
            except (OSError, ValueError, EntryNotFoundError) as error:
                raise FileNotFoundError(
                    f"{name!r}: cannot get the shard {shard}: {error}"
                ) from error

    def _why_not(self, name: str, error: Exception) -> str:
        from huggingface_hub import constants
        from huggingface_hub import errors as hub

        known = f"{name!r} is no folder here and none of the models in the box ({', '.join(BOXED)})"
        near = nearest_names(name)
        if isinstance(error, hub.GatedRepoError):
            return (
                f"{name!r} is gated: accept its terms on the hub and log in "
                "(hf auth login, HF_TOKEN or token=)"
            )
        if isinstance(error, hub.RepositoryNotFoundError):
            hidden = "it is private and you are not logged in"
            return f"{known}; the hub has no such model (or {hidden}).{near}"
        if isinstance(error, hub.LocalEntryNotFoundError):
            mode = "the hub cannot be reached"
            if self.local_files_only:
                mode = "local_files_only is set"
            elif constants.HF_HUB_OFFLINE:
                mode = "HF_HUB_OFFLINE is set"
            return f"{known}; {mode}, and it is not in the local cache.{near}"
        return f"{known}; the hub says: {first_line(error)}"
