# Files that version 0.1.0 wrote before its modules had their present names.  They are read as
# before, and mean what they meant: a digest or a file that held a module's name would show here.

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import servanda as sv
from servanda.cli.main import main
from servanda.engines.pack_file import read_pack
from servanda.rl import Monitor
from tests.gateway.controller import controllers
from tests.rl.monitor.test_state_file import observe

OLD = Path(__file__).parent / "data" / "of_0_1"
DUMP = Path(__file__).parents[1] / "examples" / "tiny-dump"


def servanda(*arguments):
    done = CliRunner().invoke(main, [*map(str, arguments)], prog_name="servanda")
    return done.exit_code, done.output


@pytest.fixture(autouse=True)
def old(tmp_path, monkeypatch):
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_verdict_is_printed_with_the_numbers_it_had():
    code, text = servanda("tools", "report", "run/attempt-1/verdict.json")
    assert (code, text) == (0, (OLD / "report.txt").read_text())


def test_a_run_goes_on_with_what_was_measured_and_comes_to_the_same_verdict(old):
    verdict = old / "run" / "attempt-1" / "verdict.json"
    before = json.loads(verdict.read_text())
    verdict.unlink()  # as if it had been killed before its end
    rounds = sorted((old / "run" / "attempt-1" / "rounds").iterdir())
    written = [(path.name, path.stat().st_mtime_ns) for path in rounds]

    code, _ = servanda("check", "toy/toy.kernelcontract.yaml", "--run-dir", "run", "--quiet")

    again = json.loads(verdict.read_text())
    kept = {path.name: path.stat().st_mtime_ns for path in rounds}
    assert code == 1 and [(name, kept[name]) for name, _ in written] == written
    for part in ("outcome", "contract", "key", "train", "infer"):
        assert again[part] == before[part], part
    # the weights of the bets and the share of the first attempt are those of today: evidence that
    # is judged anew has other numbers here, where a verdict that was stored keeps those it had
    anew = ("alpha", "e_holds", "e_violated", "interval", "more")
    old_cells, cells = (
        [{key: cell[key] for key in cell if key not in anew} for cell in one["cells"]]
        for one in (before, again)
    )
    assert rounded(cells) == rounded(old_cells)
    for cell, had in zip(again["cells"], before["cells"], strict=True):
        assert (cell["alpha"] is None) == (had["alpha"] is None)
        if cell["interval"] is not None and cell["claim"] == "population":
            assert had["interval"][0] <= cell["interval"][0] <= cell["value"]
            assert cell["value"] <= cell["interval"][1] <= had["interval"][1]
    for name, portrait in before["portraits"].items():
        # a newer version may draw more of a portrait; what the old one drew is the same
        drawn = {key: again["portraits"][name][key] for key in portrait}
        assert rounded(drawn) == rounded(portrait), name


def rounded(value):
    """A JSON value with its floats as another processor gives them, too: to nine digits."""
    match value:
        case float():
            return float(f"{value:.9g}")
        case list():
            return [rounded(part) for part in value]
        case dict():
            return {name: rounded(part) for name, part in value.items()}
    return value


def test_a_digest_of_evidence_is_taken_of_what_it_was_taken_of():
    """Digests in ledgers and run directories are of the text of values: names of classes and
    fields are part of it.  Numbers are left out here, for their last digit is the processor's."""
    plan = sv.compile(sv.load("toy/toy.kernelcontract.yaml"))
    evidence = sv.weigh(plan, sv.measure(plan, "run"))
    text = re.sub(r"-?\d+\.?\d*(e[-+]\d+)?", "#", evidence.digested)
    assert hashlib.blake2b(text.encode(), digest_size=8).hexdigest() == "e6cff7bb9795a223"


def test_a_reference_pack_has_its_digest():
    assert read_pack("infer.pack").digest.startswith("d06a271c")
    code, text = servanda("compare", "infer.pack", "table:toy/p.json", "--quiet")
    assert code == 1, text


@pytest.mark.parametrize("ledger", ["ledger.db", "leader/ledger.db"])
def test_a_ledger_verifies(ledger):
    assert servanda("promotion", "ledger", "verify", "--ledger", ledger)[0] == 0


def test_a_promotion_stands_where_it_stood():
    code, text = servanda("promote", "toy/toy.kernelcontract.yaml", "--ledger", "ledger.db")
    # the same build has the same name, and is not judged twice
    assert code == 4 and "promotion toy-6d4eb8af of this build is in the ledger already" in text
    assert "it is rolled back on offline" in text
    assert servanda("promotion", "status", "--ledger", "ledger.db") == (
        0,
        (OLD / "status.txt").read_text(),
    )


def test_a_controller_goes_on_from_its_store(old):
    leader = controllers.controller(
        old / "leader" / "toy.kernelcontract.yaml", controllers.Clock(1400.0)
    )
    try:
        leader.step()
        assert controllers.status(leader, "first=a").status == "quarantined"
    finally:
        leader.close()


def test_a_monitor_goes_on_from_its_state(old):
    whole = Monitor("verl-sync")
    for weights in range(7):
        expected = observe(whole, weights, tv=0.004 if weights < 5 else 0.012)

    found = observe(Monitor("verl-sync", state=old / "monitor.jsonl"), 6, tv=0.012)

    assert dict(found.metrics) == pytest.approx(dict(expected.metrics), rel=1e-4)
    assert found.verdict.key == expected.verdict.key


def test_a_watch_goes_on_from_its_state(old):
    dump = old / "dump"
    shutil.copytree(DUMP, dump)
    state = old / "watch.state"
    state.write_text(state.read_text().replace("DUMP", str(dump)))
    code, text = servanda("watch", dump, "--once", "--state", state)
    assert code == 1 and "red since step 10" in text


def newer(path, schema):
    return (
        f"{path} has schema {schema}, and this version of Servanda reads up to 1\n"
        "  hint: use the version that wrote it, or a newer one: pip install --upgrade servanda"
    )


def test_a_run_of_a_newer_version_is_refused(old):
    plan = old / "run" / "attempt-1" / "plan.json"
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "schema": 7}))
    code, text = servanda("check", "toy/toy.kernelcontract.yaml", "--run-dir", "run", "--quiet")
    assert code == 4 and newer("run/attempt-1/plan.json", 7) in text


def test_a_run_states_its_schema(old):
    servanda("check", "toy/toy.kernelcontract.yaml", "--run-dir", "new", "--quiet")
    assert json.loads(Path("new/attempt-1/plan.json").read_text())["schema"] == 1


def test_states_of_a_newer_version_are_refused(old):
    state = old / "monitor.jsonl"
    state.write_text(re.sub('"schema": ?1', '"schema": 7', state.read_text()))
    with pytest.raises(sv.EvidenceError) as caught:
        observe(Monitor("verl-sync", state=state), 6, tv=0.012)
    assert newer(f"{state}:1", 7) in str(caught.value)

    watched = old / "watch.state"
    watched.write_text(re.sub('"schema": ?1', '"schema": 7', watched.read_text()))
    code, text = servanda("watch", DUMP, "--once", "--state", watched)
    assert code == 2 and newer(watched, 7) in text
