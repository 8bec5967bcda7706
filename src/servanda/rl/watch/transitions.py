# Transitions: the changes at a step, each reported once; pure.
#
# A flag is raised at the first step that satisfies its condition: a step is judged with evidence,
# so one is enough.  It is lowered by CALM steps that clearly do not; an undecided step (too few
# tokens, an error) does not change the count.  So a flapping run is reported once, and the flag
# stays raised in between.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from servanda.judgement.breakdown import Advice
from servanda.judgement.clauses.base import CellVerdict, Outcome
from servanda.report.cell_text import interval, limit, limit_sign, of_cell
from servanda.report.consequence import advice_sentences
from servanda.report.format import count
from servanda.report.format import number as number_of
from servanda.rl.steps import format
from servanda.rl.steps.drift import GROWS
from servanda.rl.trend.changes import TREND as CLAUSE
from servanda.rl.watch.step import COVERAGE, WatchedStep

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
            words: the same as text.
        stop: the step at which this run would have been stopped; None: none so far.
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
    advice: Advice | None = None
    stop: int | None = None

    def lines(self) -> list[str]:
        lines = [f"step {self.step}: {self.text}", *([self.words] if self.words else [])]
        lines += advice_sentences(self.advice)
        if self.stop is not None and self.level == "error":
            lines.append(f"would have stopped at step {self.stop}")
        return lines


@dataclass(frozen=True)
class Flag:
    """The step at which it was raised, and the number of contrary steps in a row."""

    since: int
    calm: int = 0


@dataclass(frozen=True)
class WatchState:
    """The state of a watch about a run.

    Args:
        counts: outcome -> number of steps.
        stop: first step at which the run would have been stopped, and stop_why.
        places: slices with their own series.
    """

    flags: Mapping[str, Flag] = field(default_factory=dict)
    first: int | None = None
    step: int | None = None
    outcome: Outcome | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    stop: int | None = None
    stop_why: str = ""
    places: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        return sum(self.counts.values())


def advance(state: WatchState, step: WatchedStep) -> tuple[WatchState, tuple[Alert, ...]]:
    """The state after a step, and its alerts."""
    flags = dict(state.flags)
    raised, lowered = [], []
    names = [VIOLATED, ERROR, LOST, TREND, *(f"{SLICE}{name}" for name in step.slices)]
    for name in names:
        is_met, flag = _is_met(name, step), flags.get(name)
        if is_met and flag is None:
            flags[name] = Flag(step.step)
            raised.append(name)
        elif is_met and flag is not None:
            flags[name] = replace(flag, calm=0)
        elif is_met is False and flag is not None:
            flags[name] = replace(flag, calm=flag.calm + 1)
            if flag.calm + 1 >= CALM:
                lowered.append((name, flags.pop(name).since))
    why = stops(step)
    after = replace(
        state,
        flags=flags,
        first=step.step if state.first is None else state.first,
        step=step.step,
        outcome=step.outcome,
        counts={**state.counts, step.outcome: state.counts.get(step.outcome, 0) + 1},
        stop=step.step if why and state.stop is None else state.stop,
        stop_why=state.stop_why or why,
    )
    return after, tuple(_alerts(step, after.stop, raised, lowered))


def stops(step: WatchedStep) -> str:
    """The reason why a run would be stopped at this step; "" if not."""
    worst = step.worst()
    if step.outcome == "violated":
        if worst is None or worst.outcome != "violated":
            return step.cause or "an enforced clause was violated"
        return f"an enforced clause was violated: {worst.clause} on {step.where(worst)}"
    return "the contract's escalation says halt" if "halt" in step.actions else ""


def _is_met(name: str, step: WatchedStep) -> bool | None:
    """Whether a step satisfies the condition of a flag; None: undecided."""
    if name == VIOLATED:
        return {"violated": True, "holds": False}.get(step.outcome)
    if name == ERROR:
        return step.outcome == "error"
    if name == TREND:
        # a trend above x2 is reported when certain, and withdrawn below x1.5
        if step.trend is None:
            return None
        return step.trend.level == "error" or (False if step.trend.ratio < GROWS else None)
    if name == LOST:
        cells = [c for c in step.enforced if c.metric in COVERAGE]
    else:
        cells = [c for c in step.enforced if c.slice == name.removeprefix(SLICE)]
    outcomes = {c.outcome for c in cells} - {"not applicable"}
    if outcomes & ({"violated", "error"} if name == LOST else {"violated"}):
        return True
    return False if outcomes == {"holds"} else None


