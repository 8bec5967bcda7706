# Reading a finished run: its contract, plan and measurements, without opening an engine.

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from servanda.contract.kernel_string import is_hub_name
from servanda.contract.model import Contract, Place
from servanda.contract.text_file import content
from servanda.engines.foreign_code import refuse_outside
from servanda.errors import EvidenceError
from servanda.judgement.evidence import Evidence, GoldenRun, Round, weigh, weigh_golden
from servanda.judgement.plan import Plan
from servanda.judgement.verdict import Verdict
from servanda.runner import load
from servanda.runner.golden import read_golden
from servanda.runner.load import compile
from servanda.runner.round_files import read_rounds
from servanda.runner.run_directory import ATTEMPT, opened

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+-]*\.[A-Za-z0-9_/-]+|[A-Za-z_./-]*/[A-Za-z0-9_-]+")
_NAME_IT = "name it: --contract FILE"
_GIVE = "give a run directory, or a file that `servanda check --format json` printed"
_FILE = "verdict.json"
_LARGEST = 64 << 20  # most bytes of a verdict


@dataclass(frozen=True)
class Finished:
    """A run with a verdict.

    Args:
        text, path: of its contract; its file names are relative to the path's folder.
        rounds: the closed rounds, in order.
    """

    verdict: Verdict
    text: str
    path: Path
    plan: Plan
    golden: GoldenRun | None
    rounds: tuple[Round, ...]

    def planned(self, text: str) -> Plan:
        """The plan of another text of the contract, on the same prompts and draws.

        Raises:
            ContractError: as in reading and compiling a contract.
        """
        contract = load.read(text.encode(), str(self.path), self.path.parent)
        return compile(contract, attempt=self.plan.attempt)

    def weighed(self, plan: Plan) -> Evidence:
        """The run as evidence of another plan on the same prompts and draws."""
        evidence = weigh(plan, self.verdict.key, self.rounds)
        if self.golden is None or plan.golden is None:
            return evidence
        return evidence + weigh_golden(plan, self.verdict.key, self.golden)


@contextmanager
def reread(
    root: Path, verdict: Verdict, contract: Path | None = None, *, as_measured: bool = False
) -> Iterator[Finished]:
    """A finished run of a run directory, which is locked meanwhile.

    Args:
        root: the run directory; verdict: of one of its attempts.
        contract: the file, if the run does not have its path or it has moved.
        as_measured: by the stored contract text, independent of the file; `root` stands for the
            folder of the file if that is gone.

    Raises:
        EvidenceError: the contract or its prompts are missing or differ from those of the run, or
            records of its verdict are missing.
        ContractError: as in reading and compiling a contract.
        MeasurementError: another process measures in the folder, or a file is damaged.
    """
    text, path = _stored(root, verdict) if as_measured else _contract(root, verdict, contract)
    parsed = load.read(text.encode(), str(path), path.parent)
    if parsed.digest != verdict.key.contract:
        hint = "name the contract that `servanda check` measured there"
        if contract is None and not as_measured:
            hint = "it changed since: restore it, measure again with --fresh, or "
            hint += "name the one that was measured: --contract FILE"
        raise EvidenceError(
            f"{path} is not the contract of this run: its digest is {parsed.digest[:8]}, and "
            f"{root} was measured for {verdict.key.contract[:8]}",
            hint=hint,
        )
    plan = compile(parsed, attempt=verdict.key.attempt)
    if plan.texts != verdict.key.corpus:
        raise EvidenceError(
            f"the prompts or golden texts of {path} changed since {root} was measured",
            hint="restore them, or measure again with --fresh",
        )
    with opened(root, attempt=verdict.key.attempt) as run:
        rounds = tuple(read_rounds(plan, run))
        recorded = sum(len({unit.group for unit in closed.units}) for closed in rounds)
        if recorded < verdict.groups:
            raise EvidenceError(
                f"{run.path} has the records of {recorded:,} prompt groups, and its verdict "
                f"counted {verdict.groups:,}: a file of a round is lost or damaged",
                hint="the same `servanda check` measures it again, with the same draws",
            )
        yield Finished(verdict, text, path, plan, read_golden(run), rounds)


