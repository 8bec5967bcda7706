# `servanda schema`: the JSON Schema of the contract, for editors.

from __future__ import annotations

import json

import click

from servanda.engines import engine_names
from servanda.faults import FAULTS
from servanda.schema import json_schema


@click.command(short_help="Print the JSON Schema of the contract, for editors.")
def schema() -> None:
    """Print the JSON Schema (draft-07) of the contract.

    Editors complete and check contracts by it: save it as kernelcontract.schema.json, and
    begin a contract with "# yaml-language-server: $schema=./kernelcontract.schema.json".
    """
    click.echo(json.dumps(json_schema(engine_names(), [*FAULTS]), indent=1))
