# `servanda promotion status`: where the runs of a ledger stand, and who serves.

from __future__ import annotations

import json
import time

import click

from servanda.cli.options import format_option, ledger_option
from servanda.cli.output import show
from servanda.cli.promotion_options import opened, print_story
from servanda.gateway.controller.ledger_status import recalled, text
from servanda.promotion.run import report
from servanda.promotion.run.can_promote import named
from servanda.promotion.run.history import histories
from servanda.traces.serialization import to_plain


@click.command()
@click.argument("run", required=False)
@ledger_option
@format_option
def status(run: str | None, where: str, format_: str) -> None:
    """Show where RUN stands; without a name, every run that has not ended.

    Of a run of `servanda serve` or `gateway audit` it is a line, from what the ledger holds;
    `servanda gateway status` asks the gateway itself.
    """
    with opened(where, reading=True) as store:
        gateways = [one for one in recalled(store) if run in (None, one.run)]
        if run is not None and not gateways:
            print_story(named(store, run), format_)
            return
        found = [history for history in histories(store) if run is None and not history.state.ended]
    now = time.time()
    if format_ == "json":
        data = [report.data(history, now=now) for history in found]
        data += [{"status": "routing", **to_plain(one)} for one in gateways]
        show(json.dumps(data, indent=1))
        return
    told = [report.text(history, now=now) for history in found]
    told += ["\n".join(map(text, gateways))] if gateways else []
    show("\n\n".join(told) or "no run is under way")
