# `servanda serve`: the gateway of a contract, and the leader whose routes it follows.

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from servanda.cli import serve_processes
from servanda.cli.gateway_options import Waits, urls_of
from servanda.cli.options import DurationType, ledger_option, no_code_option
from servanda.errors import MeasurementError
from servanda.runner.load import load

if TYPE_CHECKING:
    from servanda.gateway.http.api_keys import Role

_FILE = click.Path(path_type=Path)
# what says nothing to a gateway that follows, and nothing to a leader that serves nobody
_OF_LEADERS = ("admin", "state", "webhook", "slack", "command", "where")
_OF_LOGS = ("log_file_mib", "log_file_age", "log_keep", "log_no_tokens")
_OF_GATEWAYS = (
    *("host", "port", "infer", "stable", "log", *_OF_LOGS),
    *("name", "show", "allow", "first_byte", "timeout", "drain"),
)


@click.command()
@click.argument("contract", type=_FILE)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where users ask.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
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
@click.option("--keys", type=_FILE, help="Who may do what.  [default: made for this start]")
@click.option(
    "--tls-cert",
    type=_FILE,
    help="PEM file with the certificate of users' and the leader's listeners, and with those that "
    "lead to its root.  [default: plain HTTP]",
)
@click.option("--tls-key", type=_FILE, help="Its private key.  [default: in --tls-cert]")
@click.option("--state", type=_FILE, help="The leader's folder.  [default: runs/NAME-gateway]")
@click.option("--log", type=_FILE, help="A folder, for the log of the requests that were sampled.")
@click.option(
    "--log-file-mib",
    type=click.IntRange(1, 1 << 20),
    default=64,
    show_default=True,
    help="Size of a file of the log, from which on another one is begun.",
)
@click.option(
    "--log-file-age",
    type=DurationType(),
    default=86_400.0,
    show_default="1d",
    help="Age of a file of the log, from which on another one is begun.",
)
@click.option(
    "--log-keep",
    type=DurationType(),
    help="Delete a file of the log so long after its last row.  [default: never]",
)
@click.option(
    "--log-no-tokens",
    is_flag=True,
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
    type=DurationType(),
    default=300.0,
    show_default="5m",
    help="Longest wait for the first byte of a reply; of one that is not streamed, for all of it.",
)
@click.option(
    "--timeout",
    type=DurationType(),
    default=600.0,
    show_default="10m",
    help="Longest life of a request, its stream included.",
)
@click.option(
    "--drain",
    type=DurationType(),
    default=0.0,
    show_default="not at all",
    help="How long new requests are still answered after SIGTERM, while /readyz refuses more.",
)
@click.option("--show", is_flag=True, help="Replies say in a header which pool answered.")
@click.option(
    "--allow",
    metavar="PATH",
    multiple=True,
    help="Let clients reach this path at stable too, such as /v1/files, '/v1/files/*' or "
    "'GET /v1/files'; may be given more than once.",
)
@click.option("--leader", metavar="URL", help="Follow this leader, and start none.")
@click.option("--leader-only", is_flag=True, help="Lead gateways, and serve no user.")
@click.option(
    "--webhook",
    metavar="URL",
    multiple=True,
    envvar="SERVANDA_WEBHOOK",
    show_envvar=True,
    help="POST every page to URL, as JSON; may be given more than once.",
)
@click.option(
    "--slack",
    metavar="URL",
    multiple=True,
    envvar="SERVANDA_SLACK",
    show_envvar=True,
    help="POST it to an incoming webhook of Slack; so may this.",
)
@click.option(
    "--command",
    metavar="COMMAND",
    multiple=True,
    help="Run a program for it, with the JSON on its input; so may this.",
)
@ledger_option
@no_code_option
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
    log_file_mib: int,
    log_file_age: float,
    log_keep: float | None,
    log_no_tokens: bool,
    name: str,
    first_byte: float,
    timeout: float,
    drain: float,
    show: bool,
    allow: tuple[str, ...],
    leader: str | None,
    leader_only: bool,
    where: str,
    **told: tuple[str, ...],
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
        _refuse_given(_OF_LEADERS, "--leader follows a leader that was told this at its own start")
    elif leader_only:
        _refuse_given(_OF_GATEWAYS, "--leader-only serves no user")
    if not (first_byte > 0 and timeout > 0):
        raise click.UsageError("--first-byte and --timeout are longer than nothing")
    if log is None:
        _refuse_given(_OF_LOGS, "there is no --log")
    if not log_file_age > 0 or log_keep == 0:
        raise click.UsageError("--log-file-age and --log-keep are longer than nothing")
    if tls_key is not None and tls_cert is None:
        raise click.UsageError("--tls-key is the private key of a certificate: give --tls-cert too")
    _refuse_missing()
    from servanda.gateway.controller.process import Settings
    from servanda.gateway.proxy.config import LogFiles

    found = load(contract)
    urls = {} if leader_only else urls_of(found, infer, stable)
    admin_host, admin_port = _split(admin)
    folder = state or Path("runs") / f"{found.metadata.name}-gateway"
    settings = Settings(
        contract=str(contract),
        state=str(folder),
        ledger=where,
        host=admin_host,
        port=admin_port,
        keys=str(keys) if keys else None,
        tls=(str(tls_cert), str(tls_key) if tls_key else None) if tls_cert else None,
        urls=tuple(urls.items()),
        webhook=told["webhook"],
        slack=told["slack"],
        command=told["command"],
    )
    made: serve_processes.Made = ()
    if leader is None and keys is None:
        made = _made("admin", "gateway") if leader_only else _made("admin")
        settings = replace(settings, held=made)
    with contextlib.suppress(KeyboardInterrupt), serve_processes.ended_by(signal.SIGTERM):
        if leader_only:
            serve_processes.lead(settings, made)
        else:
            waits = Waits(first_byte, timeout, drain)
            files = None
            if log is not None:
                size = log_file_mib << 20
                files = LogFiles(log, size, log_file_age, log_keep, tokens=not log_no_tokens)
            own = {"name": name, "log": files, "shows": show, "allow": allow}
            serve_processes.serve(found, settings, made, (host, port), leader, waits, **own)
    sys.exit(0)


def _refuse_given(names: tuple[str, ...], why: str) -> None:
    """Refuse options that would say nothing; one from the environment is meant for others too."""
    context = click.get_current_context()
    options = {one.name: one.opts[0] for one in context.command.params}
    given = [
        options[name]
        for name in names
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{why}: leave out {', '.join(given)}")


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


def _split(admin: str) -> tuple[str, int]:
    host, _, port = admin.rpartition(":")
    if ":" not in admin or not port.isdigit() or int(port) > 65535:
        raise click.UsageError(f"--admin is HOST:PORT, not {admin!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _made(*roles: Role) -> serve_processes.Made:
    """Keys for this start."""
    return tuple((role, role, secrets.token_urlsafe(32)) for role in roles)
