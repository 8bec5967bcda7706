# The verb, and what it says of a file that is not right.

import json
import sys
from types import ModuleType

import pytest
from click.testing import CliRunner

from servanda.cli.main import main

torch = pytest.importorskip("torch")

from servanda.rl.sync_drill.trainee import Trainee  # noqa: E402

DRILL = """
from tests.rl.sync_drill.toys import pair

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
    assert (
        ran()[0] == 2
        and "give FILE.py:NAME, --checkpoint DIR --url URL, or --trl SCRIPT" in ran()[1]
    )
    assert ran("mine.py")[0] == 2 and "does not name a trainer" in ran("mine.py")[1]
    assert ran("no/mine.py:x")[0] == 2
    (tmp_path / "m.py").write_text("x = 3\n")
    code, output = ran(f"{tmp_path / 'm.py'}:x")
    assert code == 4 and "int is neither a Trainee nor a TRL trainer" in output


SCRIPT = """
import sys
from trl import GRPOTrainer
from tests.rl.sync_drill.toys import nothing, pair

lost = sys.argv[1:] == ["--engine", "broken", "--seed=1"]
GRPOTrainer(pair((lambda name: ".1.mlp" in name) if lost else nothing)).train()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A training script with a command line; `trl` is a stand-in."""
    trl = ModuleType("trl")
    trl.GRPOTrainer = type(
        "GRPOTrainer", (), {"__init__": lambda self, made: setattr(self, "made", made)}
    )
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setattr("servanda.rl.trl_engine.trainee", lambda trainer: trainer.made[0])
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_what_follows_the_dashes_is_the_scripts_own(script):
    assert ran("--trl", script, "--quiet")[0] == 0
    code, output = ran("--trl", script, "--seed", 3, "--", "--engine", "broken", "--seed=1")
    assert code == 1 and "layers.1.mlp ✗ 0.00" in output
    assert "plan     6 groups in 13 tensors" in output and "13 syncs, and at most 30" in output


def test_a_journal_of_a_script_is_written_refused_and_restored(script, tmp_path, monkeypatch):
    from tests.rl.sync_drill.toys import bits, pair

    journal, kept, made = tmp_path / "j", [], pair()
    before = bits(made[0].module)
    sync = made[1].sync

    def synced():
        kept.append(journal.read_bytes() if journal.exists() else b"")
        sync()

    monkeypatch.setattr(
        "servanda.rl.trl_engine.trainee",
        lambda _: Trainee(made[0].module, synced, made[0].score),
    )
    assert ran("--trl", script, "--quiet", "--journal", journal)[0] == 0
    assert kept[1] and not journal.exists()
    journal.write_bytes(kept[1])
    with torch.no_grad():
        made[0].module.embed.weight.fill_(7)
    code, output = ran("--trl", script, "--quiet", "--journal", journal)
    assert code == 4 and f"--restore {journal}" in output

    code, output = ran("--trl", script, "--restore", journal)

    assert code == 0 and "weights restored bit for bit and synced" in output
    assert bits(made[0].module) == before == bits(made[1].model) and not journal.exists()


def test_a_time_limit_is_taken_and_a_hang_is_an_error_of_the_call(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import threading\n"
        "from servanda.rl import Trainee\n"
        "from tests.rl.sync_drill.toys import pair\n"
        "made = pair()[0]\n"
        "hangs = Trainee(made.module, threading.Event().wait, made.score)\n"
    )
    code, output = ran(f"{tmp_path / 'mine.py'}:hangs", "--timeout", 0.2, "--quiet")

    assert code == 4 and "the sync did not return within 0.2 s" in output
    assert "state: no weight was changed" in output
