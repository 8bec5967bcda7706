# The folder of files that are fetched once, such as baseline files; and files that are there as a
# whole or not at all.

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

from servanda.errors import MeasurementError, ServandaError

_CACHED = "free space, or let SERVANDA_CACHE name a folder that can be written"


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


def hold(lock: Path, busy: ServandaError) -> IO[str]:
    """Lock a file without waiting; it is locked until it is closed.

    Args:
        busy: raised if another process holds it.

    Raises:
        OSError: it cannot be opened.
    """
    held = lock.open("a+")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held.close()
        raise busy if isinstance(error, BlockingIOError) else error from None
    return held


@contextmanager
def whole_file(path: Path, hint: str = _CACHED) -> Iterator[Path]:
    """A file of a name of its own beside `path`, which it becomes once it is written.

    Raises:
        MeasurementError: it cannot be written; with the hint.
    """
    with written(path, hint):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
        os.close(handle)
        made = Path(name)
        try:
            yield made
            if made.exists():
                made.chmod(0o644)  # a temporary file is its owner's alone
                made.replace(path)
        finally:
            made.unlink(missing_ok=True)


def written(what: Path, hint: str = _CACHED) -> AbstractContextManager[None]:
    """Whatever the system says about a file that is written, said with its name and a next step."""
    return MeasurementError.of_system(f"{str(what)!r} cannot be written", hint=hint)
