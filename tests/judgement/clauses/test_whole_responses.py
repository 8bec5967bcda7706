# Whole responses: the share beyond a size, and the finding that needs no share.  The oracle walks
# over the responses one by one.

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.cli.main import main
from servanda.contract.presets import preset_text
from servanda.judgement.clauses.whole_responses import of_responses, tails_of
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.rl import Monitor
from servanda.rl.dumps.formats.parquet import Writer
from servanda.rl.dumps.judge import DumpOptions, judge_dump
from servanda.rl.dumps.report import render
from servanda.theory.stats.tails import FAR, LEAST, RESPONSE_NATS, TOKEN_NATS, FarToken

S, T = 500, 40
MODEL = Path(__file__).parents[3] / "models" / "tiny-lm"


def arrays(seed=0, bad=0, nats=9.0, sequences=S, tokens=T, noise=0.01):
    """Logprobs of an engine and of a trainer; the first `bad` responses are far off."""
    rng = np.random.default_rng(seed)
    infer_ST = -rng.exponential(0.5, (sequences, tokens)) - 1e-3
    train_ST = np.minimum(infer_ST + rng.normal(0, noise, infer_ST.shape), -1e-6)
    train_ST[:bad] = infer_ST[:bad] - rng.exponential(nats, (bad, tokens))
    return train_ST.astype(np.float32), infer_ST.astype(np.float32)


def dump(folder, *steps):
    writer = Writer(folder)
    for step, (train_ST, infer_ST) in enumerate(steps, 1):
        token_ST = np.random.default_rng(step).integers(1, 9999, train_ST.shape)
        mask_ST = np.ones(train_ST.shape, dtype=bool)
        mask_ST[:, :3] = False
        writer.step(step, token_ST, mask_ST, train_ST, infer_ST)
    return folder


def cells(verdict, metric):
    return [c for c in verdict.cells if c.metric == metric]


@settings(max_examples=60)
@given(st.lists(st.lists(st.floats(-60, 60), max_size=6), max_size=8))
def test_values_of_responses_are_those_of_a_walk_over_them(of):
    ratio_K = np.array([x for own in of for x in own])
    n_S = np.array([len(own) for own in of], dtype=np.int64)
    for metric, value in (
        ("response_abs_log_ratio_nats", lambda own: sum(map(abs, own)) / len(own)),
        ("response_log_weight_nats", lambda own: abs(sum(own))),
        ("response_largest_nats", lambda own: max(map(abs, own))),
    ):
        walked = [value(own) if own else math.nan for own in of]
        assert of_responses(metric, ratio_K, n_S) == pytest.approx(walked, nan_ok=True)


@settings(max_examples=60)
@given(st.lists(st.lists(st.floats(-30, 30), min_size=1, max_size=40), max_size=6))
def test_tails_are_those_of_a_walk_over_the_responses(of):
    ratio_K = np.array([x for own in of for x in own])
    n_S = np.array([len(own) for own in of], dtype=np.int64)
    size_K = np.abs(ratio_K)

    def place(s, k):
        return FarToken(float(size_K[k]), s, "", k, 0, 0.0, 0.0)

    mean_S = of_responses("response_abs_log_ratio_nats", ratio_K, n_S)
    tails = tails_of(size_K, n_S, mean_S, place)
    sizes = [[abs(x) for x in own] for own in of]
    assert tails.tokens == len(ratio_K)
    assert tails.beyond == tuple(sum(x > t for own in sizes for x in own) for t in TOKEN_NATS)
    means = [sum(own) / len(own) for own in sizes if len(own) >= LEAST]
    assert tails.odd == tuple(sum(m > t + 1e-12 for m in means) for t in RESPONSE_NATS)
    far = sorted((max(own) for own in sizes if max(own) > FAR), reverse=True)
    assert tails.far == len(far)
    assert [f.size for f in tails.worst] == far


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_dump_and_a_monitor_find_the_same_few_responses(tmp_path, bad):
    train_ST, infer_ST = arrays(bad=bad)
    of_dump = judge_dump(DumpOptions(dump(tmp_path, (train_ST, infer_ST)), preset="trl")).verdict
    mask_ST = np.ones((S, T), dtype=bool)
    mask_ST[:, :3] = False
    step = Monitor("trl").observe(train_ST, infer_ST, mask_ST, weights=1)

    for metric in ("response_abs_log_ratio_nats", "outlier_tokens"):
        (own,), (other,) = cells(of_dump, metric), cells(step.verdict, metric)
        assert (own.outcome, own.value, own.n) == (other.outcome, other.value, other.n)
        if metric == "outlier_tokens":
            assert own.outcome == ("violated" if bad else "holds")
            assert own.e_violated == pytest.approx(other.e_violated)
    assert of_dump.outcome == step.outcome == ("violated" if bad else "holds")
    if bad:
        # the averages say nothing, and what all others have in common is no cause
        (mean,) = [c for c in of_dump.cells if c.clause == "gradient" and c.slice == "all"]
        assert mean.outcome == "holds"
        found = f"{bad} of {S} responses ha{'s' if bad == 1 else 've'} a token above 4 nats"
        assert found in of_dump.advice.cause and found in step.cause


