# Which values of a checkpoint each tensor of another one holds: the tensor of its name, rounded or
# trained on, or another tensor, or its rows in another order.
#
# Nothing is assumed about names or architectures: tensors are found by their values, so that an
# expert in the place of another, and rows that a conversion interleaves, are named as such.
# Axes: R rows along one axis of a tensor, C what is in a row.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from servanda.engines.safetensors import StoredTensor, read_stored
from servanda.errors import MeasurementError

Kind = Literal[
    "equal",
    "rounded",
    "renamed",
    "changed",
    "scaled",
    "moved",
    "repeated",
    "transposed",
    "reordered",
    "other",
    "not finite",
    "only in A",
    "only in B",
]
SAME: tuple[Kind, ...] = ("equal", "rounded", "renamed")
# errors of a conversion: values of A are there, in a place that is not theirs
MISPLACED: tuple[Kind, ...] = ("moved", "repeated", "transposed", "reordered", "scaled")

Floats32 = NDArray[np.float32]

_BITS = 2.0**-8  # relative error of a value that was rounded to bfloat16, at most, and then some
_TINY = 2.0**-24  # half of the smallest float16
_LIKE = 0.5  # largest distance, relative to the norm, of a tensor that is still the same one
_BETTER = 4.0  # another tensor has to be so many times nearer than that of the same name
_SCALED = 0.004  # smallest factor, less 1, that is told from rounding
_SAMPLE = 1024  # values by which a tensor is looked for
_ROWS, _COLUMNS = 64, 512  # rows that are looked for, and their values that are compared


@dataclass(frozen=True)
class TensorOrigin:
    """Origin of the values of a tensor of B.

    Args:
        name: in B; in A for "only in A".
        kind: equal bit for bit in float32; rounded to at least 8 bits; renamed: a tensor of A that
            has no name of its own in B; changed: as by training or quantisation; scaled by a
            factor; moved: another tensor of A; repeated: rows of A more than once; transposed;
            reordered; other: nothing of A; not finite; or its name is on one side only.
        source: the tensor of A whose values it has; "" for none.
        error: distance from the source, or else from the tensor of its name, relative to its norm;
            NaN where there is none of this shape.
        detail: the factor, the order of the rows, or the shapes.
    """

    name: str
    kind: Kind
    source: str = ""
    error: float = math.nan
    detail: str = ""

    @property
    def text(self) -> str:
        """To follow the name: "holds layers.0.up_proj.weight of A"."""
        if self.kind in ("moved", "renamed"):
            return f"holds {self.source} of A"
        if self.kind == "scaled":
            return f"is {self.detail} times that of A"
        return self.detail or ("is transposed" if self.kind == "transposed" else "")


class Origins:
    """Finds the origins of tensors in a checkpoint A.

    Args:
        tensors: name -> a function that reads it in float32.
        shapes: name -> its shape.
    """

    def __init__(
        self,
        tensors: Mapping[str, Callable[[], Floats32]],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._tensors, self._shapes = tensors, shapes
        self._samples: dict[tuple[int, ...], tuple[list[str], Floats32]] = {}

    def of(self, pairs: Iterable[tuple[str, Floats32]]) -> Iterator[TensorOrigin]:
        """The origin of each tensor, then the tensors of A that none of them holds."""
        held: set[str] = set()
        for name, values in pairs:
            origin = self._of(name, values)
            held |= {name, origin.source}
            yield origin
        for name in self._tensors:
            if name not in held:
                yield TensorOrigin(name, "only in A")

    def _of(self, name: str, b: Floats32) -> TensorOrigin:
        if not np.isfinite(b).all():
            share = 1 - np.isfinite(b).mean()
            return TensorOrigin(name, "not finite", detail=f"{share:.1%} of its values")
        known = self._shapes.get(name) == b.shape
        if known and not b.any() and self._tensors[name]().any():
            return TensorOrigin(name, "other", error=1.0, detail="is all 0")
        own = _compared(name, name, self._tensors[name](), b) if known else None
        if own is not None and own.kind in SAME:
            return own
        other = self._nearest(name, b)
        if other is not None and (own is None or other.error * _BETTER < own.error):
            kind = "moved" if name in self._tensors else "renamed"
            return TensorOrigin(name, kind, other.source, other.error)
        if own is not None and (own.error < _LIKE or math.isinf(own.error)):  # A is 0
            return own
        if name not in self._tensors:
            return TensorOrigin(name, "only in B")
        found = _rearranged(name, self._tensors[name](), b)
        if not known and found.kind == "other":
            return replace(found, detail=f"shape {b.shape}, in A {self._shapes[name]}")
        return found

    def _nearest(self, name: str, b: Floats32) -> TensorOrigin | None:
        """The tensor of another name with the same shape that is nearest, if it is near."""
        names, samples = self._sampled(b.shape)
        given = _sample(b)
        norms = np.linalg.norm(samples, axis=1)
        distances = np.linalg.norm(samples - given, axis=1) / np.maximum(norms, 1e-30)
        for i in np.argsort(distances, kind="stable")[:2]:
            if names[i] != name and distances[i] < _LIKE:
                found = _compared(name, names[i], self._tensors[names[i]](), b)
                return found if found.error < _LIKE else None
        return None

    def _sampled(self, shape: tuple[int, ...]) -> tuple[list[str], Floats32]:
        if shape not in self._samples:
            names = [name for name, other in self._shapes.items() if other == shape]
            rows = [_sample(self._tensors[name]()) for name in names]
            empty = np.zeros((0, min(_SAMPLE, math.prod(shape))), np.float32)
            self._samples[shape] = names, np.stack(rows) if rows else empty
        return self._samples[shape]


def checkpoint_origins(a: Path, b: Path) -> tuple[TensorOrigin, ...]:
    """The origins of the tensors of checkpoint folder B in those of A.

    Raises:
        MeasurementError: no folder with safetensors, or a file that cannot be read.
    """
    origins, of_b = origins_in(a), _stored(b)
    return tuple(origins.of((name, tensor.float32()) for name, tensor in of_b.items()))


def origins_in(folder: Path) -> Origins:
    """The tensors of a checkpoint folder, in which others are looked for.

    Raises:
        MeasurementError: no folder with safetensors, or a file that cannot be read.
    """
    stored = _stored(folder)
    return Origins(
        {name: tensor.float32 for name, tensor in stored.items()},
        {name: tensor.shape for name, tensor in stored.items()},
    )


def _stored(folder: Path) -> dict[str, StoredTensor]:
    if not folder.is_dir():
        raise MeasurementError(
            f"the model folder {str(folder)!r} does not exist",
            hint="pass a local folder with safetensors",
        )
    return read_stored(folder)


def _sample(values: Floats32) -> Floats32:
    flat = values.reshape(-1)
    places = np.linspace(0, flat.size - 1, min(_SAMPLE, flat.size)).round().astype(int)
    return flat[places]


def _compared(name: str, source: str, a: Floats32, b: Floats32) -> TensorOrigin:
    """Two tensors of one shape, value by value."""
    if np.array_equal(a, b):
        return TensorOrigin(name, "equal", source, 0.0)
    off = np.abs(b - a)
    error = _distance(a, b)
    if error <= _BITS and (off <= _BITS * np.abs(a) + _TINY).all():
        return TensorOrigin(name, "rounded", source, error)
    norm = float(np.vdot(a, a))
    factor = float(np.vdot(a, b)) / norm if norm else math.nan
    if abs(factor - 1) > _SCALED and _distance(a * np.float32(factor), b) <= _BITS:
        return TensorOrigin(name, "scaled", source, error, f"{factor:.4g}")
    return TensorOrigin(name, "changed", source, error)


def _distance(a: Floats32, b: Floats32) -> float:
    norm = float(np.linalg.norm(a))
    return float(np.linalg.norm(b - a)) / norm if norm else math.inf


def _rearranged(name: str, a: Floats32, b: Floats32) -> TensorOrigin:
    """Values of a tensor in other places of it, or others."""
    if b.ndim == 2 and a.shape == b.shape[::-1]:
        error = _distance(np.ascontiguousarray(a.T), b)
        if error < _LIKE:
            return TensorOrigin(name, "transposed", name, error)
    if a.shape == b.shape:
        for axis in range(b.ndim):
            found = _order(np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0))
            if found:
                kind, order = found
                rows = "rows" if axis == 0 else "columns" if b.ndim == 2 else f"axis {axis}"
                return TensorOrigin(name, kind, name, _distance(a, b), f"{rows}: {order}")
    return TensorOrigin(name, "other", "", _distance(a, b) if a.shape == b.shape else math.nan)


