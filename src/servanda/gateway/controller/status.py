# The status of a controller, as the page, `status` and /metrics show it: plain values that are
# complete by themselves.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from servanda.gateway.routing.evidence_price import nearness_of
from servanda.gateway.routing.model import Pin, Status
from servanda.gateway.routing.state import Transition
from servanda.judgement.breakdown import Advice
from servanda.judgement.clauses.base import Outcome
from servanda.report.cell_text import Tick, tick, together
from servanda.report.format import percent


@dataclass(frozen=True)
class CellStatus:
    """A cell: one clause on one slice.

    Args:
        value, interval: estimate, weighted by inverse inclusion probability, and two standard
            errors on each side; None where nothing was scored.
        limit, floor: in units of the metric, as value; floor: the noise floor of train.
        log_evidence, log_price: log e-value against the limit and its alarm threshold, nats.
        log_alarm, log_alarm_price: the same for the change detector (Shiryaev-Roberts).
        log_below, log_leave_price: log e-value of the return test (within the limit) and its
            threshold, nats.
        n, missing: number of requests in the evidence, and of their tokens without a value.
        more: projected number of further requests for a decision; None: decided, or unknown.
        refutes: whether the cell tests the sampler, which has no limit: value is then the mean
            over tokens by which they are likelier than infer reports, nats.
    """

    clause: str
    limit: float
    unit: str = ""
    value: float | None = None
    interval: tuple[float, float] | None = None
    floor: float | None = None
    log_evidence: float = 0.0
    log_price: float = float("inf")
    log_alarm: float = float("-inf")
    log_alarm_price: float = float("inf")
    log_below: float = 0.0
    log_leave_price: float = float("inf")
    n: int = 0
    more: int | None = None
    missing: int = 0
    diverts: Literal["", "slice", "all"] = ""
    critical: bool = False
    refutes: bool = False

    @property
    def nearness(self) -> float:
        """Log e-value as a fraction of the nearest log threshold; 1 is the alarm."""
        parts = ((self.log_evidence, self.log_price), (self.log_alarm, self.log_alarm_price))
        near = max(0.0, *(e / price for e, price in parts if price > 0))
        return nearness_of(near, self.refutes)

    @property
    def tick(self) -> Tick:
        """Its answer: above the limit by the alarm, within it by the return test, or neither yet.

        How tokens are drawn has no limit: nothing is to be shown there.
        """
        outcome: Outcome = "inconclusive"
        if self.nearness >= 1:
            outcome = "violated"
        elif self.refutes:
            outcome = "not applicable"
        elif self.log_below >= self.log_leave_price:
            outcome = "holds"
        return tick(outcome, self.n, self.more, "requests")


