# `servanda promotion rollback`: all traffic goes back to stable, from wherever a run stands.

from __future__ import annotations

from collections.abc import Sequence

import click

from servanda.cli.options import format_option, ledger_option
from servanda.cli.promotion_options import (
    acting,
    actor_option,
    effect_options,
    reason_option,
)
from servanda.promotion.notify.base import Sink
from servanda.promotion.run.record import roll_back_run


@click.command()
@click.argument("run")
@reason_option
@actor_option
@ledger_option
@effect_options
@format_option
def rollback(
    run: str, reason: str, actor: str, where: str, sinks: Sequence[Sink], format_: str
) -> None:
    """Give all traffic of RUN back to stable and end it; its shadow stays, where it had one.

    Exit codes: 0 done and told, 2 the call is wrong, 4 it was refused, a receiver was not told,
    or the ledger cannot be read or written.
    """
    acting(
        where,
        run,
        lambda store, history, now: roll_back_run(
            store, history, actor=actor, reason=reason, now=now
        ),
        sinks,
        format_,
    )
