# What the loss used: the sums of a step's applied weights, for the clauses about them, the metrics
# and the step's own check against the declared weighting.

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Protocol

import numpy as np

from servanda.contract.model import WHOLE, Contract
from servanda.judgement.clauses.base import Array, Cell
from servanda.judgement.clauses.loss_checks import (
    ALL,
    LossSums,
    applied_of,
    declared_text,
)
from servanda.judgement.slices.atoms import atoms_of
from servanda.judgement.slices.rules import Cut
from servanda.rl.monitor.batch import Batch, BatchFields
from servanda.rl.steps.drift import ENDS
from servanda.theory.bounds.applied_weights import error_of
from servanda.theory.bounds.importance_weights import Psi
from servanda.theory.stats.alpha import shared
from servanda.theory.stats.draft_counts import DraftCounts, fallen, moved
from servanda.theory.stats.lag_split import LagSplit
from servanda.theory.stats.version_fit import VersionFit
from servanda.traces.rollouts import LOSS_MASK, LOSS_WEIGHT

ACCEPTED = 0.001  # share of tokens with another weight than declared, as of rejected rows
METRICS = {
    "kept_ratio": "servanda/loss/kept",
    "mean": "servanda/loss/mean_weight",
    "effective_ratio": "servanda/loss/effective",
}


def recorded(batch: Batch) -> bool:
    return batch.loss_weight_BT is not None or batch.loss_mask_BT is not None


def sums_of(batch: Batch, psi: Psi, inside_BT: Array | None = None) -> LossSums:
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


def of_cells(cells: Sequence[Cell], batch: Batch, whole: LossSums, psi: Psi) -> dict[int, LossSums]:
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
        found[cut] = sums_of(batch, psi, inside_BT) + LossSums(tokens=unknown)
    return {i: found.get(cell.cut, whole) for i, cell in mine.items()}


def problems(batch: Batch) -> tuple[str, ...]:
    """The reason why the record of the loss contradicts the mask."""
    if batch.loss_mask_BT is None:
        return ()
    outside = int(((batch.loss_mask_BT > 0) & ~batch.on_host.learns_BT).sum())
    if not outside:
        return ()
    return (f"the loss used {outside:,} tokens outside of the mask: prompts, tools or padding",)


def metrics_of(sums: LossSums, contract: Contract) -> dict[str, float]:
    """The metrics to log, only measured ones."""
    metrics = {
        name: value
        for field, name in METRICS.items()
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


def problem(sums: LossSums, contract: Contract) -> str:
    """The reason why the loss contradicts the contract; "" if it does not.

    A clause about declared weights has a limit of its own, and decides instead.
    """
    if impossible := sums.impossible():
        return impossible
    declared = declared_text(contract)
    if not declared or limited(contract) or sums.differing <= ACCEPTED * sums.compared:
        return ""
    return sums.difference(declared)


def note(sums: LossSums, contract: Contract) -> str:
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
        fits_B = _by_sequence(batch, claimed_BT, _under(logp, lag_BT + back), lag_BT)
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


def _by_sequence(
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


def joined(parts: Sequence[Mapping[Key, VersionFit]]) -> dict[Key, VersionFit]:
    """The comparisons of all ranks."""
    whole: dict[Key, VersionFit] = {}
    for part in parts:
        for key, fit in part.items():
            whole[key] = whole.get(key, VersionFit()) + fit
    return dict(sorted(whole.items()))


def wrong(fits: Mapping[Key, VersionFit], weights: int, alpha: float) -> dict[str, str]:
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


NAME = "servanda/draft_acceptance"
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


def counted(drafts: DraftCounts | Meter | None) -> tuple[DraftCounts, tuple[str, ...]]:
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
    metrics = {NAME: counts.mean}
    metrics |= {f"{NAME}/depth_{d}": share for d, share in enumerate(counts.shares, 1)}
    if weights in firsts or len(firsts) < ENDS:
        firsts[weights] = counts
        return metrics
    first = sum(firsts.values(), DraftCounts())
    metrics[f"{NAME}/fell_at_least"] = fallen(first, counts, alpha)
    if first.by_depth and counts.by_depth:
        metrics[f"{NAME}/target_tv_at_least"] = moved(first, counts, alpha)
    return metrics


def notes_on(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """A note if the acceptance fell."""
    return (FELL,) if metrics.get(f"{NAME}/fell_at_least") else ()
