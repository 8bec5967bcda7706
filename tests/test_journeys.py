# The four journeys: how many files and functions of Servanda a warm call enters.
#
# A count may only fall: who reads what happens to a dump, a contract, a step or a request opens
# this many files.  Each journey is made once before it is counted, for imports and caches.

import gc
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.gateway.proxy.config import LogFiles
from servanda.rl import Monitor
from tests.gateway.serving import Fake, Running, config, everything, reply, snapshot
from tests.rl.monitor.test_state_file import observe

ROOT = Path(__file__).parents[1]
SRC = str(ROOT / "src" / "servanda")
MOST = {  # journey -> files, functions
    "check DIR": (102, 845),
    "check CONTRACT": (90, 654),
    "third observe": (49, 325),
    "one request": (19, 148),
}

SLACK = 4  # files by which a journey may be shorter before its numbers have to be lowered


class Entered:
    """The code of Servanda that runs while `counting` is on, in this thread and in new ones."""

    def __init__(self):
        self.codes, self.counting = set(), False

    def __call__(self, frame, event, _):
        if self.counting and event == "call" and frame.f_code.co_filename.startswith(SRC):
            self.codes.add(frame.f_code)

    @contextmanager
    def counted(self):
        gc.collect()  # or what earlier tests left behind may be closed, and counted, in between
        gc.disable()
        self.counting = True
        yield
        self.counting = False

    @property
    def sizes(self):
        """Files, and functions; the body of a module is none, nor is what a line makes inside."""
        codes = [code for code in self.codes if not code.co_name.startswith("<")]
        return len({code.co_filename for code in codes}), len(codes)


@pytest.fixture
def entered():
    found = Entered()
    before = sys.getprofile()
    threading.setprofile(found)
    sys.setprofile(found)
    yield found
    gc.enable()
    sys.setprofile(before)
    threading.setprofile(None)


def servanda(*words):
    done = CliRunner().invoke(main, [*map(str, words)], prog_name="servanda")
    assert done.exit_code in (0, 1), done.output


def keeps(journey, entered):
    files, functions = entered.sizes
    most = MOST[journey]
    assert files <= most[0] and functions <= most[1], f"{journey}: {files} files, {functions}"
    assert files > most[0] - SLACK, f"{journey}: {files} files, {functions}: lower the numbers"


def test_a_warm_check_of_a_dump(entered):
    dump = ROOT / "examples" / "tiny-dump"
    servanda("check", dump)
    with entered.counted():
        servanda("check", dump)
    keeps("check DIR", entered)


def test_a_warm_check_of_a_contract(entered, tmp_path):
    contract = ROOT / "examples" / "audit" / "toy.kernelcontract.yaml"
    servanda("check", contract, "--run-dir", tmp_path / "first")
    with entered.counted():
        servanda("check", contract, "--run-dir", tmp_path / "second")
    keeps("check CONTRACT", entered)


def test_the_third_step_that_a_monitor_observes(entered):
    monitor = Monitor("verl-sync")
    for weights in range(2):
        observe(monitor, weights)
    with entered.counted():
        observe(monitor, 2)
    keeps("third observe", entered)


def test_one_request_to_a_gateway_that_samples_it(entered, tmp_path, monkeypatch):
    monkeypatch.setattr("servanda.gateway.proxy.app._OFTEN_S", 3600.0)  # nothing beside the request
    with (
        Fake(reply({"by": "infer"})) as infer,
        Fake(reply({"by": "stable"})) as stable,
        Running(config(infer, stable, log=LogFiles(tmp_path))) as running,
    ):
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        ask = {"model": "m", "prompt": "hello", "max_tokens": 4}
        running.client.post("/v1/completions", json=ask).raise_for_status()
        running.idle()
        with entered.counted():
            running.client.post("/v1/completions", json=ask).raise_for_status()
            running.idle()
    keeps("one request", entered)
