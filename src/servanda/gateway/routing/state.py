# The state of routing: what is watched, the evidence so far, and where each slice stands.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from servanda.contract.model import Contract
from servanda.contract.policy import Routing
from servanda.gateway.routing.model import Pin, Status
from servanda.judgement.slices.rules import Cut
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.likelihood_ratio import RequestDraws

RAMP = (0.01, 0.05, 0.25, 1.0)  # of an active slice's share, while it recovers
_PARTS = 4


@dataclass(frozen=True)
class WatchedCell:
    """A clause on a slice that is known before the request: a cell that routing acts on.

    Args:
        limit: of the mean of x in [0, 1], beyond which the cell is broken.
        scale, low: metric units of one x, and of x = 0, for people; unit: of the metric.
        critical: whether sessions move as well.
        refutes: whether its evidence is of how tokens are drawn: it has no limit, and nothing
            can show that it is kept.
        diverts: what a rule of the contract asks for where it is violated; "": nothing.
        pages: whom rules page.
    """

    clause: str
    cut: Cut
    limit: float
    scale: float = 1.0
    low: float = 0.0
    unit: str = ""
    critical: bool = False
    refutes: bool = False
    diverts: Literal["", "slice", "all"] = ""
    pages: tuple[str, ...] = ()

    @property
    def slice(self) -> str:
        return self.cut.name

    @property
    def name(self) -> str:
        return f"{self.clause} on {self.slice}"


@dataclass(frozen=True)
class Rules:
    """The routing rules of a contract, and its watched cells.

    Args:
        watched: cells; their number K multiplies both prices.
    """

    contract: Contract
    watched: tuple[WatchedCell, ...]

    @property
    def policy(self) -> Routing:
        return self.contract.routing

    @property
    def enforces(self) -> bool:
        """Whether the contract wants its decisions done, where no pin says otherwise."""
        return self.policy.mode == "enforce" and self.contract.stable is not None

    @property
    def parts(self) -> int:
        """Into how many parts a slice's evidence falls, of which one key has at most one.

        Four, or fewer where fewer users are enough for the contract.
        """
        return min(_PARTS, self.policy.keys)

    @property
    def cells(self) -> int:
        """K: the factor of thresholds that makes them valid for all cells together."""
        return max(1, len(self.watched))

    @cached_property
    def by_slice(self) -> Mapping[str, tuple[WatchedCell, ...]]:
        """The cells of each slice, in the order in which they are watched."""
        names = dict.fromkeys(cell.slice for cell in self.watched)
        return {name: tuple(c for c in self.watched if c.slice == name) for name in names}

    def on(self, name: str) -> tuple[WatchedCell, ...]:
        """The cells of one slice; () where nothing is watched on it."""
        return self.by_slice.get(name, ())

    @cached_property
    def digest(self) -> str:
        """Of the contract."""
        return self.contract.digest


@dataclass(frozen=True)
class Track:
    """Evidence of one cell, one scored request after another in dispatch order.

    Args:
        n: requests that met the cell, without one of which the tuples are empty; missing: tokens
            without a value among theirs; hidden: the share of those among the latest hundred
            requests or so.
        above, below: log e-values of each bet against the limit, nats, since the slice's
            state began; where the cell refutes, of each way of drawing tokens, and against it.
        alarm: log S of Shiryaev and Roberts' process, each bet, over the same requests.
        total, tokens: sum of x and number of tokens with a value.
        late, late_tokens: the same since they began to lie above the limit; when an alarm
            after a good past fires, that is what it fires for.
        weighted, weights: the same sums by inverse probability of inclusion, for estimates.
    """

    n: int = 0
    missing: int = 0
    above: tuple[float, ...] = ()
    below: tuple[float, ...] = ()
    alarm: tuple[float, ...] = ()
    total: float = 0.0
    tokens: int = 0
    late: float = 0.0
    late_tokens: int = 0
    weighted: float = 0.0
    weights: float = 0.0
    hidden: float = 0.0


