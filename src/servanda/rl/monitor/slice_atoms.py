# Atoms: the tokens of a step, grouped by their slices.
#
# A slice compares a token's numbers with edges, so only the intervals between edges matter.  Tokens
# in the same slices form one atom; slices are evaluated on representative numbers of each atom.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.judgement.slices.rules import LABEL, Cut
from servanda.rl.monitor import device_arrays as arrays
from servanda.rl.monitor.batch import Batch

Array = NDArray[Any]

_MOST = 4096  # codes before unused codes are removed


@dataclass(frozen=True)
class Atoms:
    """The atom of each token, and the slices of each atom.

    Args:
        atom_BT: index of each token's atom, [B, T], inside and outside the mask.
        inside_CA: whether an atom is in a slice, in the order of the slices.
        maybe_CA: whether it may be, if a number is unknown.
    """

    atom_BT: Array
    inside_CA: Array
    maybe_CA: Array

    def __len__(self) -> int:
        return self.inside_CA.shape[1]

    def times(self, other: Atoms) -> Atoms:
        """The product of two sets of atoms."""
        mine, theirs = len(self), len(other)
        code_BT = self.atom_BT * theirs + other.atom_BT
        both = (
            np.vstack([np.repeat(of, theirs, axis=1), np.tile(more, (1, mine))])
            for of, more in (
                (self.inside_CA, other.inside_CA),
                (self.maybe_CA, other.maybe_CA),
            )
        )
        return Atoms(code_BT, *both)

    @property
    def bits_A(self) -> list[int]:
        """The slices of each atom as one number: bit i for slice i."""
        rows = np.packbits(self.inside_CA.T, axis=1, bitorder="little")
        return [int.from_bytes(row.tobytes(), "little") for row in rows]


def families(cuts: Sequence[Cut]) -> list[list[int]]:
    """A partition of slice indexes; slices on the same numbers are together."""
    groups: list[tuple[set[str], list[int]]] = []
    for i, cut in enumerate(cuts):
        fields, members = set(cut.fields), [i]
        for other in [pair for pair in groups if pair[0] & fields]:
            groups.remove(other)
            fields |= other[0]
            members = [*other[1], *members]
        groups.append((fields, members))
    return [sorted(members) for _, members in groups]


def crossed(parts: Sequence[Atoms], most: int) -> list[tuple[Atoms, list[int]]]:
    """Atoms of families, crossed if the product is small; each with the indexes of its parts.

    Args:
        most: most atoms of a product.
    """
    crossings: list[tuple[Atoms, list[int]]] = []
    for i, part in sorted(enumerate(parts), key=lambda pair: len(pair[1])):
        if crossings and len(crossings[-1][0]) * len(part) <= most:
            atoms, members = crossings[-1]
            crossings[-1] = (atoms.times(part), [*members, i])
        else:
            crossings.append((part, [i]))
    return crossings


