# `servanda promote`: from stage to stage, as far as the evidence goes.

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from servanda.cli.options import FILE, LOG_ROWS, shared, until
from servanda.cli.progress import watching
from servanda.cli.promotion_options import (
    actor_option,
    code_of,
    notify,
    opened,
    print_problems,
    print_story,
)
from servanda.contract.clause import STAGES
from servanda.promotion.ledger.entry import Outrun
from servanda.promotion.notify.sinks import sinks_of
from servanda.promotion.run import report
from servanda.promotion.run.history import Story
from servanda.promotion.run.outbox import tell_late
from servanda.promotion.run.promoter import Build, Step
from servanda.promotion.run.promoter import promote as promote_build
from servanda.promotion.run.request_log_files import absent
from servanda.runner.load import load
from servanda.runner.run_directory import Occupied

_THROUGH = "completed"


@click.command()
@click.argument("contract", type=FILE)
@shared("--log", help=LOG_ROWS)
@shared("--run-dir", help="[default: runs/NAME]")
@shared("--fresh")
@click.option(
    "--until",
    "stage",
    type=click.Choice([*STAGES, _THROUGH]),
    help="End, with 0, once this is reached.",
)
@shared("--every", "--ledger")
@shared("--webhook", "--slack", "--command")
@actor_option
@shared("--max-time", "--format", "--quiet", "--no-code")
def promote(
    contract: Path,
    logs: tuple[Path, ...],
    run_dir: Path | None,
    fresh: bool,
    stage: str | None,
    every: float | None,
    where: str,
    actor: str,
    max_time: float | None,
    format_: str,
    quiet: bool,
    **receivers: Any,
) -> None:
    """Take the build of CONTRACT from offline through shadow and canary to full.

    Each call continues the run: it measures what is there, and what --log says of live requests
    (see docs/how-to/traffic.md), moves on what it shows, writes that to the ledger, and then tells
    it.  Nothing goes forward without evidence; a violation gives all traffic back to stable.
    Without --every a call looks once.

    Exit codes: 0 completed, or --until is reached; 1 rolled back; 2 the text or the call is wrong;
    3 it waits for evidence, for time or for a person; 4 measuring failed, the evidence expired, or
    another promoter is at it.
    """
    name = load(contract).metadata.name  # a contract that is wrong begins no ledger
    deadline = until(max_time)
    sinks = sinks_of(**receivers)
    latest: list[Story] = []
    missing: list[str] = []

    def above() -> str:
        table = [report.text(story, now=time.time()) for story in latest]
        return "\n".join([*table, *missing])

    with opened(where) as ledger, watching(quiet, above) as watch:

        def stepped(step: Step) -> None:
            latest[:] = [notify(ledger, step.story, sinks)]
            missing[:] = _missing(step, logs)
            if step.error:
                click.echo(step.error, err=True)
            if not quiet and not sys.stderr.isatty():
                leg = step.story.looks[-1].leg.name if step.story.looks else step.story.leg.name
                click.echo(f"{leg}: {step.story.state.why}", err=True)
                for line in missing if every is not None else ():
                    click.echo(f"  {line}", err=True)

        # what was decided before whoever did it was killed
        print_problems(tell_late(ledger, name, sinks, now=time.time, wait=time.sleep))
        build = Build(contract, run_dir, logs, fresh)
        while True:
            try:
                story = promote_build(
                    build,
                    ledger,
                    actor=actor,
                    clock=time.time,
                    until=None if stage == _THROUGH else stage,
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
            story = notify(ledger, story, sinks)
            build = Build(contract, run_dir, logs)
            over = story.state.ended or _reached(story, stage)
            if every is None or over or (deadline is not None and deadline()):
                break
            time.sleep(every)
    print_story(story, format_)
    for line in missing if not story.state.ended else ():
        click.echo(f"  {line}", err=True)
    sys.exit(0 if _reached(story, stage) else code_of(story))


def _missing(step: Step, logs: tuple[Path, ...]) -> list[str]:
    """What a live leg waits for, and which of its requests are no evidence."""
    look = step.looked
    if look is None or look.plan.traffic is None:
        return []
    ended = step.story.state.ended  # it waits for nothing
    waits = [] if ended else [*absent(logs), *filter(None, [look.waiting])]
    outside = [f"{n:,} requests are no evidence: {why}" for why, n in look.outside.items()]
    return [*(f"waiting: {what}" for what in waits), *outside]


def _reached(story: Story, stage: str | None) -> bool:
    if stage == _THROUGH:
        return story.state.status == _THROUGH
    return stage is not None and story.reached(stage)
