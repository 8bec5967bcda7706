# The gap of a weighting, from what else is known: by hand, and against two-level drift.

import math

import numpy as np
import pytest
from benchmarks.theory.theorems.weighting_gap import tis_gap_from_chi2
from benchmarks.theory.weighting_gap import exact_gap
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.theory.bounds.importance_weights import (
    PSI,
    missing_mass,
    weight_gap_from_log_ratio,
    weight_gap_from_tv,
)
from tests.theory.bounds import enumerated

BAND = (0.5, 2.0)
PSIS = {
    "naive": PSI["naive"](),
    "is": PSI["is"](),
    "tis": PSI["tis"](2.0),
    "mis": PSI["mis"](BAND),
    "icepop": PSI["icepop"](BAND),
    "reject": PSI["reject"](BAND),
    "clip": PSI["clip"](0.5),
}
# p / q is 0.95, 1.3, 8/7, 6/7
INFER = np.array([[0.2, 0.1, 0.28, 0.42]])
TRAIN = np.array([[0.19, 0.13, 0.32, 0.36]])
counts = st.lists(st.integers(0, 30), min_size=4, max_size=4).filter(any)


def two_level(x, y, psi):
    """E|w - psi(w)| where w is x or y, with mean 1."""
    share = (1 - x) / (y - x)
    distance = np.abs(np.array([x, y]) - psi.weight(np.array([x, y])))
    return (1 - share) * distance[0] + share * distance[1]


def clip_gap(p_V, q_V, c):
    return exact_gap(p_V[None], q_V[None], PSI["clip"](c)).item()


@pytest.mark.parametrize("rho", [0.0, 1e-6, 0.05, 0.5, 3.0])
def test_naive_weights_leave_twice_tanh_of_half_the_log_ratio(rho):
    left = weight_gap_from_log_ratio(rho, PSIS["naive"])
    assert left == pytest.approx(2 * math.tanh(rho / 2), rel=1e-9)
    assert left <= rho


@pytest.mark.parametrize("rho", [0.0, 0.3, math.log(2), 1.0, 4.0])
def test_truncated_weights_leave_what_is_above_the_cap(rho):
    by_hand = max(math.exp(rho) - 2, 0) / (1 + math.exp(rho))
    assert weight_gap_from_log_ratio(rho, PSIS["tis"]) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("name", ["tis", "mis", "icepop", "clip"])
@pytest.mark.parametrize("edge", [1.2, 1.3, 1.7, 2.0, 5.1])
def test_nothing_is_left_where_every_weight_is_kept_up_to_the_very_edge(name, edge):
    psi = PSI[name]({"tis": edge, "clip": edge - 1}.get(name, (1 / edge, edge)))
    inside = math.log(edge)
    assert weight_gap_from_log_ratio([0.0, inside / 2, inside], psi).tolist() == [0.0] * 3
    assert weight_gap_from_log_ratio(inside + 1e-9, psi) > 0
    assert weight_gap_from_log_ratio([0.0, inside, 9.0], PSIS["is"]).tolist() == [0.0] * 3


def test_a_mask_leaves_as_much_as_naive_weights_only_inside_its_band():
    inside, outside = 0.6, 0.8
    naive = weight_gap_from_log_ratio([inside, outside], PSIS["naive"])
    reject = weight_gap_from_log_ratio([inside, outside], PSIS["reject"])
    assert reject[0] == naive[0]
    assert reject[1] > naive[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PSIS])
@pytest.mark.parametrize("rho", [0.2, 0.5, 0.9, 2.0])
def test_the_gap_is_the_most_that_two_level_drift_can_reach(name, rho):
    psi = PSIS[name]
    lows = np.linspace(math.exp(-rho), 1, 200, endpoint=False)
    highs = np.linspace(math.exp(rho), 1, 200, endpoint=False)
    found = max(two_level(x, y, psi) for x in lows for y in highs)
    said = weight_gap_from_log_ratio(rho, psi)
    assert found <= said + 1e-12
    assert found >= 0.97 * said  # the grid misses the bends


@pytest.mark.parametrize("name", [*PSI])
def test_the_gap_is_nothing_at_agreement_and_grows_with_the_drift(name):
    left = weight_gap_from_log_ratio(np.linspace(0, 5, 400), PSIS[name])
    assert left[0] == 0
    assert (np.diff(left) >= -1e-12).all()


