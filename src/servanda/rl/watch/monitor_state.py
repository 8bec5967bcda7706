# A growing state file of a monitor: JSON lines, one per step with the monitor's verdict.
#
# A line is complete at its newline.  The trend is computed from the prompt groups of the lines, as
# in the monitor.

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import msgspec

from servanda.contract.clause import Section
from servanda.errors import ContractError
from servanda.judgement.breakdown import Advice
from servanda.judgement.clauses.base import GUARDS, CellVerdict
from servanda.judgement.clauses.draft_acceptance import DRAFT_ACCEPTANCE
from servanda.report.cell_text import GLYPH, REALISED
from servanda.rl.monitor.state_file import SCHEMA
from servanda.rl.monitor.statistics import DRAFTS
from servanda.rl.steps.drift import RunEnds, TokenSum
from servanda.rl.trend.changes import TREND, changed, chart_for, joined_outcome, scalars_of
from servanda.rl.watch.step import WatchedStep

_STORED = ("bytes", "lines", "begin", "step", "furthest")
_HEAD = 1 << 16  # bytes of a file's first line that are examined

Outcome = Literal["violated", "error", "inconclusive", "holds", "not applicable"]
Number = float | str | None  # strings are inf and -inf


class _Cell(msgspec.Struct):
    clause: str
    slice: str
    metric: str
    outcome: Outcome
    enforced: bool
    value: Number
    low: Number
    high: Number
    limit: Number
    n: int
    missing: int
    threshold: Number
    aggregate: str
    steps: tuple[int, int] | None = None


class _Follow(msgspec.Struct):
    outcome: Outcome
    sentence: str
    slope: Number = None
    low: Number = None
    high: Number = None
    since: int | None = None


class StateLine(msgspec.Struct):
    """A step as the monitor writes it."""

    schema: int
    weights: int
    outcome: Outcome
    cells: list[_Cell]
    step: int  # of the trainer's log
    generation: int  # in the step
    name: str
    action: list[str]
    would: list[str]
    cause: str
    tokens: int
    judged: int  # tokens of the steps that the verdict is about
    needs_tokens: int | None
    sequences: int
    metrics: dict[str, Number]
    groups: list[tuple[float, int]]  # sum of |log ratio| and tokens
    follow: _Follow | None = None


class MonitorSource:
    kind = "monitor"

    def __init__(self, path: Path, reference: Path | None = None) -> None:
        self.path = path
        self._reference = reference
        self._chart = chart_for(reference, None)
        self._values: list[tuple[int, int, dict[str, float]]] = []  # step, generation, numbers
        self.missing = self.left = ""
        self._file: Path | None = None
        self._name = ""
        self._bytes = 0  # bytes read, up to the end of a line
        self._lines = 0
        self._begin = ""  # identity of the file: another file is another run
        self._step: int | None = None
        self._furthest: list[int] = []  # step and generation
        self._ends = RunEnds()

    def poll(self, *, final: bool) -> Iterator[WatchedStep]:
        files = states_in(self.path)
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:4])
            raise ContractError(
                f"{self.path} holds {len(files)} states: {names}",
                hint="name the one to follow",
            )
        if not files:
            self.missing = nothing(self.path)
            return
        self._file, self.missing = files[0], ""
        data = self._unread()
        if data is None:
            return
        whole = data.rfind(b"\n") + 1
        cut = len(data) - whole
        self.left = f"the last line of {files[0].name} is incomplete and is left out" if cut else ""
        for line in data[:whole].splitlines(keepends=True):
            self._lines += 1
            self._bytes += len(line)
            if line.strip():
                yield self._step_of(line)

    def _unread(self) -> bytes | None:
        """The new bytes of the file; all of it if it was replaced."""
        assert self._file is not None
        try:
            with self._file.open("rb") as stream:
                begin = blake2b(stream.readline(_HEAD), digest_size=16).hexdigest()
                if stream.seek(0, 2) < self._bytes or (self._bytes and begin != self._begin):
                    self._bytes = self._lines = 0
                    self._furthest, self._ends = [], RunEnds()
                    self._chart, self._values = chart_for(self._reference, None), []
                self._begin = begin
                stream.seek(self._bytes)
                return stream.read()
        except FileNotFoundError:
            return None  # it was moved during the poll

    def _step_of(self, data: bytes) -> WatchedStep:
        assert self._file is not None
        place = f"{self._file.name}:{self._lines}"
        try:
            line = read_line(data, place)
        except Unreadable as unreadable:
            step = 0 if self._step is None else self._step
            return WatchedStep(step, "error", why=f"{place}: {unreadable}")
        number = line.step
        at = [number, line.generation]
        again = at <= self._furthest
        self._name, self._step = line.name, number
        self._furthest = max(self._furthest, at)
        cells = tuple(map(_cell, line.cells))
        if line.tokens:
            groups = {str(i): TokenSum(*sums) for i, sums in enumerate(line.groups)}
            # a run that went back repeats its steps
            self._ends.add_groups(number, groups, anew=not line.generation)
        outcome, cause = line.outcome, line.cause
        if self._chart is not None:
            self._chart.contract = self._name
            own = {} if outcome == "error" or not line.tokens else scalars_of(line.metrics)
            own = {name: own[name] for name in self._chart.metrics if name in own}
            self._values.append((line.weights, line.generation, own))
            trend = self._chart.add(line.weights, own, line.generation)
            cells = (*(cell for cell in cells if cell.section != TREND), *trend)
            outcome, cause = joined_outcome(outcome, trend), cause or changed(trend)
        return WatchedStep(
            number,
            outcome,
            cells,
            line.tokens,
            line.sequences,
            why=line.cause or "the monitor gave no cause" if line.outcome == "error" else "",
            advice=Advice("", cause) if cause else None,
            trend=None if self._chart is not None else self._ends.trend(),
            staleness=_number(line.metrics.get("servanda/staleness/max")),
            actions=tuple(dict.fromkeys((*line.action, *line.would))),
            again=again,
            needs_tokens=line.needs_tokens,
            judged=line.judged,
            drafts=_number(line.metrics.get(DRAFTS)),
            follow=_follow(line.follow),
        )

    def head(self) -> tuple[str, ...]:
        if self._file is None:
            return ()
        named = f": {self._name}" if self._name else ""
        against = [] if self._chart is None else [f"change   {self._chart.promise}"]
        found = f"found    a monitor's state in {self._file}{named}"
        return (found, f"         {REALISED}", *against)

    def to_plain(self) -> dict[str, Any]:
        own = {name: getattr(self, f"_{name}") for name in _STORED}
        return {**own, "values": self._values, **self._ends.to_plain()}

    def resume(self, state: Mapping[str, Any]) -> None:
        for name in _STORED:
            setattr(self, f"_{name}", state[name])
        self._ends = RunEnds.from_plain(state)
        self._values = [*map(tuple, state["values"])]
        for step, generation, values in self._values:
            if self._chart is not None:
                self._chart.add(step, values, generation)


