# Promotions, as several commands share them: which one is meant, and who is notified.

from __future__ import annotations

import getpass
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from servanda.cli.options import shared, together
from servanda.cli.stdout import show_as
from servanda.errors import EvidenceError
from servanda.promotion.ledger.ledger import Ledger, open_ledger
from servanda.promotion.notify.base import Sink
from servanda.promotion.notify.sinks import sinks_of
from servanda.promotion.run import report
from servanda.promotion.run.can_promote import named
from servanda.promotion.run.history import History, refreshed
from servanda.promotion.run.outbox import Delivery, deliver
from servanda.promotion.state import Status

_WAITS, _FAILED = 3, 4
_CODES: dict[Status, int] = {"completed": 0, "rolled_back": 1, "superseded": _FAILED}


def _who() -> str:
    """Who calls, as far as this machine knows."""
    try:
        return os.environ.get("SERVANDA_ACTOR") or getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"user {os.getuid()}"


actor_option = click.option(
    "--actor",
    default=_who,
    show_default="$SERVANDA_ACTOR, or the user's name",
    help="Who decides; written to the ledger.",
)


decision_options = together(
    click.argument("run"),
    shared("--reason"),
    actor_option,
    shared("--ledger", "--webhook", "--slack", "--command", "--notify", "--format"),
)


def opened(where: str, *, reading: bool = False) -> Ledger:
    """The ledger that --ledger names, with the key of the environment."""
    return open_ledger(where, key=ledger_key(), reading=reading)


def ledger_key() -> bytes:
    """SERVANDA_LEDGER_KEY; empty where no one set one."""
    return os.environ.get("SERVANDA_LEDGER_KEY", "").encode()


def print_story(history: History, format_: str) -> None:
    now = time.time()
    show_as(format_, report.data(history, now=now), report.text(history, now=now))


def code_of(history: History) -> int:
    """0 completed, 1 rolled back, 3 it waits, 4 measuring failed or the evidence expired."""
    if history.state.errors:
        return _FAILED
    return _CODES.get(history.state.status, _WAITS)


def notify(ledger: Ledger, history: History, sinks: Sequence[Sink]) -> History:
    """Deliver the notifications of a promotion; one that fails is printed, and kept."""
    _missed(ledger, history, sinks)
    return refreshed(ledger, history)


def act(
    decide: Callable[..., History],
    *,
    where: str,
    run: str,
    format_: str,
    **receivers: Any,
) -> None:
    """Apply the decision of a person, notify the receivers, and show the new state.

    Ends with 0, or with 4 where a receiver was not reached.  Also where the decision is refused,
    notifications that are still pending are delivered.

    Args:
        decide: takes the ledger, the run as it stood, and `now` in unix seconds.
        receivers: as `sinks_of` takes them.
    """
    sinks = sinks_of(**receivers)
    with opened(where, reading=True) as ledger:
        named(ledger, run)  # a run that is none begins no ledger
    with opened(where) as ledger:
        history = named(ledger, run)
        try:
            history = decide(ledger, history, now=time.time())
        except EvidenceError:
            _missed(ledger, history, sinks)
            raise
        missed = _missed(ledger, history, sinks)
        history = refreshed(ledger, history)
    print_story(history, format_)
    if missed:
        click.echo(
            "  hint: the decision is in the ledger; the same call delivers it again", err=True
        )
    sys.exit(_FAILED if missed else 0)


def _missed(ledger: Ledger, history: History, sinks: Sequence[Sink]) -> bool:
    return print_problems(deliver(ledger, history.run, sinks, now=time.time, wait=time.sleep))


def print_problems(deliveries: Sequence[Delivery]) -> bool:
    """Whether a receiver could not be reached; it is printed."""
    problems = [delivery for delivery in deliveries if delivery.problem]
    for delivery in problems:
        click.echo(f"not delivered to {delivery.sink}: {delivery.problem}", err=True)
    return bool(problems)
