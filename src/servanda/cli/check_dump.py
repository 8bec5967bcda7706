# `servanda tools check-dump`, and `servanda check` of a folder: judge a trainer's dump.

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from servanda.cli.options import DASH, FILE, PLACE, shared
from servanda.cli.output import REPORT_OPTIONS, refuse_place, report_places, write, write_text
from servanda.cli.progress import watching
from servanda.cli.referee_text import third_lines
from servanda.cli.stdout import show, show_json
from servanda.cli.verdict_text import show_marked
from servanda.errors import ContractError
from servanda.judgement.verdict import FORMATS
from servanda.rl.dumps.judge import DumpOptions, judge_dump, selected_dump
from servanda.rl.dumps.report import render
from servanda.rl.dumps.third_scorer import Referee, refuse_referee, third_score
from servanda.runner.ray_cluster import connected

_OF_A_RUN = ("attempt-1", "plan.json")


def _steps(text: str) -> tuple[int | None, int | None]:
    """a:b, a:, :b, both ends included, or one step."""
    first, colon, last = text.partition(":")
    try:
        low, high = int(first) if first else None, int(last) if last else None
        if not colon and low is None:
            raise ValueError
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a range of steps: write 10:20, 10:, :20 or 10"
        ) from None
    if low is not None and high is not None and low > high:
        raise click.BadParameter(f"{text!r} ends before it begins: write {high}:{low}")
    return (low, high if colon else low)


@click.command("check-dump")
@click.argument("path", metavar="DIR", type=PLACE)
@shared("--as", "--preset")
@click.option("--steps", type=_steps, metavar="A:B", help="Steps to judge, such as 10:20.")
@shared("--unsafe-pickles", "--bitwise", "--reference")
@click.option(
    "--mask",
    type=FILE,
    metavar="DIR",
    help="Folder for masks of the tokens in violated slices, such as masks.",
)
@shared("--referee", help="It has the weights of the step.")
@click.option(
    "--referee-rows",
    "rows",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Rows of the dump that --referee scores, drawn at random.",
)
@shared("--temperature", default=1.0, help="Of --referee.")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help="Processes that read steps side by side; default: one per core for a large dump.",
)
@shared("--on", help="Its nodes read the steps.")
@shared("--save-contract")
@REPORT_OPTIONS
@shared("--report", "--quiet")
def check_dump(
    path: Path,
    as_: str | None,
    preset: str | None,
    steps: tuple[int | None, int | None] | None,
    unsafe_pickles: bool,
    bitwise: bool,
    reference: Path | None,
    mask: Path | None,
    referee: str | None,
    rows: int,
    temperature: float,
    jobs: int | None,
    on: str | None,
    **printing: Any,
) -> None:
    """Measure training-inference mismatch in a trainer's dump.

    Checks the data quality, then answers whether to go on, on which tokens not, and since which
    step. The format and the limits are detected. The dump is read in pieces, and may be larger
    than memory. DIR is a folder, a file, or the URL of an object store, such as
    s3://bucket/run. `servanda check DIR` is the same without these options.
    """
    steps = steps or (None, None)
    options = DumpOptions(
        path, as_, preset, steps, unsafe_pickles, mask, bitwise, jobs, reference=reference
    )
    asked = None if referee is None else Referee(referee, rows, temperature)
    judged(options, on=on, referee=asked, **printing)


def judged(
    options: DumpOptions,
    *,
    format_: str | None,
    output: Path | None,
    reports: tuple[Path, ...],
    quiet: bool,
    save: Path | None = None,
    on: str | None = None,
    referee: Referee | None = None,
) -> None:
    """Judge a dump, print and write the requested reports, and exit with the outcome.

    Args:
        on: address of a Ray cluster.
        referee: a third scorer of some rows.
    """
    refuse_run(options.path)
    if referee is not None:
        dump = selected_dump(options)
        refuse_referee(referee.text, dump.steps, dump.detection.notes)
    printed, files = report_places(format_, output, reports)
    refuse_place(save, force=None)
    with connected(on, options.jobs) if on else nullcontext() as cluster, watching(quiet) as watch:
        answer = judge_dump(replace(options, cluster=cluster), watch)
        third = None if referee is None else third_score(answer, referee, watch=watch)
    if cluster is not None and not quiet:
        click.echo(f"computed by {cluster}", err=True)
    aside = str(save) == DASH  # only the contract goes to stdout then
    if save is not None:
        write_text(save, answer.contract_text)
    for path, name in files.items():
        write(answer.verdict, name, path)
    written = [f"report   {path}" for path in files]
    written += [f"contract {save}"] if save is not None and not aside else []
    if printed == "text":
        *body, last = render(answer).split("\n")
        scored = [] if third is None else third_lines(third, "the trainer", "the server")
        show_marked([*body, *scored, *written, last], err=aside)
    elif printed == "json" and third is not None:
        verdict = json.loads(FORMATS["json"](answer.verdict))
        show_json({**verdict, "referee": third}, err=aside)
    elif printed is not None:
        show(FORMATS[printed](answer.verdict), err=aside)
    if printed != "text" and not quiet:
        for line in written:
            click.echo(line, err=True)
    sys.exit(answer.verdict.exit_code)


def refuse_run(path: Path) -> None:
    """A run directory holds what servanda measured, and no dump.

    Raises:
        ContractError: the folder is one.
    """
    if isinstance(path, Path) and any((path / name).exists() for name in _OF_A_RUN):
        raise ContractError(
            f"{path} is a run directory of servanda, not a trainer's dump",
            hint=f"print its verdict: servanda tools report {path}",
        )
