# Readiness: whether a load balancer should send new requests, with the reasons if not.

from __future__ import annotations

import msgspec

from servanda.gateway.proxy.gateway import Gateway
from servanda.gateway.proxy.pools.server_pool import problem_of


class Readiness(msgspec.Struct):
    """A response to GET /readyz.

    Args:
        ready: whether a request would be served now.
        reasons: why not; notes: problems that do not prevent responses.
    """

    ready: bool
    reasons: list[str]
    notes: list[str]


def readiness(gateway: Gateway, *, draining: bool) -> Readiness:
    """The current readiness; draining: whether the gateway is shutting down."""
    reasons = ["the gateway is shutting down: send new requests elsewhere"] if draining else []
    snapshot, without = gateway.snapshot, gateway.config.without
    if not any(_answers(gateway, pool) for pool in gateway.pools):
        reasons.append(f"no pool is available: {_waits(gateway, *gateway.pools)}")
    elif snapshot is None and not _answers(gateway, without):
        reasons.append(f"no route is known, and {without} serves then: {_waits(gateway, without)}")
    notes = []
    if snapshot is None:
        notes.append(f"no route is known yet: {without} serves (routing.without_snapshot)")
    elif gateway.now() >= snapshot.valid_until:
        notes.append(
            f"the routes have expired: {snapshot.without} serves where they acted "
            "(routing.without_snapshot)"
        )
    broken = [pool for pool in gateway.pools if not _closed(gateway, pool)]
    if broken and not reasons:
        notes.append(_waits(gateway, *broken))
    notes += [
        f"{name} does not use {server.url}: {why}"
        for name, pool in gateway.pools.items()
        for server in pool.servers
        if pool.checked and (why := problem_of(server))
    ]
    return Readiness(not reasons, reasons, notes)


def _closed(gateway: Gateway, pool: str) -> bool:
    """Whether a pool accepts requests now, including trials."""
    return gateway.pools[pool].state != "open"


def _answers(gateway: Gateway, pool: str) -> bool:
    """Whether requests of a pool are served, by it or by its fallback."""
    instead = gateway.has_fallback(pool) and _closed(gateway, "stable")
    return _closed(gateway, pool) or instead


def _waits(gateway: Gateway, *pools: str) -> str:
    """Why pools have no server for a request."""
    empty = [pool for pool in pools if not gateway.pools[pool].usable]
    waits = [f"{pool} for {gateway.pools[pool].wait_s} s" for pool in pools if pool not in empty]
    parts = [f"no replica of {' and '.join(empty)} can be used"] if empty else []
    if waits:
        parts.append(f"after failures the circuit breaker is open for {' and '.join(waits)}")
    return "; ".join(parts)
