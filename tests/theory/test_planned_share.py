# The test of a planned share, against enumeration of every sequence of users and simulation.

import itertools
import math

import numpy as np
import pytest
from scipy.special import betaln

from servanda.gateway.routing.router import place
from servanda.theory.planned_share import PlannedShare

PRICE = math.log(7 / 0.05)  # of one cell on one of seven steps


def expected_e(test, chance):
    """The mean of the e-value over every sequence of users, one at a time.

    Args:
        chance: (earlier users) -> probability that infer serves the next one.
    """

    def mean(hits):
        if len(hits) == 9:
            return math.exp(test.log_e(sum(hits), len(hits)))
        p = chance(hits)
        return (p and p * mean((*hits, 1))) + (1 - p and (1 - p) * mean((*hits, 0)))

    return mean(())


@pytest.mark.parametrize("planned", [0.01, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("tolerance", [0.0, 0.02, 0.3])
def test_the_mean_of_the_e_value_is_at_most_1_under_the_planned_share(planned, tolerance):
    """Also if the probability moves within the tolerance, and follows the users before."""
    test = PlannedShare(planned, tolerance)
    low, high = test.low, test.high

    for chance in (
        lambda _: planned,
        lambda _: low,
        lambda _: high,
        lambda hits: (low, high)[len(hits) % 2],
        lambda hits: high if sum(hits) * 2 >= len(hits) else low,
    ):
        assert expected_e(test, chance) <= 1 + 1e-12


def test_without_a_tolerance_each_alternative_has_a_mean_of_exactly_1():
    assert expected_e(PlannedShare(0.05), lambda _: 0.05) == pytest.approx(1, abs=1e-12)


def test_the_peak_is_the_largest_over_all_beginnings():
    test, hits = PlannedShare(0.3, 0.02), [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1]

    brute = max(float(test.log_e(sum(hits[:n]), n)) for n in range(1, len(hits) + 1))

    assert test.peak(hits) == max(0.0, brute)
    assert test.peak([]) == 0.0


@pytest.mark.parametrize(
    ("hits", "users"), [(30, 1000), (60, 2000), (140, 2000), (2, 500), (500, 10_000)]
)
def test_the_grid_loses_little_to_the_beta_binomial_mixture(hits, users):
    """The closed form of Lindon and Malek, with a wide and with a narrow Beta."""
    point = hits * math.log(0.05) + (users - hits) * math.log(0.95)
    of_beta = max(
        betaln(w * 0.05 + hits, w * 0.95 + users - hits) - betaln(w * 0.05, w * 0.95) - point
        for w in (2, 20, 200)
    )

    assert float(PlannedShare(0.05).log_e(hits, users)) >= of_beta - 1.5


@pytest.mark.parametrize(("planned", "served", "users"), [(0.05, 0.03, 5000), (1.0, 0.95, 1000)])
def test_a_mismatch_is_found_in_nine_of_ten_runs(planned, served, users):
    test, rng = PlannedShare(planned, 0.02), np.random.default_rng(3)

    found = [test.peak(rng.random(users) < served) >= PRICE for _ in range(100)]

    assert sum(found) >= 90
    assert test.units_needed(served, PRICE) <= users


def requests_of_users(run, n):
    """Requests of n users in one order: few users send most of them."""
    rng = np.random.default_rng(run)
    sent = np.repeat(np.arange(n), np.minimum(1 + rng.pareto(0.9, n).astype(int), 400))
    return [f"user {run} {u}" for u in rng.permutation(sent)]


def test_users_who_send_many_requests_cause_no_false_alarm():
    """Users are the unit: with requests as units, one heavy user is a mismatch."""
    test, by_user, by_request = PlannedShare(0.05, 0.02), 0, 0
    for run in range(100):
        requests = requests_of_users(run, 400)
        hit = {u: place(b"key", "share", u) < 0.05 for u in set(requests)}
        by_user += test.peak([hit[u] for u in dict.fromkeys(requests)]) >= math.log(20)
        by_request += test.peak([hit[u] for u in requests]) >= math.log(20)

    assert by_user <= 5
    assert by_request >= 30


def test_the_places_of_users_stay_so_two_steps_may_not_be_multiplied():
    """The reason why each step is tested by itself: the mean of the product is far above 1."""
    first, then = PlannedShare(0.3), PlannedShare(0.5)
    mean = math.fsum(
        # each user by place: served on both steps, on the second alone, or on none
        math.prod((0.3, 0.2, 0.5)[p] for p in places)
        * math.exp(
            float(first.log_e(places.count(0), 8))
            + float(then.log_e(places.count(0) + places.count(1), 8))
        )
        for places in itertools.product(range(3), repeat=8)
    )

    assert mean > 1.05
