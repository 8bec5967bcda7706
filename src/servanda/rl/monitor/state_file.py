# The state of a run between steps, and the file that stores it for a restart.
#
# The file is JSON lines, one per step, flushed after each write.  A restart reads it; an incomplete
# last line is dropped with a note.

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servanda.contract.clause import SliceRule
from servanda.errors import EvidenceError, MeasurementError
from servanda.rl.steps.contract import Labels
from servanda.rl.steps.drift import ENDS, RunEnds, TokenSum
from servanda.rl.trend.changes import RunChart, scalars_of
from servanda.theory.stats.draft_counts import DraftCounts

SCHEMA = 2


@dataclass
class RunState:
    """The state of a run over its steps so far.

    Args:
        contract: digest, after the first step; rules, labels: its slices, and the label
            combinations of its first step.
        left_out: the reasons for omitted slices.
        would: the first step with the action `halt` that was not executed.
        drafts: updates -> counts of drafts of the first steps that have some.
        resumed: whether the next step is the first after a restart.
        window: most steps that are judged together; number: steps judged so far.
        chart: its steps against good runs; None: not asked.
        following: number of updates of the next step, where the trainer does not give it.
        generation: of the last step.
    """

    contract: str = ""
    rules: tuple[SliceRule, ...] = ()
    labels: tuple[Labels, ...] = ()
    left_out: tuple[str, ...] = ()
    ends: RunEnds = field(default_factory=RunEnds)
    would: int | None = None
    drafts: dict[int, DraftCounts] = field(default_factory=dict)
    resumed: bool = False
    window: int = 1
    number: int = 0
    chart: RunChart | None = None
    following: int = 0
    generation: int = 0

    def add(self, weights: int, groups: Mapping[str, TokenSum]) -> None:
        """Add a step; a repeated step after a restart replaces the later ones."""
        self.ends.add_groups(weights, groups, anew=self.resumed)
        self.resumed = False


class Journal:
    """The file of a run.

    Args:
        path: created with its folder at the first step.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: tuple[str, ...] = ()

    def read(self, chart: RunChart | None = None) -> RunState:
        """Read the steps of an earlier run; an incomplete last line is removed.

        Args:
            chart: an empty one, to which the steps are added.

        Raises:
            EvidenceError: another line is broken, or the file is of another schema.
            MeasurementError: the file cannot be read.
        """
        state = RunState(chart=chart)
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
                place, hint = f"{self.path}:{number}", "name another state file"
                if entry is None:
                    raise EvidenceError(f"{place} is no step of a monitor", hint=hint)
                EvidenceError.refuse_form(place, entry.get("schema"), SCHEMA, hint)
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
    """The additional fields of the first line of a run, read by `_recall`."""
    return {
        "slices": [rule.model_dump(mode="json", exclude_none=True) for rule in state.rules],
        "kinds": [dict(labels) for labels in state.labels],
        "left_out": [*state.left_out],
        "window": state.window,
    }


def _recall(state: RunState, entry: Mapping[str, Any]) -> None:
    try:
        if "slices" in entry:
            state.contract = str(entry["contract"])
            state.rules = tuple(SliceRule.model_validate(rule) for rule in entry["slices"])
            state.labels = tuple(tuple(labels.items()) for labels in entry["kinds"])
            state.left_out = tuple(map(str, entry["left_out"]))
            state.window = int(entry["window"])
        state.number += 1
        state.following = int(entry["weights"]) + 1
        state.generation = int(entry["generation"])
        if state.would is None and "halt" in (*entry["would"], *entry["action"]):
            state.would = int(entry["weights"])
        groups = {str(i): TokenSum(float(t), int(n)) for i, (t, n) in enumerate(entry["groups"])}
        state.resumed = not state.generation  # the first of a step replaces an earlier one
        if (drafts := entry.get("drafts")) and len(state.drafts) < ENDS:
            counts = DraftCounts(**{**drafts, "by_depth": tuple(drafts["by_depth"])})
            state.drafts[int(entry["weights"])] = counts
        if entry["tokens"]:
            state.add(int(entry["weights"]), groups)
        if state.chart is not None:
            sound = entry["tokens"] and entry["outcome"] != "error"
            values = scalars_of(entry["metrics"]) if sound else {}
            state.chart.add(int(entry["weights"]), values, state.generation)
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(
            f"step {entry.get('weights')} of the state file cannot be read: {error!r}",
            hint="name another state file",
        ) from None


def _entry(line: bytes) -> dict[str, Any] | None:
    """A line as an object; None if it is incomplete or invalid."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
