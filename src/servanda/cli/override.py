# `servanda promotion override`: a person's word that a cell does not count, for a while.

from __future__ import annotations

from collections.abc import Sequence

import click

from servanda.cli.options import DurationType, format_option, ledger_option
from servanda.cli.promotion_options import (
    acting,
    actor_option,
    effect_options,
    reason_option,
)
from servanda.promotion.ledger.entry import Ledger
from servanda.promotion.notify.base import Sink
from servanda.promotion.run.history import History
from servanda.promotion.run.record import override_cell
from servanda.promotion.state import Override


@click.command()
@click.argument("run")
@click.option("--clause", required=True, help='The id of the clause; "*" is every one.')
@click.option("--slice", "slice_", default="*", show_default=True, help="Of its slices.")
@click.option("--ttl", type=DurationType(), required=True, help="How long, such as 24h.")
@reason_option
@actor_option
@ledger_option
@effect_options
@format_option
def override(
    run: str,
    clause: str,
    slice_: str,
    ttl: float,
    reason: str,
    actor: str,
    where: str,
    sinks: Sequence[Sink],
    format_: str,
) -> None:
    """Let a cell of RUN not count until a time is over.

    Every other cell is judged as ever.  Reports go on showing the overridden one.

    Exit codes: 0 done and told, 2 the call is wrong, 4 it was refused, a receiver was not told,
    or the ledger cannot be read or written.
    """

    def act(store: Ledger, history: History, now: float) -> History:
        given = Override(clause, slice_, actor, reason, now + ttl)
        return override_cell(store, history, given, now=now)

    acting(where, run, act, sinks, format_)
