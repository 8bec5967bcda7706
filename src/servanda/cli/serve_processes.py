# The processes of `servanda serve`: a gateway and its leader, or one of them alone.

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from servanda.cli.gateway_options import config_of, leader_of
from servanda.cli.gateway_pools import PoolName, Waits, replicas_of
from servanda.cli.options import LOCAL
from servanda.contract.model import Contract
from servanda.engines.server.sockets import address
from servanda.errors import ContractError, MeasurementError
from servanda.runner.load import load

if TYPE_CHECKING:
    from servanda.engines.tls import Certificate
    from servanda.gateway.controller.process import Settings
    from servanda.gateway.controller.supervisor import Supervisor
    from servanda.gateway.http.api_keys import Role
    from servanda.gateway.proxy.config import Config, Upstream
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
    from servanda.gateway.controller.supervisor import Supervisor
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
