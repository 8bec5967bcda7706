# What filters may keep, against filters in exact fractions and every drift of two levels.

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from benchmarks.theory.theorems.truncation import truncation_sets, tv_truncated_interval
from benchmarks.theory.truncation import worst_drifts
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.theory.bounds.drift import tv_from_osc
from servanda.theory.sampling import Sampling, processed_logprobs
from tests.theory.bounds import enumerated

FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.integers(1, 5),
        "top_p": st.fractions("0.05", "0.95", max_denominator=40),
        "min_p": st.fractions("0.025", "0.9", max_denominator=40),
    },
)

WEIGHTS = st.lists(st.integers(0, 30), min_size=2, max_size=5).filter(any)


def filtered(weights, top_k=None, top_p=None, min_p=None):
    """Ids that the filters keep, one token at a time: top-k, top-p of what is left, min-p."""
    ranked = sorted((i for i, w in enumerate(weights) if w), key=lambda i: (-weights[i], i))
    ranked = ranked[:top_k]
    left = sum(weights[i] for i in ranked)
    before, kept = Fraction(0), set()
    for i in ranked:
        if top_p is not None and not before < top_p:
            break
        if min_p is not None and not weights[i] >= min_p * weights[ranked[0]]:
            break
        kept.add(i)
        before += Fraction(weights[i]) / left
    return kept


def ids(mask_V):
    return set(np.flatnonzero(mask_V).tolist())


def logits(weights):
    with np.errstate(divide="ignore"):
        return np.log(np.array(weights, dtype=np.float64))


def floats(filters):
    return {name: v if isinstance(v, int) else float(v) for name, v in filters.items()}


@given(WEIGHTS, FILTERS, st.sampled_from([Fraction(9, 8), Fraction(3, 2), Fraction(4), 100]))
def test_sure_tokens_survive_every_drift_of_two_levels_and_survivors_are_possible(
    weights, filters, ratio
):
    sets = truncation_sets(logits(weights), math.log(ratio), **floats(filters))

    for up in itertools.product((1, ratio), repeat=len(weights)):
        kept = filtered([w * u for w, u in zip(weights, up, strict=True)], **filters)
        assert ids(sets.sure) <= kept <= ids(sets.possible)


@given(WEIGHTS, FILTERS)
def test_a_row_that_does_not_drift_keeps_what_the_transform_keeps(weights, filters):
    sets = truncation_sets(logits(weights), 0.0, **floats(filters))
    kept_V = np.isfinite(processed_logprobs(logits(weights), Sampling(**floats(filters))))
    assert ids(sets.sure) == ids(sets.kept) == ids(sets.possible) == ids(kept_V)


@given(WEIGHTS, FILTERS, st.floats(1e-6, 5.0), st.floats(1e-6, 5.0))
def test_more_drift_is_never_surer(weights, filters, osc, more):
    near = truncation_sets(logits(weights), osc, **floats(filters))
    far = truncation_sets(logits(weights), osc + more, **floats(filters))
    assert ids(far.sure) <= ids(near.sure) <= ids(near.kept)
    assert ids(near.kept) <= ids(near.possible) <= ids(far.possible)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 4, "top_p": 0.6},
        {"top_k": 2, "top_p": 0.9},
    ],
)
def test_what_is_possible_and_not_sure_is_kept_by_one_drift_and_lost_by_another(filters, seed):
    """Exact for one filter, and for top-k with top-p: nothing is left undecided by caution."""
    rng = np.random.default_rng(seed)
    for row_V in 1.5 * rng.normal(size=(40, 6)):
        osc = float(rng.uniform(0.01, 1.5))
        kept_DV = np.isfinite(
            processed_logprobs(row_V + worst_drifts(row_V, osc), Sampling(**filters))
        )
        sets = truncation_sets(row_V, osc, **filters)
        assert ids(sets.sure) == ids(kept_DV.all(axis=0))
        assert ids(sets.possible) == ids(kept_DV.any(axis=0))


def test_sets_of_single_filters_do_not_compose():
    """Top-2 leaves (.57, .43), and the first alone has half of that."""
    row_V = np.log([0.4, 0.3, 0.2, 0.1])
    top_k = truncation_sets(row_V, 1e-3, top_k=2)
    top_p = truncation_sets(row_V, 1e-3, top_p=0.5)
    assert ids(top_k.sure & top_p.sure) == {0, 1}

    both = truncation_sets(row_V, 1e-3, top_k=2, top_p=0.5)

    assert ids(both.kept) == ids(both.sure) == ids(both.possible) == {0}


def test_a_drift_of_a_millionth_can_change_the_kept_set():
    row_V, top_p = np.log([0.5, 0.3, 0.2]), 0.7999999
    drift_V = np.array([-5e-7, -5e-7, 5e-7])
    sets = truncation_sets(row_V, 1e-6, top_p=top_p)
    assert ids(sets.kept) == ids(sets.sure) == {0, 1}
    assert ids(sets.possible) == {0, 1, 2}

    p_V, q_V = np.exp(processed_logprobs(np.stack([row_V, row_V + drift_V]), Sampling(top_p=top_p)))

    assert 0.5 * np.abs(p_V - q_V).sum() == pytest.approx(0.20, abs=1e-6)
    low, high = tv_truncated_interval(0.0, q_V[2], tv_from_osc(1e-6))
    assert low.item() == pytest.approx(0.20, abs=1e-6)
    assert high.item() == pytest.approx(0.20, abs=2e-6)


