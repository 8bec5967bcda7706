# One beat: a few requests, in turns of the tests, each of which adds to the evidence of a change.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import cycle

import numpy as np

from servanda.engines.http.transport import StatusError, UnreachedError
from servanda.errors import MeasurementError
from servanda.runner.heartbeat.baseline import Baseline, Replay, plain
from servanda.runner.heartbeat.beat_state import BeatState
from servanda.runner.heartbeat.endpoint import Ask, DisobedientError, Endpoint
from servanda.runner.heartbeat.response_rank import RankScorer
from servanda.theory.sampling import seed_of, uniforms
from servanda.theory.stats.bets import log_mean_exp

REPLAYS = 12  # seeded requests, each answered twice before any is replayed
_REPEATS = 0.5  # share of equal answers from which on an endpoint honours seeds
_TURNS = ("border", "rank", "border", "replay")
_BITS = 31  # of a seed that servers take
_FAILED = 3  # answers in a row that are lost before a beat ends
_GREEDY = 8  # requests at temperature 0 after a change
_REFUSED = (401, 403, 404, 429, 503)  # statuses of requests that nothing was drawn for


class _Over(Exception):  # noqa: N818 - the requests of a beat are used up
    pass


@dataclass
class Beat:
    """A beat over an endpoint.

    Args:
        state: changed in place; save: keeps it.
        now: the present, in UTC.
        scorer: None: without the rank test.
        budget: requests of a UTC day; requests: of this beat.
    """

    endpoint: Endpoint
    baseline: Baseline
    state: BeatState
    save: Callable[[], None]
    now: Callable[[], datetime]
    scorer: RankScorer | None
    budget: int
    requests: int
    sent: int = 0
    _failed: int = 0

    @property
    def today(self) -> int:
        """Requests of this UTC day."""
        return self.state.spent.get(self._day, 0)

    @property
    def left(self) -> int:
        """Requests that this beat may still send."""
        return min(self.requests - self.sent, self.budget - self.today)

    @property
    def log_e(self) -> float:
        """Evidence of a change by all tests together, nats."""
        found = [self.state.records[name].evidence.log_e for name in self.state.settings.tests]
        return log_mean_exp(np.array(found))

    @property
    def honours_seeds(self) -> bool:
        """Whether equal seeds give equal answers, as far as is known."""
        replays = self.state.replays
        return sum(one.equal for one in replays) >= _REPEATS * len(replays)

    def run(self) -> None:
        """Send the requests of this beat.

        Raises:
            UnreachedError: the server is down; no evidence is lost.
            DisobedientError: the endpoint ignores temperature or max_tokens.
            MeasurementError: three answers in a row are lost.
        """
        state = self.state
        self.endpoint.count = self._count
        if state.pending:  # of a beat that ended in the middle of a request
            self._lost(state.pending)
        if self.left <= 0:
            return
        state.beats += 1
        for name in state.settings.tests:
            record = state.records[name]
            record.evidence = record.evidence.begin()
        try:
            if not state.obeys:
                prompts = [*self.baseline.prompts]
                self.endpoint.refuse_disobedient(prompts, self.baseline.width)
                state.obeys = True
            for name in cycle(name for name in _TURNS if name in state.settings.tests):
                if not self._turn(name) or self.log_e >= math.log(1 / state.settings.alpha):
                    break
        except _Over:
            pass
        finally:
            self.save()
        if not state.changed and self.log_e >= math.log(1 / state.settings.alpha):
            by = max(state.settings.tests, key=lambda name: state.records[name].evidence.log_e)
            state.changed = f"{self.now():%FT%TZ} by {by}, after {state.asked} requests"
            self.save()
            self._compare_greedy()
            self.save()

    def _compare_greedy(self) -> None:
        """Ask for likeliest answers, as many as the day has left: they do not see the sampler."""
        if self.scorer is None:
            return
        self.requests = self.sent + _GREEDY
        rows = range(min(_GREEDY, len(self.baseline.prompts), self.left))
        equal = asked = 0
        for row, text in zip(rows, self.scorer.greedy(rows) if rows else (), strict=True):
            found = self._answer("", Ask(self.baseline.prompts[row], self.baseline.width, 0.0))
            asked += found is not None
            equal += found is not None and plain(found) == text
        self.state.greedy = (equal, asked)

    def _turn(self, name: str) -> bool:
        """One unit of a test; whether the beat goes on."""
        if self.left <= 0:
            return False
        replays = self.state.replays
        if name == "replay":
            if len(replays) < REPLAYS:
                return self._enrol()
            if not self.honours_seeds:
                return self.state.settings.tests != ("replay",)
        turn = self.state.turns.get(name, 0)
        self.state.turns[name] = turn + 1
        asked, number = self._asked(name, turn), self.state.asked
        text = self._answer(name, asked)
        if text is not None:
            getattr(self, f"_{name}")(turn, number, text)
            self.save()
        return True

    def _asked(self, name: str, turn: int) -> Ask:
        held = self.baseline
        seeded = "replay" in self.state.settings.tests
        seed = seed_of(self.state.settings.seed, "heartbeat", self.state.asked, _BITS)
        if name == "border":
            border = held.borders[turn % len(held.borders)]
            return Ask(border.prompt, 1, held.border_temperature, 1.0, seed if seeded else None)
        if name == "rank":
            prompt = held.prompts[turn % len(held.prompts)]
            return Ask(prompt, held.width, held.temperature, held.top_p, seed if seeded else None)
        one = self.state.replays[turn % len(self.state.replays)]
        return replayed(held, one.prompt, one.seed)

    def _border(self, turn: int, number: int, text: str) -> None:
        row = turn % len(self.baseline.borders)
        record, settings = self.state.records["border"], self.state.settings
        answer, classes = self.baseline.borders[row].answer(text), record.classes[row]
        place = classes.place(answer, self._uniform(number))
        record.evidence = record.evidence.after(classes.log_factors(place, settings.tolerance))
        record.classes[row] = classes.after(answer, place)

    def _rank(self, turn: int, number: int, text: str) -> None:
        assert self.scorer is not None
        record, settings = self.state.records["rank"], self.state.settings
        row = turn % len(self.baseline.prompts)
        bins = self.scorer.bins(row, text, number, settings.seed)
        factors = [
            classes.log_factors(place, settings.tolerance)
            for classes, place in zip(record.classes, bins, strict=True)
        ]
        record.evidence = record.evidence.after(np.concatenate(factors))
        record.classes = [c.after(b, b) for c, b in zip(record.classes, bins, strict=True)]

    def _replay(self, turn: int, number: int, text: str) -> None:
        record = self.state.records["replay"]
        one, classes = self.state.replays[turn % len(self.state.replays)], record.classes[0]
        answer = int(plain(text) != one.answer)
        place = classes.place(answer, self._uniform(number))
        record.evidence = record.evidence.after(classes.log_rate_factors(place))
        record.classes[0] = classes.after(answer, place)

    def _enrol(self) -> bool:
        """Let one seeded request be answered twice; replays are held to the first answer."""
        if self.left < 2:
            return False
        row, held = len(self.state.replays), self.baseline
        prompt = held.prompts[row % len(held.prompts)]
        seed = seed_of(self.state.settings.seed, "heartbeat replay", row, _BITS)
        asked = replayed(held, prompt, seed)
        first = self._answer("", asked)
        again = None if first is None else self._answer("", asked)
        if first is not None and again is not None:
            found = Replay(prompt, seed, plain(first), plain(first) == plain(again))
            self.state.replays.append(found)
            record = self.state.records["replay"]
            answer = int(not found.equal)
            record.classes[0] = record.classes[0].after(answer, answer)
        self.save()
        return True

    def _answer(self, name: str, asked: Ask) -> str | None:
        """The text of an answer; None where it is lost, and charged to its test."""
        self.state.pending = name
        try:
            text = self.endpoint.ask(asked)
        except (UnreachedError, DisobedientError):
            self.state.pending = ""
            raise
        except MeasurementError as error:
            if isinstance(error, StatusError) and error.status in _REFUSED:
                self.state.pending = ""
                raise
            self._lost(name)
            self._failed += 1
            if self._failed >= _FAILED:
                raise
            return None
        self.state.pending, self._failed = "", 0
        return text

    def _lost(self, name: str) -> None:
        if name:
            record = self.state.records[name]
            record.evidence = record.evidence.lost()
        self.state.pending = ""
        self.save()

    def _count(self) -> None:
        """Count a request before it is sent.

        Raises:
            _Over: it would be one too many.
        """
        if self.left <= 0:
            self.state.pending = ""
            raise _Over
        self.sent += 1
        self.state.count(self._day)
        self.save()

    @property
    def _day(self) -> str:
        return f"{self.now():%F}"

    def _uniform(self, number: int) -> float:
        return float(uniforms(self.state.settings.seed, "heartbeat ties", number, 1)[0])


def replayed(baseline: Baseline, prompt: str, seed: int) -> Ask:
    """The request that a seed belongs to."""
    return Ask(prompt, baseline.width, baseline.temperature, baseline.top_p, seed)
