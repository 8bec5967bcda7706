# `servanda gateway audit`: what routing would have done with a log of served requests.

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import click

from servanda.cli.options import format_option, no_code_option
from servanda.cli.output import show
from servanda.cli.promotion_options import ledger_key
from servanda.errors import MeasurementError
from servanda.gateway.controller.audit import Audit, render
from servanda.traces.serialization import to_plain

_EVERY_S = 2.0  # between two looks at a log that grows


@click.command()
@click.argument("contract", type=click.Path(path_type=Path))
@click.option(
    "--log",
    "logs",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="A file of rows, or a folder of .jsonl files; may be given more than once.",
)
@click.option("--follow", is_flag=True, help="Go on as the log grows, until Ctrl-C.")
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    help="A folder that keeps what was scored; without it every call begins anew.",
)
@click.option(
    "--ledger",
    "where",
    metavar="WHERE",
    default="",
    help="Write every change to a ledger: a file for SQLite, or postgresql://USER@HOST/DATABASE.",
)
@format_option
@no_code_option
def audit(
    contract: Path,
    logs: tuple[Path, ...],
    follow: bool,
    state: Path | None,
    where: str,
    format_: str,
) -> None:
    """Score a log of served requests, and tell which slices would leave infer.

    Nothing stands in anybody's path, and nothing is diverted.  The rows are those of
    docs/how-to/traffic.md.

    Exit codes: 0 nothing to divert, 1 a slice is beyond its limit, 2 the text or the call is
    wrong, 3 nothing was scored, 4 the log, an engine or the state failed.
    """
    _there(logs, follow)
    with ExitStack() as stack:
        folder = state or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = stack.enter_context(
            closing(Audit(contract, logs, state=folder, ledger=where, key=ledger_key()))
        )
        with suppress(KeyboardInterrupt):
            _read(found)
            while follow:
                time.sleep(_EVERY_S)
                _read(found)
        audited = found.result
        if format_ == "json":
            said = {**to_plain(audited), "beyond": audited.beyond, "exit": audited.exit_code}
            show(json.dumps(said, indent=1))
        else:
            show(render(audited))
    sys.exit(audited.exit_code)


def _there(logs: Sequence[Path], follow: bool) -> None:
    """Refuse a log that is not there; one that is followed may come."""
    for path in (path for path in logs if not path.exists()):
        if not follow:
            raise MeasurementError(
                f"the log {path} is not there",
                hint="--log takes a file of rows, or a folder of .jsonl files",
            )
        click.echo(f"{path} is not there yet: waiting for it", err=True)


def _read(found: Audit) -> None:
    """Take what is new, and say what moved."""
    for one in found.read():
        if one.before != one.after:
            moved = f"{one.slice}: {one.before} → {one.after}: {one.reason}"
            click.echo(moved, err=True)
