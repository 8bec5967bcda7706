# The statistics of a step: log ratios in bins by atom -> the statistics of every cell, which are
# summed over ranks.  Each token is read once: a slice's histogram is the sum of its atoms'.

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from servanda.contract.model import WHOLE, Contract
from servanda.judgement.clauses.base import Array, Cell
from servanda.judgement.clauses.loss_checks import (
    ALL,
    LossSums,
    applied_of,
    declared_text,
)
from servanda.judgement.clauses.token_counts import CellStatistics, SliceCounts
from servanda.judgement.clauses.whole_responses import (
    MEAN,
    of_responses,
    tails_of,
)
from servanda.judgement.field_rules import RuleSums
from servanda.judgement.slices.atoms import atoms_of
from servanda.judgement.slices.rules import Cut, Term
from servanda.rl.dumps.checks.base import HEAD_TOKENS
from servanda.rl.dumps.checks.pairs import GROSS_NATS
from servanda.rl.monitor import batch as on_device
from servanda.rl.monitor.batch import Batch, BatchFields, DeviceBatch
from servanda.rl.steps.drift import ENDS
from servanda.rl.trend.changes import StepScalars, ratios_of_bins
from servanda.theory.bounds.applied_weights import error_of
from servanda.theory.bounds.importance_weights import Psi
from servanda.theory.divergence.precision import captured, errors
from servanda.theory.stats.alpha import shared
from servanda.theory.stats.bets import Coherence
from servanda.theory.stats.draft_counts import DraftCounts, fallen, moved
from servanda.theory.stats.histogram import bin_of, edges
from servanda.theory.stats.lag_split import LagSplit
from servanda.theory.stats.tails import (
    FAR,
    LEAST,
    RESPONSE_NATS,
    TOKEN_NATS,
    FarToken,
    Tails,
    counted,
)
from servanda.theory.stats.tally import hosted, is_tensor
from servanda.theory.stats.version_fit import VersionFit
from servanda.traces.rollouts import LOSS_MASK, LOSS_WEIGHT

