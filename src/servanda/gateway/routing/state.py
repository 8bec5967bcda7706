# The state of routing: watched cells, evidence, and the status of each slice.

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

RAMP = (0.01, 0.05, 0.25, 1.0)  # fractions of an active slice's share during recovery
_PARTS = 4


@dataclass(frozen=True)
class WatchedCell:
    """A clause on a slice that is known before the request: a cell that routing acts on.

    Args:
        limit: limit of the mean of x, in [0, 1].
        scale, low: metric units per x, and at x = 0, for display; unit: of the metric.
        critical: whether sessions are diverted too.
        refutes: whether it is a sampler test, which has no limit and can only reject.
        diverts: the diversion of a rule of the contract if it is violated; "": none.
        pages: people that rules page.
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

    @property
    def best(self) -> float:
        """x of a metric of 0, that of identical kernels."""
        return max(0.0, -self.low / self.scale)


@dataclass(frozen=True)
class Rules:
    """The routing rules of a contract, and its watched cells.

    Args:
        watched: cells; their number K multiplies the thresholds of a diversion.
    """

    contract: Contract
    watched: tuple[WatchedCell, ...]

    @property
    def policy(self) -> Routing:
        return self.contract.routing

    @property
    def enforces(self) -> bool:
        """Whether the contract's mode acts on decisions, without a pin."""
        return self.policy.mode == "enforce" and self.contract.stable is not None

    @property
    def parts(self) -> int:
        """The number of parts of a slice's evidence, of which one user has at most one.

        Four, or fewer if the contract needs fewer users.
        """
        return min(_PARTS, self.policy.keys)

    @property
    def cells(self) -> int:
        """K: the factor of thresholds that makes them valid for all cells together."""
        return max(1, len(self.watched))

    @cached_property
    def by_slice(self) -> Mapping[str, tuple[WatchedCell, ...]]:
        """The cells of each slice, in the order of watched cells."""
        names = dict.fromkeys(cell.slice for cell in self.watched)
        return {name: tuple(c for c in self.watched if c.slice == name) for name in names}

    def on(self, name: str) -> tuple[WatchedCell, ...]:
        """The cells of one slice; () if none."""
        return self.by_slice.get(name, ())

    @cached_property
    def digest(self) -> str:
        """The digest of the contract."""
        return self.contract.digest


@dataclass(frozen=True)
class Track:
    """Evidence of one cell over scored requests in dispatch order.

    Args:
        n: requests in the cell (with none the tuples are empty); missing: their tokens without a
            value; hidden: the share of those among about the latest hundred requests.
        above, below: log e-values of each bet against and for the limit, nats, since the slice's
            status began; for a sampler test, for and against each alternative sampler.
        alarm: log S of the Shiryaev-Roberts process, per bet, over the same requests.
        total, tokens: sum of x and number of tokens with a value.
        late, late_tokens: the same since the estimated change point, for the display of an alarm
            after a good past.
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
    """The state of one slice.

    Args:
        since: start of this status, unix seconds.
        dwell_s: its current minimum hold time; relapses: violations while diverted or recovering.
        step: step of the ramp during recovery; step_since, step_scored: its start, and the scored
            requests by then.
        moves: recent times of diversions and returns.
        load: concurrent requests that its diversion added to stable.
        doubts: clause -> index of the alternative sampler for which it was diverted; the slice
            returns once there is evidence against that alternative.
        tracks: evidence of its watched cells, by clause, since `since` (active and suspect share
            theirs).
        recent: keyed hashes of users, one per request of that evidence, newest last.
        misread: share of about the latest hundred requests for which infer ran another prompt.
        scored: requests of that evidence; passed: requests excluded because their user had its
            part.
        calm: since when the evidence of a suspect slice is decayed; None: it is not.
        held: the reason why a decision is not acted on, or why none is possible, as a sentence: no
            capacity, too few users, too much diverted, too little evidence; "" if none.
        told: reasons that were reported since `since`.
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
        """The pool of its pin; "" without a pin."""
        return self.pin.to if self.pin is not None and self.pin.to in ("stable", "infer") else ""

    def track(self, clause: str) -> Track:
        return self.tracks.get(clause, Track())

    @property
    def keys(self) -> tuple[str, ...]:
        """The distinct known users of the latest evidence."""
        return tuple(dict.fromkeys(filter(None, self.recent)))


def status_text(slice_: SliceState) -> str:
    """The status of a slice with its pin, as in transitions."""
    return slice_.status if slice_.pin is None else f"{slice_.status}, pinned to {slice_.pin.to}"


def without_evidence(slice_: SliceState) -> SliceState:
    """The slice without evidence and its consequences."""
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
        at: dispatch time, unix seconds.
        key: a keyed hash of the user; "" if unknown.
        misread: whether infer ran another prompt than requested.
        chance: its inclusion probability.
        statistics: (clause, slice) -> statistics of its tokens; only for its cells.  A lost request
            has its missing tokens.
        drawn: slices whose sample contains it, with their probabilities, as in `Decision.drawn`;
            None: all slices with statistics, with `chance`.
    """

    at: float
    key: str
    chance: float
    statistics: Mapping[tuple[str, str], GroupRatio | RequestDraws]
    drawn: Mapping[str, float] | None = None
    misread: bool = False


@dataclass(frozen=True)
class TrafficFacts:
    """Measurements of the traffic for an evaluation.

    Args:
        now: unix seconds.
        shares: slice -> its share of recent requests.
        in_flight: slice -> its recent concurrent requests at infer.
        stable_in_flight: recent peak of concurrent requests at stable; None: unknown.
        floors: (clause, slice) -> noise floor of train, as a mean of x; absent: unknown.
    """

    now: float
    shares: Mapping[str, float] = field(default_factory=dict)
    in_flight: Mapping[str, float] = field(default_factory=dict)
    stable_in_flight: float | None = None
    floors: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Transition:
    """A change of a slice with its evidence, as recorded in the ledger.

    Args:
        number: consecutive number in this controller's state, from 1.
        before, after: statuses, such as "active"; with a pin "active, pinned to stable".  Equal for
            a step of the ramp, and for a decision that is held: see `reason`.
        acted: whether the route changed.
        reason: a sentence.
        cell: the deciding cell; None for a person or the clock.
        value, limit: the estimate and the limit, in units of the metric; NaN: none.
        log_evidence, log_price: log e-value of the cell and log threshold, nats.
        n, keys: requests of the evidence, and distinct users of the latest ones.
        actor: the person; "servanda" for automatic decisions.
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
    """The states of all slices, and shared data.

    Args:
        transitions: number of transitions so far.
        clock: the latest time, unix seconds; non-decreasing.
        base, mirror, sample, run, leg: a promotion's route, as in Snapshot.
        turns: run -> revision of its latest route; recent runs only.
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
