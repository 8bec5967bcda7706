# `servanda contract plan`: what a contract will measure, cost and decide, before it does.

from __future__ import annotations

import json
from pathlib import Path

import click

from servanda.cli.cost_table import plan_data, plan_lines
from servanda.cli.input import contract_at
from servanda.cli.options import format_option, no_code_option
from servanda.cli.output import show
from servanda.cli.progress import watching
from servanda.engines.worker import spawn
from servanda.judgement.cost import cost_of
from servanda.runner import run
from servanda.runner.compare.contract import costed
from servanda.runner.probe import Engines


@click.command("plan")
@click.argument("contract", type=click.Path(path_type=Path))
@click.option("--no-probe", is_flag=True, help="Open no kernel: no times, tokens estimated.")
@click.option("--quiet", is_flag=True, help="No progress.")
@format_option
@no_code_option
def plan_command(contract: Path, no_probe: bool, quiet: bool, format_: str) -> None:
    """Show cells, sizes, cost and what CONTRACT is expected to decide; nothing is measured.

    - reads the contract from standard input.
    """
    found = run.compile(contract_at(contract))
    if no_probe:
        cost = cost_of(found)
    else:
        with Engines(spawn) as engines, watching(quiet) as watch:
            cost = costed(found, engines, watch=watch)
    if format_ == "json":
        show(json.dumps(plan_data(found, cost), indent=1))
        return
    click.echo("\n".join([f"contract  {contract}", *plan_lines(found, cost)]))
