# The bound chain of a contract: every number against its theorem and against enumeration.

import json
import math
import re

import numpy as np
import pytest
from benchmarks.theory.random_kernels import distributions, near

from servanda.contract.model import Weights
from servanda.judgement.bound_chain.chain import Rest, chain, rest
from servanda.report.chain_text import chain_text
from servanda.runner import run
from servanda.theory.bounds.drift import tv_from_exceedance, tv_from_osc
from servanda.theory.bounds.gradient import (
    LOGIT_SCORE_NORM,
    clipped_gradient_bias,
    gradient_direction,
    kl_penalty_bias,
    policy_gradient_bias,
    ratio_budget,
)
from servanda.theory.bounds.importance_weights import PSI
from servanda.theory.bounds.sequence import sequence_tv_from_osc, sequence_tv_from_token_tv
from servanda.theory.bounds.theorem import THEOREMS
from servanda.theory.bounds.third_kernel import tv_with_own_routes, weight_gap_with_lag
from servanda.theory.sampling import Sampling, processed_logprobs
from tests import kit
from tests.kit import servanda
from tests.test_examples import EXAMPLES

PROMPTS = ((0,), (1,), (2,))
WIDTH = 4
CONTRACTS = sorted(EXAMPLES.rglob("*.kernelcontract.yaml"))
DECLARED = (
    "reward: {range: [-1, 1]}\n"
    "gradient: {advantage: 2, score_norm: logit_space, clip_range: [0.2, 0.28], ratio: bypass}"
)


def contract(tmp_path, more="", *, limit=0.05, declared=DECLARED, numerical="", **kept):
    golden = kit.golden(tmp_path) if numerical else ""
    if numerical:
        more += f"numerical:\n{numerical}\n"
    path, pair = kit.write(
        tmp_path, limit=limit, slices=declared, more=more, golden=golden, width=WIDTH, **kept
    )
    return run.load(path), pair


def numbers(found, clause):
    """(what, number) of a path; None where it says nothing."""
    steps = [step for step in found.steps if step.clause == clause]
    return {step.what: None if step.vacuous else step.number for step in steps}


# each number by its theorem


def test_the_mean_tv_of_tokens_leads_to_answers_rewards_and_gradients(tmp_path):
    found = chain(contract(tmp_path)[0])
    whole = float(sequence_tv_from_token_tv(0.05, WIDTH))
    assert numbers(found, "tv") == {
        "TV of the next token, on average": 0.05,
        "TV of whole responses, up to 4 tokens": pytest.approx(whole),
        "drift of any reward in [-1, 1]": pytest.approx(2 * whole),
        "gap of the token weights, uncorrected": pytest.approx(0.1),
        "bias of the policy gradient": pytest.approx(
            float(policy_gradient_bias(0.1, 2, LOGIT_SCORE_NORM))
        ),
    }
    standings = [step.standing for step in found.steps]
    assert standings == [*["certificate"] * 4, "conditional bound"]
    assert [step.level for step in found.steps] == [0, 1, 2, 1, 2]


def test_the_drift_of_logits_is_a_fact_at_golden_texts_and_a_condition_elsewhere(tmp_path):
    found = chain(contract(tmp_path, numerical=OSC)[0])
    by_what = {step.what: step for step in found.steps if step.clause == "drift"}
    golden = by_what["TV of the next token, golden texts"]
    whole = by_what["TV of whole responses, up to 4 tokens"]
    assert golden.standing == "fact"
    assert golden.number == pytest.approx(float(tv_from_osc(0.1)))
    assert "every_context" not in golden.assumes
    assert by_what["KL of the next token, golden texts"].standing == "fact"
    assert whole.standing == "conditional bound"
    assert whole.number == pytest.approx(float(sequence_tv_from_osc(0.1, WIDTH)))
    assert "every_context" in whole.assumes
    used = ratio_budget(0.1, 0.2, 0.28)
    assert by_what["share of the clip range used"].number == pytest.approx(
        max(float(used.used_up), float(used.used_down))
    )


def test_a_temperature_divides_the_drift_of_logits(tmp_path):
    found = numbers(chain(sampled(contract(tmp_path, numerical=OSC)[0], temperature=0.5)), "drift")
    assert found["osc at temperature 0.5, golden texts"] == pytest.approx(0.2)
    assert found["TV of the next token, golden texts"] == pytest.approx(float(tv_from_osc(0.2)))


