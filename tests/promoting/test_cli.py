# The verbs of a promotion: what they print beside where a run stands, and how they end.

import json

import pytest

from servanda.cli.main import main
from servanda.ledger import open_ledger
from servanda.promoting.story import stories
from tests import kit, serving
from tests.promoting.test_promoter import STAGES


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


def test_a_log_that_is_not_there_is_named_with_every_wait(build, call):
    code, _, err = call("promote", build, "--quiet")
    assert code == 3
    assert err.splitlines()[0] == (
        "  waiting: no log of what infer served is given: name it with --served"
    )

    (build.parent / "logs").mkdir()
    code, _, err = call("promote", build, "--quiet", "--served", "log.jsonl", "--served", "logs")

    assert code == 3
    assert err.splitlines()[:2] == [
        "  waiting: --served log.jsonl: nothing is there yet",
        "  waiting: --served logs: no .jsonl file is in it yet",
    ]


def test_a_log_of_another_run_and_requests_that_are_no_evidence_are_counted(build, call):
    call("promote", build, "--quiet")
    with open_ledger("ledger.db") as ledger:
        run = next(stories(ledger)).run
    serving.log(build.parent, serving.rows(build, "shadow", 4, run="another"))

    code, out, err = call("promote", build, "--quiet", "--served", "served.jsonl")
    assert (code, err) == (
        3,
        f"  waiting: the log has no request of run '{run}' on shadow yet; "
        "its last one is of run 'another' on shadow\n",
    )

    odd = serving.rows(build, "shadow", 4, run=run)
    odd = [{**row, "sampling": {**row["sampling"], "temperature": 0.7}} for row in odd]
    serving.log(build.parent, odd)
    code, out, err = call(
        "promote", build, "--served", "served.jsonl", "--format", "json", "--quiet"
    )

    assert (code, json.loads(out)["status"]) == (3, "awaiting_evidence")
    assert err.splitlines()[-1] == (
        "  4 requests are no evidence: asked for another sampling than the workload's"
    )
