# Atoms: tokens grouped by their slices.
#
# A slice compares a token's numbers with edges, so only the intervals between edges matter.  Tokens
# in the same slices form one atom; slices are evaluated on representative numbers of each atom.

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from servanda.judgement.slices.rules import LABEL, Cut
from servanda.theory.stats import tally as arrays

Array = NDArray[Any]

_MOST = 4096  # codes before unused codes are removed


class TokenFields(Protocol):
    """The fields of some tokens, as codes: of padded sequences [B, T], or of tokens [N]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an array with one number per token."""
        ...

    def labels(self, names: Sequence[str]) -> Sequence[tuple[str, ...]]:
        """The texts of each sequence under some labels; "" where it has none."""
        ...

    def of_sequences(self, code_S: Array) -> Array:
        """Codes of sequences as codes of their tokens; it broadcasts to `shape`."""
        ...

    def codes(self, field: str, classes: Classes) -> tuple[Array, int]:
        """The class of each token's number, which broadcasts to `shape`; and how many there are."""
        ...


@dataclass(frozen=True)
class Classes:
    """The classes of a number: below the first edge, on it, up to the next, ...; unknown is last.

    Args:
        edges: the numbers that a slice compares a field with, ascending.
    """

    edges: Array

    @classmethod
    def of(cls, field: str, cuts: Iterable[Cut]) -> Classes:
        numbers: set[float] = set()
        for term in (term for cut in cuts for term in cut.terms if term.field == field):
            if term.op in ("in", "not_in"):
                numbers.update(float(value) for value in term.value)
            elif term.op != "exists":
                numbers.add(float(term.value))
        return cls(np.array(sorted(numbers)))

    @cached_property
    def stand_ins(self) -> Array:
        """A representative of each class."""
        edges = self.edges
        if not len(edges):
            return np.array([0.0, np.nan])
        ends = np.r_[edges[0] - 1, edges, edges[-1] + 1]
        numbers = np.empty(2 * len(edges) + 2)
        numbers[0:-1:2] = (ends[:-1] + ends[1:]) / 2
        numbers[1:-1:2] = edges
        numbers[-1] = np.nan
        return numbers

    def __len__(self) -> int:
        return len(self.stand_ins)

    def of_values(self, values: Array) -> Array:
        """The class of each number."""
        return arrays.classes(values, self.edges)

    def of_counts(self, most: int) -> Array:
        """The class of each whole number 0..most, to look up counts in."""
        return self.of_values(np.arange(most + 1))


@dataclass(frozen=True)
class Atoms:
    """The atom of each token, and the slices of each atom, in the order of the slices.

    Args:
        atom: index of each token's atom, of the shape of the fields.
        inside_CA: whether an atom is in a slice.
        beside_CA: whether it is in the contexts of a slice of outcomes, with another outcome.
        maybe_CA: whether it is in a slice or in its contexts, if unknown numbers say so.
    """

    atom: Array
    inside_CA: Array
    beside_CA: Array
    maybe_CA: Array

    def __len__(self) -> int:
        return self.inside_CA.shape[1]

    def times(self, other: Atoms) -> Atoms:
        """The product of two sets of atoms."""
        mine, theirs = len(self), len(other)
        code = self.atom * theirs + other.atom
        sides = (
            np.vstack([np.repeat(of, theirs, axis=1), np.tile(more, (1, mine))])
            for of, more in (
                (self.inside_CA, other.inside_CA),
                (self.beside_CA, other.beside_CA),
                (self.maybe_CA, other.maybe_CA),
            )
        )
        return Atoms(code, *sides)

    @property
    def bits_A(self) -> list[int]:
        """The slices of each atom as one number: bit i for slice i."""
        rows = np.packbits(self.inside_CA.T, axis=1, bitorder="little")
        return [int.from_bytes(row.tobytes(), "little") for row in rows]


