# `servanda contract presets`: the contracts whose limits we would sign.

from __future__ import annotations

import click

from servanda.cli.options import shared
from servanda.cli.stdout import show_json
from servanda.contract.presets import PRESETS, preset_text, title


@click.command("presets")
@click.option(
    "--show",
    metavar="NAME",
    help="Print one preset as YAML, such as fp8, with the reason for each limit.",
)
@shared("--format")
def presets_command(show: str | None, format_: str) -> None:
    """List the presets of limits, for `compare` and for dumps, or print one."""
    if show is not None:
        text = preset_text(show)
        if format_ == "json":
            show_json({"name": show, "of": PRESETS[show], "title": title(show), "text": text})
        else:
            click.echo(text, nl=False)
        return
    listed = {name: PRESETS[name] for name in PRESETS.names()}
    if format_ == "json":
        show_json([{"name": n, "of": of, "title": title(n)} for n, of in listed.items()])
        return
    width = max(map(len, listed))
    for kind in dict.fromkeys(listed.values()):
        click.secho(kind, bold=True)
        for name in (name for name, of in listed.items() if of == kind):
            click.echo(f"  {name.ljust(width)}  {title(name)}")
