# Atoms: the tokens of a step by which slices they lie in.
#
# A slice asks of a token whether numbers of it are below or above edges, so all that counts is
# between which edges they lie.  Tokens that no slice tells apart are one atom: an atom has a few
# of its tokens' numbers stand for all, and slices are asked of those.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.rl.batch import Batch
from servanda.slices import LABEL, Cut

Array = NDArray[Any]

_MOST = 4096  # codes before those that no token has are closed up


@dataclass(frozen=True)
class Atoms:
    """Which atom each token is of, and which slices each atom lies in.

    Args:
        atom_BT: index of each token's atom, [B, T], of masked tokens and others.
        inside_CA: whether an atom lies in a slice, in the order of the slices.
        maybe_CA: whether it may, where a number of it is not known.
    """

    atom_BT: Array
    inside_CA: Array
    maybe_CA: Array

    def __len__(self) -> int:
        return self.inside_CA.shape[1]

    @property
    def bits_A(self) -> list[int]:
        """The slices of each atom as one number: bit i for slice i."""
        rows = np.packbits(self.inside_CA.T, axis=1, bitorder="little")
        return [int.from_bytes(row.tobytes(), "little") for row in rows]


def atoms_of(cuts: Sequence[Cut], batch: Batch) -> Atoms:
    """The atoms of a batch.

    Args:
        cuts: slices by fields of FIELDS or by labels.
    """
    fields = sorted({field for cut in cuts for field in cut.fields})
    labels = [field for field in fields if field.startswith(LABEL)]
    parts = [_labelled(batch, labels)] if labels else []
    parts += [_numbered(batch, field, cuts) for field in fields if field not in labels]
    # rows and columns first: what they give needs no look at each token
    parts.sort(key=lambda part: part.code_BT.size)
    code_BT, columns = np.zeros((1, 1), dtype=np.int32), {}
    size = 1
    for part in parts:
        code_BT = code_BT * np.int32(part.size) + part.code_BT
        at = np.arange(size * part.size)
        columns = {name: column[at // part.size] for name, column in columns.items()}
        columns |= {name: column[at % part.size] for name, column in part.columns.items()}
        size *= part.size
        if size > _MOST:
            code_BT, size, columns = _closed_up(code_BT, size, columns)
    code_BT, size, columns = _closed_up(code_BT, size, columns)
    inside, maybe = (
        np.array([cut.mask(columns, size, unknown=unknown) for cut in cuts]).reshape(-1, size)
        for unknown in (False, True)
    )
    return Atoms(np.broadcast_to(code_BT, batch.mask_BT.shape), inside, maybe)


@dataclass(frozen=True)
class _Part:
    """One field: a code of each token, [B, 1], [1, T] or [B, T], and what each code stands for."""

    code_BT: Array
    size: int
    columns: dict[str, Array]


def _closed_up(
    code_BT: Array, size: int, columns: dict[str, Array]
) -> tuple[Array, int, dict[str, Array]]:
    """Codes that no token has left out."""
    there = np.flatnonzero(np.bincount(code_BT.ravel(), minlength=size))
    dense = np.zeros(size, dtype=np.int32)
    dense[there] = np.arange(len(there))
    return (
        dense.take(code_BT),
        len(there),
        {name: column[there] for name, column in columns.items()},
    )


def _labelled(batch: Batch, fields: Sequence[str]) -> _Part:
    names = [field.removeprefix(LABEL) for field in fields]
    none = ("",) * batch.sequences
    rows = [*zip(*(batch.labels.get(name, none) for name in names), strict=True)]
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(rows or [("",) * len(names)]))}
    code_B = np.array([kinds[row] for row in rows], dtype=np.int32)
    columns = {}
    for at, field in enumerate(fields):
        column = np.empty(len(kinds), dtype=object)
        column[:] = [kind[at] or None for kind in kinds]  # "" is no value
        columns[field] = column
    return _Part(code_B[:, None], len(kinds), columns)


