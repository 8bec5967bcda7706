# The loop of a watch: poll, judge, report, wait, until it ends.
#
# Clock and waiting are arguments.  The result does not depend on the duration of polls or jumps of
# the clock: a step is complete by comparison of two polls, and the clock only dates messages.

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from servanda.errors import MeasurementError
from servanda.judgement.clauses.base import Outcome
from servanda.report.format import line
from servanda.rl.watch.report import alert_lines, last_line, step_line
from servanda.rl.watch.series import placed, series
from servanda.rl.watch.sinks import GuardedSink
from servanda.rl.watch.state_file import StateFile
from servanda.rl.watch.step import Source, WatchedStep
from servanda.rl.watch.transitions import WatchState, advance, stops


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
