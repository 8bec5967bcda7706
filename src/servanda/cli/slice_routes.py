# `servanda gateway status` and `pin`: the slices of a running gateway, as its leader says and moves
# them.

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from servanda.cli.options import FILE, shared, show, show_as, show_json, together
from servanda.errors import ContractError
from servanda.gateway.controller.web import summary
from servanda.report.format import line

_LONGEST_S = 30 * 86_400.0

admin_options = together(
    click.option(
        "--gateway",
        metavar="URL",
        help="The admin listener of `servanda serve`, such as http://127.0.0.1:8081.",
    ),
    click.option(
        "--key-file",
        type=FILE,
        help="File that holds your key.  [default: $SERVANDA_ADMIN_KEY]",
    ),
    shared("--format"),
)


@click.command("status")
@admin_options
def status(gateway: str | None, key_file: Path | None, format_: str) -> None:
    """Show the current state of each slice at the leader of a gateway."""
    client = admin_client(gateway, key_file)
    now = client.status()
    show_as(format_, now, summary.text(now, client.url))


@click.command()
@click.argument("slice_", metavar="SLICE")
@click.option(
    "--to",
    type=click.Choice(["stable", "infer", "enforce", "observe"]),
    help="The kernel that serves it (stable, infer), or its mode (enforce, observe).",
)
@shared("--ttl")
@click.option("--release", is_flag=True, help="Remove its pin.")
@shared("--reason")
@admin_options
def pin(
    slice_: str,
    to: str | None,
    ttl: float | None,
    release: bool,
    reason: str,
    gateway: str | None,
    key_file: Path | None,
    format_: str,
) -> None:
    """Fix the kernel or the mode of SLICE for a limited time.

    stable or infer: every request of the slice goes to this kernel, whatever the evidence says.
    enforce or observe: decisions about the slice are acted on, or infer serves it and they are
    only logged, whatever the mode of the contract.  A pin lasts 30 days at most.  The ledger
    records the holder of the key and the reason.
    """
    if release == (to is not None) or release == (ttl is not None):
        raise click.UsageError("give --to with --ttl, or --release\n  hint: --to stable --ttl 24h")
    if ttl is not None and not 0 < ttl <= _LONGEST_S:
        raise ContractError(
            "--ttl: a pin lasts longer than 0 s and 30 days at most",
            hint="pin again when it expires, or change the contract",
        )
    client = admin_client(gateway, key_file)
    if to is not None and ttl is not None:
        moves = client.pin(slice_, to, ttl, reason)
    else:
        moves = client.unpin(slice_, reason)
    if format_ == "json":
        show_json(moves)
        return
    if not moves:
        show(f"{line(slice_, 80)}: unchanged")
    for move in moves:
        keys = ("slice", "before", "after", "actor", "reason")
        name, before, after, actor, why = (line(str(move.get(key, "")), 200) for key in keys)
        show(f"{name}: {before} → {after} ({actor}: {why})")


def admin_client(gateway: str | None, key_file: Path | None) -> Any:
    """The leader that --gateway names.

    Raises:
        ContractError: it is no URL, or there is no key to ask with.
    """
    if gateway is None:
        raise click.UsageError("--gateway is missing\n  hint: --gateway http://127.0.0.1:8081")
    from servanda.gateway.controller.web.client import ControllerClient, key_from

    return ControllerClient(gateway, key_from(key_file, os.environ))
