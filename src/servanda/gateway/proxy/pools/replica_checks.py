# Checks of replicas: whether they respond, and whether they run the kernel of their pool.
#
# A check requests /v1/models, which every kind of server has and which costs it nothing.  The
# complete description, for which some servers run a few tokens, is requested at first, after a
# failure, and when the models have changed.

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import msgspec

from servanda.errors import MeasurementError
from servanda.gateway.proxy.config import Limits
from servanda.gateway.proxy.pools.server_pool import PoolServer, ServerPool
from servanda.gateway.proxy.pools.upstreams import UpstreamError, read_body

_MOST = 4 << 20  # bytes of a list of models
_JITTER = 0.2  # of the time between two checks, so that gateways do not check at the same time
_FAILURES = 2  # in a row after which a replica is down
_LEAST = 0.1  # of that time between two checks, even if requests fail
_SAME = ("id", "root", "parent", "max_model_len", "meta")  # the others change with every request
_WHY = {
    "connect": "it refuses connections",
    "timeout": "it does not respond in time",
    "broken": "it breaks off its replies",
}


class ReplicaChecks:
    """The checks of a pool; runs in the event loop of the gateway.

    Args:
        limits: with the times of checks.
    """

    def __init__(self, pool: ServerPool, limits: Limits) -> None:
        self._pool, self._every_s, self._wait_s = pool, limits.check_s, limits.check_wait_s

    async def run(self, server: PoolServer) -> None:
        """Check a server until it is removed from the pool."""
        failures = 0
        while server in self._pool.servers:
            server.due.clear()
            failures = await self._check(server, failures)
            await self._pool.sweep()
            await asyncio.sleep(_LEAST * self._every_s)
            spread = random.uniform(1 - _JITTER, 1 + _JITTER)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(server.due.wait(), self._every_s * spread)
        while server.in_flight:
            await asyncio.sleep(_LEAST * self._every_s)
        await self._pool.sweep()

    async def _check(self, server: PoolServer, failures: int) -> int:
        """One check; returns the number of failed ones in a row."""
        try:
            models = await asyncio.wait_for(self._models(server), self._wait_s)
        except (UpstreamError, asyncio.TimeoutError) as error:
            failures += 1
            if failures >= _FAILURES or not server.met:
                why = error.why if isinstance(error, UpstreamError) else "timeout"
                self._pool.lost(server, _WHY.get(why, why), slow=why == "timeout")
            return failures
        if not server.met or models != server.models:
            server.models = models  # before the description: a failure meanwhile is not forgotten
            try:
                found = await asyncio.to_thread(server.describe)
            except MeasurementError as error:
                self._pool.lost(server, str(error.args[0]))
                return failures + 1
            self._pool.identify(server, found)
        return 0

    async def _models(self, server: PoolServer) -> Any:
        """The facts about the models of a server that do not change with every request.

        Raises:
            UpstreamError: no list of models.
        """
        response = await server.send("GET", "/v1/models", server.own_headers(), None)
        with contextlib.closing(response):
            body = await read_body(response, _MOST)
        if response.status != 200:
            raise UpstreamError(f"status {response.status} at /v1/models")
        try:
            listed = msgspec.json.decode(body)["data"]
            return [{name: model.get(name) for name in _SAME} for model in listed]
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            raise UpstreamError("no list of models at /v1/models") from None
