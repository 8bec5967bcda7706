# `servanda promotion approve`, `override` and `rollback`: decisions of a person.

from __future__ import annotations

from functools import partial
from typing import Any

import click

from servanda.cli.options import shared
from servanda.cli.promotion_options import act, decision_options
from servanda.promotion.ledger.ledger import Ledger
from servanda.promotion.run import record
from servanda.promotion.run.history import History
from servanda.promotion.state import Override


@click.command()
@decision_options
def approve(reason: str, actor: str, **options: Any) -> None:
    """Approve the stage after the one at which the promotion RUN waits.

    The run goes on with the next evaluation that still holds: an approval waives nothing.
    """
    act(partial(record.approve_run, actor=actor, reason=reason), **options)


@click.command()
@click.option("--clause", required=True, help='Id of the clause; "*" for every clause.')
@click.option("--slice", "slice_", default="*", show_default=True, help="Slice of the clause.")
@shared("--ttl", required=True)
@decision_options
def override(clause: str, slice_: str, ttl: float, reason: str, actor: str, **options: Any) -> None:
    """Temporarily waive one clause on one slice of the promotion RUN.

    All other cells are judged as before.  Reports still show the waived one.
    """

    def decide(ledger: Ledger, history: History, *, now: float) -> History:
        given = Override(clause, slice_, actor, reason, now + ttl)
        return record.override_cell(ledger, history, given, now=now)

    act(decide, **options)


@click.command()
@decision_options
def rollback(reason: str, actor: str, **options: Any) -> None:
    """Return all traffic of the promotion RUN to stable, and end it; its shadow stays on."""
    act(partial(record.roll_back_run, actor=actor, reason=reason), **options)
