# `servanda promotion ledger`: what it prints, and which exit code it answers with.

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.promotion.ledger.entry import Record
from servanda.promotion.ledger.ledger import open_ledger, verify
from tests.promotion.run.histories import reaching

EXAMPLES = Path(__file__).parents[3] / "examples"


def servanda(*arguments, **environment):
    return CliRunner().invoke(main, ["promotion", "ledger", *map(str, arguments)], env=environment)


@pytest.fixture
def filled(where):
    with open_ledger(where) as ledger:
        ledger.append("a", [Record("begun", "ci", 0.0, {"x": 1, "y": 2})], after=0)
        ledger.append("b", [Record("looked", "ana", 86399.9, {"why": "it\nholds"})], after=0)
        body = {"state": {"why": "w" * 70}}
        ledger.append("a", [Record("advanced", "ci", 1e300, body)], after=1)
        return where, [*ledger.entries()]


@pytest.fixture
def promoted(where):
    """A ledger whose entries tell of a run that did happen."""
    with open_ledger(where) as ledger:
        reaching(ledger, "shadow")
        return where, [*ledger.entries()]


def test_show_is_a_table_with_one_line_an_entry(filled):
    where, entries = filled

    done = servanda("show", "--ledger", where)

    assert done.exit_code == 0
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["seq", "time", "(UTC)", "run", "kind", "actor", "decision", "hash"],
        ["1", "1970-01-01", "00:00:00", "a", "begun", "ci", "x,", "y", entries[0].hash[:8]],
        [
            "2",
            "1970-01-01",
            "23:59:59",
            "b",
            "evaluated",
            "ana",
            "it",
            "holds",
            entries[1].hash[:8],
        ],
        ["3", "1e+300", "a", "advanced", "ci", "w" * 59 + "…", entries[2].hash[:8]],
    ]


def test_show_of_one_run(filled):
    where, entries = filled

    done = servanda("show", "--run", "a", "--format", "json", SERVANDA_LEDGER=where)

    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        vars(entries[0]),
        vars(entries[2]),
    ]


def test_a_run_that_is_not_there(filled):
    done = servanda("show", "--run", "c", "--ledger", filled[0])

    assert done.exit_code == 4  # as of every verb that names a run
    assert "no run is named 'c'\n  hint: the ledger has: a, b" in done.output


def test_verify_says_how_many_and_the_head(promoted):
    where, entries = promoted

    done = servanda("verify", "--ledger", where)

    assert (done.exit_code, done.output) == (0, f"✓ 2 entries, head {entries[-1].hash}\n")


def test_verify_names_an_entry_that_tells_what_never_happened(promoted):
    """Its hash is right, for anyone who wrote it could write; what it says does not follow."""
    where, entries = promoted
    body = entries[-1].body
    forged = {**body, "state": {**body["state"], "status": "completed", "leg": 4}}
    with open_ledger(where) as ledger:
        ledger.append(entries[-1].run, [Record("looked", "eve", 900.0, forged)], after=2)

    done = servanda("verify", "--ledger", where)

    assert done.exit_code == 1
    assert done.stdout.startswith(
        f"✗ entry 3 (number 3 of run {entries[-1].run}) cannot be replayed"
    )
    assert done.stdout.endswith("1 problem; 3 entries could be read\n")


def test_verify_names_every_problem_and_exits_1(filled, tamper):
    where, _ = filled
    tamper("UPDATE servanda_ledger SET actor = 'eve' WHERE seq <> 2")

    done = servanda("verify", "--ledger", where)

    lines = done.stdout.splitlines()
    assert done.exit_code == 1
    assert lines[0].startswith("✗ entry 1 of run 'a': its content has the hash ")
    assert lines[1].startswith("✗ entry 3 of run 'a': its content has the hash ")
    assert lines[2:] == ["2 problems; 3 entries could be read"]


def test_a_ledger_that_lost_its_tail_is_a_finding(tmp_path):
    where = str(tmp_path / "ledger.db")
    with open_ledger(where) as ledger:
        ledger.append("a", [Record("begun", "ci", 0.0, {})], after=0)
    (tmp_path / "ledger.db").unlink()

    verified, shown = servanda("verify", "--ledger", where), servanda("show", "--ledger", where)

    assert (verified.exit_code, verified.output) == (
        1,
        f"✗ no ledger at {where}, and entry 1 was acknowledged here\n"
        "1 problem; 0 entries could be read\n",
    )
    assert shown.exit_code == 4


@pytest.mark.parametrize("verb", ["show", "verify", "export"])
def test_a_ledger_that_is_not_there_is_no_finding(verb, tmp_path):
    done = servanda(verb, "--ledger", tmp_path / "ledger.db")

    assert done.exit_code == 4
    assert done.output.startswith(f"no ledger at {tmp_path}/ledger.db\n")
    assert not (tmp_path / "ledger.db").exists()


def test_an_export_is_a_file_that_verifies(promoted, tmp_path):
    where, entries = promoted
    path = tmp_path / "kept.jsonl"

    done = servanda("export", "--ledger", where, "-o", path)

    assert (done.exit_code, done.stderr) == (0, f"exported 2 to {path}\n")
    with open_ledger(str(path), reading=True) as kept:
        assert [*kept.entries()] == entries
        assert verify(kept).sound
    assert servanda("export", "--ledger", where).stdout == path.read_text()
    assert servanda("verify", "--ledger", path).exit_code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["kept.jsonl"]


def test_the_key_is_of_the_environment(where):
    with open_ledger(where, key=b"secret") as ledger:
        reaching(ledger, "shadow")

    assert servanda("verify", "--ledger", where, SERVANDA_LEDGER_KEY="secret").exit_code == 0
    done = servanda("verify", "--ledger", where)
    assert done.exit_code == 1
    assert "was created with a key, and none is given" in done.stdout
    assert servanda("show", "--ledger", where, SERVANDA_LEDGER_KEY="other").exit_code == 4


def test_the_example_that_nobody_edited_verifies_and_the_other_does_not():
    for name, code in (("tiny-ledger", 0), ("tiny-ledger-edited", 1)):
        assert servanda("verify", "--ledger", EXAMPLES / f"{name}.jsonl").exit_code == code
