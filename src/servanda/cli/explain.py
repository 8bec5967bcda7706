# `servanda explain`: a contract, or a name of the language, in plain English.

from __future__ import annotations

from pathlib import Path

import click

from servanda import loading
from servanda import plan as planning
from servanda.errors import ContractError
from servanda.explain import explain_contract, explain_name, names
from servanda.registry import did_you_mean


@click.command(short_help="Say in plain English what a contract or a name means.")
@click.argument("what", metavar="FILE|NAME")
def explain(what: str) -> None:
    """Say in plain English what a contract promises, and what its answers take.

    NAME is a metric (tv), a guard (sampler_fidelity) or a slice field (context.position).
    """
    if not Path(what).exists():
        text = explain_name(what)
        if text is None:
            raise ContractError(
                f"{what!r} is neither a file nor a metric, a guard or a slice field",
                hint=did_you_mean(what, names()),
            )
        click.echo(text)
        return
    contract = loading.load(what)
    plan, problems = planning.draft(contract, *loading.corpora(contract))
    click.echo(explain_contract(plan))
    if problems:
        click.echo("\nWhat stands against running it:")
        click.echo("\n".join(map(str, problems)))
