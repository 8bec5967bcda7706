# Rows to the controller, and snapshots from it, in one question a second at least.
#
# Rows go again until the controller says that they are safe, so that it may die at any time; a
# snapshot is followed if it is later than the one before.  A message that is refused is sent
# again with half its rows, down to none: a row that is refused where none of it is not is lost,
# and keeps no other one waiting.

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Raw

from servanda.errors import MeasurementError
from servanda.gateway.proxy.counters import add
from servanda.gateway.proxy.gateway import Gateway
from servanda.gateway.proxy.launch_log import MESSAGE_ROWS
from servanda.gateway.proxy.upstreams import Server, UpstreamError
from servanda.gateway.routing.model import RequestFacts, snapshot_of
from servanda.gateway.routing.router import Router

_SELDOM_S, _OFTEN_S = 1.0, 0.2  # between two questions: where nothing waits, and where rows do
_WAIT_S = 10.0
_MOST = 16 << 20  # bytes of an answer
_SALT, _LARGEST = 64, 2**53  # bytes; a number that every reader of JSON knows
# statuses by which it may be a row that the controller cannot take
_OF_A_ROW = (400, 413, 422, 500)


class _Reply(msgspec.Struct):
    taken: int = 0
    version: int = 0
    snapshot: Any = None
    now: float = 0.0


_read = msgspec.json.Decoder(_Reply).decode


class ControllerSync:
    """Sends rows to a controller, and takes snapshots from it.

    Args:
        controller: None: there is none, and rows go to the log alone.
    """

    def __init__(self, gateway: Gateway, controller: Server | None) -> None:
        self._gateway, self._controller = gateway, controller
        self._ready = asyncio.Event()
        self._over = False
        self._rows = MESSAGE_ROWS  # of a message, at most
        self._took = False  # whether a snapshot came that the controller is to hear of
        self._heard_alone = False  # whether the last message had no rows, and was heard
        gateway.launches.on_ready = self._ready.set

    async def run(self) -> None:
        """Until it is told to stop."""
        if self._controller is not None:
            await self._controller.open()
        while not self._over:
            well = await self.once()
            if self._over:
                break
            await asyncio.sleep(_OFTEN_S)
            took, self._took = self._took, False
            if self._controller is not None and self._controller.about.probe is not None:
                continue  # nobody knows where it is: asking again costs nothing
            if not well or not (took or self._gateway.launches.waiting()):
                self._ready.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(
                        self._ready.wait() if well else asyncio.Event().wait(), _SELDOM_S
                    )

    def stop(self, running: asyncio.Future[None]) -> None:
        """End `run`.

        Before Python 3.12 a `wait_for` whose work is done in the same turn swallows a
        cancellation, so that alone may be one that no one hears.
        """
        self._over = True
        running.cancel()

    async def close(self) -> None:
        """Say the last rows, if the controller hears them."""
        await self.once()
        if self._controller is not None:
            await self._controller.close()

    async def once(self) -> bool:
        """Ask once; whether there was an answer."""
        gateway = self._gateway
        gateway.launches.sweep()
        if gateway.log is not None:
            gateway.log.flush()
        if self._controller is None:
            gateway.launches.taken(gateway.launches.last)
            return True
        if (met := self._controller.about.probe) is not None:
            try:
                self._controller.about = met()
            except MeasurementError:
                return False
        rows = gateway.launches.waiting(self._rows)
        asked_at = gateway.now()
        try:
            status, text = await self._controller.ask(
                "/v1/follow", self._message(rows), _WAIT_S, _MOST
            )
        except UpstreamError:
            add(gateway.counts.reflexes, "no leader")
            return False
        if status != 200:
            add(gateway.counts.reflexes, f"leader {status // 100}xx")
            if status in _OF_A_ROW:
                if len(rows) == 1 and self._heard_alone:
                    gateway.launches.refused()
                    add(gateway.counts.reflexes, "refused row")
                self._rows, self._heard_alone = len(rows) // 2, False
            return False
        try:
            self._accept(_read(text), asked_at)
        except Exception:  # whatever it says, it is asked again
            add(gateway.counts.reflexes, "odd snapshot")
            return False
        self._heard_alone = not self._rows
        self._rows = min(max(1, 2 * self._rows), MESSAGE_ROWS)
        return True

    def _message(self, rows: list[bytes]) -> bytes:
        gateway, launches = self._gateway, self._gateway.launches
        snapshot = gateway.snapshot
        return msgspec.json.encode(
            {
                "gateway": gateway.config.name,
                "start": gateway.started,
                "version": snapshot.version if snapshot is not None else 0,
                "first": launches.first,
                "rows": [Raw(row) for row in rows],
                "counts": gateway.report(),
            }
        )

    def _accept(self, reply: _Reply, asked_at: float) -> None:
        """Take an answer over.

        Args:
            asked_at: when it was asked for: a snapshot is valid for as long as the controller says,
                from then on and by our own clock, whatever both clocks say.
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
        # what cannot decide is found out here, and not by a user
        Router(snapshot).decide(RequestFacts("", ""), now=gateway.now())
        left_s = snapshot.valid_until - reply.now
        self._took = gateway.take(replace(snapshot, valid_until=asked_at + left_s))
        if not self._took:
            add(gateway.counts.reflexes, "old snapshot")
