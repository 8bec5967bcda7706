# Actions: the actions of a contract's rules for a verdict, and the resulting token weights.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.actions import ACTIONS
from servanda.contract.model import Contract
from servanda.errors import ContractError
from servanda.judgement.clauses.gradient import psi_of
from servanda.judgement.escalation import action_of, rules_met
from servanda.judgement.slices.atoms import atoms_of
from servanda.judgement.slices.rules import Cut
from servanda.judgement.verdict import Verdict
from servanda.rl.monitor.batch import Batch, BatchFields
from servanda.rl.monitor.statistics import usable
from servanda.rl.steps import judge as exclusion
from servanda.rl.steps.judge import Atoms

Array = NDArray[Any]


@dataclass(frozen=True)
class DueActions:
    """The actions of rules.

    Args:
        action: names, in the order of the rules, each once.
        pages: whom to notify.
        sample: the share of sequences to keep from now on; None: unchanged.
        masked: names of the slices to exclude.
    """

    action: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    sample: float | None = None
    masked: tuple[str, ...] = ()


def named(contract: Contract) -> set[str]:
    """Every action of the contract's rules, or the default without rules."""
    return {*_named(contract)} if contract.escalation else {*possible(contract)}


def _named(contract: Contract) -> list[str]:
    return [action_of(entry)[0] for rule in contract.escalation for entry in rule.do]


def due(contract: Contract, verdict: Verdict, names: Sequence[str], atoms: Atoms) -> DueActions:
    """The actions for a verdict; without rules only the declared weighting.

    Args:
        names: names of all slices, in the order of the bits of `atoms`.
    """
    if not contract.escalation:
        return DueActions(possible(contract))
    values: dict[str, list[str]] = {}
    masked: list[str] = []
    for rule, cells in rules_met(contract, verdict.cells):
        # exclude slices so that the rest is within the limits of these cells
        limits = exclusion.limits_of(cell for cell in cells if cell.outcome == "violated")
        for entry in rule.do:
            name, value = action_of(entry)
            if name == "mask":
                red = exclusion.fewest(names, limits, atoms)
                masked += red
                if not red:
                    continue  # the whole exceeds its limit, and no slice explains it
            if _is_taken(name):
                values.setdefault(name, []).append(value)
    return DueActions(
        tuple(values),
        tuple(dict.fromkeys(values.get("page", ()))),
        max(map(float, values.get("sample", ())), default=None),
        tuple(dict.fromkeys(masked)),
    )


def _is_taken(name: str) -> bool:
    """Whether a trainer executes an action."""
    return name in ACTIONS and "rl" in ACTIONS[name].doors


def possible(contract: Contract) -> tuple[str, ...]:
    """The trainer's actions that a contract may request, each once."""
    if not contract.escalation:
        declared = contract.gradient is not None and contract.gradient.weighting is not None
        return ("correct",) if declared else ()
    return tuple(dict.fromkeys(filter(_is_taken, _named(contract))))


def metrics(taken: DueActions, contract: Contract) -> dict[str, float]:
    """Metrics for the log: 1 or 0 for each action that the contract may request."""
    names = possible(contract)
    return {f"servanda/action/{name}": float(name in taken.action) for name in names}


def check_selection(contract: Contract, batch: Batch) -> None:
    """Refuse to correct tokens that were not scored.

    Raises:
        ContractError: the contract corrects tokens, and some sequences were not selected.
    """
    if "correct" in named(contract) and batch.selected < batch.sequences:
        raise ContractError(
            f"the contract says correct, which needs every token, and {batch.selected} of "
            f"{batch.sequences} sequences are selected",
            hint="score every sequence, or use a contract that does not correct",
        )


def token_weights(
    contract: Contract, taken: DueActions, batch: Batch, masked: Sequence[Cut]
) -> Array:
    """The factor of each token's loss, [B, T], float32.

    0 outside the mask, for unusable logprobs, and in excluded slices; psi(w) if tokens are
    corrected, else 1.  A sequence that was not selected has no logprobs: 0 in excluded slices,
    else 1.

    Args:
        masked: the excluded slices.
    """
    batch = batch.on_host
    with np.errstate(invalid="ignore", over="ignore"):
        used_BT = batch.learns_BT & (usable(batch) | ~batch.selected_B[:, None])
        if masked:
            atoms = atoms_of(masked, BatchFields(replace(batch, mask_BT=batch.learns_BT)))
            out_A: Array = np.any(atoms.inside_CA, axis=0)
            used_BT &= ~out_A[atoms.atom]
        if "correct" not in taken.action:
            return used_BT.astype(np.float32)
        ratio_BT = batch.logp_train_BT.astype(np.float64) - batch.logp_infer_BT
        weight_BT = psi_of(contract).weight(np.exp(ratio_BT))
        return np.where(used_BT, weight_BT, 0.0).astype(np.float32)
