# What a drift of logits can do to a distribution, against exact arithmetic.

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from benchmarks.theory.theorems.logits import (
    chi2_from_osc,
    hellinger2_from_osc,
    log_ratio_bounds,
    tv_from_log_ratio,
    tv_from_osc_pmax,
)

from servanda.errors import EvidenceError
from servanda.theory.bounds.drift import abs_log_ratio_from_osc, kl_from_osc, tv_from_osc
from tests.theory.bounds import enumerated

OF_OSC = (tv_from_osc, kl_from_osc, chi2_from_osc, hellinger2_from_osc, abs_log_ratio_from_osc)
OSCS = (1e-12, 1e-8, 1e-3, 0.125, 0.49, 0.5, 0.51, 1.0, 3.0, 30.0, 300.0)


@pytest.fixture(autouse=True)
def many_digits():
    with localcontext() as context:
        context.prec = 120
        yield


# The closed forms, with 120 digits: what cancels in float64 does not cancel here.


def exact_tv(o):
    root = (o / 2).exp()
    return (root - 1) / (root + 1)


def exact_kl(o):
    return ((o.exp() - 1) / o).ln() - 1 + o / (o.exp() - 1)


def exact_chi2(o):
    return (((o / 2).exp() - (-o / 2).exp()) / 2) ** 2


def exact_hellinger2(o):
    return 1 - 2 / ((o / 4).exp() + (-o / 4).exp())


def moved(p, ratio):
    """p with the first token's odds multiplied: a drift of two levels, in exact numbers."""
    first = p * ratio / (p * ratio + 1 - p)
    return (p, 1 - p), (first, 1 - first)


@pytest.mark.parametrize("osc", OSCS)
@pytest.mark.parametrize(
    ("bound", "exact"),
    [
        (tv_from_osc, exact_tv),
        (kl_from_osc, exact_kl),
        (chi2_from_osc, exact_chi2),
        (hellinger2_from_osc, exact_hellinger2),
    ],
)
def test_no_digit_is_lost_from_equal_kernels_to_unrelated_ones(bound, exact, osc):
    assert bound(osc).item() == pytest.approx(float(exact(Decimal(osc))), rel=2e-14, abs=0)


def test_kl_stays_under_the_eighth_that_is_usually_quoted():
    osc_N = np.geomspace(1e-6, 100.0, 500)
    assert (kl_from_osc(osc_N) <= osc_N**2 / 8).all()


def test_odds_times_nine_attain_chi2_and_hellinger():
    p, q = moved(Fraction(1, 2), 9)
    assert sum(a * a / b for a, b in zip(p, q, strict=True)) - 1 == Fraction(16, 9)
    assert chi2_from_osc(math.log(9)).item() == pytest.approx(16 / 9, rel=1e-15)
    p, q = moved(Fraction(1, 4), 9)
    affinity = sum(math.sqrt(a * b) for a, b in zip(p, q, strict=True))
    assert hellinger2_from_osc(math.log(9)).item() == pytest.approx(1 - affinity, rel=1e-14)


@pytest.mark.parametrize("ratio", [2, 9, 100])
def test_of_a_thousand_masses_none_gains_more_than_the_bound_and_one_nearly_does(ratio):
    gains = []
    for thousandth in range(1, 1000):
        p, q = moved(Fraction(thousandth, 1000), ratio)
        gains.append(q[0] - p[0])
    bound = tv_from_osc(math.log(ratio)).item()
    assert 0.9999 * bound < max(gains) <= bound * (1 + 1e-15)


@pytest.mark.parametrize("bound", OF_OSC)
def test_no_drift_is_no_divergence_and_more_osc_never_bounds_less(bound):
    osc_N = np.concatenate([[0.0], np.geomspace(1e-9, 2e3, 4001), [np.inf]])
    assert bound(0.0).item() == 0.0
    assert (bound(osc_N)[1:] >= bound(osc_N)[:-1]).all()


@pytest.mark.parametrize(
    ("bound", "limit"),
    [
        (tv_from_osc, 1.0),
        (kl_from_osc, math.inf),
        (chi2_from_osc, math.inf),
        (hellinger2_from_osc, 1.0),
        (abs_log_ratio_from_osc, math.inf),
        (tv_from_log_ratio, 1.0),
    ],
)
def test_a_token_that_only_one_side_draws_leaves_the_trivial_bound(bound, limit):
    assert bound(math.inf).item() == limit


def test_the_largest_finite_osc_is_no_special_case():
    assert kl_from_osc(1e4).item() == pytest.approx(1e4 - math.log(1e4) - 1)
    assert chi2_from_osc(1e4).item() == math.inf  # float64 ends


@pytest.mark.parametrize("bound", [*OF_OSC, tv_from_log_ratio])
def test_rows_of_any_shape_are_bounded_one_by_one(bound):
    osc_SN = np.array([[0.0, 0.3], [0.7, 20.0]])
    assert bound(osc_SN).shape == (2, 2)
    assert bound(osc_SN).tolist() == [[bound(o).item() for o in row] for row in osc_SN]


@pytest.mark.parametrize("rho", [1e-9, 0.1, 2.0])
def test_a_log_ratio_within_rho_is_an_osc_within_twice_rho(rho):
    assert tv_from_log_ratio(rho).item() == tv_from_osc(2 * rho).item()


# One token.


def test_a_nearly_sure_token_falls_by_more_than_the_linear_claim():
    """For p = .9 and osc 1 the claim |log q/p| <= osc (1-p) says .1; .159 happens."""
    low, high = log_ratio_bounds(math.log(0.9), 1.0, math.log(0.1))
    assert -low.item() == pytest.approx(0.1586, abs=5e-5)
    assert -low.item() > 1.0 * 0.1 > high.item()
    # and it does happen: every other token rises by 1
    assert low.item() == pytest.approx(math.log(0.9 / (0.9 + 0.1 * math.e)) - math.log(0.9))


