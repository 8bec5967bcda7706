# `servanda check`: measure, judge, report.

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from servanda import run
from servanda.cli.options import max_time_option, until
from servanda.cli.progress import watching
from servanda.report import FORMATS


@click.command()
@click.argument("contract", type=click.Path(path_type=Path))
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Where to measure; a run there is continued.  [default: runs/NAME]",
)
@click.option("--fresh", is_flag=True, help="Open a new attempt, judged at a smaller alpha.")
@click.option(
    "--format", "format_", type=click.Choice(sorted(FORMATS)), default="text", show_default=True
)
@max_time_option
@click.option("--quiet", is_flag=True, help="No progress.")
def check(
    contract: Path,
    run_dir: Path | None,
    fresh: bool,
    format_: str,
    max_time: float | None,
    quiet: bool,
) -> None:
    """Measure both kernels of CONTRACT on the same tokens and judge every clause.

    Stops as soon as everything is decided; Ctrl-C leaves a run that the same command resumes.
    """
    deadline = until(max_time)
    with watching(quiet) as watch:
        verdict = run.check(contract, run_dir=run_dir, fresh=fresh, watch=watch, deadline=deadline)
    if not quiet:
        click.echo(f"measured in {run_dir or run.RUNS / verdict.contract}", err=True)
    try:
        click.echo(FORMATS[format_](verdict))
    except BrokenPipeError:  # whoever reads has seen enough; the exit code still counts
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(verdict.exit_code)
