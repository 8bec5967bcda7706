# Candidates: the conditions on one field that may cut out a slice, with the sums of their tokens.
#
# Axes: K tokens, C conditions of one kind.

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from servanda.judgement.causes.token_table import Array, TokenTable
from servanda.judgement.slices.rules import LABEL, Term, modulo

_MODULI: Mapping[str, tuple[int, ...]] = {
    "request.prompt_tokens": (16, 32, 64, 128, 256, 512),
    "context.length": (16, 32, 64, 128, 256, 512),
    "context.position": (16, 32, 64, 128),
    "context.row": (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 64),
    "outcome.token_id": (2, 4, 8, 16, 64, 128),
}
_POINTS = {  # a single value of these is a slice
    *("context.position", "context.turn", "context.turn_position", "outcome.from_end"),
    *("outcome.token_id", "outcome.staleness", "request.prompt_tokens", "context.length"),
}
# of fields that cut out the same tokens the first is named: a tiny difference in the score
PREFERRED = (
    *("context.turn", "request.prompt_tokens", "context.position", "context.turn_position"),
    *("context.length", "outcome.token_id", "outcome.staleness", "context.row"),
    "outcome.from_end",
)
_LABELS = 512  # most texts of a label; with more it is an identifier
_LEAST = 12  # tokens of a slice in the half that chooses

Conditions = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


@dataclass(frozen=True)
class Candidate:
    """Conditions on one or more fields, in the order in which they were found."""

    terms: Conditions
    kind: str

    @property
    def family(self) -> tuple[str, str]:
        return self.terms[0][0], self.kind

    @property
    def handicap(self) -> float:
        """A factor just below 1 that decides between fields which cut out the same tokens."""
        bases = [modulo(name)[0] for name, _ in self.terms]
        places = (1 + PREFERRED.index(base) for base in bases if base in PREFERRED)
        return 1 - 1e-5 * sum(places)

    @property
    def match(self) -> dict[str, dict[str, Any]]:
        """As a contract writes it."""
        return {
            field: {op: [*v] if isinstance(v, tuple) else v for op, v in conditions}
            for field, conditions in self.terms
        }

    def with_(self, other: Candidate) -> Candidate:
        return Candidate((*self.terms, *other.terms), self.kind)

    def mask(self, table: TokenTable) -> Array:
        return mask_of(self.match, table)


def mask_of(match: Mapping[str, Mapping[str, Any]], table: TokenTable) -> Array:
    """The tokens that satisfy the conditions of a slice, [K]."""
    inside_K = np.ones(len(table), dtype=bool)
    for field, conditions in match.items():
        column_K = _column(table, field)
        for op, value in conditions.items():
            inside_K &= Term(field, op, value).mask(column_K)
    return inside_K


def _column(table: TokenTable, field: str) -> Array:
    if field.startswith(LABEL):
        texts, code_K = table.labels.get(field.removeprefix(LABEL), (("",), None))
        if code_K is None:
            return np.full(len(table), None, dtype=object)
        return np.array([text or None for text in texts], dtype=object)[code_K]
    base, modulus = modulo(field)
    column_K = table.numbers.get(base, np.full(len(table), np.nan))
    return column_K if modulus is None else column_K % modulus


class Conditioned(NamedTuple):
    """Conditions of one kind on one field.

    Args:
        n, x, b: tokens of each, and the sums of their gap and of their expected gap, [C].
        candidate: the condition of an index.
    """

    n: Array
    x: Array
    b: Array
    candidate: Callable[[int], Candidate]


def candidates(
    table: TokenTable, of_K: Array, base_K: Array, taken: Collection[str]
) -> Iterator[Conditioned]:
    """The conditions on some tokens.

    Args:
        taken: fields that have a condition already.
    """
    x_M, b_M = table.gap_K[of_K], base_K[of_K]
    for name, (texts, code_K) in table.labels.items():
        if 1 < len(texts) <= _LABELS and LABEL + name not in taken:
            yield from _labelled(name, texts, code_K[of_K], x_M, b_M)
    bases = {modulo(field)[0] for field in taken}
    for name, column_K in table.numbers.items():
        if name in bases:
            continue
        value_M = column_K[of_K]
        known_M = ~np.isnan(value_M)
        if not known_M.any():
            continue
        value_M, x_U, b_U = value_M[known_M].astype(np.int64), x_M[known_M], b_M[known_M]
        value, code_U = np.unique(value_M, return_inverse=True)
        if len(value) < 2:
            continue
        sums = _sums(code_U.reshape(-1), len(value), x_U, b_U)
        yield from _edges(name, value, sums)
        if name in _POINTS:
            yield _points(name, value, sums)
        for modulus in _MODULI.get(name, ()):
            if modulus < int(value[-1] - value[0]):
                yield _residues(name, modulus, value, sums)


def _sums(code_U: Array, size: int, x_U: Array, b_U: Array) -> tuple[Array, Array, Array]:
    n = np.bincount(code_U, minlength=size).astype(np.float64)
    return n, np.bincount(code_U, x_U, minlength=size), np.bincount(code_U, b_U, minlength=size)


def _enough(n: Array, x: Array) -> Array:
    """Sums of slices that are too small do not count."""
    return np.where(n >= _LEAST, x, 0.0)


def _labelled(
    name: str, texts: tuple[str, ...], code_M: Array, x_M: Array, b_M: Array
) -> Iterator[Conditioned]:
    n, x, b = _sums(code_M, len(texts), x_M, b_M)
    n[0] = x[0] = 0.0  # "" is no value
    b[0] = 1.0
    if n.any():
        yield Conditioned(
            *(_enough(n, n), _enough(n, x), b),
            lambda i: Candidate(((LABEL + name, (("in", (texts[i],)),)),), "label"),
        )


def _edges(name: str, value: Array, sums: tuple[Array, ...]) -> Iterator[Conditioned]:
    below = [np.cumsum(s)[:-1] for s in sums]
    above = [s.sum() - c for s, c in zip(sums, below, strict=True)]
    for op, (n, x, b) in (("lt", below), ("gte", above)):

        def at(i: int, op: str = op) -> Candidate:
            edge = round_between(int(value[i]) + 1, int(value[i + 1]))
            return Candidate(((name, ((op, edge),)),), op)

        yield Conditioned(_enough(n, n), _enough(n, x), b, at)


def _points(name: str, value: Array, sums: tuple[Array, ...]) -> Conditioned:
    n, x, b = sums
    return Conditioned(
        *(_enough(n, n), _enough(n, x), b),
        lambda i: Candidate(((name, (("in", (int(value[i]),)),)),), "point"),
    )


def _residues(name: str, modulus: int, value: Array, sums: tuple[Array, ...]) -> Conditioned:
    rest = value % modulus
    n, x, b = (np.bincount(rest, s, minlength=modulus) for s in sums)
    field = f"{name} % {modulus}"
    return Conditioned(
        *(_enough(n, n), _enough(n, x), b),
        lambda i: Candidate(((field, (("in", (i,)),)),), f"modulo {modulus}"),
    )


def round_between(low: int, high: int) -> int:
    """The roundest number of low..high: a power of two, or one with the most zeros at its end.

    >>> round_between(150_991, 151_003), round_between(250, 300), round_between(7, 7)
    (151000, 256, 7)
    """
    power = 1 << max(high, 1).bit_length() - 1
    if low <= power and power > 4:
        return power
    unit = 10 ** int(math.log10(max(high, 1)))
    while unit > 1:
        if (rounded := -(-low // unit) * unit) <= high:
            return rounded
        unit //= 10
    return low
