# `servanda contract test`: contracts that are tested themselves; kernels are run by --mutate only.

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from servanda.authoring.contract_test.files import PreparedTest, files_of, prepare_tests
from servanda.authoring.contract_test.report import junit, render
from servanda.authoring.contract_test.results import SuiteResult
from servanda.cli.input import each
from servanda.cli.mutate import mutate_options, refuse_without, run_mutations
from servanda.cli.options import FILE, shared
from servanda.cli.stdout import show, show_json

_FAILED = 1


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="FILE|FOLDER...", type=FILE)
@shared("--format", type=click.Choice(["text", "json", "junit"]))
@mutate_options
@shared("--no-code")
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
    tests = [test for tests in each(prepare_tests, files_of(paths)) for test in tests]
    results = each(PreparedTest.run, tests)
    if mutate and _passed(results):
        sys.exit(run_mutations(tests, format_=format_, **mutating))
    if format_ == "json":
        show_json({"passed": _passed(results), "tests": [test.to_dict() for test in results]})
    else:
        show((junit if format_ == "junit" else render)(results).rstrip("\n"))
    if not _passed(results):
        sys.exit(_FAILED)


def _passed(results: Sequence[SuiteResult]) -> bool:
    return all(result.passed for result in results)
