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
from servanda.cli.gateway_options import Waits, urls_of
from servanda.cli.options import FILE, duration, refuse_given, shared
from servanda.errors import MeasurementError
from servanda.runner.load import load

if TYPE_CHECKING:
    from servanda.gateway.http.api_keys import Role

# what says nothing to a gateway that follows, and nothing to a leader that serves nobody
_OF_LEADERS = ("admin", "state", "webhook", "slack", "command", "where")
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
    help="Of the kernel under test.  [default: the contract's]",
)
@click.option(
    "--stable-url",
    "stable",
    metavar="URL",
    help="Of the stable kernel.  [default: the contract's]",
)
@click.option("--keys", type=FILE, help="Who may do what.  [default: made for this start]")
@click.option(
    "--tls-cert",
    type=FILE,
    help="PEM file with the certificate of users' and the leader's listeners, and with those that "
    "lead to its root.  [default: plain HTTP]",
)
@click.option("--tls-key", type=FILE, help="Its private key.  [default: in --tls-cert]")
@shared("--state", help="[default: runs/NAME-gateway]")
@shared(
    "--log",
    name="log",
    metavar="FOLDER",
    multiple=False,
    help="A folder, for those that were sampled.",
)
@click.option(
    "--log-file-mib",
    "file_bytes",
    type=click.IntRange(1, 1 << 20),
    callback=lambda _ctx, _param, mib: mib << 20,
    default=64,
    show_default=True,
    help="Size of a file of the log, from which on another one is begun.",
)
@click.option(
    "--log-file-age",
    "file_s",
    type=duration,
    default=86_400.0,
    show_default="1d",
    help="Age of a file of the log, from which on another one is begun.",
)
@click.option(
    "--log-keep",
    "keep_s",
    type=duration,
    help="Delete a file of the log so long after its last row.  [default: never]",
)
@click.option(
    "--log-no-tokens",
    "tokens",
    flag_value=False,
    default=True,
    help="Write no token ids of prompts and answers: nothing can be judged from such a log.",
)
@click.option(
    "--name",
    default=socket.gethostname,
    show_default="this machine's",
    help="Of this gateway, among those of one leader.",
)
@click.option(
    "--first-byte",
    "first_byte_s",
    type=duration,
    default=300.0,
    show_default="5m",
    help="Longest wait for the first byte of a reply; of one that is not streamed, for all of it.",
)
@click.option(
    "--timeout",
    "total_s",
    type=duration,
    default=600.0,
    show_default="10m",
    help="Longest life of a request, its stream included.",
)
@click.option(
    "--drain",
    "drain_s",
    type=duration,
    default=0.0,
    show_default="not at all",
    help="How long new requests are still answered after SIGTERM, while /readyz refuses more.",
)
@click.option(
    "--show-pool", "show", is_flag=True, help="Replies say in a header which pool answered."
)
@click.option(
    "--allow",
    metavar="PATH",
    multiple=True,
    help="Let clients reach this path at stable too, such as /v1/files, '/v1/files/*' or "
    "'GET /v1/files'; may be given more than once.",
)
@click.option("--leader", metavar="URL", help="Follow this leader, and start none.")
@click.option("--leader-only", is_flag=True, help="Lead gateways, and serve no user.")
@shared("--webhook", "--slack", "--command", "--ledger", "--no-code")
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
    state: Path | None,
    log: Path | None,
    name: str,
    show: bool,
    allow: tuple[str, ...],
    leader: str | None,
    leader_only: bool,
    where: str,
    **options: Any,
) -> None:
    """Serve users of the kernels of CONTRACT, and keep asking which requests infer may have.

    The gateway speaks OpenAI's API.  Its leader, a process beside it, lets the train kernel score
    a sample of what infer answers, and decides slice by slice who serves.  It needs pip install
    'servanda[gateway]'.  Ctrl-C ends it.  CONTRACT, keys and certificate are read again once
    their files are written, and at SIGHUP.  SERVANDA_CA_FILE names a PEM file of certificates
    that are trusted beside those that this machine trusts: of the pools, of the leader, and of
    webhooks.

    Exit codes: 0 it was told to end; 2 the text or the call is wrong; 4 it could not start.
    """
    if leader is not None and leader_only:
        raise click.UsageError("--leader follows a leader, and --leader-only is one: give one")
    if leader is not None:
        refuse_given(_OF_LEADERS, "--leader follows a leader that was told this at its own start")
    elif leader_only:
        refuse_given(_OF_GATEWAYS, "--leader-only serves no user")
    files = {name: options.pop(name) for name in _OF_LOGS}
    waits = Waits(**{name: options.pop(name) for name in _WAITS})
    if not (waits.first_byte_s > 0 and waits.total_s > 0):
        raise click.UsageError("--first-byte and --timeout are longer than nothing")
    if log is None:
        refuse_given(_OF_LOGS, "there is no --log")
    if not files["file_s"] > 0 or files["keep_s"] == 0:
        raise click.UsageError("--log-file-age and --log-keep are longer than nothing")
    if tls_key is not None and tls_cert is None:
        raise click.UsageError("--tls-key is the private key of a certificate: give --tls-cert too")
    _refuse_missing()
    from servanda.gateway.controller.process import Settings
    from servanda.gateway.proxy.config import LogFiles

    terms = load(contract)
    urls = {} if leader_only else urls_of(terms, infer, stable)
    admin_host, admin_port = _address(admin)
    folder = state or Path("runs") / f"{terms.metadata.name}-gateway"
    settings = Settings(
        contract=str(contract),
        state=str(folder),
        ledger=where,
        host=admin_host,
        port=admin_port,
        keys=str(keys) if keys else None,
        tls=(str(tls_cert), str(tls_key) if tls_key else None) if tls_cert else None,
        urls=tuple(urls.items()),
        **options,
    )
    holders: serve_processes.KeyHolders = ()
    if leader is None and keys is None:
        holders = _new_holders("admin", "gateway") if leader_only else _new_holders("admin")
        settings = replace(settings, held=holders)
    interrupt = signal.default_int_handler  # SIGTERM is as Ctrl-C, also before anything is served
    with contextlib.suppress(KeyboardInterrupt), serve_processes.handled(signal.SIGTERM, interrupt):
        if leader_only:
            serve_processes.lead(settings, holders)
        else:
            written = None if log is None else LogFiles(log, **files)
            own = {"name": name, "log": written, "shows": show, "allow": allow}
            serve_processes.serve(terms, settings, holders, (host, port), leader, waits, **own)
    sys.exit(0)


def _refuse_missing() -> None:
    try:
        import servanda.gateway.controller.web.app
        import servanda.gateway.http.listener
        import servanda.gateway.proxy.app  # noqa: F401 - what is missing is said before all else
    except ImportError as error:
        raise MeasurementError(
            f"a gateway needs {error.name}, which is not installed",
            hint="pip install 'servanda[gateway]'",
        ) from None


def _new_holders(*roles: Role) -> serve_processes.KeyHolders:
    """Keys for this start."""
    return tuple((role, role, secrets.token_urlsafe(32)) for role in roles)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if ":" not in text or not port.isdigit() or int(port) > 65535:
        raise click.UsageError(f"--admin is HOST:PORT, not {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)
