# The values of routing: the snapshot that gateways follow, and the decision about one request.

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
    """A person's override of a slice, until it expires.

    Args:
        to: stable or infer: the pool that serves the slice.  enforce or observe: whether
            decisions about it are acted on, whatever the mode of the contract.
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
        cut: the requests of the slice, by `request.prompt_tokens` and labels.
        share: share of its requests that infer serves, according to the decisions about it.
        mirror: share of the requests served by stable that are mirrored to infer.
        sample: share of infer's responses, mirrored ones included, that train scores.
        acts: whether `share` is followed; otherwise `base` is, and `share` is only recorded.
        critical: whether a session may change its kernel for it.
        pinned: "stable" or "infer" if a person pinned the slice; "" otherwise.
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
    """The routes that gateways follow: immutable, numbered, with an expiry time.

    Args:
        version: increases with every snapshot, also across restarts of the leader.
        contract: digest of the contract that it was built from.
        run, leg: promotion and step whose route is followed; "" without one.
        valid_until: unix seconds; afterwards `without` serves the slices that act.
        salt: key of the split, hex.
        base: share of all traffic that infer serves unless a slice overrides it; mirror: share
            of the rest that is mirrored to infer (a shadow); sample: share of both that a
            promotion wants logged, independent of routing's own sample.
        slices: the slices that are known before a request; the last is the whole, "all".
        labels: name -> source in the request: api_key, route or request.metadata.KEY.
        prompt_tokens: least and most of the contract's envelope; outside: the pool for others.
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
    """The facts of a request that are known before it is sent.

    Args:
        request: its id; sticky: the key of the split: a session, a user, a conversation.
        labels: name -> text, for the contract's labels.
        prompt_tokens: length of the prompt; None if unknown.
        session: the pool of its session; None for a new session, or without one.
    """

    request: str
    sticky: str
    labels: Mapping[str, str] = field(default_factory=dict)
    prompt_tokens: int | None = None
    session: Pool | None = None


@dataclass(frozen=True)
class Decision:
    """The route of one request, decided before any response is seen.

    Args:
        pool: the pool that serves it; None: the request is refused.
        would: the pool that would serve it if every slice acted.
        mirrored: the request is also sent to infer, whose response is scored and discarded.
        sampled: infer's response is scored; chance: the inclusion probability.
        slices: the slices that contain the request.
        drawn: slice -> its inclusion probability, for the slices whose sample contains it;
            empty if only a promotion wants the row.  A slice that is sampled more densely has
            no more weight in the whole, and a request that stable serves in place of infer is
            no evidence about the slices that infer serves.
        reason: the reason for the pool: "share", "split", "session", "NAME quarantined",
            "NAME pinned", "outside", "expired", "no snapshot".
        apart: why the share of the whole traffic did not decide the pool: a slice, a pin, an open
            session; "" if it did.
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
    apart: str = "no route"


def snapshot_of(data: Any) -> Snapshot:
    """A snapshot from its plain form (`to_plain`) after JSON.

    Raises:
        EvidenceError: the data is not a snapshot.
    """
    snapshot = from_plain(Snapshot, data)
    return replace(snapshot, slices=tuple(replace(s, cut=_cut(s.cut)) for s in snapshot.slices))


def _cut(cut: Cut) -> Cut:
    """JSON has no tuples: the values of `in` came as a list."""
    terms = (
        replace(t, value=tuple(t.value)) if isinstance(t.value, list) else t for t in cut.terms
    )
    return Cut(cut.name, tuple(terms))
