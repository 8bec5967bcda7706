# What a heartbeat remembers: evidence, requests of each day, and the request under way.
#
# It is written before each request and after each answer, as a whole or not at all.  So a crash
# loses no count of a request, and an answer that it lost is charged as one.

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from servanda.engines.cache import hold, whole_file
from servanda.errors import MeasurementError
from servanda.runner.heartbeat.baseline import Baseline, Replay, read_json
from servanda.runner.heartbeat.response_rank import BINS, SCORES
from servanda.theory.black_box.answer_classes import RATES, STRENGTHS, AnswerClasses
from servanda.theory.black_box.restarts import Restarts

TESTS = ("border", "rank", "replay")
FORMAT = 1
_FILE, _KIND = "heartbeat.json", "state of a heartbeat"
_DAYS = 8  # of which counts of requests are kept
_ANEW = "name another --state to begin anew"


@dataclass
class TestRecord:
    """The evidence of one test; classes: of each of its requests, or of each score of a rank."""

    __test__ = False  # not one of pytest's

    evidence: Restarts
    classes: list[AnswerClasses] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """What is decided before the first answer.

    Args:
        reference: digest; url, served: of the endpoint.
        tests: that run; alpha: of all together; seed: of all draws.
        tolerance: total variation from exact probabilities that is no change.
    """

    reference: str
    url: str
    served: str
    tests: tuple[str, ...]
    alpha: float
    tolerance: float
    seed: int


@dataclass
class BeatState:
    """Everything that one beat leaves to the next.

    Args:
        spent: requests by UTC day; asked: requests ever; pending: the test whose answer is awaited.
        turns: of each test so far; beats: that have begun; obeys: whether sampling is obeyed.
        replays: of this endpoint; changed: when and how a change was found; "": none was.
        greedy: of answers at temperature 0 after a change, those of the reference kernel, and all.
    """

    settings: Settings
    records: dict[str, TestRecord]
    replays: list[Replay]
    spent: dict[str, int] = field(default_factory=dict)
    asked: int = 0
    turns: dict[str, int] = field(default_factory=dict)
    beats: int = 0
    pending: str = ""
    obeys: bool = False
    changed: str = ""
    greedy: tuple[int, int] = (0, 0)

    @classmethod
    def begin(cls, settings: Settings, baseline: Baseline) -> BeatState:
        """Before the first request."""
        borders = [
            AnswerClasses.of_probabilities(one.p) if one.p else AnswerClasses.of_draws(one.draws)
            for one in baseline.borders
        ]
        ranks = [AnswerClasses.of_probabilities((1 / BINS,) * BINS) for _ in SCORES]
        equal = sum(one.equal for one in baseline.replays)
        replay = AnswerClasses.of_draws((equal, len(baseline.replays) - equal))
        records = {
            "border": TestRecord(Restarts.of(len(STRENGTHS)), borders),
            "rank": TestRecord(Restarts.of(len(STRENGTHS) * len(SCORES)), ranks),
            "replay": TestRecord(Restarts.of(len(RATES)), [replay]),
        }
        return cls(settings, records, list(baseline.replays))

    def count(self, day: str) -> None:
        """One request more."""
        self.spent[day] = self.spent.get(day, 0) + 1
        self.spent = dict(sorted(self.spent.items())[-_DAYS:])
        self.asked += 1


class StateFolder:
    """The folder that keeps the state of one heartbeat."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / _FILE

    def load(self, settings: Settings, baseline: Baseline) -> BeatState:
        """The state to continue, or a new one.

        Raises:
            MeasurementError: damaged, of a newer version, or begun with other settings.
        """
        if not self.path.exists():
            return BeatState.begin(settings, baseline)
        told = read_json(self.path, _KIND, FORMAT, _ANEW)
        try:
            state = msgspec.convert(told["state"], BeatState)
        except (KeyError, msgspec.ValidationError) as error:
            raise MeasurementError(f"{self.path} is damaged: {error}", hint=_ANEW) from None
        before, now = asdict(state.settings), asdict(settings)
        odd = [name for name, value in before.items() if now[name] != value]
        if odd:
            name = odd[0]
            raise MeasurementError(
                f"{self.path} belongs to another heartbeat: its {name} is {before[name]}, and this "
                f"one's is {now[name]}",
                hint=f"evidence of two is not added: {_ANEW}, or go on as it was begun",
            )
        return state

    def save(self, state: BeatState) -> None:
        """Replace the file.

        Raises:
            MeasurementError: it cannot be written.
        """
        told = {"servanda": _KIND, "format": FORMAT, "state": asdict(state)}
        with whole_file(self.path, "name another --state") as made, made.open("w") as file:
            json.dump(told, file)
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One heartbeat at a time.

        Raises:
            MeasurementError: another one runs, or the folder cannot be used.
        """
        folder = self.path.parent
        hint = "wait for it, or name another --state"
        busy = MeasurementError(f"another heartbeat uses {folder}", hint=hint)
        with MeasurementError.of_system(f"{folder} cannot be used", hint="name another --state"):
            folder.mkdir(parents=True, exist_ok=True)
            held = hold(folder / ".lock", busy)
        with held:
            yield
