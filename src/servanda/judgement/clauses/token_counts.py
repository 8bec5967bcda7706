# Token counts: log ratios in bins by slice, and the statistics of cells from these counts alone.
#
# One path from columns to certificates for a trainer's steps and for dumps.  Each token is read
# once: it is counted under its atom, and a slice's histogram is the sum of its atoms'.
#
# Axes: C rows (the whole, then each slice), K bins, A atoms.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.judgement.clauses.base import Cell
from servanda.judgement.clauses.gradient import Gap
from servanda.judgement.clauses.guards import Coherent, Counts, UsableRatio
from servanda.judgement.clauses.statistical import Certificate
from servanda.judgement.slices.atoms import Atoms, TokenFields, atoms_of, crossed, families
from servanda.judgement.slices.rules import LABEL, Cut, field_of
from servanda.theory.bounds.importance_weights import weight_gap
from servanda.theory.divergence.base import sampled
from servanda.theory.stats.bets import Coherence
from servanda.theory.stats.histogram import BINS, ZERO, Binned, edges, ends
from servanda.theory.stats.tally import tally_of

Array = NDArray[Any]

_MOST_ATOMS = 64  # most atoms of one tally: its counts then have 16 MB
_TOKENS_AN_ATOM = 1 << 15  # with fewer tokens, a larger tally costs more than a second one


