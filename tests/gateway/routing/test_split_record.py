# The split of a step on live traffic, beside the test of its final counts and by simulation.

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.gateway.controller.gateways import SplitRecord
from servanda.theory.planned_share import PlannedShare
from servanda.traces.request_log import BREAKER, FAILOVER, Assignment

STEP = ("run", "canary-1")


def record(planned=0.2, tolerance=0.02):
    return SplitRecord(*STEP, planned, tolerance)


def user(key, pool, **more):
    return Assignment(*STEP, at=float(key), key=f"u{key}", pool=pool, **more)


def moved(one):
    return Assignment(one.run, one.leg, one.at, one.key, "stable", because=FAILOVER)


# outcome of each user: who serves, whether infer fails, and whether the line comes twice
OUTCOMES = st.lists(st.tuples(st.sampled_from(["infer", "stable"]), st.booleans(), st.booleans()))


@given(OUTCOMES, st.randoms(use_true_random=False))
def test_the_counts_are_those_of_the_users_served(outcomes, rng):
    split, waiting, served = record(), [], 0
    for key, (pool, fails, twice) in enumerate(outcomes):
        one = user(key, pool)
        split.record([one, one] if twice else [one])
        split.record([Assignment("run", "canary-2", 0.0, f"v{key}", "infer")])
        served += pool == "infer" and not fails
        if pool == "infer" and fails:
            waiting.append(moved(one))
        if rng.random() < 0.5:
            rng.shuffle(waiting)
            split.record(waiting)  # and once more at the end: nothing is counted twice
    split.record(waiting)

    assert (split.users, split.infer) == (len(outcomes), served)
    assert split.causes[FAILOVER] == len(waiting)
    if outcomes:
        test = PlannedShare(0.2, 0.02)
        assert split.log_e >= max(0.0, float(test.log_e(served, len(outcomes)))) - 1e-12


def test_users_that_the_share_does_not_concern_are_named_and_not_counted():
    split = record()
    split.record([user(0, "stable", apart="first=b pinned"), user(1, "stable", because=BREAKER)])
    assert (split.users, split.infer, split.causes[BREAKER]) == (1, 0, 1)
    assert split.apart == {"first=b pinned": 1}
    split.record([moved(user(0, "infer"))])
    assert (split.users, split.infer, split.log_e) == (1, 0, split.log_e)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0.0, 0.05])
def test_a_right_split_is_rarely_called_wrong_however_late_failures_are_known(failing):
    """Infer fails for 1 of 20, within the tolerance, and it is known up to 50 users later."""
    runs, price, alarms = 400, math.log(10), 0
    for seed in range(runs):
        rng, split, late = random.Random(seed), record(0.5, 0.06), {}
        for key in range(600):
            one = user(key, "infer" if rng.random() < 0.5 else "stable")
            split.record([one, *late.pop(key, ())])
            if one.hit and rng.random() < failing:
                late.setdefault(key + rng.randrange(1, 50), []).append(moved(one))
        alarms += split.log_e >= price
    assert alarms <= runs / 10 + 3 * math.sqrt(runs * 0.1 * 0.9)


@pytest.mark.parametrize(("share", "failing"), [(0.1, 0.0), (0.3, 0.0), (0.2, 0.5)])
def test_a_wrong_split_is_found(share, failing):
    rng, split = random.Random(5), record(0.2)
    for key in range(2000):
        one = user(key, "infer" if rng.random() < share else "stable")
        split.record([one])
        if one.hit and rng.random() < failing:
            split.record([moved(one)])
    assert split.log_e > math.log(1000)
