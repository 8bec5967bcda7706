# The values of routing: what a gateway follows, and what it decides of one request.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from servanda.judgement.slices.rules import Cut
from servanda.traces.serialization import from_plain

Pool = Literal["infer", "stable"]
Status = Literal["active", "suspect", "quarantined", "probation", "recovering"]
STATUSES: tuple[Status, ...] = get_args(Status)
AWAY: tuple[Status, ...] = ("quarantined", "probation")  # stable serves, infer is mirrored
PinTo = Literal["stable", "infer", "enforce", "observe"]


@dataclass(frozen=True)
class Pin:
    """A person's word about a slice, until it expires.

    Args:
        to: stable or infer: who serves it.  enforce or observe: whether what is decided of it
            is done, whatever the mode of the contract.
        expires: unix seconds.
    """

    to: PinTo
    actor: str
    reason: str
    expires: float


@dataclass(frozen=True)
class SliceRoute:
    """One slice of a snapshot.

    Args:
        cut: which requests it has; `request.prompt_tokens` and labels.
        share: of its requests that infer serves, by what was decided of it.
        mirror: of those that stable serves, what infer is asked as well.
        sample: of what infer answers, or is asked as well, what train scores.
        acts: whether the share is followed; else it is what would be done, and `base` is.
        critical: whether a session changes its kernel in the middle for it.
        pinned: "stable" or "infer" where a person said so; "" where nobody did.
    """

    cut: Cut
    status: Status = "active"
    share: float = 1.0
    mirror: float = 0.0
    sample: float = 0.01
    acts: bool = False
    critical: bool = False
    pinned: Literal["", "stable", "infer"] = ""

    @property
    def name(self) -> str:
        return self.cut.name


@dataclass(frozen=True)
class Snapshot:
    """What gateways follow: immutable, numbered, and not for ever.

    Args:
        version: a later one has a larger number, also after a restart of whoever made it.
        contract: digest of the contract that it follows from.
        run, leg: of a promotion whose route is followed; "" of none.
        valid_until: unix seconds, after which `without` serves where slices act.
        salt: key of the split, hex.
        base: of all traffic, what infer serves where no slice says otherwise; mirror: of the
            others, what infer is asked as well (a shadow); sample: of both, what a promotion
            wants a row of, whatever routing itself needs.
        slices: that can be told before a request; the whole, "all", is the last one.
        labels: name -> where a request has it: api_key, route or request.metadata.KEY.
        prompt_tokens: of the contract's envelope, least and most; outside: who serves the others.
    """

    version: int
    contract: str
    name: str
    valid_until: float
    salt: str
    base: float = 1.0
    mirror: float = 0.0
    sample: float = 0.0
    run: str = ""
    leg: str = ""
    slices: tuple[SliceRoute, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    prompt_tokens: tuple[float, float] | None = None
    outside: Literal["stable", "refuse", "infer"] = "stable"
    without: Pool = "stable"
    has_stable: bool = True


@dataclass(frozen=True)
class RequestFacts:
    """What is known of a request before it is sent anywhere.

    Args:
        request: its id; sticky: by what it is split: a session, a user, a conversation.
        labels: name -> text, of the contract's labels.
        prompt_tokens: of the prompt; None where nobody counted them.
        session: the pool that the session is on; None where it is new, or there is none.
    """

    request: str
    sticky: str
    labels: Mapping[str, str] = field(default_factory=dict)
    prompt_tokens: int | None = None
    session: Pool | None = None


@dataclass(frozen=True)
class Decision:
    """Where one request goes; decided before any answer is seen.

    Args:
        pool: who answers; None: the request is refused.
        would: who would, if every slice acted.
        mirrored: infer is asked as well, and what it says is scored and not shown.
        sampled: what infer says is scored; chance: with what probability it was.
        slices: that the request lies in.
        drawn: slices whose sample it is part of, if it is sampled, with each one's own chance;
            none where only a promotion wants it.
            A slice that is watched closely does not weigh more in the whole for it; and what
            stable serves instead of infer says nothing of the slices that infer does serve.
        reason: why this pool: "share", "split", "session", "NAME quarantined", "NAME pinned",
            "outside", "expired", "no snapshot".
    """

    pool: Pool | None
    would: Pool | None
    mirrored: bool
    sampled: bool
    chance: float
    slices: tuple[str, ...]
    reason: str
    version: int
    drawn: Mapping[str, float] = field(default_factory=dict)


def snapshot_of(data: Any) -> Snapshot:
    """A snapshot from what `to_plain` made of it and JSON carried.

    Raises:
        EvidenceError: it is none.
    """
    snapshot = from_plain(Snapshot, data)
    return replace(snapshot, slices=tuple(replace(s, cut=_cut(s.cut)) for s in snapshot.slices))


def _cut(cut: Cut) -> Cut:
    """JSON has no tuples: the values of `in` came as a list."""
    terms = (
        replace(t, value=tuple(t.value)) if isinstance(t.value, list) else t for t in cut.terms
    )
    return Cut(cut.name, tuple(terms))
