# The leader: what gateways sampled becomes evidence here, and evidence becomes routes.
#
# Three threads: one scores, and keeps what was scored; one looks once a second at clocks, and at
# what could not be kept; one tells the ledger.

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import Any

from servanda.contract.model import Contract
from servanda.engines.worker import spawn
from servanda.errors import ContractError, ServandaError
from servanda.gateway.controller.ledger_history import run_of
from servanda.gateway.controller.ledger_outbox import Teller
from servanda.gateway.controller.messages import message_of, route_of
from servanda.gateway.controller.state import Change, Core
from servanda.gateway.controller.status import ScoringStanding, Standing
from servanda.gateway.controller.status_builder import diverted, slices_of, undrawn
from servanda.gateway.controller.watched_cells import watch
from servanda.gateway.controller.worker import Work
from servanda.gateway.http.clock import SteadyClock
from servanda.gateway.routing import state_machine
from servanda.gateway.routing.model import Decision, Known, Pin, PinTo, Snapshot
from servanda.gateway.routing.router import Router
from servanda.gateway.routing.state import Transition
from servanda.promotion.ledger.open import open_ledger
from servanda.promotion.notify.base import Sink
from servanda.runner.load import load
from servanda.runner.measurement import Open
from servanda.traces.serialization import to_plain

_EVERY_S = 1.0  # between two looks
_LONGEST_S = 60.0  # between two tries of what does not work
_BURST_S = 10.0  # of train's time, that may be spent at once


