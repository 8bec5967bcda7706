# Small text files, read completely up to a size limit.
#
# A path may be a dump of gigabytes, an infinite device, or a FIFO without a writer.

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_BYTES = 1 << 20  # of a contract; one of 2,000 clauses has a third of it
# a FIFO opens without a writer then; absent on Windows, which has none
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)


def content(path: Path, most: int) -> bytes:
    """The content of a regular file.

    Args:
        most: size limit, bytes; a larger file is not read.

    Raises:
        OSError: it cannot be read, is larger, or is not a regular file.
    """
    # opened before it is examined, so that what is examined is what is read
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _AT_ONCE)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is a pipe or a device, not a file")
        if status.st_size > most:
            raise OSError(f"it has {status.st_size:,} bytes, and at most {most:,} are read")
        data = file.read(most + 1)  # files of /proc say that they have none
    if len(data) > most:
        raise OSError(f"it has more than the {most:,} bytes that are read at most")
    return data


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place unless the block raises."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