def test_the_furthest_token_is_named_by_step_file_index_and_id(tmp_path):
    good, (train_ST, infer_ST) = arrays(1), arrays(2)
    for s in range(8):
        train_ST[100 + s, 17] = -45.0
    train_ST[107, 17] = -60.0
    answer = judge_dump(DumpOptions(dump(tmp_path, good, (train_ST, infer_ST)), preset="trl"))
    (cell,) = [c for c in cells(answer.verdict, "outlier_tokens") if c.steps is None]
    token = np.random.default_rng(2).integers(1, 9999, train_ST.shape)[107, 17]
    place = f"step 2, step_000002.rank0.parquet:108, token 17 (id {token}): train -60"
    assert place in cell.note
    assert place in render(answer)
    assert "VIOLATED by single responses" in render(answer)


def test_one_far_token_leaves_the_answer_open_and_names_no_cause(tmp_path):
    train_ST, infer_ST = arrays(noise=0.04)
    train_ST[3, 20] = infer_ST[3, 20] - 12.0
    answer = judge_dump(DumpOptions(dump(tmp_path, (train_ST, infer_ST)), preset="trl"))
    assert answer.verdict.outcome == "inconclusive"
    assert answer.verdict.advice is None or not answer.verdict.advice.cause
    assert "INCONCLUSIVE: too few to tell from noise: 1 of 500 responses" in render(answer)


@pytest.mark.parametrize("sequences, outcome", [(20, "not applicable"), (500, "holds")])
def test_a_share_needs_its_number_of_responses(tmp_path, sequences, outcome):
    verdict = judge_dump(
        DumpOptions(dump(tmp_path, arrays(sequences=sequences, tokens=60)), preset="trl")
    ).verdict
    (cell,) = cells(verdict, "response_abs_log_ratio_nats")
    assert cell.outcome == outcome
    if outcome == "not applicable":
        assert cell.note == "20 responses cannot show a share of 1 %: that takes 414"
    assert verdict.outcome == "holds"


def test_a_share_that_is_exceeded_is_violated_with_few_responses(tmp_path):
    verdict = judge_dump(
        DumpOptions(dump(tmp_path, arrays(bad=10, nats=0.8, sequences=50)), preset="trl")
    ).verdict
    (cell,) = cells(verdict, "response_abs_log_ratio_nats")
    assert cell.outcome == "violated" and cell.value == pytest.approx(0.2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [1, 2])
def test_responses_of_one_token_hold_where_their_pair_is_healthy(tmp_path, tokens):
    rng = np.random.default_rng(3)
    infer_ST = -rng.exponential(0.5, (3000, tokens + 3)) - 1e-3
    train_ST = np.minimum(infer_ST + rng.laplace(0, 0.02, infer_ST.shape), -1e-6)
    verdict = judge_dump(DumpOptions(dump(tmp_path, (train_ST, infer_ST)), preset="trl")).verdict
    assert verdict.outcome == "holds"


def test_a_step_in_which_all_are_garbage_is_violated(tmp_path):
    folder = dump(tmp_path, arrays(1), arrays(2, bad=S), arrays(3))
    answer = judge_dump(DumpOptions(folder, preset="trl"))
    assert answer.verdict.outcome == "violated"
    assert [r.step for r in answer.verdict.breakdown.steps if r.outcome == "violated"] == [2]


def test_a_contract_without_these_clauses_keeps_its_meaning(tmp_path):
    kept = tmp_path / "kept.kernelcontract.yaml"
    folder = dump(tmp_path / "dump", arrays(bad=1))
    call = ["check", str(folder), "--preset", "trl", "--quiet"]
    assert CliRunner().invoke(main, [*call, "--save-contract", str(kept)]).exit_code == 1
    lines = kept.read_text(encoding="utf-8").splitlines(keepends=True)
    old = [x for x in lines if "outlier_tokens" not in x and "response_abs" not in x]
    assert len(old) == len(lines) - 2
    kept.write_text("".join(old), encoding="utf-8")
    done = CliRunner().invoke(main, ["check", str(folder), "--contract", str(kept), "--quiet"])
    assert done.exit_code == 0, done.stdout


