# The example of a promotion, run for real: servers, traffic, the verbs, the ledger.

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from servanda.promotion.ledger.ledger import open_ledger, verify_at
from servanda.promotion.run.history import disagreements, histories
from servanda.traces.request_log import read_served

ROOT = Path(__file__).parents[2]
RUN = ROOT / "examples" / "promotion" / "run.py"
FAULTY = ("offline", "shadow", "canary", "full")
WAIT_S = 120  # until what is told to end has ended, unless the test is red

pytestmark = pytest.mark.slow


def run(folder, *arguments):
    line = [sys.executable, RUN, *map(str, arguments)]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True)


def ours(folder):
    """What runs in a folder: whatever run.py starts is started where it stands, or below."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            place = (process / "cwd").readlink()
        except OSError:
            continue
        if place.is_relative_to(folder):
            found.append((process / "cmdline").read_text())
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    out = tmp_path_factory.mktemp("promotion") / "out"
    return out, run(out.parent, "--all", "--out", out)


def told(out):
    """Each scenario -> the story of its run."""
    with open_ledger(str(out / "ledger.db"), reading=True) as ledger:
        assert disagreements(ledger) == ()
        return {
            history.opened["contract"]["name"].removeprefix("tiny-int8-"): history
            for history in histories(ledger)
        }


def test_all_of_it_ends_as_it_has_to(ran):
    _, done = ran
    assert done.returncode == 0, done.stdout + done.stderr
    assert "HAD TO END" not in done.stdout


def test_the_good_build_goes_from_offline_to_full_on_what_was_measured(ran):
    out, done = ran
    history = told(out)["good"]
    assert history.state.status == "completed" and history.leg.stage == "full", done.stdout
    legs = [*dict.fromkeys(look.leg.name for look in history.evaluations)]
    assert legs == ["offline", "shadow", "canary-1", "canary-2", "full-1"]
    for look in history.evaluations:
        if look.state.why.startswith("everything held"):
            cells = [cell for cell in look.finding.cells if not cell.guard]
            assert cells and all(cell.outcome == "holds" and cell.n > 0 for cell in cells)
            assert look.finding.groups >= 256
    route = json.loads((out / "good" / "route.json").read_text())
    assert (route["share"], route["leg"]) == (1.0, "full-1")


@pytest.mark.parametrize("stage", FAULTY)
def test_a_faulty_build_is_stopped_where_it_goes_wrong(ran, stage):
    out, done = ran
    history = told(out)[f"faulty-at-{stage}"]
    assert (history.state.status, history.leg.stage) == ("rolled_back", stage), done.stdout
    violated = [
        cell for cell in history.evaluations[-1].finding.cells if cell.outcome == "violated"
    ]
    assert violated and all(cell.n > 0 and cell.low > cell.limit for cell in violated)
    route = json.loads((out / f"faulty-at-{stage}" / "route.json").read_text())
    assert route["share"] == 0.0
    assert route["mirror"] == (0.0 if stage == "offline" else 0.5)  # what went wrong can be seen
    head = rf"faulty-at-{stage}: rolled back on {history.leg.name} .*; infer serves 0 %.*\n"
    names = "|".join(re.escape(cell.name) for cell in violated)
    assert re.search(rf"{head}  decided by ({names}): .* in \[.*\], limit .*, n \d+", done.stdout)


@pytest.mark.parametrize("scenario", ["good", "faulty-at-full"])
def test_every_request_that_was_launched_is_in_the_log(ran, scenario):
    out, _ = ran
    file = out / scenario / "served.jsonl"
    legs = {}
    for request in read_served(file.read_text(), str(file)):
        legs.setdefault(request.leg, []).append(request.index)
    assert {"shadow", "canary-1", "canary-2", "full-1"} <= {*legs}
    assert all(found == [*range(len(found))] for found in legs.values())


def test_the_ledger_verifies_and_a_copy_with_another_byte_says_where(ran, tmp_path):
    out, done = ran
    assert verify_at(str(out / "ledger.db")).sound
    edited = verify_at(str(out / "copy.jsonl"))
    assert not edited.sound and edited.problems[0].seq is not None
    assert f"✗ {edited.problems[0]}" in done.stdout

    copy = tmp_path / "copy.db"
    with (
        closing(sqlite3.connect(out / "ledger.db")) as ledger,
        closing(sqlite3.connect(copy)) as other,
    ):
        ledger.backup(other)
    assert verify_at(str(copy)).sound
    data = bytearray(copy.read_bytes())
    at = data.rindex(b"rolled_back")
    data[at] ^= 1
    copy.write_bytes(data)
    found = verify_at(str(copy))
    assert not found.sound and found.problems[0].seq is not None


def test_nothing_that_was_started_is_left(ran):
    out, _ = ran
    assert ours(out.parent) == []


def test_a_run_that_is_interrupted_leaves_nothing_behind(tmp_path, request):
    # a shell's background jobs ignore SIGINT, and so would the process that is started here
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, RUN, "--out", out],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = iter(process.stdout.readline, "")
    urls = []
    for line in lines:
        urls += re.findall(r"http://\S+", line)
        if line.startswith("$ servanda promote"):
            break
    assert len(urls) == 2
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(WAIT_S) == 130
    process.stdout.close()
    assert ours(tmp_path) == []


def test_the_same_on_postgresql(cluster, tmp_path):
    place, out = cluster.place(), tmp_path / "out"
    done = run(tmp_path, "--faulty-at", "shadow", "--out", out, "--ledger", place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert verify_at(place).sound and not (out / "ledger.db").exists()
