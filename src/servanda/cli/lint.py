# `servanda contract lint`: every problem of every file, at once.

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import click

from servanda.cli.input import contract_bytes
from servanda.cli.options import format_option, no_code_option
from servanda.contract.model import Contract
from servanda.contract.stages import course_of
from servanda.engines.foreign_code import code_of, keys_of
from servanda.errors import ContractError, Problem
from servanda.judgement import plan as planning
from servanda.runner import load


@dataclass(frozen=True)
class _Read:
    """One file: its problems, or what it holds."""

    file: str
    problems: tuple[Problem, ...] = ()
    name: str = ""
    digest: str = ""
    clauses: int = 0
    cells: int | None = None
    note: str = ""
    code: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.problems:
            return "\n".join(map(str, self.problems))
        counted = f"{self.clauses} clause{'s' if self.clauses != 1 else ''}"
        counted += f", {self.cells} cells" if self.cells is not None else ""
        note = f" ({self.note})" if self.note else ""
        ok = f"{self.file}: ok, {self.name} {self.digest[:8]}, {counted}{note}"
        code = (f"  runs code: {one}" for one in self.code)
        return "\n".join([ok, *code, *(f"  sends a key: {one}" for one in self.keys)])

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["problems"] = [
            {"message": p.message, "hint": p.hint, **(asdict(p.where) if p.where else {})}
            for p in self.problems
        ]
        return data


def read(file: str) -> _Read:
    """Read a contract as `check` would, and stop before anything is measured."""
    try:
        data, file, folder = contract_bytes(file)
        contract = load.read(data, file, folder)
        cells, note = _cells(contract)
    except ContractError as error:
        return _Read(file, error.problems)
    return _Read(
        file,
        name=contract.metadata.name,
        digest=contract.digest,
        clauses=sum(1 for _ in contract.clauses()),
        cells=cells,
        note=note,
        code=tuple(map(str, code_of(contract))),
        keys=tuple(map(str, keys_of(contract))),
    )


def _cells(contract: Contract) -> tuple[int | None, str]:
    """How many cells `check` would judge, or why it would judge none."""
    if reason := load.not_measured_here(contract):
        return None, reason.message
    texts = load.corpora(contract)
    cells = len(planning.make_plan(contract, *texts).cells)
    live = [leg for leg in course_of(contract) if leg.live]
    plans = [planning.draft(contract, *texts, leg=leg)[0] for leg in live]
    problems = [problem for plan in plans for problem in planning.unpromised(plan)]
    if problems:
        raise ContractError.all([*dict.fromkeys(problems)])
    return cells, ""


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@format_option
@no_code_option
def lint(files: tuple[str, ...], format_: str) -> None:
    """Print every problem of the contracts in FILE...; - reads standard input.

    Nothing is measured. Exits 2 where there is a problem, else 0.
    """
    found = [read(file) for file in files]
    if format_ == "json":
        click.echo(json.dumps([one.to_dict() for one in found], indent=1))
    else:
        for one in found:
            click.echo(str(one))
    if any(one.problems for one in found):
        sys.exit(ContractError.exit_code)
