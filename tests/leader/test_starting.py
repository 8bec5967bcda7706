# A leader as a child process: what it says is heard, and it is started again, whatever happens.

import subprocess
import threading

import pytest

from servanda.errors import MeasurementError
from servanda.leader import starting
from servanda.leader.leads import Settings
from servanda.leader.starting import Supervised

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
    assert not Supervised(SETTINGS, said.append)._heard(line + "\n")
    assert said == [line]


def no_memory(*_, **__):
    raise OSError(12, "Cannot allocate memory")


def test_a_leader_that_cannot_be_begun_is_told(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", no_memory)
    with pytest.raises(MeasurementError, match="no process can be begun: Cannot allocate memory"):
        Supervised(SETTINGS, print).start()


def test_a_leader_that_cannot_be_begun_again_is_tried_until_it_can(monkeypatch):
    said, begun, again = [], [], threading.Event()
    popen = subprocess.Popen

    def begin(*args, **more):
        begun.append(args)
        if len(begun) == 2:
            no_memory()
        return popen(*args, **more)

    def say(line):
        said.append(line)
        if "is there again" in line:
            again.set()

    monkeypatch.setattr(starting, "_CHILD", CHILD)
    monkeypatch.setattr(starting, "_PAUSES_S", (0.01,))
    monkeypatch.setattr(subprocess, "Popen", begin)
    supervised = Supervised(SETTINGS, say)
    supervised.start()
    assert again.wait(60)
    supervised.close()
    assert said[0] == "\ufffd"
    ended = [line for line in said if line.startswith("the leader ended")]
    assert "exit code 0; it is started again in 0.01 s" in ended[0]
    assert "no process can be begun: Cannot allocate memory" in ended[1]
