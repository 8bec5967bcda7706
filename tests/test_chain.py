# The bound chain of a contract: every number against its theorem and against enumeration.

import json
import math
import re

import numpy as np
import pytest
from click.testing import CliRunner

from servanda import run
from servanda.bounds import (
    LOGIT_SCORE_NORM,
    THEOREMS,
    policy_gradient_bias,
    ratio_budget,
    sequence_tv_from_osc,
    sequence_tv_from_token_tv,
    tv_from_exceedance,
    tv_from_osc,
)
from servanda.chain import chain
from servanda.cli.main import main
from servanda.explain import chain_text
from servanda.falsification.kernels import distributions, near
from tests import kit
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


def servanda(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)


# each number by its theorem


def test_the_mean_tv_of_tokens_leads_to_answers_rewards_and_gradients(tmp_path):
    found = chain(contract(tmp_path)[0])
    whole = float(sequence_tv_from_token_tv(0.05, WIDTH))
    assert numbers(found, "tv") == {
        "TV of the next token, on average": 0.05,
        "TV of whole answers, up to 4 tokens": pytest.approx(whole),
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
    osc = "  - {id: drift, metric: logit_osc_nats, at_most: 0.1, slices: all}"
    found = chain(contract(tmp_path, numerical=osc)[0])
    by_what = {step.what: step for step in found.steps if step.clause == "drift"}
    golden = by_what["TV of the next token, golden texts"]
    whole = by_what["TV of whole answers, up to 4 tokens"]
    assert golden.standing == "fact"
    assert golden.number == pytest.approx(float(tv_from_osc(0.1)))
    assert "every_context" not in golden.assumes
    assert by_what["KL of the next token, golden texts"].standing == "fact"
    assert whole.standing == "conditional bound"
    assert whole.number == pytest.approx(float(sequence_tv_from_osc(0.1, WIDTH)))
    assert "every_context" in whole.assumes
    used = ratio_budget(0.1, 0.2, 0.28)
    assert by_what["share of clip range used"].number == pytest.approx(
        max(float(used.used_up), float(used.used_down))
    )


def test_a_temperature_divides_the_drift_of_logits(tmp_path):
    osc = "  - {id: drift, metric: logit_osc_nats, at_most: 0.1, slices: all}"
    path = contract(tmp_path, numerical=osc)[0]
    sampling = path.workload.sampling.model_copy(update={"temperature": 0.5})
    warm = path.model_copy(
        update={"workload": path.workload.model_copy(update={"sampling": sampling})}
    )
    found = numbers(chain(warm), "drift")
    assert found["osc at temperature 0.5, golden texts"] == pytest.approx(0.2)
    assert found["TV of the next token, golden texts"] == pytest.approx(float(tv_from_osc(0.2)))


def test_a_percentile_says_of_the_mean_what_its_tail_leaves(tmp_path):
    tail = (
        "  - {id: tail, metric: abs_log_ratio_nats, aggregate: p99, at_most: 0.02, slices: all}\n"
    )
    found = numbers(chain(contract(tmp_path, tail)[0]), "tail")
    mean = float(tv_from_exceedance(0.02, 0.01))
    assert found["TV of the next token, on average"] == pytest.approx(mean)
    assert found["share of clip range used, all but 1 % of tokens"] == pytest.approx(
        0.02 / -math.log(0.8)
    )


def test_a_realised_mean_says_only_an_estimate_of_whole_answers(tmp_path):
    found = chain(contract(tmp_path, claim="realised")[0])
    by_what = {step.what: step.standing for step in found.steps}
    assert by_what["TV of the next token, on average"] == "certificate"
    assert by_what["TV of whole answers, up to 4 tokens"] == "estimate"
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
    assert "VACUOUS: 2 of 5 numbers say nothing" in text
    assert text.index("VACUOUS") < text.index("rests on")
    assert "measure your own reward on both kernels (metric reward_gap)" in " ".join(text.split())
    plain = [step for step in found.to_dict()["steps"] if step["vacuous"]]
    assert [step["number"] for step in plain] == [None, None]


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
        "part": "it speaks of parts of the traffic, the chain of the whole",
        "cut": "no bound of the chain starts from k3_nats",
        "twice": "its limit is known once it is measured: give the run directory",
    }