OSC = "  - {id: drift, metric: logit_osc_nats, at_most: 0.1, slices: all}"
GOLDEN_TV = "  - {id: golden, metric: tv, aggregate: max, at_most: 0.06, slices: all}"
FACTS = "TV of the next token, golden texts"


def sampled(contract, train=None, mask="own", **transform):
    """The contract under another sampling transform, and one of train's own."""
    sampling = contract.workload.sampling.model_copy(update=transform)
    workload = contract.workload.model_copy(update={"sampling": sampling})
    own = None if train is None else Sampling(**train)
    trained = contract.kernels.train.model_copy(update={"sampling": own, "mask": mask})
    kernels = contract.kernels.model_copy(update={"train": trained})
    return contract.model_copy(update={"workload": workload, "kernels": kernels})


def test_a_tv_of_raw_logits_says_nothing_of_tokens_drawn_at_a_temperature(tmp_path):
    """0.05 of golden logits is 0.27 at temperature 0.25: beyond what the chain once said."""
    toy = contract(tmp_path, numerical=GOLDEN_TV)[0]
    logp_RV = np.log([kit.BASE, kit.moved(kit.BASE, 0.05)])
    raw, cold = (np.exp(processed_logprobs(logp_RV, Sampling(temperature=t))) for t in (1.0, 0.25))
    assert np.abs(raw[0] - raw[1]).sum() / 2 == pytest.approx(0.05)
    assert np.abs(cold[0] - cold[1]).sum() / 2 > 0.2
    assert numbers(chain(toy), "golden")["TV of the next token, every context"] == 0.06
    found = chain(sampled(toy, temperature=0.25))
    assert numbers(found, "golden") == {FACTS: 0.06}
    assert dict(found.left_out)["golden"].startswith("beyond golden texts: their tv is of raw")


@pytest.mark.parametrize(
    ("transform", "train", "goes_on"),
    [
        ({}, None, True),
        ({}, {}, True),
        ({"top_k": 3}, None, False),
        ({"top_p": 0.9}, None, False),
        ({"min_p": 0.1}, None, False),
        ({}, {"temperature": 0.5}, False),
        ({}, {"top_k": 3}, False),
        ({"temperature": 0.5}, {"temperature": 0.5}, False),
    ],
)
def test_a_golden_tv_goes_on_where_tokens_are_drawn_from_raw_logits(
    tmp_path, transform, train, goes_on
):
    toy = contract(tmp_path, numerical=GOLDEN_TV)[0]
    found = chain(sampled(toy, train, **transform))
    assert (len(numbers(found, "golden")) > 1) == goes_on
    assert ("golden" in dict(found.left_out)) == (not goes_on)


def test_a_drift_of_logits_under_filters_is_a_condition_even_at_golden_texts(tmp_path):
    toy = contract(tmp_path, numerical=OSC)[0]
    found = chain(sampled(toy, top_p=0.9))
    by_what = {step.what: step for step in found.steps if step.clause == "drift"}
    assert by_what["osc of the drift of logits, golden texts"].standing == "fact"
    for what in (FACTS, "KL of the next token, golden texts"):
        assert by_what[what].standing == "conditional bound"
        assert "same_filters" in by_what[what].assumes


@pytest.mark.parametrize(
    ("transform", "train", "reason"),
    [
        ({}, {"temperature": 0.5}, "the kernels sample at temperatures 0.5 and 1,"),
        ({"top_k": 3}, {"top_k": 2}, "each kernel filters its tokens with its own logits"),
        ({"top_k": 3}, {}, "each kernel filters its tokens with its own logits"),
    ],
)
def test_a_drift_of_logits_ends_where_each_kernel_samples_in_its_own_way(
    tmp_path, transform, train, reason
):
    toy = contract(tmp_path, numerical=OSC)[0]
    found = chain(sampled(toy, train, **transform))
    assert numbers(found, "drift") == {"osc of the drift of logits, golden texts": 0.1}
    assert dict(found.left_out)["drift"].startswith(f"beyond golden logits: {reason}")


