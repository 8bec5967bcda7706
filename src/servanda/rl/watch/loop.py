# Following: look, judge, tell, wait; until it is told to end.
#
# Clock and waiting are arguments.  How long a look takes, and whether the clock jumps, changes
# nothing: a step is whole by what two looks saw, and the clock only dates what is sent.

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
from servanda.rl.watch.sinks import Safely
from servanda.rl.watch.state_file import Kept
from servanda.rl.watch.step import Seen, Source
from servanda.rl.watch.transitions import Memory, advance, stops


@dataclass
class Following:
    """One watch.

    Args:
        watched: the path, as it was given.
        say: prints a line.
        once: judge what is there, and end.
        until: end after this step.
        every_s: between two looks.
        stop_file: written at the first step at which the run would be stopped.
        wait: seconds; now: unix seconds.
    """

    source: Source
    watched: str
    kept: Kept
    say: Callable[[str], None]
    sinks: Sequence[Safely] = ()
    once: bool = False
    until: int | None = None
    every_s: float = 10.0
    stop_file: Path | None = None
    wait: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.time
    memory: Memory = field(default_factory=Memory)
    met: set[Outcome] = field(default_factory=set)  # of the steps that were judged in this run
    _said: set[str] = field(default_factory=set)

    def run(self) -> Memory:
        """Follow to the end, and say the last line however it comes.

        Raises:
            ContractError: what is there cannot be followed.
            MeasurementError: with `once`, there was no step to judge.
        """
        self.memory = self.kept.load(self.source)
        if self.memory.step is not None:
            self.say(f"went on  behind step {self.memory.step}, as {self.kept.path} says")
        try:
            while not self._ended():
                self._look()
                if self.once:
                    break
                if not self._ended():
                    self.wait(self.every_s)
        finally:
            # an interrupted watch has said what it knows, and told its sinks so
            self.say(last_line(self.memory))
            for sink in self.sinks:
                sink("close")
        if self.memory.step is None:
            why = self.source.missing or self.source.left or "no step of it is whole"
            raise MeasurementError(
                why, hint="without --once a watch waits until there is something"
            )
        return self.memory

    @property
    def bad(self) -> Outcome | None:
        """What the worst step came to: no data that can be trusted, or a violation."""
        return "error" if "error" in self.met else "violated" if "violated" in self.met else None

    def _ended(self) -> bool:
        step = self.memory.step
        return self.until is not None and step is not None and step >= self.until

    def _look(self) -> None:
        for seen in self.source.look(final=self.once):
            for text in self.source.head():
                self._once(text)
            self._see(seen)
            if self._ended():
                break
        if not self.once or self.memory.step is not None:
            for reason in (self.source.missing, self.source.left):
                if reason:
                    self._once(f"{'left out' if self.once else 'waiting '} {line(reason)}")

    def _see(self, seen: Seen) -> None:
        self.memory, alerts = advance(self.memory, seen)
        self.met.add(seen.outcome)
        self.memory = replace(self.memory, places=placed(self.memory.places, seen))
        self.say(step_line(seen))
        if self.stop_file is not None and (why := stops(seen)):
            self._stop(self.stop_file, seen.step, why)
        values, at = series(seen, self.memory.places), self.now()
        for alert in alerts:
            for text in alert_lines(alert):
                self.say(text)
        for sink in self.sinks:
            sink("series", seen.step, at, values)
            for alert in alerts:
                sink("alert", alert, at, self.watched)
        # behind what was told: a watch that dies in between tells it twice rather than never
        self.kept.save(self.memory, self.source)

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def _stop(self, path: Path, step: int, why: str) -> None:
        """Tell whoever looks for the file; one that is there is left as it is."""
        data = {"servanda": "watch", "schema": 1, "watched": self.watched, "step": step, "why": why}
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(data) + "\n")
        except FileExistsError:
            return
        except OSError as error:
            raise MeasurementError(
                f"--stop-file {path} cannot be written: {error.strerror or error}",
                hint="name a file in a folder that is there",
            ) from None
        self.say(f"    stop     {path} was written, as --stop-file asks")
