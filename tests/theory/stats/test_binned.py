# Certificates from a histogram: never more evidence than the tokens one by one, hardly less.

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.theory.bounds.importance_weights import PSI, weight_gap
from servanda.theory.divergence.base import DIVERGENCES, sampled
from servanda.theory.stats.bets import Coherence
from servanda.theory.stats.histogram import BINS, ZERO, Binned, bin_of, edges, ends, moment
from servanda.theory.stats.interval import interval
from servanda.theory.stats.log_moment import LogMoment

LEAST_K, MOST_K = edges()
THRESHOLDS = (1e-6, 0.125, 0.182)


def metric(name):
    def values(ratio_N):
        with np.errstate(over="ignore"):
            return sampled(name, {"logp_train": ratio_N, "logp_infer": np.zeros(len(ratio_N))})

    return values


def gap(psi):
    return lambda ratio_N: weight_gap(ratio_N, psi)


def of_psi(name):
    return {"tis": (2.0,), "clip": (0.2,), "naive": (), "is": ()}.get(name, ((0.5, 2.0),))


METRICS = {n: (metric(n), ()) for n, m in DIVERGENCES.items() if "logprob" in m.forms}
GAPS = {
    name: (gap(psi), tuple(math.log(bend) for bend in psi.bends))
    for name in PSI
    for psi in [PSI[name](*of_psi(name))]
    if math.isfinite(psi.largest)
}
FUNCTIONS = METRICS | GAPS


def fed(name, limit=0.05):
    """A function as clauses feed it to a certificate: x in [0, 1]."""
    values, bends = FUNCTIONS[name]
    if name in GAPS:
        low, high = PSI[name](*of_psi(name)).span
    else:
        low, high = DIVERGENCES[name].span
        low, high = max(low, 0.0) if name == "k1_nats" else low, min(high, 20 * limit)

    def x(ratio_N):
        return np.clip((values(ratio_N) - low) / (high - low), 0.0, 1.0)

    return x, bends


def beyond(threshold):
    def x(ratio_N):
        return (np.abs(ratio_N) > threshold).astype(np.float64)

    return x


FED = {name: fed(name) for name in FUNCTIONS}
FED |= {f"beyond {t}": (beyond(t), (t, -t)) for t in THRESHOLDS}
TABLES = {name: ends(*both) for name, both in FUNCTIONS.items()}
FED_TABLES = {name: ends(*both) for name, both in FED.items()}

near = st.floats(-0.3, 0.3) | st.floats(-1e-6, 1e-6) | st.sampled_from([0.0, -0.0, 5e-324, 2**-24])
anywhere = near | st.floats(max_value=1e300, allow_nan=False, allow_infinity=False)
ratios = anywhere | st.just(-math.inf) | st.sampled_from([128.0, -128.0, math.log(2), -math.log(2)])
streams = st.lists(ratios, min_size=1, max_size=40).map(np.array)


def counted(ratio_N):
    return np.bincount(bin_of(ratio_N), minlength=BINS + 1)[:BINS]


def test_the_bins_cover_every_log_ratio_in_order():
    assert BINS == len(LEAST_K) == len(MOST_K)
    assert LEAST_K[0] == -math.inf and MOST_K[-1] == np.finfo(np.float64).max
    assert (np.diff(LEAST_K) >= 0).all() and (np.diff(MOST_K) >= 0).all()
    assert (LEAST_K[1:] <= MOST_K[:-1]).all()
    assert LEAST_K[ZERO] == MOST_K[ZERO] == 0.0


def test_a_bin_is_narrower_than_a_fivehundredth_of_what_is_in_it():
    size_K = np.minimum(np.abs(LEAST_K), np.abs(MOST_K))
    inner_K = (size_K > 0) & np.isfinite(LEAST_K) & (MOST_K < 1e9)
    assert inner_K.sum() == BINS - 5
    assert ((MOST_K - LEAST_K)[inner_K] < size_K[inner_K] / 500).all()


@given(ratios)
@example(np.nextafter(2**-24, 1))
def test_a_log_ratio_lies_in_its_bin(ratio):
    k = int(bin_of([ratio])[0])
    assert LEAST_K[k] <= ratio <= MOST_K[k]


