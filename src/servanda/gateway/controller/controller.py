# The controller: turns sampled requests into evidence, and evidence into routes.
#
# Three threads: one scores and commits; one checks clocks and failed commits once per second; one
# writes to the ledger.

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from threading import Condition, Event, RLock, Thread
from typing import Any

from servanda.contract.model import Contract
from servanda.engines.worker import spawn
from servanda.errors import ContractError, MeasurementError, ServandaError
from servanda.gateway.controller.gateways import Gateways, SplitRecord
from servanda.gateway.controller.intake import Intake
from servanda.gateway.controller.ledger_history import run_of
from servanda.gateway.controller.messages import Message, PromotionRoute, message_of
from servanda.gateway.controller.rescoring import ScoredRow, Scorer, TrainDownError
from servanda.gateway.controller.state import Change, ControllerState
from servanda.gateway.controller.status import (
    CellStatus,
    ControllerStatus,
    ScoringStatus,
    SliceStatus,
    SplitStatus,
    UnwatchedCell,
)
from servanda.gateway.controller.store import Store
from servanda.gateway.controller.watched_cells import WatchedCells, select_cells
from servanda.gateway.http.clock import SteadyClock
from servanda.gateway.routing import state_machine
from servanda.gateway.routing.evidence_price import (
    evidence_within,
    log_above,
    log_prices,
    mean,
    requests_to_decide,
)
from servanda.gateway.routing.model import (
    AWAY,
    Decision,
    Pin,
    PinTo,
    RequestFacts,
    SliceRoute,
    Snapshot,
)
from servanda.gateway.routing.router import Router
from servanda.gateway.routing.snapshot import acts
from servanda.gateway.routing.state import (
    RoutingState,
    Rules,
    SliceState,
    Track,
    Transition,
    WatchedCell,
)
from servanda.judgement.breakdown import Advice
from servanda.promotion.ledger.entry import Outrun, Record
from servanda.promotion.ledger.ledger import Ledger, open_ledger
from servanda.promotion.notify.base import Sink
from servanda.promotion.run.outbox import deliver
from servanda.runner.load import load
from servanda.runner.measurement import Open
from servanda.theory.stats.alpha import log_price
from servanda.traces.request_log import BREAKER, FAILOVER
from servanda.traces.serialization import from_plain, to_plain

# The worker of a controller: turns rows into stored evidence and routes.  It starts no thread.
#
# Three locks, taken in this order: for the engine, for stored data, and one that is held only
# briefly, so that gateways and readers of the status do not wait.


_TOKENS = 65_536  # of a batch
_EARLY_S = 30.0  # in which gateways reconnect to a restarted controller