@dataclass(frozen=True)
class SliceState:
    """Where one slice stands.

    Args:
        since: when it came to this status, unix seconds.
        dwell_s: how long it stays away this time; relapses: how often it broke while it was
            away or recovering.
        step: of the ramp, while it recovers; step_since, step_scored: when that step began, and
            how many requests were scored by then.
        moves: when it left infer, and when it began to come back, lately.
        load: requests at a time that it brought to stable when it left.
        doubts: clause -> number of the way of drawing tokens for which it left, where the clause
            refutes: the slice comes back once there is evidence against it.
        tracks: of the cells that are watched on it, by clause, since `since` (but active and
            suspect share theirs).
        recent: keyed hashes of who asked, one a request of that evidence, the latest last.
        misread: of the latest hundred requests of that evidence or so, the share for which infer
            answered another prompt.
        scored: requests of that evidence; passed: requests that were left out of it, because
            their key had its part already.
        calm: since when a suspect's evidence has decayed; None while it has not.
        held: why what was decided is not done, as a sentence: no headroom, too few keys, too
            much diverted already; or that too little was seen for any decision; "" where
            nothing is in the way.
        told: those of them that were reported since `since`.
    """

    name: str
    status: Status = "active"
    since: float = 0.0
    dwell_s: float = 0.0
    relapses: int = 0
    step: int = 0
    step_since: float = 0.0
    step_scored: int = 0
    moves: tuple[float, ...] = ()
    load: float = 0.0
    doubts: Mapping[str, int] = field(default_factory=dict)
    tracks: Mapping[str, Track] = field(default_factory=dict)
    recent: tuple[str, ...] = ()
    misread: float = 0.0
    scored: int = 0
    passed: int = 0
    calm: float | None = None
    pin: Pin | None = None
    held: str = ""
    told: tuple[str, ...] = ()

    @property
    def pinned(self) -> Literal["", "stable", "infer"]:
        """The pool that a person named for it; "" where no one did."""
        return self.pin.to if self.pin is not None and self.pin.to in ("stable", "infer") else ""

    def track(self, clause: str) -> Track:
        return self.tracks.get(clause, Track())

    @property
    def keys(self) -> tuple[str, ...]:
        """Who asked for the latest evidence, each once; requests that do not say it left out."""
        return tuple(dict.fromkeys(filter(None, self.recent)))


def status_text(slice_: SliceState) -> str:
    """Where a slice stands, as a transition says it: its status, and its pin."""
    return slice_.status if slice_.pin is None else f"{slice_.status}, pinned to {slice_.pin.to}"


def without_evidence(slice_: SliceState) -> SliceState:
    """The slice without evidence, and without what followed from it."""
    return replace(
        slice_,
        tracks={},
        recent=(),
        misread=0.0,
        scored=0,
        passed=0,
        step_scored=0,
        calm=None,
        held="",
        told=(),
    )


@dataclass(frozen=True)
class Score:
    """One re-scored request.

    Args:
        at: when it was dispatched, unix seconds.
        key: a keyed hash of who asked; "" where no one knows.
        misread: whether infer ran another prompt than requested.
        chance: with what probability it was sampled.
        statistics: (clause, slice) -> of its tokens, one request; cells that it does not
            meet are left out.  A request that came to nothing has its missing tokens.
        drawn: slices whose sample it is part of, with each one's own chance, as
            `Decision.drawn` has them; None: of every slice that it has statistics of, with
            `chance`.
    """

    at: float
    key: str
    chance: float
    statistics: Mapping[tuple[str, str], GroupRatio | RequestDraws]
    drawn: Mapping[str, float] | None = None
    misread: bool = False


@dataclass(frozen=True)
class TrafficFacts:
    """What is measured of the traffic, when states are examined.

    Args:
        now: unix seconds.
        shares: slice -> of all requests lately, how many lay in it.
        in_flight: slice -> requests of it that infer answers at a time, lately.
        stable_in_flight: requests that stable answers at a time, the most there was lately;
            None where no one knows.
        floors: (clause, slice) -> noise floor of train, as a mean of x; absent: not known yet.
    """

    now: float
    shares: Mapping[str, float] = field(default_factory=dict)
    in_flight: Mapping[str, float] = field(default_factory=dict)
    stable_in_flight: float | None = None
    floors: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Transition:
    """A change of a slice, with the evidence that made it: what the ledger keeps.

    Args:
        number: of all transitions of this controller's state, from 1, without gaps.
        before, after: statuses, such as "active"; with a pin "active, pinned to stable".  The
            same where the ramp went on, and where what was decided is held: `reason` says it.
        acted: whether the route changed, or only would have.
        reason: as a sentence.
        cell: that decided; None where a person or the clock did.
        value, limit: the estimate and the limit, in units of the metric; NaN: none.
        log_evidence, log_price: nats; what the cell had, and what the change costs.
        n, keys: requests of the evidence, and distinct users of the latest of it.
        actor: who; "servanda" where no one did.
        pages: the people to notify.
    """

    number: int
    at: float
    slice: str
    before: str
    after: str
    acted: bool
    reason: str
    cell: str | None = None
    value: float = float("nan")
    limit: float = float("nan")
    log_evidence: float = float("nan")
    log_price: float = float("nan")
    n: int = 0
    keys: int = 0
    actor: str = "servanda"
    pages: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoutingState:
    """Every slice, and what they share.

    Args:
        transitions: how many there were.
        clock: the latest time that was seen, unix seconds; time does not go back here.
        base, mirror, sample, run, leg: a promotion's route, as values.Snapshot has them.
        turns: run -> turn of its latest route; the last ones.
    """

    slices: Mapping[str, SliceState] = field(default_factory=dict)
    transitions: int = 0
    clock: float = 0.0
    base: float | None = None
    mirror: float = 0.0
    sample: float = 0.0
    run: str = ""
    leg: str = ""
    turns: Mapping[str, int] = field(default_factory=dict)