def test_a_mask_that_train_takes_over_makes_the_filters_one(tmp_path):
    toy = contract(tmp_path, numerical=OSC)[0]
    found = chain(sampled(toy, {}, mask="replayed", top_k=3))
    assert FACTS in numbers(found, "drift")
    (filters,) = [rest for rest in found.rests if rest.name == "same_filters"]
    assert filters.said == "declared: the train kernel reuses the tokens that the infer kernel kept"


def test_a_percentile_says_of_the_mean_what_its_tail_leaves(tmp_path):
    tail = (
        "  - {id: tail, metric: abs_log_ratio_nats, aggregate: p99, at_most: 0.02, slices: all}\n"
    )
    found = numbers(chain(contract(tmp_path, tail)[0]), "tail")
    mean = float(tv_from_exceedance(0.02, 0.01))
    assert found["TV of the next token, on average"] == pytest.approx(mean)
    assert found["share of the clip range used, all but 1 % of tokens"] == pytest.approx(
        0.02 / -math.log(0.8)
    )


def test_a_realised_mean_says_only_an_estimate_of_whole_answers(tmp_path):
    found = chain(contract(tmp_path, claim="realised")[0])
    by_what = {step.what: step.standing for step in found.steps}
    assert by_what["TV of the next token, on average"] == "certificate"
    assert by_what["TV of whole responses, up to 4 tokens"] == "estimate"
    assert by_what["gap of the token weights, uncorrected"] == "certificate"


def test_a_gap_after_a_correction_leads_to_its_bias_and_the_tv_does_not(tmp_path):
    declared = "gradient: {advantage: 2, score_norm: 3, weighting: {tis: 2.0}}"
    clauses = (
        "  - {id: gap, metric: weight_gap, at_most: 0.02, slices: all}\n"
        "  - {id: answers, metric: reward_drift, at_most: 0.1, slices: all}\n"
    )
    declared += "\nreward: {range: [0, 1]}"
    found = chain(contract(tmp_path, clauses, declared=declared)[0])
    assert numbers(found, "gap") == {
        "gap of the token weights, after tis": 0.02,
        "bias of the policy gradient": pytest.approx(0.12),
    }
    assert "gap of the token weights, uncorrected" not in numbers(found, "tv")
    assert numbers(found, "answers") == {"drift of any reward in [0, 1]": 0.1}


def test_what_says_no_more_than_the_range_is_vacuous_and_no_number(tmp_path):
    found = chain(contract(tmp_path, limit=0.4)[0])
    assert numbers(found, "tv")["drift of any reward in [-1, 1]"] is None
    text = chain_text(found)
    assert "VACUOUS: 2 of 5 bounds are no smaller than" in text
    assert text.index("VACUOUS") < text.index("assumes")
    whole = "(tv: from 'TV of whole responses, up to 4 tokens' on)"
    assert whole in " ".join(text.split())
    assert "measure your own reward on both kernels (metric reward_gap)" in " ".join(text.split())
    plain = [step for step in found.to_dict()["steps"] if step["vacuous"]]
    assert [step["number"] for step in plain] == [None, None]


def test_rounding_makes_no_number_of_what_is_vacuous(tmp_path):
    """tanh(15) is 1 - 2e-13: below 1, and says nothing."""
    osc = OSC.replace("0.1", "60")
    found = numbers(chain(contract(tmp_path, numerical=osc)[0]), "drift")
    assert found["TV of the next token, every context"] is None
    assert found["gap of the token weights, uncorrected"] is None
    assert found["bias of the policy gradient"] is None


def test_a_clip_range_that_is_used_up_is_vacuous(tmp_path):
    osc = OSC.replace("0.1", "0.4")
    found = chain(contract(tmp_path, numerical=osc)[0])
    assert numbers(found, "drift")["share of the clip range used"] is None
    text = " ".join(chain_text(found).split())
    assert "drift: from 'share of the clip range used' on" in text
    assert "Where the clip range is used up, none of it is left" in text


BUDGETS = (
    "  - {id: support, metric: support_mass, clip: 5, at_most: 0.01, slices: all}\n"
    "  - {id: mean, metric: ratio_budget, aggregate: mean, clip: 2, at_most: 0.3, slices: all}\n"
    "  - {id: tail, metric: ratio_budget, aggregate: p99, at_most: 0.5, slices: all}\n"
)


