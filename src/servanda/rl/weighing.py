# Weighing a step: log ratios by atom -> the statistics of every cell, which ranks then add up.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.bounds import weight_gap
from servanda.clauses import Cell, Certificate, UsableRatio
from servanda.clauses.certificate import Grown
from servanda.clauses.gradient import Gap
from servanda.clauses.guards import Coherent, Counts
from servanda.divergence import sampled
from servanda.evidence import Weighed
from servanda.plan import Plan
from servanda.rl.atoms import Atoms
from servanda.rl.batch import Batch
from servanda.slices import Cut
from servanda.stats import Coherence, LogMoment

Array = NDArray[Any]

# divergences of a sampled token that know of it nothing but log p - log q
RATIO_METRICS = (
    "tv",
    "k1_nats",
    "k2_nats",
    "k3_nats",
    "kl_reverse_nats",
    "chi2",
    "le_cam",
    "abs_log_ratio_nats",
)


@dataclass(frozen=True)
class Weights:
    """What one rank's tokens weigh.

    Args:
        statistics: of each cell of the plan; None where a step does not tell it.
        atoms: slices of tokens, as a number -> usable tokens, and the sum of their (1 - w)^+.
        drift_B: sum of |log ratio| over the usable tokens of each sequence, nats; usable_B:
            their number.
    """

    statistics: tuple[Any, ...]
    atoms: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    drift_B: Array = field(default_factory=lambda: np.zeros(0))
    usable_B: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


def weighed(cells: Sequence[Cell], cuts: Sequence[Cut], batch: Batch, atoms: Atoms) -> Weights:
    """The statistics of a batch.

    Args:
        cuts: of which `atoms` were made: that of every cell but the whole.
    """
    every = np.ones(len(atoms), dtype=bool)
    where = {cut: (atoms.inside_CA[i], atoms.maybe_CA[i]) for i, cut in enumerate(cuts)}
    mask_BT = batch.mask_BT
    train_N = batch.logp_train_BT[mask_BT].astype(np.float64)
    infer_N = batch.logp_infer_BT[mask_BT].astype(np.float64)
    usable_N = np.isfinite(infer_N) & ~np.isnan(train_N) & (train_N < np.inf)
    atom_N = atoms.atom_BT[mask_BT]
    ratio_U, atom_U = train_N[usable_N] - infer_N[usable_N], atom_N[usable_N]
    launched_A = np.bincount(atom_N, minlength=len(atoms))
    usable_A = np.bincount(atom_U, minlength=len(atoms))

    def statistic(cell: Cell) -> Any:
        if not told(cell):
            return None
        inside_A, maybe_A = where.get(cell.cut, (every, every))
        launched, usable = int(launched_A[inside_A].sum()), int(usable_A[inside_A].sum())
        missing = int(launched_A[maybe_A].sum()) - usable
        if isinstance(cell.kind, UsableRatio):
            return Counts(usable, launched)
        ratio_M = ratio_U[inside_A[atom_U]]
        if isinstance(cell.kind, Coherent):
            return Coherence.of(ratio_M, launched - usable)
        return LogMoment.of(x_of(cell)(ratio_M), missing)

    tv_A = np.bincount(atom_U, -np.expm1(np.minimum(ratio_U, 0.0)), minlength=len(atoms))
    sums: dict[int, tuple[int, float]] = {}
    for bits, n, tv in zip(atoms.bits_A, usable_A.tolist(), tv_A.tolist(), strict=True):
        if n:
            had = sums.get(bits, (0, 0.0))
            sums[bits] = (had[0] + n, had[1] + tv)
    row_U = np.repeat(np.arange(batch.sequences), mask_BT.sum(axis=1))[usable_N]
    return Weights(
        tuple(statistic(cell) for cell in cells),
        sums,
        np.bincount(row_U, np.abs(ratio_U), minlength=batch.sequences),
        np.bincount(row_U, minlength=batch.sequences),
    )


def told(cell: Cell) -> bool:
    """Whether a step's log ratios answer a cell."""
    return isinstance(cell.kind, Certificate | UsableRatio | Coherent)


def x_of(cell: Cell) -> Callable[[Array], Array]:
    """From log ratios, nats, to the x in [0, 1] whose mean the cell limits."""
    kind = cell.kind
    assert isinstance(kind, Certificate)
    if isinstance(kind, Gap):
        return lambda ratio_N: kind.feed.x(kind.factor * weight_gap(ratio_N, kind.psi))
    metric = cell.clause.metric
    return lambda ratio_N: kind.feed.x(
        sampled(metric, {"logp_train": ratio_N, "logp_infer": np.zeros(len(ratio_N))})
    )


def joined(cells: Sequence[Cell], parts: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """The statistics of ranks as those of one; in whatever order they come."""
    found = []
    for cell, statistics in zip(cells, zip(*parts, strict=True), strict=True):
        if isinstance(cell.kind, Certificate):
            process, limit = _sum(statistics), cell.kind.feed.limit
            found.append(Grown(process, process.below_growth(limit), process.above_growth(limit)))
        elif isinstance(cell.kind, Coherent):
            growth = zip(*(s.growth for s in statistics if s.growth), strict=True)
            found.append(
                Coherence(
                    sum(s.n for s in statistics),
                    tuple(map(math.fsum, growth)),
                    sum(s.missing for s in statistics),
                )
            )
        elif isinstance(cell.kind, UsableRatio):
            found.append(sum(statistics, Counts()))
        else:
            found.append(None)
    return tuple(found)


def _sum(moments: Sequence[LogMoment]) -> LogMoment:
    # the total is rounded once, so that the order of ranks does not move its last digit
    whole = sum(moments, LogMoment())
    return LogMoment(
        whole.n, whole.below, whole.above, math.fsum(m.total for m in moments), whole.missing
    )


def as_round(
    plan: Plan, statistics: tuple[Any, ...], *, sequences: int, tokens: int, groups: int
) -> Weighed:
    """One closed round, which is all that a step's verdict speaks of."""
    noise = ((),) * len(plan.cells)  # a step has no kernel that is run against itself
    return Weighed(statistics, noise, sequences=sequences, tokens=tokens, groups=groups)
