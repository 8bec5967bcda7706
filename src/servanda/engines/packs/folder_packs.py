# A registry of packs in a folder, of this machine or shared; any HTTP server can serve it.

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from servanda.contract.text_file import whole
from servanda.engines.packs.pack_store import INDEX
from servanda.errors import MeasurementError

_PIECE = 1 << 20


class FolderTree:
    """See `Tree`."""

    def __init__(self, place: str) -> None:
        self.place, self._root = place, Path(place)

    def read(self, path: str) -> Iterator[bytes] | None:
        try:
            file = (self._root / path).open("rb")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise MeasurementError(
                f"{self._root / path} cannot be read: {error.strerror or error}",
                hint="name the folder of a registry that you may read",
            ) from None

        def pieces() -> Iterator[bytes]:
            with file, MeasurementError.of_system(f"{self._root / path} cannot be read"):
                while piece := file.read(_PIECE):
                    yield piece

        return pieces()

    def write(self, files: Mapping[str, Path | bytes], index: Callable[[bytes], bytes]) -> None:
        hint = "name a folder that you may write to"
        with MeasurementError.of_system(f"{self.place} cannot be written", hint=hint):
            self._root.mkdir(parents=True, exist_ok=True)
            for path, content in files.items():
                self._write(self._root / path, content)
            with (self._root / f".{INDEX}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                file = self._root / INDEX
                before = file.read_bytes() if file.exists() else b""
                self._write(file, index(before))

    @staticmethod
    def _write(file: Path, content: Path | bytes) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole(file) as part:
            if isinstance(content, bytes):
                part.write_bytes(content)
            else:
                shutil.copyfile(content, part)