_FAR_NATS = -100.0  # below any sampled logprob
_HEADS = Cut(
    "heads",
    (Term("context.turn", "gte", 2), Term("context.turn_position", "lt", HEAD_TOKENS)),
)
# the bins of each level on both sides; all further out are beyond it
_BEYOND = [tuple(bin_of([-nats, nats]).tolist()) for nats in TOKEN_NATS]
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
        rules: what the rules of other projects need.
    """

    statistics: tuple[Any, ...]
    usable: int
    scalars: StepScalars
    drift_B: Array
    known_B: Array
    loss: LossSums | None
    gross: Coherence
    rules: RuleSums


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
        whole = loss_sums(batch, self._psi) if loss_recorded(batch) else None
        empty = LossSums(tokens=batch.tokens) if whole is None else whole
        for i, sums in loss_of_cells(self._all, batch, empty, self._psi).items():
            statistics[i] = sums
        by_sequence = _by_sequence(batch, all_usable=not counts.lost_C[0])
        for i, cell in enumerate(self._all):
            certificate = cell.kind.certificate
            if cell.kind.reads == "responses" and certificate is not None:
                statistics[i] = certificate.of_values(_responses(cell, batch, *by_sequence))
            elif cell.kind.reads == "tails":
                statistics[i] = _tails(batch, counts.count_CK[0], *by_sequence)
        scalars = StepScalars.of(counts.count_CK[0], int(counts.lost_C[0]))
        count_K = counts.count_CK[0]
        if not batch.one_turn:
            heads = SliceCounts((_HEADS,))
            heads.add(BatchFields(batch), *logp, batch.mask_BT)
            count_K = count_K - heads.count_CK[1]
        used = np.flatnonzero(count_K)
        gross = Coherence.of(self._least_K[used], 0, error + GROSS_NATS, count_K[used])
        drift_B, known_B = by_sequence
        ratio_U = ratios_of_bins()[0][(all_U := np.flatnonzero(counts.count_CK[0]))]
        with np.errstate(invalid="ignore"):
            mean_B = np.where(known_B > 0, drift_B / known_B, 0.0)[batch.selected_B]
        lost = int(counts.lost_C[0])
        rules = RuleSums.of_counts(ratio_U, counts.count_CK[0][all_U], lost, mean_B)
        return BatchStatistics(
            tuple(statistics), scalars.usable, scalars, *by_sequence, whole, gross, rules
        )


def _responses(cell: Cell, batch: Batch, drift_B: Array, known_B: Array) -> Array:
    """The value of each judged response of a cell; NaN without a usable token."""
    judged_B = batch.start_B < batch.mask_BT.shape[1]
    if cell.cut.name != WHOLE:
        host = batch.on_host
        atoms = atoms_of([cell.cut], BatchFields(host))
        judged_B = (atoms.inside_CA[0][atoms.atom] & host.mask_BT).any(axis=1)
    if cell.clause.metric == MEAN:
        with np.errstate(invalid="ignore"):
            value_B = drift_B / known_B
    else:
        ratio_U, known_B = _usable_ratios(batch)
        value_B = of_responses(cell.clause.metric, ratio_U, known_B)
    return value_B[judged_B]


def _usable_ratios(batch: Batch) -> tuple[Array, Array]:
    """log p - log q of the usable judged tokens, by sequence, and their number, [B]."""
    host = batch.on_host
    used_BT = host.mask_BT & usable(host)
    ratio_U = host.logp_train_BT[used_BT].astype(np.float64) - host.logp_infer_BT[used_BT]
    return ratio_U, np.count_nonzero(used_BT, axis=1)


def _tails(batch: Batch, count_K: Array, drift_B: Array, known_B: Array) -> Tails:
    """The tails of a step: of tokens from their bins, so that only a step with far ones is read."""
    beyond = tuple(int(count_K[:low].sum() + count_K[high + 1 :].sum()) for low, high in _BEYOND)
    if beyond[TOKEN_NATS.index(FAR)]:
        host = batch.on_host
        used_BT = host.mask_BT & usable(host)
        at_U2 = np.argwhere(used_BT)

        def place(b: int, u: int) -> FarToken:
            t = int(at_U2[u, 1])
            train, infer = (float(of[b, t]) for of in (host.logp_train_BT, host.logp_infer_BT))
            token = -1
            if (token_BT := host.token_BT) is not None:
                token = int(token_BT[b, t + token_BT.shape[1] - used_BT.shape[1]])
            return FarToken(
                abs(train - infer), batch.weights, f"sequence {b}", t, token, train, infer
            )

        ratio_U, n_B = _usable_ratios(batch)
        size_U = np.abs(ratio_U)
        return tails_of(size_U, n_B, of_responses(MEAN, size_U, n_B), place)
    with np.errstate(invalid="ignore"):
        mean_B = drift_B[known_B >= LEAST] / known_B[known_B >= LEAST]
    odd = counted(mean_B, RESPONSE_NATS)
    return Tails(int(count_K.sum()), beyond, int(np.count_nonzero(known_B)), odd)


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
        return on_device.contributions(batch, psi)
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
        return on_device.by_sequence(batch)
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


# What the loss used: the sums of a step's applied weights, for the clauses about them, the metrics
# and the step's own check against the declared weighting.


ACCEPTED = 0.001  # share of tokens with another weight than declared, as of rejected rows
LOSS_METRICS = {
    "kept_ratio": "servanda/loss/kept",
    "mean": "servanda/loss/mean_weight",
    "effective_ratio": "servanda/loss/effective",
}


def loss_recorded(batch: Batch) -> bool:
    return batch.loss_weight_BT is not None or batch.loss_mask_BT is not None


def loss_sums(batch: Batch, psi: Psi, inside_BT: Array | None = None) -> LossSums:
    """The sums over the judged tokens; nothing but their number if no weight was recorded.

    Args:
        inside_BT: restricts them to a slice.
    """
    batch = batch.on_host
    mask_BT = batch.mask_BT if inside_BT is None else batch.mask_BT & inside_BT
    train_N, infer_N = (of[mask_BT] for of in (batch.logp_train_BT, batch.logp_infer_BT))
    train_N, infer_N = train_N.astype(np.float64), infer_N.astype(np.float64)
    columns = {
        name: np.broadcast_to(of, mask_BT.shape)[mask_BT].astype(np.float64)
        for name, of in ((LOSS_WEIGHT, batch.loss_weight_BT), (LOSS_MASK, batch.loss_mask_BT))
        if of is not None
    }
    sequence_N = np.nonzero(mask_BT)[0]
    applied = applied_of(train_N, infer_N, error_of(train_N, infer_N), columns, sequence_N)
    if applied is None:
        return LossSums(tokens=len(train_N))
    return LossSums.of(applied, psi, whole=inside_BT is None)


def loss_of_cells(
    cells: Sequence[Cell], batch: Batch, whole: LossSums, psi: Psi
) -> dict[int, LossSums]:
    """The sums of each cell that checks the loss, by its index.

    Args:
        whole: the sums over all judged tokens; psi: the declared weighting.
    """
    mine = {i: cell for i, cell in enumerate(cells) if cell.kind.reads == "loss"}
    if not mine:
        return {}
    cuts = [*dict.fromkeys(c.cut for c in mine.values() if c.cut.name != WHOLE)]
    batch = batch.on_host
    atoms = atoms_of(cuts, BatchFields(batch))
    found: dict[Cut, LossSums] = {}
    for c, cut in enumerate(cuts):
        unknown_A = atoms.maybe_CA[c] & ~atoms.inside_CA[c] & ~atoms.beside_CA[c]
        unknown = int((unknown_A[atoms.atom] & batch.mask_BT).sum())
        inside_BT = atoms.inside_CA[c][atoms.atom]
        found[cut] = loss_sums(batch, psi, inside_BT) + LossSums(tokens=unknown)
    return {i: found.get(cell.cut, whole) for i, cell in mine.items()}


def loss_problems(batch: Batch) -> tuple[str, ...]:
    """The reason why the record of the loss contradicts the mask."""
    if batch.loss_mask_BT is None:
        return ()
    outside = int(((batch.loss_mask_BT > 0) & ~batch.on_host.learns_BT).sum())
    if not outside:
        return ()
    return (f"the loss used {outside:,} tokens outside of the mask: prompts, tools or padding",)


def loss_metrics(sums: LossSums, contract: Contract) -> dict[str, float]:
    """The metrics to log, only measured ones."""
    metrics = {
        name: value
        for field, name in LOSS_METRICS.items()
        if (value := getattr(sums, field)) is not None
    }
    if declared_text(contract) and sums.declared_ratio is not None:
        metrics["servanda/loss/declared"] = sums.declared_ratio
    return metrics


def limited(contract: Contract) -> bool:
    """Whether a clause limits the share of tokens with the declared weight."""
    return any(
        clause.metric == "declared_weight_ratio" for clause in contract.observability.clauses
    )


def loss_problem(sums: LossSums, contract: Contract) -> str:
    """The reason why the loss contradicts the contract; "" if it does not.

    A clause about declared weights has a limit of its own, and decides instead.
    """
    if impossible := sums.impossible():
        return impossible
    declared = declared_text(contract)
    if not declared or limited(contract) or sums.differing <= ACCEPTED * sums.compared:
        return ""
    return sums.difference(declared)


def loss_note(sums: LossSums, contract: Contract) -> str:
    """What an undeclared weighting looks like; "" if it is declared, or none is used."""
    if declared_text(contract) or not sums.fits.n:
        return ""
    named = sums.fits.best(ALL) or "unlike any that is known"
    return f"the contract declares no weighting, and the loss's weights are {named}"


# Versions: the weights that an engine claims against those that its logprobs fit.


REPLICA = "replica"  # the label that separates engines
Key = tuple[str, int]  # (replica, updates from the claimed version back to the other one)


def fits_of(batch: Batch) -> dict[Key, VersionFit]:
    """Each replica's sequences under each other version; {} without `older`."""
    if not batch.older:
        return {}
    batch = batch.on_host
    logp = {0: batch.logp_train_BT, **batch.older}
    stale_BT = 0.0 if batch.staleness_BT is None else batch.staleness_BT
    lag_BT = np.broadcast_to(stale_BT, batch.mask_BT.shape)
    claimed_BT = _under(logp, lag_BT)
    names = batch.labels.get(REPLICA, ("",) * batch.sequences)
    found: dict[Key, VersionFit] = {}
    for back in sorted({k - own for k in logp for own in logp} - {0}):
        fits_B = _loss_by_sequence(batch, claimed_BT, _under(logp, lag_BT + back), lag_BT)
        for name, fit in zip(names, fits_B, strict=True):
            if fit.n:
                found[name, back] = found.get((name, back), VersionFit()) + fit
    return found


