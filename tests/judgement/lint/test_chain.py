# What lint says of the bound chain and of guards; error texts are product.

import pytest

from servanda.errors import ContractError
from tests.kit import parse

TEXT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: toy}
kernels:
  train: {engine: table, model: p.json}
  infer: {engine: table, model: q.json}
workload: {prompts: p.jsonl, sampling: {max_new_tokens: 8}}
slices: [{name: depth, split: context.position, at: [4]}]
DECLARED
SECTION
"""
BYPASS = "gradient: {clip_range: [0.2, 0.28], ratio: bypass}"
FULL = "gradient: {advantage: 2, score_norm: 3}"


def problems(clause, declared="", section="statistical"):
    at = {
        "statistical": f"statistical:\n  - {{id: c, {clause}}}",
        "numerical": f"golden: {{prompts: g.jsonl}}\nnumerical:\n  - {{id: c, {clause}}}",
        "observability": f"observability: {{clauses: [{{id: c, {clause}}}]}}",
    }[section]
    text = TEXT.replace("DECLARED", declared).replace("SECTION", at)
    try:
        parse(text, "x.yaml", engines=["table"])
    except ContractError as error:
        return [(p.message, p.hint) for p in error.problems]
    return []


@pytest.mark.parametrize(
    ("clause", "declared"),
    [
        ("metric: policy_gradient_bias, at_most: 0.1", FULL),
        ("metric: policy_gradient_bias, at_most: 40", FULL.replace("{", "{loss: sequence_sum, ")),
        ("metric: weight_gap, at_most: 0.1", ""),
        ("metric: weight_gap, at_most: 15", "gradient: {loss: sequence_sum}"),
        ("metric: weight_gap, at_most: 5, slices: all", "gradient: {loss: sequence_mean}"),
        ("metric: ratio_budget, aggregate: p99, at_most: 0.5", BYPASS),
        ("metric: ratio_budget, aggregate: p99, at_most: 0", BYPASS),
        ("metric: ratio_budget, aggregate: mean, clip: 1, at_most: 0.2, slices: depth", BYPASS),
        ("metric: support_mass, at_most: 0.01", ""),
        ("metric: support_mass, clip: 1, at_most: 0.01", ""),
    ],
)
def test_a_promise_that_can_be_kept_and_broken_is_no_error(clause, declared):
    assert problems(clause, declared) == []


ADVANTAGE = (
    "policy_gradient_bias is proportional to the largest advantage, and none is declared",
    "declare gradient: {advantage: {group_size: 8}}, or the number that advantages are clipped to",
)
SCORE_NORM = (
    "policy_gradient_bias is proportional to the largest score norm, and none is declared",
    "declare gradient: {score_norm: logit_space} (sqrt 2, of the gradient in logits), or promise "
    "weight_gap, which needs none",
)
IMPORTANCE = (
    "importance weights have no largest value, so no sample can certify their gap",
    "declare gradient: {weighting: {tis: 2.0}}, or promise support_mass: where infer can draw "
    "whatever train can, nothing is left",
)
BIAS = "metric: policy_gradient_bias, at_most: 0.1"


@pytest.mark.parametrize(
    ("clause", "declared", "expected"),
    [
        (BIAS, "", [ADVANTAGE, SCORE_NORM]),
        (BIAS, "gradient: {score_norm: logit_space}", [ADVANTAGE]),
        (BIAS, "gradient: {advantage: {group_size: 8}}", [SCORE_NORM]),
        (BIAS, "gradient: {advantage: 2, score_norm: 3, weighting: is}", [IMPORTANCE]),
        ("metric: weight_gap, at_most: 0.1", "gradient: {weighting: is}", [IMPORTANCE]),
        (
            "metric: policy_gradient_bias, at_most: 12",
            FULL,
            [
                (
                    "policy_gradient_bias is at most 12 here: a limit of 12 can never fail",
                    "write a limit below 12",
                )
            ],
        ),
        (
            "metric: weight_gap, at_most: 16",
            "gradient: {loss: sequence_sum}",
            [
                (
                    "weight_gap is at most 16 here: a limit of 16 can never fail",
                    "write a limit below 16",
                )
            ],
        ),
        (
            "metric: weight_gap, at_most: 0.1, slices: depth",
            "gradient: {loss: sequence_mean}",
            [
                (
                    "weight_gap concerns whole answers, and slice 'depth' is a part of one",
                    "name slices by labels.* or request.*, or [all]; gradient: {loss: "
                    "token_mean} concerns tokens",
                )
            ],
        ),
        (
            "metric: support_mass, at_most: 1",
            "",
            [
                (
                    "support_mass is at most 1 here: a limit of 1 can never fail",
                    "write a limit below 1",
                )
            ],
        ),
        (
            "metric: support_mass, clip: 0.5, at_most: 0.1",
            "",
            [
                (
                    "clip caps the weights of support_mass: at 0.5 even identical kernels would "
                    "lack 0.5",
                    "write clip: 10, or leave it out; clip: 1 gives the total variation",
                )
            ],
        ),
        (
            "metric: support_mass, aggregate: mean, at_most: 0.1",
            "",
            [("support_mass takes no aggregate", "remove aggregate")],
        ),
        (
            "metric: support_mass, at_most: 0",
            "",
            [
                (
                    "support_mass is never negative, and no sample can show that it is 0",
                    "write a limit above 0",
                )
            ],
        ),
    ],
)
def test_what_the_chain_lacks(clause, declared, expected):
    assert problems(clause, declared) == expected


@pytest.mark.parametrize(
    ("clause", "declared", "message", "hint"),
    [
        (
            "aggregate: p99, at_most: 0.5",
            "",
            "ratio_budget is a share of the clip range, and none is declared",
            "declare gradient: {clip_range: [0.2, 0.28], ratio: bypass}",
        ),
        (
            "aggregate: p99, at_most: 0.5",
            "gradient: {clip_range: [0.2, 0.28]}",
            "ratio_budget needs to know which ratio is clipped, and none is declared",
            "declare gradient: {ratio: bypass} if it is new policy over infer",
        ),
        (
            "aggregate: p99, at_most: 0.5",
            BYPASS.replace("bypass", "decoupled"),
            "in decoupled mode the clip range bounds the policy's own update only: the gap "
            "between the kernels uses none of it",
            "promise weight_gap of the weighting that corrects it, or declare ratio: bypass if "
            "the clipped ratio is new policy over infer",
        ),
        (
            "at_most: 0.5",
            BYPASS,
            "clause 'c' needs an aggregate",
            "add aggregate: p99, or mean with clip: 1",
        ),
        (
            "aggregate: mean, at_most: 0.5",
            BYPASS,
            "the mean of ratio_budget has no bound, so no sample can certify it",
            "add clip: 1, or promise aggregate: p99",
        ),
        (
            "aggregate: max, at_most: 0.5",
            BYPASS,
            "a sample cannot certify a maximum: the next token may exceed it",
            "write p99.9",
        ),
        (
            "aggregate: p99, clip: 1, at_most: 0.5",
            BYPASS,
            "clip bounds a mean; p99 does not need it",
            "remove clip",
        ),
        (
            "aggregate: mean, clip: 1, at_most: 1",
            BYPASS,
            "a share of 1 leaves the policy's own update nothing",
            "write a share below 1, such as 0.5",
        ),
        (
            "aggregate: mean, clip: 9, at_most: 2",
            BYPASS,
            "a share of 2 leaves the policy's own update nothing",
            "write a share below 1, such as 0.5",
        ),
        (
            "aggregate: mean, clip: 0.5, at_most: 0.6",
            BYPASS,
            "ratio_budget is at most 0.5 here: a limit of 0.6 can never fail",
            "write a limit below 0.5",
        ),
        (
            "aggregate: p99, at_most: 0.5",
            "gradient: {clip_range: [0, 0.28], ratio: bypass}",
            "a clip range of [0, 0.28] has no width on one side of 1",
            "write both distances from 1, such as [0.2, 0.28]",
        ),
        (
            "aggregate: p99, at_most: 0.5",
            "gradient: {clip_range: [0.8, 1.28], ratio: bypass}",
            "clip_range holds distances from 1, and [0.8, 1.28] is a range around it",
            "did you mean [0.2, 0.28]?",
        ),
    ],
)
def test_what_a_ratio_budget_lacks(clause, declared, message, hint):
    assert problems(f"metric: ratio_budget, {clause}", declared) == [(message, hint)]


@pytest.mark.parametrize(
    ("clause", "declared"),
    [
        (BIAS, "gradient: {advantage: -1, score_norm: 3}"),
        (BIAS, "gradient: {advantage: {group_size: 1}, score_norm: 3}"),
        *[
            ("metric: weight_gap, at_most: 0.1", f"gradient: {{weighting: {weighting}}}")
            for weighting in (
                "{tis: 0.5}",
                "{mis: [2, 0.5]}",
                "{mis: [-1, 0]}",
                "{tis: 2, clip: 1}",
            )
        ],
        ("metric: ratio_budget, aggregate: p99, at_most: 0.5", "gradient: {clip_range: 3}"),
        ("metric: reward_drift, at_most: 0.1", "reward: {range: [1, 0]}"),
        ("metric: reward_drift, at_most: 0.1", "reward: {range: 3}"),
        ("metric: reward_gap, at_most: 0.1", "reward: {range: [1, 0], of: exact_answer}"),
        ("metric: reward_gap, at_most: 0.1", "reward: {range: [0, 1], of: [x]}"),
        ("metric: reward_gap, at_most: 0.1", "reward: {range: [1, 1]}"),
    ],
)
def test_a_wrong_declaration_is_said_once_where_it_is_written(clause, declared):
    assert len(problems(clause, declared)) == 1


@pytest.mark.parametrize(
    ("of", "hint"),
    [
        (
            "zebra",
            "known: contains_answer, exact_answer. A reward of your own is rewards.py:score",
        ),
        (
            "exact_answr",
            "did you mean 'exact_answer'? A reward of your own is rewards.py:score",
        ),
    ],
)
def test_an_unknown_reward_is_told_the_known_ones_in_sentences(of, hint):
    found = problems("metric: support_mass, at_most: 0.01", f"reward: {{of: {of}}}")
    assert found == [(f"no reward is named {of!r}", hint)]


@pytest.mark.parametrize("limit", ["at_most: 1", "at_least: 1"])
def test_coherence_takes_no_limit(limit):
    found = problems(f"metric: weight_mean_check, {limit}", section="observability")
    hint = "remove it: the check rejects at the confidence of the contract"
    assert found == [("weight_mean_check takes no limit", hint)]
    assert problems("metric: weight_mean_check", section="observability") == []
