# Runs of a promotion, as the verbs share them: which one is meant, and telling what follows.

from __future__ import annotations

import getpass
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import click

from servanda.cli.output import show
from servanda.errors import EvidenceError
from servanda.promotion.ledger.entry import Ledger
from servanda.promotion.ledger.ledger import ChainedLedger
from servanda.promotion.ledger.open import open_ledger
from servanda.promotion.notify.base import Sink
from servanda.promotion.notify.sinks import sinks_of
from servanda.promotion.run import report
from servanda.promotion.run.can_promote import named
from servanda.promotion.run.history import History, refreshed
from servanda.promotion.run.outbox import Delivery, deliver, deliver_late
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
    help="Who decides: the ledger keeps it.",
)
reason_option = click.option("--reason", required=True, help="Why: the ledger keeps it.")


def effect_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Who is told what a promotion decides: the command gets them as `sinks`.

    A variable of the environment may hold several URLs, with spaces between; the option, where
    it is given, takes its place.
    """

    @wraps(command)
    def with_sinks(
        webhook: tuple[str, ...], slack: tuple[str, ...], command: tuple[str, ...], **others: Any
    ) -> Any:
        return told_to(sinks=sinks_of(webhook, slack, command), **others)

    told_to, found = command, with_sinks
    for option in reversed(
        (
            click.option(
                "--webhook",
                metavar="URL",
                multiple=True,
                envvar="SERVANDA_WEBHOOK",
                show_envvar=True,
                help="POST every effect to URL, as JSON; may be given more than once.",
            ),
            click.option(
                "--slack",
                metavar="URL",
                multiple=True,
                envvar="SERVANDA_SLACK",
                show_envvar=True,
                help="POST what changed to an incoming webhook of Slack; so may this.",
            ),
            click.option(
                "--command",
                metavar="COMMAND",
                multiple=True,
                help="Run a program for every effect, with the JSON on its input; so may this.",
            ),
        )
    ):
        found = option(found)
    return found


def opened(where: str, *, reading: bool = False) -> ChainedLedger:
    """The ledger that --ledger names, with the key of the environment."""
    return open_ledger(where, key=ledger_key(), reading=reading)


def ledger_key() -> bytes:
    """SERVANDA_LEDGER_KEY; empty where nobody set one."""
    return os.environ.get("SERVANDA_LEDGER_KEY", "").encode()


def print_story(history: History, format_: str) -> None:
    now = time.time()
    if format_ == "json":
        show(json.dumps(report.data(history, now=now), indent=1))
    else:
        show(report.text(history, now=now))


def code_of(history: History) -> int:
    """0 through, 1 rolled back, 3 it waits, 4 measuring failed or the evidence expired."""
    if history.state.errors:
        return _FAILED
    return _CODES.get(history.state.status, _WAITS)


def told(ledger: Ledger, history: History, sinks: Sequence[Sink]) -> History:
    """Deliver what is to be told of a run; what cannot be delivered is said, and kept."""
    _missed(ledger, history, sinks)
    return refreshed(ledger, history)


def told_late(ledger: Ledger, name: str, sinks: Sequence[Sink]) -> None:
    """The same of all that was decided of a contract, by its name, before whoever did it was
    killed.
    """
    _complain(deliver_late(ledger, name, sinks, now=time.time, wait=time.sleep))


def acting(
    where: str,
    run: str,
    act: Callable[[Ledger, History, float], History],
    sinks: Sequence[Sink],
    format_: str,
) -> None:
    """Do what a person asks of a run, tell the world, and show where the run stands then.

    Ends with 0, or with 4 where a receiver was not told.  An act that is refused leaves what was
    not told before to be told.

    Args:
        act: on the ledger and the run as it stood, at a time in unix seconds.
    """
    with opened(where) as ledger:
        history = named(ledger, run)
        try:
            history = act(ledger, history, time.time())
        except EvidenceError:
            _missed(ledger, history, sinks)
            raise
        missed = _missed(ledger, history, sinks)
        history = refreshed(ledger, history)
    print_story(history, format_)
    if missed:
        click.echo(
            "  hint: it is decided, and in the ledger; the same call tells it again", err=True
        )
    sys.exit(_FAILED if missed else 0)


def _missed(ledger: Ledger, history: History, sinks: Sequence[Sink]) -> bool:
    """Whether a receiver could not be told; which one is said."""
    return _complain(deliver(ledger, history.run, sinks, now=time.time, wait=time.sleep))


def _complain(tried: Sequence[Delivery]) -> bool:
    problems = [one for one in tried if one.problem]
    for one in problems:
        click.echo(f"{one.sink} was not told: {one.problem}", err=True)
    return bool(problems)
