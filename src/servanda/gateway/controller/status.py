# The status of a controller, as the page, `status` and /metrics show it.  Values
# alone: whoever shows them asks nobody else.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from servanda.gateway.routing.evidence_price import nearness_of
from servanda.gateway.routing.model import Pin, Status
from servanda.gateway.routing.state import Transition


@dataclass(frozen=True)
class CellStatus:
    """A clause on a slice.

    Args:
        value, interval: an estimate by inverse probability of inclusion, and two standard
            errors around it; None where nothing was scored.
        limit, floor: as value, in units of the metric; floor: self-noise of train.
        stable: what the stable kernel has there; None: nobody measured it.
        log_evidence, log_price: nats, against the limit, and what leaving infer costs.
        log_alarm, log_alarm_price: the same of the process that forgets a good past.
        log_below, log_leave_price: that the limit is kept, and what coming back costs.
        n, missing: requests of the evidence, and tokens without a value among theirs.
        refutes: whether it is of how tokens are drawn, which has no limit: value is by how much
            they are likelier than infer reports, a mean over tokens.
    """

    clause: str
    limit: float
    unit: str = ""
    value: float | None = None
    interval: tuple[float, float] | None = None
    floor: float | None = None
    stable: float | None = None
    log_evidence: float = 0.0
    log_price: float = float("inf")
    log_alarm: float = float("-inf")
    log_alarm_price: float = float("inf")
    log_below: float = 0.0
    log_leave_price: float = float("inf")
    n: int = 0
    missing: int = 0
    diverts: Literal["", "slice", "all"] = ""
    critical: bool = False
    refutes: bool = False

    @property
    def nearness(self) -> float:
        """The fraction of the nearest price that there is, 0 to 1 and beyond."""
        parts = ((self.log_evidence, self.log_price), (self.log_alarm, self.log_alarm_price))
        near = max(0.0, *(e / price for e, price in parts if price > 0))
        return nearness_of(near, self.refutes)


@dataclass(frozen=True)
class SliceStatus:
    """A slice of the traffic, and the cells that are watched on it.

    Args:
        since: when it came to this status, unix seconds.
        acts: whether what was decided of it is done; held: why not, as a sentence.
        route: share of its requests that infer serves, by what was decided of it.
        share: of all requests lately, how many lay in it; None: not known yet.
        served: pool -> requests of it whose reply came from that pool since gateways started,
            "none": that got none; one that lies in several slices counts for the most specific
            of them, and for the whole traffic.
        would: pool -> the same if every slice acted.
        keys, scored: distinct users and requests of the evidence.
        sample: with what probability a request of it is scored.
        history: (unix seconds, fraction of the nearest price), oldest first.
    """

    name: str
    status: Status
    since: float
    acts: bool = False
    held: str = ""
    pin: Pin | None = None
    route: float = 1.0
    share: float | None = None
    served: Mapping[str, int] = field(default_factory=dict)
    would: Mapping[str, int] = field(default_factory=dict)
    cells: tuple[CellStatus, ...] = ()
    keys: int = 0
    scored: int = 0
    sample: float = 0.0
    relapses: int = 0
    history: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class UnwatchedCell:
    """A cell of the contract that nobody watches here, and why."""

    clause: str
    slice: str
    why: str


@dataclass(frozen=True)
class GatewayStatus:
    """A gateway that was heard of.

    Args:
        start: of its process, unix seconds; heard: the last time.
        version: of the snapshot that it has.
        taken: number of its first row that is not durable here; behind: rows that wait here.
        skew_s: by how much its clock is ahead of ours, roughly.
        counts: what it counts, as proxy/counters.py has it.
    """

    name: str
    start: float
    heard: float
    version: int = 0
    taken: int = 0
    behind: int = 0
    skew_s: float = 0.0
    counts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoringStatus:
    """How the re-scoring goes; numbers since this controller started.

    Args:
        alive: whether the train engine answers; problem: why not, "" where it does.
        queued, queued_tokens: rows and tokens that wait; room: of rows.
        dropped: rows that found no room and count as missing.
        scored, missing: rows with a number, and without one; outside: why a row is no
            evidence -> how many.
        seconds: of the engine; budget: of them it may spend a second; cost_s: a request.
        lag_s: between a row's launch and its evidence, the latest; None: none yet.
        lags: of all of them: {"buckets": {bound in seconds: rows up to it and beyond the bound
            before}, "sum": seconds}; "inf" is the last bound.
        restarts: of a dead engine.
    """

    alive: bool = False
    problem: str = ""
    queued: int = 0
    queued_tokens: int = 0
    room: int = 0
    dropped: int = 0
    scored: int = 0
    missing: int = 0
    errors: int = 0
    outside: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    budget: float = 0.0
    cost_s: float | None = None
    lag_s: float | None = None
    lags: Mapping[str, Any] = field(default_factory=dict)
    restarts: int = 0


