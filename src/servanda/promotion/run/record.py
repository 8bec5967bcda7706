# Appends to the history of a run: each entry is an event with its consequences.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from servanda.contract.identity import EvidenceKey
from servanda.contract.model import Contract
from servanda.contract.stages import Leg
from servanda.errors import EvidenceError
from servanda.promotion.advance import Move, advance, begin
from servanda.promotion.api import run_name
from servanda.promotion.ledger.entry import Record
from servanda.promotion.ledger.ledger import Ledger
from servanda.promotion.operator import approve, override, roll_back
from servanda.promotion.run.history import History, outcome_body, replayed
from servanda.promotion.state import LegFinding, Override
from servanda.traces.serialization import to_plain


def open_run(
    ledger: Ledger,
    contract: Contract,
    key: EvidenceKey,
    course: Sequence[Leg],
    fingerprints: Mapping[str, Mapping[str, str]],
    *,
    actor: str,
    now: float,
) -> History:
    """A new run for a key.

    Raises:
        Outrun: the key has a run already.
    """
    run = run_name(contract, key)
    kernels = contract.kernels
    body = {
        "contract": {"name": contract.metadata.name, "version": contract.metadata.version},
        "kernels": {
            "train": str(kernels.train),
            "infer": str(kernels.infer),
            "stable": str(contract.stable) if contract.stable else "",
        },
        "fingerprints": to_plain(fingerprints),
        "key": to_plain(key),
        "course": to_plain(tuple(course)),
        **outcome_body(begin(run, key, course, now=now)),
    }
    return replayed(ledger.append(run, [Record("opened", actor, now, body)], after=0))


def advance_run(
    ledger: Ledger, history: History, finding: LegFinding, *, actor: str, now: float
) -> History:
    """Advance a run by a finding; an evaluation without change writes no entry.

    Raises:
        EvidenceError: the clock went back, or the finding is for another step.
        Outrun: another process changed the run meanwhile.
    """
    moved = advance(history.course, history.state, finding, now=now)
    before = history.state
    if moved[0] == replace(before, seen=moved[0].seen):
        return history
    return _appended(ledger, history, "looked", actor, now, {"finding": to_plain(finding)}, moved)


def approve_run(
    ledger: Ledger, history: History, *, actor: str, reason: str, now: float
) -> History:
    moved = approve(history.course, history.state, actor=actor, reason=reason, now=now)
    return _appended(ledger, history, "approved", actor, now, {"reason": reason}, moved)


def override_cell(ledger: Ledger, history: History, given: Override, *, now: float) -> History:
    """Exclude a cell from decisions for a while.

    Raises:
        EvidenceError: the latest evaluation had no such cell; or as in `override`.
    """
    cells = history.evaluations[-1].finding.cells if history.evaluations else ()
    if not any(given.covers(cell) for cell in cells):
        known = ", ".join(cell.name for cell in cells) or "no cell yet"
        raise EvidenceError(
            f"promotion {history.run} has no cell {given.clause} on {given.slice} to override",
            hint=f"the latest evaluation judged {known}",
        )
    moved = override(history.course, history.state, given, now=now)
    body = {"override": to_plain(given)}
    return _appended(ledger, history, "overrode", given.actor, now, body, moved)


def roll_back_run(
    ledger: Ledger, history: History, *, actor: str, reason: str, now: float
) -> History:
    """Roll a run back.

    A clock that went back does not prevent it: the time is at least the latest of the run.
    """
    now = max(now, history.state.seen)
    moved = roll_back(history.course, history.state, actor=actor, reason=reason, now=now)
    return _appended(ledger, history, "rolled_back", actor, now, {"reason": reason}, moved)


def _appended(
    ledger: Ledger,
    history: History,
    kind: str,
    actor: str,
    now: float,
    body: Mapping[str, Any],
    moved: Move,
) -> History:
    record = Record(kind, actor, now, {**body, **outcome_body(moved)})
    return replayed(ledger.append(history.run, [record], after=history.last), history)
