# `servanda contract plan`: what a contract will measure, cost and decide, before it does.

from __future__ import annotations

from pathlib import Path

import click

from servanda.cli.cost_page import plan_page
from servanda.cli.cost_table import plan_data, plan_lines
from servanda.cli.input import contract_at
from servanda.cli.options import FILE_OR_DASH, shared
from servanda.cli.screen import watching
from servanda.cli.stdout import show, show_json
from servanda.engines.worker import spawn
from servanda.judgement.cost import cost_of
from servanda.runner import run
from servanda.runner.compare.contract import costed
from servanda.runner.probe import Engines


@click.command("plan")
@click.argument("contract", type=FILE_OR_DASH)
@click.option(
    "--no-probe", is_flag=True, help="Open no kernel: no times, and token counts are estimated."
)
@shared(
    "--format",
    type=click.Choice(["text", "json", "html"]),
    help="html draws how many samples each clause needs.",
)
@shared("--quiet", "--no-code")
def plan_command(contract: Path, no_probe: bool, quiet: bool, format_: str) -> None:
    """Show cells, sizes, cost and detectable effect sizes; nothing is measured.

    - reads the contract from standard input.
    """
    plan = run.compile(contract_at(contract))
    if no_probe:
        cost = cost_of(plan)
    else:
        with Engines(spawn) as engines, watching(quiet) as watch:
            cost = costed(plan, engines, watch=watch)
    if format_ == "json":
        show_json(plan_data(plan, cost))
    elif format_ == "html":
        show(plan_page(plan, cost))
    else:
        click.echo("\n".join([f"contract  {contract}", *plan_lines(plan, cost)]))
