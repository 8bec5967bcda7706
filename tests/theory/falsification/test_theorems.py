# Every theorem is challenged, none is broken, and those that are called sharp are attained.

import numpy as np
import pytest
from benchmarks.theory import CHALLENGES, Trial, falsify

from servanda.theory.bounds.assumptions import ASSUMPTIONS
from servanda.theory.bounds.theorem import THEOREMS

CASES = 2000
SHARP = 0.99  # of its bound, in so many cases


def test_every_theorem_is_challenged():
    assert set(CHALLENGES) == set(THEOREMS)


@pytest.mark.parametrize("name", [*THEOREMS])
def test_no_case_breaks_a_theorem(name):
    found = falsify(name, np.random.default_rng(7), CASES)
    assert found.cases >= CASES
    assert found.violations == 0, found.worst


@pytest.mark.parametrize("name", [name for name, t in THEOREMS.items() if t.sharp])
def test_what_is_called_sharp_is_attained(name):
    assert falsify(name, np.random.default_rng(7), CASES).tightest > SHARP


@pytest.mark.parametrize("name", [*THEOREMS])
def test_a_theorem_says_what_it_states_and_rests_on(name):
    theorem = THEOREMS[name]
    assert theorem.statement
    assert theorem.source
    assert set(theorem.assumes) <= set(ASSUMPTIONS)


@pytest.mark.parametrize(
    ("sense", "broken"), [("at most", [True, False]), ("at least", [False, True])]
)
def test_a_trial_tells_on_which_side_a_value_breaks_its_bound(sense, broken):
    trial = Trial(np.array([0.2, 0.1]), np.array([0.1, 0.2]), sense)
    assert trial.violated_N.tolist() == broken


def test_a_side_trial_can_be_broken_and_says_nothing_of_how_tight_a_theorem_is(monkeypatch):
    def trials(rng, n):
        yield Trial(np.array([0.2]), np.array([1.0]))
        yield Trial(np.array([1.0, 3.0]), np.array([1.0, 2.0]), what="a lemma", side=True)

    monkeypatch.setitem(CHALLENGES._things, "grpo_bias", trials)
    found = falsify("grpo_bias", np.random.default_rng(0), 1)
    assert (found.cases, found.tightest, found.typical) == (3, 0.2, 0.2)
    assert (found.violations, found.worst) == (1, "a lemma")


@pytest.mark.parametrize(
    "name", ["grpo_bias", "token_is_trajectory_bias", "surrogate_error_from_tv", "ratio_budget"]
)
def test_what_is_attained_in_part_comes_near_its_bound_without_a_lemma(name):
    assert falsify(name, np.random.default_rng(7), CASES).tightest > SHARP


def test_rounding_breaks_nothing():
    assert not Trial(np.array([0.1 + 1e-13]), np.array([0.1])).violated_N.any()
