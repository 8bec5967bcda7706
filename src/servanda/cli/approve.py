# `servanda promotion approve`: a person says yes to the next stage.

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
from servanda.promotion.run.record import approve_run


@click.command()
@click.argument("run")
@reason_option
@actor_option
@ledger_option
@effect_options
@format_option
def approve(
    run: str, reason: str, actor: str, where: str, sinks: Sequence[Sink], format_: str
) -> None:
    """Say yes to the stage after the one at which RUN awaits an approval.

    The run goes on with the next look that still holds: an approval waives nothing.

    Exit codes: 0 done and told, 2 the call is wrong, 4 it was refused, a receiver was not told,
    or the ledger cannot be read or written.
    """
    acting(
        where,
        run,
        lambda store, history, now: approve_run(
            store, history, actor=actor, reason=reason, now=now
        ),
        sinks,
        format_,
    )
