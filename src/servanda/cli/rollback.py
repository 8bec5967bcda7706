# `servanda rollback`: all traffic goes back to stable, from wherever a run stands.

from __future__ import annotations

import time

import click

from servanda.cli.ledger import opened
from servanda.cli.options import effect_options, ledger_option
from servanda.cli.runs import acting, actor_option, reason_option, run_format
from servanda.effects import sinks_of
from servanda.promoting.answering import named
from servanda.promoting.writing import take_back


@click.command(short_help="Give all traffic of a run back to stable, now.")
@click.argument("run")
@reason_option
@actor_option
@ledger_option
@effect_options
@run_format
def rollback(
    run: str,
    reason: str,
    actor: str,
    where: str,
    webhook: tuple[str, ...],
    slack: tuple[str, ...],
    command: tuple[str, ...],
    format_: str,
) -> None:
    """Give all traffic of RUN back to stable and end it; its shadow stays, where it had one.

    Exit codes: 0 done and told, 2 the call is wrong, 4 it was refused, a receiver was not told,
    or the ledger cannot be read or written.
    """
    with opened(where) as store:
        story = named(store, run)
        acting(
            store,
            story,
            sinks_of(webhook, slack, command),
            lambda: take_back(store, story, actor=actor, reason=reason, now=time.time()),
            format_,
        )
