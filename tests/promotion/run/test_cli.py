# The verbs of a promotion: what they print beside where a run stands, and how they end.

import json
from contextlib import ExitStack

import pytest

from servanda.cli.main import main
from servanda.promotion.ledger.ledger import open_ledger
from servanda.promotion.run.history import histories, override_cell
from servanda.promotion.state import Override
from servanda.runner.run_directory import opened
from tests import kit, serving
from tests.promotion.run.test_promoter import STAGES


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A contract in the working folder, and a ledger beside it."""
    path, _ = kit.write(tmp_path)
    text = path.read_text()
    path.write_text(text[: text.index("promotion:")] + STAGES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVANDA_LEDGER", "ledger.db")
    return path


@pytest.fixture
def call(capfd):
    def call(*words):
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        out, err = capfd.readouterr()
        return stop.value.code, out, err

    return call


@pytest.mark.slow
def test_a_log_that_is_not_there_is_named_with_every_wait(build, call):
    code, _, err = call("promote", build, "--quiet")
    assert code == 3
    assert err.splitlines()[0] == ("  waiting: no traffic log is given: name it with --log")

    (build.parent / "logs").mkdir()
    code, _, err = call("promote", build, "--quiet", "--log", "log.jsonl", "--log", "logs")

    assert code == 3
    assert err.splitlines()[:2] == [
        "  waiting: --log log.jsonl: nothing is there yet",
        "  waiting: --log logs: no .jsonl file is in it yet",
    ]


@pytest.mark.slow
def test_a_log_of_another_run_is_said_to_be_one(build, call):
    call("promote", build, "--quiet")
    with open_ledger("ledger.db") as ledger:
        run = next(histories(ledger)).run
    serving.log(build.parent, serving.rows(build, "shadow", 4, run="another"))

    code, _, err = call("promote", build, "--quiet", "--log", "served.jsonl")

    assert (code, err) == (
        3,
        f"  waiting: the log has no request for run '{run}' on shadow yet; "
        "its last request is for run 'another' on shadow\n",
    )


@pytest.mark.slow
def test_a_rollback_that_no_router_heard_of_ends_with_4_and_is_told_by_the_same_call(build, call):
    call("promote", build, "--quiet")
    router = ("--command", "sh -c '[ -e up ] && cat > told.json'")

    code, out, err = call("promotion", "rollback", "toy", "--reason", "enough", *router)

    assert (code, "ROLLED BACK on shadow: " in out) == (4, True)
    assert "not delivered to " in err
    assert err.endswith("  hint: the decision is in the ledger; the same call delivers it again\n")

    (build.parent / "up").touch()
    code, _, err = call("promotion", "rollback", "toy", "--reason", "enough", *router)

    assert code == 4
    assert "is rolled back (" in err
    assert json.loads((build.parent / "told.json").read_text())["run"].startswith("toy-")


@pytest.mark.slow
def test_no_clock_keeps_traffic_where_a_person_does_not_want_it(build, call):
    call("promote", build, "--quiet")
    with open_ledger("ledger.db") as ledger:
        history = next(histories(ledger))
        later = history.state.seen + 1e6
        override_cell(ledger, history, Override("tv", "*", "Ada", "known", 2 * later), now=later)

    code, _, err = call("promotion", "approve", "toy", "--reason", "well")
    assert (code, "the clock went back by " in err) == (4, True)

    code, out, _ = call("promotion", "rollback", "toy", "--reason", "enough")

    assert (code, "ROLLED BACK on shadow: " in out) == (0, True)
    assert call("promotion", "ledger", "verify")[0] == 0


def test_a_folder_is_no_ledger(build, call):
    for where in (".", "/"):
        code, _, err = call("promotion", "status", "--ledger", where)

        assert code == 4
        assert err.startswith(f"{where} is a folder, and a ledger is a file\n  hint: name a file")


@pytest.mark.slow
def test_a_promotion_that_ends_offline_says_so(build, call):
    text = build.read_text()
    build.write_text(text[: text.index("promotion:")])

    code, out, _ = call("promote", build, "--quiet")

    assert code == 0
    assert out.endswith("  next: nothing: the promotion of this contract ends at offline\n")


def test_who_keeps_looking_lets_another_promoter_finish(build, call, monkeypatch):
    with ExitStack() as other:
        other.enter_context(opened(build.parent / "runs" / "toy"))
        code, _, err = call("promote", build, "--quiet")
        assert (code, err.splitlines()[0]) == (4, "another servanda is measuring in runs/toy")

        monkeypatch.setattr("time.sleep", lambda _: other.close())
        every = ("--every", "1s", "--until", "shadow")
        code, out, err = call("promote", build, "--quiet", *every)

    assert (code, err.splitlines()[0]) == (0, "another servanda is measuring in runs/toy")
    assert "on shadow" in out
