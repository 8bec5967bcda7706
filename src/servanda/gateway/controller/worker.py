# The worker of a controller: turns rows into stored evidence and routes.  It starts no thread.
#
# Three locks, taken in this order: for the engine, for stored data, and one that is held only
# briefly, so that gateways and readers of the status do not wait.

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Condition, RLock

from servanda.errors import ContractError, MeasurementError, ServandaError
from servanda.gateway.controller.gateways import Gateways
from servanda.gateway.controller.intake import Intake
from servanda.gateway.controller.messages import Message
from servanda.gateway.controller.rescoring import ScoredRow, Scorer, TrainDownError
from servanda.gateway.controller.state import Change, ControllerState
from servanda.gateway.controller.status import ScoringStatus
from servanda.gateway.controller.watched_cells import WatchedCells
from servanda.gateway.routing.model import AWAY
from servanda.gateway.routing.split_record import SplitRecord
from servanda.judgement.breakdown import Advice
from servanda.runner.measurement import Open

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
