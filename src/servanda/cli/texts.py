# `servanda contract init`, `schema` and `presets`: a starter contract; the JSON Schema of contracts
# and of their tests, for editors; and the contracts whose limits we would sign.

from __future__ import annotations

from pathlib import Path

import click

from servanda.authoring.schema import json_schema, schema_of_tests
from servanda.authoring.template import name_of, starter
from servanda.cli.options import DASH, FILE_OR_DASH, shared, show_json
from servanda.cli.output import write_text
from servanda.contract.model import EXTERNAL
from servanda.contract.presets import PRESETS, preset_text, title
from servanda.engines import engine_names
from servanda.engines.faults import FAULTS
from servanda.errors import ContractError
from servanda.registry import did_you_mean

_SUFFIX = ".kernelcontract.yaml"


@click.command()
@click.argument("file", type=FILE_OR_DASH, default=f"my{_SUFFIX}")
@click.option("--engine", default="transformers", show_default=True, help="Engine of both kernels.")
@click.option(
    "--model", default="models/my-model", show_default=True, help="Model of both kernels."
)
@shared("--force")
def init(file: Path, engine: str, model: str, force: bool) -> None:
    """Write a starter contract to FILE, with a comment on every part of it.

    FILE defaults to my.kernelcontract.yaml; - prints the contract.
    """
    if engine not in engine_names():
        hint = did_you_mean(engine, engine_names())
        if engine == EXTERNAL:
            hint = "a starter contract measures offline; a trainer's is written by hand"
        raise ContractError(f"no engine is named {engine!r}", hint=hint)
    if str(file) == DASH:
        click.echo(starter(f"my{_SUFFIX}", "my", engine, model), nl=False)
        return
    if file.exists() and not force:
        raise ContractError(f"{file} is there already", hint="give another name, or --force")
    name = name_of(file.name.removesuffix(_SUFFIX))
    write_text(file, starter(file.name, name, engine, model))
    click.echo(f"wrote {file}; put the model and the prompts where it says, then:")
    click.echo(f"  servanda contract lint {file}")


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