@given(st.floats(width=32, allow_nan=False))
def test_both_precisions_have_the_same_bins(ratio):
    of_32, of_64 = (int(bin_of(np.array([ratio], dtype=d))[0]) for d in (np.float32, np.float64))
    assert of_32 == of_64


@given(st.floats(-200, 0, width=32), st.floats(-200, 0, width=32))
def test_a_difference_that_float32_rounds_still_lies_in_its_bin(train, infer):
    rounded = np.array([train], dtype=np.float32) - np.array([infer], dtype=np.float32)
    k = int(bin_of(rounded)[0])
    assert LEAST_K[k] <= train - infer <= MOST_K[k]


def test_what_is_no_log_ratio_has_no_bin():
    for dtype in (np.float32, np.float64):
        odd = np.array([np.nan, -np.nan, np.inf], dtype=dtype)
        assert bin_of(odd).tolist() == [BINS] * 3
    assert bin_of([-math.inf]).tolist() == [0]
    assert bin_of([]).tolist() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)  # a new metric is tested on arrival
@given(streams)
def test_a_function_lies_between_its_ends_over_the_bin(name, ratio_N):
    least_K, most_K = TABLES[name]
    bin_N, value_N = bin_of(ratio_N), FUNCTIONS[name][0](ratio_N)
    assert (least_K[bin_N] <= value_N).all() and (value_N <= most_K[bin_N]).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_lies_between_its_ends_everywhere_in_every_bin(name):
    least_K, most_K = TABLES[name]
    low_K, high_K = np.maximum(LEAST_K, -200.0), np.minimum(MOST_K, 200.0)
    for share in np.linspace(0, 1, 41):
        value_K = FUNCTIONS[name][0](low_K + share * (high_K - low_K))
        assert (least_K <= value_K).all() and (value_K <= most_K).all()


@pytest.mark.parametrize("name", GAPS)
def test_at_a_bend_both_sides_are_counted(name):
    least_K, most_K = TABLES[name]
    for bend in GAPS[name][1]:
        at_N = bend + np.linspace(-1e-3, 1e-3, 20_001)
        at_N = np.r_[at_N, np.nextafter(bend, -9), bend, np.nextafter(bend, 9)]
        bin_N, value_N = bin_of(at_N), GAPS[name][0](at_N)
        assert (least_K[bin_N] <= value_N).all() and (value_N <= most_K[bin_N]).all()


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_a_share_beyond_a_threshold_is_known_but_in_the_thresholds_own_bins(threshold):
    least_K, most_K = FED_TABLES[f"beyond {threshold}"]
    known_K = (most_K < 1e-12) | (least_K > 1 - 1e-12)
    at = bin_of([-threshold, threshold])
    # a threshold that ends a bin lies in the next one, too
    assert set(np.flatnonzero(~known_K)) <= {int(k) + step for k in at for step in (-1, 0, 1)}
    assert least_K[ZERO] == most_K[ZERO] == 0.0


def test_a_function_without_a_value_is_refused():
    with pytest.raises(ValueError, match=r"the function has no value at a log ratio of -inf"):
        ends(lambda ratio_N: ratio_N - ratio_N)


@pytest.mark.slow
@pytest.mark.parametrize("name", FED)
@given(streams, st.integers(0, 3))
def test_neither_evidence_is_more_than_that_of_the_tokens_one_by_one(name, ratio_N, missing):
    exact = LogMoment.of(FED[name][0](ratio_N), missing)
    binned = moment(counted(ratio_N), *FED_TABLES[name], missing)

    assert (binned.n, binned.missing) == (exact.n, exact.missing)
    for limit in (0.0, 1e-9, 1e-4, 0.01, 0.3, 0.5, 0.9, 1.0):
        assert binned.log_e_below(limit) <= exact.log_e_below(limit) + 1e-9
        assert binned.log_e_above(limit) <= exact.log_e_above(limit) + 1e-9