def _under(logp: Mapping[int, Array], lag_BT: Array) -> Array:
    """The trainer's logprob of each token under the version of its lag; NaN if not given."""
    under_BT = np.full(lag_BT.shape, np.nan)
    for back, logp_BT in logp.items():
        np.copyto(under_BT, logp_BT, where=lag_BT == back)
    return under_BT


def _loss_by_sequence(
    batch: Batch, claimed_BT: Array, other_BT: Array, lag_BT: Array
) -> list[VersionFit]:
    """The comparison of each sequence, on the tokens with all three logprobs."""
    with np.errstate(invalid="ignore"):
        gaps = (np.abs(batch.logp_infer_BT - of_BT) for of_BT in (other_BT, claimed_BT))
        other_BT, claimed_BT = gaps
    used_BT = batch.mask_BT & np.isfinite(other_BT) & np.isfinite(claimed_BT)
    other_B, claimed_B = (
        np.where(used_BT, of_BT, 0.0).sum(axis=1) for of_BT in (other_BT, claimed_BT)
    )
    low_B = np.where(used_BT, lag_BT, np.inf).min(axis=1, initial=np.inf)
    high_B = np.where(used_BT, lag_BT, -np.inf).max(axis=1, initial=-np.inf)
    columns = (of.tolist() for of in (other_B, claimed_B, low_B, high_B))
    return [
        VersionFit(int(other < claimed), int(other > claimed), other, claimed, (low, high))
        for other, claimed, low, high in zip(*columns, strict=True)
    ]


