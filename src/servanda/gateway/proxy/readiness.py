# Readiness: whether a balancer should send new requests to a gateway, and if not, why.

from __future__ import annotations

import msgspec

from servanda.gateway.proxy.gateway import Gateway


class Readiness(msgspec.Struct):
    """An answer to GET /readyz.

    Args:
        ready: whether a request that comes now would be answered.
        reasons: why not; notes: what is not as it should be, and keeps no one from an answer.
    """

    ready: bool
    reasons: list[str]
    notes: list[str]


def readiness(gateway: Gateway, *, draining: bool) -> Readiness:
    """How it stands now; draining: whether the gateway was told to end."""
    reasons = ["the gateway is shutting down: send new requests elsewhere"] if draining else []
    snapshot, without = gateway.snapshot, gateway.config.without
    if not any(_answers(gateway, pool) for pool in gateway.servers):
        reasons.append(f"no pool is available: {_waits(gateway, *gateway.servers)}")
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
    broken = [pool for pool in gateway.servers if not _closed(gateway, pool)]
    if broken and not reasons:
        notes.append(_waits(gateway, *broken))
    return Readiness(not reasons, reasons, notes)


def _closed(gateway: Gateway, pool: str) -> bool:
    """Whether it may be asked now: a trial may, of a pool that rested."""
    return gateway.servers[pool].breaker.state != "open"


def _answers(gateway: Gateway, pool: str) -> bool:
    """Whether requests of a pool are answered, by it or by the one that is asked in its place."""
    instead = gateway.has_fallback(pool) and _closed(gateway, "stable")
    return _closed(gateway, pool) or instead


def _waits(gateway: Gateway, *pools: str) -> str:
    """Which pools are left alone."""
    waits = [f"{pool} for {gateway.servers[pool].breaker.wait_s} s" for pool in pools]
    return f"after failures the circuit breaker is open for {' and '.join(waits)}"
