# `servanda contract test --mutate` on the command line.

import json
import re

import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from tests.authoring.mutation import made
from tests.authoring.mutation.test_limits import FEW


def call(*arguments):
    return CliRunner().invoke(main, ["contract", "test", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    made.written(tmp_path, cases=made.GOOD)
    return tmp_path


def test_limits_are_moved_and_the_score_is_the_last_line(folder):
    done = call(folder, "--mutate", "--only", "limits", "--quiet")

    assert done.exit_code == 1  # no case asks for anything
    assert "TOOTHLESS: no case notices that a limit moved" in done.output
    assert done.output.splitlines()[-1] == "mutation score 0 of 24 (0 %): limits 0 of 24"


@pytest.mark.slow
def test_a_score_that_is_too_low_exits_1_and_says_so(tmp_path):
    made.written(tmp_path, cases=FEW)

    low = call(tmp_path, "--mutate", "--only", "limits", "--at-least", "0.99", "--quiet")
    enough = call(tmp_path, "--mutate", "--only", "limits", "--at-least", "0.1", "--quiet")

    assert (low.exit_code, enough.exit_code) == (1, 0)
    score = r"mutation score (\d+) of (\d+) \([\d.]+ %\): limits \1 of \2"
    assert re.fullmatch(score + "; 0.99 is wanted: not enough", low.output.splitlines()[-1])
    assert re.fullmatch(score + "; 0.1 is wanted: enough", enough.output.splitlines()[-1])


@pytest.mark.slow
def test_faults_are_injected_and_told_as_json(folder):
    faults = ["--mutate", "--only", "faults", "--fault", "permuted_ids"]

    done = call(folder, *faults, "--format", "json", "--quiet")

    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.output)
    assert (found["contract"], found["score"], found["faulty"] != "") == ("toy", 1.0, True)
    assert [(f["fault"], f["fate"]) for f in found["faults"]] == [("permuted_ids", "caught")]


@pytest.mark.slow
def test_the_cost_and_the_progress_go_to_the_error_stream(folder):
    done = call(folder, "--mutate", "--only", "faults", "--fault", "permuted_ids")

    assert "1 fault, a check each: about" in done.stderr
    assert "no fault: loading the kernels ..." in done.stderr
    assert "a check each" not in done.stdout


def test_tests_that_fail_are_told_and_nothing_is_mutated(tmp_path):
    cases = '  - {name: wrong, traffic: "0x160", expect: [{verdict: violated}]}\n'
    made.written(tmp_path, cases=cases)

    done = call(tmp_path, "--mutate")

    assert done.exit_code == 1
    assert "✗ wrong" in done.output
    assert "mutation score" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "limits"], "--only goes with --mutate"),
        (["--fault", "int4"], "--fault goes with --mutate"),
        (["--at-least", "0.8"], "--at-least goes with --mutate"),
        (["--max-time", "1m"], "--max-time goes with --mutate"),
        (["--mutate", "--at-least", "2"], "2.0 is not in the range 0<=x<=1"),
        (["--mutate", "--fault", "int8"], "there is no fault 'int8'"),
        (
            ["--mutate", "--fault", "int4", "--only", "limits"],
            "--fault says which fault, and --only limits injects none",
        ),
        (["--mutate", "--format", "junit"], "--mutate is told as text or json, not as junit"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(folder, arguments, message):
    done = call(folder, *arguments)

    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.slow
def test_a_kernel_that_cannot_be_opened_exits_4(folder):
    (folder / "q.json").write_text("{}")

    done = call(folder, "--mutate", "--only", "faults", "--fault", "permuted_ids", "--quiet")

    assert done.exit_code == 4
    assert "q.json" in done.output


def test_contracts_of_a_folder_are_mutated_one_by_one(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made.written(tmp_path / name, cases=made.GOOD)

    done = call(tmp_path, "--mutate", "--only", "limits", "--format", "json", "--quiet")

    assert [one["counted"] for one in json.loads(done.output)] == [24, 24]