def _order(a: Floats32, b: Floats32) -> tuple[Kind, str] | None:
    """The row of A that each row of B holds, if it holds rows of A in another order."""
    a_RC, b_RC = (x.reshape(len(x), -1) for x in (a, b))
    n = len(b_RC)
    columns = np.linspace(0, b_RC.shape[1] - 1, min(_COLUMNS, b_RC.shape[1])).round().astype(int)
    if len(columns) < 8 and n > 1:  # numbers that several rows may share
        return None
    rows = np.unique(np.linspace(0, n - 1, min(_ROWS, n)).round().astype(int))
    a_RC, b_RC = a_RC[:, columns], b_RC[np.ix_(rows, columns)]
    squares = (a_RC**2).sum(1)
    apart = squares - 2 * b_RC @ a_RC.T + (b_RC**2).sum(1)[:, None]
    source = apart.argmin(1)
    near = apart[np.arange(len(rows)), source] < _LIKE**2 * squares[source]
    if near.mean() < 0.9 or (source == rows)[near].all():
        return None
    pairs = [(int(r), int(s)) for r, s in zip(rows[near], source[near], strict=True)]
    sources = [s for _, s in pairs]
    kind = "repeated" if len({*sources}) < len(sources) else "reordered"
    return kind, order_text(pairs, n)


def order_text(pairs: list[tuple[int, int]], n: int) -> str:
    """An order in words; pairs of a row of B and the row of A that it holds, of n rows.

    >>> order_text([(0, 2), (1, 3), (2, 0), (3, 1)], 4)
    'the halves are swapped'
    >>> order_text([(0, 0), (1, 4), (2, 1), (3, 5), (4, 2)], 8)
    'interleaved in blocks of 8'
    """
    if all(s == n - 1 - r for r, s in pairs):
        return "in reverse"
    shifts = {(s - r) % n for r, s in pairs}
    if len(shifts) == 1:
        shift = shifts.pop()
        return "the halves are swapped" if 2 * shift == n else f"shifted by {shift}"
    for block in _blocks(n):
        half = block // 2
        for said, order in (
            ("interleaved", lambda r, half=half: (r % 2) * half + r // 2),
            ("split into even and odd ones", lambda r, half=half: 2 * (r % half) + r // half),
        ):
            if all(s == r // block * block + order(r % block) for r, s in pairs):
                return f"{said} in blocks of {block}"
    moved = [(r, s) for r, s in pairs if r != s]
    few = ", ".join(f"{r} holds {s} of A" for r, s in moved[:3])
    return f"{few} ({len(moved)} of {len(pairs)} that were compared)"


def _blocks(n: int) -> Iterator[int]:
    """Even divisors of a number, the largest first."""
    return (n // k for k in range(1, n // 2 + 1) if n % k == 0 and (n // k) % 2 == 0 and n // k > 2)
