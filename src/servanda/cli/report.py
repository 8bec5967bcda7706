# `servanda tools report`: a verdict that was reached, rendered again; nothing is measured.

from __future__ import annotations

import sys
from pathlib import Path

import click

from servanda.cli.options import DASH, FILE_OR_DASH, show
from servanda.cli.output import REPORT_OPTIONS, chosen, clear, write
from servanda.cli.screen import show_verdict
from servanda.judgement.verdict import FORMATS
from servanda.runner.finished_run import read, verdict_of


@click.command()
@click.argument("path", metavar="RUN_DIR|VERDICT.json", type=FILE_OR_DASH)
@REPORT_OPTIONS
def report(path: Path, format_: str | None, output: Path | None) -> None:
    """Render the verdict of RUN_DIR again, in any format.

    For a run directory the latest attempt with a verdict is used.  VERDICT.json is the output of
    `check --format json`; - reads it from standard input.  Use `check` as
    the gate: the exit code does not depend on the verdict.
    """
    piped = str(path) == DASH
    verdict = verdict_of(sys.stdin.buffer.read(), Path("stdin")) if piped else read(path)
    format_ = chosen(format_, output)
    if output is None:
        if format_ == "text":
            show_verdict(verdict)
        else:
            show(FORMATS[format_](verdict))
        return
    clear(output)
    write(verdict, format_, output)
    click.echo(f"report {output}", err=True)
