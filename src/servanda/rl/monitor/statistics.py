# The statistics of a step: log ratios in bins by atom -> the statistics of every cell, which are
# summed over ranks.  Each token is read once: a slice's histogram is the sum of its atoms'.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.judgement.clauses.base import Cell
from servanda.judgement.clauses.loss_checks import LossSums
from servanda.judgement.clauses.token_counts import CellStatistics, SliceCounts
from servanda.judgement.slices.atoms import atoms_of
from servanda.judgement.slices.rules import Cut, Term
from servanda.rl.dumps.checks.base import HEAD_TOKENS
from servanda.rl.dumps.checks.pairs import GROSS_NATS
from servanda.rl.monitor import device_batch, loss
from servanda.rl.monitor.batch import Batch, BatchFields
from servanda.rl.monitor.device_batch import DeviceBatch
from servanda.rl.trend.changes import StepScalars
from servanda.theory.bounds.importance_weights import Psi
from servanda.theory.divergence.precision import captured, errors
from servanda.theory.stats.bets import Coherence
from servanda.theory.stats.histogram import edges
from servanda.theory.stats.tally import hosted, is_tensor

Array = NDArray[Any]

_FAR_NATS = -100.0  # below any sampled logprob
_HEADS = Cut(
    "heads",
    (Term("context.turn", "gte", 2), Term("context.turn_position", "lt", HEAD_TOKENS)),
)
_LOOKED_AT = 4096  # logprobs examined for the precision: a coarser guess only weakens a check


@dataclass(frozen=True)
class BatchStatistics:
    """The statistics of one rank's tokens.

    Args:
        statistics: statistics of each cell of the plan; None if a step does not provide it.
        usable: number of tokens with both logprobs.
        scalars: sums that are followed over the run.
        drift_B: sum of |log ratio| over the tokens of each sequence with a value, nats;
            known_B: their number.
        loss: what the loss used; None if it is not recorded.
        gross: evidence that the mean weight is above 1 by more than a thousandth, without the
            first tokens of later turns.
    """

    statistics: tuple[Any, ...]
    usable: int
    scalars: StepScalars
    drift_B: Array
    known_B: Array
    loss: LossSums | None
    gross: Coherence


class StepStatistics:
    """Computes statistics of batches; the values of bins under each clause are computed once.

    Args:
        cells: cells of the plan.
        cuts: every slice of a cell except the whole.
        psi: the declared weighting.
    """

    def __init__(self, cells: Sequence[Cell], cuts: Sequence[Cut], psi: Psi) -> None:
        self._cells, self._cuts = CellStatistics(cells, cuts), cuts
        self._all, self._psi = cells, psi
        self._least_K = edges()[0]

    def of(self, batch: Batch) -> BatchStatistics:
        counts = SliceCounts(self._cuts)
        logp = batch.logp_train_BT, batch.logp_infer_BT
        counts.add(BatchFields(batch), *logp, batch.mask_BT)
        error = _rounding(batch)
        statistics = self._cells.of(counts, error=error)
        whole = loss.sums_of(batch, self._psi) if loss.recorded(batch) else None
        empty = LossSums(tokens=batch.tokens) if whole is None else whole
        for i, sums in loss.of_cells(self._all, batch, empty, self._psi).items():
            statistics[i] = sums
        by_sequence = _by_sequence(batch, all_usable=not counts.lost_C[0])
        scalars = StepScalars.of(counts.count_CK[0], int(counts.lost_C[0]))
        count_K = counts.count_CK[0]
        if not batch.one_turn:
            heads = SliceCounts((_HEADS,))
            heads.add(BatchFields(batch), *logp, batch.mask_BT)
            count_K = count_K - heads.count_CK[1]
        used = np.flatnonzero(count_K)
        gross = Coherence.of(self._least_K[used], 0, error + GROSS_NATS, count_K[used])
        return BatchStatistics(
            tuple(statistics), scalars.usable, scalars, *by_sequence, whole, gross
        )


def overlaps(cuts: Sequence[Cut], batch: Batch) -> tuple[tuple[int, int, float], ...]:
    """The slice combinations of usable tokens: bits, count, and the sum of (1 - w)^+."""
    batch = batch.on_host
    atoms = atoms_of(cuts, BatchFields(batch))
    usable_N = usable(batch)[batch.mask_BT]
    atom_U = atoms.atom[batch.mask_BT][usable_N]
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
