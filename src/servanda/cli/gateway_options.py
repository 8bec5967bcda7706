# The upstreams of a gateway: the pools of its contract, and a running leader.

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from servanda.contract.model import Contract, Kernel, base_of
from servanda.engines.tls import TRUST_HINT, distrusted, trusted
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.judgement.slices.rules import LABEL

if TYPE_CHECKING:
    from servanda.engines.http.key import Key
    from servanda.gateway.proxy.config import Config, Upstream

LEADER_KEY = "SERVANDA_GATEWAY_KEY"
_POOL_KEYS = {"infer": "SERVANDA_INFER_KEY", "stable": "SERVANDA_STABLE_KEY"}
_ANSWERS_S = 5.0
_ROW_S = 60.0  # that a sample may need beyond its request
Say = Callable[[str], None]


@dataclass(frozen=True)
class Waits:
    """How long a request may take, in seconds.

    Args:
        first_byte_s: until the reply begins; total_s: until it has ended.
        drain_s: for which new requests are answered after SIGTERM.
    """

    first_byte_s: float
    total_s: float
    drain_s: float = 0.0


def urls_of(contract: Contract, infer: str | None, stable: str | None) -> dict[str, str]:
    """The URL of each pool.

    Raises:
        ContractError: a pool has no URL, or the contract has no such pool.
    """
    if stable is not None and contract.stable is None:
        raise ContractError(
            "the contract has no stable kernel, but --stable-url gives its URL",
            hint="add stable: {engine: openai_http, url: ...} to it",
        )
    pools: dict[str, tuple[Kernel | None, str | None, tuple[str, ...]]] = {
        "infer": (contract.kernels.infer, infer, ("kernels", "infer")),
        "stable": (contract.stable, stable, ("stable",)),
    }
    urls: dict[str, str] = {}
    for pool, (kernel, given, place) in pools.items():
        url = given or (kernel.url if kernel is not None else None)
        if url is not None:
            urls[pool] = url
        elif kernel is not None:
            raise ContractError(
                f"{pool} is {kernel}, and it has no URL: a gateway needs a server",
                where=contract.where(*place),
                hint=f"write {{engine: openai_http, url: ...}}, or give --{pool}-url URL",
            )
        if given and base_of(given) == base_of(contract.kernels.train.url or ""):
            raise ContractError(
                f"--{pool}-url is the server of kernels.train: the reference scorer must not serve",
                where=contract.where("kernels", "train", "url"),
                hint=f"--{pool}-url names another server",
            )
    return urls


def config_of(contract: Contract, urls: Mapping[str, str], waits: Waits, say: Say) -> Config:
    """A gateway of the contract, as far as the contract and its servers say.

    Raises:
        ContractError: the pools are one, or one has no URL.
    """
    from servanda.gateway.proxy.config import Config, Limits

    pools: dict[str, Upstream] = {}
    for pool, url in urls.items():
        pools[pool] = _pool(contract, pool, url, waits, say)
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


def _pool(contract: Contract, pool: str, url: str, waits: Waits, say: Say) -> Upstream:
    """A pool, as far as it says what it is; one that is not there yet keeps no users waiting."""
    from servanda.engines.http.key import key_in, key_of
    from servanda.gateway.proxy.config import Upstream, dialect_of

    kernel = contract.kernels.infer if pool == "infer" else contract.stable
    assert kernel is not None
    try:
        at = Upstream(url).base
    except ContractError:
        raise ContractError(
            f"--{pool}-url takes a URL of http or https, without a key",  # not shown: one is in it
            hint=f"write http://HOST:PORT; {_POOL_KEYS[pool]} is sent there as the key",
        ) from None
    own = key_in(_POOL_KEYS[pool])  # of this start; else the one that the contract names
    key = own if own.value or kernel.key_env is None else key_of(kernel)
    declared = kernel.sampling_defaults
    bare = Upstream(
        url,
        key.value,
        dialect_of(kernel.dialect or "vllm"),
        served=kernel.served or "",
        defaults=None if declared is None else declared.model_dump(exclude_none=True),
        first_byte_s=waits.first_byte_s,
        total_s=waits.total_s,
    )
    try:
        server = _described(bare, kernel, at, key)
    except MeasurementError as error:
        until = "until then " if pool == "infer" else ""  # infer is asked until it says so
        dialect = "" if kernel.dialect else f"; {until}the dialect is assumed to be {bare.dialect}"
        say(f"! {pool} does not respond yet, retrying{dialect}: {error.args[0]}")
        say(f"  {error.problems[0].hint}")
        if pool != "infer":
            return bare
        return replace(bare, probe=partial(_described, bare, kernel, at, key))
    if pool == "infer" and server.defaults is None:
        say(
            "! infer does not report its sampling defaults: only requests that set "
            "temperature, top_p, top_k, min_p and all penalties are evidence; declare "
            "kernels.infer.sampling_defaults (or start vLLM with --enable-scale-out)"
        )
    return server


def _described(bare: Upstream, kernel: Kernel, url: str, key: Key) -> Upstream:
    """The pool, with what its server says of itself.

    Raises:
        MeasurementError: it does not answer.
    """
    from servanda.engines.http.dialects import detect
    from servanda.engines.http.transport import Limits, Transport
    from servanda.engines.http_policy import RetryPolicy
    from servanda.gateway.proxy.config import dialect_of

    limits = Limits(connect_s=2.0, read_s=5.0, retry=RetryPolicy(tries=1))
    transport = Transport(url, 1, limits, key=key)
    try:
        speaker, server = detect(transport, kernel.dialect, kernel.served)
        serving = speaker.serving(transport, server)
    finally:
        transport.close()
    defaults = server.defaults if bare.defaults is None else bare.defaults
    return replace(
        bare,
        dialect=dialect_of(speaker.name),
        served=server.served,
        defaults=defaults,
        context=server.context,
        limit=serving.limit,
        mute=serving.mute,
        masks=serving.masks,
    )
