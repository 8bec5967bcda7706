# The loop of a watch: poll, judge, report, wait, until it ends.
#
# Clock and waiting are arguments.  The result does not depend on the duration of polls or jumps of
# the clock: a step is complete by comparison of two polls, and the clock only dates messages.

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from servanda.contract.model import WHOLE
from servanda.errors import MeasurementError
from servanda.judgement.clauses.base import Outcome
from servanda.judgement.verdict import EXIT_CODES
from servanda.report.cell_text import GLYPH, excess
from servanda.report.format import count, line, percent
from servanda.rl.steps.format import is_gradient
from servanda.rl.trend.changes import TREND, warned
from servanda.rl.watch.sinks import GuardedSink
from servanda.rl.watch.state_file import StateFile
from servanda.rl.watch.step import Source, WatchedStep
from servanda.rl.watch.transitions import (
    LOST,
    VIOLATED,
    Alert,
    WatchState,
    advance,
    number,
    stops,
    trend_words,
)

# The output of a watch: one line per step, a few lines per transition, one at the end.


_MARK = {"error": "✗", "warning": "!", "info": "✓"}


def step_line(step: WatchedStep) -> str:
    """Step, outcome, worst cell, its number with its limit, trend."""
    parts = [f"step {step.step:<6} {GLYPH[step.outcome]} {step.outcome:<13}"]
    worst = step.worst()
    if step.outcome == "error":
        parts.append(line(step.why))
    elif worst is not None:
        place = line(step.where(worst))
        parts.append(
            trend_words(worst)
            if worst.section == TREND
            else f"{worst.clause}, {place}: {number(worst)}"
        )
    else:
        parts.append("no trained token")
    parts += [f"! {line(text)}" for text in warned(step.cells)]
    if step.trend is not None:
        parts.append(f"trend x{step.trend.ratio:.2f}")
    if step.drafts is not None:
        parts.append(f"drafts accepted {percent(step.drafts)}")
    if step.outcome == "inconclusive" and step.needs_tokens is not None:
        parts.append(f"needs about {count(step.needs_tokens, 'token')}, has {step.judged:,}")
    if step.follow:
        parts.append(line(step.follow))
    if step.again:
        parts.append("written again")
    return "  ".join(part for part in parts if part).rstrip()


def alert_lines(alert: Alert) -> list[str]:
    head, *rest = (line(text) for text in alert.lines())
    return [f"  {_MARK[alert.level]} {head}", *(f"    {text}" for text in rest)]


def last_line(state: WatchState) -> str:
    if state.step is None:
        return "no complete step was found"
    counts = ", ".join(f"{n} {outcome}" for outcome, n in state.counts.items())
    steps = count(state.steps, "step")
    parts = [f"watched {steps}, {state.first} to {state.step}: {counts}"]
    for name, what in ((VIOLATED, "red"), (LOST, "logprob coverage lost")):
        if name in state.flags:
            parts.append(f"{what} since step {state.flags[name].since}")
    if state.stop is None:
        parts.append("would not have stopped")
    else:
        parts.append(f"would have stopped at step {state.stop}")
    return " · ".join(parts)


# Series: the few metrics of a step for plots.
#
# At most MOST, so that a page stays readable.  Missing values are omitted: a gap in a plot is
# better than a zero.


MOST = 13
_AT_FIRST, _LATER = 2, 2  # slices with a series: the worst at first, then newly violated ones

# name -> description
WHOLES: Mapping[str, str] = {
    "outcome": "0 holds, 1 violated, 3 inconclusive, 4 error",
    "tokens": "trained tokens of the step",
    "coverage": "share of the trained tokens that have both logprobs",
    "gradient_share": "bound of the bias of the policy gradient, in units of the largest "
    "|advantage| x the largest score norm: twice the mean total variation",
    "clipped_share": "share of all tokens that are clipped before any update",
    "worst": "the largest value on any slice, divided by its limit",
    "trend": "mean |log ratio| of the last five steps divided by that of the first five",
    "staleness": "weight updates between sampling and training, of the oldest token",
    "draft_acceptance": "share of the draft tokens that the target accepted",
}
assert len(WHOLES) + _AT_FIRST + _LATER == MOST


def placed(places: tuple[str, ...], step: WatchedStep) -> tuple[str, ...]:
    """The slices with their own series, after a step.

    The worst two of the first step that has any, and the first two others that are violated. A
    place is never reassigned, so that a run has at most MOST series in total.
    """
    cells = {name: step.worst(name) for name in step.slices}
    known = {name: cell for name, cell in cells.items() if cell is not None}
    if not places:
        worst = sorted(known, key=lambda name: -excess(known[name]))
        places = tuple(worst[:_AT_FIRST])
    red = [n for n, c in known.items() if c.outcome == "violated" and n not in places]
    return (*places, *sorted(red, key=lambda n: -excess(known[n])))[: _AT_FIRST + _LATER]