@pytest.mark.parametrize("osc", [1e-8, 0.125, 1.0, 5.0, 90.0, 800.0])
@pytest.mark.parametrize("log1mp", [-60.0, -23.0, -1.0, -0.1, -1e-4])
def test_a_tokens_range_keeps_its_digits_for_rare_and_for_sure_tokens(osc, log1mp):
    rest = Decimal(log1mp).exp()
    p = 1 - rest
    low, high = log_ratio_bounds(float(p.ln()), osc, log1mp)
    assert low.item() == pytest.approx(
        float(-(p + rest * Decimal(osc).exp()).ln()), rel=1e-12, abs=0
    )
    assert high.item() == pytest.approx(
        float(-(p + rest * Decimal(-osc).exp()).ln()), rel=1e-12, abs=0
    )


def test_a_tokens_range_is_within_osc_and_around_zero():
    logp_N = -np.geomspace(1e-12, 50.0, 200)
    log1mp_N = np.log(-np.expm1(logp_N))
    for osc in (0.0, 1e-3, 1.0, 40.0):
        low_N, high_N = log_ratio_bounds(logp_N, osc, log1mp_N)
        assert (low_N <= 0.0).all()
        assert (high_N >= 0.0).all()
        assert (np.maximum(-low_N, high_N) <= osc * (1 + 1e-12)).all()


@pytest.mark.parametrize(
    ("logp", "osc", "log1mp", "low", "high"),
    [
        (0.0, 0.5, -math.inf, 0.0, 0.0),  # sure, and nothing else can be drawn
        (0.0, math.inf, -math.inf, -math.inf, 0.0),  # unless only the other side can
        (math.log(0.5), math.inf, math.log(0.5), -math.inf, math.log(2)),
        (-math.inf, 0.5, 0.0, -0.5, 0.5),  # the limit of ever rarer tokens
    ],
)
def test_a_tokens_range_at_the_ends(logp, osc, log1mp, low, high):
    found = log_ratio_bounds(logp, osc, log1mp)
    assert [x.item() for x in found] == [pytest.approx(low), pytest.approx(high)]


# A peak.


def test_a_peak_of_99_percent_bounds_the_drift_of_bf16_twentyfold():
    osc = 2 * 0.0625
    assert tv_from_osc(osc).item() == pytest.approx(0.0312, abs=5e-5)
    assert tv_from_osc_pmax(osc, 0.01).item() == pytest.approx(0.0013, abs=5e-5)


@pytest.mark.parametrize("rest", [Fraction(1, 10**12), Fraction(1, 100), Fraction(1, 5)])
@pytest.mark.parametrize("ratio", [2, 9])
def test_what_a_set_of_that_mass_gains_is_the_bound_of_a_peak(rest, ratio):
    p, q = moved(rest, ratio)
    assert tv_from_osc_pmax(math.log(ratio), float(rest)).item() == pytest.approx(
        float(q[0] - p[0]), rel=1e-14, abs=0
    )


def test_a_flat_row_is_bounded_as_any_row():
    osc_N = np.array([1e-6, 0.1, 1.0, 10.0, 3e3, np.inf])
    assert tv_from_osc_pmax(osc_N, 0.5).tolist() == tv_from_osc(osc_N).tolist()


def test_a_peak_never_bounds_worse_than_none_and_more_rest_never_bounds_less():
    osc_N1 = np.geomspace(1e-6, 2e3, 60)[:, None]
    rest_M = np.concatenate([[0.0], np.geomspace(1e-300, 1.0, 200)])
    bound_NM = tv_from_osc_pmax(osc_N1, rest_M)
    assert (bound_NM <= tv_from_osc(osc_N1) * (1 + 1e-15)).all()
    assert (np.diff(bound_NM, axis=1) >= -1e-15).all()


@pytest.mark.parametrize(
    ("osc", "rest", "bound"), [(0.0, 0.3, 0.0), (5e3, 0.0, 0.0), (math.inf, 0.0, 1.0)]
)
def test_a_peak_at_the_ends(osc, rest, bound):
    assert tv_from_osc_pmax(osc, rest).item() == bound


@pytest.mark.parametrize("osc", [-0.1, math.nan, [0.5, -0.1]])
@pytest.mark.parametrize("bound", OF_OSC)
def test_a_negative_osc_is_refused(bound, osc):
    with pytest.raises(EvidenceError) as refused:
        bound(osc)
    found = "nan" if osc is math.nan else "-0.1"
    assert str(refused.value) == (
        f"osc is {found}, outside of [0, inf]\n"
        "  hint: max - min of a drift, as the metric logit_osc_nats"
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: tv_from_log_ratio(-1.0), "rho is -1, outside of [0, inf]"),
        (
            lambda: log_ratio_bounds(0.1, 1.0, -2.0),
            "logp is 0.1, outside of [-inf, 0]\n  hint: logprobs of the processed row, in nats",
        ),
        (
            lambda: log_ratio_bounds(-0.1, 1.0, 0.9),
            "log1mp is 0.9, outside of [-inf, 0]\n  hint: logprobs of the processed row, in nats",
        ),
        (
            lambda: tv_from_osc_pmax(1.0, 1.5),
            "rest is 1.5, outside of [0, 1]\n  hint: rest is 1 - p_max",
        ),
    ],
)
def test_what_is_no_row_is_refused(call, text):
    with pytest.raises(EvidenceError) as refused:
        call()
    enumerated.refused(refused, text)
