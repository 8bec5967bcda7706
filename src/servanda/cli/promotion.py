# `servanda promotion`: status, can-promote, and the decisions of a person; and what other commands
# share with them: which promotion is meant, and who is notified.

from __future__ import annotations

import getpass
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from servanda.cli.input import contract_at
from servanda.cli.options import FILE_OR_DASH, shared, show, show_as, show_json, together
from servanda.errors import EvidenceError
from servanda.gateway.controller.ledger_history import ledger_statuses, render
from servanda.promotion.ledger.ledger import Ledger, open_ledger
from servanda.promotion.notify.base import Sink
from servanda.promotion.notify.sinks import sinks_of
from servanda.promotion.run import history as runs
from servanda.promotion.run import report
from servanda.promotion.run.can_promote import can_promote as answer_of
from servanda.promotion.run.can_promote import named
from servanda.promotion.run.history import History, histories, refreshed
from servanda.promotion.run.outbox import Delivery, deliver
from servanda.promotion.state import Override, Status
from servanda.traces.serialization import to_plain

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


@click.command()
@decision_options
def approve(reason: str, actor: str, **options: Any) -> None:
    """Approve the stage after the one at which the promotion RUN waits.

    The run goes on with the next evaluation that still holds: an approval waives nothing.
    """
    act(partial(runs.approve_run, actor=actor, reason=reason), **options)


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
        return runs.override_cell(ledger, history, given, now=now)

    act(decide, **options)


@click.command()
@decision_options
def rollback(reason: str, actor: str, **options: Any) -> None:
    """Return all traffic of the promotion RUN to stable, and end it; its shadow stays on."""
    act(partial(runs.roll_back_run, actor=actor, reason=reason), **options)


@click.command("can-promote")
@click.argument("contract", type=FILE_OR_DASH)
@click.option("--to", required=True, metavar="STAGE", help="offline, shadow, canary or full.")
@click.option(
    "--infer-digest",
    "infer",
    default="",
    help="Digest of the infer kernel, or its first digits: which build.",
)
@click.option(
    "--train-digest", "train", default="", help="Digest of the train kernel, or its first digits."
)
@shared("--ledger", "--format", "--no-code")
def can_promote(contract: Path, to: str, infer: str, train: str, where: str, format_: str) -> None:
    """Say whether the ledger allows the build of CONTRACT at a stage.

    Nothing is measured.  The answer is yes if a promotion with exactly this contract has reached
    the stage and has not ended, halted or expired.
    """
    build = contract_at(contract)
    with opened(where, reading=True) as ledger:
        answer = answer_of(ledger, build, to, now=time.time(), infer=infer, train=train)
        if format_ == "json":
            history = answer.history
            run = report.data(history, now=time.time()) if history is not None else None
            show_json({"yes": answer.yes, "why": answer.why, "run": run})
        else:
            show(str(answer))
    sys.exit(answer.exit_code)


@click.command()
@click.argument("run", required=False)
@shared("--ledger")
@shared("--format", type=click.Choice(["text", "json"]))
def status(run: str | None, where: str, format_: str) -> None:
    """Show the state of the promotion RUN; without a name, of every one that has not ended.

    A run of `servanda serve` or `gateway audit` gets one line, read from the ledger; `servanda
    gateway status` asks the gateway itself.
    """
    with opened(where, reading=True) as ledger:
        gateways = [gateway for gateway in ledger_statuses(ledger) if run in (None, gateway.run)]
        if run is not None and not gateways:
            print_story(named(ledger, run), format_)
            return
        under_way = [
            history for history in histories(ledger) if run is None and not history.state.ended
        ]
    now = time.time()
    if format_ == "json":
        data = [report.data(history, now=now) for history in under_way]
        show_json([*data, *({"status": "routing", **to_plain(g)} for g in gateways)])
        return
    parts = [report.text(history, now=now) for history in under_way]
    parts += ["\n".join(map(render, gateways))] if gateways else []
    show("\n\n".join(parts) or "no run is under way")
