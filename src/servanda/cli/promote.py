# `servanda promote`: from stage to stage, as far as the evidence goes.

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from servanda.cli.options import FILE, LOG_ROWS, shared, until
from servanda.cli.promotion import (
    actor_option,
    code_of,
    notify,
    opened,
    print_problems,
    print_story,
)
from servanda.cli.screen import watching
from servanda.contract.clause import STAGES
from servanda.promotion.ledger.entry import Outrun
from servanda.promotion.notify.sinks import sinks_of
from servanda.promotion.run import report
from servanda.promotion.run.history import History
from servanda.promotion.run.outbox import deliver_late
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
    help="Stop with exit code 0 once this stage is reached.",
)
@shared("--every", "--ledger")
@shared("--webhook", "--slack", "--command", "--notify")
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

    Each call continues the promotion: it measures the current step (live steps read the traffic
    log, see docs/how-to/traffic.md), decides, writes the decision to the ledger, and then notifies
    the receivers.  A build moves forward on evidence only; a violation returns all traffic to
    stable.  Without --every a call evaluates once.

    In a Kubernetes Job treat exit code 3 as success, or use --every with --until: see
    docs/how-to/promote.md.
    """
    name = load(contract).metadata.name  # a contract that is wrong begins no ledger
    deadline = until(max_time)
    sinks = sinks_of(**receivers)
    latest: list[History] = []
    missing: list[str] = []

    def above() -> str:
        table = [report.text(history, now=time.time()) for history in latest]
        return "\n".join([*table, *missing])

    with opened(where) as ledger, watching(quiet, above) as watch:

        def stepped(step: Step) -> None:
            latest[:] = [notify(ledger, step.history, sinks)]
            missing[:] = _missing(step, logs)
            if step.error:
                click.echo(step.error, err=True)
            if not quiet and not sys.stderr.isatty():
                history = step.history
                leg = history.evaluations[-1].leg if history.evaluations else history.leg
                click.echo(f"{leg.name}: {history.state.why}", err=True)
                for line in missing if every is not None else ():
                    click.echo(f"  {line}", err=True)

        # decisions of an earlier process that was killed before it delivered them
        print_problems(deliver_late(ledger, name, sinks, now=time.time, wait=time.sleep))
        build = Build(contract, run_dir, logs, fresh)
        while True:
            try:
                history = promote_build(
                    build,
                    ledger,
                    actor=actor,
                    clock=time.time,
                    until=None if stage == _THROUGH else stage,
                    watch=watch,
                    deadline=deadline,
                    stepped=stepped,
                )
            except (Occupied, Outrun) as error:  # another promoter is active: this turn is its own
                if every is None or (deadline is not None and deadline()):
                    raise
                click.echo(str(error), err=True)
                time.sleep(every)
                continue
            history = notify(ledger, history, sinks)
            build = Build(contract, run_dir, logs)
            over = history.state.ended or _reached(history, stage)
            if every is None or over or (deadline is not None and deadline()):
                break
            time.sleep(every)
    print_story(history, format_)
    for line in missing if not history.state.ended else ():
        click.echo(f"  {line}", err=True)
    sys.exit(0 if _reached(history, stage) else code_of(history))


def _missing(step: Step, logs: tuple[Path, ...]) -> list[str]:
    """Why a live step waits, and which of its requests are no evidence."""
    look = step.looked
    if look is None or look.plan.traffic is None:
        return []
    ended = step.history.state.ended  # it waits for nothing
    waits = [] if ended else [*absent(logs), *filter(None, [look.waiting])]
    outside = [f"{n:,} requests are no evidence: {why}" for why, n in look.outside.items()]
    return [*(f"waiting: {what}" for what in waits), *outside]


def _reached(history: History, stage: str | None) -> bool:
    if stage == _THROUGH:
        return history.state.status == _THROUGH
    return stage is not None and history.reached(stage)