def test_an_osc_without_end_leaves_nothing_sure_and_everything_possible():
    sets = truncation_sets([0.0, -3.0, -np.inf], math.inf, top_k=1)
    assert ids(sets.kept) == {0}
    assert ids(sets.sure) == set()
    assert ids(sets.possible) == {0, 1, 2}


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_mask_of_huge_logits_blurs_nothing(filters):
    sets = truncation_sets([5.0, 0.0, -1e30], 0.5, **filters)
    assert ids(sets.sure) == {0}
    assert 1 not in ids(sets.possible)


def test_the_order_of_ids_does_not_matter():
    rng = np.random.default_rng(5)
    row_V, shuffle_V = rng.normal(size=50), rng.permutation(50)
    filters = {"top_k": 20, "top_p": 0.8, "min_p": 0.05}
    sets = truncation_sets(row_V, 0.1, **filters)
    shuffled = truncation_sets(row_V[shuffle_V], 0.1, **filters)
    assert sets.sure[shuffle_V].tolist() == shuffled.sure.tolist()
    assert sets.possible[shuffle_V].tolist() == shuffled.possible.tolist()


@pytest.mark.parametrize("osc", [1e-9, 1e-2, 3.0, 60.0, 900.0])
def test_a_real_vocabulary_is_bounded_whatever_its_tail(osc):
    rng = np.random.default_rng(11)
    row_V = 4.0 * rng.normal(size=20_000)
    row_V[:1000] = -800.0  # mass that float64 no longer has
    sampling = Sampling(top_k=10_000, top_p=0.95, min_p=1e-4)
    sets = truncation_sets(row_V, osc, top_k=10_000, top_p=0.95, min_p=1e-4)
    for _ in range(5):
        drift_V = osc * rng.integers(0, 2, len(row_V))
        kept_V = np.isfinite(processed_logprobs(row_V + drift_V, sampling))
        assert not (sets.sure & ~kept_V).any()
        assert not (kept_V & ~sets.possible).any()


@pytest.mark.parametrize(
    ("row", "options", "text"),
    [
        ([[0.0]], {}, "logits of shape (1, 1): one row [V] at a time"),
        (
            [0.0, math.nan],
            {},
            "a logit is NaN or +inf\n  hint: -inf alone has a meaning: no mass",
        ),
        ([-math.inf], {}, "a row of logits gives no token any mass"),
        ([0.0], {"osc": -1.0}, "osc is -1, outside of [0, inf]"),
        ([0.0], {"top_k": 0}, "top_k is 0, and must be a whole number above 0"),
        ([0.0], {"top_k": 1.5}, "top_k is 1.5, and must be a whole number above 0"),
        ([0.0], {"top_p": 0.0}, "top_p is 0, outside of (0, 1]"),
        ([0.0], {"top_p": math.nan}, "top_p is nan, outside of (0, 1]"),
        ([0.0], {"min_p": 1.0}, "min_p is 1, outside of [0, 1)"),
    ],
)
def test_what_is_no_row_or_no_filter_is_refused(row, options, text):
    with pytest.raises(EvidenceError) as refused:
        truncation_sets(row, **{"osc": 0.1, **options})
    enumerated.refused(refused, text)


# The total variation of truncated rows, in fractions.


def tv(p, q):
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def test_tokens_that_only_one_side_keeps_are_the_least_that_differs():
    """The same ratios where both keep: what is left is the mass on one side alone."""
    p = [Fraction(5, 8), Fraction(3, 8), Fraction(0)]
    q = [Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)]
    low, high = tv_truncated_interval(0.0, 0.2, 0.0)
    assert low.item() == high.item() == float(tv(p, q)) == 0.2


def test_equal_masses_on_either_side_attain_the_upper_end():
    p = [Fraction(1, 4), Fraction(0), Fraction(1, 4), Fraction(1, 2)]
    q = [Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(1, 4)]
    common = tv([Fraction(1, 3), Fraction(2, 3)], [Fraction(2, 3), Fraction(1, 3)])
    _, high = tv_truncated_interval(0.25, 0.25, float(common))
    assert high.item() == pytest.approx(float(tv(p, q)), rel=1e-15)


def test_kernels_that_keep_the_same_set_have_the_total_variation_of_that_set():
    low, high = tv_truncated_interval(0.0, 0.0, [0.0, 0.3])
    assert low.tolist() == [0.0, 0.0]
    assert high.tolist() == [0.0, 0.3]
    assert [x.item() for x in tv_truncated_interval(1.0, 1.0, 0.0)] == [1.0, 1.0]  # none in common


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((-0.1, 0.0, 0.0), "alpha is -0.1, outside of [0, 1]"),
        ((0.0, 1.1, 0.0), "beta is 1.1, outside of [0, 1]"),
        ((0.0, 0.0, math.nan), "tv_common is nan, outside of [0, 1]"),
    ],
)
def test_what_is_no_mass_is_refused(values, text):
    with pytest.raises(EvidenceError) as refused:
        tv_truncated_interval(*values)
    enumerated.refused(refused, text)