def test_nothing_is_said_of_answers_whose_length_nobody_declares(tmp_path):
    from tests.test_whole_language import TRAINER

    path = tmp_path / "rl.yaml"
    path.write_text(TRAINER)
    found = chain(run.load(path))
    assert found.tokens is None
    assert not any("answers" in step.what for step in found.steps)
    assert "how long an answer may be is not declared" in chain_text(found)


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
        "TV of whole answers, up to 4 tokens": np.mean(
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
    data = json.loads(servanda("explain", "--chain", folder / "run", "--format", "json").output)
    assert data["shown"]
    steps = {(step["clause"], step["what"]): step for step in data["steps"]}
    shown = steps["tv", "TV of the next token, on average"]
    assert pair.mean_tv(PROMPTS, WIDTH) < shown["number"] < 0.2
    truth = np.mean([pair.sequence_tv(prompt, WIDTH) for prompt in PROMPTS])
    answers = steps["tv", "TV of whole answers, up to 4 tokens"]
    assert truth < answers["number"] == pytest.approx(min(1.0, WIDTH * shown["number"]))
    assert answers["theorem"]["name"] == "sequence_tv_from_token_tv"
    assert 2 * truth < steps["reward", "drift of any reward in [-1, 1]"]["number"] < 0.5
    osc = steps["drift", "osc of the drift of logits, golden texts"]["number"]
    assert osc == pytest.approx(math.log(0.35 / 0.33) + math.log(0.27 / 0.25))


def test_a_verdict_says_what_became_of_each_assumption(judged):
    folder = judged[0]
    data = json.loads(servanda("explain", "--chain", folder / "run", "--format", "json").output)
    rests = {rest["name"]: rest for rest in data["rests"]}
    assert rests["sampler"]["state"] == "not rejected"
    assert rests["sampler"]["said"].startswith("not rejected on ")
    assert rests["sampler"]["said"].endswith(" tokens, by sampler_fidelity")
    assert rests["order"]["state"] == rests["same_tokens"]["state"] == "kept"
    assert rests["advantage"]["state"] == rests["one_ratio"]["state"] == "declared"
    assert rests["every_context"]["state"] == rests["token_level"]["state"] == "not testable"


def test_a_failed_precondition_shows_nothing(judged):
    from servanda.cli.report import read

    folder, path, _ = judged
    verdict = read(folder / "run")
    cells = [
        c.but(outcome="violated") if c.metric == "sampler_fidelity" else c for c in verdict.cells
    ]
    broken = chain(run.load(path), type(verdict)(**{**vars(verdict), "cells": tuple(cells)}))
    reasons = dict(broken.left_out)
    failed = "a precondition failed (sampler_fidelity), so it shows nothing"
    assert reasons == {"tv": failed, "reward": failed, "tail": failed}
    assert {step.clause for step in broken.steps} == {"drift"}


def test_the_text_fits_a_screen_and_names_every_theorem(judged):
    folder = judged[0]
    done = servanda("explain", "--chain", folder / "run")
    assert done.exit_code == 0
    assert max(map(len, done.output.split("\n"))) <= 100
    assert "what this run's upper ends imply, for answers of up to 4 tokens" in done.output
    for name in ("tv_from_osc", "sequence_tv_from_token_tv", "policy_gradient_bias"):
        assert f"{name}: {THEOREMS[name].statement.split(',')[0][:30]}" in done.output


def test_a_contract_is_chained_by_its_limits(judged):
    done = servanda("explain", "--chain", judged[1])
    assert "toy: what its limits imply" in done.output
    assert "tested by sampler_fidelity as it runs" in done.output


def test_the_chain_of_what_is_not_there(tmp_path, judged):
    done = servanda("explain", "--chain", tmp_path / "none")
    assert done.exit_code == 2
    assert f"there is no {tmp_path / 'none'}" in done.output
    assert "hint: --chain takes a contract, a run directory" in done.output
    data = json.loads((judged[0] / "run" / "attempt-1" / "verdict.json").read_text())
    data["circumstances"]["contract_text"] = ""
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(data))
    done = servanda("explain", "--chain", bare)
    assert done.exit_code == 4
    assert "the verdict does not hold the text of its contract" in done.output
    done = servanda("explain", judged[1], "--format", "json")
    assert done.exit_code == 2
    assert "--format is of --chain" in done.output


@pytest.mark.parametrize("format_", ["text", "json"])
@pytest.mark.parametrize("path", CONTRACTS, ids=lambda path: path.name)
def test_every_example_has_a_chain(path, format_):
    assert servanda("explain", "--chain", path, "--format", format_).exit_code == 0


def test_a_monitored_clause_promises_nothing(tmp_path):
    more = (
        "  - {id: seen, metric: tv, aggregate: mean, at_most: 0.01, mode: monitor, slices: all}\n"
    )
    text = chain_text(chain(contract(tmp_path, more)[0]))
    assert "seen  (monitored, not promised)" in text


def test_the_page_folds_what_a_verdict_implies(judged, tmp_path):
    page = tmp_path / "page.html"
    assert servanda("report", judged[0] / "run", "-o", page).exit_code == 0
    text = page.read_text()
    assert "<h2>What this implies</h2>" in text
    assert re.search(r"<summary>\d+ numbers follow, 2 of them vacuous</summary>", text)
    assert "what this run&#39;s upper ends imply, for answers of up to 4 tokens" in text
    data = json.loads((judged[0] / "run" / "attempt-1" / "verdict.json").read_text())
    for words in ("", "kind: [", "kind: x"):
        data["circumstances"]["contract_text"] = words
        (tmp_path / "v.json").write_text(json.dumps(data))
        assert servanda("report", tmp_path / "v.json", "-o", page).exit_code == 0
        assert "<h2>What this implies</h2>" not in page.read_text()