class SliceCounts:
    """Counts of tokens of the whole, row 0, and of each slice; filled part by part.

    Args:
        cuts: the slices, without the whole.

    Attributes:
        count_CK: tokens by the bin of their log ratio.
        beside_C: tokens in the contexts of a slice of outcomes, with another outcome.
        lost_C: tokens of the slice without a ratio.
        missing_C: tokens without a ratio, and those of which it is not known whether they count.
    """

    def __init__(self, cuts: Sequence[Cut] = ()) -> None:
        size = len(cuts) + 1
        self._cuts = cuts
        self._families = families(cuts)
        self.count_CK = np.zeros((size, BINS), dtype=np.int64)
        self.beside_C, self.lost_C, self.missing_C = (
            np.zeros(size, dtype=np.int64) for _ in range(3)
        )

    def add(
        self, fields: TokenFields, logp_train: ArrayLike, logp_infer: ArrayLike, mask: Array
    ) -> None:
        """Count the tokens of a mask.

        Args:
            logp_train, logp_infer, mask: of the shape of the fields; see `tally`.
        """
        parts = [atoms_of([self._cuts[i] for i in of], fields) for of in self._families]
        most = min(_MOST_ATOMS, math.prod(fields.shape) // _TOKENS_AN_ATOM)
        for n, (atoms, members) in enumerate(crossed(parts, most) or [(atoms_of([], fields), [])]):
            slices = [i + 1 for m in members for i in self._families[m]]
            count_AK = tally_of(logp_train, logp_infer, mask, atoms.atom, len(atoms))
            self._add(count_AK, atoms, slices, whole=n == 0)

    def _add(self, count_AK: Array, atoms: Atoms, slices: Sequence[int], *, whole: bool) -> None:
        used = np.flatnonzero(count_AK[:, :BINS].any(axis=0))
        used_AK, lost_A = count_AK[:, used].astype(np.float64), count_AK[:, BINS]
        n_A = used_AK.sum(axis=1).astype(np.int64)
        if whole:
            self.count_CK[0, used] += used_AK.sum(axis=0).astype(np.int64)
            self.lost_C[0] += lost_A.sum()
            self.missing_C[0] += lost_A.sum()
        if not slices:
            return
        # whole numbers, far below 2^53
        inside_CA = atoms.inside_CA.astype(np.float64)
        rows = np.array(slices)
        self.count_CK[rows[:, None], used] += (inside_CA @ used_AK).astype(np.int64)
        self.beside_C[rows] += atoms.beside_CA @ n_A
        self.lost_C[rows] += atoms.inside_CA @ lost_A
        known_CA = atoms.inside_CA | atoms.beside_CA
        self.missing_C[rows] += atoms.maybe_CA @ (n_A + lost_A) - known_CA @ n_A


class CellStatistics:
    """The statistics of cells from counts; the values of bins under each clause are computed once.

    Args:
        cells: cells of a plan; those that counts do not answer have None.
        cuts: every slice of an answered cell except the whole.
        contributions: whether slices of outcomes are answered.
    """

    def __init__(
        self, cells: Sequence[Cell], cuts: Sequence[Cut], *, contributions: bool = False
    ) -> None:
        row = {cut: i + 1 for i, cut in enumerate(cuts)}  # the whole is row 0
        answered = [is_answered(cell, contributions=contributions) for cell in cells]
        self._cells = [
            (i, cell, row.get(cell.cut, 0)) for i, cell in enumerate(cells) if answered[i]
        ]
        self.answered = answered
        alike: dict[Any, list[tuple[int, int]]] = {}
        for i, cell, c in self._cells:
            if isinstance(cell.kind, Certificate):
                # those that share x: all but limit and slice
                feed = cell.kind.feed
                same = (cell.clause.metric, feed.scale, feed.low, feed.threshold)
                key = cell.place if isinstance(cell.kind, Gap) else same
                alike.setdefault(key, []).append((i, c))
        self._binned = [(Binned(*_ends(cells[of[0][0]])), of) for of in alike.values()]
        self._least_K = edges()[0]

    def of(
        self, counts: SliceCounts, *, error: float = 0.0, lower: SliceCounts | None = None
    ) -> list[Any]:
        """The statistics of each cell; None for one that counts do not answer.

        Args:
            error: rounding error bound of every log ratio, nats.
            lower: the counts with each log ratio reduced by its own error, for coherence; default
                `counts`.
        """
        statistics: list[Any] = [None] * len(self.answered)
        for binned, of in self._binned:
            rows = [c for _, c in of]
            count_CK = counts.count_CK[rows]
            count_CK[:, ZERO] += counts.beside_C[rows]  # their x is that of equal logprobs
            moments = binned.moments(count_CK, counts.missing_C[rows].tolist())
            for (i, _), moment in zip(of, moments, strict=True):
                statistics[i] = moment
        usable_C = counts.count_CK.sum(axis=1)
        for i, cell, c in self._cells:
            lost = int(counts.lost_C[c])
            if isinstance(cell.kind, UsableRatio):
                usable = int(usable_C[c])
                statistics[i] = Counts(usable, usable + lost)
            elif isinstance(cell.kind, Coherent):
                count_K = (lower or counts).count_CK[c]
                used = np.flatnonzero(count_K)
                statistics[i] = Coherence.of(self._least_K[used], lost, error, count_K[used])
        return statistics


def is_answered(cell: Cell, *, contributions: bool = False) -> bool:
    """Whether counts of log ratios suffice for a cell.

    Args:
        contributions: whether slices of outcomes are answered.
    """
    numbers = (f for f in cell.cut.fields if not f.startswith(LABEL))
    if any((field := field_of(name)) is None or field.is_text for name in numbers):
        return False
    if cell.clause.metric == "tv_contribution" and cell.kind.certificate:
        return contributions
    beside = cell.kind.reads in ("loss", "responses", "tails")
    return not beside and not cell.kind.not_in_a_step(cell.clause)


def x_of(cell: Cell) -> Callable[[Array], Array]:
    """The map from log ratios, nats, to the x in [0, 1] whose mean the cell limits."""
    kind = cell.kind
    assert isinstance(kind, Certificate)
    if isinstance(kind, Gap):
        return lambda ratio_N: kind.feed.x(kind.factor * weight_gap(ratio_N, kind.psi))
    metric = cell.clause.metric
    return lambda ratio_N: kind.feed.x(
        sampled(metric, {"logp_train": ratio_N, "logp_infer": np.zeros(len(ratio_N))})
    )


def _ends(cell: Cell) -> tuple[Array, Array]:
    """The smallest and the largest x of each bin."""
    assert isinstance(cell.kind, Certificate)
    bends: list[float] = []
    if isinstance(cell.kind, Gap):
        # x need not be monotone in a bin at a kink of psi; no bin edge is at weight 0
        bends = [math.log(at) for at in cell.kind.psi.bends if at > 0]
    least_K, most_K = ends(x_of(cell), bends)
    if cell.kind.feed.threshold is not None:  # x is 0 or 1
        return least_K.round(), most_K.round()
    return least_K, most_K
