# Writing a run's story on: each entry is what happened, and what followed of it.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from servanda.contract.identity import EvidenceKey
from servanda.contract.model import Contract
from servanda.contract.stages import Leg
from servanda.errors import EvidenceError
from servanda.promotion.advance import Moved, advance, begin
from servanda.promotion.api import run_name
from servanda.promotion.ledger.entry import Ledger, Record
from servanda.promotion.operator import approve, override, roll_back
from servanda.promotion.run.history import Story, kept, retold
from servanda.promotion.state import Finding, Override
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
) -> Story:
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
        **kept(begin(run, key, course, now=now)),
    }
    return retold(ledger.append(run, [Record("opened", actor, now, body)], after=0))


def look_at(ledger: Ledger, story: Story, finding: Finding, *, actor: str, now: float) -> Story:
    """Let a finding move a run; a look that found nothing new leaves no entry.

    Raises:
        EvidenceError: the clock went back, or the finding is of another leg.
        Outrun: somebody else moved the run meanwhile.
    """
    moved = advance(story.course, story.state, finding, now=now)
    before = story.state
    if moved[0] == replace(before, seen=moved[0].seen):
        return story
    return _written(ledger, story, "looked", actor, now, {"finding": to_plain(finding)}, moved)


def say_yes(ledger: Ledger, story: Story, *, actor: str, reason: str, now: float) -> Story:
    """Approve the stage after this one."""
    moved = approve(story.course, story.state, actor=actor, reason=reason, now=now)
    return _written(ledger, story, "approved", actor, now, {"reason": reason}, moved)


def let_pass(ledger: Ledger, story: Story, given: Override, *, now: float) -> Story:
    """Let a cell not count for a while.

    Raises:
        EvidenceError: the latest look met no such cell; or as `override` does.
    """
    cells = story.looks[-1].finding.cells if story.looks else ()
    if not any(given.covers(cell) for cell in cells):
        known = ", ".join(cell.name for cell in cells) or "nothing yet"
        raise EvidenceError(
            f"run {story.run} has no cell {given.clause} on {given.slice} that it could override",
            hint=f"the latest look judged {known}",
        )
    moved = override(story.course, story.state, given, now=now)
    body = {"override": to_plain(given)}
    return _written(ledger, story, "overrode", given.actor, now, body, moved)


def take_back(ledger: Ledger, story: Story, *, actor: str, reason: str, now: float) -> Story:
    """Roll a run back.

    The time is never before what the run saw last: no clock keeps traffic where it is not wanted.
    """
    now = max(now, story.state.seen)
    moved = roll_back(story.course, story.state, actor=actor, reason=reason, now=now)
    return _written(ledger, story, "rolled_back", actor, now, {"reason": reason}, moved)


def _written(
    ledger: Ledger,
    story: Story,
    kind: str,
    actor: str,
    now: float,
    body: Mapping[str, Any],
    moved: Moved,
) -> Story:
    record = Record(kind, actor, now, {**body, **kept(moved)})
    return retold(ledger.append(story.run, [record], after=story.last), story)
