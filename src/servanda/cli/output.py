# Reports on disk: where they may go is checked before anything is measured.

from __future__ import annotations

from pathlib import Path

import click

from servanda.cli.options import DASH, PRINTS, shared, show, together
from servanda.errors import ContractError, MeasurementError
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.report.base import SUFFIXES, format_of

# of commands that print a verdict
REPORT_OPTIONS = together(
    shared(
        "--format",
        type=click.Choice(sorted(FORMATS)),
        default=None,
        help="With -o: format of FILE.  [default: by the suffix of -o, else text]",
    ),
    shared("-o", help=PRINTS),
)


def chosen(format_: str | None, output: Path | None) -> str:
    """The requested format, by name or by the suffix of a file."""
    return format_ or (format_of(output.name) if output else None) or "text"


def report_places(
    format_: str | None, output: Path | None, reports: tuple[Path, ...]
) -> tuple[str | None, dict[Path, str]]:
    """The format to print in, if anything is printed, and that of every file; old ones go.

    Raises:
        click.BadParameter: a file has no known suffix, or cannot be written.
    """
    files: dict[Path, str] = {}
    for path in (path for path in reports if str(path) != DASH):
        suffix_format = format_of(path.name)
        if suffix_format is None:
            known = ", ".join(SUFFIXES)
            raise click.BadParameter(f"{path}: the suffix says the format; known: {known}")
        files[path] = suffix_format
    prints = output is None or len(files) < len(reports)
    if output is not None:
        files[output] = chosen(format_, output)
    for path in files:
        clear(path)
    return ((format_ or "text") if prints else None), files


def refuse_place(output: Path | None, force: bool | None) -> None:
    """Say before all the work that a contract cannot go there.

    Args:
        force: whether one that is there is replaced; None: the command has no such option.
    """
    if output is None or str(output) == DASH:
        return
    _refuse_folder(output)
    if output.exists() and not force:
        hint = "give another name" + ("" if force is None else ", or --force")
        raise ContractError(f"{output} is there already", hint=hint)


def _refuse_folder(path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"cannot be written: no folder {path.parent}"
        raise click.BadParameter(f"{path} {what}")


def write_text(path: Path, text: str, hint: str = "") -> None:
    """A text to its file, or to standard output where that is -.

    Raises:
        MeasurementError: it cannot be written.
    """
    if str(path) == DASH:
        show(text.rstrip("\n"))
        return
    with MeasurementError.of_system(f"{path} cannot be written", hint=hint):
        path.write_text(text, encoding="utf-8")


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
    hint = "the verdict is kept in the run directory: servanda tools report RUN_DIR -o FILE"
    write_text(path, FORMATS[format_](verdict).removesuffix("\n") + "\n", hint)
