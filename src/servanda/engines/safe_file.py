# Files that are there as a whole or not at all, and a lock that refuses instead of waiting.

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from servanda.errors import MeasurementError, ServandaError


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
def whole_file(path: Path, hint: str = "free space, or name another file") -> Iterator[Path]:
    """A file of a name of its own beside `path`, which it becomes once it is written.

    Raises:
        MeasurementError: it cannot be written; with the hint.
    """
    with MeasurementError.of_system(f"{str(path)!r} cannot be written", hint=hint):
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
