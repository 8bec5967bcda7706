# Transitions: what changed at a step, told once; pure.
#
# A flag is raised at the first step whose condition is met: a step is judged with evidence, so
# one is enough.  It is lowered by CALM steps that say clearly otherwise; a step that says
# neither (too few tokens, an error) leaves the count as it is.  So a run that goes to and fro
# is told of once, and what stands in between counts as raised.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from servanda.judgement.clauses.base import CellVerdict, Outcome
from servanda.rl.dumps import format as words
from servanda.rl.dumps.diagnosis import DOUBLED, GROWS
from servanda.rl.watch.step import COVERAGE, Seen

CALM = 3  # steps that lower a flag
VIOLATED, ERROR, LOST, TREND, SLICE = "violated", "error", "coverage", "trend", "slice "

Kind = Literal[
    "violated",
    "holds",
    "error",
    "measured again",
    "coverage lost",
    "coverage back",
    "slice red",
    "slice recovered",
    "trend beyond x2",
    "trend back",
]
Level = Literal["error", "warning", "info"]
_LEVELS: Mapping[str, Level] = {
    "violated": "error",
    "error": "error",
    "coverage lost": "error",
    "slice red": "error",
    "trend beyond x2": "warning",
}


@dataclass(frozen=True)
class Alert:
    """One transition.

    Args:
        text: in one line.
        slice, clause, value, interval, limit, n: of the worst cell behind it, if there is one;
            words: the same for people.
        stop: the step at which this run would have been stopped; None: at none so far.
    """

    kind: str
    step: int
    text: str
    level: Level = "info"
    slice: str = ""
    clause: str = ""
    value: float | None = None
    interval: tuple[float, float] | None = None
    limit: float | None = None
    n: int = 0
    words: str = ""
    cause: str = ""
    command: str = ""
    stop: int | None = None

    def lines(self) -> list[str]:
        """As people read it."""
        found = [f"step {self.step}: {self.text}", *([self.words] if self.words else [])]
        found += [f"cause: {self.cause}"] if self.cause else []
        found += [f"next: {self.command}"] if self.command else []
        if self.stop is not None and self.level == "error":
            found.append(f"would have stopped at step {self.stop}")
        return found


@dataclass(frozen=True)
class Flag:
    """Raised since a step, and how many steps in a row have said otherwise."""

    since: int
    calm: int = 0


@dataclass(frozen=True)
class Memory:
    """What a watch remembers of a run.

    Args:
        counts: outcome -> steps.
        stop: first step at which the run would have been stopped, and stop_why.
        places: slices that have a series of their own.
    """

    flags: Mapping[str, Flag] = field(default_factory=dict)
    first: int | None = None
    step: int | None = None
    outcome: Outcome | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    stop: int | None = None
    stop_why: str = ""
    places: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "places": [*self.places]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Memory:
        """Raises: KeyError, TypeError where the data is not of a memory."""
        flags = {name: Flag(**flag) for name, flag in data["flags"].items()}
        return cls(**{**data, "flags": flags, "places": tuple(data["places"])})

    @property
    def steps(self) -> int:
        return sum(self.counts.values())


def advance(memory: Memory, seen: Seen) -> tuple[Memory, tuple[Alert, ...]]:
    """Memory after a step, and what is told of it."""
    flags = dict(memory.flags)
    raised, lowered = [], []
    names = [VIOLATED, ERROR, LOST, TREND, *(f"{SLICE}{name}" for name in seen.slices)]
    for name in names:
        met, was = _met(name, seen), flags.get(name)
        if met is True and was is None:
            flags[name] = Flag(seen.step)
            raised.append(name)
        elif met is True and was is not None:
            flags[name] = replace(was, calm=0)
        elif met is False and was is not None:
            flags[name] = replace(was, calm=was.calm + 1)
            if was.calm + 1 >= CALM:
                lowered.append((name, flags.pop(name).since))
    why = stops(seen)
    stop = memory.stop if memory.stop is not None or not why else seen.step
    after = replace(
        memory,
        flags=flags,
        first=seen.step if memory.first is None else memory.first,
        step=seen.step,
        outcome=seen.outcome,
        counts={**memory.counts, seen.outcome: memory.counts.get(seen.outcome, 0) + 1},
        stop=stop,
        stop_why=memory.stop_why or why,
    )
    return after, tuple(_alerts(seen, after, raised, lowered))


def stops(seen: Seen) -> str:
    """Why a run would be stopped at this step; "" where it would not."""
    worst = seen.worst()
    if seen.outcome == "violated":
        place = "" if worst is None else f": {worst.clause} on {seen.place(worst.slice)}"
        return f"an enforced clause was violated{place}"
    return "the contract's escalation said halt" if "halt" in seen.actions else ""


