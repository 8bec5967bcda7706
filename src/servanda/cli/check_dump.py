# `servanda tools check-dump`, and `servanda check` of a folder: a trainer's dump to a verdict.

from __future__ import annotations

import sys
from pathlib import Path

import click

from servanda.cli.output import (
    FORMAT,
    OUTPUT,
    by_suffix,
    chosen,
    clear,
    refuse_place,
    show,
    write,
    write_text,
)
from servanda.cli.progress import watching
from servanda.errors import ContractError
from servanda.report.base import FORMATS
from servanda.rl.dumps.judge import DumpOptions, judge_dump
from servanda.rl.dumps.report import render

_FILE = click.Path(path_type=Path)
_OF_A_RUN = ("attempt-1", "plan.json")


class StepsType(click.ParamType):
    """a:b, a:, :b, both ends included, or one step."""

    name = "a:b"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int | None, int | None]:
        if isinstance(value, tuple):
            return value
        first, colon, last = str(value).partition(":")
        try:
            low, high = int(first) if first else None, int(last) if last else None
            if not colon and low is None:
                raise ValueError
        except ValueError:
            self.fail(f"{value!r} is no range of steps: write 10:20, 10:, :20 or 10", param, ctx)
        if low is not None and high is not None and low > high:
            self.fail(f"{value!r} ends before it begins: write {high}:{low}", param, ctx)
        return (low, high if colon else low)


@click.command("check-dump")
@click.argument("path", metavar="DIR", type=_FILE)
@click.option("--as", "as_", metavar="NAME", help="The dump's format.  [default: it is found out]")
@click.option("--preset", metavar="NAME", help="Limits.  [default: those of the trainer]")
@click.option("--steps", type=StepsType(), default=(None, None), help="Only these steps.")
@click.option("--unsafe-pickles", is_flag=True, help="Read pickles, which can run any code.")
@click.option("--bitwise", is_flag=True, help="Both sides compute the same bits, I declare.")
@click.option("--mask", type=_FILE, metavar="DIR", help="Write the tokens of red slices here.")
@click.option("--save-contract", "save", type=_FILE, help="Write the contract to FILE, too.")
@FORMAT
@OUTPUT
@click.option(
    "--report",
    "reports",
    type=_FILE,
    multiple=True,
    help="Write this one too; its suffix says the format (.html .json .xml .sarif .md).",
)
@click.option("--quiet", is_flag=True, help="No progress.")
def check_dump(
    path: Path,
    as_: str | None,
    preset: str | None,
    steps: tuple[int | None, int | None],
    unsafe_pickles: bool,
    bitwise: bool,
    mask: Path | None,
    save: Path | None,
    format_: str | None,
    output: Path | None,
    reports: tuple[Path, ...],
    quiet: bool,
) -> None:
    """Judge a trainer's dump: is the data sound, may I go on, where not and since when.

    Format and limits are found out. Everything is read once, in pieces: a dump may be larger
    than memory. `servanda check DIR` is the same without options.
    """
    options = DumpOptions(path, as_, preset, steps, unsafe_pickles, mask, bitwise)
    judged(options, save=save, format_=format_, output=output, reports=reports, quiet=quiet)


def judged(
    options: DumpOptions,
    *,
    format_: str | None,
    output: Path | None,
    reports: tuple[Path, ...],
    quiet: bool,
    save: Path | None = None,
) -> None:
    """Judge a dump, print and write what was asked for, and exit with the answer."""
    refuse_run(options.path)
    printed = chosen(format_, output)
    files = {path: by_suffix(path) for path in reports}
    if output is not None:
        files[output] = printed
    refuse_place(save, force=None)
    for path in files:
        clear(path)
    with watching(quiet) as watch:
        answer = judge_dump(options, watch)
    if save is not None:
        write_text(save, answer.contract_text)
    for path, name in files.items():
        write(answer.verdict, name, path)
    written = [f"report   {path}" for path in files]
    written += [f"contract {save}" for _ in [save] if save is not None]
    if output is None:
        text = printed == "text"
        shown = render(answer) if text else FORMATS[printed](answer.verdict)
        *body, last = shown.split("\n")
        show("\n".join([*body, *(written if text else []), last]))
        written = [] if text else written
    if not quiet:
        for line in written:
            click.echo(line, err=True)
    sys.exit(answer.verdict.exit_code)


def refuse_run(path: Path) -> None:
    """A run directory holds what servanda measured, and no dump.

    Raises:
        ContractError: the folder is one.
    """
    if any((path / name).exists() for name in _OF_A_RUN):
        raise ContractError(
            f"{path} is a run directory of servanda, not a trainer's dump",
            hint=f"print its verdict: servanda tools report {path}",
        )
