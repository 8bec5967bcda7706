# The values of a promotion: builds, findings, state and notifications.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from servanda.contract.identity import EvidenceKey
from servanda.contract.stages import Leg
from servanda.judgement.clauses.base import CellVerdict, Outcome

Status = Literal[
    "running",
    "awaiting_evidence",
    "awaiting_approval",
    "halted",
    "rolled_back",
    "superseded",
    "completed",
]
STATUSES: tuple[Status, ...] = get_args(Status)
ENDED: tuple[Status, ...] = ("rolled_back", "superseded")  # only a new run can follow


@dataclass(frozen=True)
class CellResult:
    """The result of one enforced cell, as recorded with every decision.

    Args:
        clause, slice: identify the cell.
        value, low, high, limit: in units of the clause; None if not computed.
        n, units: sample size and its unit.
        note: the reason, if the numbers do not show it.
        guard: whether it is a validity check, which can only worsen a finding.
        at_least: whether the limit is a lower one; share: whether all are shares of tokens.
    """

    clause: str
    slice: str
    outcome: Outcome
    value: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    n: int = 0
    units: str = ""
    note: str = ""
    guard: bool = False
    at_least: bool = False
    share: bool = False

    @property
    def name(self) -> str:
        return f"{self.clause} on {self.slice}"

    @classmethod
    def of(cls, cell: CellVerdict, *, at_least: bool = False) -> CellResult:
        low, high = cell.interval or (None, None)
        return cls(
            cell.clause,
            cell.slice,
            cell.outcome,
            cell.value,
            low,
            high,
            cell.limit,
            cell.n,
            cell.units,
            cell.note,
            cell.section == "observability",
            at_least,
            cell.threshold is not None,
        )


@dataclass(frozen=True)
class RuleAction:
    """An action of an escalation rule.

    Args:
        action: hold, roll_back, halt or page; value: its argument, such as the person to page.
        cells: the cells that satisfy the rule.
        rule: its condition, such as "tail is violated".
    """

    action: str
    value: str
    cells: tuple[CellResult, ...]
    rule: str = ""

    def __str__(self) -> str:
        action = f"{self.action}: {self.value}" if self.value else self.action
        return f"{action}, for {self.rule}" if self.rule else action


@dataclass(frozen=True)
class LegFinding:
    """The result of one evaluation of a step: a summary of its verdict, or why there is none.

    Args:
        leg: name of the step that was measured.
        key: the builds of the evidence; None if the measurement failed before they were known.
        groups: prompt groups of the closed rounds.
        evidence: digest of the evaluated evidence; "" where there is none.
        cells: the applicable enforced cells.
        asked: the actions of the contract's escalation rules.
        error: why the measurement failed; "" if it did not.
    """

    leg: str
    key: EvidenceKey | None = None
    groups: int = 0
    evidence: str = ""
    cells: tuple[CellResult, ...] = ()
    asked: tuple[RuleAction, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Override:
    """A person's decision to exclude a cell until a time.

    Args:
        clause, slice: of the cell; "*" matches all.
        expires: unix seconds.
    """

    clause: str
    slice: str
    actor: str
    reason: str
    expires: float

    def covers(self, cell: CellResult) -> bool:
        return self.clause in ("*", cell.clause) and self.slice in ("*", cell.slice)


@dataclass(frozen=True)
class Effect:
    """A notification, delivered at least once.

    Args:
        kind: "route": a new route; "notify": a change for people; "page": a person is needed.
        key: the same for every attempt to deliver it, and for no other effect.
        body: plain data for JSON.
    """

    kind: Literal["route", "notify", "page"]
    key: str
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """The state of a promotion.

    Args:
        run: its name, a function of the key.
        key: the builds that it promotes.
        leg: index of the step; span: index of the evaluation window of the step `full`.
        turn: the revision, which is part of the keys of notifications.
        since: start of the step; seen: latest time of the run; unix seconds.
        errors: evaluations in a row with a failed measurement or a cell in error.
        approved: name of the step that a person approved leaving; "" without approval.
        asked: current actions of escalation rules, as text, so that a page is sent when its
            condition becomes true and not at every evaluation.
        valid_until: expiry of the latest evidence; None without evidence or expiry.
        evidence: digest of the latest evaluated evidence; weighed: time of its first evaluation,
            from which its age counts.
        why: the reason of the status, as text.
    """

    run: str
    key: EvidenceKey
    leg: int = 0
    span: int = 1
    status: Status = "running"
    turn: int = 0
    since: float = 0.0
    seen: float = 0.0
    errors: int = 0
    approved: str = ""
    overrides: tuple[Override, ...] = ()
    asked: tuple[str, ...] = ()
    valid_until: float | None = None
    evidence: str = ""
    weighed: float = 0.0
    why: str = ""

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def expired(self) -> bool:
        """Whether the latest evidence has expired."""
        return self.valid_until is not None and self.seen >= self.valid_until


def leg_of(course: Sequence[Leg], state: State) -> Leg:
    leg = course[state.leg]
    while leg.stage == "full" and leg.span < state.span:
        leg = leg.following
    return leg