@dataclass(frozen=True)
class SliceStatus:
    """A slice of the traffic, and the cells that are watched on it.

    Args:
        since: start of the current status, unix seconds.
        acts: whether decisions about it are acted on; held: the missing condition, a sentence.
        route: share of its requests that infer serves, according to the decisions about it.
        share: its share of all recent requests; None: not known yet.
        served: pool -> requests of it whose reply came from that pool since gateways started,
            "none": without a reply; a request in several slices counts for the most specific
            of them, and for the whole traffic.
        keys, scored: number of distinct users and of requests in the evidence.
        sample: probability with which a request of it is scored.
        advice: of a diverted slice, the likely cause and what to do; None if unknown.
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
    cells: tuple[CellStatus, ...] = ()
    keys: int = 0
    scored: int = 0
    sample: float = 0.0
    relapses: int = 0
    advice: Advice | None = None

    @property
    def tick(self) -> Tick:
        """The worst answer of its cells."""
        return together(cell.tick for cell in self.cells)


@dataclass(frozen=True)
class UnwatchedCell:
    """A cell of the contract that routing does not watch, with the reason."""

    clause: str
    slice: str
    why: str


@dataclass(frozen=True)
class GatewayStatus:
    """A gateway that has connected to the leader.

    Args:
        start: start of its process, unix seconds; heard: time of the last contact.
        version: version of the snapshot that it follows.
        taken: number of its first row that is not durable here; behind: rows queued here.
        skew_s: approximate seconds by which its clock is ahead.
        counts: its counters, in the form of proxy/counters.py.
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
    """State of the reference scorer; counts since this controller started.

    Args:
        alive: whether the train engine responds; problem: the reason if not, else "".
        queued, queued_tokens: rows and tokens in the queue; room: capacity in rows.
        dropped: rows that found the queue full and count as missing.
        scored, missing: rows with and without a logprob; outside: reason why a row is no
            evidence -> count.
        seconds: engine time used; budget: seconds per second that it may use; cost_s: seconds
            per request.
        lag_s: latest delay from a row's dispatch to its evidence; None: none yet.
        lags: histogram of the delays: {"buckets": {upper bound in seconds: rows}, "sum":
            seconds}; "inf" is the last bound.
        restarts: restarts of a dead engine.
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
class ReplicaStatus:
    """One of several servers of a pool.

    Args:
        weight: its share of the pool's requests, relative to the others.
        used_at, out_at: number of gateways that send it requests, and that do not; why: the reason
            of one of the latter.
        in_flight: requests in flight now.
    """

    url: str
    weight: float = 1.0
    used_at: int = 0
    out_at: int = 0
    why: str = ""
    in_flight: int = 0


@dataclass(frozen=True)
class SplitStatus:
    """The users of a promotion's step, since this leader began or the step did.

    Args:
        leg: the step; planned: share of the users that infer was to serve.
        users, infer: users that count, and those of them that infer served.
        failover, breaker: users whom stable served because infer gave no reply, or because its
            circuit breaker was open; apart: reason -> users to whom the share does not apply.
        log_evidence, log_price: log e-value against the planned share, and its alarm threshold,
            nats.
    """

    leg: str
    planned: float
    users: int = 0
    infer: int = 0
    failover: int = 0
    breaker: int = 0
    apart: Mapping[str, int] = field(default_factory=dict)
    log_evidence: float = 0.0
    log_price: float = float("inf")

    @property
    def problem(self) -> str:
        """The sentence of an alarm; "" without one."""
        if self.log_evidence < self.log_price:
            return ""
        failed = self.failover + self.breaker
        served = f"infer served {percent(self.infer / self.users)} of {self.users:,} users"
        why = f"; {failed:,} of the others came to stable because infer failed" if failed else ""
        return f"{served} of {self.leg}, and the step plans {percent(self.planned)}{why}"


@dataclass(frozen=True)
class PoolStatus:
    """A pool of upstreams.

    Args:
        in_flight: requests in flight now; peak: the recent maximum.
        most: its declared capacity in requests; None: not declared.
        open_at: number of gateways whose circuit breaker for it is open.
        replicas: its servers, if the contract names several.
    """

    in_flight: int = 0
    peak: int = 0
    most: int | None = None
    open_at: int = 0
    replicas: tuple[ReplicaStatus, ...] = ()

    @property
    def open(self) -> bool:
        return self.open_at > 0

    @property
    def headroom(self) -> int | None:
        """Free capacity in requests; None where the capacity is not declared."""
        return None if self.most is None else max(0, self.most - self.peak)


_SHOWN = 80  # characters of a gateway's message
_MOVED_S = 60.0  # a smaller correction of the system's clock is not reported
_TIMES = "times here follow the old clock until the next start; no pin and no route is changed"
# pool -> the effect of its open circuit breaker
_BROKEN: Mapping[str, str] = {
    "infer": "the circuit breaker of infer is open: stable serves in its place",
    "stable": "stable cannot be reached: requests that infer does not answer are refused",
}


@dataclass(frozen=True)
class ControllerStatus:
    """The complete status of a controller.

    Args:
        name, contract: name of the contract, and its digest.
        version, made, valid_until: of the current snapshot; unix seconds, made 0: not known.
        base, mirror, run, leg: a promotion's route; without one, the contract's own.
        split: who was served on a promotion's step; None: no clause tests it.
        transitions: the latest 50, newest last; moves: their total number.
        pools: "infer", "stable".
        diverted: share of all traffic that slices divert from infer, acted on or not.
        ledger_behind: entries not yet in the ledger; ledger, store, reload, effects: the
            problem of each, "" where there is none.
        moved_s: seconds by which the system's clock was set forward since the controller
            started; times here follow the old clock.
        reloaded: when this version of the contract was read; began: start of the controller.
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
    split: SplitStatus | None = None
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
        """The problems that need attention, each as a sentence."""
        of = (self.store, self.ledger, self.reload, self.effects, self.scoring.problem)
        pools = (_BROKEN[name] for name, pool in self.pools.items() if pool.open)
        logs = (
            f"gateway {gateway.name} cannot write its request log: {str(why)[:_SHOWN]}"
            for gateway in self.gateways
            if (why := gateway.counts.get("log"))
        )
        replicas = (
            f"a replica of {name} is not used, {replica.url}: {replica.why[:_SHOWN]}"
            for name, pool in self.pools.items()
            for replica in pool.replicas
            if replica.out_at
        )
        moved = abs(self.moved_s) >= _MOVED_S
        clock = (f"the system's clock was set by {self.moved_s:+,.0f} s: {_TIMES}",) * moved
        split = (self.split.problem,) if self.split is not None and self.split.problem else ()
        own = (problem for problem in of if problem)
        return (*own, *pools, *replicas, *split, *logs, *clock)