def test_a_budget_is_called_what_it_is(tmp_path):
    found = chain(contract(tmp_path, BUDGETS)[0])
    assert numbers(found, "support") == {
        "train mass that infer cannot sample, or over 5 times its own": 0.01
    }
    assert numbers(found, "mean") == {"share of the clip range used": 0.3}
    assert numbers(found, "tail") == {"share of tokens that use over 0.5 of the clip range": 0.01}
    assert max(map(len, chain_text(found).split("\n"))) <= 100


@pytest.mark.parametrize(
    ("loss", "unit", "assumed"),
    [
        ("token_mean", "", True),
        ("sequence_sum", "per answer", True),
        ("sequence_mean", "per answer", False),
    ],
)
def test_a_bias_has_the_unit_and_the_assumptions_of_its_loss(tmp_path, loss, unit, assumed):
    """Whether it follows from the gap of weights, or is promised itself."""
    clauses = (
        "  - {id: gap, metric: weight_gap, at_most: 0.02, slices: all}\n"
        "  - {id: bias, metric: policy_gradient_bias, at_most: 0.1, slices: all}\n"
    )
    declared = f"gradient: {{advantage: 2, score_norm: 3, loss: {loss}}}"
    found = chain(contract(tmp_path, clauses, declared=declared)[0])
    followed, promised = (
        next(step for step in found.steps if (step.clause, step.level) == at)
        for at in (("gap", 1), ("bias", 0))
    )
    assert followed.unit == promised.unit == unit
    for step in (followed, promised):
        assert ("constant_divisor" in step.assumes) == assumed
        assert {"advantage", "score_norm", "token_level"} <= {*step.assumes}


@pytest.mark.parametrize(
    ("of", "state", "said"),
    [
        ("", "not testable", "not testable by any run"),
        (
            ", of: exact_answer",
            "kept",
            "kept by construction for exact_answer: one function for both kernels' responses",
        ),
    ],
)
def test_a_reward_that_is_one_function_is_the_same_for_both(tmp_path, of, state, said):
    declared = f"reward: {{range: [-1, 1]{of}}}"
    path = contract(tmp_path, declared=declared)[0]
    (same,) = [rest for rest in chain(path).rests if rest.name == "same_reward"]
    assert (same.state, same.said) == (state, said)


def test_what_is_assumed_of_tokens_and_filters_has_a_state(tmp_path):
    path = contract(tmp_path, numerical=OSC)[0]
    assert rest("every_token", path, None).said == "not testable by any run"
    assert rest("same_filters", path, None).said == (
        "kept by construction: the contract filters nothing"
    )
    assert rest("same_filters", sampled(path, top_k=3), None).state == "untested"
    drawn = path.workload.model_copy(update={"source": "trainer"})
    trained = path.model_copy(update={"workload": drawn})
    assert rest("same_filters", trained, None) == Rest(
        "same_filters",
        "both kernels sample from the same kept set of tokens",
        "declared",
        "declared: nothing is filtered, and a trainer samples the tokens",
    )


def test_a_clause_of_which_nothing_follows_says_why(tmp_path):
    more = (
        "  - {id: part, metric: tv, aggregate: mean, at_most: 0.1, slices: first}\n"
        "  - {id: cut, metric: k3_nats, aggregate: mean, clip: 1, at_most: 0.1, slices: all}\n"
        "  - {id: twice, metric: tv, aggregate: mean, at_most: {times: 3, of: self_noise},"
        " slices: all}\n"
    )
    slices = "slices: [{name: first, split: labels.first}]"
    found = chain(contract(tmp_path, more, declared=slices)[0])
    assert dict(found.left_out) == {
        "part": "it covers parts of the traffic; the chain is for the whole",
        "cut": "no bound of the chain starts from k3_nats",
        "twice": "its limit is known once it is measured: give the run directory",
    }


def test_nothing_is_said_of_answers_whose_length_nobody_declares(tmp_path):
    from tests.contract.test_whole_language import TRAINER

    path = tmp_path / "rl.yaml"
    path.write_text(TRAINER)
    found = chain(run.load(path))
    assert found.tokens is None
    assert not any("answers" in step.what for step in found.steps)
    assert "the length of a response is not declared" in chain_text(found)


