# `servanda gateway status`: how the slices of a running gateway stand.

from __future__ import annotations

from pathlib import Path

import click

from servanda.cli.output import show, show_json
from servanda.cli.pin import admin_client, admin_options
from servanda.gateway.controller.web import text as slices


@click.command("status")
@admin_options
def gateway_status(gateway: str | None, key_file: Path | None, format_: str) -> None:
    """Show how things stand at the leader of a gateway now, a row a slice.

    Exit codes: 0 it answered, 2 the call is wrong, 4 nobody answers there.
    """
    client = admin_client(gateway, key_file)
    status = client.status()
    if format_ == "json":
        show_json(status)
    else:
        show(slices.text(status, client.url))
