# A registry of packs in a dataset repository of the Hugging Face Hub, by huggingface_hub.
#
# As for models, nothing is downloaded unless SERVANDA_HUB_DOWNLOAD=1 is set: otherwise only the
# Hub's cache is read.

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from servanda.engines.hub_cache import DOWNLOAD
from servanda.engines.packs.folder_packs import FolderTree
from servanda.engines.packs.pack_store import INDEX, joined
from servanda.errors import MeasurementError

_KIND = "dataset"


class HubTree:
    """See `Tree`.

    Args:
        place: hf://ORGANISATION/REPOSITORY.
    """

    def __init__(self, place: str) -> None:
        self.place, self._repo = place, place.removeprefix("hf://")
        try:
            import huggingface_hub
        except ImportError:
            raise MeasurementError(
                f"{place} is read by huggingface_hub, which is not installed",
                hint="pip install huggingface_hub",
            ) from None
        self._hub = huggingface_hub

    def read(self, path: str) -> Iterator[bytes] | None:
        from huggingface_hub import errors

        online = os.environ.get(DOWNLOAD) == "1"
        try:
            file = self._hub.hf_hub_download(
                self._repo, path, repo_type=_KIND, local_files_only=not online
            )
        except errors.EntryNotFoundError as error:
            # of the cache alone, it may be on the Hub
            if online and not isinstance(error, errors.LocalEntryNotFoundError):
                return None
            raise self._absent(path, online, error) from None
        except (errors.HfHubHTTPError, OSError, ValueError) as error:
            raise self._absent(path, online, error) from None
        return FolderTree(str(Path(file).parent)).read(Path(file).name)

    def write(self, files: Mapping[str, Path | bytes], index: Callable[[bytes], bytes]) -> None:
        from huggingface_hub import CommitOperationAdd, errors

        if os.environ.get(DOWNLOAD) != "1":
            raise MeasurementError(
                f"{self.place} is not written to unless {DOWNLOAD}=1 is set",
                hint=f"set {DOWNLOAD}=1, and log in with `hf auth login`",
            )
        written = {**files, INDEX: index(joined(self.read(INDEX), self.place) or b"")}
        adds = [CommitOperationAdd(path, content) for path, content in written.items()]
        try:
            self._hub.HfApi().create_commit(
                self._repo, adds, commit_message="Add a reference pack", repo_type=_KIND
            )
        except (errors.HfHubHTTPError, OSError, ValueError) as error:
            raise MeasurementError(
                f"{self.place} was not written to: {_first(error)}",
                hint="log in with `hf auth login`, and create the dataset repository",
            ) from None

    def _absent(self, path: str, online: bool, error: Exception) -> MeasurementError:
        if online:
            return MeasurementError(
                f"{self.place}: {path} could not be downloaded: {_first(error)}",
                hint="check the name and the network, and log in with `hf auth login`",
            )
        return MeasurementError(
            f"{path} of {self.place} is not in the Hub's cache",
            hint=f"run hf download --repo-type dataset {self._repo} {path}, or set {DOWNLOAD}=1 "
            "to let Servanda download it",
        )


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
