# `servanda contract explain`: a contract, or a name of the language, in plain English.

from __future__ import annotations

import json
from pathlib import Path

import click

from servanda.cli.input import STDIN, contract_at
from servanda.cli.options import no_code_option
from servanda.cli.output import show
from servanda.cli.report import read
from servanda.engines.foreign_code import code_of, keys_of
from servanda.errors import ContractError, EvidenceError
from servanda.judgement import plan as planning
from servanda.judgement.bound_chain.chain import chain as chain_of
from servanda.judgement.bound_chain.steps import Chain
from servanda.registry import did_you_mean
from servanda.report.chain_text import chain_text
from servanda.report.explain.contract import explain_contract
from servanda.report.explain.glossary import explain_name, names
from servanda.runner import load
from servanda.traces.serialization import to_plain


@click.command()
@click.argument("what", metavar="FILE|NAME|RUN_DIR|VERDICT.json")
@click.option(
    "--chain",
    is_flag=True,
    help="What its numbers imply: logits, answers, rewards, gradients; of a run, what it showed.",
)
@click.option(
    "--format", "format_", type=click.Choice(["text", "json"]), default="text", help="Of --chain."
)
@no_code_option
def explain(what: str, chain: bool, format_: str) -> None:
    """Say in plain English what a contract promises, and what its answers take.

    NAME is a metric (tv), a guard (sampler_fidelity) or a slice field (context.position).  With
    --chain: number by number what the limits of a contract imply, or the upper ends of a run.
    - reads a contract from standard input.
    """
    if chain:
        found = _chain(Path(what))
        text = chain_text(found) if format_ == "text" else json.dumps(_plain(found), indent=1)
        show(text)
        return
    if format_ != "text":
        raise click.UsageError("--format is of --chain: a contract is explained as text")
    if what != STDIN and not Path(what).exists():
        text = explain_name(what)
        if text is None:
            raise ContractError(
                f"{what!r} is neither a file nor a metric, a guard or a slice field",
                hint=did_you_mean(what, names()),
            )
        click.echo(text)
        return
    contract = contract_at(what)
    plan, problems = planning.draft(contract, *load.corpora(contract))
    click.echo(explain_contract(plan))
    if code := code_of(contract):
        click.echo("\nIt runs code (--no-code refuses it):")
        click.echo("\n".join(f"  {one}" for one in code))
    if keys := keys_of(contract):
        click.echo("\nIt sends keys (--no-code refuses it):")
        click.echo("\n".join(f"  {one}" for one in keys))
    if problems:
        click.echo("\nWhat stands against running it:")
        click.echo("\n".join(map(str, problems)))


def _plain(found: Chain) -> object:
    return to_plain(found.to_dict())


def _chain(path: Path) -> Chain:
    """Of the limits of a contract, or of what a verdict on it showed.

    Raises:
        ContractError: there is no such file, or it is no contract.
        EvidenceError: a verdict that does not hold the text of its contract.
    """
    if str(path) == STDIN:
        return chain_of(contract_at(STDIN))
    if not path.exists():
        raise ContractError(
            f"there is no {path}",
            hint="--chain takes a contract, a run directory, or what check --format json printed",
        )
    if not path.is_dir() and path.suffix != ".json":
        return chain_of(load.load(path))
    verdict = read(path)
    text = verdict.circumstances.contract_text
    if not text:
        raise EvidenceError(
            f"{path}: the verdict does not hold the text of its contract",
            hint="run `servanda check` on the contract's file, or explain --chain the file itself",
        )
    name = f"{path}: the contract of its verdict"
    return chain_of(load.contract_of(text, name), verdict)
