# Sends rows to the controller and receives snapshots, at least once per second.
#
# Rows are sent again until the controller confirms that they are stored, so that it may die at any
# time; a snapshot is used if it is later than the last one.  A refused message is sent again with
# half its rows, down to none.  If one row is refused and an empty message is not, the row is lost
# and does not block the others.
#
# Of several controllers one leads.  The one that took the last message is sent the next one; if it
# does not lead any more, or does not respond, the next message is sent to another.

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Raw

from servanda.errors import MeasurementError
from servanda.gateway.proxy.counters import add
from servanda.gateway.proxy.gateway import Gateway
from servanda.gateway.proxy.launch_log import MESSAGE_ROWS
from servanda.gateway.proxy.pools.upstreams import Server, UpstreamError
from servanda.gateway.routing.model import RequestFacts, snapshot_of
from servanda.gateway.routing.router import Router

_SELDOM_S, _OFTEN_S = 1.0, 0.2  # between two messages: without rows, and with rows
_WAIT_S = 10.0
_MOST = 16 << 20  # bytes of a response
_SALT, _LARGEST = 64, 2**53  # bytes; an integer that every JSON reader can represent
# statuses that may mean an invalid row
_OF_A_ROW = (400, 413, 422, 500)
_DOES_NOT_LEAD = 503  # or cannot store anything now


class _Reply(msgspec.Struct):
    taken: int = 0
    version: int = 0
    snapshot: Any = None
    now: float = 0.0


_read = msgspec.json.Decoder(_Reply).decode


class ControllerSync:
    """Sends rows to a controller and receives snapshots.

    Args:
        controllers: empty: no controller; rows go only to the log.
    """

    def __init__(self, gateway: Gateway, controllers: Sequence[Server]) -> None:
        self._gateway, self._controllers = gateway, deque(controllers)
        self._ready = asyncio.Event()
        self._over = False
        self._rows = MESSAGE_ROWS  # most rows of a message
        self._took = False  # whether to confirm a new snapshot
        self._heard_alone = False  # whether the last message had no rows and was accepted
        gateway.launches.on_ready = self._ready.set
        gateway.assignments.leads = bool(controllers)

    async def run(self) -> None:
        """Run until `stop`."""
        for controller in self._controllers:
            await controller.open()
        while not self._over:
            well = False
            with self._gateway.observers.log:  # the routes are followed whatever cannot be sent
                well = await self.once()
            if self._over:
                break
            await asyncio.sleep(_OFTEN_S)
            took, self._took = self._took, False
            if self._controller is not None and self._controller.about.probe is not None:
                continue  # its address is not known yet: a retry costs nothing
            if not well or not (took or self._gateway.launches.waiting()):
                self._ready.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(
                        self._ready.wait() if well else asyncio.Event().wait(), _SELDOM_S
                    )

    def stop(self, running: asyncio.Future[None]) -> None:
        """End `run`.

        Before Python 3.12 a `wait_for` whose work completes in the same loop turn swallows a
        cancellation, so a cancellation alone is not sufficient.
        """
        self._over = True
        running.cancel()

    async def close(self) -> None:
        """Send the last rows, if the controller responds."""
        await self.once()
        for controller in self._controllers:
            await controller.close()

    @property
    def _controller(self) -> Server | None:
        """The one that is sent the next message."""
        return self._controllers[0] if self._controllers else None

    async def once(self) -> bool:
        """Send one message; returns whether there was a response."""
        gateway = self._gateway
        with gateway.observers.log:
            gateway.launches.sweep()
            if gateway.log is not None:
                gateway.log.flush()
        controller = self._controller
        if controller is None:
            gateway.launches.taken(gateway.launches.last)
            return True
        if (met := controller.about.probe) is not None:
            try:
                controller.about = met()
            except MeasurementError:
                return False
        rows, assigned = gateway.launches.waiting(self._rows), gateway.assignments.waiting()
        asked_at = gateway.now()
        try:
            status, text = await controller.ask(
                "/v1/follow", self._message(rows, assigned), _WAIT_S, _MOST
            )
        except UpstreamError:
            add(gateway.counts.reflexes, "no leader")
            self._controllers.rotate(-1)
            return False
        if status != 200:
            if status == _DOES_NOT_LEAD:
                self._controllers.rotate(-1)
            add(gateway.counts.reflexes, f"leader {status // 100}xx")
            if status in _OF_A_ROW:
                if len(rows) == 1 and self._heard_alone:
                    gateway.launches.refused()
                    add(gateway.counts.reflexes, "refused row")
                self._rows, self._heard_alone = len(rows) // 2, False
            return False
        try:
            self._accept(_read(text), asked_at)
        except Exception:  # whatever the error, it is sent again
            add(gateway.counts.reflexes, "odd snapshot")
            return False
        gateway.assignments.taken(assigned)
        self._heard_alone = not self._rows
        self._rows = min(max(1, 2 * self._rows), MESSAGE_ROWS)
        return True

    def _message(self, rows: list[bytes], assigned: list[dict[str, Any]]) -> bytes:
        gateway, launches = self._gateway, self._gateway.launches
        snapshot, counts = gateway.snapshot, {}
        with gateway.observers.counters:
            counts = gateway.report()
        return msgspec.json.encode(
            {
                "gateway": gateway.config.name,
                "start": gateway.started,
                "version": snapshot.version if snapshot is not None else 0,
                "first": launches.first,
                "rows": [Raw(row) for row in rows],
                "counts": counts,
                "assigned": assigned,
            }
        )

    def _accept(self, reply: _Reply, asked_at: float) -> None:
        """Apply a response.

        Args:
            asked_at: when it was requested: a snapshot is valid for the controller's duration from
                then on, by our own clock, even if the two clocks differ.
        """
        gateway = self._gateway
        gateway.launches.taken(min(reply.taken, gateway.launches.last))
        if reply.snapshot is None:
            return
        snapshot = snapshot_of(reply.snapshot)
        if len(bytes.fromhex(snapshot.salt)) > _SALT or not math.isfinite(snapshot.valid_until):
            raise ValueError("a snapshot has an end, and a salt that splits")
        if not 0 < snapshot.version < _LARGEST:
            raise ValueError("a snapshot has a number")
        if not (reply.now > 0 and math.isfinite(reply.now)):
            raise ValueError("a leader says by which time its snapshot ends")
        # an invalid snapshot must fail here, not in a user's request
        Router(snapshot).decide(RequestFacts("", ""), now=gateway.now())
        left_s = snapshot.valid_until - reply.now
        self._took = gateway.take(replace(snapshot, valid_until=asked_at + left_s))
        if not self._took:
            add(gateway.counts.reflexes, "old snapshot")
