# `servanda promote`: from stage to stage, as far as the evidence goes.

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from servanda.cli.options import (
    DurationType,
    format_option,
    ledger_option,
    max_time_option,
    no_code_option,
    until,
)
from servanda.cli.progress import watching
from servanda.cli.promotion_options import (
    actor_option,
    code_of,
    effect_options,
    opened,
    print_story,
    told,
    told_late,
)
from servanda.contract.model import STAGES
from servanda.promotion.ledger.entry import Outrun
from servanda.promotion.notify.base import Sink
from servanda.promotion.run import report
from servanda.promotion.run.history import History
from servanda.promotion.run.promoter import Build, Step
from servanda.promotion.run.promoter import promote as promote_build
from servanda.promotion.run.request_log_files import absent
from servanda.runner.load import load
from servanda.runner.run_directory import Occupied

_FILE = click.Path(path_type=Path)
_THROUGH = "completed"


@click.command()
@click.argument("contract", type=_FILE)
@click.option(
    "--served",
    type=_FILE,
    multiple=True,
    help="The log of what infer served, or a folder of such; see docs/how-to/traffic.md.",
)
@click.option("--run-dir", type=_FILE, help="Where to measure.  [default: runs/NAME]")
@click.option("--fresh", is_flag=True, help="Begin another attempt, judged at a smaller alpha.")
@click.option(
    "--until",
    "until_",
    type=click.Choice([*STAGES, _THROUGH]),
    help="End, with 0, once this is reached.",
)
@click.option("--every", type=DurationType(), help="Keep looking, with this pause.")
@ledger_option
@effect_options
@actor_option
@max_time_option
@format_option
@click.option("--quiet", is_flag=True, help="No progress.")
@no_code_option
def promote(
    contract: Path,
    served: tuple[Path, ...],
    run_dir: Path | None,
    fresh: bool,
    until_: str | None,
    every: float | None,
    where: str,
    sinks: Sequence[Sink],
    actor: str,
    max_time: float | None,
    format_: str,
    quiet: bool,
) -> None:
    """Take the build of CONTRACT from offline through shadow and canary to full.

    Each call continues the run: it measures what is there, moves on what it shows, writes that
    to the ledger, and then tells it.  Nothing goes forward without evidence; a violation gives
    all traffic back to stable.

    Exit codes: 0 completed, or --until is reached; 1 rolled back; 2 the text or the call is wrong;
    3 it waits for evidence, for time or for a person; 4 measuring failed, the evidence expired, or
    another promoter is at it.
    """
    name = load(contract).metadata.name  # a contract that is wrong begins no ledger
    deadline = until(max_time)
    stage = until_ if until_ in STAGES else None
    latest: list[History] = []
    missing: list[str] = []

    def above() -> str:
        table = [report.text(one, now=time.time()) for one in latest]
        return "\n".join([*table, *missing])

    with opened(where) as store, watching(quiet, above) as watch:

        def stepped(step: Step) -> None:
            latest[:] = [told(store, step.history, sinks)]
            missing[:] = _missing(step, served)
            if step.error:
                click.echo(step.error, err=True)
            if not quiet and not sys.stderr.isatty():
                history = step.history
                leg = history.evaluations[-1].leg if history.evaluations else history.leg
                click.echo(f"{leg.name}: {history.state.why}", err=True)
                for what in missing if every is not None else ():
                    click.echo(f"  {what}", err=True)

        told_late(store, name, sinks)
        build = Build(contract, run_dir, served, fresh)
        while True:
            try:
                history = promote_build(
                    build,
                    store,
                    actor=actor,
                    clock=time.time,
                    until=stage,
                    watch=watch,
                    deadline=deadline,
                    stepped=stepped,
                )
            except (Occupied, Outrun) as error:  # somebody else is at it: this look is theirs
                if every is None or (deadline is not None and deadline()):
                    raise
                click.echo(str(error), err=True)
                time.sleep(every)
                continue
            history = told(store, history, sinks)
            build = Build(contract, run_dir, served)
            over = history.state.ended or _reached(history, until_)
            if every is None or over or (deadline is not None and deadline()):
                break
            time.sleep(every)
    print_story(history, format_)
    for what in missing if not history.state.ended else ():
        click.echo(f"  {what}", err=True)
    sys.exit(0 if _reached(history, until_) else code_of(history))


def _missing(step: Step, served: tuple[Path, ...]) -> list[str]:
    """What a live leg waits for, and which of its requests are no evidence."""
    looked = step.looked
    if looked is None or looked.plan.traffic is None:
        return []
    ended = step.history.state.ended  # it waits for nothing
    waits = [] if ended else [*absent(served), *filter(None, [looked.waiting])]
    outside = [f"{n:,} requests are no evidence: {why}" for why, n in looked.outside.items()]
    return [*(f"waiting: {what}" for what in waits), *outside]


def _reached(history: History, until_: str | None) -> bool:
    if until_ == _THROUGH:
        return history.state.status == _THROUGH
    return until_ is not None and history.reached(until_)
