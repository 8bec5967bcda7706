# The upstreams of a gateway: the pools of its contract, and a running leader.

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from servanda.cli.gateway_pools import POOLS, PoolName, Say, Waits, described_pool
from servanda.contract.model import Contract
from servanda.engines.tls import TRUST_HINT, distrusted, trusted
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.judgement.slices.rules import LABEL

if TYPE_CHECKING:
    from servanda.gateway.proxy.config import Config, Replica, Upstream

LEADER_KEY = "SERVANDA_GATEWAY_KEY"
_ANSWERS_S = 5.0
_ROW_S = 60.0  # that a sample may need beyond its request


def config_of(
    contract: Contract,
    urls: Mapping[str, str],
    waits: Waits,
    say: Say,
    given: Collection[str] = (),
) -> Config:
    """A gateway of the contract, as far as the contract and its servers say.

    Args:
        given: pools whose URL the call gave, instead of the servers that the contract names.

    Raises:
        ContractError: the pools are one, or one has no URL.
    """
    from servanda.gateway.proxy.config import Config, Limits

    pools: dict[str, Upstream] = {}
    replicas: dict[PoolName, tuple[Replica, ...]] = {}
    for pool in POOLS:
        if pool not in urls:
            continue
        at, alone = urls[pool], pool in given
        pools[pool], several = described_pool(contract, pool, at, waits, say, alone=alone)
        if several:
            replicas[pool] = several
    if "stable" not in pools:
        say("! there is no stable kernel: nothing can be diverted or mirrored")
    names = " and ".join(
        f"{pool} calls its model {server.served!r}" for pool, server in pools.items()
    )
    if len({server.served for server in pools.values()} - {""}) > 1:
        say(f"! {names}: a request that names its model works at only one of them")
    fields = [s.split for s in contract.slices if s.split and s.split.startswith(LABEL)]
    for label in sorted({field.removeprefix(LABEL) for field in fields} - {*contract.labels}):
        say(
            f"! no request has the label {label}: labels: does not declare where to find it, so "
            "its slices get no traffic"
        )
    return Config(
        infer=pools["infer"],
        stable=pools.get("stable"),
        replicas=replicas,
        without=contract.routing.without_snapshot if "stable" in pools else "infer",
        labels={label: source.source for label, source in contract.labels.items()},
        limits=Limits(row_s=waits.total_s + _ROW_S),
    )


def leader_of(url: str, contract: Contract, say: Say) -> Upstream:
    """A leader that is to be followed; one that is not there yet may come.

    Raises:
        ContractError: it refuses the key, or leads another contract.
        MeasurementError: it is no leader.
    """
    import httpx2

    from servanda.gateway.proxy.config import Upstream
    from servanda.gateway.routing.model import snapshot_of

    key = os.environ.get(LEADER_KEY, "")
    role = "it is the key of a holder with the role gateway in the leader's --keys"
    if not key:
        raise ContractError(
            f"the leader at {url} requires a key of gateways, and {LEADER_KEY} is empty",
            hint=f"export it: {role}",
        )
    try:
        upstream = Upstream(url, key)
    except ContractError:
        raise ContractError(
            f"--leader is {url!r}",
            hint="write http://HOST:PORT, as `servanda serve --leader-only` prints for its page",
        ) from None
    at, headers = f"{upstream.base}/v1/route/snapshot", {"authorization": f"Bearer {key}"}
    try:
        reply = httpx2.get(
            at, headers=headers, timeout=_ANSWERS_S, trust_env=False, verify=trusted()
        )
    except httpx2.HTTPError as error:
        say(f"! the leader at {url} does not respond yet, retrying: {type(error).__name__}")
        if distrusted(error):
            say(f"  {TRUST_HINT}")
        return upstream
    if reply.status_code == 503:
        say(f"! {url} does not lead now, retrying")
        return upstream
    if reply.status_code in (401, 403):
        raise ContractError(f"the leader at {url} refuses the key of {LEADER_KEY}", hint=role)
    try:
        led = snapshot_of(reply.json())
    except (EvidenceError, ValueError):
        raise MeasurementError(
            f"{url} is no leader: status {reply.status_code} at /v1/route/snapshot",
            hint="give the admin listener: the URL that it prints after `page` at its start",
        ) from None
    if led.name != contract.metadata.name:
        raise ContractError(
            f"the leader at {url} leads {led.name}, and this is {contract.metadata.name}",
            hint="start the gateway with the contract of its leader",
        )
    if led.contract != contract.digest:
        say(f"! the leader follows another text of {led.name}: {led.contract[:8]}")
    return upstream
