# `servanda tools report`: a verdict that was reached, rendered again; nothing is measured.

from __future__ import annotations

from pathlib import Path

import click

from servanda.cli.input import verdict_at
from servanda.cli.options import FILE_OR_DASH
from servanda.cli.output import REPORT_OPTIONS, chosen, clear, show, write
from servanda.report.base import FORMATS


@click.command()
@click.argument("path", metavar="RUN_DIR|VERDICT.json", type=FILE_OR_DASH)
@REPORT_OPTIONS
def report(path: Path, format_: str | None, output: Path | None) -> None:
    """Render the verdict of RUN_DIR again, in any format.

    Of a run directory the latest attempt that reached a verdict is taken; a file is what
    `check --format json` printed, and - reads that from standard input.  Exits 0 once it is
    rendered: it is `check` that gates.
    """
    verdict = verdict_at(path)
    format_ = chosen(format_, output)
    if output is None:
        show(FORMATS[format_](verdict))
        return
    clear(output)
    write(verdict, format_, output)
    click.echo(f"report {output}", err=True)
