# `servanda contract explain`: a contract, or a name of the language, in plain English.

from __future__ import annotations

from pathlib import Path

import click

from servanda.cli.input import contract_at
from servanda.cli.options import DASH, shared, show, show_as, show_json
from servanda.engines.foreign_code import code_of, keys_of
from servanda.errors import ContractError, EvidenceError
from servanda.judgement import plan as planning
from servanda.judgement.bound_chain.chain import Chain
from servanda.judgement.bound_chain.chain import chain as chain_of
from servanda.registry import did_you_mean
from servanda.report.chain_text import chain_text
from servanda.report.explain.contract import explain_contract, explain_name, names
from servanda.runner import load
from servanda.runner.finished_run import read


@click.command()
@click.argument("what", metavar="FILE|NAME|RUN_DIR|VERDICT.json")
@click.option(
    "--chain",
    is_flag=True,
    help="Print the bounds that follow for logits, responses, rewards and gradients, from the "
    "limits or from the upper ends of a run.",
)
@shared("--format", "--no-code")
def explain(what: str, chain: bool, format_: str) -> None:
    """Explain a contract or a name in plain English, with the sample sizes that each answer needs.

    NAME is a metric (tv), a validity check (sampler_fidelity) or a slice field (context.position).
    With --chain: the numbers that follow from the limits of a contract, or from a run.
    - reads a contract from standard input.
    """
    if chain:
        bounds = _chain(Path(what))
        show_as(format_, bounds.to_dict(), chain_text(bounds))
        return
    if what != DASH and not Path(what).exists():
        text = explain_name(what)
        if text is None:
            raise ContractError(
                f"{what!r} is neither a file nor a metric, a validity check or a slice field",
                hint=did_you_mean(what, names()),
            )
        show_as(format_, {"name": what, "text": text}, text)
        return
    if Path(what).is_dir():
        raise ContractError(f"{what} is a folder", hint="of a run directory: explain --chain")
    contract = contract_at(what)
    plan, problems = planning.draft(contract, *load.corpora(contract))
    text = explain_contract(plan)
    parts = {
        "It runs code (--no-code refuses it):": [f"  {code}" for code in code_of(contract)],
        "It sends keys (--no-code refuses it):": [f"  {key}" for key in keys_of(contract)],
        "What stands against running it:": [*map(str, problems)],
    }
    if format_ == "json":
        code, keys, against = ([line.strip() for line in lines] for lines in parts.values())
        name = {"name": contract.metadata.name, "digest": contract.digest, "text": text}
        show_json({**name, "code": code, "keys": keys, "problems": against})
        return
    show(text)
    for heading, lines in parts.items():
        if lines:
            show("\n".join(["", heading, *lines]))


def _chain(path: Path) -> Chain:
    """Of the limits of a contract, or of what a verdict on it showed.

    Raises:
        ContractError: there is no such file, or it is no contract.
        EvidenceError: a verdict that does not hold the text of its contract.
    """
    if str(path) == DASH:
        return chain_of(contract_at(DASH))
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
