# `servanda contract lint`: every problem of every file, at once.

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from servanda.cli.input import contract_bytes
from servanda.cli.options import shared, show, show_json
from servanda.contract.model import Contract
from servanda.contract.stages import course_of
from servanda.engines.foreign_code import code_of, keys_of
from servanda.errors import ContractError, Problem, Where
from servanda.judgement import plan as planning
from servanda.report.format import count
from servanda.report.github import annotation
from servanda.runner import load


@dataclass(frozen=True)
class Linted:
    """One file: its problems, or what it holds."""

    file: str
    problems: tuple[Problem, ...] = ()
    name: str = ""
    version: str = ""
    digest: str = ""
    clauses: int = 0
    cells: int | None = None
    note: str = ""
    code: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.problems:
            return "\n".join(map(str, self.problems))
        counted = count(self.clauses, "clause")
        counted += f", {count(self.cells, 'cell')}" if self.cells is not None else ""
        note = f" ({self.note})" if self.note else ""
        ok = f"{self.file}: ok, {self.name} {self.digest[:8]}, {counted}{note}"
        code = (f"  runs code: {code}" for code in self.code)
        return "\n".join([ok, *code, *(f"  sends a key: {key}" for key in self.keys)])

    @property
    def annotations(self) -> str:
        """An error of a GitHub workflow for each problem; the file's line where it has none."""
        return "\n".join(map(_annotation, self.problems)) or str(self)

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["problems"] = [
            {"message": p.message, "hint": p.hint, **(asdict(p.where) if p.where else {})}
            for p in self.problems
        ]
        return data


def _annotation(problem: Problem) -> str:
    hint = f"\nhint: {problem.hint}" if problem.hint else ""
    return annotation("error", "contract", f"{problem.message}{hint}", problem.where)


def read(file: str) -> Linted:
    """Read a contract as `check` would, and stop before anything is measured."""
    try:
        data, file, folder = contract_bytes(file)
        contract = load.read(data, file, folder)
        cells, note = _cells(contract)
    except ContractError as error:
        return Linted(file, error.problems)
    return Linted(
        file,
        name=contract.metadata.name,
        version=contract.metadata.version,
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
@shared("--format", type=click.Choice(["text", "json", "github"]))
@shared("--no-code")
def lint(files: tuple[str, ...], format_: str) -> None:
    """Print every problem of the contracts in FILE..., and of two that are one version.

    Nothing is measured; - reads standard input.
    """
    linted: list[Linted] = []
    for file in dict.fromkeys(files):
        now = read(file)
        named = (now.name, now.version)
        same = next((one for one in linted if (one.name, one.version) == named), now)
        if same.digest != now.digest:
            clash = f"{now.name} {now.version} is another contract in {same.file}"
            hint = "give one of the two another metadata.version"
            now = replace(now, problems=(Problem(clash, Where(file, 1, 1), hint),))
        linted.append(now)
    if format_ == "json":
        show_json([file.to_dict() for file in linted])
    elif format_ == "github":
        show("\n".join(file.annotations for file in linted))
    else:
        show("\n".join(map(str, linted)))
    if any(file.problems for file in linted):
        sys.exit(ContractError.exit_code)