def test_a_log_ratio_without_a_bound_gives_the_limit():
    assert weight_gap_from_log_ratio(math.inf, PSIS["naive"]) == pytest.approx(2.0)
    assert weight_gap_from_log_ratio(math.inf, PSIS["tis"]) == pytest.approx(1.0)


@pytest.mark.parametrize(("c", "left"), [(0, 0.14), (0.05, 0.09), (0.1, 0.05), (0.2, 0.01)])
def test_a_wider_clip_leaves_less_of_a_gap_of_fourteen_percent(c, left):
    assert exact_gap(TRAIN, INFER, PSI["naive"]()) == pytest.approx(0.14)
    assert clip_gap(TRAIN[0], INFER[0], c) == pytest.approx(left)
    assert clip_gap(TRAIN[0], INFER[0], 0.5) == 0


@given(counts, counts)
def test_the_gap_of_a_clip_never_grows_from_twice_the_variation_as_the_clip_widens(infer, train):
    """A clip at 0 does not make the policies equivalent: it weighs every token 1."""
    q_V, p_V = (np.array(c) / sum(c) for c in (infer, train))
    left = [clip_gap(p_V, q_V, c) for c in np.linspace(0, 3, 61)]
    assert (np.diff(left) <= 1e-12).all()
    assert left[0] == pytest.approx(np.abs(p_V - q_V).sum(), abs=1e-12)


def test_naive_weights_leave_twice_the_variation():
    assert weight_gap_from_tv([0.0, 0.07, 1.0]).tolist() == [0.0, 0.14, 2.0]


def test_chi2_bounds_what_a_cap_leaves():
    by_hand = (math.sqrt(0.25 + 1) - 1) / 2
    assert tis_gap_from_chi2(0.25, 2.0) == pytest.approx(by_hand, rel=1e-12)
    assert tis_gap_from_chi2(0.25, 1.0) == pytest.approx(0.25)  # sqrt(chi2) / 2, as a variation
    assert tis_gap_from_chi2(1e-12, 2.0) == pytest.approx(0.25e-12, rel=1e-9)


def test_chi2_bounds_the_mean_gap_by_its_own_mean():
    chi2 = np.array([0.0, 0.1, 2.0])
    assert tis_gap_from_chi2(chi2, 1.5).mean() <= tis_gap_from_chi2(chi2.mean(), 1.5)


@pytest.mark.parametrize("cap", [1.0, 1e200, 1.7e308, math.inf])
def test_no_chi2_leaves_no_gap_at_any_cap(cap):
    assert tis_gap_from_chi2(0.0, cap) == 0
    assert tis_gap_from_chi2([1e300, math.inf], cap)[1] == 1


def test_what_infer_cannot_draw_is_within_what_capped_weights_miss():
    p_V, q_V = np.array([0.1, 0.4, 0.5]), np.array([0.0, 0.5, 0.5])
    capped = q_V[1:] @ np.minimum(p_V[1:] / q_V[1:], 2.0)
    assert missing_mass(capped, 2.0) == pytest.approx(0.1)
    assert missing_mass(1.01, 2.0) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: weight_gap_from_log_ratio(-0.1, PSIS["naive"]),
            "rho is -0.1, outside of [0, inf]",
        ),
        (
            lambda: weight_gap_from_log_ratio(0.1, PSI["mis"]((1.1, 2.0))),
            "'mis' does not leave a weight of 1 as it is, so equal kernels have a gap\n"
            "  hint: give a cap of at least 1, or a band around 1 such as [0.5, 2.0]",
        ),
        (lambda: weight_gap_from_tv(1.2), "tv is 1.2, outside of [0, 1]"),
        (lambda: weight_gap_from_tv(math.nan), "tv is nan, outside of [0, 1]"),
        (lambda: tis_gap_from_chi2(0.1, 0.9), "cap is 0.9, outside of [1, inf]"),
        (
            lambda: missing_mass(2.5, 2.0),
            "mean_capped_weight is 2.5, outside of [0, 2]",
        ),
        (lambda: missing_mass(0.5, 0.0), "a weight cannot be capped at 0\n  hint: such as 2.0"),
    ],
)
def test_what_no_proof_covers_is_refused(call, message):
    with pytest.raises(EvidenceError) as raised:
        call()
    enumerated.refused(raised, message)
