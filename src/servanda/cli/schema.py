# `servanda contract schema`: the JSON Schema of contracts and of their tests, for editors.

from __future__ import annotations

import click

from servanda.authoring.schema import json_schema, schema_of_tests
from servanda.cli.stdout import show_json
from servanda.engines import engine_names
from servanda.engines.faults import FAULTS


@click.command()
@click.option(
    "--kind",
    type=click.Choice(["KernelContract", "ContractTest"]),
    default="KernelContract",
    show_default=True,
    help="Of which documents.",
)
def schema(kind: str) -> None:
    """Print the JSON Schema (draft-07) of the contract, or of its tests.

    Editors complete and check contracts by it: save it as kernelcontract.schema.json, and
    begin a contract with "# yaml-language-server: $schema=./kernelcontract.schema.json".
    Its $id follows the apiVersion; the engines and metrics that it names are those installed here.
    """
    tests = kind == "ContractTest"
    show_json(schema_of_tests() if tests else json_schema(engine_names(), [*FAULTS]))
