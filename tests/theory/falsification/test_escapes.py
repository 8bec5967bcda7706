# Escapes from the bound of the gradient: each held against plain enumeration.

import math
from itertools import product

import numpy as np
import pytest
from benchmarks.theory.counterexamples import ESCAPES

from servanda.theory.bounds.assumptions import ASSUMPTIONS

every = pytest.mark.parametrize("name", [*ESCAPES])
DRIFT = 0.1


@every
def test_an_escape_keeps_its_drift_at_every_scale(name):
    drifts = [ESCAPES[name].at(DRIFT, scale).drift for scale in (10, 100, 1000)]

    assert max(drifts) - min(drifts) < 1e-12
    assert DRIFT - 1e-12 <= max(drifts) <= 0.112


@every
def test_an_escape_escapes(name):
    """The bias grows without end, or stays while what is said of it vanishes."""
    points = [ESCAPES[name].at(DRIFT, scale) for scale in (10, 100, 1000, 10_000)]

    if points[0].said == 0:
        assert all(p.said == 0 for p in points)
        assert points[-1].exact > 50 * points[0].exact
    else:
        ratios = [p.ratio for p in points]
        assert ratios == sorted(ratios)
        assert ratios[-1] > 25 * ratios[0]


@every
def test_without_drift_nothing_escapes(name):
    assert ESCAPES[name].at(1e-9, 100).exact < 1e-6


@every
def test_an_escape_names_an_assumption_and_a_way_out(name):
    escape = ESCAPES[name]

    assert escape.assumption in {*ASSUMPTIONS, ""}
    assert escape.about and escape.instead


def answers(steps):
    return np.array([*product((0, 1), repeat=steps)])


def test_the_bias_of_token_level_correction_is_that_of_enumerated_answers():
    """Four coin flips, sixteen answers, the worst of their rewards by the sign of each count."""
    steps, p, q = 4, 0.5, 0.5 * math.exp(DRIFT)
    one_LT = answers(steps)
    P_L = np.where(one_LT, p, 1 - p).prod(axis=1)
    Q_L = np.where(one_LT, q, 1 - q).prod(axis=1)
    w_LT = np.where(one_LT, p / q, (1 - p) / (1 - q))
    g_LT = one_LT - p
    term_L = Q_L * (w_LT * g_LT).sum(axis=1) - P_L * g_LT.sum(axis=1)
    by_count = [abs(term_L[one_LT.sum(axis=1) == k].sum()) for k in range(steps + 1)]

    point = ESCAPES["long answers, corrected token by token"].at(DRIFT, steps)

    assert point.exact == pytest.approx(sum(by_count), rel=1e-12)


def test_the_bias_of_a_length_is_that_of_two_answers():
    q, T = 0.5 * math.exp(DRIFT), 10
    wanted = 0.5 * (1.0 * 0.5 / 1) + 0.5 * (-1.0 * -0.5 / T)
    computed = q * (1.0 * 0.5 / 1) + (1 - q) * (-1.0 * -0.5 / T)
    tokens, gap = q + (1 - q) * T, 2 * (q - 0.5)

    point = ESCAPES["answers divided by their own length"].at(DRIFT, T)

    assert point.exact == pytest.approx(abs(computed - wanted), rel=1e-12)
    assert point.said == pytest.approx(gap / tokens, rel=1e-12)


def test_what_infer_cannot_draw_is_the_whole_bias_of_importance_weights():
    missing = 1 - math.exp(-DRIFT)

    point = ESCAPES["missing support"].at(DRIFT, 1)

    # E_p[A g] has the missing token's term, E_q[w A g] has none
    assert point.exact == pytest.approx(missing * (1 - missing), rel=1e-12)
    assert point.said == 0
