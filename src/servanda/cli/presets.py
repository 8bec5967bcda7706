# `servanda contract presets`: the contracts whose limits we would sign.

from __future__ import annotations

import json

import click

from servanda.cli.options import format_option
from servanda.contract.presets import PRESETS, preset_text, title


@click.command("presets")
@click.option("--show", metavar="NAME", help="Print one as YAML, with its reasons.")
@format_option
def presets_command(show: str | None, format_: str) -> None:
    """List the presets of `compare` and `import`, or print one."""
    if show is not None:
        click.echo(preset_text(show), nl=False)
        return
    if format_ == "json":
        rows = [{"name": name, "of": of, "title": title(name)} for name, of in PRESETS.items()]
        click.echo(json.dumps(rows, indent=1))
        return
    width = max(map(len, PRESETS))
    for kind in dict.fromkeys(PRESETS.values()):
        click.secho(kind, bold=True)
        for name in (name for name, of in PRESETS.items() if of == kind):
            click.echo(f"  {name.ljust(width)}  {title(name)}")