class Worker:
    """Performs the steps of a controller; thread-safe.

    Args:
        clock: returns unix seconds.
        timeout_s: time after which an unresponsive engine is killed.
        room: most rows in the queue for scoring.

    `problem`: the reason why scoring has stopped; "" if it works.
    """

    def __init__(
        self,
        cells: WatchedCells,
        state: ControllerState,
        open_: Open,
        *,
        clock: Callable[[], float],
        timeout_s: float,
        room: int,
    ) -> None:
        self.cells, self.state, self._open = cells, state, open_
        self._clock, self._timeout_s, self._began = clock, timeout_s, clock()
        self._scores, self.commits, self.lock = RLock(), RLock(), RLock()
        self.wake = Condition(self.lock)
        self.intake = Intake(state.taken, rows=room)
        self.gateways = Gateways()
        self.split: SplitRecord | None = None
        self.advice: dict[str, Advice] = {}  # of each diverted slice, from its diversion
        self.scorer = self._new_scorer(cells)
        self.problem = ""
        # with the epoch of their scoring
        self._done: deque[tuple[int, ScoredRow]] = deque()
        try:
            self.scorer.start()
        except ContractError:
            raise
        except ServandaError as error:  # its description is requested with the first row
            self.problem = _first(error)
        self.settle()

    def _new_scorer(self, cells: WatchedCells) -> Scorer:
        return Scorer(
            cells,
            self._open,
            clock=time.monotonic,
            timeout_s=self._timeout_s,
            seeds=self.state.store.seeds(),
            since=self.state.meta.since,
        )

    def offer(self, message: Message) -> int:
        """Accept a gateway's message; returns the number of the first row that is not durable."""
        now = self._clock()
        with self.lock:
            taken = self.intake.offer(message, now=now)
            self.gateways.record(message, now=now)
            if (split := self._current_split()) is not None:
                split.record(message.assignments)
            self.wake.notify_all()
        if message.version > self.state.snapshot.version:
            with self.commits:
                self.state.outrun(message.version)
        return taken

    def _current_split(self) -> SplitRecord | None:
        """The users of the promotion's step, if the contract has a clause about its split."""
        snapshot = self.state.snapshot
        tolerance = self.cells.split_tolerance(snapshot.leg)
        if tolerance is None or not snapshot.base:
            self.split = None
            return None
        step = (snapshot.run, snapshot.leg, snapshot.base, tolerance)
        split = self.split
        if split is None or (split.run, split.leg, split.planned, split.tolerance) != step:
            self.split = SplitRecord(*step)
        return self.split

    def score(self) -> bool:
        """Score one batch; returns whether a batch was scored."""
        size = self.cells.contract.kernels.train.batch_size
        with self._scores:
            epoch = self.state.epoch
            with self.lock:
                rows = self.intake.take(size, _TOKENS, now=self._clock())
            try:
                scored = self.scorer.score(rows) if rows else []
                self.problem = "" if rows else self.problem
            except TrainDownError as down:
                self.problem = _first(down)
                scored = self._without_train(down, size)
            except BaseException:
                with self.lock:
                    self.intake.put_back(rows)
                raise
            with self.commits:
                self._done.extend((epoch, row) for row in scored)
        return bool(scored) and not self.problem

    def _without_train(self, down: TrainDownError, size: int) -> list[ScoredRow]:
        """Count rows dropped from a full queue as missing; needs no train kernel."""
        with self.lock:
            self.intake.put_back(down.rows)
            rows = self.intake.take(size, _TOKENS, now=self._clock(), dropped=True)
        try:
            return self.scorer.score(rows) if rows else []
        except TrainDownError as again:
            with self.lock:
                self.intake.put_back(again.rows)
            return []

    def settle(self) -> bool:
        """Store scored rows and evaluate the slices; returns whether they were stored."""
        with self.commits:
            change = self.state.identify(self.scorer.described, now=self._clock())
            if change is not None:
                if not self.commit(change):
                    return False
                self.scorer.since = self.state.meta.since
            waiting = [*self._done]
            # scores of replaced kernels are no evidence
            scored = [s if e == self.state.epoch else ScoredRow(s.row) for e, s in waiting]
            before = self._diverted()
            if not self.commit(self.state.with_evidence(scored)):
                return False
            self._advise(before)
            for _ in waiting:
                self._done.popleft()
            with self.lock:
                self.intake.durable([s.row for s in scored])
            return True

    def _diverted(self) -> frozenset[str]:
        slices = self.state.routing.slices.values()
        return frozenset(slice_.name for slice_ in slices if slice_.status in AWAY)

    def _advise(self, before: frozenset[str]) -> None:
        """Look for the cause where a slice is diverted now; forget that of slices that returned."""
        now = self._diverted()
        new, kept = now - before, {n: a for n, a in self.advice.items() if n in now}
        if new:
            found = self.scorer.recent.advice(self.cells.contract)
            kept |= dict.fromkeys(new, found) if found is not None else {}
        self.advice = kept

    def commit(self, change: Change) -> bool:
        """Store a change; returns whether it was stored."""
        now = self._clock()
        with self.lock:
            facts = self.gateways.facts(now, self.scorer.noise.floors)
            rates = self.gateways.rates(now)
            # after a restart the traffic is unknown for a moment, which is not recorded
            early = not self.gateways.any and now < self._began + _EARLY_S
        cost_s = self.scorer.cost_s or 0.0
        return self.state.commit(
            change, None if early else facts, now=now, rates=rates, cost_s=cost_s
        )

    def commit_or_raise(self, change: Change) -> None:
        """Store a change that a person requested.

        Raises:
            MeasurementError: it cannot be stored, and nothing was changed.
        """
        if not self.commit(change):
            raise MeasurementError(
                f"the change cannot be stored now: {self.state.problem}",
                hint="nothing was changed; repeat the request when the store works",
            )

    def follow(self, cells: WatchedCells) -> None:
        """Follow another version of the contract.

        Raises:
            ServandaError: it is refused; the previous version stays in effect.
        """
        with self._scores:
            old, new = self.cells.contract, cells.contract
            scorer, same = self._new_scorer(cells), old.kernels.train == new.kernels.train
            scorer.adopt(self.scorer, engine=same)
            try:
                scorer.start()  # loading may take longer than a route lasts: other threads continue
                with self.commits:
                    keep = old.digest == new.digest
                    self.commit_or_raise(self.state.follow(cells, keep=keep, now=self._clock()))
                    before, self.scorer, self.cells = self.scorer, scorer, cells
                    scorer.since = self.state.meta.since
                    self.problem = ""
            except BaseException:
                self.scorer.adopt(scorer, engine=same)
                scorer.train.end()
                raise
            before.train.end()
            self.settle()

    def status(self) -> ScoringStatus:
        """The status of scoring; the caller holds `lock`."""
        scorer, intake, lag_s = self.scorer, self.intake, self.state.lag_s
        return ScoringStatus(
            alive=scorer.train.alive,
            problem=self.problem,
            queued=intake.waiting,
            queued_tokens=intake.queued_tokens,
            room=intake.room,
            dropped=intake.dropped,
            scored=scorer.scored,
            missing=scorer.missing,
            errors=scorer.train.errors,
            outside=dict(intake.outside + scorer.outside),
            seconds=scorer.seconds,
            budget=self.state.rules.policy.budget,
            cost_s=scorer.cost_s,
            lag_s=lag_s,
            lags=self.state.lags.to_dict() if lag_s is not None else {},
            restarts=scorer.train.restarts,
        )


