# Files of torch.save, read as tensors and plain data: nothing in them is run.

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from servanda.errors import MeasurementError
from servanda.rl.dumps.storage import Place, local, seekable

_HEAD = 1 << 16  # bytes of a file's index that are read at once


def loaded(path: Place, name: str, *, arrays: bool = False) -> Mapping[str, Any]:
    """A file that holds a dict.

    Args:
        name: of the file, for messages.
        arrays: whether it may hold NumPy's arrays of numbers, too.

    Raises:
        MeasurementError: it does not, or torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise MeasurementError(
            f"{name} was written by torch, which is not installed here",
            hint="pip install torch --index-url https://download.pytorch.org/whl/cpu",
        ) from None
    admitted = torch.serialization.safe_globals(_of_arrays()) if arrays else nullcontext()
    try:
        with local(path) as file, admitted:
            payload = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a broken or hostile file raises many types of errors
        reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise MeasurementError(
            f"{name} cannot be read as tensors and plain data: {reason}",
            hint="it is cut off, or holds objects that only the trainer can read",
        ) from None
    if not isinstance(payload, dict):
        raise MeasurementError(f"{name} holds no dict", hint="write it by --dump-details")
    return payload


def _of_arrays() -> list[Any]:
    """The names that a pickled array of numbers asks for, under both homes of NumPy's core."""
    rebuild = np.zeros(0).__reduce__()[0]
    kinds = [type(np.dtype(name)) for name in ("u1", "i2", "u2", "i4", "i8", "f4", "f8")]
    homes = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    return [np.ndarray, np.dtype, *kinds, *homes]


def mentions(path: Place, word: bytes) -> bool:
    """Whether the beginning of a file's index has a word."""
    return word in index_of(path, _HEAD)


def index_of(path: Place, size: int) -> bytes:
    """The beginning of a file's pickle, without the tensors; nothing of a file that has none."""
    try:
        with seekable(path) as source, zipfile.ZipFile(source) as archive:
            index = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
            with archive.open(index) as stream:
                return stream.read(size)
    except (OSError, zipfile.BadZipFile, StopIteration, RuntimeError):
        return b""
