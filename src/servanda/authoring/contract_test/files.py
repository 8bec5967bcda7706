# Contract tests from files: the tests, their contracts, and recorded runs, as input of `run_test`.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from servanda.authoring.contract_test.evidence import Recording
from servanda.authoring.contract_test.model import SUFFIX, ContractTest
from servanda.authoring.contract_test.parser import read_tests
from servanda.authoring.contract_test.results import SuiteResult
from servanda.authoring.contract_test.run import run_test
from servanda.contract.model import Contract
from servanda.engines.foreign_code import refuse_outside
from servanda.errors import ContractError, Problem
from servanda.runner import load
from servanda.runner.finished_run import read, reread_as_measured
from servanda.runner.run_directory import ATTEMPT
from servanda.traces.corpus import Corpus


@dataclass(frozen=True)
class PreparedTest:
    """A test with its contract, texts and recorded runs.

    Args:
        file: of the test, as it was named; path, text: of its contract.
        recorded: runs, by the names in the cases.
    """

    file: Path
    test: ContractTest
    path: Path
    text: str
    contract: Contract
    corpora: dict[str, Corpus]
    golden: Corpus | None
    recorded: dict[str, Recording]

    def run(self) -> SuiteResult:
        """The results of the contract.

        Raises:
            ContractError, EvidenceError: as in `run_test`.
        """
        return run_test(self.test, self.contract, self.corpora, self.golden, recorded=self.recorded)


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The test files of paths: single files, or all of a folder.

    Raises:
        ContractError: a folder has none.
    """
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not inside:
            raise ContractError(f"{path} holds no contract test", hint=f"it ends in {SUFFIX}")
        files += inside
    return list(dict.fromkeys(files))


def prepare_tests(file: Path) -> tuple[PreparedTest, ...]:
    """The tests of a file, with the contracts and runs that they name.

    Raises:
        ContractError: problems of a test's or a contract's text, with their places.
        EvidenceError, MeasurementError: a recorded run cannot be read.
    """
    data = load.bytes_of(file, f"give a {SUFFIX} file, or a folder of them")
    text = load.decoded(data, str(file))
    return tuple(_prepare_test(file, test) for test in read_tests(text, str(file)))


def _prepare_test(file: Path, test: ContractTest) -> PreparedTest:
    path = file.parent / test.contract
    refuse_outside([(path, test.where("contract"))], file.parent)
    if not path.is_file():
        raise ContractError(
            f"{path} is no file" if path.exists() else f"there is no {path}",
            where=test.where("contract"),
            hint="the path of a contract starts from the folder of its test",
        )
    contract = load.load(path)
    corpora, golden = load.corpora(contract)
    text, recorded = path.read_text(encoding="utf-8-sig"), _recorded(file, test, path.parent)
    return PreparedTest(file, test, path, text, contract, corpora, golden, recorded)


def _recorded(file: Path, test: ContractTest, folder: Path) -> dict[str, Recording]:
    recordings: dict[str, Recording] = {}
    problems = []
    for i, case in enumerate(test.cases):
        if case.recorded is None or case.recorded in recordings:
            continue
        root, where = file.parent / case.recorded, test.where("cases", i, "recorded")
        refuse_outside([(root, where)], file.parent)
        if not any(root.glob(f"{ATTEMPT}*")):
            hint = f"`servanda check CONTRACT --run-dir {root}` measures one"
            problems.append(Problem(f"{root} is no run directory", where, hint))
            continue
        with reread_as_measured(root, read(root), folder) as run:
            recordings[case.recorded] = Recording(run.verdict.key, run.golden, run.rounds)
    if problems:
        raise ContractError.all(problems)
    return recordings
