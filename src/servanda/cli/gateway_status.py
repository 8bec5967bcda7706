# `servanda gateway status`: how the slices of a running gateway stand.

from __future__ import annotations

import json
from pathlib import Path

import click

from servanda.cli.options import format_option
from servanda.cli.output import show
from servanda.cli.pin import asking, gateway_option, key_option
from servanda.gateway.controller.web import text as slices
from servanda.traces.serialization import to_plain


@click.command("status")
@gateway_option
@key_option
@format_option
def gateway_status(gateway: str | None, key_file: Path | None, format_: str) -> None:
    """Show how things stand at the leader of a gateway now, a row a slice.

    Exit codes: 0 it answered, 2 the call is wrong, 4 nobody answers there.
    """
    leader = asking(gateway, key_file)
    standing = leader.status()
    if format_ == "json":
        show(json.dumps(to_plain(standing), indent=1))
    else:
        show(slices.text(standing, leader.url))