@dataclass(frozen=True)
class PoolStatus:
    """A pool of upstreams.

    Args:
        in_flight: requests that it answers now; peak: most at a time, lately.
        most: that it can answer at a time; None: not known.
        open_at: gateways that hold it to be broken.
    """

    in_flight: int = 0
    peak: int = 0
    most: int | None = None
    open_at: int = 0

    @property
    def open(self) -> bool:
        return self.open_at > 0

    @property
    def headroom(self) -> int | None:
        """None where nobody knows."""
        return None if self.most is None else max(0, self.most - self.peak)


_SHOWN = 80  # characters of what a gateway says
_MOVED_S = 60.0  # that the system's clock was set by: less is no news
_TIMES = "times here follow the old clock until the next start; no pin and no route is changed"
# by pool, what it means that a gateway holds it to be broken
_BROKEN: Mapping[str, str] = {
    "infer": "the circuit breaker of infer is open: stable serves in its place",
    "stable": "stable cannot be reached: requests that infer does not answer are refused",
}


@dataclass(frozen=True)
class ControllerStatus:
    """Everything that is shown of a controller.

    Args:
        name, contract: of the contract, and its digest.
        version, made, valid_until: of the snapshot; unix seconds, made 0: not known.
        base, mirror, run, leg: a promotion's route; the contract's own without one.
        transitions: the latest 50, newest last; moves: how many there were.
        pools: "infer", "stable".
        diverted: share of all traffic that slices keep from infer by themselves.
        ledger_behind: entries that the ledger has not taken; ledger, store, reload, effects:
            the problem of each, "" where there is none.
        moved_s: by how much the system's clock was set forward since the controller began; times
            here go on as before.
        reloaded: when this version of the contract was read; began: when the controller did.
    """

    name: str
    contract: str
    mode: Literal["observe", "enforce"]
    now: float
    version: int
    valid_until: float
    made: float = 0.0
    began: float = 0.0
    reloaded: float = 0.0
    base: float = 1.0
    mirror: float = 0.0
    run: str = ""
    leg: str = ""
    slices: tuple[SliceStatus, ...] = ()
    left_out: tuple[UnwatchedCell, ...] = ()
    transitions: tuple[Transition, ...] = ()
    moves: int = 0
    pools: Mapping[str, PoolStatus] = field(default_factory=dict)
    diverted: float = 0.0
    gateways: tuple[GatewayStatus, ...] = ()
    scoring: ScoringStatus = field(default_factory=ScoringStatus)
    ledger_where: str = ""
    ledger_behind: int = 0
    ledger: str = ""
    store: str = ""
    reload: str = ""
    effects: str = ""
    moved_s: float = 0.0

    @property
    def problems(self) -> tuple[str, ...]:
        """What somebody should look at, each as a sentence."""
        of = (self.store, self.ledger, self.reload, self.effects, self.scoring.problem)
        pools = (_BROKEN[name] for name, pool in self.pools.items() if pool.open)
        logs = (
            f"gateway {gateway.name} cannot write its request log: {str(why)[:_SHOWN]}"
            for gateway in self.gateways
            if (why := gateway.counts.get("log"))
        )
        moved = abs(self.moved_s) >= _MOVED_S
        clock = (f"the system's clock was set by {self.moved_s:+,.0f} s: {_TIMES}",) * moved
        return (*(problem for problem in of if problem), *pools, *logs, *clock)
