# The folder of files that engines make of a checkpoint, once: ONNX graphs, GGUF files.

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from servanda.errors import MeasurementError


def cache_folder(kind: str) -> Path:
    """$SERVANDA_CACHE/kind, or servanda/kind in the user's cache folder."""
    own = os.environ.get("SERVANDA_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(own) if own else Path(shared) / "servanda") / kind


@contextmanager
def alone(place: Path) -> Iterator[None]:
    """One process at a time makes what lies in `place`; the next finds what it has made.

    Raises:
        MeasurementError: what is written within cannot be, or the folder of `place` cannot.
    """
    with written(place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.with_name(f"{place.name}.lock").open("w") as lock:
            with suppress(OSError):  # a file system without locks: renaming is enough
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def written(what: Path) -> AbstractContextManager[None]:
    """Whatever the system says about a file that is written, said with its name and a next step."""
    hint = "free space, or let SERVANDA_CACHE name a folder that can be written"
    return MeasurementError.of_system(f"{str(what)!r} cannot be written", hint=hint)
