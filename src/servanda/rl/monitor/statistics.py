# The statistics of a step: log ratios in bins by atom -> the statistics of every cell, which are
# summed over ranks.  Each token is read once: a slice's histogram is the sum of its atoms'.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.judgement.clauses.base import Cell
from servanda.judgement.clauses.gradient import Gap
from servanda.judgement.clauses.guards import Coherent, Counts, UsableRatio
from servanda.judgement.clauses.statistical import Certificate, Grown
from servanda.judgement.slices.rules import Cut
from servanda.rl.monitor import device_batch
from servanda.rl.monitor.batch import Batch
from servanda.rl.monitor.device_arrays import hosted, is_tensor
from servanda.rl.monitor.device_batch import DeviceBatch
from servanda.rl.monitor.device_histogram import tally
from servanda.rl.monitor.slice_atoms import atoms_of, crossed, families
from servanda.theory.bounds.importance_weights import Psi, weight_gap
from servanda.theory.divergence.base import sampled
from servanda.theory.divergence.precision import captured, errors
from servanda.theory.stats.coherence import Coherence
from servanda.theory.stats.histogram import BINS, Binned, edges, ends
from servanda.theory.stats.log_moment import LogMoment

Array = NDArray[Any]

# divergences of a sampled token that depend only on log p - log q
RATIO_METRICS = (
    *("tv", "k1_nats", "k2_nats", "k3_nats", "kl_reverse_nats"),
    *("chi2", "le_cam", "abs_log_ratio_nats"),
)
_FAR_NATS = -100.0  # below any sampled logprob
_LOOKED_AT = 4096  # logprobs examined for the precision: a coarser guess only weakens a check
_MOST_ATOMS = 64  # most atoms of one tally: its counts then have 16 MB
_TOKENS_AN_ATOM = 1 << 15  # with fewer tokens, a larger tally costs more than a second one


@dataclass(frozen=True)
class BatchStatistics:
    """The statistics of one rank's tokens.

    Args:
        statistics: statistics of each cell of the plan; None if a step does not provide it.
        usable: number of tokens with both logprobs.
        drift_B: sum of |log ratio| over the tokens of each sequence with a value, nats;
            known_B: their number.
    """

    statistics: tuple[Any, ...]
    usable: int
    drift_B: Array
    known_B: Array