@pytest.mark.parametrize("name", FED)
def test_the_interval_holds_the_exact_one_and_is_wider_by_less_than_a_hundredth(name):
    """Wider in terms of its own ends: of a mean that is known to a few per cent."""
    rng = np.random.default_rng(5)
    for scale in (0.003, 0.03, 0.3):
        ratio_N = scale * rng.standard_t(3, 20_000)
        exact = interval(LogMoment.of(FED[name][0](ratio_N)), 0.05)
        binned = interval(moment(counted(ratio_N), *FED_TABLES[name]), 0.05)
        # both are found by halving, to 1e-5 of themselves
        assert binned[0] <= exact[0] * (1 + 2e-5) + 1e-9
        assert binned[1] >= exact[1] * (1 - 2e-5) - 1e-9
        assert binned[0] >= exact[0] * 0.99 - 1e-7
        assert binned[1] <= exact[1] * 1.01 + 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("name", FED)
@given(streams)
def test_the_total_is_off_by_at_most_half_of_what_the_bins_leave_open(name, ratio_N):
    least_K, most_K = FED_TABLES[name]
    bin_N = bin_of(ratio_N)
    total = math.fsum(FED[name][0](ratio_N))
    left_open = float((np.clip(most_K, 0, 1) - np.clip(least_K, 0, 1))[bin_N].sum())
    off = abs(moment(counted(ratio_N), least_K, most_K).total - total)
    assert off <= left_open / 2 + 1e-12 * len(ratio_N)


@pytest.mark.slow
@given(st.lists(streams, min_size=2, max_size=5), st.randoms())
def test_merging_counts_is_exact_and_free_of_order(rounds, random):
    whole = counted(np.concatenate(rounds))
    counts = [counted(ratio_N) for ratio_N in rounds]
    random.shuffle(counts)
    assert (sum(counts) == whole).all()

    of_parts = sum((moment(c, *FED_TABLES["tv"]) for c in counts), LogMoment())
    of_whole = moment(whole, *FED_TABLES["tv"])
    assert of_parts.n == of_whole.n
    # each sum is rounded down to 2^-40 once
    for a, b in zip(of_parts.below + of_parts.above, of_whole.below + of_whole.above, strict=True):
        assert a == pytest.approx(b, rel=1e-12, abs=len(rounds) + 1)


def test_many_histograms_at_once_are_each_as_alone():
    rng = np.random.default_rng(2)
    rows = [counted(0.1 * rng.standard_normal(n)) for n in (0, 1, 50, 3000)]
    table = Binned(*FED_TABLES["le_cam"])
    for alone, together in zip(rows, table.moments(rows, [0, 1, 2, 3]), strict=True):
        single = moment(alone, *FED_TABLES["le_cam"], together.missing)
        assert together.below == pytest.approx(single.below, rel=1e-12)
        assert together.above == pytest.approx(single.above, rel=1e-12)


def test_values_outside_the_unit_interval_and_counts_of_other_bins_are_refused():
    least_K, most_K = TABLES["abs_log_ratio_nats"]
    with pytest.raises(EvidenceError, match=r"a certified value must lie in \[0, 1\], found"):
        moment(np.zeros(BINS), least_K, most_K)
    with pytest.raises(EvidenceError, match=r"7 counts for \d+ bins"):
        moment(np.zeros(7), *FED_TABLES["tv"])


@pytest.mark.slow
@given(streams, st.integers(0, 3))
def test_coherence_of_counts_never_rejects_more_than_that_of_tokens(ratio_N, missing):
    count_K = counted(ratio_N)
    exact = Coherence.of(ratio_N, missing)
    binned = Coherence.of(LEAST_K, missing, count_N=count_K)
    assert (binned.n, binned.missing) == (exact.n, exact.missing)
    assert (np.array(binned.growth) <= np.array(exact.growth) + 1e-9).all()


def test_coherence_of_counts_sees_what_that_of_tokens_sees():
    ratio_N = np.random.default_rng(3).normal(0.01, 0.05, 50_000)  # E w = e^.01125
    binned = Coherence.of(LEAST_K, count_N=counted(ratio_N))
    assert binned.log_e == pytest.approx(Coherence.of(ratio_N).log_e, rel=0.02)
    assert binned.log_e > math.log(1000)