WITH_ONE_MORE = ("clipped_gradient_bias", "kl_penalty_bias", "gradient_direction")


def test_what_needs_one_more_number_is_a_formula_of_its_theorem(tmp_path):
    declared = "gradient: {advantage: 2, score_norm: 1, clip_range: [0.2, 0.28], ratio: decoupled}"
    toy = contract(tmp_path, declared=declared)[0]
    assert {f.theorem for f in chain(toy).further} == {*WITH_ONE_MORE}
    train = toy.kernels.train.model_copy(update={"routes": "replayed"})
    moving = {
        "kernels": toy.kernels.model_copy(update={"train": train}),
        "weights": Weights(changes="every_step"),
    }
    toy = toy.model_copy(update=moving)
    found = chain(toy)
    (bias,) = [s.number for s in found.steps if s.what == "bias of the policy gradient"]
    gap = bias / 2
    values = {
        "tv_with_own_routes": tv_with_own_routes(0.05, 0.3),
        "weight_gap_with_lag": weight_gap_with_lag(gap, 0.3, PSI["naive"]()),
        "clipped_gradient_bias": clipped_gradient_bias(gap, 2, 1, 0.28, 3),
        "kl_penalty_bias": kl_penalty_bias(gap, 2, 1, 0.1, 10, 4),
        "gradient_direction": gradient_direction(bias, 0.5),
    }
    words = {"dual clip": "3", "beta": "0.1", "clip": "10", "tokens": "4", "norm": "0.5"}
    assert {f.theorem for f in found.further} == {*values}
    for one in found.further:
        formula = re.sub(r"TV\(.*\)", "0.3", one.bound.partition(", so ")[0])
        for word, value in words.items():
            formula = formula.replace(word, value)
        formula = formula.replace(" x ", " * ").replace("^", "**")
        known = {"sqrt": math.sqrt, "max": max}
        assert eval(formula, known) == pytest.approx(float(values[one.theorem]), rel=5e-3)
    text, plain = chain_text(found), found.to_dict()["further"]
    assert f"bias of the policy gradient, clipped, every epoch: {bias:.3g} x max(1.28" in text
    assert [one["theorem"]["name"] for one in plain] == [one.theorem for one in found.further]
    from_ = float(re.search(r"from a norm of (\S+) on", text.replace("\n    ", " "))[1])
    assert gradient_direction(bias, from_) == pytest.approx(0.9, abs=5e-3)
    assert "sharp" in text and "clipped_gradient_bias: With weights psi beside" in text


@pytest.mark.parametrize(
    ("weighting", "loss", "multiple"),
    [
        ("{tis: 2.0}", "token_mean", "+ 1 x TV"),
        ("{clip: 0.2}", "token_mean", "+ 2 x TV"),
        ("{mis: [0.5, 2]}", "token_mean", None),  # its gap jumps
        ("{tis: 2.0}", "sequence_mean", None),  # a token counts by its place
    ],
)
def test_a_lag_is_a_multiple_of_its_tv_where_there_is_one(tmp_path, weighting, loss, multiple):
    more = "  - {id: gap, metric: weight_gap, at_most: 0.05, slices: all}\n"
    declared = f"gradient: {{weighting: {weighting}, loss: {loss}}}"
    toy = contract(tmp_path, more, declared=declared)[0]
    assert not chain(toy).further
    found = chain(toy.model_copy(update={"weights": Weights(changes="every_step")})).further
    assert [one.theorem for one in found] == ["weight_gap_with_lag"] * (multiple is not None)
    assert all(one.bound.startswith(f"0.05 {multiple}") for one in found)


def test_whole_conversations_of_a_trainer_rest_on_their_environment(tmp_path):
    more = "  - {id: reward, metric: reward_drift, at_most: 0.5, slices: all}\n"
    toy = contract(tmp_path, more)[0]
    drawn = toy.workload.model_copy(update={"source": "trainer"})
    for one, turns in ((toy, False), (toy.model_copy(update={"workload": drawn}), True)):
        steps = [step for step in chain(one).steps if "reward" in step.what]
        assert {s.clause for s in steps} == {"tv", "reward"}
        assert all(("same_environment" in step.assumes) == turns for step in steps)
        whole = [step.theorem for step in chain(one).steps if "whole" in step.what]
        assert whole == [f"{'conversation' if turns else 'sequence'}_tv_from_token_tv"]
        assert ("tools and users answer both kernels" in chain_text(chain(one))) == turns


