# `servanda contract test`: contracts that are tested themselves; kernels are run by --mutate only.

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from servanda.authoring.contract_test.files import PreparedTest, files_of, prepare_tests
from servanda.authoring.contract_test.report import junit, render
from servanda.authoring.contract_test.results import SuiteResult
from servanda.cli.mutate import mutate_options, refuse_without, run_mutations
from servanda.cli.options import no_code_option
from servanda.cli.output import show
from servanda.errors import ContractError, Problem

_FAILED = 1


@click.command()
@click.argument(
    "paths", nargs=-1, required=True, metavar="FILE|FOLDER...", type=click.Path(path_type=Path)
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "json", "junit"]),
    default="text",
    show_default=True,
)
@mutate_options
@no_code_option
def test(paths: tuple[Path, ...], format_: str, mutate: bool, **mutating: Any) -> None:
    """Hold contracts to the cases of ContractTest documents; no kernel is run.

    A file of tests ends in .kerneltest.yaml; of a folder all of them are taken.  Each names its
    contract, the data of each case, and what the contract has to answer.

    With --mutate, contracts whose tests pass are tested further: limits are moved, and faults
    injected into their kernels, which are run.

    Exits 0 where every case passes, 1 where one fails, 2 where a text is wrong.  With --mutate,
    1 also where a contract is unsatisfiable, toothless or below --at-least, 3 where the time was
    over before that was known, 4 where measuring failed.
    """
    refuse_without(mutate, format_, **mutating)
    tests = _prepared(files_of(paths))
    found = _rehearsed(tests)
    if mutate and _passed(found):
        sys.exit(run_mutations(tests, format_=format_, **mutating))
    if format_ == "json":
        data = {"passed": _passed(found), "tests": [one.to_dict() for one in found]}
        show(json.dumps(data, indent=1))
    else:
        show((junit if format_ == "junit" else render)(found).rstrip("\n"))
    if not _passed(found):
        sys.exit(_FAILED)


def _passed(found: Sequence[SuiteResult]) -> bool:
    return all(one.passed for one in found)


def _prepared(files: Sequence[Path]) -> list[PreparedTest]:
    """The tests of all files; what is wrong with any of them is said at once."""
    tests, problems = [], []
    for file in files:
        try:
            tests += prepare_tests(file)
        except ContractError as error:
            problems += error.problems
    _refuse(problems)
    return tests


def _rehearsed(tests: Sequence[PreparedTest]) -> list[SuiteResult]:
    found, problems = [], []
    for test in tests:
        try:
            found.append(test.run())
        except ContractError as error:
            problems += error.problems
    _refuse(problems)
    return found


def _refuse(problems: Sequence[Problem]) -> None:
    # two tests of one broken contract find the same
    if problems:
        raise ContractError.all([*dict.fromkeys(problems)])