def _alerts(
    step: WatchedStep, stop: int | None, raised: list[str], lowered: list[tuple[str, int]]
) -> Iterator[Alert]:
    """One alert per group of related changes."""

    def alert(kind: Kind, text: str, cell: CellVerdict | None = None) -> Alert:
        return _alert(kind, step, stop, text, cell)

    red = [name.removeprefix(SLICE) for name in raised if name.startswith(SLICE)]
    over = [name for name, _ in lowered]
    if VIOLATED in raised:
        worst = step.worst()
        of_cell = worst is not None and worst.outcome == "violated"
        text = f"violated on {', '.join(map(format.place, red[:3]))}" if red else "violated"
        text += f" and {count(len(red) - 3, 'more slice')}" if len(red) > 3 else ""
        yield alert("violated", text, worst if of_cell else None)
    else:
        for name in red:
            yield alert("slice red", f"{format.place(name)} became red", step.worst(name))
    if LOST in raised:
        yield alert("coverage lost", f"logprob coverage lost: {step.why}")
    elif ERROR in raised:
        yield alert("error", f"not measured: {step.why}")
    if TREND in raised and step.trend is not None:
        low, high = step.trend.interval
        text = f"the drift is x{step.trend.ratio:.2f} [{low:.2f}, {high:.2f}] of that in the first "
        yield alert("trend beyond x2", f"{text}{count(step.trend.steps, 'step')} (an estimate)")
    for name, since in lowered:
        if name == VIOLATED:
            yield alert("holds", _calm("holds again", since))
        elif name.startswith(SLICE) and VIOLATED not in over:
            slice_ = name.removeprefix(SLICE)
            text = _calm(f"{format.place(slice_)} recovered", since)
            yield alert("slice recovered", text, step.worst(slice_))
        elif name == LOST:
            yield alert("coverage back", _calm("logprob coverage restored", since))
        elif name == ERROR and LOST not in over:
            yield alert("measured again", _calm("measured again", since))
        elif name == TREND:
            yield alert("trend back", _calm(f"trend below x{GROWS:g}", since))


def _calm(what: str, since: int) -> str:
    return f"{what} after {CALM} good steps in a row (raised at step {since})"


def _alert(
    kind: Kind, step: WatchedStep, stop: int | None, text: str, cell: CellVerdict | None
) -> Alert:
    alert = Alert(
        kind,
        step.step,
        text,
        _LEVELS.get(kind, "info"),
        advice=_advice(kind, step),
        stop=stop,
    )
    if cell is None:
        return alert
    return replace(
        alert,
        slice=cell.slice,
        clause=cell.clause,
        value=cell.value,
        interval=cell.interval,
        limit=cell.limit,
        n=cell.n,
        words=trend_words(cell)
        if cell.section == CLAUSE
        else f"{format.clause(cell)}, {step.where(cell)}: {number(cell)}, n {cell.n:,}",
    )


def _advice(kind: Kind, step: WatchedStep) -> Advice | None:
    """What an alert says about the cause, and its next command; None if it has neither."""
    command = step.command if kind in _LEVELS else ""
    if kind in ("violated", "slice red") and step.advice is not None:
        return replace(step.advice, command=command, experiment="")
    return Advice("", "", command=command) if command else None


def trend_words(cell: CellVerdict) -> str:
    """A cell of the trend: what has changed, and by how much."""
    lost = f", missing at {count(cell.missing, 'step')}" if cell.missing else ""
    note = f" ({cell.note.partition(';')[0]})" if cell.note else ""
    return f"change of {cell.metric}: {number_of(cell.value)} of its threshold{note}{lost}"


def number(cell: CellVerdict) -> str:
    """The value of a cell with its interval and its limit."""
    value = " ".join(filter(None, (of_cell(cell, cell.value), interval(cell))))
    least = "at least " if limit_sign(cell) == "≥" and cell.section == "runtime" else ""
    return f"{value}, limit {least}{limit(cell)}"
