# The trees of the falsification: laws, ends and supports are what they are said to be.

import doctest
import math

import numpy as np
import pytest
from benchmarks.theory import trees as module
from benchmarks.theory.trees import EOS, SHAPES, grove, trees

MADE = trees(np.random.default_rng(3), 400, tokens=3, depth=3)


def test_every_answer_is_there_once_and_none_goes_on_after_its_end():
    answers = {tuple(row[live]) for row, live in zip(MADE.token_LT, MADE.live_LT, strict=True)}
    by_hand = {
        (a, b, c)[: (a, b, c).index(EOS) + 1] if EOS in (a, b, c) else (a, b, c)
        for a in range(3)
        for b in range(3)
        for c in range(3)
    }
    assert answers == by_hand
    assert len(MADE.token_LT) == len(by_hand)
    assert MADE.length_L.tolist() == MADE.live_LT.sum(axis=1).tolist()


@pytest.mark.parametrize("side", ["train", "infer"])
def test_both_sides_are_laws_of_whole_answers(side):
    rows_NLTV, law_NL = getattr(MADE, f"{side}_NLTV"), getattr(MADE, f"{side}_NL")
    assert rows_NLTV.sum(axis=3) == pytest.approx(np.ones(rows_NLTV.shape[:3]))
    assert law_NL.sum(axis=1) == pytest.approx(np.ones(400))
    n, leaf = 7, 5
    steps = range(MADE.length_L[leaf])
    by_hand = math.prod(rows_NLTV[n, leaf, t, MADE.token_LT[leaf, t]] for t in steps)
    assert law_NL[n, leaf] == pytest.approx(by_hand)


def test_answers_with_the_same_prefix_see_the_same_row():
    for side in (MADE.train_NLTV, MADE.infer_NLTV):
        for one in range(len(MADE.token_LT)):
            for other in range(one):
                same = 0
                while (MADE.token_LT[one, :same] == MADE.token_LT[other, :same]).all():
                    if MADE.live_LT[one, same] and MADE.live_LT[other, same]:
                        assert (side[:, one, same] == side[:, other, same]).all()
                    same += 1
                    if same == MADE.token_LT.shape[1]:
                        break


def test_log_ratios_are_of_the_drawn_token_and_nothing_past_the_end():
    drawn_NL = MADE.infer_NL > 0
    weight_NL = MADE.weight_NLT.prod(axis=2)
    assert (MADE.infer_NL * weight_NL)[drawn_NL] == pytest.approx(MADE.train_NL[drawn_NL])
    assert not MADE.log_ratio_NLT[:, ~MADE.live_LT].any()
    assert not MADE.tv_NLT[:, ~MADE.live_LT].any()
    assert not np.isnan(MADE.log_ratio_NLT).any()


def test_either_side_may_miss_what_the_other_draws():
    train, infer = MADE.train_NL > 0, MADE.infer_NL > 0
    for only in (train & ~infer, infer & ~train):
        assert only.any()
    assert np.isneginf(MADE.log_ratio_NLT).any()


def test_they_reach_from_equal_to_apart():
    assert (MADE.tv_N < 1e-3).mean() > 0.1
    assert (MADE.tv_N > 0.3).mean() > 0.1


def test_with_support_drift_is_finite_and_the_largest_of_any_context():
    made = trees(np.random.default_rng(3), 50, tokens=3, depth=2, support=True)
    some = made.live_LT & True
    with np.errstate(divide="ignore", invalid="ignore"):
        log_w = np.log(made.train_NLTV) - np.log(made.infer_NLTV)
    for n in range(50):
        spreads = [np.ptp(row[~np.isnan(row)]) for row in log_w[n][some]]
        assert made.osc_N[n] == pytest.approx(max(spreads), rel=1e-12, abs=1e-12)
    assert np.isfinite(made.osc_N).all()
    assert ((made.train_NL > 0) == (made.infer_NL > 0)).all()


def test_a_grove_has_every_shape():
    made = list(grove(np.random.default_rng(0), 70))
    assert [(g.train_NLTV.shape[3], g.live_LT.shape[1]) for g in made] == list(SHAPES)
    assert sum(len(g.train_NL) for g in made) >= 70


def test_the_example_of_trees_is_true():
    assert doctest.testmod(module) == (0, 2)