@pytest.mark.parametrize(
    "clause, message",
    [
        ("{id: r, metric: response_abs_log_ratio_nats, at_most: 0.5}", "for a share of the"),
        (
            "{id: r, metric: response_largest_nats, aggregate: mean, at_most: 0.5}",
            "for a share of the",
        ),
        (
            "{id: r, metric: response_log_weight_nats, aggregate: p99, at_most: 0.5, "
            "slices: [depth]}",
            "concerns whole answers",
        ),
    ],
)
def test_lint_says_what_a_clause_on_responses_lacks(tmp_path, clause, message):
    text = preset_text("fp8").replace("observability:", f"  - {clause}\nobservability:")
    file = tmp_path / "it.kernelcontract.yaml"
    file.write_text(text, encoding="utf-8")
    done = CliRunner().invoke(main, ["contract", "lint", str(file)])
    assert done.exit_code == 2 and message in done.output, done.output


def test_rules_of_other_projects_are_shown_step_by_step_in_every_report(tmp_path):
    answer = judge_dump(DumpOptions(dump(tmp_path, arrays(1), arrays(2, bad=2)), preset="trl"))
    verdict = answer.verdict
    rule = verdict.breakdown.rules[0]
    assert (rule.name, rule.red, rule.first) == ("token_mult_prob_error", 1, 2)
    said = "rules    NeMo-RL token_mult_prob_error above 1.05: 1 of 2 steps, first at step 2;"
    assert said in render(answer)
    for name in ("html", "markdown"):
        page = FORMATS[name](verdict)
        assert "Rules of other projects, each in its own formula on every step" in page
        assert re.search(r"token.{0,6}mult.{0,6}prob.{0,6}error", page)
    assert "; 1 of 2 steps" in FORMATS["html"](verdict)
    assert "2 of 1,000 responses have a token above 4 nats" in FORMATS["junit"](verdict)
    assert Verdict.from_dict(json.loads(FORMATS["json"](verdict))).breakdown == verdict.breakdown


def test_a_verdict_that_holds_beside_a_rule_says_why(tmp_path):
    answer = judge_dump(DumpOptions(dump(tmp_path, arrays(noise=0.03)), preset="trl"))
    text = render(answer)
    assert answer.verdict.outcome == "holds"
    assert "SkyRL rollout_train_logprobs_abs_diff_mean above 0.0193: step 1" in text
    assert "it holds all the same: the contract's limits are wider, and kept" in text


def test_a_rule_that_one_token_puts_above_its_limit_leaves_the_answer_open(tmp_path):
    train_ST, infer_ST = arrays(noise=0.02, sequences=60, tokens=12)
    train_ST[2, 6] = infer_ST[2, 6] - 1.5  # noise takes one of two beyond 4 nats often enough
    train_ST[3, 8] = infer_ST[3, 8] - 7.0
    answer = judge_dump(DumpOptions(dump(tmp_path, (train_ST, infer_ST)), preset="fp8-rollout"))
    assert answer.verdict.breakdown.rules[0].lone
    assert answer.verdict.outcome == "inconclusive"
    assert "one alone may be noise, or not: NeMo-RL token_mult_prob_error" in render(answer)


def test_a_rule_that_one_place_puts_above_its_limit_leaves_the_answer_open(tmp_path):
    """The mean over all tokens holds, for the place has one of 50."""
    train_ST, infer_ST = arrays(noise=0.03, sequences=1000)
    moved_S = 0.5 * np.random.default_rng(0).standard_normal(len(train_ST))
    train_ST[:, 30] = np.minimum(infer_ST[:, 30] + moved_S, -0.01)
    answer = judge_dump(DumpOptions(dump(tmp_path, (train_ST, infer_ST)), preset="trl"))
    assert answer.verdict.outcome == "inconclusive"
    assert "the gap is in one place, {name: found-1, match: {context" in render(answer)


def test_explain_states_a_share_of_answers_and_what_a_finding_does(tmp_path):
    text = preset_text("trl").replace("path/to/model", str(MODEL))
    file = tmp_path / "it.kernelcontract.yaml"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    file.write_text(text.replace("path/to/prompts.jsonl", "prompts.jsonl"), encoding="utf-8")
    done = CliRunner().invoke(main, ["contract", "explain", str(file)])
    said = " ".join(done.output.split())
    assert "at most 1 % of the answers that are measured" in said, done.output
    assert "may exceed 0.5 nat." in said
    done = CliRunner().invoke(main, ["contract", "explain", "outlier_tokens"])
    assert "where it fails, the contract is violated" in " ".join(done.output.split())
