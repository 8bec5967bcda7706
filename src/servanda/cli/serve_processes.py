# The processes of `servanda serve`: a gateway and its leader, or one of them alone.

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from servanda.cli.gateway_pools import POOLS, PoolName, Say, Waits, described_pool, replicas_of
from servanda.cli.options import LOCAL
from servanda.contract.model import Contract
from servanda.engines.server.sockets import address
from servanda.engines.tls import TRUST_HINT, Certificate, distrusted, trusted
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.judgement.slices.rules import LABEL
from servanda.runner.load import load

if TYPE_CHECKING:
    from servanda.gateway.controller.process import Settings, Supervisor
    from servanda.gateway.http.api_keys import Role
    from servanda.gateway.proxy.config import Config, Replica, Upstream
    from servanda.gateway.proxy.gateway import Gateway

    KeyHolders = tuple[tuple[str, Role, str], ...]  # name, role and key of holders


@dataclass(frozen=True)
class Places:
    """Where a gateway listens, and where its pools are.

    Args:
        given: pools whose URL the call gave, instead of the contract.
    """

    host: str
    port: int
    given: Sequence[str] = ()


_output_lock = threading.RLock()  # a signal may say something in between


def _write(holders: KeyHolders, settings: Settings) -> None:
    """Keep keys where their owner alone can read them.

    Not before there is a leader: one that has the folder already goes by the keys in it.

    Raises:
        MeasurementError: they cannot be written.
    """
    if not holders:
        return
    lines = [f'- {{name: {name}, role: {role}, key: "{key}"}}\n' for name, role, key in holders]
    file = Path(settings.state) / "keys.yaml"
    with MeasurementError.of_system(
        f"{file} cannot be written", hint="--state names another folder, and --keys a file of keys"
    ):
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.writelines(lines)


def lead(settings: Settings, holders: KeyHolders) -> None:
    from servanda.gateway.controller.process import ControllerProcess

    def ready() -> None:
        _write(holders, settings)
        _print("the leader is running  (Ctrl-C stops it)")

    controller = ControllerProcess(
        settings, say=_print, bound_at=lambda url: _print_leader(settings, url), ready=ready
    )
    with handled(signal.SIGHUP, lambda *_: controller.reload()):
        controller.run()


def serve(
    contract: Contract,
    settings: Settings,
    holders: KeyHolders,
    places: Places,
    leaders: tuple[str, ...],
    waits: Waits,
    **fields: Any,
) -> None:
    """Serve users.

    Args:
        leaders: running leaders, of which one leads; empty: one is started here.
        fields: further ones of the gateway's Config.

    Raises:
        ServandaError: it cannot serve, or its leader refuses the settings.
    """
    from servanda.gateway.controller.watched_cells import select_cells
    from servanda.gateway.http.listener import Listener, bind, handed_socket
    from servanda.gateway.http.reload import ListenerFiles
    from servanda.gateway.proxy.app import App
    from servanda.gateway.proxy.gateway import Gateway

    files = ListenerFiles(settings.keys, settings.tls, _print)
    if not leaders:  # what every leader would refuse is refused before anyone is served
        select_cells(contract)
        bind(settings.host, settings.port, "--admin").close()
    handed = handed_socket()
    with (
        handed or bind(places.host, places.port, "--host or --port") as listening_socket,
        contextlib.ExitStack() as ending,
    ):
        host, port = listening_socket.getsockname()[:2]
        host = host if handed else places.host
        urls = dict(settings.urls)
        config = config_of(contract, urls, waits, _print, places.given)
        config = replace(config, keys=files.keys, **fields)
        supervisor = None
        if not leaders:
            standbys, (followed, supervisor) = (), _make_supervisor(settings, files.certificate)
            ending.callback(supervisor.close)
        else:
            followed, *standbys = (leader_of(url, contract, _print) for url in leaders)

        def reload() -> None:
            files.demand()
            if supervisor is not None:
                supervisor.reload()
            else:
                _print(f"{' and '.join(leaders)} read the contract")

        ending.enter_context(handled(signal.SIGHUP, lambda *_: reload()))

        def leader_ready(url: str) -> None:
            _write(holders, settings)
            _print_leader(settings, url)

        gateway = Gateway(replace(config, controller=followed, standbys=tuple(standbys)))
        own, file = App(gateway), Path(settings.contract)
        reread = _Reread(gateway, contract, places.given, waits, alone=bool(leaders))
        files.follow((file,), lambda: reread(file))

        def leave() -> None:
            own.draining = True

        def drain() -> None:
            leave()
            _print(f"draining for {waits.drain_s:g} s: requests are served, /readyz returns 503")

        listener = Listener(
            own,
            listening_socket,
            certificate=files.certificate,
            grace_s=int(config.limits.drain_s),
            ready=lambda: _print_users(
                config,
                f"{files.scheme}://{address(host, port)}",
                host,
                urls,
                not leaders,
            ),
            drain_s=waits.drain_s,
            draining=drain,
            leaving=leave if handed else None,
        )
        if supervisor is not None:
            supervisor.start(leader_ready, listener.end)
        with files.followed():
            listener.run()
        if supervisor is not None:
            supervisor.check()
        _print("no new requests are accepted")