# against enumeration


def pair_of(seed, tmp_path, **more):
    """Random tables over four tokens and an end, near one another."""
    rng = np.random.default_rng(seed)
    names = ["", *kit.TOKENS[:-1]]
    p_CV = 0.9 * distributions(rng, len(names), 5, zeros=False) + 0.1 / 5
    q_CV = 0.9 * near(rng, p_CV) + 0.1 * p_CV
    p = {name: (row / row.sum()).tolist() for name, row in zip(names, p_CV, strict=True)}
    q = {name: (row / row.sum()).tolist() for name, row in zip(names, q_CV, strict=True)}
    return kit.write(tmp_path, p=p, q=q, width=WIDTH, slices=DECLARED, **more)


def truths(pair):
    """What the chain bounds, exactly: averages over prompts, and over contexts as infer draws."""
    rng = np.random.default_rng(0)
    contexts = [(c, mass) for p in PROMPTS for _, c, mass in pair.visits(p, WIDTH)]
    total = math.fsum(mass for _, mass in contexts)
    bent = np.zeros(5)
    for context, mass in contexts:
        p_V, q_V = pair.rows(context)
        advantage_V = rng.choice([-2.0, 2.0], 5)  # of each token, at its declared bound
        bent += mass / total * (((q_V - p_V) * advantage_V) @ (np.eye(5) - p_V))
    return {
        "TV of the next token, on average": pair.mean_tv(PROMPTS, WIDTH),
        "TV of whole responses, up to 4 tokens": np.mean(
            [pair.sequence_tv(prompt, WIDTH) for prompt in PROMPTS]
        ),
        "drift of any reward in [-1, 1]": np.mean(
            [
                abs(pair.reward_drift(prompt, WIDTH, lambda y: 1.0 if y[0] == 0 else -1.0))
                for prompt in PROMPTS
            ]
        ),
        "gap of the token weights, uncorrected": 2 * pair.mean_tv(PROMPTS, WIDTH),
        "bias of the policy gradient": float(np.linalg.norm(bent)),
    }


@pytest.mark.parametrize("seed", range(12))
def test_no_number_of_a_chain_lies_below_the_truth(seed, tmp_path):
    """Limits at the exact values of two tables; then everything that follows is enumerated."""
    _, pair = pair_of(seed, tmp_path)
    tv = pair.mean_tv(PROMPTS, WIDTH)
    rows = [pair.rows(context) for p in PROMPTS for _, context, _ in pair.visits(p, WIDTH)]
    osc = max(float(np.ptp(np.log(p_V) - np.log(q_V))) for p_V, q_V in rows)
    beyond, share = tail_of(pair)
    more = (
        f"  - {{id: tail, metric: abs_log_ratio_nats, aggregate: p{100 - 100 * share:.6f}, "
        f"at_most: {beyond!r}, slices: all}}\n"
    )
    golden = kit.golden(tmp_path)
    numerical = f"  - {{id: drift, metric: logit_osc_nats, at_most: {osc!r}, slices: all}}"
    path, pair = pair_of(
        seed, tmp_path, limit=repr(tv), more=f"{more}numerical:\n{numerical}\n", golden=golden
    )
    found = chain(run.load(path))
    exact = truths(pair)
    followed = 0
    for step in found.steps:
        if step.what in exact and not step.vacuous:
            assert step.number >= exact[step.what] - 1e-6, step
            followed += step.level > 0
    assert followed >= 6


