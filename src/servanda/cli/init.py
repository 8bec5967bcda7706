# `servanda contract init`: write a starter contract.

from __future__ import annotations

from pathlib import Path

import click

from servanda.authoring.template import name_of, starter
from servanda.contract.model import EXTERNAL
from servanda.engines import engine_names
from servanda.errors import ContractError, MeasurementError
from servanda.registry import did_you_mean

_SUFFIX = ".kernelcontract.yaml"


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default=f"my{_SUFFIX}")
@click.option("--engine", default="transformers", show_default=True, help="Of both kernels.")
@click.option("--model", default="models/my-model", show_default=True, help="Of both kernels.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def init(file: Path, engine: str, model: str, force: bool) -> None:
    """Write a starter contract to FILE, with a word on every part of it.

    FILE is my.kernelcontract.yaml if it is not given.
    """
    if engine not in engine_names():
        hint = did_you_mean(engine, engine_names())
        if engine == EXTERNAL:
            hint = "a starter contract measures offline; a trainer's is written by hand"
        raise ContractError(f"no engine is named {engine!r}", hint=hint)
    if file.exists() and not force:
        raise ContractError(f"{file} is there already", hint="give another name, or --force")
    name = name_of(file.name.removesuffix(_SUFFIX))
    try:
        file.write_text(starter(file.name, name, engine, model), encoding="utf-8")
    except OSError as error:
        raise MeasurementError(f"{file} cannot be written: {error.strerror or error}") from None
    click.echo(f"wrote {file}; put the model and the prompts where it says, then:")
    click.echo(f"  servanda contract lint {file}")
