# `servanda contract diff`: what one version of a contract promises more or less than another.

from __future__ import annotations

import sys
from pathlib import Path

import click

from servanda.authoring.diff.difference import Difference
from servanda.authoring.diff.report import FORMATS
from servanda.authoring.diff.values import SIDES, Side
from servanda.cli.input import contract_bytes, each
from servanda.cli.options import DASH, shared
from servanda.cli.stdout import show
from servanda.contract.model import Contract
from servanda.errors import ContractError
from servanda.runner import load

_BREAKING = 1


@click.command("diff")
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@click.option(
    "--reader",
    type=click.Choice(SIDES),
    default="consumer",
    show_default=True,
    help="Side to judge for: the consumer relies on the contract, the producer has to keep it.",
)
@shared("--format", type=click.Choice([*FORMATS]))
def diff_command(old: str, new: str, reader: Side, format_: str) -> None:
    """Say what the contract NEW promises more, less or otherwise than OLD.

    For the consumer what is loosened, removed or retargeted breaks; for the producer what is
    tightened, added or retargeted. The files that a contract names are not opened, so OLD may
    come from git: git show HEAD~1:c.yaml | servanda contract diff - c.yaml

    Exits 0 where nothing breaks, 1 where something does, 2 where a text is wrong.
    """
    _refuse_same(old, new)
    before, after = each(_read, (old, new))
    difference = Difference(before, after, reader)
    show(FORMATS[format_](difference))
    if not difference.compatible:
        sys.exit(_BREAKING)


def _read(file: str) -> Contract:
    data, name, _ = contract_bytes(file)
    return load.parse(data, name)


def _refuse_same(old: str, new: str) -> None:
    """Two names of one file: a gate would pass whatever it holds."""
    if old == new == DASH:
        raise click.UsageError("one of the two may be -, standard input")
    try:
        same = old == new or Path(old).samefile(new)
    except OSError:
        same = False  # one is not there; reading says so
    if same:
        raise ContractError(
            f"OLD and NEW are one file: {new}",
            hint=f"of git: git show HEAD~1:./{Path(new).name} | servanda contract diff - {new}",
        )
