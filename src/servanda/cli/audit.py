# `servanda gateway audit`: what routing would have done with a log of served requests.

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import click

from servanda.cli.options import FILE, LOG_ROWS, shared, show_as
from servanda.cli.promotion import ledger_key
from servanda.errors import MeasurementError
from servanda.gateway.controller.audit import Audit, render
from servanda.gateway.routing.state import Transition
from servanda.traces.serialization import to_plain

_EVERY_S = 2.0  # between two readings of a growing log


@click.command("audit")
@click.argument("contract", type=FILE)
@shared("--log", required=True, help=LOG_ROWS)
@click.option("--follow", is_flag=True, help="Keep reading as the log grows, until Ctrl-C.")
@shared("--state", help="[default: start from the beginning]")
@shared("--ledger", default="", envvar=None, show_default=False, help="[default: none]")
@shared("--format", "--no-code")
def audit_command(
    contract: Path,
    logs: tuple[Path, ...],
    follow: bool,
    state: Path | None,
    where: str,
    format_: str,
) -> None:
    """Score a log of served requests, and report which slices would be diverted.

    The audit is outside the request path and changes no route.  docs/how-to/traffic.md
    describes the rows of the log.
    """
    for path in (path for path in logs if not path.exists()):
        if not follow:
            raise MeasurementError(
                f"the log {path} is not there",
                hint="--log takes a file of rows, or a folder of .jsonl files",
            )
        click.echo(f"{path} is not there yet: waiting for it", err=True)
    with ExitStack() as stack:
        folder = state or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        audit = stack.enter_context(
            closing(Audit(contract, logs, state=folder, ledger=where, key=ledger_key()))
        )
        with suppress(KeyboardInterrupt):
            _print_moves(audit.read())
            while follow:
                time.sleep(_EVERY_S)
                _print_moves(audit.read())
        audited = audit.result
        more = {"beyond": audited.beyond, "exit": audited.exit_code}
        show_as(format_, {**to_plain(audited), **more}, render(audited))
    sys.exit(audited.exit_code)


def _print_moves(moves: Iterable[Transition]) -> None:
    for move in moves:
        if move.before != move.after:
            click.echo(f"{move.slice}: {move.before} → {move.after}: {move.reason}", err=True)
