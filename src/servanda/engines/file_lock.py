# Files that one process at a time has open.

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from servanda.errors import ServandaError


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
