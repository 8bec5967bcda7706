# `servanda promotion status`: the promotions of a ledger, and who serves.

from __future__ import annotations

import time

import click

from servanda.cli.options import shared
from servanda.cli.promotion_options import opened, print_story
from servanda.cli.stdout import show, show_json
from servanda.gateway.controller.ledger_history import ledger_statuses, render
from servanda.promotion.run import report
from servanda.promotion.run.can_promote import named
from servanda.promotion.run.history import histories
from servanda.traces.serialization import to_plain


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
