# `servanda contract test`: contracts that are tested themselves; --faults alone runs kernels.

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from servanda.authoring.contract_test.files import PreparedTest, files_of, prepare_tests
from servanda.authoring.contract_test.results import SuiteResult, junit, render
from servanda.authoring.fault_injection import FaultCheck, fault_checks, share_caught, valid
from servanda.cli.input import each
from servanda.cli.options import FILE, given, shared, show, show_json, until
from servanda.cli.screen import watching
from servanda.contract.model import Contract
from servanda.engines.faults import FAULTS
from servanda.report.format import line, wrapped

_FAILED = 1
_CODES = {True: 0, False: _FAILED, None: 3}
_WIDTH = 96


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="FILE|FOLDER...", type=FILE)
@click.option(
    "--faults",
    is_flag=True,
    help="Also run the kernels: without a fault the contract has to hold, and with a fault not.",
)
@shared(
    "--fault",
    name="names",
    multiple=True,
    help="With --faults; repeatable, and each has to be caught.  [default: all of the catalogue]",
)
@shared("--format", type=click.Choice(["text", "json", "junit"]))
@shared("--max-time", "--quiet", "--no-code")
def test(
    paths: tuple[Path, ...],
    faults: bool,
    names: tuple[str, ...],
    format_: str,
    max_time: float | None,
    quiet: bool,
) -> None:
    """Hold contracts to the cases of ContractTest documents; no kernel is run.

    A file of tests ends in .kerneltest.yaml; of a folder all of them are taken.  Each names its
    contract, the data of each case, and what the contract has to answer.

    With --faults, contracts whose tests pass are checked on their kernels: without a fault, and
    with each fault of the catalogue.
    A contract has to hold without a fault, and to catch one, or each that --fault names.
    """
    if not faults and (odd := given(("names", "max_time"))):
        raise click.UsageError(f"{odd[0]} goes with --faults")
    if faults and format_ == "junit":
        raise click.UsageError("--faults prints text or json, not junit")
    for name in names:
        if name not in FAULTS:
            hint = f"{FAULTS.hint(name)} (`servanda demo --fault list` shows them all)"
            raise click.UsageError(f"there is no fault {name!r}\n  hint: {hint}")
    tests = [test for tests in each(prepare_tests, files_of(paths)) for test in tests]
    results = each(PreparedTest.run, tests)
    if faults and _passed(results):
        contracts = {test.path.resolve(): test.contract for test in tests}
        sys.exit(_inject([*contracts.values()], names, format_, max_time, quiet))
    if format_ == "json":
        show_json({"passed": _passed(results), "tests": [test.to_dict() for test in results]})
    else:
        show((junit if format_ == "junit" else render)(results).rstrip("\n"))
    if not _passed(results):
        sys.exit(_FAILED)


def _passed(results: Sequence[SuiteResult]) -> bool:
    return all(result.passed for result in results)


def _inject(
    contracts: Sequence[Contract],
    names: Sequence[str],
    format_: str,
    max_time: float | None,
    quiet: bool,
) -> int:
    """Check contract after contract with faults, print what was found, and give the exit code."""
    deadline = until(max_time) or (lambda: False)
    found = []
    for contract in contracts:
        checks = []
        if format_ == "text":
            show(line(contract.metadata.name))
        with watching(quiet) as watch:
            asked = [name for name in FAULTS if not names or name in names]
            for check in fault_checks(contract, asked, watch=watch, deadline=deadline):
                checks.append(check)
                if format_ == "text":
                    show("\n".join(wrapped(str(check), _WIDTH, "  ", "      ")))
        answer, (caught, counted) = valid(checks, every=bool(names)), share_caught(checks)
        if format_ == "text":
            show(f"{_sentence(answer, checks)}: {caught} of {counted} faults caught")
        found.append(
            {
                "contract": contract.metadata.name,
                "digest": contract.digest,
                "valid": answer,
                "caught": caught,
                "counted": counted,
                "checks": [asdict(check) for check in checks],
            }
        )
    if format_ == "json":
        show_json(found)
    answers = {one["valid"] for one in found}
    return next((_CODES[answer] for answer in (False, None) if answer in answers), 0)


def _sentence(answer: bool | None, checks: Sequence[FaultCheck]) -> str:
    if answer is False:
        passes = any(check.fate == "passes" for check in checks)
        return f"NOT VALID, {'a fault is missed' if passes else 'a conforming kernel fails'}"
    return "valid" if answer else "not decided"