def _contract(root: Path, verdict: Verdict, named: Path | None) -> tuple[str, Path]:
    """Text and path of a run's contract."""
    if named is not None:
        return _read(named), named
    path = _own_path(root, verdict, _NAME_IT)
    if not path.is_file():
        raise EvidenceError(
            f"{root} was measured for {path}, which is not there from here",
            hint=f"go to the folder that `servanda check` was called in, or {_NAME_IT}",
        )
    return _read(path), path  # the current file, which may have changed since


def _stored(root: Path, verdict: Verdict) -> tuple[str, Path]:
    path = _own_path(root, verdict, "`servanda check FILE` keeps it; a run by other doors does not")
    path = path if path.parent.is_dir() else root / path.name
    return verdict.circumstances.contract_text, path


def _own_path(root: Path, verdict: Verdict, hint: str) -> Path:
    """The path of the contract, as a run keeps it beside its text."""
    place = next((cell.where for cell in verdict.cells if cell.where), None)
    if not verdict.circumstances.contract_text or place is None:
        raise EvidenceError(f"{root} keeps no text of its contract", hint=hint)
    refuse_outside([(place.file, None)], root)
    return Path(place.file)


def _read(path: Path) -> str:
    load.load(path)  # raises its error
    return path.read_text(encoding="utf-8-sig")


def moved(contract: Contract, old: Path, new: Path) -> dict[Place, str]:
    """The files that a contract names, as YAML, if its text moves from old to new.

    Args:
        contract: with its paths as they were read; old, new: folders.
    """
    if old.resolve() == new.resolve():
        return {}
    return {
        place: _written(Path(os.path.relpath(path, new)).as_posix())
        for place, path in load.named_files(contract)
        if place[-1] in ("model", "adapter", "prompts") and not is_hub_name(path)
    }


def _written(path: str) -> str:
    """A path as YAML: unquoted if it can only be parsed as this text."""
    return path if _PLAIN.fullmatch(path) else json.dumps(path, ensure_ascii=False)


def read(path: Path) -> Verdict:
    """The verdict of a run directory, of one attempt, or of a file.

    Raises:
        EvidenceError: it is missing, or not a verdict of this version.
    """
    file = _latest(path) if path.is_dir() else path
    with EvidenceError.of_system(f"{file} cannot be read", hint=_GIVE):
        data = content(file, _LARGEST)
    return verdict_of(data, file)


def verdict_of(data: bytes, file: Path) -> Verdict:
    """The verdict in a file, or on standard input.

    Raises:
        EvidenceError: it is not a verdict of this version.
    """
    try:
        fields = json.loads(data.decode())
        if not isinstance(fields, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        hint = _GIVE
        if file.name == _FILE:
            hint = "the same `servanda check` writes it again, from what was measured"
        raise EvidenceError(f"{file} is not JSON of a verdict: {error}", hint=hint) from None
    try:
        return Verdict.from_dict(fields)
    except EvidenceError as error:
        problem = error.problems[0]
        raise EvidenceError(f"{file}: {problem.message}", hint=problem.hint) from None


def _latest(folder: Path) -> Path:
    files = [p for p in folder.glob(f"{ATTEMPT}*/{_FILE}") if _number(p).isdecimal()]
    last = max(files, key=lambda p: int(_number(p)), default=folder / _FILE)
    if last.is_file():
        return last
    raise EvidenceError(
        f"{folder} holds no verdict",
        hint="`servanda check` with this --run-dir measures, or finishes what was begun",
    )


def _number(path: Path) -> str:
    return path.parent.name.removeprefix(ATTEMPT)
