# The precision of a record: what rounding costs, derived and measured.

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.theory.divergence.base import DIVERGENCES, sampled
from servanda.theory.divergence.precision import CAPTURES, capture_floor, errors, eta, rounded
from servanda.theory.sampling import log_softmax

COARSE = [c for c in CAPTURES if c != "float64"]
nats = st.floats(-30.0, -1e-3)


def nearest(value, bits):
    """The nearest number of so many significand bits, in exact arithmetic, ties to even."""
    exact = Fraction(value)
    unit = Fraction(2) ** (math.frexp(value)[1] - bits)
    return float(round(exact / unit) * unit)


@given(nats, st.sampled_from(["float32", "float16", "bfloat16"]))
def test_a_record_holds_the_nearest_number_of_its_format(value, capture):
    assert rounded(np.array([value]), capture)[0] == nearest(value, CAPTURES[capture])
    assert abs(rounded(np.array([value]), capture)[0] - value) <= eta(capture, abs(value))


@pytest.mark.parametrize("capture", CAPTURES)
def test_what_has_no_value_still_has_none(capture):
    values = rounded(np.array([-np.inf, np.nan, 0.0]), capture)
    assert values[0] == -np.inf and np.isnan(values[1]) and values[2] == 0.0


def test_the_floors_are_those_of_the_theory():
    assert eta("bfloat16", 0.3) == 2**-10 and eta("bfloat16", 5.0) == 2**-6
    assert capture_floor("k3_nats", "float16") == pytest.approx(1.6e-7, rel=0.01)
    for capture in COARSE:
        error = eta(capture)
        assert capture_floor("k3_nats", capture) == pytest.approx(error**2 / 6, rel=0.02)
        assert capture_floor("tv", capture) == pytest.approx(error / 4, rel=0.02)
        assert capture_floor("abs_log_ratio_nats", capture) == pytest.approx(error / 2, rel=0.01)
        assert capture_floor("abs_log_ratio_nats", capture, "p99") == error
    assert capture_floor("top1_flip", "bfloat16") == 0.0
    assert capture_floor("logit_osc_nats", "bfloat16") == 0.0


@pytest.mark.parametrize("metric", [m for m in DIVERGENCES if "logprob" in DIVERGENCES[m].forms])
@pytest.mark.parametrize("capture", ["float16", "bfloat16"])
def test_rounding_real_logprobs_costs_about_the_floor(metric, capture):
    """Two identical kernels; one of them records. Tokens are drawn, as a workload's are."""
    rng = np.random.default_rng(3)
    logp_RV = log_softmax(rng.normal(0.0, 2.0, size=(4000, 64)))
    token_R = (logp_RV + rng.gumbel(size=logp_RV.shape)).argmax(axis=1)
    logp_R = logp_RV[np.arange(len(token_R)), token_R]
    assert 2.0 < -logp_R.mean() < 4.0
    record_R = rounded(logp_R, capture)
    measured = sampled(metric, {"logp_train": logp_R, "logp_infer": record_R}).mean()
    floor = capture_floor(metric, capture)
    if floor:
        assert 0.4 < measured / floor < 2.5


@pytest.mark.parametrize("capture", CAPTURES)
def test_the_errors_of_many_are_the_eta_of_each(capture):
    logp_N = np.array([-0.3, -0.5, -1.0, -3.0, -17.0])
    assert errors(logp_N, capture).tolist() == [eta(capture, -value) for value in logp_N]
    assert errors(np.array([-np.inf, np.nan]), capture).tolist() == [0.0, 0.0]