def tail_of(pair):
    """A threshold, and a share that is at least that of infer's tokens beyond it."""
    found = []
    for prompt in PROMPTS:
        for _, context, mass in pair.visits(prompt, WIDTH):
            p_V, q_V = pair.rows(context)
            found += [(abs(math.log(p / q)), mass * q) for p, q in zip(p_V, q_V, strict=True)]
    total = math.fsum(mass for _, mass in found)
    beyond = sorted(ratio for ratio, _ in found)[len(found) // 2]
    share = math.fsum(mass for ratio, mass in found if ratio > beyond) / total
    return beyond, min(math.ceil(share * 1e4) / 1e4 + 1e-4, 0.99)


# with a verdict


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    osc = "numerical: [{id: drift, metric: logit_osc_nats, at_most: 2, slices: all}]\n"
    clauses = (
        "  - {id: reward, metric: reward_drift, at_most: 0.5, slices: all}\n"
        "  - {id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.5, slices: all}\n"
    )
    path, pair = kit.write(
        folder,
        slices=DECLARED,
        more=clauses + osc,
        golden=kit.golden(folder),
        width=WIDTH,
        q={"": kit.moved(kit.BASE, 0.02)},
        limit=0.2,
    )
    run.check(path, run_dir=folder / "run", open=run.in_process)
    return folder, path, pair


def test_with_a_verdict_the_chain_starts_from_what_was_shown(judged):
    folder, _, pair = judged
    data = json.loads(
        servanda("contract", "explain", "--chain", folder / "run", "--format", "json").output
    )
    assert data["shown"]
    steps = {(step["clause"], step["what"]): step for step in data["steps"]}
    shown = steps["tv", "TV of the next token, on average"]
    assert pair.mean_tv(PROMPTS, WIDTH) < shown["number"] < 0.2
    truth = np.mean([pair.sequence_tv(prompt, WIDTH) for prompt in PROMPTS])
    answers = steps["tv", "TV of whole responses, up to 4 tokens"]
    assert truth < answers["number"] == pytest.approx(min(1.0, WIDTH * shown["number"]))
    assert answers["theorem"]["name"] == "sequence_tv_from_token_tv"
    assert 2 * truth < steps["reward", "drift of any reward in [-1, 1]"]["number"] < 0.5
    osc = steps["drift", "osc of the drift of logits, golden texts"]["number"]
    assert osc == pytest.approx(math.log(0.35 / 0.33) + math.log(0.27 / 0.25))


def test_a_verdict_says_what_became_of_each_assumption(judged):
    folder = judged[0]
    data = json.loads(
        servanda("contract", "explain", "--chain", folder / "run", "--format", "json").output
    )
    rests = {rest["name"]: rest for rest in data["rests"]}
    assert rests["sampler"]["state"] == "not rejected"
    assert rests["sampler"]["said"].startswith("not rejected on ")
    assert rests["sampler"]["said"].endswith(" tokens, by sampler_fidelity")
    assert rests["order"]["state"] == rests["same_tokens"]["state"] == "kept"
    assert rests["advantage"]["state"] == rests["one_ratio"]["state"] == "declared"
    assert rests["every_context"]["state"] == rests["token_level"]["state"] == "not testable"


def but(folder, clause, **changes):
    """The chain of a verdict with some cells changed."""
    from servanda.runner.finished_run import read

    verdict = read(folder / "run")
    cells = [c.but(**changes) if c.clause == clause else c for c in verdict.cells]
    changed = type(verdict)(**{**vars(verdict), "cells": tuple(cells)})
    return chain(run.load(folder / "toy.kernelcontract.yaml"), changed)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"interval": None}, "it has an estimate and no interval, so it shows no upper end"),
        ({"interval": (0.2, 0.1)}, "its interval is empty, so it shows no upper end"),
        ({"interval": (0.0, math.inf)}, "it has no upper end"),
        (
            {"outcome": "error", "note": "a reward of 3"},
            "it is in error, so it shows nothing: a reward of 3",
        ),
    ],
)
def test_a_cell_without_an_upper_end_shows_none(judged, changes, reason):
    found = but(judged[0], "tv", **changes)
    assert dict(found.left_out)["tv"] == reason
    assert "tv" not in {step.clause for step in found.steps}
    assert numbers(but(judged[0], "drift", interval=None), "drift")  # a fact needs no interval


