# `servanda tools history --gate`: the newest run against the last good ones.

import json
from dataclasses import replace

import pytest

from tests.runner.run_history import many
from tests.runner.run_history.test_run_record import history

WORSE = {**many.CELLS, ("tv", "long"): 0.05}  # the limit is 0.1


def gate(folder, *more):
    return history(folder, "--gate", *more)


def test_a_regression_within_the_limits_is_found_and_named(tmp_path):
    many.good(tmp_path, 12)
    assert gate(tmp_path).exit_code == 0
    many.write(tmp_path, 12, many.verdict(12, WORSE, build=9))

    done = gate(tmp_path)

    assert done.exit_code == 1
    assert (
        "VIOLATED: the newest run is worse than each of the last 10 good runs: tv (mean tv) on "
        "long is 0.05 against 0.02 to 0.0209, limit ≤ 0.1." in done.stdout
    )
    assert "probability is at most 1/11." in done.stdout
    (found,) = json.loads(gate(tmp_path, "--format", "json").stdout)["gates"]
    assert [(c["metric"], c["slice"]) for c in found["worse"]] == [("tv", "long")]
    assert found["false_alarms"] == pytest.approx(1 / 11) and len(found["good"]) == 10
    assert "worse than each of the last 10 good runs" in gate(tmp_path, "--format", "html").stdout


def test_a_lower_limit_is_worse_downwards(tmp_path):
    for n, x in enumerate([100, 101, 102, 103, 50]):
        cell = {"section": "runtime", "metric": "tokens_per_second", "limit": 10.0, "kind": "fact"}
        made = many.verdict(n)
        cells = tuple(replace(c, **cell, value=float(x)) for c in made.cells[:1])
        many.write(tmp_path, n, replace(made, cells=cells))
    done = gate(tmp_path, "--last", 4)
    assert done.exit_code == 1 and "is 50 against 100 to 103, limit ≥ 10" in done.stdout


def test_too_few_good_runs_decide_nothing(tmp_path):
    many.good(tmp_path, 9)
    many.write(tmp_path, 9, many.verdict(9, WORSE))

    done = gate(tmp_path)

    assert done.exit_code == 3
    assert (
        "INCONCLUSIVE: the newest run is not compared: 9 good runs of this contract on the same "
        "prompts before the newest, and 10 are needed." in done.stdout
    )
    assert gate(tmp_path, "--last", 9).exit_code == 1
    assert gate(tmp_path, "--last", 2).exit_code == 2


def test_what_is_no_good_run_does_not_count(tmp_path):
    """Violated ones, another contract, other prompts, and one measurement judged again."""
    many.good(tmp_path, 6)
    key = many.verdict(0).key
    others = [
        many.verdict(6, outcome="violated"),
        many.verdict(7, key=replace(key, contract="9" * 32)),
        many.verdict(8, key=replace(key, corpus="9" * 32)),
        many.verdict(5),
        many.verdict(10, evidence=f"{11:032x}"),  # the newest, judged before
    ]
    for n, made in enumerate(others, start=6):
        many.write(tmp_path, n, made)
    many.write(tmp_path, 11, many.verdict(11))
    done = gate(tmp_path)
    assert done.exit_code == 3 and "6 good runs of this contract" in done.stdout


def test_a_difference_within_the_noise_floor_is_not_worse(tmp_path):
    many.good(tmp_path, 10)
    many.write(tmp_path, 10, many.verdict(10, WORSE, floor=0.04))
    done = gate(tmp_path)
    assert done.exit_code == 0 and "by more than its noise floor" in done.stdout


def test_a_good_run_that_stands_out_as_far_is_said(tmp_path):
    many.good(tmp_path, 9)
    many.write(tmp_path, 9, many.verdict(9, {**many.CELLS, ("tail", "all"): 0.09}))
    many.write(tmp_path, 10, many.verdict(10, {**many.CELLS, ("tv", "long"): 0.022}))
    done = gate(tmp_path)
    assert done.exit_code == 0
    assert "tv (mean tv) on long is 0.022 against 0.02 to 0.0209" in done.stdout
    assert "a good run stands out as far from the others" in done.stdout


@pytest.mark.parametrize(("outcome", "code"), [("violated", 1), ("inconclusive", 3), ("error", 4)])
def test_the_gate_is_never_better_than_the_newest_verdict(tmp_path, outcome, code):
    many.good(tmp_path, 10)
    many.write(tmp_path, 10, replace(many.verdict(10), outcome=outcome))
    done = gate(tmp_path)
    assert done.exit_code == code and f"the newest run's own verdict is {outcome}" in done.stdout


def test_other_weights_and_missing_values_are_noted(tmp_path):
    many.good(tmp_path, 10)
    key = replace(many.verdict(10).key, weights="9" * 32)
    values = {key: x for key, x in many.CELLS.items() if key[0] != "tail"}
    many.write(tmp_path, 10, many.verdict(10, values, key=key))
    text = gate(tmp_path).stdout
    assert "the weights differed in 10 of the 10 good runs" in text
    assert "not compared, because a run has no value: tail[all]" in text
