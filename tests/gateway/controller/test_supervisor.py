# A leader as a child process: what it says is heard, and it is started again, whatever happens.

import subprocess
import threading

import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.gateway.controller import process
from servanda.gateway.controller.process import Settings, Supervisor

WAIT_S = 60  # for what comes soon, unless the test is red
SETTINGS = Settings("c.yaml", "state", "", "127.0.0.1", 0)
# says where it is and that it is ready, then something that is no text, and dies
CHILD = """\
import sys
sys.stdin.readline()
print('{"at": "http://127.0.0.1:1"}')
print('{"ready": true}', flush=True)
sys.stdout.buffer.write(bytes([255, 10]))
"""


@pytest.mark.parametrize("line", ["3", "null", "[1]", '"at"', "a library that prints"])
def test_what_a_library_prints_is_passed_on_and_ends_nothing(line):
    said = []
    assert not Supervisor(SETTINGS, said.append)._handle_event(line + "\n")
    assert said == [line]


def no_memory(*_, **__):
    raise OSError(12, "Cannot allocate memory")


class Watched:
    """A supervised leader, with what it says and whether it was ready or refused."""

    def __init__(self, ready=len):
        self.said, self.changed = [], threading.Condition()
        self.ready, self.refused = threading.Event(), threading.Event()
        self.supervised = Supervisor(SETTINGS, self.say)
        self._ready = ready

    def say(self, line):
        with self.changed:
            self.said.append(line)
            self.changed.notify_all()

    def __enter__(self):
        def ready(url):
            self._ready(url)
            self.ready.set()

        self.supervised.start(ready, self.refused.set)
        return self

    def __exit__(self, *_):
        self.supervised.close()

    def line(self, text):
        def found():
            return next((line for line in self.said if text in line), None)

        with self.changed:
            assert self.changed.wait_for(found, WAIT_S), self.said
            return found()


@pytest.fixture
def begun(monkeypatch):
    """The arguments of every process that was begun; each is of CHILD, and soon begun again."""
    found, popen = [], subprocess.Popen

    def begin(*args, **more):
        found.append(args)
        if len(found) in no_room:
            no_memory()
        return popen(*args, **more)

    no_room = set()
    monkeypatch.setattr(process, "_CHILD", CHILD)
    monkeypatch.setattr(process, "_PAUSES_S", (0.01,))
    monkeypatch.setattr(subprocess, "Popen", begin)
    return no_room


def test_a_leader_that_cannot_be_begun_is_tried_until_it_can(begun):
    begun.add(1)
    with Watched() as watched:
        assert watched.ready.wait(WAIT_S)
        watched.supervised.check()
    assert watched.said[0] == (
        "the leader ended with exit code 1: no process can be started: Cannot allocate memory; it "
        "is started again in 0.01 s, and routing.without_snapshot decides which pool serves until "
        "it is ready"
    )


def test_a_leader_that_cannot_be_begun_again_is_tried_until_it_can(begun):
    begun.add(2)
    with Watched() as watched:
        watched.line("the leader is running again at http://127.0.0.1:1")
        assert watched.supervised.where() == "http://127.0.0.1:1"
    assert watched.said[0] == "\ufffd"
    ended = [line for line in watched.said if line.startswith("the leader ended")]
    assert ended[0] == (
        "the leader ended with exit code 0; it is started again in 0.01 s, and the gateway follows "
        "the last routes until they expire"
    )
    assert "no process can be started: Cannot allocate memory" in ended[1]


def test_a_leader_that_is_killed_before_it_is_ready_is_started_again(begun, monkeypatch, tmp_path):
    """However often, and without a word to the server meanwhile but a line."""
    again = KILLED.format(left=str(tmp_path / "left"), child=CHILD)
    monkeypatch.setattr(process, "_CHILD", again)
    (tmp_path / "left").write_text("xx")
    with Watched() as watched:
        assert watched.ready.wait(WAIT_S)
        assert not watched.refused.is_set()
    said = "the leader ended with signal 9 before it was ready; it is started again in 0.01 s, "
    said += "and routing.without_snapshot decides which pool serves until it is ready"
    assert [line for line in watched.said if "signal 9" in line] == [said] * 2


# kills itself as often as there are characters in a file
KILLED = """\
import os, pathlib, signal
left = pathlib.Path({left!r})
if text := left.read_text():
    left.write_text(text[1:])
    os.kill(os.getpid(), signal.SIGKILL)
{child}"""
REFUSING = """\
import sys
sys.stdin.readline()
print('{{"at": "http://127.0.0.1:1"}}')
print('{{"failed": "the state is in use", "code": {code}}}', flush=True)
sys.exit({code})
"""


@pytest.mark.parametrize(("code", "kind"), [(2, ContractError), (4, MeasurementError)])
def test_a_leader_that_says_at_first_why_it_cannot_lead_is_refused(begun, monkeypatch, code, kind):
    monkeypatch.setattr(process, "_CHILD", REFUSING.format(code=code))
    with Watched() as watched:
        assert watched.refused.wait(WAIT_S)
        with pytest.raises(kind, match="the state is in use"):
            watched.supervised.check()
    assert not watched.said and not watched.ready.is_set()


def test_a_leader_whose_parent_cannot_keep_its_keys_is_refused(begun, monkeypatch):
    """The process is ended, and not started again."""
    monkeypatch.setattr(process, "_CHILD", CHILD + "sys.stdin.read()\n")

    def ready(url):
        raise MeasurementError("keys cannot be written")

    with Watched(ready) as watched:
        assert watched.refused.wait(WAIT_S)
        with pytest.raises(MeasurementError, match="keys cannot be written"):
            watched.supervised.check()


def test_nobody_knows_where_a_leader_is_before_it_says_so():
    with pytest.raises(
        MeasurementError, match="the leader is being started, and has no address yet"
    ):
        Supervisor(SETTINGS, print).where()
