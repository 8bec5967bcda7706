# `servanda contract list`: the contracts of a folder, version by version.

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from servanda.authoring.diff.history import ContractFile, ContractVersions, Step, versions_by_name
from servanda.cli.options import FILE, shared
from servanda.cli.stdout import show_as
from servanda.contract.model import Contract
from servanda.errors import ContractError
from servanda.report.format import count, line
from servanda.report.table import table
from servanda.runner import load

_PATTERN = "*.kernelcontract.yaml"
_CLASH = 1


@click.command("list")
@click.argument("folder", type=FILE, default=".")
@shared("--format", "--no-code")
def list_command(folder: Path, format_: str) -> None:
    """List every *.kernelcontract.yaml under FOLDER by name and version, with what changed."""
    listed: list[ContractFile] = []
    wrong: dict[str, ContractError] = {}
    for file in _files(folder):
        try:
            listed.append(ContractFile(str(file), load.parse(load.bytes_of(file), str(file))))
        except ContractError as error:
            wrong[str(file)] = error
    by_name = versions_by_name(listed)
    show_as(format_, _data(by_name, wrong), "\n".join(_text(by_name, wrong)))
    if wrong:
        sys.exit(ContractError.exit_code)
    if any(shelf.clashes for shelf in by_name):
        sys.exit(_CLASH)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "is not there"
        hint = (
            f"servanda contract lint {folder}" if folder.exists() else "give a folder of contracts"
        )
        raise ContractError(f"{folder} {what}", hint=hint)
    files = sorted(path for path in folder.rglob(_PATTERN) if not path.is_dir())
    if not files:
        raise ContractError(
            f"no {_PATTERN} lies under {folder}", hint="servanda contract init FILE"
        )
    return files


def _text(by_name: tuple[ContractVersions, ...], wrong: dict[str, ContractError]) -> Iterator[str]:
    for shelf in by_name:
        yield f"{line(shelf.name)}: {_kernels(shelf.versions[0].contract)}"
        rows = table([_row(listed) for listed in shelf.versions])
        steps: list[Step | None] = [None, *shelf.steps]
        for row, step in zip(rows, steps, strict=True):
            if step is not None:
                yield f"      {step.sentence}"
                kernels = _kernels(step.new.contract)
                if kernels != _kernels(step.old.contract):
                    yield f"      now {kernels}"
            yield f"  {row}"
        for clash in shelf.clashes:
            yield f"  ! {line(clash)}"
            yield "    hint: give one of them another metadata.version"
    for file, error in wrong.items():
        more = len(error.problems) - 1
        counted = f", the first of {more + 1} problems" if more else ""
        yield f"{line(file)} does not read{counted}:"
        yield from (f"  {part}" for part in str(error.problems[0]).split("\n"))


def _row(listed: ContractFile) -> list[str]:
    clauses = sum(1 for _ in listed.contract.clauses())
    return [
        line(listed.version, 24),
        listed.contract.digest[:8],
        count(clauses, "clause"),
        line(listed.file),
    ]


def _kernels(contract: Contract) -> str:
    return line(f"{contract.kernels.infer} against {contract.kernels.train}")


def _data(by_name: tuple[ContractVersions, ...], wrong: dict[str, ContractError]) -> dict[str, Any]:
    return {
        "contracts": [
            {
                "name": shelf.name,
                "versions": [_version(listed) for listed in shelf.versions],
                "steps": [_step(step) for step in shelf.steps],
                "problems": shelf.clashes,
            }
            for shelf in by_name
        ],
        "unread": [
            {"file": file, "problems": [str(p) for p in error.problems]}
            for file, error in wrong.items()
        ],
    }


def _version(listed: ContractFile) -> dict[str, Any]:
    contract = listed.contract
    return {
        "version": listed.version,
        "file": listed.file,
        "digest": contract.digest,
        "train": str(contract.kernels.train),
        "infer": str(contract.kernels.infer),
        "clauses": sum(1 for _ in contract.clauses()),
    }


def _step(step: Step) -> dict[str, Any]:
    difference = step.difference
    return {
        "from": step.old.version,
        "to": step.new.version,
        "evidence": "expires" if difference.evidence_expires else "carries over",
        "changes": [{"kind": c.kind, "place": c.name, "what": c.what} for c in difference.changes],
    }
