# Memory: what a run keeps from step to step, and the file that it survives a restart in.
#
# The file is JSON lines, one a step, flushed as it is written.  A restart reads them again; a
# last line that a kill cut off is dropped, and said so.

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servanda.contract.model import SliceRule
from servanda.errors import EvidenceError, MeasurementError
from servanda.rl.dumps.diagnosis import DOUBLED, GROWS
from servanda.rl.dumps.steps import ENDS, GroupSums, Step, trend

SCHEMA = 1
Kinds = tuple[tuple[tuple[str, str], ...], ...]  # labels of sequences, each combination once


@dataclass(frozen=True)
class Drift:
    """Mean |log ratio| of the last steps over that of the first five; an estimate.

    Args:
        ratio: of the means.
        interval: from resampled prompt groups, 95 %.
        steps: how many of the last are compared, five at most.
    """

    ratio: float
    interval: tuple[float, float]
    steps: int

    @property
    def level(self) -> str:
        """ "error" from x2 on, "warning" from x1.5 on, where the interval is above 1; else ""."""
        if self.interval[0] <= 1:
            return ""
        return "error" if self.ratio >= DOUBLED else "warning" if self.ratio >= GROWS else ""


@dataclass
class Memory:
    """What a run knows of its steps so far.

    Args:
        contract: digest, once the first step was seen; rules, kinds: its slices, and the labels
            that it began with.
        left_out: what has no slice of its own, and why.
        first, last: steps whose groups are kept, at most five each.
        would: the first step that rules would have stopped the run at.
    """

    contract: str = ""
    rules: tuple[SliceRule, ...] = ()
    kinds: Kinds = ()
    left_out: tuple[str, ...] = ()
    first: list[Step] = field(default_factory=list)
    last: list[Step] = field(default_factory=list)
    would: int | None = None
    resumed: bool = False

    def copied(self) -> Memory:
        """As it is now: what is added later is not in it."""
        return Memory(first=[*self.first], last=[*self.last])

    @property
    def newest(self) -> int | None:
        """The last step that is known."""
        known = self.last or self.first
        return known[-1].step if known else None

    def add(self, weights: int, groups: Mapping[str, GroupSums]) -> None:
        """Know one more step; one that comes again after a restart replaces what was known."""
        known = self.newest
        if known is not None and (weights < known or (self.resumed and weights == known)):
            self.first = [step for step in self.first if step.step < weights]
            self.last = [step for step in self.last if step.step < weights]
        self.resumed = False
        ends = self.last if len(self.first) == ENDS else self.first
        if self.newest != weights:
            ends.append(Step(weights))
            del self.last[:-ENDS]
        of = (self.last or self.first)[-1].groups
        for name, sums in groups.items():
            of[name] = of.get(name, GroupSums()) + sums

    @property
    def ratio(self) -> float | None:
        """How the last steps compare with the first five; None before there are such."""
        means = []
        for end in (self.first, self.last):
            groups = [g for step in end for g in step.groups.values()]
            n = sum(g.n for g in groups)
            means.append(sum(g.total for g in groups) / n if n else 0.0)
        return means[1] / means[0] if len(self.first) == ENDS and self.last and means[0] else None

    @property
    def drift(self) -> Drift | None:
        """The same with its interval."""
        if len(self.first) < ENDS or not self.last:
            return None
        found = trend(self.first, self.last, least=1)
        return found and Drift(float(found.ratio), found.interval, found.steps)


class Journal:
    """The file of a run.

    Args:
        path: made with its folder when the first step is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: tuple[str, ...] = ()

    def read(self) -> Memory:
        """What an earlier run wrote; a broken last line is cut off.

        Raises:
            EvidenceError: another line is broken, or the file is of another schema.
            MeasurementError: the file cannot be read.
        """
        memory = Memory()
        try:
            data = self.path.read_bytes() if self.path.exists() else b""
            lines, kept = [*_lines(data)], 0
            for number, (line, end) in enumerate(lines, 1):
                entry = _entry(line)
                if entry is None and number == len(lines):
                    self.notes = (f"line {number} of {self.path} was cut off, and is dropped",)
                    with self.path.open("r+b") as file:
                        file.truncate(kept)
                    break
                if entry is None or entry.get("schema") != SCHEMA:
                    raise EvidenceError(
                        f"{self.path}:{number} is no step of a monitor",
                        hint="name another state file",
                    )
                _recall(memory, entry)
                kept = end
        except OSError as error:
            raise self._unusable(error) from None
        memory.resumed = bool(lines)
        return memory

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one step.

        Raises:
            MeasurementError: the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, allow_nan=False) + "\n")
                file.flush()
        except OSError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: OSError) -> MeasurementError:
        return MeasurementError(
            f"the state file {self.path} cannot be used: {error.strerror or error}",
            hint="name another state file",
        )


def kept(memory: Memory) -> dict[str, Any]:
    """What the first line of a run carries besides its step: `_recall` reads it."""
    return {
        "slices": [rule.model_dump(mode="json", exclude_none=True) for rule in memory.rules],
        "kinds": [dict(kind) for kind in memory.kinds],
        "left_out": [*memory.left_out],
    }


def _recall(memory: Memory, entry: Mapping[str, Any]) -> None:
    try:
        if "slices" in entry:
            memory.contract = str(entry["contract"])
            memory.rules = tuple(SliceRule.model_validate(rule) for rule in entry["slices"])
            memory.kinds = tuple(tuple(kind.items()) for kind in entry["kinds"])
            memory.left_out = tuple(map(str, entry.get("left_out", ())))
        if memory.would is None and "halt" in (*entry["would"], *entry["action"]):
            memory.would = int(entry["weights"])
        groups = {str(i): GroupSums(float(t), int(n)) for i, (t, n) in enumerate(entry["groups"])}
        memory.resumed = True
        if entry["tokens"]:
            memory.add(int(entry["weights"]), groups)
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(
            f"step {entry.get('weights')} of the state file cannot be read: {error!r}",
            hint="name another state file",
        ) from None


def _lines(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Each line, and where the next begins."""
    at = 0
    for line in data.splitlines(keepends=True):
        at += len(line)
        yield line, at


def _entry(line: bytes) -> dict[str, Any] | None:
    """A line as an object; None where it is cut off or broken."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
