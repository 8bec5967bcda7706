# The verb, and what it says of a file that is not right.

import json

import pytest
from click.testing import CliRunner

from servanda.cli.main import main

pytest.importorskip("torch")

DRILL = """
from tests.preflight.toys import pair

def good():
    return pair()[0]

bad = pair(lambda name: ".1.mlp" in name)[0]
"""


def ran(*words):
    done = CliRunner().invoke(main, ["preflight", *map(str, words)])
    return done.exit_code, done.output


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(DRILL)
    return tmp_path / "mine.py"


def test_the_exit_code_is_the_answer(file):
    assert ran(f"{file}:good", "--quiet")[0] == 0
    code, output = ran(f"{file}:bad")
    assert code == 1
    assert "plan     6 groups in 13 tensors" in output
    assert "layers.1.mlp ✗ 0.00  ← never reaches the engine" in output
    assert "VIOLATED: the MLP of one layer never reaches the engine (1 of 6 groups" in output
    assert "weights restored bit for bit" in output.split("\n")[-2]


def test_json_says_the_same(file):
    code, output = ran(f"{file}:bad", "--format", "json", "--quiet")

    said = json.loads(output)
    assert code == said["exit_code"] == 1
    assert said["outcome"] == "violated" and said["cause"] == "one_mlp" and said["schema"] == 1
    assert [g["name"] for g in said["groups"] if g["follow"] < 0.5] == ["layers.1.mlp"]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("x = 1\n", "y", "has no 'y'"),
        ("def made():\n    return 1 / 0\n", "made", ":2:5: ZeroDivisionError: division by zero"),
        ("import nothing_of_that_name\n", "x", ":1:1: ModuleNotFoundError"),
        ("def (\n", "x", ":1:5: SyntaxError"),
        ("exit(0)\n", "x", ":1:1: SystemExit: 0"),
    ],
)
def test_errors_of_the_file_are_errors_of_the_call(tmp_path, text, name, message):
    path = tmp_path / "mine.py"
    path.write_text(text)

    code, output = ran(f"{path}:{name}")

    assert code == 2 and message in output and "Traceback" not in output


def test_a_call_that_names_nothing_is_refused(tmp_path):
    assert ran()[0] == 2 and "give FILE.py:NAME, or --trl SCRIPT" in ran()[1]
    assert ran("mine.py")[0] == 2 and "does not say what to drill" in ran("mine.py")[1]
    assert ran("no/mine.py:x")[0] == 2
    (tmp_path / "m.py").write_text("x = 3\n")
    code, output = ran(f"{tmp_path / 'm.py'}:x")
    assert code == 4 and "int is neither a Trainee nor a trainer of TRL" in output
