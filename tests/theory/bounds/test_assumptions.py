# What theorems rest on: each hypothesis a proof uses is named.

import inspect

import pytest
from benchmarks.theory.theorems.gradient import ppo_clip_bias
from benchmarks.theory.theorems.trajectory import token_is_trajectory_bias

from servanda.theory.bounds.assumptions import ASSUMPTIONS
from servanda.theory.bounds.theorem import THEOREMS

REWARDS = (
    "reward_drift_from_tv",
    "reward_drift_from_chi2",
    "reward_interval",
    "osc_for_reward_drift",
    "surrogate_error",
    "surrogate_error_from_tv",
)


@pytest.mark.parametrize("name", ["sequence_tv_from_osc", "osc_for_reward_drift", "tv_from_osc"])
def test_a_drift_of_logits_bounds_what_equal_filters_keep(name):
    assert "same_filters" in THEOREMS[name].assumes


@pytest.mark.parametrize("name", ["weight_gap_from_log_ratio", "tv_from_log_ratio"])
def test_a_largest_log_ratio_is_one_of_tokens_that_nobody_drew_too(name):
    assert "every_token" in THEOREMS[name].assumes


@pytest.mark.parametrize("name", REWARDS)
def test_a_bound_on_rewards_takes_them_for_a_function_of_the_answer(name):
    assert "same_reward" in THEOREMS[name].assumes


def test_random_prompts_are_not_said_to_make_groups_independent():
    independent = ASSUMPTIONS["independent"]
    assert "shared by a batch" in independent.text
    assert "not ruled out" in independent.kept_by


def test_what_needs_support_or_a_largest_weight_has_to_be_told():
    for function, name in ((token_is_trajectory_bias, "left"), (ppo_clip_bias, "largest")):
        assert inspect.signature(function).parameters[name].default is inspect.Parameter.empty


def test_a_gap_from_a_chi2_is_an_estimate_as_the_chi2_is():
    assert THEOREMS["tis_gap_from_chi2"].standing == "estimate"


@pytest.mark.parametrize("name", ["sequence_tv_from_osc", "osc_for_reward_drift"])
def test_what_is_attained_by_one_token_only_is_not_called_sharp(name):
    assert not THEOREMS[name].sharp