def fits_joined(parts: Sequence[Mapping[Key, VersionFit]]) -> dict[Key, VersionFit]:
    """The comparisons of all ranks."""
    whole: dict[Key, VersionFit] = {}
    for part in parts:
        for key, fit in part.items():
            whole[key] = whole.get(key, VersionFit()) + fit
    return dict(sorted(whole.items()))


def wrong_versions(fits: Mapping[Key, VersionFit], weights: int, alpha: float) -> dict[str, str]:
    """Replica -> the sentence about a claim that its logprobs refute.

    Args:
        weights: the trainer's version; alpha: error probability, shared by all comparisons.
    """
    found: dict[str, tuple[float, str]] = {}
    for (name, back), fit in fits.items():
        if fit.p > shared(alpha, len(fits)) or fit.other >= fit.claimed:
            continue
        share = fit.other / fit.claimed  # the other version that explains most is named
        if name not in found or share < found[name][0]:
            found[name] = share, _sentence(name, back, fit, weights)
    return {name: text for name, (_, text) in found.items()}


def _sentence(name: str, back: int, fit: VersionFit, weights: int) -> str:
    who = f"replica {name}" if name else "the engine"
    first, last = fit.lags
    if first == last:
        own = weights - int(first)
        claim = f"{who} claims version {own} and samples from {own - back}"
    else:
        word = "behind" if back > 0 else "ahead of"
        claim = f"{who} is {abs(back)} updates {word} the versions that it claims"
    return (
        f"{claim}: its logprobs are nearer to the trainer's under that version in "
        f"{fit.nearer:,} of {fit.n:,} sequences (probability at most {fit.p:.1e} if the claim is "
        "true and the kernels' noise is symmetric)"
    )


def lag_split(batch: Batch) -> LagSplit:
    """The sums of |log ratio| against staleness, if versions were given."""
    if batch.version_BT is None or batch.staleness_BT is None:
        return LagSplit()
    batch = batch.on_host
    assert batch.staleness_BT is not None
    lag_BT = np.broadcast_to(batch.staleness_BT, batch.mask_BT.shape)
    with np.errstate(invalid="ignore"):
        drift_BT = np.abs(batch.logp_train_BT.astype(np.float64) - batch.logp_infer_BT)
    names = batch.group_B or tuple(map(str, range(batch.sequences)))
    at_N = np.nonzero(batch.mask_BT)[0]
    return LagSplit.of(drift_BT[batch.mask_BT], lag_BT[batch.mask_BT], at_N, names)


# The drafts of a step: what the engines counted, as metrics, and against the run's first steps.


DRAFTS = "servanda/draft_acceptance"
FELL = (
    f"drafts are accepted less often than in the first {ENDS} steps of the run: are the draft's "
    "weights synced too?"
)


class Meter(Protocol):
    """Counts drafts between two readings, such as servanda.rl.DraftMeter.

    `problem`: why the last interval is unknown; "" if it is known.
    """

    problem: str

    def read(self) -> DraftCounts | None: ...


def draft_counts(drafts: DraftCounts | Meter | None) -> tuple[DraftCounts, tuple[str, ...]]:
    """The counts of this rank, and the reason why there are none."""
    if drafts is None or isinstance(drafts, DraftCounts):
        return drafts or DraftCounts(), ()
    counts = drafts.read()
    return (DraftCounts(), (drafts.problem,)) if counts is None else (counts, ())


def draft_metrics(
    counts: DraftCounts, firsts: MutableMapping[int, DraftCounts], weights: int, alpha: float
) -> dict[str, float]:
    """The metrics to log of a step's drafts, only measured ones.

    The first ENDS steps with drafts are the reference, and each later step is compared with them.

    Args:
        firsts: updates -> counts of the reference; a step of it is added.
        alpha: error probability of each comparison.
    """
    if not counts.drafts:
        return {}
    metrics = {DRAFTS: counts.mean}
    metrics |= {f"{DRAFTS}/depth_{d}": share for d, share in enumerate(counts.shares, 1)}
    if weights in firsts or len(firsts) < ENDS:
        firsts[weights] = counts
        return metrics
    first = sum(firsts.values(), DraftCounts())
    metrics[f"{DRAFTS}/fell_at_least"] = fallen(first, counts, alpha)
    if first.by_depth and counts.by_depth:
        metrics[f"{DRAFTS}/target_tv_at_least"] = moved(first, counts, alpha)
    return metrics


def notes_on(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """A note if the acceptance fell."""
    return (FELL,) if metrics.get(f"{DRAFTS}/fell_at_least") else ()
