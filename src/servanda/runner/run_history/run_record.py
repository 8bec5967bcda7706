# The verdicts of a folder, in the order of time.
#
# The time of a run is the one that its verdict.json states; a file without it, such as the output
# of `check --format json`, has the time at which it was written.

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from servanda.contract.text_file import content
from servanda.errors import EvidenceError
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.verdict import Verdict
from servanda.runner.finished_run import LARGEST, verdict_of
from servanda.runner.run_directory import ENDED

_PATTERN = "*verdict.json"
_VERSIONS = ("version", "engine_version")  # of engines whose version is not under their name
Key = tuple[str, str]  # a cell: clause, slice


@dataclass(frozen=True)
class RunRecord:
    """One verdict.

    Args:
        place: its file; at: when it was reached, Unix seconds.
    """

    place: str
    at: float
    verdict: Verdict

    @property
    def when(self) -> str:
        """The time in UTC, to the minute."""
        return datetime.fromtimestamp(self.at, timezone.utc).strftime("%Y-%m-%d %H:%MZ")

    @property
    def build(self) -> str:
        """The infer kernel: its engine, the engine's version if known, and its fingerprint."""
        known = self.verdict.circumstances.fingerprints.get("infer", {})
        engine = known.get("engine", "")
        version = next((known[key] for key in (engine, *_VERSIONS) if known.get(key)), "")
        return " ".join(part for part in (engine, version, self.verdict.key.infer[:8]) if part)

    @property
    def measurement(self) -> str:
        """The same for two verdicts on the same evidence."""
        return self.verdict.evidence or self.place

    def cells(self) -> dict[Key, CellVerdict]:
        """The cells with a number."""
        return {(c.clause, c.slice): c for c in self.verdict.cells if c.value is not None}


@dataclass(frozen=True)
class ContractRuns:
    """The runs of one contract, newest last.

    Args:
        name: of the contract, with the step of a promotion, if any.
    """

    name: str
    runs: tuple[RunRecord, ...]

    @property
    def newest(self) -> RunRecord:
        return self.runs[-1]

    @property
    def builds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.build for run in self.runs))

    def cell_keys(self, slice_: str | None = None) -> list[Key]:
        """The cells that any run has, in the order of the newest contract that has them.

        Args:
            slice_: only this slice.
        """
        found = dict.fromkeys(key for run in reversed(self.runs) for key in run.cells())
        return [key for key in found if slice_ in (None, key[1])]


@dataclass(frozen=True)
class History:
    """The runs of a folder.

    Args:
        contracts: by name; unread: a sentence for each file that is no verdict of this version.
    """

    contracts: tuple[ContractRuns, ...]
    unread: tuple[str, ...] = ()


def history_of(folder: Any) -> History:
    """All verdicts below a folder: of run directories, and files named *verdict.json.

    Args:
        folder: a Path, or a folder in an object store with the same methods.

    Raises:
        EvidenceError: there is no such folder, it cannot be read, or holds no verdict.
    """
    with EvidenceError.of_system(f"{folder} cannot be read"):
        if not folder.is_dir():
            raise EvidenceError(
                f"{folder} {'is no folder' if folder.exists() else 'is not there'}",
                hint="give the folder that holds the run directories, such as runs",
            )
        files = sorted((p for p in folder.rglob(_PATTERN) if p.is_file()), key=str)
    records, unread = [], []
    for file in files:
        try:
            records.append(_record(file))
        except EvidenceError as error:
            problem = error.problems[0]
            unread.append(f"{problem.message}; {problem.hint}" if problem.hint else problem.message)
    if not records:
        raise EvidenceError(
            unread[0] if unread else f"{folder} holds no verdict",
            hint=f"none of {len(files)} files can be read"
            if len(unread) > 1
            else "give a folder with run directories of `servanda check`, or with the output of "
            "`check --format json` in files named *.verdict.json",
        )
    return History((*_by_contract(records),), tuple(unread))


def _by_contract(records: Sequence[RunRecord]) -> Iterator[ContractRuns]:
    found: dict[str, list[RunRecord]] = {}
    for record in sorted(records, key=lambda r: (r.at, _attempt(r), r.place)):
        verdict = record.verdict
        name = f"{verdict.contract} ({verdict.leg})" if verdict.leg else verdict.contract
        found.setdefault(name, []).append(record)
    for name in sorted(found):
        yield ContractRuns(name, tuple(found[name]))


def _attempt(record: RunRecord) -> int:
    return record.verdict.key.attempt


def _record(file: Any) -> RunRecord:
    with EvidenceError.of_system(f"{file} cannot be read"):
        if isinstance(file, Path):
            data, written = content(file, LARGEST), file.stat().st_mtime
        else:
            with file.open() as stream:
                data, written = stream.read(LARGEST + 1), file.stat().st_mtime_ns / 1e9
            if len(data) > LARGEST:
                raise OSError(f"it has more than the {LARGEST:,} bytes that are read at most")
    verdict = verdict_of(data, file)
    return RunRecord(str(file), _ended(json.loads(data), written), verdict)


def _ended(fields: dict[str, Any], written: float) -> float:
    try:
        return datetime.fromisoformat(fields[ENDED].replace("Z", "+00:00")).timestamp()
    except (KeyError, ValueError, AttributeError):
        return written
