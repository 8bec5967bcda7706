# The exact metrics by the compiled library of row_sums.c, where the package was built with one.
#
# It gives every sum over the vocabulary in two passes over the logits, and leaves the rows that
# need care (a token that one side cannot draw, log weights beyond 100) to the readable formulas.

from __future__ import annotations

import ctypes
import hashlib
import os
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SOURCE = Path(__file__).with_suffix(".c")
# the same name on every system: ctypes opens the file by its path
LIBRARY = SOURCE.with_name("_row_sums.so")
_WORTH_THREADS = 1 << 20  # pairs of logits: some milliseconds
_TYPES = {"float32": "float", "float64": "double"}


@dataclass(frozen=True)
class RowSums:
    """What the library returns of R plain rows; each array is [R].

    Args:
        high, low: largest and smallest difference of logits, train - infer, nats.
        shift: difference of the log normalisers, train - infer, nats.
        log_z: log normaliser of infer's logits, nats.
        entropy: of infer, nats.
        flip: 1.0 where the best tokens differ, else 0.0.
        tv, kl, kl_reverse, chi2, le_cam, hellinger2, js, entropy_gap: the exact metrics, kl over
            the tokens of infer.
        only_train: train's mass of tokens that infer lacks; plain rows have none.
    """

    high: Floats
    low: Floats
    shift: Floats
    log_z: Floats
    entropy: Floats
    tv: Floats
    kl: Floats
    kl_reverse: Floats
    chi2: Floats
    le_cam: Floats
    hellinger2: Floats
    js: Floats
    entropy_gap: Floats
    flip: Floats
    only_train: Floats | float = 0.0


# the library does not know the best of train, and leaves rows with tokens of one side alone
_COLUMNS = len(RowSums.__dataclass_fields__) - 2


def source_digest() -> str:
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


@cache
def compiled() -> ctypes.CDLL | None:
    """The compiled library, or None where the package was built without a C compiler."""
    if not LIBRARY.exists():
        return None
    loaded = ctypes.CDLL(str(LIBRARY))
    built = (ctypes.c_char * 64).in_dll(loaded, "servanda_row_sums_source").value.decode()
    if built == source_digest():
        return loaded
    warnings.warn(
        f"{LIBRARY} was compiled from another version of {SOURCE.name} and is not used: exact "
        "metrics are computed by the slower formulas; install the package again",
        stacklevel=2,
    )
    return None


def row_sums(
    train_RV: NDArray[np.floating],
    infer_RV: NDArray[np.floating],
    best_train_R: NDArray[np.int64],
    best_infer_R: NDArray[np.int64],
) -> tuple[NDArray[np.bool_], RowSums] | None:
    """Which rows are plain, [R], and what the library returns of them.

    Args:
        train_RV, infer_RV: logits without NaN and +inf, each row with some mass, [R, V].
        best_train_R, best_infer_R: where each row is largest; the first of equals.

    Returns:
        None where there is no library, or the logits are of a type that it does not read.
    """
    lib = compiled()
    if lib is None or train_RV.dtype != infer_RV.dtype or train_RV.dtype.name not in _TYPES:
        return None
    sides = [np.ascontiguousarray(side_RV) for side_RV in (train_RV, infer_RV)]
    best_R = np.ascontiguousarray(best_infer_R, dtype=np.int64)
    out_RC = np.empty((len(train_RV), _COLUMNS))
    plain_R = np.empty(len(train_RV), dtype=np.uint8)
    rows = lib[f"servanda_rows_{_TYPES[train_RV.dtype.name]}"]

    def work(start: int, stop: int) -> None:
        # ctypes lets other threads run meanwhile; a row is worked by one thread, always alike
        pointers = [
            ctypes.c_void_p(a[start:stop].ctypes.data) for a in (*sides, best_R, out_RC, plain_R)
        ]
        sizes = ctypes.c_ssize_t(stop - start), ctypes.c_ssize_t(train_RV.shape[1])
        rows(*pointers[:2], *sizes, *pointers[2:])

    cuts = np.linspace(0, len(train_RV), 1 + _threads(train_RV.size), dtype=int).tolist()
    if len(cuts) == 2:
        work(*cuts)
    else:
        from concurrent.futures import ThreadPoolExecutor  # slow to import, and seldom used

        with ThreadPoolExecutor(len(cuts) - 1) as pool:
            list(pool.map(work, cuts[:-1], cuts[1:]))
    plain = plain_R.astype(bool)
    flip_R = (best_train_R != best_infer_R).astype(np.float64)
    return plain, RowSums(*out_RC[plain].T, flip=flip_R[plain])


def _threads(pairs: int) -> int:
    """As many as OpenMP and torch would use, where the work is worth starting them."""
    if pairs < _WORTH_THREADS:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    said = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(said) if said.isdecimal() else cores or 1)
