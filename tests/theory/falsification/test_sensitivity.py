# A theorem that said 3 % too little would be noticed: each challenge against wrong functions.

import sys
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.theory import CHALLENGES, falsify
from benchmarks.theory.theorems.truncation import KeptSets

from servanda.theory.bounds.theorem import THEOREMS

CASES = 2000
WRONG = 0.03


def scaled(factor):
    """The result times a factor."""
    return lambda right: lambda *a, **k: factor * right(*a, **k)


def end(i, factor):
    """One of two results times a factor."""

    def wrap(right):
        def wrong(*a, **k):
            ends = list(right(*a, **k))
            ends[i] = factor * ends[i]
            return tuple(ends)

        return wrong

    return wrap


def column(i, factor):
    """One column of the result times a factor."""
    return lambda right: lambda *a, **k: right(*a, **k) * np.where(np.arange(2) == i, factor, 1.0)


def part(name, factor):
    """One attribute of the result times a factor."""

    def wrap(right):
        def wrong(*a, **k):
            found = right(*a, **k)
            return replace(found, **{name: factor * getattr(found, name)})

        return wrong

    return wrap


def given(at, factor, only=lambda *_: True):
    """One argument times a factor, where the arguments are some of them."""

    def wrap(right):
        def wrong(*a, **k):
            moved = [factor * np.asarray(x) if i == at and only(*a) else x for i, x in enumerate(a)]
            return right(*moved, **k)

        return wrong

    return wrap


def result(factor, only):
    """The result times a factor, where the arguments are some of them."""
    return lambda right: (
        lambda *a, **k: (factor if only(*a, **k) else 1.0) * np.asarray(right(*a, **k))
    )


def set_of(name, factor):
    """One of the kept sets, of another osc."""

    def wrap(right):
        def wrong(logits_V, osc, **filters):
            other = right(logits_V, factor * osc, **filters)
            return KeptSets(**vars(right(logits_V, osc, **filters)) | {name: getattr(other, name)})

        return wrong

    return wrap


def steps(least, most):
    """Where the second argument, the tokens of an answer, is between two numbers."""
    return lambda _, tokens, *__: least <= tokens <= most


# what is wrong -> (the function made wrong by a share); where nothing else is said, the result
# is too small by the share
OTHERS = {
    "sequence_estimators": {
        name: lambda e, name=name: part(name, 1 - e) for name in ("exact", "coupling", "total")
    },
    "reward_interval": {
        "upper": lambda e: end(1, 1 - e),
        "lower": lambda e: end(0, 1 - e),
    },
    "log_ratio_bounds": {"lower": lambda e: end(0, 1 - e), "upper": lambda e: end(1, 1 - e)},
    "sum_p2_from_top_k": {"lower": lambda e: end(0, 1 + e), "upper": lambda e: end(1, 1 - e)},
    "tv_truncated_interval": {"lower": lambda e: end(0, 1 + e), "upper": lambda e: end(1, 1 - e)},
    "tv_interval_full": {"lower": lambda e: column(0, 1 + e), "upper": lambda e: column(1, 1 - e)},
    "ratio_budget": {
        "used up": lambda e: part("used_up", 1 - e),
        "used down": lambda e: part("used_down", 1 - e),
        "low": lambda e: part("low", 1 + e),
        "high": lambda e: part("high", 1 + e),
    },
    "tv_at_least_probs_diff": {"result": lambda e: scaled(1 + e)},
    "greedy_flip_impossible": {"osc": lambda e: given(1, 1 - e)},
    "truncation_sets": {
        "sure, osc too small": lambda e: set_of("sure", 1 - e),
        "possible, osc too small": lambda e: set_of("possible", 1 - e),
        "sure, osc too large": lambda e: set_of("sure", 1 + e),
        "possible, osc too large": lambda e: set_of("possible", 1 + e),
    },
    # in the drift, since of a variation near 1 everything is noticed
    "sequence_tv_from_osc": {
        "one step": lambda e: given(0, 1 - e, steps(1, 1)),
        "2 to 4 steps": lambda e: given(0, 1 - e, steps(2, 4)),
        "more steps": lambda e: given(0, 1 - e, steps(5, 10_000)),
    },
    "osc_for_reward_drift": {
        "one step": lambda e: result(1 + e, steps(1, 1)),
        "2 to 4 steps": lambda e: result(1 + e, steps(2, 4)),
        "more steps": lambda e: result(1 + e, steps(5, 10_000)),
    },
    "token_is_trajectory_bias": {
        "what is left": lambda e: given(4, 1 - e),
        "other steps": lambda e: given(0, 1 - e),
    },
    "clipped_gradient_bias": {
        "clip": lambda e: given(3, 1 - e),
        "dual clip": lambda e: given(4, 1 - e, lambda *a: a[4] > 1.0),
    },
    "kl_penalty_bias": {
        "penalty": lambda e: given(3, 1 - e),
        "its sum": lambda e: given(5, 1 - e, lambda *a: a[5] > 1),
    },
    "gradient_direction": {
        "result": lambda e: scaled(1 + e),
        "bias": lambda e: given(0, 1 - e),
        "norm": lambda e: given(1, 1 + e),
    },
    "gradient_norm_at_least": {"reach": lambda e: given(1, 1 - e)},
    "weight_gap_with_lag": {"gap": lambda e: given(0, 1 - e), "lag": lambda e: given(1, 1 - e)},
    "grpo_bias": {
        "one answer": lambda e: result(1 - e, lambda *_, whole_group: not whole_group),
        "a whole group": lambda e: result(1 - e, lambda *_, whole_group: whole_group),
    },
}
# of bounds that are not tight, a share at which an error is noticed
LOOSE = {
    ("sequence_tv_from_osc", "2 to 4 steps"): 0.15,  # within sqrt(pi / 2) of the worst case
    ("sequence_tv_from_osc", "more steps"): 0.25,
    ("osc_for_reward_drift", "2 to 4 steps"): 0.18,
    ("osc_for_reward_drift", "more steps"): 0.3,
    ("gradient_norm_at_least", "reach"): 0.3,  # Bernstein against the exact law of a coin
    ("grpo_bias", "a whole group"): 0.7,  # n TV for n answers, of which one is scored
}
CASES_OF = [(name, what) for name in THEOREMS for what in OTHERS.get(name, {"result": None})]


def notices(monkeypatch, name, what, share):
    make = OTHERS.get(name, {}).get(what) or (lambda e: scaled(1 - e))
    module = sys.modules[CHALLENGES[name].__module__]
    monkeypatch.setattr(module, name, make(share)(THEOREMS[name].function))
    return falsify(name, np.random.default_rng(7), CASES).violations > 0


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("name", "what"), CASES_OF)
def test_a_small_error_is_noticed_unless_the_bound_is_known_to_be_loose(monkeypatch, name, what):
    assert notices(monkeypatch, name, what, WRONG) == ((name, what) not in LOOSE)


@pytest.mark.parametrize(("name", "what"), [*LOOSE])
def test_a_larger_error_of_a_loose_bound_is_noticed(monkeypatch, name, what):
    assert notices(monkeypatch, name, what, LOOSE[name, what])
