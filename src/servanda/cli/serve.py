# `servanda serve`: the gateway of a contract, and the leader whose routes it follows.

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from servanda.cli import serve_processes
from servanda.cli.gateway_pools import Waits, urls_of
from servanda.cli.options import FILE, duration, host_and_port, needing, refuse_given, shared
from servanda.runner.load import load

if TYPE_CHECKING:
    from servanda.gateway.http.api_keys import Role

# what says nothing to a gateway that follows, and nothing to a leader that serves no one
_OF_LEADERS = ("admin", "state", "lease_s", "webhook", "slack", "command", "notify", "where")
_OF_LOGS = ("file_bytes", "file_s", "keep_s", "tokens")
_WAITS = ("first_byte_s", "total_s", "drain_s")
_OF_GATEWAYS = (
    *("host", "port", "infer", "stable", "log", *_OF_LOGS),
    *("name", "show", "allow", *_WAITS),
)


@click.command()
@click.argument("contract", type=FILE)
@shared("--host")
@shared("--port", default=8080)
@click.option(
    "--admin",
    metavar="HOST:PORT",
    default="127.0.0.1:8081",
    show_default=True,
    help="Where the leader listens: the page, status, metrics, pins, other gateways.",
)
@click.option(
    "--infer-url",
    "infer",
    metavar="URL",
    help="URL of the infer kernel, which is under test.  [default: the contract's]",
)
@click.option(
    "--stable-url",
    "stable",
    metavar="URL",
    help="URL of the stable kernel.  [default: the contract's]",
)
@click.option(
    "--keys",
    type=FILE,
    help="YAML file of API keys and their roles.  [default: one admin key, made at the start]",
)
@click.option(
    "--tls-cert",
    type=FILE,
    help="PEM file with the certificate chain of both listeners, users' and the leader's.  "
    "[default: plain HTTP]",
)
@click.option(
    "--tls-key",
    type=FILE,
    help="PEM file with the private key of --tls-cert.  [default: in --tls-cert]",
)
@shared(
    "--state",
    type=str,
    metavar="FOLDER|URL",
    help="A postgresql:// URL lets a second leader take over, see --lease.  "
    "[default: runs/NAME-gateway]",
)
@click.option(
    "--lease",
    "lease_s",
    type=duration,
    help="With --state postgresql://...: how long another leader waits for one that is gone.  "
    "[default: 10s]",
)
@shared(
    "--log",
    name="log",
    metavar="FOLDER",
    multiple=False,
    help="Log sampled requests to this folder.",
)
@click.option(
    "--log-file-mib",
    "file_bytes",
    type=click.IntRange(1, 1 << 20),
    callback=lambda _ctx, _param, mib: mib << 20,
    default=64,
    show_default=True,
    help="Start a new log file at this size.",
)
@click.option(
    "--log-file-age",
    "file_s",
    type=duration,
    default=86_400.0,
    show_default="1d",
    help="Start a new log file at this age.",
)
@click.option(
    "--log-keep",
    "keep_s",
    type=duration,
    help="Delete a log file this long after its last row, such as 30d.  [default: never]",
)
@click.option(
    "--log-no-tokens",
    "tokens",
    flag_value=False,
    default=True,
    help="Log no token ids of prompts and responses; such a log cannot be scored.",
)
@click.option(
    "--name",
    default=socket.gethostname,
    show_default="this machine's",
    help="Name of this gateway, unique among those of one leader.",
)
@click.option(
    "--first-byte",
    "first_byte_s",
    type=duration,
    default=300.0,
    show_default="5m",
    help="Longest wait for the first byte of a reply; without streaming, for the whole reply.",
)
@click.option(
    "--timeout",
    "total_s",
    type=duration,
    default=600.0,
    show_default="10m",
    help="Longest duration of a request, including its stream.",
)
@click.option(
    "--drain",
    "drain_s",
    type=duration,
    default=0.0,
    show_default="not at all",
    help="Keep serving new requests this long after SIGTERM, while /readyz returns 503.",
)
@click.option(
    "--show-pool", "show", is_flag=True, help="Name the pool that served each reply in a header."
)
@click.option(
    "--allow",
    metavar="PATH",
    multiple=True,
    help="Also pass this path through to stable, such as /v1/files, '/v1/files/*' or "
    "'GET /v1/files'; repeatable.",
)
@click.option(
    "--leader",
    "leaders",
    metavar="URL",
    multiple=True,
    help="Follow this leader, such as http://127.0.0.1:8081; repeated, the one of them that "
    "leads.  Without it, a leader is started.",
)
@click.option("--leader-only", is_flag=True, help="Run only the leader, and serve no users.")
@shared("--webhook", "--slack", "--command", "--notify", "--ledger", "--no-code")
def serve(
    contract: Path,
    host: str,
    port: int,
    admin: str,
    infer: str | None,
    stable: str | None,
    keys: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    state: str | None,
    lease_s: float | None,
    log: Path | None,
    name: str,
    show: bool,
    allow: tuple[str, ...],
    leaders: tuple[str, ...],
    leader_only: bool,
    where: str,
    **options: Any,
) -> None:
    """Serve users from the infer and stable kernels of CONTRACT, and divert failing slices.

    The gateway speaks OpenAI's API.  Its leader, a second process, scores a sample of the infer
    kernel's responses with the train kernel and decides per slice which kernel serves.  In mode
    observe, the default, infer serves all traffic: decisions are only logged.  Until the leader is
    ready, stable serves.  Requires pip install 'servanda[gateway]'.  Ctrl-C stops it.  CONTRACT,
    keys and certificate are reloaded when their files change, and at SIGHUP.  SERVANDA_CA_FILE
    names a PEM file of additional trusted certificates for pools, leader and webhooks.
    """
    if leaders and leader_only:
        raise click.UsageError("give either --leader or --leader-only")
    if leaders:
        refuse_given(_OF_LEADERS, "set this where the leader is started, not with --leader")
    elif leader_only:
        refuse_given(_OF_GATEWAYS, "--leader-only serves no users")
    files = {name: options.pop(name) for name in _OF_LOGS}
    waits = Waits(**{name: options.pop(name) for name in _WAITS})
    if not (waits.first_byte_s > 0 and waits.total_s > 0):
        raise click.UsageError("--first-byte and --timeout must be longer than 0 s")
    if log is None:
        refuse_given(_OF_LOGS, "there is no --log")
    if not files["file_s"] > 0 or files["keep_s"] == 0:
        raise click.UsageError("--log-file-age and --log-keep must be longer than 0 s")
    if tls_key is not None and tls_cert is None:
        raise click.UsageError("--tls-key is the private key of a certificate: give --tls-cert too")
    with needing("a gateway", "gateway"):
        import servanda.gateway.controller.web.app
        import servanda.gateway.http.listener
        import servanda.gateway.proxy.app  # noqa: F401 - what is missing is said before all else
    from servanda.gateway.controller.process import Settings
    from servanda.gateway.controller.store import LEASE_S, is_server
    from servanda.gateway.proxy.config import LogFiles

    terms = load(contract)
    urls = {} if leader_only else urls_of(terms, infer, stable)
    admin_host, admin_port = host_and_port("--admin", admin)
    place = state or str(Path("runs") / f"{terms.metadata.name}-gateway")
    if is_server(place):
        _refuse_alone(leader_only, keys)
    else:
        refuse_given(("lease_s",), "a state in a folder has one leader")
    settings = Settings(
        contract=str(contract),
        state=place,
        lease_s=lease_s or LEASE_S,
        ledger=where,
        host=admin_host,
        port=admin_port,
        keys=str(keys) if keys else None,
        tls=(str(tls_cert), str(tls_key) if tls_key else None) if tls_cert else None,
        urls=tuple(urls.items()),
        **options,
    )
    holders: serve_processes.KeyHolders = ()
    if not leaders and keys is None:
        holders = _new_holders("admin", "gateway") if leader_only else _new_holders("admin")
        settings = replace(settings, held=holders)
    interrupt = signal.default_int_handler  # SIGTERM is as Ctrl-C, also before anything is served
    with contextlib.suppress(KeyboardInterrupt), serve_processes.handled(signal.SIGTERM, interrupt):
        if leader_only:
            serve_processes.lead(settings, holders)
        else:
            written = None if log is None else LogFiles(log, **files)
            own = {"name": name, "log": written, "shows": show, "allow": allow}
            given = [pool for pool, url in (("infer", infer), ("stable", stable)) if url]
            places = serve_processes.Places(host, port, given)
            serve_processes.serve(terms, settings, holders, places, leaders, waits, **own)
    sys.exit(0)


def _refuse_alone(leader_only: bool, keys: Path | None) -> None:
    """What several leaders of one state need."""
    if not leader_only:
        raise click.UsageError(
            "--state postgresql://... is for leaders that run alone: start each with --leader-only,"
            " and the gateways with --leader URL for each of them"
        )
    if keys is None:
        raise click.UsageError(
            "--state postgresql://... needs --keys FILE: all leaders accept the same keys"
        )


def _new_holders(*roles: Role) -> serve_processes.KeyHolders:
    """Keys for this start."""
    return tuple((role, role, secrets.token_urlsafe(32)) for role in roles)
