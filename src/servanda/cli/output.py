# Reports on disk: where they may go is checked before anything is measured.

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from servanda.errors import ContractError, MeasurementError
from servanda.judgement.verdict import Verdict
from servanda.report.base import FORMATS, SUFFIXES, format_of

FORMAT = click.option(
    "--format",
    "format_",
    type=click.Choice(sorted(FORMATS)),
    help="Of what is printed, or written to -o.  [default: by the suffix of -o, else text]",
)
STDOUT = "-"


class OutputPath(click.Path):
    """A file to write to; None for -, standard output, where a command prints without it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return None if str(value) == STDOUT else super().convert(value, param, ctx)


OUTPUT = click.option(
    "-o", "--output", type=OutputPath(), help="Write to FILE instead of printing; - prints."
)


def chosen(format_: str | None, output: Path | None) -> str:
    """The format that was asked for, by name or by the suffix of a file."""
    return format_ or (format_of(output.name) if output else None) or "text"


def by_suffix(path: Path) -> str:
    """The format that a report's file name asks for.

    Raises:
        click.BadParameter: none has this suffix.
    """
    found = format_of(path.name)
    if found is None:
        known = ", ".join(SUFFIXES)
        raise click.BadParameter(f"{path}: the suffix says the format; known: {known}")
    return found


def refuse_place(output: Path | None, force: bool | None) -> None:
    """Say before all the work that a contract cannot go there.

    Args:
        force: whether one that is there is replaced; None: the command has no such option.
    """
    if output is None or str(output) == STDOUT:
        return
    _refuse_folder(output)
    if output.exists() and not force:
        hint = "give another name" + ("" if force is None else ", or --force")
        raise ContractError(f"{output} is there already", hint=hint)


def _refuse_folder(path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"cannot be written: no folder {path.parent}"
        raise click.BadParameter(f"{path} {what}")


def write_text(path: Path, text: str) -> None:
    """A contract to its file, or to standard output where that is -.

    Raises:
        MeasurementError: it cannot be written.
    """
    if str(path) == STDOUT:
        show(text.rstrip("\n"))
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MeasurementError(f"{path} cannot be written: {error.strerror or error}") from None


def clear(path: Path) -> None:
    """Refuse a file that cannot be written, and remove an old one.

    A report of an earlier run must not be taken for the one of a run that failed.
    """
    _refuse_folder(path)
    if path.is_file():
        path.unlink()


def write(verdict: Verdict, format_: str, path: Path) -> None:
    """One report to its file.

    Raises:
        MeasurementError: the file cannot be written.
    """
    text = FORMATS[format_](verdict)
    try:
        path.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise MeasurementError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="the verdict is kept in the run directory: servanda tools report RUN_DIR -o FILE",
        ) from None


def show(text: str, *, err: bool = False) -> None:
    """Print, though whoever reads may have seen enough; the exit code still counts."""
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
