# `servanda status`: where the runs of a ledger stand, and who serves.

from __future__ import annotations

import json
import time

import click

from servanda.cli.options import ledger_option
from servanda.cli.output import show
from servanda.cli.runs import opened, print_story, run_format
from servanda.promoting import telling
from servanda.promoting.answering import named
from servanda.promoting.story import stories


@click.command(short_help="Where runs stand, and who serves.")
@click.argument("run", required=False)
@ledger_option
@run_format
def status(run: str | None, where: str, format_: str) -> None:
    """Show where RUN stands; without a name, every run that has not ended."""
    with opened(where, reading=True) as store:
        if run is not None:
            print_story(named(store, run), format_)
            return
        found = [story for story in stories(store) if not story.state.ended]
    now = time.time()
    if format_ == "json":
        show(json.dumps([telling.data(story, now=now) for story in found], indent=1))
    elif found:
        show("\n\n".join(telling.text(story, now=now) for story in found))
    else:
        show("no run is under way")
