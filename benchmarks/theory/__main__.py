# Attempts to falsify the theorems and the procedures: python -m benchmarks.theory

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from benchmarks.theory.report import Findings, find, markdown, text
from servanda.cli.options import PRINTS, shared, show
from servanda.cli.output import clear
from servanda.cli.screen import watching
from servanda.errors import MeasurementError, ServandaError
from servanda.report.base import format_of
from servanda.runner.measurement import Progress

_FORMATS = {
    "text": text,
    "markdown": markdown,
    "json": lambda found: json.dumps(found.to_dict(), indent=1),
}
_BROKEN = 1


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--cases",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    help="Approximate number of exact values for each theorem.",
)
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    help="Simulated runs of each scenario.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--format",
    "format_",
    type=click.Choice([*_FORMATS]),
    help="Format of the output.  [default: by the suffix of -o, else text]",
)
@shared("-o", help=PRINTS)
def theory(cases: int, runs: int, seed: int, format_: str | None, output: Path | None) -> None:
    """Compare every theorem with exact values, and simulate every procedure.

    Bounds are tested on kernels that can be enumerated. Procedures are simulated together with
    common shortcuts, on streams that break the shortcuts. The same seed gives the same numbers.

    Exits 1 if a theorem is violated or a procedure of ours is wrong more often than allowed,
    else 0.
    """
    chosen = _format(format_, output)
    try:
        if output is not None:
            clear(output)
        with watching() as watch:
            found = find(cases, runs, seed, lambda *progress: watch(Progress(*progress)))
        _print(_FORMATS[chosen](found), output)
    except ServandaError as error:
        raise click.UsageError(str(error)) from None
    if found.faults:
        if output is not None:
            _say_faults(found)
        sys.exit(_BROKEN)


def _format(format_: str | None, output: Path | None) -> str:
    if format_ is not None or output is None:
        return format_ or "text"
    by_suffix = format_of(output.name)
    if by_suffix not in _FORMATS:
        raise click.BadParameter(
            f"{output}: the suffix names no format; give --format {', '.join(_FORMATS)}"
        )
    return by_suffix


def _print(written: str, output: Path | None) -> None:
    if output is None:
        show(written.rstrip("\n"))
        return
    try:
        output.write_text(f"{written.rstrip()}\n", encoding="utf-8")
    except OSError as error:
        raise MeasurementError(
            f"{output} cannot be written: {error.strerror or error}",
            hint="the same command with the same --seed gives the same numbers",
        ) from None


def _say_faults(found: Findings) -> None:
    for fault in found.faults:
        click.echo(f"fault: {fault}", err=True)


if __name__ == "__main__":
    theory(prog_name="python -m benchmarks.theory")
