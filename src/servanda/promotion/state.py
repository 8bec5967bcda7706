# The values of a promotion: who is promoted, what was found, where the run stands, what follows.

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
ENDED: tuple[Status, ...] = ("rolled_back", "superseded")  # nothing but a new run follows


@dataclass(frozen=True)
class CellResult:
    """One enforced cell as a promotion reads it: the numbers that every decision carries.

    Args:
        clause, slice: which promise, and where.
        value, low, high, limit: in the clause's own terms; None where nothing was computed.
        n, units: what was counted, and of what.
        note: why, where the numbers do not say it.
        guard: whether it is a precondition, which makes a finding worse and never carries it.
        at_least: whether the limit is one from below; share: whether all are shares of tokens.
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
    """An action that a rule of the contract asks for.

    Args:
        action: hold, roll_back, halt or page; value: of it, such as whom to page.
        cells: by which the rule is met.
        rule: what it watches, such as "tail is violated".
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
    """The result of one evaluation of a step: a verdict in short, or why there is none.

    Args:
        leg: name of the step that was measured.
        key: the builds that the evidence is for; None where measuring failed before that was known.
        groups: prompt groups of the closed rounds.
        evidence: digest of the evaluated evidence; "" where there is none.
        cells: the enforced ones that are applicable.
        asked: what the contract's escalation rules ask of a promotion.
        error: why measuring failed; "" where it did not.
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
    """A person's word that a cell does not count, until it expires.

    Args:
        clause, slice: of the cell; "*" is every one.
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
        kind: "route": who serves from now on; "notify": what changed; "page": a person is needed.
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
        run: its name; the same key has the same one.
        key: whom it promotes.
        leg: index into the course, and span: which one where that leg is full.
        turn: the revision, counted in changes; keys of notifications are made of it.
        since: when the leg was entered; seen: the latest time that was told; unix seconds.
        errors: evaluations in a row at which measuring failed, or a cell was an error.
        approved: name of the step that a person approved leaving; "" where there is no approval.
        asked: actions of escalation rules that are met now, as text, so that a page is sent
            when it begins to be true and not at every look.
        valid_until: when what was shown last expires; None where nothing was, or it does not.
        evidence: digest of what the latest look weighed; weighed: when that was seen first, and
            its age counts from then: to look at it again makes nothing younger.
        why: the reason of the status, for people.
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
        """Whether what was shown last is too old to say anything."""
        return self.valid_until is not None and self.seen >= self.valid_until


def leg_of(course: Sequence[Leg], state: State) -> Leg:
    leg = course[state.leg]
    while leg.stage == "full" and leg.span < state.span:
        leg = leg.following
    return leg
