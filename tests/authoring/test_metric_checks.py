# Checks of NeMo-RL's suites as clauses: what they mean, and what none of them becomes.

import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import servanda as sv
from servanda.authoring.metric_checks import clauses_of, read_checks
from servanda.cli.main import main
from servanda.errors import ContractError

MODEL = Path(__file__).parents[2] / "models" / "tiny-lm"
# two calls as the suites write them: over lines, with both kinds of quotes, and one in a comment
SUITE = """\
#!/bin/bash
# uv run tests/check_metrics.py $JSON_METRICS 'max(data["train/gen_kl_error"]) < 9'
if [[ $(jq 'max' $JSON_METRICS) -ge $MAX_STEPS ]]; then
    uv run tests/check_metrics.py $JSON_METRICS \\
        'data["validation/accuracy"]["20"] > 0.4' \\
        'median(data["train/token_mult_prob_error"]) < 1.02' \\
        'mean(data["train/gen_kl_error"], 2, -1) < 0.0006' \\
        "data['train/loss']['$LAST_STEP'] < 100"
    (uv run tests/check_metrics.py $JSON_METRICS "max(data['train/gen_kl_error']) <= 0.002") || exit
fi
"""


def init(tmp_path, text, *words):
    words = ("--model", str(MODEL), *words)
    checks = tmp_path / "suite.sh"
    checks.write_text(text)
    given = ["contract", "init", str(tmp_path / "x.kernelcontract.yaml"), "--checks", str(checks)]
    done = CliRunner().invoke(main, [*given, *words], prog_name="servanda")
    return done.exit_code, done.output


def prompts(folder):
    for name in ("prompts.jsonl", "golden.jsonl"):
        lines = [f'{{"prompt": "{n} and", "labels": {{"domain": "chat"}}}}' for n in range(8)]
        (folder / name).write_text("\n".join(lines))


def test_a_suite_becomes_a_contract_that_names_every_check(tmp_path):
    code, said = init(tmp_path, SUITE)
    assert code == 0, said

    text = (tmp_path / "x.kernelcontract.yaml").read_text()
    prompts(tmp_path)
    clauses = {c.id: c for c in sv.load(tmp_path / "x.kernelcontract.yaml").statistical}
    assert {(c.metric, c.aggregate, c.clip) for c in clauses.values()} == {
        ("k3_nats", "mean", 1.0),
        ("abs_log_ratio_nats", "mean", 1.0),
    }
    assert clauses["gen-kl"].at_most == 0.0006
    assert clauses["mult-prob-error"].at_most == pytest.approx(math.log(1.02), rel=1e-5)
    for check in read_checks(SUITE, "suite.sh"):
        assert check.text in text
    assert '# no clause: data["validation/accuracy"]["20"] > 0.4 (it does not compare' in text
    assert "max(data['train/gen_kl_error']) <= 0.002 (another limit is smaller)" in text
    assert "< 9" not in text and "exit" not in text  # of a comment, and of another command


def test_a_contract_from_checks_lints_clean(tmp_path):
    init(tmp_path, SUITE)
    prompts(tmp_path)
    at = str(tmp_path / "x.kernelcontract.yaml")
    done = CliRunner().invoke(main, ["contract", "lint", at], prog_name="servanda")
    assert "gen-kl" not in done.output and "mult-prob-error" not in done.output, done.output


@given(
    st.lists(st.floats(-3, 3), min_size=1, max_size=40),
    st.floats(1.0001, 20.0),
)
def test_a_run_that_passes_the_check_keeps_the_clause(log_ratios, limit):
    """token_mult_prob_error is mean exp |Δ logp| over the tokens: loss_functions.py of NeMo-RL."""
    (check,) = read_checks(f'max(data["train/token_mult_prob_error"]) < {limit}', "x")
    gap = np.abs(log_ratios)
    if np.exp(gap).mean() < limit:
        assert np.minimum(gap, 1.0).mean() <= check.limit


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('min(data["train/probs_ratio_clamped_min"]) > 0.79', "does not compare the two kernels"),
        ('max(data["train/policy_kl_error"]) < 1', "as if train had drawn them"),
        ('min(data["train/gen_kl_error"]) > 0.1', "no upper limit"),
        ('min(data["train/gen_kl_error"]) < 0.1', "no upper limit"),
        ('mean(data["train/token_mult_prob_error"]) < 1', "never below 1"),
        ('"3" in data["train/loss"]', "no comparison of one metric"),
        ('data["train/gen_kl_error"]["1"] == 0', "no comparison of one metric"),
        ('max(data["train/gen_kl_error"]) < True', "no comparison of one metric"),
        ('max(data["train/gen_kl_error"]) < 1e999', "no comparison of one metric"),
        ('max(data["train/gen_kl_error"]) < limit', "no comparison of one metric"),
        ('eval("1") < 3', "no comparison of one metric"),
        ("max(", "no comparison of one metric"),
    ],
)
def test_what_is_no_clause_says_why(text, why):
    (check,) = read_checks(text, "x")
    assert not check.metric and why in check.why
    with pytest.raises(ContractError, match="none of the 1 checks of x compares the two kernels"):
        clauses_of((check,), "x")


@pytest.mark.parametrize("text", ["0.001 > {}", "{} <= 0.001", "{} < 1e-3"])
@pytest.mark.parametrize("of", ['max(data["train/gen_kl_error"])', 'data["gen_kl_error"]["30"]'])
def test_however_a_limit_is_written_it_is_read(text, of):
    (check,) = read_checks(text.format(of), "x")
    assert (check.metric, check.limit) == ("k3_nats", 0.001)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# nothing\n", "has no checks"),
        ("run check_metrics.py $JSON\n", "has no checks"),
        (
            "a\ncheck_metrics.py m 'max(\n",
            "suite.sh:2:1: a call of check_metrics.py cannot be read",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(tmp_path, text, said):
    code, output = init(tmp_path, text)
    assert code == 2 and said in output
    assert not (tmp_path / "x.kernelcontract.yaml").exists()
