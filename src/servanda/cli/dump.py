# `servanda check` of a trainer's dump.

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from servanda.cli.options import DASH, refuse_given, show, show_json
from servanda.cli.output import refuse_place, report_places, write, write_text
from servanda.cli.referee_text import third_lines
from servanda.cli.screen import show_marked, watching
from servanda.errors import ContractError
from servanda.judgement.verdict import FORMATS
from servanda.rl.dumps.judge import DumpOptions, judge_dump, selected_dump
from servanda.rl.dumps.report import render
from servanda.rl.dumps.third_scorer import Referee, refuse_referee, third_score
from servanda.runner.ray_cluster import connected

_OF_A_RUN = ("attempt-1", "plan.json")


def check_dump(
    path: Path,
    *,
    contract: Path | None,
    as_: str | None,
    preset: str | None,
    steps: tuple[int | None, int | None] | None,
    mask: Path | None,
    bitwise: bool,
    reference: Path | None,
    referee: str | None,
    rows: int,
    temperature: float,
    jobs: int | None,
    unsafe_pickles: bool,
    **printing: Any,
) -> NoReturn:
    """Judge the dump as the options of `servanda check` ask, and exit with the outcome."""
    if contract is not None:
        refuse_given(
            ("preset", "bitwise", "save"),
            "--contract sets the limits, the slices and whether the bits are the same",
        )
    options = DumpOptions(
        path,
        format=as_,
        preset=preset,
        contract=contract,
        steps=steps or (None, None),
        unsafe_pickles=unsafe_pickles,
        mask=mask,
        bitwise=bitwise,
        jobs=jobs,
        reference=reference,
    )
    asked = None if referee is None else Referee(referee, rows, temperature)
    _judged(options, referee=asked, **printing)


def _judged(
    options: DumpOptions,
    *,
    format_: str | None,
    output: Path | None,
    reports: tuple[Path, ...],
    quiet: bool,
    save: Path | None,
    on: str | None,
    referee: Referee | None,
) -> NoReturn:
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