class StepStatistics:
    """Computes statistics of batches; the values of bins under each clause are computed once.

    Args:
        cells: cells of the plan.
        cuts: every slice of a cell except the whole.
    """

    def __init__(self, cells: Sequence[Cell], cuts: Sequence[Cut]) -> None:
        self._cells, self._cuts = cells, cuts
        self._families = families(cuts)
        row = {cut: i + 1 for i, cut in enumerate(cuts)}  # the whole is row 0
        self._rows = [row.get(cell.cut, 0) for cell in cells]
        alike: dict[Any, list[int]] = {}
        for i, cell in enumerate(cells):
            if isinstance(cell.kind, Certificate):
                alike.setdefault(_same_x(cell), []).append(i)
        self._binned = [(Binned(*_ends(cells[of[0]])), of) for of in alike.values()]
        self._least_K = edges()[0]

    def of(self, batch: Batch) -> BatchStatistics:
        count_CK, lost_C, missing_C = self._counted(batch)
        usable_C = count_CK.sum(axis=1).astype(np.int64)
        used = np.flatnonzero(count_CK[0])
        statistics: list[Any] = [None] * len(self._cells)
        for binned, of in self._binned:
            rows = [self._rows[i] for i in of]
            moments = binned.moments(count_CK[rows], missing_C[rows].tolist())
            for i, moment in zip(of, moments, strict=True):
                statistics[i] = moment
        for i, (cell, c) in enumerate(zip(self._cells, self._rows, strict=True)):
            usable, lost = int(usable_C[c]), int(lost_C[c])
            if isinstance(cell.kind, UsableRatio):
                statistics[i] = Counts(usable, usable + lost)
            elif isinstance(cell.kind, Coherent):
                statistics[i] = Coherence.of(
                    self._least_K[used], lost, _rounding(batch), count_CK[c, used]
                )
        by_sequence = _by_sequence(batch, all_usable=not lost_C[0])
        return BatchStatistics(tuple(statistics), int(usable_C[0]), *by_sequence)

    def _counted(self, batch: Batch) -> tuple[Array, Array, Array]:
        """Token counts of the whole and each slice: per bin, without a ratio, and missing.

        Missing are tokens without a ratio, and tokens whose membership in the slice is unknown.
        """
        size = len(self._cuts) + 1
        count_CK = np.zeros((size, BINS))
        lost_C, missing_C = (np.zeros(size, dtype=np.int64) for _ in range(2))
        parts = [atoms_of([self._cuts[i] for i in of], batch) for of in self._families]
        most = min(_MOST_ATOMS, math.prod(batch.mask_BT.shape) // _TOKENS_AN_ATOM)
        for atoms, members in crossed(parts, most) or [(atoms_of([], batch), [])]:
            count_AK = tally(
                batch.logp_train_BT, batch.logp_infer_BT, batch.mask_BT, atoms.atom_BT, len(atoms)
            )
            rows = [0, *(i + 1 for m in members for i in self._families[m])]
            inside_CA, maybe_CA = (
                np.vstack([np.ones(len(atoms), dtype=bool), of]).astype(np.float64)
                for of in (atoms.inside_CA, atoms.maybe_CA)
            )
            n_A, lost_A = count_AK[:, :BINS].sum(axis=1), count_AK[:, BINS]
            used = np.flatnonzero(count_AK[:, :BINS].any(axis=0))
            # whole numbers, far below 2^53
            count_CK[np.array(rows)[:, None], used] = inside_CA @ count_AK[:, used]
            lost_C[rows] = inside_CA @ lost_A
            missing_C[rows] = maybe_CA @ (n_A + lost_A) - inside_CA @ n_A
        return count_CK, lost_C, missing_C


def overlaps(cuts: Sequence[Cut], batch: Batch) -> tuple[tuple[int, int, float], ...]:
    """The slice combinations of usable tokens: bits, count, and the sum of (1 - w)^+."""
    batch = batch.on_host
    atoms = atoms_of(cuts, batch)
    usable_N = usable(batch)[batch.mask_BT]
    atom_U = atoms.atom_BT[batch.mask_BT][usable_N]
    ratio_U = (
        batch.logp_train_BT[batch.mask_BT][usable_N].astype(np.float64)
        - batch.logp_infer_BT[batch.mask_BT][usable_N]
    )
    n_A = np.bincount(atom_U, minlength=len(atoms))
    tv_A = np.bincount(atom_U, -np.expm1(np.minimum(ratio_U, 0.0)), minlength=len(atoms))
    some = zip(atoms.bits_A, n_A.tolist(), tv_A.tolist(), strict=True)
    return tuple(atom for atom in some if atom[1])


def contributions(batch: Batch, psi: Psi) -> tuple[float, float, int]:
    """The excess weight in the loss, for tokens with positive and with negative advantage.

    The sums of (psi(w) - w) A over tokens whose advantage A is above and below 0, and the number
    of tokens with a usable ratio and an advantage.  A loss with the right weights has neither.
    """
    if batch.advantage_BT is None:
        return 0.0, 0.0, 0
    if isinstance(batch, DeviceBatch):
        return device_batch.contributions(batch, psi)
    advantage_BT = np.broadcast_to(batch.advantage_BT, batch.mask_BT.shape)
    used_BT = batch.mask_BT & usable(batch) & np.isfinite(advantage_BT)
    ratio_U = batch.logp_train_BT[used_BT].astype(np.float64) - batch.logp_infer_BT[used_BT]
    with np.errstate(over="ignore", invalid="ignore"):
        w_U = np.exp(ratio_U)
        gap_U = (psi.weight(w_U) - w_U) * advantage_BT[used_BT]
    above_U, below_U = advantage_BT[used_BT] > 0, advantage_BT[used_BT] < 0
    return float(gap_U[above_U].sum()), float(gap_U[below_U].sum()), len(gap_U)


def usable(batch: Batch) -> Array:
    """Mask of tokens with both logprobs, trained or not, [B, T]; NaN compares false."""
    return np.isfinite(batch.logp_infer_BT) & (batch.logp_train_BT < np.inf)


def _by_sequence(batch: Batch, *, all_usable: bool) -> tuple[Array, Array]:
    """Per sequence, the sum of |log ratio| over its usable tokens, and their number, [B]."""
    if isinstance(batch, DeviceBatch):
        return device_batch.by_sequence(batch)
    used_BT = batch.mask_BT
    with np.errstate(invalid="ignore", over="ignore"):
        drift_BT = np.abs(batch.logp_train_BT - batch.logp_infer_BT)
        if not all_usable:
            # a token without mass under train is evidence, but has no finite value
            used_BT = used_BT & usable(batch) & (drift_BT < np.inf)
        np.copyto(drift_BT, 0.0, where=~used_BT)
        sum_B = drift_BT.sum(axis=1, dtype=np.float64)
    if all_usable and not np.isfinite(sum_B).all():
        return _by_sequence(batch, all_usable=False)
    return sum_B, np.count_nonzero(used_BT, axis=1)


def _rounding(batch: Batch) -> float:
    """The rounding error bound of the log ratios of a batch, nats."""
    most = 0.0
    if not batch.tokens:
        return most
    first = int(np.argmax(batch.start_B < batch.mask_BT.shape[1]))
    for logp_BT in (batch.logp_train_BT, batch.logp_infer_BT):
        lowest = _lowest(logp_BT)
        if lowest < _FAR_NATS:  # untrained tokens, or tokens without mass
            lowest = _lowest(logp_BT, batch.mask_BT & (logp_BT > -np.inf))
        looked_at = hosted(logp_BT[first][batch.mask_BT[first]][:_LOOKED_AT])
        precision = captured(looked_at.astype(np.float64))
        most += float(errors(np.array([lowest], dtype=np.float64), precision)[0])
    return most


def _lowest(logp_BT: Any, where: Any = True) -> float:
    """The lowest number, at most 0; NaN is not one."""
    if not is_tensor(logp_BT):
        return float(np.fmin.reduce(logp_BT, axis=None, where=where, initial=0.0))
    known_BT = where & ~logp_BT.isnan()
    return float(logp_BT.masked_fill(~known_BT, 0.0).clamp(max=0.0).min())


def is_answered(cell: Cell) -> bool:
    """Whether a step's log ratios suffice for a cell."""
    return isinstance(cell.kind, Certificate | UsableRatio | Coherent)


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


def _same_x(cell: Cell) -> Any:
    """A key of cells that share x: all but limit and slice."""
    assert isinstance(cell.kind, Certificate)
    feed = cell.kind.feed
    if isinstance(cell.kind, Gap):
        return cell.place
    return (cell.clause.metric, feed.scale, feed.low, feed.threshold)


def joined(cells: Sequence[Cell], parts: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """The combined statistics of ranks, independent of their order."""
    by_cell = zip(cells, zip(*parts, strict=True), strict=True)
    return tuple(_joined(cell, statistics) for cell, statistics in by_cell)


def _joined(cell: Cell, statistics: Sequence[Any]) -> Any:
    if isinstance(cell.kind, Certificate):
        process, limit = _sum(statistics), cell.kind.feed.limit
        return Grown(process, process.below_growth(limit), process.above_growth(limit))
    if isinstance(cell.kind, Coherent):
        n, missing = (sum(getattr(s, name) for s in statistics) for name in ("n", "missing"))
        growth = zip(*(s.growth for s in statistics if s.growth), strict=True)
        return Coherence(n, tuple(map(math.fsum, growth)), missing)
    return sum(statistics, Counts()) if isinstance(cell.kind, UsableRatio) else None


def _sum(moments: Sequence[LogMoment]) -> LogMoment:
    # the total is rounded once, so that it does not depend on the order of ranks
    whole = sum(moments, LogMoment())
    return LogMoment(
        whole.n, whole.below, whole.above, math.fsum(m.total for m in moments), whole.missing
    )