@dataclass(frozen=True)
class SliceCodes:
    """The slices of tokens by a code of each token.

    Args:
        names: of the slices, [C].
        code_N: code of each token; inside_CA: whether the tokens of a code are in a slice.
    """

    names: tuple[str, ...]
    code_N: Array
    inside_CA: Array

    @classmethod
    def of(cls, masks: Mapping[str, Array], n: int) -> SliceCodes:
        """From the tokens of each slice, [N] each."""
        if not masks:
            return cls((), np.zeros(n, dtype=np.int64), np.zeros((0, 1), dtype=bool))
        inside_CA, code_N = np.unique(np.stack([*masks.values()]), axis=1, return_inverse=True)
        return cls((*masks,), code_N.reshape(-1), inside_CA)


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


def atoms_of(cuts: Sequence[Cut], fields: TokenFields) -> Atoms:
    """The atoms of some tokens.

    Args:
        cuts: slices by labels and by fields with numbers.
    """
    names = sorted({field for cut in cuts for field in cut.fields})
    labels = [field for field in names if field.startswith(LABEL)]
    parts = [_labelled(fields, labels)] if labels else []
    parts += [_numbered(fields, field, cuts) for field in names if field not in labels]
    # rows and columns first: their codes need no work per token
    parts.sort(key=lambda part: math.prod(part.code.shape))
    columns: dict[str, Array] = {}
    code, size = np.zeros((1,) * len(fields.shape), dtype=np.int32), 1
    if parts:  # maybe on a device
        code = arrays.moved(code, parts[0].code)
    for part in parts:
        code = code * part.size + part.code
        at = np.arange(size * part.size)
        columns = {name: column[at // part.size] for name, column in columns.items()}
        columns |= {name: column[at % part.size] for name, column in part.columns.items()}
        size *= part.size
        if size > _MOST:
            code, size, columns = _closed_up(code, size, columns)
    sides = np.vstack(_sides(cuts, columns, size))
    # codes in the same slices are one atom
    apart, atom_S = np.unique(sides, axis=1, return_inverse=True)
    atom = arrays.take(atom_S.astype(np.int32).reshape(-1), code)
    return Atoms(arrays.spread(atom, fields.shape), *apart.reshape(3, len(cuts), apart.shape[1]))


def _sides(cuts: Sequence[Cut], columns: dict[str, Array], size: int) -> tuple[Array, ...]:
    """inside, beside and maybe of each code, [C, size] each: see `Atoms`."""
    inside, beside, maybe = (np.zeros((len(cuts), size), dtype=bool) for _ in range(3))
    for c, cut in enumerate(cuts):
        inside[c] = cut.mask(columns, size)
        maybe[c] = cut.given.mask(columns, size, unknown=True)
        if cut.outcome:
            unknown = cut.mask(columns, size, unknown=True) & ~inside[c]
            beside[c] = cut.given.mask(columns, size) & ~inside[c] & ~unknown
    return inside, beside, maybe


@dataclass(frozen=True)
class _Part:
    """One field: a code of each token, and the meaning of each code."""

    code: Array
    size: int
    columns: dict[str, Array]


def _closed_up(
    code: Array, size: int, columns: dict[str, Array]
) -> tuple[Array, int, dict[str, Array]]:
    """Codes without the unused ones."""
    there = np.flatnonzero(arrays.count(code, size))
    dense = np.zeros(size, dtype=np.int32)
    dense[there] = np.arange(len(there))
    code = arrays.take(dense, code)
    return code, len(there), {name: column[there] for name, column in columns.items()}


def _labelled(fields: TokenFields, names: Sequence[str]) -> _Part:
    rows = fields.labels([name.removeprefix(LABEL) for name in names])
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(rows or [("",) * len(names)]))}
    code_S = np.array([kinds[row] for row in rows], dtype=np.int32)
    columns = {}
    for at, name in enumerate(names):
        column = np.empty(len(kinds), dtype=object)
        column[:] = [kind[at] or None for kind in kinds]  # "" is no value
        columns[name] = column
    return _Part(fields.of_sequences(code_S), len(kinds), columns)


def _numbered(fields: TokenFields, field: str, cuts: Iterable[Cut]) -> _Part:
    classes = Classes.of(field, cuts)
    code, size = fields.codes(field, classes)
    columns = {field: classes.stand_ins[:size]}
    if min(code.shape, default=0) == 1:
        code, size, columns = _closed_up(code, size, columns)
    return _Part(code, size, columns)