@pytest.mark.parametrize(
    ("interval", "number"), [((-2.0, 0.1), None), ((-0.3, 0.1), 0.3), ((-0.1, 0.2), 0.2)]
)
def test_a_reward_gap_of_the_whole_range_is_vacuous(judged, tmp_path, interval, number):
    from servanda.runner.finished_run import read

    clause = "  - {id: gap, metric: reward_gap, at_most: 0.5, slices: all}\n"
    declared = "reward: {range: [-1, 1], of: exact_answer}"
    verdict = read(judged[0] / "run")
    cell = next(c for c in verdict.cells if c.clause == "tv" and c.slice == "all")
    cell = cell.but(clause="gap", metric="reward_gap", interval=interval)
    path = contract(tmp_path, clause, declared=declared)[0]
    found = chain(path, type(verdict)(**{**vars(verdict), "cells": (cell,)}))
    assert numbers(found, "gap") == {"gap of your own reward, up or down": number}


def test_a_failed_precondition_shows_nothing_and_no_text_says_that_it_was_not_rejected(judged):
    failed = "a precondition failed (sampler_fidelity), so it shows nothing"
    for outcome in ("violated", "error"):
        found = but(judged[0], "sampler_fidelity", outcome=outcome)
        text = chain_text(found)
        assert "not rejected" not in text
        assert "tested by sampler_fidelity" not in text
        assert {rest.state for rest in found.rests if rest.name == "sampler"} <= {"rejected"}
        assert dict(found.left_out) == {"tv": failed, "reward": failed, "tail": failed}
        assert {step.clause for step in found.steps} == {"drift"}


def test_the_text_fits_a_screen_and_names_every_theorem(judged):
    folder = judged[0]
    done = servanda("contract", "explain", "--chain", folder / "run")
    assert done.exit_code == 0
    assert max(map(len, done.output.split("\n"))) <= 100
    assert "implications of this run's upper bounds, for responses of up to 4 tokens" in done.output
    for name in ("tv_from_osc", "sequence_tv_from_token_tv", "policy_gradient_bias"):
        assert f"{name}: {THEOREMS[name].statement.split(',')[0][:30]}" in done.output
    done = servanda("contract", "explain", "--chain", judged[1])  # a contract, by its limits
    assert "toy: implications of its limits" in done.output
    assert "tested by sampler_fidelity as it runs" in done.output


def test_the_chain_of_what_is_not_there(tmp_path, judged):
    done = servanda("contract", "explain", "--chain", tmp_path / "none")
    assert done.exit_code == 2
    assert f"there is no {tmp_path / 'none'}" in done.output
    assert "hint: --chain takes a contract, a run directory" in done.output
    data = json.loads((judged[0] / "run" / "attempt-1" / "verdict.json").read_text())
    data["circumstances"]["contract_text"] = ""
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(data))
    done = servanda("contract", "explain", "--chain", bare)
    assert done.exit_code == 4
    assert "the verdict does not hold the text of its contract" in done.output
    text = servanda("contract", "explain", judged[1])
    data = json.loads(servanda("contract", "explain", judged[1], "--format", "json").stdout)
    assert text.stdout.startswith(data["text"])


@pytest.mark.parametrize("format_", ["text", "json"])
@pytest.mark.parametrize("path", CONTRACTS, ids=lambda path: path.name)
def test_every_example_has_a_chain(path, format_):
    assert servanda("contract", "explain", "--chain", path, "--format", format_).exit_code == 0


def test_a_monitored_clause_promises_nothing(tmp_path):
    more = (
        "  - {id: seen, metric: tv, aggregate: mean, at_most: 0.01, mode: monitor, slices: all}\n"
    )
    text = chain_text(chain(contract(tmp_path, more)[0]))
    assert "seen  (monitored, not promised)" in text


def test_the_page_folds_what_a_verdict_implies(judged, tmp_path):
    page = tmp_path / "page.html"
    assert servanda("tools", "report", judged[0] / "run", "-o", page).exit_code == 0
    text = page.read_text()
    assert '<h2 id="chain">' in text
    assert re.search(r"\d+ numbers, 3 of them vacuous", text)
    assert "implications of this run&#39;s upper bounds, for responses of up to 4 tokens" in text
    data = json.loads((judged[0] / "run" / "attempt-1" / "verdict.json").read_text())
    for words in ("", "kind: [", "kind: x"):
        data["circumstances"]["contract_text"] = words
        (tmp_path / "v.json").write_text(json.dumps(data))
        assert servanda("tools", "report", tmp_path / "v.json", "-o", page).exit_code == 0
        assert '<h2 id="chain">' not in page.read_text()
