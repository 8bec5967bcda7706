# The workflow and the gate of examples/ci: what they call exists, and every answer closes or opens.

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from servanda.promotion.ledger.ledger import open_ledger
from servanda.promotion.run.history import advance_run
from tests import kit, transcripts
from tests.promotion.run.histories import ACTOR, TEXT, contract, finding, reaching

FOLDER = Path(__file__).parents[3] / "examples" / "ci"
GATE = FOLDER / "gate.sh"
WORKFLOW = FOLDER / "github.yml"
CONTRACT = "kernels/build.kernelcontract.yaml"
FOREVER = TEXT.replace("  valid_for: 7d\n", "")  # the runs here are of 1970


def jobs():
    return YAML(typ="safe").load(WORKFLOW.read_text())["jobs"]


def calls():
    """Every line of the workflow's steps that calls servanda, in order."""
    runs = [step["run"] for job in jobs().values() for step in job["steps"] if "run" in step]
    lines = [line.strip() for run in runs for line in run.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("servanda ")]


def test_the_workflow_calls_what_exists_with_options_that_exist():
    names = [transcripts.split(words[1:])[0] for words in calls()]
    assert names == [
        "contract lint",
        "contract explain",
        "check",
        "promote",
        "promotion can-promote",
    ]
    for words in calls():
        transcripts.parsed(words)


def test_the_workflow_may_read_the_code_and_nothing_else():
    found = YAML(typ="safe").load(WORKFLOW.read_text())
    assert found["permissions"] == {"contents": "read"}
    assert all("permissions" not in job for job in found["jobs"].values())


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "code"), [(0.1, 0), (0.005, 1)], ids=["sound", "broken"])
def test_the_calls_of_the_workflow_open_the_gate_to_a_sound_build(
    tmp_path, monkeypatch, limit, code
):
    more = "observability: {clauses: [{id: fidelity, metric: sampler_fidelity}]}"
    path, _ = kit.write(
        tmp_path / "kernels", limit=limit, more=more, q={"": kit.moved(kit.BASE, 0.05)}
    )
    text = path.read_text().replace("canary: {}", "shadow: {}, canary: {}")
    path.rename(tmp_path / CONTRACT).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVANDA_LEDGER", str(tmp_path / "ledger.db"))
    monkeypatch.setenv("SERVANDA_ACTOR", "github:ana")

    codes = {
        transcripts.split(words[1:])[0]: transcripts.in_process(
            transcripts.Command(shlex.join(words))
        )[1]
        for words in calls()
    }

    decided = dict.fromkeys(("check", "promote", "promotion can-promote"), code)
    assert codes == {"contract lint": 0, "contract explain": 0, **decided}
    assert (tmp_path / "offline.md").exists() and (tmp_path / "offline.html").exists()


# the gate


def gate(folder, *arguments, **environment):
    """Exit code, and what was said on either stream."""
    done = subprocess.run(
        ["sh", GATE, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "SERVANDA": f"{sys.executable} -m servanda", **environment},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path):
    """A contract whose build is to be promoted, and the place of its ledger."""
    kit.write(tmp_path)
    (tmp_path / "toy.kernelcontract.yaml").write_text(FOREVER)
    return tmp_path


def ask(folder, stage, ledger="ledger.db"):
    return gate(folder, "toy.kernelcontract.yaml", stage, ledger)


def test_the_gate_is_a_script_of_any_shell():
    assert subprocess.run(["sh", "-n", GATE]).returncode == 0
    assert os.access(GATE, os.X_OK)


@pytest.mark.slow
def test_the_gate_opens_where_it_was_shown(folder):
    with open_ledger(str(folder / "ledger.db")) as ledger:
        reaching(ledger, "canary-1", now=0.0, of=contract(FOREVER))
    code, out, said = ask(folder, "canary")
    assert code == 0 and out.startswith("YES: promotion toy-")
    assert said == "gate: open: it was shown that the build may be at canary\n"


@pytest.mark.slow
def test_the_gate_is_closed_to_a_build_that_is_rolled_back(folder):
    with open_ledger(str(folder / "ledger.db")) as ledger:
        story = reaching(ledger, "shadow", of=contract(FOREVER))
        found = finding("shadow", "violated", of=story.state.key)
        advance_run(ledger, story, found, actor=ACTOR, now=900.0)
    code, out, said = ask(folder, "shadow")
    assert code == 1 and "is rolled back: tv on all is violated" in out
    assert said.startswith("gate: closed: the build broke its contract")


@pytest.mark.slow
def test_the_gate_is_closed_to_what_is_not_shown(folder):
    with open_ledger(str(folder / "ledger.db")) as ledger:
        reaching(ledger, "shadow", of=contract(FOREVER))
    code, _, said = ask(folder, "full")
    assert code == 3 and said.startswith("gate: closed: it is not shown, or not any more")


@pytest.mark.slow
def test_the_gate_is_closed_to_a_contract_that_cannot_be_read(folder):
    (folder / "toy.kernelcontract.yaml").write_text("kind: KernelContract\n")
    code, _, said = ask(folder, "shadow")
    assert code == 2 and said.splitlines()[-1].startswith("gate: closed: the contract or this call")


@pytest.mark.slow
def test_the_gate_is_closed_where_the_ledger_cannot_be_read(folder):
    (folder / "ledger.db").write_text("no ledger at all, and long enough to be looked at\n" * 99)
    code, _, said = ask(folder, "shadow")
    assert code == 4 and said.splitlines()[-1].startswith("gate: closed: the ledger cannot be read")


@pytest.mark.parametrize("arguments", [(), ("contract.yaml",), ("a", "b", "c", "d")])
def test_a_call_of_the_gate_that_is_none_says_how_it_is_called(folder, arguments):
    assert gate(folder, *arguments) == (2, "", "usage: gate.sh CONTRACT STAGE [LEDGER]\n")


def test_a_program_that_is_not_there_closes_the_gate(folder):
    code, _, said = gate(folder, "x.yaml", "shadow", SERVANDA="no-such-servanda")
    assert code == 127 and "which means nothing to this gate" in said
