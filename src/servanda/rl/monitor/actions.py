# Acting: what a contract's rules say of a verdict, and the weights of tokens that follow.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.actions import ACTIONS
from servanda.contract.model import WHOLE, Contract
from servanda.judgement import escalation
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.clauses.gradient import psi_of
from servanda.judgement.slices.rules import Cut
from servanda.judgement.verdict import Verdict
from servanda.rl.dumps import diagnosis
from servanda.rl.monitor.batch import Batch
from servanda.rl.monitor.slice_atoms import atoms_of
from servanda.rl.monitor.statistics import usable

Array = NDArray[Any]


@dataclass(frozen=True)
class Due:
    """What rules say is to be done.

    Args:
        action: names, in the order of the rules, each once.
        pages: whom to tell.
        sample: the share of sequences to keep from now on; None: as it was.
        masked: names of the slices to leave out.
    """

    action: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    sample: float | None = None
    masked: tuple[str, ...] = ()


def named(contract: Contract) -> set[str]:
    """Every action that the contract's rules name, or that follows without a rule."""
    entries = (entry for rule in contract.escalation for entry in rule.do)
    found = {entry if isinstance(entry, str) else next(iter(entry)) for entry in entries}
    return found if contract.escalation else {*possible(contract)}


def due(
    contract: Contract, verdict: Verdict, names: Sequence[str], atoms: Mapping[int, Sequence[float]]
) -> Due:
    """What follows from a verdict; without rules, the declared weighting and nothing else.

    Args:
        names: of all slices, in the order of the bits of `atoms`.
    """
    if not contract.escalation:
        return Due(possible(contract))
    found: dict[str, list[Any]] = {}
    masked: list[str] = []
    for rule in contract.escalation:
        watched = escalation.watched(rule.when, verdict.cells)
        if not escalation.met(rule.when, watched):
            continue
        for entry in rule.do:
            name, value = (entry, None) if isinstance(entry, str) else next(iter(entry.items()))
            if name == "mask":
                red = _left_out(watched, names, atoms)
                masked += red
                if not red:
                    continue  # the whole is beyond its limit, and no slice of it is to blame
            if name in ACTIONS and "rl" in ACTIONS[name].doors:
                found.setdefault(name, []).append(value)
    shares = [float(value) for value in found.get("sample", ())]
    return Due(
        tuple(found),
        tuple(dict.fromkeys(map(str, found.get("page", ())))),
        max(shares, default=None),
        tuple(dict.fromkeys(masked)),
    )


def possible(contract: Contract) -> tuple[str, ...]:
    """The actions that a contract may ask a trainer for, each once."""
    if not contract.escalation:
        declared = contract.gradient is not None and contract.gradient.weighting is not None
        return ("correct",) if declared else ()
    asked = [
        entry if isinstance(entry, str) else next(iter(entry))
        for rule in contract.escalation
        for entry in rule.do
    ]
    return tuple(dict.fromkeys(n for n in asked if n in ACTIONS and "rl" in ACTIONS[n].doors))


def metrics(taken: Due, contract: Contract) -> dict[str, float]:
    """What is done, to log: 1 or 0 for each action that the contract may ask for."""
    names = possible(contract)
    return {f"servanda/action/{name}": float(name in taken.action) for name in names}


def _left_out(
    watched: Sequence[CellVerdict], names: Sequence[str], atoms: Mapping[int, Sequence[float]]
) -> list[str]:
    """The red slices to leave out, so that the rest is within the limits of what is watched."""
    limits: dict[str, float | None] = {}
    for cell in watched:
        if cell.outcome == "violated":
            of_tv = cell.metric == "tv" and cell.threshold is None
            if of_tv:
                limits[cell.slice] = cell.limit
            elif cell.slice != WHOLE:
                limits.setdefault(cell.slice, None)
    return [*diagnosis.fewest(names, limits, atoms)]


def token_weights(contract: Contract, taken: Due, batch: Batch, masked: Sequence[Cut]) -> Array:
    """What each token's loss is to be multiplied by, [B, T], float32.

    0 outside the mask, and where a logprob is not usable; 0 in slices that are left out; psi(w)
    where tokens are corrected, else 1.

    Args:
        masked: the slices that are left out.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        kept_BT = batch.mask_BT & usable(batch)
        if masked:
            atoms = atoms_of(masked, batch)
            out_A: Array = np.any(atoms.inside_CA, axis=0)
            kept_BT &= ~out_A[atoms.atom_BT]
        if "correct" not in taken.action:
            return kept_BT.astype(np.float32)
        ratio_BT = batch.logp_train_BT.astype(np.float64) - batch.logp_infer_BT
        weight_BT = psi_of(contract).weight(np.exp(ratio_BT))
        return np.where(kept_BT, weight_BT, 0.0).astype(np.float32)
