# What a run remembers from step to step, and the file that it survives a restart in.
#
# The file is JSON lines, one a step, flushed as it is written.  A restart reads them again; a
# last line that a kill cut off is dropped, and said so.

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servanda.contract.clause import SliceRule
from servanda.errors import EvidenceError, MeasurementError
from servanda.rl.dumps.slicing import Labels
from servanda.rl.dumps.steps import RunEnds, TokenSum

SCHEMA = 1


@dataclass
class RunState:
    """What a run knows of its steps so far.

    Args:
        contract: digest, once the first step was seen; rules, labels: its slices, and the labels
            of sequences that it began with, each combination once.
        left_out: what has no slice of its own, and why.
        would: the first step that rules would have stopped the run at.
        resumed: whether the next step is the first after a restart.
    """

    contract: str = ""
    rules: tuple[SliceRule, ...] = ()
    labels: tuple[Labels, ...] = ()
    left_out: tuple[str, ...] = ()
    ends: RunEnds = field(default_factory=RunEnds)
    would: int | None = None
    resumed: bool = False

    def add(self, weights: int, groups: Mapping[str, TokenSum]) -> None:
        """Know one more step; one that comes again after a restart replaces what was known."""
        self.ends.add_groups(weights, groups, anew=self.resumed)
        self.resumed = False


class Journal:
    """The file of a run.

    Args:
        path: made with its folder when the first step is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: tuple[str, ...] = ()

    def read(self) -> RunState:
        """What an earlier run wrote; a broken last line is cut off.

        Raises:
            EvidenceError: another line is broken, or the file is of another schema.
            MeasurementError: the file cannot be read.
        """
        state = RunState()
        with self._used():
            data = self.path.read_bytes() if self.path.exists() else b""
            lines, whole = data.splitlines(keepends=True), 0
            for number, line in enumerate(lines, 1):
                entry = _entry(line)
                if entry is None and number == len(lines):
                    self.notes = (f"line {number} of {self.path} was cut off, and is dropped",)
                    with self.path.open("r+b") as file:
                        file.truncate(whole)
                    break
                if entry is None or entry.get("schema") != SCHEMA:
                    raise EvidenceError(
                        f"{self.path}:{number} is no step of a monitor",
                        hint="name another state file",
                    )
                _recall(state, entry)
                whole += len(line)
        state.resumed = bool(lines)
        return state

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one step.

        Raises:
            MeasurementError: the file cannot be written.
        """
        with self._used():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, allow_nan=False) + "\n")
                file.flush()

    def _used(self) -> AbstractContextManager[None]:
        hint = "name another state file"
        return MeasurementError.of_system(f"the state file {self.path} cannot be used", hint=hint)


def first_line(state: RunState) -> dict[str, Any]:
    """What the first line of a run carries besides its step: `_recall` reads it."""
    return {
        "slices": [rule.model_dump(mode="json", exclude_none=True) for rule in state.rules],
        "kinds": [dict(labels) for labels in state.labels],
        "left_out": [*state.left_out],
    }


def _recall(state: RunState, entry: Mapping[str, Any]) -> None:
    try:
        if "slices" in entry:
            state.contract = str(entry["contract"])
            state.rules = tuple(SliceRule.model_validate(rule) for rule in entry["slices"])
            state.labels = tuple(tuple(labels.items()) for labels in entry["kinds"])
            state.left_out = tuple(map(str, entry.get("left_out", ())))
        if state.would is None and "halt" in (*entry["would"], *entry["action"]):
            state.would = int(entry["weights"])
        groups = {str(i): TokenSum(float(t), int(n)) for i, (t, n) in enumerate(entry["groups"])}
        state.resumed = True
        if entry["tokens"]:
            state.add(int(entry["weights"]), groups)
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(
            f"step {entry.get('weights')} of the state file cannot be read: {error!r}",
            hint="name another state file",
        ) from None


def _entry(line: bytes) -> dict[str, Any] | None:
    """A line as an object; None where it is cut off or broken."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
