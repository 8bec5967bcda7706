# `servanda contract presets`: the contracts whose limits we would sign.

from __future__ import annotations

import click

from servanda.contract.presets import PRESETS, preset_text, title


@click.command("presets")
@click.option("--show", metavar="NAME", help="Print one as YAML, with its reasons.")
def presets_command(show: str | None) -> None:
    """List the presets of `compare` and `import`, or print one."""
    if show is not None:
        click.echo(preset_text(show), nl=False)
        return
    width = max(map(len, PRESETS))
    for kind in dict.fromkeys(PRESETS.values()):
        click.secho(kind, bold=True)
        for name in (name for name, of in PRESETS.items() if of == kind):
            click.echo(f"  {name.ljust(width)}  {title(name)}")
