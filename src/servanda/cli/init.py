# `servanda contract init`: write a starter contract.

from __future__ import annotations

from pathlib import Path

import click

from servanda.authoring.template import name_of, starter
from servanda.cli.options import DASH, FILE_OR_DASH, shared
from servanda.cli.output import write_text
from servanda.contract.model import EXTERNAL
from servanda.engines import engine_names
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
