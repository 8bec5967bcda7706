# Counts of accepted drafts: their evidence, against enumeration and simulation.

import itertools
import math

import numpy as np
import pytest

from servanda.errors import EvidenceError
from servanda.theory.stats.draft_counts import DraftCounts, fallen, moved
from servanda.theory.stats.interval import interval
from servanda.theory.stats.log_moment import LogMoment
from tests import oracles


def counted(accepted_N, longest, proposed=None):
    """The counts of drafts of which so many tokens were accepted."""
    accepted_N = np.asarray(accepted_N)
    by_depth = tuple(int((accepted_N >= d).sum()) for d in range(1, longest + 1))
    n = len(accepted_N)
    return DraftCounts(n, proposed or n * longest, int(accepted_N.sum()), by_depth)


def speculated(rng, draft, target, drafts, longest):
    """Exact rejection sampling of a draft's tokens by a target, token by token; no context."""
    accepted = []
    for _ in range(drafts):
        n = 0
        while n < longest:
            token = rng.choice(len(draft), p=draft)
            if rng.uniform() >= min(1.0, target[token] / draft[token]):
                break
            n += 1
        accepted.append(n)
    return counted(accepted, longest)


def test_with_depths_the_evidence_is_that_of_the_drafts_one_by_one():
    rng = np.random.default_rng(0)
    accepted_N = rng.integers(0, 5, 200)
    counts, units = counted(accepted_N, 4), LogMoment.of(accepted_N / 4)
    for limit in (0.1, 0.45, 0.9):
        np.testing.assert_allclose(counts.below_growth(limit), units.below_growth(limit), atol=1e-6)
        np.testing.assert_allclose(counts.above_growth(limit), units.above_growth(limit), atol=1e-6)


def test_without_depths_the_evidence_is_never_larger():
    for accepted in itertools.product(range(4), repeat=4):
        known = counted(accepted, 3)
        total = DraftCounts(known.drafts, known.proposed, known.accepted)
        for limit in (0.2, 0.5, 0.8):
            assert (total.below_growth(limit) <= known.below_growth(limit) + 1e-9).all()
            assert (total.above_growth(limit) <= known.above_growth(limit) + 1e-9).all()


def test_the_mean_factor_of_drafts_of_any_lengths_is_at_most_one_at_their_own_acceptance():
    """Enumerated: two drafts of lengths 1 and 3; the limit is the mean of accepted / proposed."""
    longest, p_short, p_long = 3, [0.3, 0.7], [0.2, 0.3, 0.1, 0.4]
    mean = (0.7 + sum(i * p for i, p in enumerate(p_long))) / 4
    for growth in ("below_growth", "above_growth"):
        expected = 0.0
        for short, long in itertools.product(range(2), range(4)):
            counts = counted([short, long], longest, proposed=4)
            e_J = np.exp(getattr(counts, growth)(mean))
            expected = expected + p_short[short] * p_long[long] * e_J
        assert (expected <= 1 + 1e-9).all()


@pytest.mark.slow
@pytest.mark.parametrize("depths", [True, False])
def test_intervals_contain_the_acceptance_at_every_step_of_a_run(depths):
    """1 - TV by hand; at the end of every step of 40 runs of 30 steps, alpha 0.05 a side."""
    rng = np.random.default_rng(7)
    draft, target = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    alike = 1 - 0.5 * np.abs(draft - target).sum()
    truth = sum(alike**d for d in (1, 2, 3)) / 3
    missed = 0
    for _ in range(40):
        whole, wrong = DraftCounts(), False
        for _ in range(30):
            whole += speculated(rng, draft, target, 20, 3)
            counts = whole
            if not depths:
                counts = DraftCounts(whole.drafts, whole.proposed, whole.accepted)
            low, high = interval(counts, 0.05)
            wrong |= not low <= truth <= high
        missed += wrong
    assert missed <= 4  # of 40, where 0.1 each is allowed
    assert interval(whole, 0.05)[1] - interval(whole, 0.05)[0] < 0.2


def test_a_target_that_moved_away_from_its_draft_is_measured_from_below():
    rng = np.random.default_rng(1)
    draft = np.array([0.5, 0.3, 0.2])
    before, after = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.3, 0.6])
    tv = 0.5 * np.abs(before - after).sum()
    first, now = (speculated(rng, draft, target, 1500, 3) for target in (before, after))

    assert 0.6 * tv < moved(first, now, 0.05) <= tv
    assert fallen(first, now, 0.05) > 0.3
    assert fallen(now, first, 0.05) == 0.0 == moved(first, first, 0.05)


def test_counts_add_up_over_engines_and_intervals():
    some, more = counted([0, 2, 3], 3), counted([1, 1], 2)
    whole = some + more
    assert (whole.drafts, whole.accepted, whole.by_depth, whole.longest) == (5, 7, (4, 2, 1), 3)
    assert (whole + DraftCounts()) == whole == DraftCounts() + whole
    assert (whole + DraftCounts(2, 4, 1)).by_depth == ()  # absent is not zero


def test_nothing_is_known_without_a_draft():
    nothing = DraftCounts()
    assert math.isnan(nothing.mean) and nothing.shares == ()
    assert interval(nothing, 0.05) == (0.0, 1.0)
    assert fallen(nothing, counted([0] * 500, 3), 0.05) == 0.0 == moved(nothing, nothing, 0.05)


@pytest.mark.parametrize(
    "counts",
    [
        {"drafts": 3, "proposed": 2, "accepted": 3},
        {"drafts": 3, "proposed": 9, "accepted": -1},
        {"drafts": 2, "proposed": 6, "accepted": 3, "by_depth": (1, 2, 0)},
        {"drafts": 2, "proposed": 6, "accepted": 5, "by_depth": (3, 1, 1)},
        {"drafts": 2, "proposed": 6, "accepted": 5, "by_depth": (2, 1, 1)},
        {"drafts": 2, "proposed": 9, "accepted": 3, "by_depth": (2, 1, 0)},
    ],
)
def test_counts_that_contradict_each_other_are_refused(counts):
    with pytest.raises(EvidenceError, match="counts of drafts contradict each other"):
        DraftCounts(**counts)


def test_two_bounds_share_alpha_and_two_intervals_give_each_end_a_quarter():
    """Drafts of one token are coin tosses, whose ends are known in closed form."""
    before, now = DraftCounts(400, 400, 320, (320,)), DraftCounts(400, 400, 120, (120,))
    for alpha in (0.1, 1e-3):
        low = oracles.bernoulli_ends(320, 400, alpha / 2)[0]
        high = oracles.bernoulli_ends(120, 400, alpha / 2)[1]
        assert fallen(before, now, alpha) == pytest.approx(low - high, abs=1e-5)
        ends = [oracles.bernoulli_ends(ones, 400, alpha / 4) for ones in (320, 120)]
        assert moved(before, now, alpha) == pytest.approx(ends[0][0] - ends[1][1], abs=1e-5)
        assert moved(now, before, alpha) == pytest.approx(moved(before, now, alpha))
