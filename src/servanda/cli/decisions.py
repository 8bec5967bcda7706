# `servanda promotion approve`, `override` and `rollback`: what a person decides on a run.

from __future__ import annotations

from functools import partial
from typing import Any

import click

from servanda.cli.options import shared
from servanda.cli.promotion_options import act, decision_options
from servanda.promotion.ledger.entry import Ledger
from servanda.promotion.run import record
from servanda.promotion.run.history import History
from servanda.promotion.state import Override


@click.command()
@decision_options
def approve(reason: str, actor: str, **options: Any) -> None:
    """Say yes to the stage after the one at which RUN awaits an approval.

    The run goes on with the next look that still holds: an approval waives nothing.

    Exit codes: 0 done and told, 2 the call is wrong, 4 it was refused, a receiver was not told,
    or the ledger cannot be read or written.
    """
    act(partial(record.approve_run, actor=actor, reason=reason), **options)


@click.command()
@click.option("--clause", required=True, help='The id of the clause; "*" is every one.')
@click.option("--slice", "slice_", default="*", show_default=True, help="Of its slices.")
@shared("--ttl", required=True)
@decision_options
def override(clause: str, slice_: str, ttl: float, reason: str, actor: str, **options: Any) -> None:
    """Let a cell of RUN not count until a time is over.

    Every other cell is judged as ever.  Reports go on showing the overridden one.

    Exit codes: 0 done and told, 2 the call is wrong, 4 it was refused, a receiver was not told,
    or the ledger cannot be read or written.
    """

    def decide(ledger: Ledger, history: History, *, now: float) -> History:
        given = Override(clause, slice_, actor, reason, now + ttl)
        return record.override_cell(ledger, history, given, now=now)

    act(decide, **options)


@click.command()
@decision_options
def rollback(reason: str, actor: str, **options: Any) -> None:
    """Give all traffic of RUN back to stable and end it; its shadow stays, where it had one.

    Exit codes: 0 done and told, 2 the call is wrong, 4 it was refused, a receiver was not told,
    or the ledger cannot be read or written.
    """
    act(partial(record.roll_back_run, actor=actor, reason=reason), **options)