class Leader:
    """Leads the gateways of one contract.

    Every method may be called from any thread.

    Args:
        contract_path: of the contract; read again by `reload`.
        state: folder of the store; made where it does not exist.
        ledger: where decisions are kept, as --ledger names it; "": nowhere.
        clock: unix seconds; None: those of a `SteadyClock`.
        waits: whether the clock may be behind the state, as `Core` has it.
        open: of the engines.
        sinks: who is told of pages.
        actor: in the ledger, of what nobody asked for.
        key: of the ledger; None: that of SERVANDA_LEDGER_KEY.
        threads: whether it runs by itself; otherwise whoever has it calls `step`.
        timeout_s: after which an engine that does not answer is killed.
        room: rows that wait for train at most; beyond, the oldest are missing.

    Raises:
        ContractError: the contract cannot be followed, or the state is of another one.
        MeasurementError: the state folder cannot be used.
    """

    def __init__(
        self,
        contract_path: Path,
        *,
        state: Path,
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
        watching = watch(load(contract_path))
        self._began = self._reloaded = clock()
        self._core = Core(state, watching, now=self._began, actor=actor, waits=waits)
        try:
            self._work = Work(
                watching, self._core, open, clock=clock, timeout_s=timeout_s, room=room
            )
        except BaseException:
            self._core.close()
            raise
        self._reload, self._closed = "", Event()
        self._router = Router(self._core.snapshot)
        ledger_key = os.environ.get("SERVANDA_LEDGER_KEY", "").encode() if key is None else key
        self._teller = Teller(
            self._core.store,
            lambda: open_ledger(ledger, key=ledger_key),
            run_of(watching.contract.metadata.name),
            self._core.kept.leader,
            sinks,
            now=clock,
            wait=self._pause,
        )
        loops = (self._scoring, self._looking, self._telling) if threads else ()
        self._threads = [Thread(target=loop, daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    # what gateways and people ask

    def follow(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to POST /v1/follow.

        Raises:
            EvidenceError: the message is none.
        """
        said = message_of(message)
        taken, made = self._work.offer(said), self._core.snapshot
        shown = to_plain(made) if made.version > said.version else None
        now = self._clock()
        return {"taken": taken, "version": made.version, "snapshot": shown, "now": now}

    @property
    def contract(self) -> Contract:
        """What is followed now."""
        return self._core.rules.contract

    @property
    def snapshot(self) -> Snapshot:
        """What gateways are to follow now."""
        return self._core.snapshot

    def decide(self, known: Known) -> Decision:
        """Where one request goes, by the snapshot of now."""
        router, made = self._router, self._core.snapshot
        if router.snapshot is not made:
            router = self._router = Router(made)
        return router.decide(known, now=self._clock())

    def pin(
        self, slice_: str, to: PinTo, ttl_s: float, *, actor: str, reason: str
    ) -> tuple[Transition, ...]:
        """A person's word about a slice.

        Raises:
            ContractError: no such slice, or it cannot be.
            MeasurementError: it cannot be kept.
        """
        now = self._clock()
        return self._pinned(slice_, Pin(to, actor, reason, now + ttl_s), actor, reason, now)

    def unpin(self, slice_: str, *, actor: str, reason: str) -> tuple[Transition, ...]:
        """Take a pin back; of a slice without one nothing is changed.

        Raises: as `pin` does.
        """
        return self._pinned(slice_, None, actor, reason, self._clock())

    def _pinned(
        self, slice_: str, pin: Pin | None, actor: str, reason: str, now: float
    ) -> tuple[Transition, ...]:
        with self._work.commits:
            core = self._core
            state, moved = state_machine.pin(
                core.rules, core.state, slice_, pin, actor=actor, reason=reason, now=now
            )
            self._work.insist(Change(state, moved))
        return moved

    def route(self, body: Mapping[str, Any], *, actor: str) -> bool:
        """Follow a promotion's route effect; False where this turn of its run, or a later one,
        was followed before.

        Raises:
            EvidenceError: the body is none.
            MeasurementError: it cannot be kept.
        """
        route = route_of(body)
        with self._work.commits:
            state = state_machine.routed(self._core.state, **asdict(route))
            if state is self._core.state:
                return False
            self._work.insist(Change(state))
        return True

    def reload(self, *, actor: str) -> str:
        """Read the contract again; why it was refused, "" where it is followed now.

        Evidence stays where the contract means the same and the kernels are the same.
        """
        del actor  # the change is in the ledger by what is followed, not by who looked
        try:
            watching = watch(load(self._path))
            if watching.contract.metadata.name != self._core.rules.contract.metadata.name:
                raise ContractError(
                    "the contract has another name now: its history would be another's",
                    where=watching.contract.where("metadata", "name"),
                    hint="start a leader of its own for it",
                )
            self._work.follow(watching)
        except ServandaError as error:
            self._reload = str(error)
            return self._reload
        self._reload, self._reloaded = "", self._clock()
        return ""

    # what happens by itself

    def step(self) -> bool:
        """Score one batch, keep it, look, and tell; whether there is more to score."""
        more = self._work.score()
        self._work.settle()
        if self._ledger:
            self._teller.once()
        return more

    def _scoring(self) -> None:
        work, pause_s, spent_s, since = self._work, 0.0, 0.0, time.monotonic()
        while not self._closed.wait(pause_s):
            before = work.scorer.seconds
            if self._whole(work.score):
                self._whole(work.settle)
            elif work.problem:
                self._whole(work.settle)  # what found no room is missing, and that is kept
                pause_s = min(_LONGEST_S, max(_EVERY_S, 2 * pause_s))
                continue
            else:
                with work.lock:
                    work.wake.wait(_EVERY_S)
            # what train may take a second is a promise to whoever shares the machine with it
            now, budget = time.monotonic(), self._core.rules.policy.budget
            spent_s += max(0.0, work.scorer.seconds - before) - budget * (now - since)
            spent_s, since = max(0.0, spent_s), now
            pause_s = max(0.0, spent_s - _BURST_S) / budget

    def _whole(self, act: Callable[[], bool]) -> bool:
        """Do something; a bug of ours ends no thread, for routes would end with it."""
        try:
            return act()
        except Exception as error:
            self._work.problem = f"a bug of servanda: {type(error).__name__}: {error}"
            return False

    def _looking(self) -> None:
        while not self._closed.wait(_EVERY_S):
            self._whole(self._work.settle)

    def _telling(self) -> None:
        pause_s = _EVERY_S
        while self._ledger and not self._closed.wait(pause_s):
            told = self._whole(self._teller.once)
            pause_s = _EVERY_S if told else min(_LONGEST_S, 2 * pause_s)

    def _pause(self, seconds: float) -> None:
        self._closed.wait(seconds)

    # what is shown

    def standing(self) -> Standing:
        """How things stand now."""
        now, work, core = self._clock(), self._work, self._core
        contract, policy, made = core.rules.contract, core.rules.policy, core.snapshot
        behind = self._behind()  # a disk may take its time, and gateways do not wait for it
        with work.lock:
            gateways = work.gateways
            shares = gateways.shares(now)
            return Standing(
                name=contract.metadata.name,
                contract=contract.digest,
                mode=policy.mode,
                now=now,
                version=made.version,
                valid_until=made.valid_until,
                made=made.valid_until - policy.expires,
                began=self._began,
                reloaded=self._reloaded,
                base=made.base,
                mirror=made.mirror,
                run=made.run,
                leg=made.leg,
                slices=slices_of(
                    core.rules,
                    core.state,
                    made.slices,
                    floors=work.scorer.floors,
                    gateways=gateways,
                    history=work.history,
                    now=now,
                ),
                left_out=(*work.watching.left_out, *undrawn(core.rules, core.state)),
                transitions=core.shown,
                moves=core.state.transitions,
                pools=gateways.pools(now, policy.stable_in_flight),
                diverted=diverted(core.state, shares),
                gateways=gateways.standing(core.taken, Counter(work.intake.starts())),
                scoring=self._scored(),
                ledger_where=self._ledger.rpartition("@")[2],
                ledger_behind=behind,
                ledger=self._teller.problem,
                store=core.problem,
                reload=self._reload,
                effects=self._teller.missed,
                moved_s=self._clock.moved_s if isinstance(self._clock, SteadyClock) else 0.0,
            )

    def _behind(self) -> int:
        try:
            return self._core.store.behind()
        except ServandaError:
            return 0  # the store's own problem is shown

    def _scored(self) -> ScoringStanding:
        scorer, intake = self._work.scorer, self._work.intake
        return ScoringStanding(
            alive=scorer.alive,
            problem=self._work.problem,
            queued=intake.waiting,
            queued_tokens=intake.queued_tokens,
            room=intake.room,
            dropped=intake.dropped,
            scored=scorer.scored,
            missing=scorer.missing,
            errors=scorer.train.errors,
            outside=dict(intake.outside + scorer.outside),
            seconds=scorer.seconds,
            budget=self._core.rules.policy.budget,
            cost_s=scorer.cost_s,
            lag_s=self._core.lag_s,
            lags=self._core.lags.told(),
            restarts=scorer.train.restarts,
        )

    def close(self) -> None:
        """End threads and the engine; what is durable stays."""
        self._closed.set()
        with self._work.lock:
            self._work.wake.notify_all()
        self._work.close()
        for thread in self._threads:
            thread.join(_LONGEST_S)
        self._core.close()
