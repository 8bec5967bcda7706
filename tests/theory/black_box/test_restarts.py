# The heartbeat's e-processes: false alarms at any time, and a late change that is found.

import math

import numpy as np
import pytest

from servanda.theory.black_box.answer_classes import RATES, STRENGTHS, AnswerClasses
from servanda.theory.black_box.restarts import Restarts

ALPHA, BEATS, EACH = 0.1, 20, 5
P = (0.48, 0.42, 0.1)


def watched(rng, before, truth, *, change=None, tolerance=0.0, beats=BEATS):
    """The beat at which log 1/ALPHA was first reached; None: it never was."""
    state, classes = Restarts.of(len(STRENGTHS)), before
    for beat in range(beats):
        state = state.begin()
        p = truth if change is None or beat < change[0] else change[1]
        for _ in range(EACH):
            answer = int(rng.choice(len(p), p=p))
            place = classes.place(answer, rng.random())
            state = state.after(classes.log_factors(place, tolerance))
            classes = classes.after(answer, place)
            if state.log_e >= math.log(1 / ALPHA):
                return beat
    return None


def alarms(runs, make):
    """A share of runs, and three standard errors above the promise."""
    found = sum(make(np.random.default_rng([7, run])) is not None for run in range(runs))
    return found / runs, ALPHA + 3 * math.sqrt(ALPHA / runs)


def test_exact_probabilities_give_no_more_false_alarms_than_promised_at_any_time():
    share, most = alarms(600, lambda rng: watched(rng, AnswerClasses.of_probabilities(P), P))

    assert share <= most


@pytest.mark.parametrize("size", [3, 30])
def test_draws_give_no_more_false_alarms_than_promised_however_few_they_are(size):
    """The reference is drawn anew in each run: its own uncertainty counts."""

    def run(rng):
        draws = AnswerClasses.of_draws(tuple(rng.multinomial(size, P).tolist()))
        return watched(rng, draws, P)

    share, most = alarms(600, run)

    assert share <= most


def test_a_distribution_within_the_tolerance_is_no_change():
    """Without the tolerance the same distribution is found out: the allowance is what holds."""
    near, tolerance = (0.58, 0.32, 0.1), 0.1

    def run(allowed, beats):
        exact = AnswerClasses.of_probabilities(P)
        return lambda rng: watched(rng, exact, near, tolerance=allowed, beats=beats)

    share, most = alarms(200, run(tolerance, 40))

    assert share <= most
    assert alarms(50, run(0.0, 120))[0] > 0.5


def test_every_factor_has_a_mean_of_at_most_one():
    """By enumeration: of exact classes, and of ranks over the draws of any distribution."""
    exact = AnswerClasses(exact=P, learned=(3.0, 0.0, 1.0))
    factors = np.exp([exact.log_factors(k) for k in range(3)])
    assert (np.array(P) @ factors <= 1 + 1e-12).all()

    draws = AnswerClasses(counts=(4, 9, 0), learned=(0.0, 5.0, 0.0))
    # given the bag of all draws, the new answer is any of them with equal probability
    bag = np.array([5, 9, 0])
    mean = np.zeros(len(STRENGTHS))
    v = (np.arange(4000) + 0.5) / 4000
    for answer, share in enumerate(bag / bag.sum()):
        pool = list(bag)
        if pool[answer]:
            pool[answer] -= 1
            held = AnswerClasses(counts=tuple(pool), learned=draws.learned)
            factor = [np.exp(draws.log_factors(held.place(answer, x))) for x in v]
            mean += share * np.mean(factor, axis=0)
    assert (mean <= 1 + 1e-3).all()


def test_a_change_after_a_long_time_is_found_although_nothing_changed_before():
    """A product without restarts has lost by then what the change can earn."""
    late = (60, (0.1, 0.8, 0.1))
    exact = AnswerClasses.of_probabilities(P)
    found = [
        watched(np.random.default_rng([9, run]), exact, P, change=late, beats=80)
        for run in range(40)
    ]
    after = [beat - 60 for beat in found if beat is not None and beat >= 60]

    assert len(after) >= 36
    assert np.median(after) <= 8


def test_a_lost_unit_is_evidence_of_nothing():
    state = Restarts.of(2).begin().after(np.array([1.0, 0.5]))

    lost = state.lost()

    assert lost.log_e < state.log_e
    assert (lost.n, lost.missing) == (1, 1)


def test_without_a_beat_there_is_no_evidence():
    assert Restarts.of(3).log_e == 0.0
    assert Restarts.of(3).begin().log_e == pytest.approx(0.0)


def test_answers_that_no_longer_repeat_are_found_in_a_few_requests():
    """Of 12 pairs all were equal, and then none is."""
    state, replay = Restarts.of(len(RATES)).begin(), AnswerClasses.of_draws((12, 0))
    rng, asked = np.random.default_rng(3), 0
    while state.log_e < math.log(100):
        place = replay.place(1, rng.random())
        state = state.after(replay.log_rate_factors(place))
        replay, asked = replay.after(1, place), asked + 1

    assert 3 <= asked <= 6


def test_answers_that_repeat_as_often_as_before_are_no_change():
    def run(rng):
        equal = int(rng.binomial(12, 0.7))
        state, replay = Restarts.of(len(RATES)), AnswerClasses.of_draws((equal, 12 - equal))
        for _ in range(BEATS):
            state = state.begin()
            for _ in range(EACH):
                answer = int(rng.random() >= 0.7)
                place = replay.place(answer, rng.random())
                state = state.after(replay.log_rate_factors(place))
                replay = replay.after(answer, place)
                if state.log_e >= math.log(1 / ALPHA):
                    return True
        return None

    share, most = alarms(600, run)

    assert share <= most
