# The smallest change that a heartbeat would have detected by now, by simulation of its own tests.
#
# The change is there from the first beat on: with probability d an answer is of one class, which is
# another than the most likely, and otherwise as before.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from servanda.runner.heartbeat.baseline import Baseline
from servanda.runner.heartbeat.beat_state import BeatState
from servanda.theory.black_box.answer_classes import AnswerClasses
from servanda.theory.black_box.restarts import Restarts
from servanda.theory.stats.bets import Floats

_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
_RUNS = 9  # of which more than half have to detect it
_LONGEST = 400  # units that are simulated at most: a longer heartbeat detects no less


@dataclass(frozen=True)
class Planned:
    """A test to simulate: its requests' classes, true probabilities, and the class that gains."""

    classes: Sequence[AnswerClasses]
    p: Sequence[Floats]
    gains: int
    rates: bool = False


def smallest_changes(baseline: Baseline, state: BeatState) -> dict[str, float]:
    """Total variation from the reference that each test would have detected; absent: none."""
    settings, found = state.settings, {}
    start = BeatState.begin(settings, baseline)
    price = math.log(len(settings.tests) / settings.alpha)
    for name in settings.tests:
        evidence = state.records[name].evidence
        if not evidence.n:
            continue
        classes = start.records[name].classes
        if name == "replay":
            equal = sum(one.equal for one in state.replays)
            classes = [AnswerClasses.of_draws((equal, len(state.replays) - equal))]
        plan = Planned(classes[:1] if name == "rank" else classes, _truths(classes), 1)
        if name == "rank":
            plan = Planned(plan.classes, plan.p, len(plan.p[0]) - 1)
        elif name == "replay":
            plan = Planned(plan.classes, plan.p, 1, rates=True)
        n = min(evidence.n, _LONGEST)
        beats = max(1, round(evidence.beats * n / evidence.n))
        for share in _SHARES:
            if _detected(plan, share, n, beats, price, settings.tolerance):
                away = [share * (1 - p[plan.gains]) for p in plan.p]
                found[name] = float(np.mean(away))
                break
    return found


def _truths(classes: Sequence[AnswerClasses]) -> list[Floats]:
    """The reference's probabilities, or its draws' shares."""
    shares = [np.array(one.exact or one.counts, dtype=np.float64) for one in classes]
    return [share / share.sum() for share in shares]


def _detected(
    plan: Planned, share: float, n: int, beats: int, price: float, tolerance: float
) -> bool:
    """Whether more than half of the simulated heartbeats find the change within n units."""
    found = 0
    for run in range(_RUNS):
        rng = np.random.default_rng([run, n])
        classes = list(plan.classes)
        alternatives = len(_factors(plan, classes[0], 0, tolerance))
        evidence = Restarts.of(alternatives)
        for unit in range(n):
            if unit * beats // n >= evidence.beats:
                evidence = evidence.begin()
            row = unit % len(classes)
            moved = (1 - share) * plan.p[row]
            moved[plan.gains] += share
            answer = int(rng.choice(len(moved), p=moved))
            place = classes[row].place(answer, rng.random())
            evidence = evidence.after(_factors(plan, classes[row], place, tolerance))
            classes[row] = classes[row].after(answer, place)
            if evidence.log_e >= price:
                found += 1
                break
    return found > _RUNS // 2


def _factors(plan: Planned, classes: AnswerClasses, place: int, tolerance: float) -> Floats:
    return classes.log_rate_factors(place) if plan.rates else classes.log_factors(place, tolerance)
