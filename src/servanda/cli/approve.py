# `servanda approve`: a person says yes to the next stage.

from __future__ import annotations

import time

import click

from servanda.cli.ledger import opened
from servanda.cli.options import effect_options, ledger_option
from servanda.cli.runs import acting, actor_option, reason_option, run_format
from servanda.effects import sinks_of
from servanda.promoting.answering import named
from servanda.promoting.writing import say_yes


@click.command(short_help="Say yes to the next stage of a run that awaits it.")
@click.argument("run")
@reason_option
@actor_option
@ledger_option
@effect_options
@run_format
def approve(
    run: str,
    reason: str,
    actor: str,
    where: str,
    webhook: tuple[str, ...],
    slack: tuple[str, ...],
    command: tuple[str, ...],
    format_: str,
) -> None:
    """Say yes to the stage after the one at which RUN awaits an approval.

    The run goes on with the next look that still holds: an approval waives nothing.

    Exit codes: 0 done and told, 2 the call is wrong, 4 it was refused, a receiver was not told,
    or the ledger cannot be read or written.
    """
    with opened(where) as store:
        story = named(store, run)
        acting(
            store,
            story,
            sinks_of(webhook, slack, command),
            lambda: say_yes(store, story, actor=actor, reason=reason, now=time.time()),
            format_,
        )
