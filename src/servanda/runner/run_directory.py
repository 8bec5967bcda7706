# The run directory: measurements as files, so that nothing is lost or counted twice.
#
#   runs/NAME/attempt-1/plan.json                 the evidence key, and the contract
#                       verdict.json              the answer, once there was one
#                       expired.json              or what changed before there was
#                       golden/NAME.parquet       the golden texts
#                       corners/NAME.parquet      and at the corners of the envelope
#                       batches/NAME.parquet      and alone, where batch invariance is promised
#                       timing/LOAD/000003.json   blocks of requests, timed
#                       rounds/000012.infer.parquet   and .train, .self_infer, .self_train
#                       rounds/000012.train_draws.parquet   where rewards are compared
#
# A file is written under another name, flushed, and renamed: it is complete or absent, even if the
# process is killed.  A round is closed when all of its files are there.

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from servanda.contract.identity import EvidenceKey
from servanda.engines.arrow import from_table, to_parquet, to_table
from servanda.engines.file_lock import hold
from servanda.errors import EvidenceError, MeasurementError
from servanda.traces.trace import Trace

ATTEMPT = "attempt-"
_PARTIAL = ".partial"
_SCHEMA = 1  # of plan.json


class Occupied(MeasurementError):  # noqa: N818 - nothing failed
    """Another process measures in this folder, and will report the result."""


class RunDirectory:
    """One attempt of one contract on disk.  Use it by `opened`, which holds the lock."""

    def __init__(self, root: Path, attempt: int) -> None:
        self.root, self.attempt = root, attempt
        self.path = root / f"{ATTEMPT}{attempt}"

    @property
    def begun(self) -> tuple[EvidenceKey, dict[str, Any]] | None:
        """The key and the contract of the attempt at its start; None if not started."""
        try:
            data = json.loads((self.path / "plan.json").read_text(encoding="utf-8"))
            anew = "move the run directory away and measure again"
            MeasurementError.refuse_form(self.path / "plan.json", data.get("schema"), _SCHEMA, anew)
            return EvidenceKey(**data["key"]), dict(data["contract"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise MeasurementError(
                f"{self.path / 'plan.json'} is damaged: {error}",
                hint="restore the file, or move the run directory away and measure again",
            ) from None

    def begin(self, key: EvidenceKey, contract: dict[str, Any]) -> None:
        plan = {"schema": _SCHEMA, "key": asdict(key), "contract": contract}
        self._write("plan.json", json.dumps(plan, indent=1).encode())

    @property
    def finished(self) -> bool:
        """Whether it has a verdict, or its key changed; otherwise `--fresh` continues it."""
        return any((self.path / name).exists() for name in ("verdict.json", "expired.json"))

    def finish(self, verdict: dict[str, Any]) -> None:
        self._write("verdict.json", json.dumps(verdict, indent=1).encode())

    def expire(self, changed: str) -> None:
        """Let `--fresh` open the next attempt although this one has no verdict."""
        self._write("expired.json", json.dumps({"changed": changed}).encode())

    def cached(self, name: str, make: Callable[[], Trace]) -> Trace:
        """A trace from disk, or a new one that is stored."""
        if self.has(name):
            return self.read(name)
        trace = make()
        self.write(name, trace)
        return trace

    def cached_data(self, name: str, make: Callable[[], Any]) -> Any:
        """Plain data from disk, or new data that is stored; floats are preserved exactly."""
        path = self.path / f"{name}.json"
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            data = make()
            self._write(f"{name}.json", json.dumps(data).encode())
            return data
        except (OSError, ValueError) as error:
            raise MeasurementError(
                f"{path} cannot be read: {error}",
                hint="delete that one file: it will be measured again",
            ) from None

    def has(self, name: str) -> bool:
        return (self.path / f"{name}.parquet").exists()

    def read(self, name: str) -> Trace:
        path = self.path / f"{name}.parquet"
        try:
            with pq.ParquetFile(path) as file:
                return from_table(file.read(use_threads=False))
        except (OSError, pa.ArrowException, KeyError, TypeError, EvidenceError) as error:
            raise MeasurementError(
                f"{path} cannot be read: {error}",
                hint="delete that one file: it will be measured again, with the same draws",
            ) from None

    def write(self, name: str, trace: Trace) -> None:
        self._write(f"{name}.parquet", to_parquet(to_table(trace)))

    def _write(self, name: str, data: bytes) -> None:
        path = self.path / name
        partial = path.with_name(path.name + _PARTIAL)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            _sync(path.parent)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise MeasurementError(
                f"{path} cannot be written: {error.strerror or error}",
                hint="make room or choose another --run-dir; finished rounds are kept, and the "
                "same command goes on from there",
            ) from None


def _sync(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def latest(root: Path, *, fresh: bool) -> int:
    """The attempt to continue; a fresh one only after one with a verdict."""
    names = [p.name.removeprefix(ATTEMPT) for p in root.glob(f"{ATTEMPT}*")]
    last = max((int(name) for name in names if name.isascii() and name.isdigit()), default=1)
    return last + 1 if fresh and RunDirectory(root, last).finished else last


@contextmanager
def opened(
    root: Path, *, attempt: int | None = None, fresh: bool = False
) -> Iterator[RunDirectory]:
    """An attempt of a run directory, the latest or a fresh one, locked against a second process.

    Raises:
        MeasurementError: the folder cannot be used.
        Occupied: another process measures in it.
    """
    hint = "wait for it, or choose another --run-dir"
    busy = Occupied(f"another servanda is measuring in {root}", hint=hint)
    with MeasurementError.of_system(
        f"{root} cannot be used as a run directory", hint="choose another --run-dir"
    ):
        root.mkdir(parents=True, exist_ok=True)
        held = hold(root / ".lock", busy)
    with held:
        run = RunDirectory(root, attempt or latest(root, fresh=fresh))
        for partial in run.path.rglob(f"*{_PARTIAL}"):
            partial.unlink()
        yield run