def _numbered(batch: Batch, field: str, cuts: Iterable[Cut]) -> _Part:
    edges = _edges(field, cuts)
    columns = {field: _stand_ins(edges)}
    values = COLUMNS[field](batch)
    if values is None:
        unknown = np.full((1, 1), len(columns[field]) - 1, dtype=np.int32)
        return _Part(unknown, len(columns[field]), columns)
    if values.dtype.kind == "i":
        table = _class_of(np.arange(batch.mask_BT.shape[1] + 1), edges)
        return _Part(table.take(values, mode="clip"), len(columns[field]), columns)
    return _Part(_class_of(values, edges), len(columns[field]), columns)


def _edges(field: str, cuts: Iterable[Cut]) -> Array:
    """Every number that a slice compares the field with, ascending."""
    found: set[float] = set()
    for term in (term for cut in cuts for term in cut.terms if term.field == field):
        if term.op in ("in", "not_in"):
            found.update(float(value) for value in term.value)
        elif term.op != "exists":
            found.add(float(term.value))
    return np.array(sorted(found))


def _stand_ins(edges: Array) -> Array:
    """A number of each class: below the first edge, on it, between it and the next, ..., NaN."""
    if not len(edges):
        return np.array([0.0, np.nan])
    ends = np.r_[edges[0] - 1, edges, edges[-1] + 1]
    found = np.empty(2 * len(edges) + 2)
    found[0:-1:2] = (ends[:-1] + ends[1:]) / 2
    found[1:-1:2] = edges
    found[-1] = np.nan
    return found


def _class_of(values: Array, edges: Array) -> Array:
    """The class of each number, as _stand_ins counts them."""
    at = np.searchsorted(edges, values, side="left") + np.searchsorted(edges, values, side="right")
    if values.dtype.kind == "f":
        at = np.where(np.isnan(values), 2 * len(edges) + 1, at)
    return at.astype(np.int32)


def _before(batch: Batch) -> Array:
    """Trained tokens of the sequence before each, [B, T]; of trained tokens alone."""
    if _one_turn(batch):
        return (
            np.arange(batch.mask_BT.shape[1], dtype=np.int32)
            - batch.start_B.astype(np.int32)[:, None]
        )
    return np.cumsum(batch.mask_BT, axis=1, dtype=np.int32) - np.int32(1)


def _starts(batch: Batch) -> Array:
    """Where a turn begins, [B, T]."""
    starts_BT = batch.mask_BT.copy()
    starts_BT[:, 1:] &= ~batch.mask_BT[:, :-1]
    return starts_BT


def _one_turn(batch: Batch) -> bool:
    """Whether no sequence has two stretches of trained tokens."""
    inner = np.count_nonzero(batch.mask_BT[:, 1:] > batch.mask_BT[:, :-1])
    first = np.count_nonzero(batch.mask_BT[:, :1])
    return inner + first == np.count_nonzero(batch.start_B < batch.mask_BT.shape[1])


def _turn(batch: Batch) -> Array:
    if _one_turn(batch):
        return np.ones((1, 1), dtype=np.int32)
    return np.cumsum(_starts(batch), axis=1, dtype=np.int32)


def _in_turn(batch: Batch) -> Array:
    before_BT = _before(batch)
    if _one_turn(batch):
        return before_BT
    opens_BT = np.where(_starts(batch), before_BT, np.int32(0))
    return before_BT - np.maximum.accumulate(opens_BT, axis=1)


# what a trainer's step tells of its tokens, [B, 1], [1, T] or [B, T]; None: not this time
COLUMNS: dict[str, Callable[[Batch], Array | None]] = {
    "request.prompt_tokens": lambda batch: batch.start_B.astype(np.int32)[:, None],
    "context.position": _before,
    "context.length": lambda batch: np.arange(batch.mask_BT.shape[1], dtype=np.int32)[None],
    "context.turn": _turn,
    "context.turn_position": _in_turn,
    "context.staleness": lambda batch: batch.staleness_BT,
}
