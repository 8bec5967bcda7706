# Where an osc comes from and what it becomes: casts, temperature, penalties, greedy choice.

import math

import numpy as np
import pytest
from benchmarks.theory.theorems.drift import (
    greedy_flip_impossible,
    linf_with_repetition_penalty,
    osc_from_linf,
)

from servanda.errors import EvidenceError
from servanda.theory.bounds.drift import osc_at_temperature, osc_from_rounding, rounding_eps
from servanda.theory.divergence.precision import CAPTURES, eta, rounded
from tests.theory.bounds import enumerated


def test_half_an_ulp_is_half_the_way_to_the_next_number_of_every_float16():
    """Every normal number of the format, but the one before infinity."""
    bits = np.arange(0x0400, 0x7BFF, dtype=np.uint16)
    number_N = bits.view(np.float16)
    half_N = np.spacing(number_N).astype(np.float64) / 2
    assert rounding_eps(number_N, CAPTURES["float16"]).tolist() == half_N.tolist()


@pytest.mark.parametrize("capture", ["float32", "float16", "bfloat16"])
def test_a_cast_moves_a_logit_by_at_most_that_and_some_by_nearly_that(capture):
    rng = np.random.default_rng(3)
    logit_N = rng.choice([-1.0, 1.0], 200_000) * 2.0 ** rng.uniform(-10.0, 12.0, 200_000)
    moved_N = np.abs(rounded(logit_N, capture) - logit_N)
    share_N = moved_N / rounding_eps(np.abs(logit_N), CAPTURES[capture])
    assert share_N.max() <= 1.0
    assert share_N.max() > 0.999


def test_a_number_halfway_between_two_attains_it():
    assert rounded(np.array([16.0625]), "bfloat16").item() == 16.0
    assert rounding_eps(16.0625, 8).item() == 0.0625


@pytest.mark.parametrize(
    ("size", "bits", "eps"),
    [
        (16.0, 8, 0.0625),
        (31.9, 8, 0.0625),
        (32.0, 8, 0.125),
        (8.0, 8, 0.03125),
        (20.0, 8, 0.0625),  # two of them: an eighth of a nat in bf16 alone
        (20.0, 11, 0.0078125),
        (0.0, 8, 0.0),
        (math.inf, 8, math.inf),
    ],
)
def test_an_ulp_doubles_with_each_power_of_two(size, bits, eps):
    assert rounding_eps(size, bits).item() == eps
    assert osc_from_rounding(size, bits).item() == 2 * eps


def test_a_recorded_logprob_and_a_cast_logit_lose_the_same():
    for capture, bits in CAPTURES.items():
        assert rounding_eps(3.0, bits).item() == eta(capture, 3.0)


def test_a_common_shift_is_what_the_bound_by_size_cannot_see():
    assert np.ptp(np.array([3.0, 3.0])) == 0.0 < osc_from_linf(3.0).item()
    assert np.ptp(np.array([3.0, -3.0])) == osc_from_linf(3.0).item()


def test_temperature_divides_a_drift():
    assert osc_at_temperature(0.5, [0.5, 1.0, 2.0]).tolist() == [1.0, 0.5, 0.25]
    assert osc_at_temperature(math.inf, 2.0).item() == math.inf
    assert osc_at_temperature(0.0, 1e-300).item() == 0.0


def test_a_penalty_makes_a_free_shift_cost():
    """Two logits shifted by 1, one of them repeated: theta 2 takes half of its shift."""
    before, after = np.array([2.0, 2.0]), np.array([3.0, 3.0])
    theta = np.array([2.0, 1.0])
    assert np.ptp(after / theta - before / theta) == 0.5
    assert np.abs(after / theta - before / theta).max() <= linf_with_repetition_penalty(1.0, 2.0)


def test_a_penalty_stretches_logits_below_zero_as_its_reciprocal_those_above():
    assert linf_with_repetition_penalty(0.5, 2.0).item() == 1.0  # -1 -> -1.5 is -2 -> -3
    assert linf_with_repetition_penalty(0.5, 0.5).item() == 1.0  # 1 -> 1.5 is 2 -> 3
    assert linf_with_repetition_penalty(0.5, 1.0).item() == 0.5


def test_a_margin_of_exactly_osc_may_tie():
    logits_V, drift_V = np.array([0.0, 1.0]), np.array([1.0, 0.0])
    assert np.argmax(logits_V) == 1
    assert np.argmax(logits_V + drift_V) == 0  # a tie goes to the lower id
    assert greedy_flip_impossible([1.0, 1.0 + 2**-50], 1.0).tolist() == [False, True]


def test_a_sole_token_stays_greedy_unless_the_other_side_has_more():
    assert greedy_flip_impossible(math.inf, [1.0, math.inf]).tolist() == [True, False]
    assert greedy_flip_impossible(0.0, 0.0).item() is False  # two best: nothing breaks the tie


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: osc_from_linf(-1.0), "linf is -1, outside of [0, inf]"),
        (lambda: osc_at_temperature(-1.0, 1.0), "osc is -1, outside of [0, inf]"),
        (
            lambda: osc_at_temperature(1.0, 0.0),
            "tau is 0, and must be finite and above 0\n"
            "  hint: a greedy kernel flips or it does not",
        ),
        (
            lambda: osc_at_temperature(1.0, [1.0, math.nan]),
            "tau is nan, and must be finite and above 0\n"
            "  hint: a greedy kernel flips or it does not",
        ),
        (
            lambda: linf_with_repetition_penalty(1.0, -2.0),
            "theta is -2, and must be finite and above 0\n"
            "  hint: a repetition penalty of 1 changes nothing",
        ),
        (lambda: linf_with_repetition_penalty(math.nan, 1.0), "linf is nan, outside of [0, inf]"),
        (lambda: greedy_flip_impossible(-0.5, 1.0), "margin is -0.5, outside of [0, inf]"),
        (lambda: greedy_flip_impossible(0.5, math.nan), "osc is nan, outside of [0, inf]"),
        (lambda: rounding_eps(-3.0, 8), "abs_logit is -3, outside of [0, inf]"),
        (
            lambda: osc_from_rounding(3.0, 0),
            "bits is 0, and must be a whole number above 0\n"
            "  hint: 24 for float32, 11 for float16, 8 for bfloat16: the hidden bit counts",
        ),
        (
            lambda: rounding_eps(3.0, 8.0),
            "bits is 8.0, and must be a whole number above 0\n"
            "  hint: 24 for float32, 11 for float16, 8 for bfloat16: the hidden bit counts",
        ),
    ],
)
def test_what_is_no_drift_is_refused(call, text):
    with pytest.raises(EvidenceError) as refused:
        call()
    enumerated.refused(refused, text)
