# The process of a leader: what it says, and what it takes over, while it runs.

import threading
from contextlib import contextmanager

import pytest

from servanda.gateway.controller import process
from servanda.gateway.controller.process import ControllerProcess, Settings
from tests.gateway.controller import controllers


class Said:
    """Lines, and anyone who waits for one."""

    def __init__(self):
        self.lines, self._new = [], threading.Condition()

    def __call__(self, line):
        with self._new:
            self.lines.append(line)
            self._new.notify_all()

    def wait(self, part):
        with self._new:
            assert self._new.wait_for(lambda: any(part in line for line in self.lines), 60)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_LOOK_S", 0.01)
    path = controllers.contract(tmp_path)
    leader = controllers.controller(path, controllers.Clock(), ledger="")

    @contextmanager
    def watching():
        said = Said()
        settings = Settings(str(path), str(tmp_path), "", "127.0.0.1", 0)
        leading = ControllerProcess(settings, say=said)
        over = threading.Event()

        def look():
            while not over.wait(0.1):
                leading._look(leader)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield leading, said
        finally:
            over.set()
            thread.join()

    yield path, leader, watching
    leader.close()


def test_a_text_that_is_wrong_while_another_is_taken_over_does_not_end_the_watch(
    watched, monkeypatch
):
    path, leader, watching = watched
    right, reload = path.read_text(), leader.reload

    def meanwhile():
        monkeypatch.setattr(leader, "reload", reload)
        refused = reload()
        path.write_text("nonsense")  # somebody writes on
        return refused

    monkeypatch.setattr(leader, "reload", meanwhile)
    with watching() as (leading, said):
        path.write_text(right.replace("name: toy}", "name: toy, version: v2}"))
        leading.reload()
        said.wait("toy v2 is followed from now on")
        said.wait("not taken over, and the one before stays")
        path.write_text(right.replace("name: toy}", "name: toy, version: v3}"))
        said.wait("toy v3 is followed from now on")


def test_a_bug_is_said_once_and_the_contract_is_watched_all_the_same(watched, monkeypatch):
    path, leader, watching = watched
    status, left = leader.status, [ZeroDivisionError("ours")] * 3

    def odd():
        if left:
            raise left.pop()
        return status()

    monkeypatch.setattr(leader, "status", odd)
    with watching() as (leading, said):
        said.wait("! a bug of servanda: ZeroDivisionError: ours")
        path.write_text(path.read_text().replace("name: toy}", "name: toy, version: v2}"))
        leading.reload()
        said.wait("toy v2 is followed from now on")
    assert sum("a bug of servanda" in line for line in said.lines) == 1
