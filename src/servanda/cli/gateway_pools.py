# The pools of a gateway: their servers, by the contract and the call, and the descriptions that the
# servers report.

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from servanda.contract.model import Contract, Kernel, base_of
from servanda.contract.policy import Replica as Declared
from servanda.errors import ContractError, MeasurementError

if TYPE_CHECKING:
    from servanda.engines.http.key import Key
    from servanda.gateway.proxy.config import Replica, Replicas, Upstream

PoolName = Literal["infer", "stable"]
POOLS: tuple[PoolName, ...] = get_args(PoolName)
_KEYS = {"infer": "SERVANDA_INFER_KEY", "stable": "SERVANDA_STABLE_KEY"}
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
    """The URL of each pool: of a pool with replicas the one that describes its kernel.

    Raises:
        ContractError: a pool has no URL, or the contract has no such pool.
    """
    if stable is not None and contract.stable is None:
        raise ContractError(
            "the contract has no stable kernel, but --stable-url gives its URL",
            hint="add stable: {engine: openai_http, url: ...} to it",
        )
    urls: dict[str, str] = {}
    for pool in POOLS:
        kernel, given = kernel_of(contract, pool), infer if pool == "infer" else stable
        own = kernel.url if kernel is not None else None
        url = given or own or next((r.url for r in declared_of(contract, pool)), None)
        place = ("stable",) if pool == "stable" else ("kernels", "infer")
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


def kernel_of(contract: Contract, pool: str) -> Kernel | None:
    return contract.kernels.infer if pool == "infer" else contract.stable


def declared_of(contract: Contract, pool: str) -> tuple[Declared, ...]:
    """The replicas of a pool, by the contract; empty: its URL alone."""
    replicas = contract.routing.replicas
    return (replicas.infer if pool == "infer" else replicas.stable) or ()


def replicas_of(contract: Contract, pools: Sequence[PoolName], waits: Waits) -> Replicas:
    """The servers of pools, as a contract that was read again names them; none is asked yet.

    A pool without replicas has its kernel's URL.
    """
    found: dict[PoolName, tuple[Replica, ...]] = {}
    for pool in pools:
        declared, kernel = declared_of(contract, pool), kernel_of(contract, pool)
        if not declared and kernel is not None and kernel.url is not None:
            declared = (Declared(url=kernel.url, weight=1.0),)
        if declared:
            found[pool] = tuple(
                _unmet(contract, pool, each.url, each.weight, waits) for each in declared
            )
    return found


def described_pool(
    contract: Contract, pool: PoolName, url: str, waits: Waits, say: Say, *, alone: bool
) -> tuple[Upstream, tuple[Replica, ...]]:
    """A pool and its replicas, as far as its servers say what they are.

    Args:
        url: of its kernel, whose description all replicas have to match; alone: it is the only
            server, whatever the contract names.
    """
    from servanda.gateway.proxy.pools.server_pool import difference

    declared = () if alone else declared_of(contract, pool)
    if not declared:
        return _described_server(contract, pool, url, waits, say), ()
    first = _unmet(contract, pool, url, 1.0, waits)
    unmet = [_unmet(contract, pool, each.url, each.weight, waits) for each in declared]
    by_base = {each.upstream.base: each for each in (first, *unmet)}
    with ThreadPoolExecutor(len(by_base)) as threads:
        found = dict(zip(by_base, threads.map(_tried, by_base.values()), strict=True))
    replicas = tuple(
        replace(each, upstream=found[each.upstream.base] or each.upstream) for each in unmet
    )
    described = next((upstream for upstream in found.values() if upstream is not None), None)
    for each in (each.upstream for each in replicas):
        if each.probe is not None:
            say(f"! {each.url}, a replica of {pool}, does not respond yet, retrying")
        elif described is not None and (why := difference(described, each)):
            say(f"! {each.url}, a replica of {pool}, is not used: {why}")
    if described is not None and pool == "infer":
        _say_defaults(described, say)
    return described or first.upstream, replicas


def _tried(replica: Replica) -> Upstream | None:
    try:
        return replica.describe()
    except MeasurementError:
        return None


def _unmet(contract: Contract, pool: str, url: str, weight: float, waits: Waits) -> Replica:
    """A server that has not been asked what it is."""
    from servanda.gateway.proxy.config import Replica

    bare, describe = _bare(contract, pool, url, waits)
    return Replica(replace(bare, probe=describe), weight, describe)


def _bare(
    contract: Contract, pool: str, url: str, waits: Waits
) -> tuple[Upstream, Callable[[], Upstream]]:
    """A server before it is asked what it is, and how it is asked."""
    from servanda.engines.http.key import key_in, key_of
    from servanda.gateway.proxy.config import Upstream, dialect_of

    kernel = kernel_of(contract, pool)
    assert kernel is not None
    try:
        at = Upstream(url).base
    except ContractError:
        raise ContractError(
            f"--{pool}-url takes a URL of http or https, without a key",  # not shown: one is in it
            hint=f"write http://HOST:PORT; {_KEYS[pool]} is sent there as the key",
        ) from None
    own = key_in(_KEYS[pool])  # of this start; else the one that the contract names
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
    return bare, partial(_described, bare, kernel, at, key)


def _described_server(contract: Contract, pool: str, url: str, waits: Waits, say: Say) -> Upstream:
    """A server, as far as it says what it is; one that is not there yet keeps no users waiting."""
    kernel = kernel_of(contract, pool)
    assert kernel is not None
    bare, describe = _bare(contract, pool, url, waits)
    try:
        server = describe()
    except MeasurementError as error:
        until = "until then " if pool == "infer" else ""  # infer is asked until it says so
        dialect = "" if kernel.dialect else f"; {until}the dialect is assumed to be {bare.dialect}"
        say(f"! {pool} does not respond yet, retrying{dialect}: {error.args[0]}")
        say(f"  {error.problems[0].hint}")
        if pool != "infer":
            return bare
        return replace(bare, probe=describe)
    if pool == "infer":
        _say_defaults(server, say)
    return server


def _say_defaults(infer: Upstream, say: Say) -> None:
    if infer.defaults is None:
        say(
            "! infer does not report its sampling defaults: only requests that set "
            "temperature, top_p, top_k, min_p and all penalties are evidence; declare "
            "kernels.infer.sampling_defaults (or start vLLM with --enable-scale-out)"
        )


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
        build={
            "version": server.version,
            "weights": server.weights,
            "tokenizer": server.tokens,
            "vocabulary": str(server.vocab_size),
            **server.facts,
        },
    )
