# What the loss used: the sums of a step's applied weights, for the clauses about them, the metrics
# and the step's own check against the declared weighting.

from __future__ import annotations

from collections.abc import Sequence

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
from servanda.rl.monitor.batch import Batch
from servanda.rl.monitor.batch_fields import BatchFields
from servanda.theory.bounds.applied_weights import error_of
from servanda.theory.bounds.importance_weights import Psi
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
