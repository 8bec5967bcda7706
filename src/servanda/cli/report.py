# `servanda report`: a verdict that was reached, rendered again; nothing is measured.

from __future__ import annotations

import json
from pathlib import Path

import click

from servanda.cli.output import FORMAT, OUTPUT, chosen, clear, show, write
from servanda.errors import EvidenceError
from servanda.report import FORMATS
from servanda.rundir import ATTEMPT
from servanda.verdict import Verdict

_FILE = "verdict.json"


@click.command()
@click.argument("path", metavar="RUN_DIR|VERDICT.json", type=click.Path(path_type=Path))
@FORMAT
@OUTPUT
def report(path: Path, format_: str | None, output: Path | None) -> None:
    """Render the verdict of RUN_DIR again, in any format.

    Of a run directory the latest attempt that reached a verdict is taken; a file is what
    `check --format json` printed.  Exits 0 once it is rendered: it is `check` that gates.
    """
    verdict = read(path)
    format_ = chosen(format_, output)
    if output is None:
        show(FORMATS[format_](verdict))
        return
    clear(output)
    write(verdict, format_, output)
    click.echo(f"report {output}", err=True)


def read(path: Path) -> Verdict:
    """The verdict of a run directory, of one attempt, or of a file.

    Raises:
        EvidenceError: there is none, or it is not a verdict of this version.
    """
    file = _latest(path) if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("it is not an object")
    except OSError as error:
        raise EvidenceError(
            f"{file} cannot be read: {error.strerror or error}",
            hint="give a run directory, or a file that `servanda check --format json` printed",
        ) from None
    except ValueError as error:
        hint = "give a run directory, or a file that `servanda check --format json` printed"
        if file.name == _FILE:
            hint = "the same `servanda check` writes it again, from what was measured"
        raise EvidenceError(f"{file} is not JSON of a verdict: {error}", hint=hint) from None
    try:
        return Verdict.from_dict(data)
    except EvidenceError as error:
        problem = error.problems[0]
        raise EvidenceError(f"{file}: {problem.message}", hint=problem.hint) from None


def _latest(folder: Path) -> Path:
    found = [p for p in folder.glob(f"{ATTEMPT}*/{_FILE}") if _number(p).isdecimal()]
    last = max(found, key=lambda p: int(_number(p)), default=folder / _FILE)
    if last.is_file():
        return last
    raise EvidenceError(
        f"{folder} holds no verdict",
        hint="`servanda check` with this --run-dir measures, or finishes what was begun",
    )


def _number(path: Path) -> str:
    return path.parent.name.removeprefix(ATTEMPT)
