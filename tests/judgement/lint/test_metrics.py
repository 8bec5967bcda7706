# What lint says of metrics that are signed, and of calibration; error texts are product.

import pytest

from tests.judgement.lint import test_chain


def problems(section, clause):
    return test_chain.problems(clause, "", section)


@pytest.mark.parametrize(
    "clause",
    [
        "metric: le_cam, aggregate: mean, at_most: 0.02",
        "metric: k1_nats, aggregate: p99, at_most: 0.1",
        "metric: k1_nats, aggregate: p99, at_most: -0.1",
        "metric: chi2, aggregate: mean, clip: 1, at_most: 0.02",
    ],
)
def test_a_promise_that_can_be_kept_and_broken_is_no_error(clause):
    assert problems("statistical", clause) == []


@pytest.mark.parametrize("metric", ["kl_nats", "js_nats", "entropy_nats", "logit_linf_nats"])
def test_metrics_of_whole_rows_are_numerical(metric):
    assert problems("numerical", f"metric: {metric}, at_most: 0.1") == []
    ((message, _),) = problems("statistical", f"metric: {metric}, aggregate: p99, at_most: 0.1")
    assert message == f"{metric} needs full logits; a sampled token has none"


@pytest.mark.parametrize(
    ("section", "clause", "message", "hint"),
    [
        (
            "statistical",
            "metric: k1_nats, aggregate: mean, clip: 1, at_most: 0.1",
            "k1_nats has no smallest value, so no sample can certify its mean",
            "promise aggregate: p99, or the mean of a metric that is never negative (k3_nats)",
        ),
        (
            "numerical",
            "metric: js_nats, at_most: 0.7",
            "js_nats is at most 0.693147: a limit of 0.7 can never fail",
            "write a limit below 0.693147",
        ),
        (
            "statistical",
            "metric: calibration, at_most: 0.02",
            "calibration needs full logits and golden tokens; a sampled token has neither",
            "move the clause to numerical: golden texts say which token was right",
        ),
        (
            "numerical",
            "metric: calibration, aggregate: mean, at_most: 0.02",
            "calibration is one number for all positions: it takes no aggregate",
            "remove it",
        ),
        (
            "numerical",
            "metric: calibration, clip: 1, at_most: 0.02",
            "calibration is one number for all positions: it takes no clip",
            "remove it",
        ),
        (
            "numerical",
            "metric: calibration",
            "clause 'c' has no limit",
            "add at_most: 0.02",
        ),
        (
            "numerical",
            "metric: calibration, at_least: 0.02",
            "a divergence is kept small: calibration takes at_most",
            "write at_most",
        ),
        (
            "numerical",
            "metric: calibration, at_most: 1",
            "calibration is at most 1: a limit of 1 can never fail",
            "write a limit below 1, such as 0.02",
        ),
        (
            "numerical",
            "metric: calibration, at_most: 0",
            "calibration is never negative, and rounding alone exceeds 0",
            "write a limit above 0, such as 0.02",
        ),
        (
            "numerical",
            "metric: calibration, at_most: {times: 2, of: stable}",
            "golden texts are scored by train and infer only",
            "write of: self_noise, or a number",
        ),
    ],
)
def test_a_finding_says_what_is_wrong_and_the_next_move(section, clause, message, hint):
    assert problems(section, clause) == [(message, hint)]


def test_calibration_as_numerical_is_no_error():
    assert problems("numerical", "metric: calibration, at_most: 0.02") == []