def _met(name: str, seen: Seen) -> bool | None:
    """Whether a step meets the condition of a flag; None: it does not say."""
    if name == VIOLATED:
        return {"violated": True, "holds": False}.get(seen.outcome)
    if name == ERROR:
        return seen.outcome == "error"
    if name == TREND:
        return _grows(seen)
    if name == LOST:
        cells = [c for c in seen.enforced if c.metric in COVERAGE]
    else:
        cells = [c for c in seen.enforced if c.slice == name.removeprefix(SLICE)]
    outcomes = {c.outcome for c in cells} - {"not applicable"}
    if outcomes & ({"violated", "error"} if name == LOST else {"violated"}):
        return True
    return False if outcomes == {"holds"} else None


def _grows(seen: Seen) -> bool | None:
    """Beyond x2 is told when it is certain, and taken back below x1.5."""
    if seen.trend is None:
        return None
    if seen.trend.ratio >= DOUBLED and seen.trend.interval[0] > 1:
        return True
    return False if seen.trend.ratio < GROWS else None


def _alerts(
    seen: Seen, after: Memory, raised: list[str], lowered: list[tuple[str, int]]
) -> list[Alert]:
    """What is told: one alert for what belongs together."""
    red = [name.removeprefix(SLICE) for name in raised if name.startswith(SLICE)]
    over = [name for name, _ in lowered]
    found = []
    if VIOLATED in raised:
        found.append(_alert("violated", seen, after, _violated(red), seen.worst()))
    else:
        found += [
            _alert("slice red", seen, after, f"{words.place(name)} became red", seen.worst(name))
            for name in red
        ]
    if LOST in raised:
        found.append(_alert("coverage lost", seen, after, f"coverage lost: {seen.why}"))
    elif ERROR in raised:
        found.append(_alert("error", seen, after, f"not measured: {seen.why}"))
    if TREND in raised and seen.trend is not None:
        low, high = seen.trend.interval
        text = f"the drift is x{seen.trend.ratio:.2f} [{low:.2f}, {high:.2f}] of the first "
        text += f"{seen.trend.steps} steps, an estimate"
        found.append(_alert("trend beyond x2", seen, after, text))
    for name, since in lowered:
        if name == VIOLATED:
            found.append(_alert("holds", seen, after, _calm("holds again", since)))
        elif name.startswith(SLICE) and VIOLATED not in over:
            place = words.place(name.removeprefix(SLICE))
            text = _calm(f"{place} recovered", since)
            cell = seen.worst(name.removeprefix(SLICE))
            found.append(_alert("slice recovered", seen, after, text, cell))
        elif name == LOST:
            found.append(_alert("coverage back", seen, after, _calm("coverage is back", since)))
        elif name == ERROR and LOST not in over:
            found.append(_alert("measured again", seen, after, _calm("measured again", since)))
        elif name == TREND:
            found.append(_alert("trend back", seen, after, _calm(f"trend below x{GROWS:g}", since)))
    return found


def _violated(red: list[str]) -> str:
    more = f" on {', '.join(map(words.place, red[:3]))}" if red else ""
    more += f" and {len(red) - 3} more slices" if len(red) > 3 else ""
    return f"violated{more}"


def _calm(what: str, since: int) -> str:
    return f"{what}, for {CALM} steps; it was not since step {since}"


def _alert(
    kind: Kind, seen: Seen, after: Memory, text: str, cell: CellVerdict | None = None
) -> Alert:
    bad = kind in _LEVELS
    told = {} if cell is None else {
        "slice": cell.slice,
        "clause": cell.clause,
        "value": cell.value,
        "interval": cell.interval,
        "limit": cell.limit,
        "n": cell.n,
        "words": f"{words.clause(cell)}, {seen.place(cell.slice)}: {number(cell)}, n {cell.n:,}",
    }  # fmt: skip
    return Alert(
        kind,
        seen.step,
        text,
        _LEVELS.get(kind, "info"),
        cause=seen.cause if kind in ("violated", "slice red") else "",
        command=seen.command if bad else "",
        stop=after.stop,
        **told,
    )


def number(cell: CellVerdict) -> str:
    """The value of a cell with its interval, against its limit."""
    value = words.number(cell, cell.value)
    if cell.interval:
        low, high = (words.number(cell, end).removesuffix(" %") for end in cell.interval)
        value += f" [{low}, {high}]"
    return f"{value} of {words.limit(cell)}"