def atoms_of(cuts: Sequence[Cut], batch: Batch) -> Atoms:
    """The atoms of a batch.

    Args:
        cuts: slices by fields of COLUMNS or by labels.
    """
    fields = sorted({field for cut in cuts for field in cut.fields})
    labels = [field for field in fields if field.startswith(LABEL)]
    parts = [_labelled(batch, labels)] if labels else []
    parts += [_numbered(batch, field, cuts) for field in fields if field not in labels]
    # rows and columns first: their codes need no work per token
    parts.sort(key=lambda part: math.prod(part.code_BT.shape))
    columns: dict[str, Array] = {}
    code_BT, size = arrays.moved(np.zeros((1, 1), dtype=np.int32), batch.mask_BT), 1
    for part in parts:
        code_BT = code_BT * part.size + arrays.moved(part.code_BT, batch.mask_BT)
        at = np.arange(size * part.size)
        columns = {name: column[at // part.size] for name, column in columns.items()}
        columns |= {name: column[at % part.size] for name, column in part.columns.items()}
        size *= part.size
        if size > _MOST:
            code_BT, size, columns = _closed_up(code_BT, size, columns)
    inside, maybe = (
        np.array([cut.mask(columns, size, unknown=unknown) for cut in cuts], dtype=bool)
        for unknown in (False, True)
    )
    # codes in the same slices are one atom
    sides = np.vstack([inside.reshape(-1, size), maybe.reshape(-1, size)])
    apart, atom_S = np.unique(sides, axis=1, return_inverse=True)
    atom_BT = arrays.take(atom_S.astype(np.int32).reshape(-1), code_BT)
    return Atoms(
        arrays.spread(atom_BT, batch.mask_BT.shape), apart[: len(cuts)], apart[len(cuts) :]
    )


@dataclass(frozen=True)
class _Part:
    """One field: a code of each token, [B, 1], [1, T] or [B, T], and the meaning of each code."""

    code_BT: Array
    size: int
    columns: dict[str, Array]


def _closed_up(
    code_BT: Array, size: int, columns: dict[str, Array]
) -> tuple[Array, int, dict[str, Array]]:
    """Codes without the unused ones."""
    there = np.flatnonzero(arrays.count(code_BT, size))
    dense = np.zeros(size, dtype=np.int32)
    dense[there] = np.arange(len(there))
    code_BT = arrays.take(dense, code_BT)
    return code_BT, len(there), {name: column[there] for name, column in columns.items()}


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
    stand_ins = _stand_ins(edges)
    size = len(stand_ins)
    if field in _FROM_START and batch.one_turn:
        code_BT, size = _shifted(_table(batch, edges), batch), size - 1
    else:
        values = COLUMNS[field](batch)
        if values is None:
            code_BT = np.full((1, 1), size - 1, dtype=np.int32)
        elif arrays.is_whole(values):  # never NaN, the last class
            code_BT, size = arrays.take(_table(batch, edges), values), size - 1
        else:
            code_BT = arrays.classes(values, edges)
    columns = {field: stand_ins[:size]}
    if min(code_BT.shape, default=0) == 1:
        code_BT, size, columns = _closed_up(code_BT, size, columns)
    return _Part(code_BT, size, columns)


def _table(batch: Batch, edges: Array) -> Array:
    """The class of each possible count of columns."""
    return arrays.classes(np.arange(batch.mask_BT.shape[1] + 1), edges)


def _edges(field: str, cuts: Iterable[Cut]) -> Array:
    """Every number that a slice compares the field with, ascending."""
    numbers: set[float] = set()
    for term in (term for cut in cuts for term in cut.terms if term.field == field):
        if term.op in ("in", "not_in"):
            numbers.update(float(value) for value in term.value)
        elif term.op != "exists":
            numbers.add(float(term.value))
    return np.array(sorted(numbers))


def _stand_ins(edges: Array) -> Array:
    """A representative of each class: below the first edge, on it, up to the next, ..., NaN."""
    if not len(edges):
        return np.array([0.0, np.nan])
    ends = np.r_[edges[0] - 1, edges, edges[-1] + 1]
    numbers = np.empty(2 * len(edges) + 2)
    numbers[0:-1:2] = (ends[:-1] + ends[1:]) / 2
    numbers[1:-1:2] = edges
    numbers[-1] = np.nan
    return numbers


def _shifted(table: Array, batch: Batch) -> Array:
    """A table read from the first trained column of each row on, [B, T] or [1, T].

    For numbers that count the columns of one turn, rows are copied as a whole.
    """
    width = batch.mask_BT.shape[1]
    start_B = batch.start_B[batch.start_B < width]
    if not len(start_B) or (start_B == start_B[0]).all():
        at_T = np.arange(width) - (start_B[0] if len(start_B) else 0)
        return table.take(at_T, mode="clip")[None]
    padded = np.concatenate([np.repeat(table[:1], width), table])
    if arrays.is_tensor(batch.mask_BT):
        first_B, column_T = (
            arrays.moved(at, batch.mask_BT) for at in (width - batch.start_B, np.arange(width))
        )
        return arrays.take(padded, first_B[:, None] + column_T)
    return np.lib.stride_tricks.sliding_window_view(padded, width)[width - batch.start_B]


def _before(batch: Batch) -> Array:
    """Number of earlier trained tokens of the sequence, [B, T]; valid for trained tokens."""
    return arrays.running_count(batch.mask_BT) - 1


def _starts(batch: Batch) -> Array:
    """Mask of the beginnings of turns, [B, T]."""
    starts_BT = batch.mask_BT & True  # a copy
    starts_BT[:, 1:] &= ~batch.mask_BT[:, :-1]
    return starts_BT


def _turn(batch: Batch) -> Array:
    if batch.one_turn:
        return np.ones((1, 1), dtype=np.int32)
    return arrays.running_count(_starts(batch))


def _in_turn(batch: Batch) -> Array:
    before_BT = _before(batch)
    return before_BT - arrays.running_most(before_BT * _starts(batch))


# in a sequence of one turn, these count its columns from the first trained one
_FROM_START = ("context.position", "context.turn_position")
# the fields of a trainer's tokens, [B, 1], [1, T] or [B, T]; None: missing in this step
COLUMNS: dict[str, Callable[[Batch], Array | None]] = {
    "request.prompt_tokens": lambda batch: batch.start_B.astype(np.int32)[:, None],
    "context.position": _before,
    "context.length": lambda batch: np.arange(batch.mask_BT.shape[1], dtype=np.int32)[None],
    "context.turn": _turn,
    "context.turn_position": _in_turn,
    "outcome.staleness": lambda batch: batch.staleness_BT,
}