def series(step: WatchedStep, places: tuple[str, ...]) -> dict[str, float]:
    """Name -> number of a step, without missing ones."""
    gradient = next((c for c in step.cells if c.slice == WHOLE and is_gradient(c)), None)
    share = 2 * gradient.value if gradient is not None and gradient.value is not None else None
    gap = step.of_whole("weight_gap")  # without a correction already twice a TV
    clipped, worst = step.of_whole("abs_log_ratio_nats"), step.worst()
    values: dict[str, float | None] = {
        "outcome": float(EXIT_CODES[step.outcome]),
        "tokens": float(step.tokens),
        "coverage": step.coverage.value if step.coverage else None,
        "gradient_share": share if gap is None else gap.value,
        "clipped_share": clipped.value if clipped else None,
        "worst": excess(worst) if worst else None,
        "trend": step.trend.ratio if step.trend else None,
        "staleness": step.staleness,
        "draft_acceptance": step.drafts,
    }
    for name in places:
        cell = step.worst(name)
        values[f"slice/{name}"] = excess(cell) if cell else None
    return {f"servanda/{name}": value for name, value in values.items() if value is not None}


@dataclass
class WatchLoop:
    """One watch.

    Args:
        watched: the path, as given.
        write: prints a line.
        once: judge the existing steps, and end.
        until: end after this step.
        every_s: seconds between two polls.
        stop_file: written at the first step at which the run would be stopped.
        wait: sleeps for seconds; now: returns unix seconds.
        outcomes: outcomes of the steps judged by this process.
    """

    source: Source
    watched: str
    state_file: StateFile
    write: Callable[[str], None]
    sinks: Sequence[GuardedSink] = ()
    once: bool = False
    until: int | None = None
    every_s: float = 10.0
    stop_file: Path | None = None
    wait: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.time
    state: WatchState = field(default_factory=WatchState)
    outcomes: set[Outcome] = field(default_factory=set)
    _written: set[str] = field(default_factory=set)

    def run(self) -> WatchState:
        """Follow the path to the end, and always write the last line.

        Raises:
            ContractError: the path cannot be followed.
            MeasurementError: with `once`, there was no step to judge.
        """
        self.state = self.state_file.load(self.source)
        if self.state.step is not None:
            self.write(f"resumed  after step {self.state.step}, from {self.state_file.path}")
        try:
            while not self._ended():
                self._poll()
                if self.once:
                    break
                if not self._ended():
                    self.wait(self.every_s)
        finally:
            # an interrupted watch has written its state, and closed its notifiers
            self.write(last_line(self.state))
            for sink in self.sinks:
                sink("close")
        if self.state.step is None:
            why = self.source.missing or self.source.left or "no step is complete"
            raise MeasurementError(why, hint="leave out --once to wait for the first step")
        return self.state

    @property
    def bad(self) -> Outcome | None:
        """The worst outcome of the steps: an error or a violation."""
        worst: tuple[Outcome, ...] = ("error", "violated")
        return next((outcome for outcome in worst if outcome in self.outcomes), None)

    def _ended(self) -> bool:
        step = self.state.step
        return self.until is not None and step is not None and step >= self.until

    def _poll(self) -> None:
        for step in self.source.poll(final=self.once):
            for text in self.source.head():
                self._write_once(text)
            self._report(step)
            if self._ended():
                break
        if not self.once or self.state.step is not None:
            for reason in (self.source.missing, self.source.left):
                if reason:
                    self._write_once(f"{'left out' if self.once else 'waiting '} {line(reason)}")

    def _report(self, step: WatchedStep) -> None:
        self.state, alerts = advance(self.state, step)
        self.outcomes.add(step.outcome)
        self.state = replace(self.state, places=placed(self.state.places, step))
        self.write(step_line(step))
        if self.stop_file is not None and (why := stops(step)):
            self._write_stop_file(self.stop_file, step.step, why)
        values, at = series(step, self.state.places), self.now()
        for alert in alerts:
            for text in alert_lines(alert):
                self.write(text)
        for sink in self.sinks:
            sink("series", step.step, at, values)
            for alert in alerts:
                sink("alert", alert, at, self.watched)
        # after the report: a watch that dies in between reports twice rather than never
        self.state_file.save(self.state, self.source)

    def _write_once(self, text: str) -> None:
        if text not in self._written:
            self._written.add(text)
            self.write(text)

    def _write_stop_file(self, path: Path, step: int, why: str) -> None:
        """Write the stop file; an existing one is not changed."""
        data = {"servanda": "watch", "schema": 1, "watched": self.watched, "step": step, "why": why}
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(data) + "\n")
        except FileExistsError:
            return
        except OSError as error:
            raise MeasurementError(
                f"--stop-file {path} cannot be written: {error.strerror or error}",
                hint="choose a file in an existing folder",
            ) from None
        self.write(f"    stop     {path} was written, as --stop-file asks")
