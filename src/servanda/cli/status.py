# `servanda promotion status`: where the runs of a ledger stand, and who serves.

from __future__ import annotations

import json
import time

import click

from servanda.cli.options import format_option, ledger_option
from servanda.cli.output import show
from servanda.cli.promotion_options import opened, print_story
from servanda.gateway.controller.ledger_status import ledger_statuses, render
from servanda.promotion.run import report
from servanda.promotion.run.can_promote import named
from servanda.promotion.run.history import stories
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
        gateways = [one for one in ledger_statuses(store) if run in (None, one.run)]
        if run is not None and not gateways:
            print_story(named(store, run), format_)
            return
        found = [story for story in stories(store) if run is None and not story.state.ended]
    now = time.time()
    if format_ == "json":
        data = [report.data(story, now=now) for story in found]
        data += [{"status": "routing", **to_plain(one)} for one in gateways]
        show(json.dumps(data, indent=1))
        return
    told = [report.text(story, now=now) for story in found]
    told += ["\n".join(map(render, gateways))] if gateways else []
    show("\n\n".join(told) or "no run is under way")