def _first(error: ServandaError) -> str:
    return str(error).split("\n", 1)[0]


_EVERY_S = 1.0  # between two checks
_LONGEST_S = 60.0  # before an operation that failed is retried
_BURST_S = 10.0  # burst of scoring time on the train kernel
_TRIES = 3  # to append, while others append to the same run
_ERRORS = 2.0  # standard errors on each side of an estimate


class Controller:
    """Scores the samples of the gateways of one contract and publishes their routes.

    Every method may be called from any thread.

    Args:
        contract_path: file of the contract; `reload` reads it again.
        store: opens the store of the contract, which `close` closes.
        ledger: location of the ledger, as in --ledger; "": none.
        clock: returns unix seconds; None: a `SteadyClock`.
        waits: whether the clock may be behind the state, see `ControllerState`.
        open: opens an engine.
        sinks: notifiers of pages.
        actor: name in the ledger for automatic decisions.
        key: key of the ledger; None: SERVANDA_LEDGER_KEY.
        threads: whether it starts its own threads; otherwise the caller calls `step`.
        timeout_s: time after which an unresponsive engine is killed.
        room: most rows in the queue for scoring; beyond it the oldest count as missing.

    Raises:
        ContractError: the contract cannot be followed, or the state belongs to another one.
        MeasurementError: the store cannot be used; StandbyError: another leader leads.
    """

    def __init__(
        self,
        contract_path: Path,
        *,
        store: Callable[[], Store],
        ledger: str,
        clock: Callable[[], float] | None = None,
        open: Open = spawn,
        sinks: Sequence[Sink] = (),
        actor: str = "servanda",
        key: bytes | None = None,
        threads: bool = True,
        timeout_s: float = 120.0,
        room: int = 4096,
        waits: bool = False,
    ) -> None:
        clock = clock or SteadyClock()
        self._path, self._clock, self._ledger = contract_path, clock, ledger
        self._began = self._reloaded = clock()
        cells, opened = select_cells(load(contract_path)), store()
        try:
            self._state = ControllerState(opened, cells, now=self._began, actor=actor, waits=waits)
            self._worker = Worker(
                cells, self._state, open, clock=clock, timeout_s=timeout_s, room=room
            )
        except BaseException:
            opened.close()
            raise
        self._reload, self._closed = "", Event()
        self._router = Router(self._state.snapshot)
        ledger_key = os.environ.get("SERVANDA_LEDGER_KEY", "").encode() if key is None else key
        self._outbox = LedgerOutbox(
            self._state.store,
            lambda: open_ledger(ledger, key=ledger_key),
            run_of(cells.contract.metadata.name),
            self._state.meta.leader,
            sinks,
            now=clock,
            wait=self._pause,
        )
        loops = (self._score_loop, self._settle_loop, self._ledger_loop) if threads else ()
        self._threads = [Thread(target=loop, daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    # requests of gateways and people

    def follow(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to POST /v1/follow.

        Raises:
            EvidenceError: the message is invalid.
        """
        parsed = message_of(message)
        taken, made = self._worker.offer(parsed), self._state.snapshot
        snapshot = to_plain(made) if made.version > parsed.version else None
        now = self._clock()
        return {"taken": taken, "version": made.version, "snapshot": snapshot, "now": now}

    @property
    def leads(self) -> bool:
        """Whether it may answer; a leader that was replaced may not."""
        return self._state.store.leads

    @property
    def lost(self) -> bool:
        """Whether it may never answer again: close it, and open another."""
        return self._state.store.lost

    @property
    def term(self) -> int:
        """The number of the lead, larger than that of each earlier leader."""
        return self._state.store.term

    @property
    def contract(self) -> Contract:
        """The contract that is in effect."""
        return self._state.rules.contract

    @property
    def snapshot(self) -> Snapshot:
        """The current snapshot of routes."""
        return self._state.snapshot

    def decide(self, facts: RequestFacts) -> Decision:
        """The route of one request under the current snapshot."""
        router, snapshot = self._router, self._state.snapshot
        if router.snapshot is not snapshot:
            router = self._router = Router(snapshot)
        return router.decide(facts, now=self._clock())

    def pin(
        self, slice_: str, to: PinTo | None, ttl_s: float = 0.0, *, actor: str, reason: str
    ) -> tuple[Transition, ...]:
        """Pin a slice.

        Args:
            to: None releases the pin; a slice without a pin is left unchanged.

        Raises:
            ContractError: no such slice, or the pin is not possible.
            MeasurementError: the change cannot be stored.
        """
        pin = Pin(to, actor, reason, self._clock() + ttl_s) if to is not None else None
        with self._worker.commits:
            rules, routing, now = self._state.rules, self._state.routing, self._clock()
            state, transitions = state_machine.pin(
                rules, routing, slice_, pin, actor=actor, reason=reason, now=now
            )
            self._worker.commit_or_raise(Change(state, transitions))
        return transitions

    def route(self, route: PromotionRoute) -> bool:
        """Apply a promotion's route; False if this revision or a later one was applied before.

        Raises:
            MeasurementError: the change cannot be stored.
        """
        with self._worker.commits:
            state = state_machine.with_route(
                self._state.routing,
                share=route.share,
                mirror=route.mirror or 0.0,
                sample=route.sample or 0.0,
                run=route.run,
                leg=route.leg,
                turn=route.turn,
            )
            if state is self._state.routing:
                return False
            self._worker.commit_or_raise(Change(state))
        return True

    def reload(self) -> str:
        """Read the contract again; returns why it was refused, "" if it is in effect now.

        Evidence is kept if the meaning of the contract and the kernels are unchanged.
        """
        try:
            cells = select_cells(load(self._path))
            if cells.contract.metadata.name != self.contract.metadata.name:
                raise ContractError(
                    "the contract has another name now: the history belongs to the old one",
                    where=cells.contract.where("metadata", "name"),
                    hint="start a separate leader for it",
                )
            self._worker.follow(cells)
        except ServandaError as error:
            self._reload = str(error)
            return self._reload
        self._reload, self._reloaded = "", self._clock()
        return ""

    # background work

    def step(self) -> bool:
        """Score one batch, commit, evaluate and write to the ledger; whether more is queued."""
        more = self._worker.score()
        self._worker.settle()
        if self._ledger:
            self._outbox.deliver()
        return more

    def _score_loop(self) -> None:
        worker, pause_s, spent_s, since = self._worker, 0.0, 0.0, time.monotonic()
        while not self._closed.wait(pause_s):
            before = worker.scorer.seconds
            if self._guarded(worker.score):
                self._guarded(worker.settle)
            elif worker.problem:
                self._guarded(worker.settle)  # rows dropped from a full queue are stored as missing
                pause_s = min(_LONGEST_S, max(_EVERY_S, 2 * pause_s))
                continue
            else:
                with worker.lock:
                    worker.wake.wait(_EVERY_S)
            # the limit on scoring time protects other processes on the same machine
            now, budget = time.monotonic(), self._state.rules.policy.budget
            spent_s += max(0.0, worker.scorer.seconds - before) - budget * (now - since)
            spent_s, since = max(0.0, spent_s), now
            pause_s = max(0.0, spent_s - _BURST_S) / budget

    def _guarded(self, act: Callable[[], bool]) -> bool:
        """Run a task; a bug in it must not end the thread, because routes would expire."""
        try:
            return act()
        except Exception as error:
            self._worker.problem = f"a bug of servanda: {type(error).__name__}: {error}"
            return False

    def _settle_loop(self) -> None:
        while not self._closed.wait(_EVERY_S):
            self._guarded(self._worker.settle)

    def _ledger_loop(self) -> None:
        pause_s = _EVERY_S
        while self._ledger and not self._closed.wait(pause_s):
            delivered = self._guarded(self._outbox.deliver)
            pause_s = _EVERY_S if delivered else min(_LONGEST_S, 2 * pause_s)

    def _pause(self, seconds: float) -> None:
        self._closed.wait(seconds)

    # status

    def status(self) -> ControllerStatus:
        now, worker, state = self._clock(), self._worker, self._state
        rules, routing, snapshot = state.rules, state.routing, state.snapshot
        behind = 0  # disk access may be slow; gateways do not wait for it
        with suppress(ServandaError):  # the status shows the problem of the store
            behind = self._state.store.behind()
        with worker.lock:
            gateways = worker.gateways
            shares = gateways.shares(now)
            return ControllerStatus(
                name=rules.contract.metadata.name,
                contract=rules.digest,
                mode=rules.policy.mode,
                now=now,
                version=snapshot.version,
                valid_until=snapshot.valid_until,
                made=snapshot.valid_until - rules.policy.expires,
                began=self._began,
                reloaded=self._reloaded,
                base=snapshot.base,
                mirror=snapshot.mirror,
                run=snapshot.run,
                leg=snapshot.leg,
                split=split_of(rules, worker.split),
                slices=slices_of(
                    rules,
                    routing,
                    snapshot.slices,
                    floors=worker.scorer.noise.floors,
                    gateways=gateways,
                    advice=worker.advice,
                    now=now,
                ),
                left_out=(*worker.cells.left_out, *undrawn(rules, routing)),
                transitions=state.shown,
                moves=routing.transitions,
                pools=gateways.pools(now, rules.policy),
                diverted=diverted(routing, shares),
                gateways=gateways.status(state.taken, Counter(worker.intake.starts())),
                scoring=worker.status(),
                ledger_where=self._ledger.rpartition("@")[2],
                ledger_behind=behind,
                ledger=self._outbox.problem,
                store=state.problem,
                reload=self._reload,
                effects=self._outbox.missed,
                moved_s=self._clock.moved_s if isinstance(self._clock, SteadyClock) else 0.0,
            )

    def close(self) -> None:
        """Stop the threads and the engine; stored data is kept."""
        self._closed.set()
        with self._worker.lock:
            self._worker.wake.notify_all()
        self._worker.scorer.train.end()
        for thread in self._threads:
            thread.join(_LONGEST_S)
        self._state.store.close()


# Delivers the outbox of a controller's store to the ledger, and from there to notifiers.
#
# A record is stored with its decision and deleted once the ledger has it.  So the ledger may be
# unavailable for any time, and a process killed in between writes no entry twice.


class LedgerOutbox:
    """Delivers records to the ledger, then to the notifiers.

    Args:
        open_: opens the ledger; called each time, because a connection may be lost.
        run, leader: the owner of the entries; now: returns unix seconds; wait: sleeps for seconds.

    `problem`, `missed`: the problem of the ledger and of a notifier; "" for none.
    """

    def __init__(
        self,
        store: Store,
        open_: Callable[[], Ledger],
        run: str,
        leader: str,
        sinks: Sequence[Sink],
        *,
        now: Callable[[], float],
        wait: Callable[[float], None],
    ) -> None:
        self._store, self._open, self._sinks = store, open_, sinks
        self._run, self._leader, self._now, self._wait = run, leader, now, wait
        self._seq = self._n = self._o = 0  # of the run, and of its own entries in it
        self._late = bool(sinks)  # notifications of an earlier process may be pending
        self.problem = self.missed = ""

    def deliver(self) -> bool:
        """Deliver all pending records; returns whether none is left.

        Another leader delivers them when this one does not lead.
        """
        if not self._store.leads:
            return False
        try:
            if not self._store.behind() and not self._late:
                return True
            with closing(self._open()) as ledger:
                self._append(ledger)
                self.problem = ""
                if self._late:
                    wait, now = self._wait, self._now
                    deliveries = deliver(ledger, self._run, self._sinks, now=now, wait=wait)
                    missed = [
                        f"{d.sink} was not notified: {d.problem}" for d in deliveries if d.problem
                    ]
                    self.missed, self._late = "; ".join(missed), bool(missed)
        except ServandaError as error:
            self.problem = str(error).split("\n", 1)[0]
        return not self.problem and not self._late

    def _append(self, ledger: Ledger) -> None:
        while pending := self._store.outbox():
            for last in range(_TRIES):
                self._read(ledger)
                records = [
                    from_plain(Record, record) for o, record in pending.items() if o > self._o
                ]
                try:
                    ledger.append(self._run, records, after=self._n)
                    break
                except Outrun:
                    if last == _TRIES - 1:
                        raise
            self._store.delete_outbox(max(pending))
            self._late = bool(self._sinks)

    def _read(self, ledger: Ledger) -> None:
        """Read the entries that were written to the run since."""
        for entry in ledger.entries(self._run, since=self._seq):
            self._seq, self._n = entry.seq, entry.n
            if entry.body.get("leader") == self._leader:
                self._o = max(self._o, int(entry.body["o"]))


# Builds a status from the parts of a controller.


def slices_of(
    rules: Rules,
    state: RoutingState,
    routes: Sequence[SliceRoute],
    *,
    floors: Mapping[tuple[str, str], float],
    gateways: Gateways,
    advice: Mapping[str, Advice],
    now: float,
) -> tuple[SliceStatus, ...]:
    """Every slice, in the order of the snapshot."""
    shares = gateways.shares(now)
    served = gateways.served()
    by_name = {route.name: route for route in routes}
    return tuple(
        SliceStatus(
            name=slice_.name,
            status=slice_.status,
            since=slice_.since,
            acts=acts(rules, slice_),
            held=slice_.held,
            pin=slice_.pin,
            route=by_name[slice_.name].share if slice_.name in by_name else 1.0,
            share=shares.get(slice_.name),
            served=served.get(slice_.name, {}),
            cells=tuple(_cell(rules, cell, slice_, floors) for cell in rules.on(slice_.name)),
            keys=len(slice_.keys),
            scored=slice_.scored,
            sample=by_name[slice_.name].sample if slice_.name in by_name else 0.0,
            relapses=slice_.relapses,
            advice=advice.get(slice_.name),
        )
        for slice_ in state.slices.values()
    )


def split_of(rules: Rules, split: SplitRecord | None) -> SplitStatus | None:
    """The users of a promotion's step."""
    if split is None:
        return None
    return SplitStatus(
        leg=split.leg,
        planned=split.planned,
        users=split.users,
        infer=split.infer,
        failover=split.causes[FAILOVER],
        breaker=split.causes[BREAKER],
        apart=dict(split.apart),
        log_evidence=split.log_e,
        log_price=log_price(1 / rules.policy.enter_evidence),
    )


def _cell(
    rules: Rules,
    cell: WatchedCell,
    slice_: SliceState,
    floors: Mapping[tuple[str, str], float],
) -> CellStatus:
    track = slice_.track(cell.clause)
    back = evidence_within(rules, cell, track, slice_.doubts.get(cell.clause))
    enter, alarm, leave = log_prices(rules)
    floor = floors.get((cell.clause, cell.slice))
    met = bool(track.above)
    return CellStatus(
        clause=cell.clause,
        limit=cell.low + cell.scale * cell.limit,
        unit=cell.unit,
        value=cell.low + cell.scale * track.weighted / track.weights if track.weights > 0 else None,
        interval=_interval(cell, track),
        floor=None if floor is None else cell.low + cell.scale * floor,
        log_evidence=log_above(cell, track.above) if met else 0.0,
        log_price=enter,
        log_alarm=log_above(cell, track.alarm) if met else -math.inf,
        log_alarm_price=alarm,
        log_below=back.log_evidence,
        log_leave_price=leave,
        n=track.n,
        more=None if back.paid else requests_to_decide(rules, cell, track),
        missing=track.missing,
        diverts=cell.diverts,
        critical=cell.critical,
        refutes=cell.refutes,
    )


def _interval(cell: WatchedCell, track: Track) -> tuple[float, float] | None:
    """Approximate: as for independent Bernoulli samples, which have the largest variance."""
    if cell.refutes or track.weights <= 0 or not track.tokens:
        return None
    center = min(1.0, max(0.0, mean(track)))
    error = _ERRORS * math.sqrt(center * (1 - center) / track.tokens)
    low, high = max(0.0, center - error), min(1.0, center + error)
    return cell.low + cell.scale * low, cell.low + cell.scale * high


def undrawn(rules: Rules, state: RoutingState) -> tuple[UnwatchedCell, ...]:
    """Slices with scored requests whose sampler could not be tested."""
    why = "the infer kernel reports no top-k logprobs"
    scored = [c for c in rules.watched if c.refutes and state.slices[c.slice].scored]
    blind = [c for c in scored if not state.slices[c.slice].track(c.clause).tokens]
    if blind and blind == scored:
        return (UnwatchedCell(blind[0].clause, "any slice", why),)
    return tuple(UnwatchedCell(cell.clause, cell.slice, why) for cell in blind)


def diverted(state: RoutingState, shares: Mapping[str, float]) -> float:
    """Share of all traffic that slices divert from infer; slices that overlap are added."""
    away = (slice_.name for slice_ in state.slices.values() if slice_.status in AWAY)
    return min(1.0, math.fsum(shares.get(name, 0.0) for name in away))
