# How often an answer is wrong where the truth is exactly the limit, by enumeration: every path of
# a walk that is looked at again and again, by its chance.  A rate is bounded from both sides, since
# one that is far below what may be spent means that something is charged twice.

import functools

import numpy as np
import pytest

from servanda.contract.model import Clause
from servanda.judgement.clauses.base import Cell, Interim
from servanda.judgement.clauses.statistical import Certificate, Feed, Grown, MassGap
from servanda.judgement.slices.rules import Cut
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.log_moment import LogMoment

ALPHA, LIMIT = 0.05, 0.1
CLAUSE = Clause.model_validate(
    {"id": "it", "metric": "tv", "aggregate": "mean", "at_most": LIMIT, "slices": "all"}
)


def ever(wrong, chance, looks):
    """The chance that a walk is at a count for which `wrong(ones, n)` at any of its looks.

    Wrong are the counts beyond one of them, on one side.
    """
    alive, total, n = np.ones(1), 0.0, 0
    for look in looks:
        while n < look:
            alive = np.append(alive * (1 - chance), 0.0) + np.append(0.0, alive * chance)
            n += 1
        low, high = 0, n  # of the counts that are not alike
        if wrong(low, n) == wrong(high, n):
            assert not wrong(low, n)
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if wrong(middle, n) == wrong(low, n) else (low, middle)
        out = slice(high, None) if wrong(high, n) else slice(None, high)
        total += alive[out].sum()
        alive[out] = 0.0
    return total


def judged(kind, claim, rounds, **look):
    cell = Cell(CLAUSE, "statistical", (), Cut("all"), claim, 8, kind, "w")
    at = Interim(ALPHA, **{"cells": 1, "first": 1, "launched": 1, "intervals": False} | look)
    return kind.judge(cell, rounds, None, at).outcome


def of_tokens(ones, n):
    return LogMoment.of(np.repeat([1.0, 0.0], [ones, n - ones]))


def of_groups(ones, n):
    """Short groups without a divergence, and long ones that have all of it, as many as `ones`."""
    total, tokens = (np.repeat(np.array(ends), [ones, n - ones]) for ends in ((4.0, 0.0), (8, 2)))
    return GroupRatio(8, n, total, tokens, np.zeros(n, dtype=int))


# a group is long with the chance at which its token-weighted mean is LIMIT
LONG = LIMIT * 2 / (4 - LIMIT * 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("claim", "process", "chance"),
    [("realised", of_tokens, LIMIT), ("population", of_groups, LONG)],
)
@pytest.mark.parametrize(("answer", "cells"), [("holds", 5), ("violated", 1), ("violated", 5)])
def test_at_the_limit_an_answer_is_wrong_as_often_as_it_may_be_and_no_more(
    claim, process, chance, answer, cells
):
    """A look after every fourth unit, to 400; what a violation may spend is shared by the cells."""

    @functools.cache
    def wrong(ones, n):
        found = process(ones, n)
        rounds = [Grown(found, found.below_growth(LIMIT), found.above_growth(LIMIT))]
        return judged(Certificate(Feed(LIMIT)), claim, rounds, cells=cells) == answer

    spent = ALPHA if answer == "holds" else ALPHA / cells
    assert 0.03 * spent < ever(wrong, chance, range(4, 401, 4)) <= spent


GAP = 0.05  # train has twice infer's mass on one token of so much, and is short of it elsewhere
SHORT = GAP / (1 - GAP)


def gap_is_red(part):
    @functools.cache
    def wrong(drawn, n):
        inside = LogMoment.of(np.repeat([0.0, 0.5], [drawn, n - drawn]))
        outside = LogMoment.of(np.repeat([0.5, (1 + SHORT) / 2], [drawn, n - drawn]))
        return judged(MassGap(GAP), "realised", [(inside, outside)], part=part) == "violated"

    return ever(wrong, GAP, range(8, 401, 8))


def test_a_mass_gap_at_its_limit_is_called_violated_on_a_span_for_its_part_of_alpha():
    """The thousandth of alpha is less than what a span that had all of it would spend."""
    assert ALPHA / 1000 < gap_is_red(1.0) <= ALPHA
    assert 0 < gap_is_red(1 / 1000) <= ALPHA / 1000