class _Reread:
    """The replicas of a contract that was read again, handed to its gateway.

    Args:
        given: pools that the call gave the URL of, which stay.
        alone: whether no leader here reads the same file, and reports its mistakes.
    """

    def __init__(
        self,
        gateway: Gateway,
        contract: Contract,
        given: Sequence[str],
        waits: Waits,
        *,
        alone: bool,
    ) -> None:
        self._gateway, self._contract, self._waits, self._alone = gateway, contract, waits, alone
        self._pools: list[PoolName] = [pool for pool in gateway.config.pools if pool not in given]

    def __call__(self, file: Path) -> str:
        """Read the file; returns a line for the log, "" if no replica changed.

        Raises:
            ContractError: it is wrong.
        """
        try:
            contract = load(file)
        except ContractError:
            if self._alone:
                raise
            return ""
        if contract.metadata.name != self._contract.metadata.name:
            return ""  # the leader refuses it
        before, self._contract = self._contract.routing.replicas, contract
        if contract.routing.replicas == before:
            return ""
        found = replicas_of(contract, self._pools, self._waits)
        self._gateway.follow_replicas(found)
        parts = [f"{pool} at {', '.join(r.upstream.url for r in of)}" for pool, of in found.items()]
        return f"{file} was read again: {' and '.join(parts)}"


def _make_supervisor(
    settings: Settings, certificate: Certificate | None
) -> tuple[Upstream, Supervisor]:
    """The leader, as its gateway asks it, and as the process that it will be."""
    from servanda.gateway.controller.process import Supervisor
    from servanda.gateway.proxy.config import Upstream

    key = secrets.token_urlsafe(32)
    held = (*settings.held, (f"gateway-{secrets.token_hex(4)}", "gateway", key))
    supervisor = Supervisor(replace(settings, held=held), _print)
    scheme, verify = ("https", certificate.pinned) if certificate else ("http", None)
    first = Upstream(f"{scheme}://{address(settings.host, settings.port)}", key, verify=verify)
    return replace(first, probe=lambda: Upstream(supervisor.where(), key)), supervisor


def _print_users(config: Config, url: str, host: str, urls: Mapping[str, str], leads: bool) -> None:
    served = {pool: [at] for pool, at in urls.items()}
    for pool, replicas in config.replicas.items():
        served[pool] = [replica.upstream.url for replica in replicas]
    pools = " and ".join(f"{pool} at {', '.join(places)}" for pool, places in served.items())
    _print(f"serving users at {url}/v1 from {pools}  (Ctrl-C stops it)")
    if leads:
        _print(f"{config.without} serves (routing.without_snapshot) until the leader is ready")
    if host not in LOCAL and not (config.keys and config.keys.clients):
        _print(f"! {host} is open to everyone who can reach this machine, and no key is required")


@contextlib.contextmanager
def handled(number: signal.Signals, handler: Callable[..., object]) -> Iterator[None]:
    """A signal is handled so meanwhile."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _print_leader(settings: Settings, url: str) -> None:
    keys = settings.keys or f"{Path(settings.state) / 'keys.yaml'}, made for this start"
    _print(f"page {url}/  (keys: {keys})")


def _print(line: str) -> None:
    with _output_lock, contextlib.suppress(OSError):  # no one listens any more
        click.echo(line)


# The upstreams of a gateway: the pools of its contract, and a running leader.


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