def read_state(path: str | Path) -> tuple[WatchedStep, ...]:
    """The steps of a monitor's state file, oldest first, written by `rl.Monitor(state=...)`.

    Raises:
        ContractError: no such file, several in one folder, or another schema version.
    """
    source = MonitorSource(Path(path))
    steps = tuple(source.poll(final=True))
    if source.missing:
        raise ContractError(source.missing, hint="name the monitor's state file")
    return steps


def states_in(path: Path) -> list[Path]:
    """The monitor's state files of a folder, or the file itself."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return [file for file in files if file.is_file() and _is_state(file)]


def nothing(path: Path) -> str:
    """The reason why there is no state file."""
    if not path.exists():
        return f"there is no {str(path)!r}"
    return f"{str(path)!r} holds no monitor's state"


def _is_state(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            first = json.loads(stream.readline(1 << 24))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and {"schema", "weights"} <= set(first)


class Unreadable(Exception):  # noqa: N818 - a line, not a failure of the program
    pass


def read_line(data: bytes, place: str) -> StateLine:
    """One line of a state file.

    Raises:
        Unreadable: not a line of a state file.
        ContractError: another schema version.
    """
    try:
        plain = json.loads(data)  # NaN and Infinity in Python's form
    except ValueError:
        raise Unreadable("the line is no JSON") from None
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if isinstance(schema, int):
        anew = "watch with the version of Servanda that the trainer has"
        ContractError.refuse_form(place, schema, SCHEMA, anew)
    try:
        return msgspec.convert(plain, StateLine)
    except msgspec.ValidationError as error:
        raise Unreadable(f"the line is no step of a monitor: {error}") from None


def _cell(cell: _Cell) -> CellVerdict:
    low, high = _number(cell.low), _number(cell.high)
    section: Section = "statistical"
    if cell.clause == TREND:
        section = TREND
    elif cell.metric in GUARDS:
        section = "observability"
    elif cell.metric == DRAFT_ACCEPTANCE:
        section = "runtime"
    return CellVerdict(
        cell.clause,
        section,
        cell.metric,
        cell.aggregate,
        cell.slice,
        cell.outcome,
        kind="guard" if section == TREND else "certificate",
        claim="realised",
        enforced=cell.enforced,
        value=_number(cell.value),
        interval=None if low is None or high is None else (low, high),
        limit=_number(cell.limit),
        n=cell.n,
        missing=cell.missing,
        threshold=_number(cell.threshold),
        steps=cell.steps,
    )


def _follow(follow: _Follow | None) -> str:
    """Whether the engine follows, in one line; "" if it was not observed."""
    if follow is None:
        return ""
    slope, low, high = map(_number, (follow.slope, follow.low, follow.high))
    if slope is None or low is None or high is None or math.isinf(high):
        return f"follow {GLYPH[follow.outcome]} {follow.sentence}"
    numbers = f"{slope:.2f} [{low:.2f}, {high:.2f}]"
    more = f": {follow.sentence}" if follow.outcome != "holds" else ""
    return f"follow {GLYPH[follow.outcome]} {numbers}{more}"


def _number(value: Number) -> float | None:
    """A number, or None for NaN and other strings."""
    try:
        number = math.nan if value is None else float(value)
    except ValueError:
        return None
    return None if math.isnan(number) else number
