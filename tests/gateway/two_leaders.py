# Two leaders of one state in PostgreSQL, as processes of `servanda serve`, that are killed in turn;
# and a gateway that sends rows to whichever leads, and writes down what it was told.

import contextlib
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from servanda.gateway.controller.ledger_history import run_problems
from servanda.promotion.ledger.open import open_ledger
from tests.gateway.controller import controllers, killed
from tests.gateway.running import ADA, WAIT_S, Program, until

GATEWAY = "the-key-of-a-gateway"
KEYS = f"""\
- {{name: ada, role: admin, key: {ADA}}}
- {{name: g1, role: gateway, key: {GATEWAY}}}
"""
LEASE_S = 1.0
_PART = 8  # rows of a message
_PINNED_EVERY = 5  # messages


@dataclass
class Told:
    """What the two leaders said to one client, in the order in which it heard it.

    Args:
        terms: of each reply, with the number of the leader that sent it.
        pins: reasons of the pins that were acknowledged.
        taken: rows that were acknowledged; fell: how often an acknowledgement was withdrawn.
        gaps_s: from each kill to the next acknowledged row.
    """

    terms: list = field(default_factory=list)
    pins: list = field(default_factory=list)
    taken: int = 0
    fell: int = 0
    gaps_s: list = field(default_factory=list)
    problem: str = ""

    @property
    def overlaps(self):
        """Replies of a leader after a reply of a later one; and two leaders of one term."""
        found = sum(b[0] < a[0] for a, b in zip(self.terms, self.terms[1:], strict=False))
        return found + len({*self.terms}) - len({term for term, _ in self.terms})


class Client(threading.Thread):
    """A gateway that sends rows, and a person who sets pins; it asks both leaders in turn."""

    def __init__(self, urls, rows):
        super().__init__(daemon=True)
        self.urls, self.rows, self.told, self.over = urls, rows, Told(), threading.Event()
        self._sent = 0

    def run(self):
        try:
            with httpx2.Client(timeout=10.0, trust_env=False) as client:
                while not self.over.is_set() and self.told.taken < len(self.rows):
                    for leader in range(len(self.urls)):
                        self._message(client, leader)
                        self._ask(client, leader, "GET", "/v1/status")
        except BaseException as error:  # the test says it
            self.told.problem = f"{type(error).__name__}: {error}"
            raise

    def _message(self, client, leader):
        taken = self.told.taken
        part = self.rows[taken : taken + _PART]
        message = controllers.message(part, first=taken, version=0)
        reply = self._ask(client, leader, "POST", "/v1/follow", GATEWAY, message)
        if reply is None:
            return
        self.told.fell += reply["taken"] < taken
        self.told.taken = max(taken, reply["taken"])
        self._sent += 1
        if self._sent % _PINNED_EVERY == 0:
            pin = {"slice": "first=b", "to": "infer", "ttl_s": 3600, "reason": f"pin {self._sent}"}
            if self._ask(client, leader, "POST", "/v1/admin/pin", ADA, pin) is not None:
                self.told.pins.append(pin["reason"])

    def _ask(self, client, leader, method, path, key=ADA, body=None):
        """The answer of a leader; None if it has none, because it is dead or does not lead."""
        headers = {"authorization": f"Bearer {key}"}
        try:
            reply = client.request(
                method, self.urls[leader] + path, headers=headers, json=body
            )
        except httpx2.HTTPError:
            return None
        if reply.status_code == 503:
            return None
        assert reply.status_code == 200, reply.text
        self.told.terms.append((int(reply.headers["x-servanda-term"]), leader))
        return reply.json()


class Leaders:
    """Two leaders; `url`: of their state, `ledger`: of their ledger."""

    def __init__(self, folder, url, ledger, path):
        self.folder, self.url, self.ledger, self.path = folder, url, ledger, path
        (folder / "keys.yaml").touch(0o600)
        (folder / "keys.yaml").write_text(KEYS)
        self.at = [f"127.0.0.1:{port}" for port in _free_ports(2)]
        self.processes = [self._start(i) for i in range(2)]

    def _start(self, i):
        return Program(
            *("serve", self.path.name, "--leader-only", "--admin", self.at[i]),
            *("--state", self.url, "--lease", f"{LEASE_S:g}s", "--ledger", self.ledger),
            *("--keys", "keys.yaml"),
            cwd=self.folder,
        )

    def kill(self, i):
        process = self.processes[i]
        process.process.send_signal(signal.SIGKILL)
        process.close()
        self.processes[i] = self._start(i)

    def close(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.process.kill()
            process.close()


def survived(folder, place, kills, seed=0):
    """Kill leaders so many times while rows and pins come.

    Args:
        place: makes the URL of an empty schema of PostgreSQL.

    Returns:
        What the client was told, the rows that it sent, the stored samples, the entries of the
        ledger, and what is wrong with the ledger.
    """
    folder = Path(folder)
    path = controllers.contract(folder, q=controllers.FAULTY, routing=controllers.ACTING)
    # every kill is followed by rows, and the last by enough of them
    rows = controllers.rows(path, 40 * (kills + 2), seed=seed, at=time.time())
    state, ledger, rng = place(), place(), random.Random(seed)
    leaders = Leaders(folder, state, ledger, path)
    client = Client([f"http://{at}" for at in leaders.at], rows)
    try:
        client.start()
        for _ in range(kills):
            _progress(client, rng.randrange(1, 25))
            # mostly the one that leads
            _, leading = client.told.terms[-1]
            before = client.told.taken
            at = time.monotonic()
            leaders.kill(leading if rng.random() < 0.8 else 1 - leading)
            _progress(client, 1, before)
            client.told.gaps_s.append(time.monotonic() - at)
        _progress(client, len(rows))
        client.over.set()
        client.join(WAIT_S)
        with contextlib.closing(open_ledger(ledger, reading=True)) as found:
            # the last entries are delivered a moment after they were acknowledged
            wanted = {*client.told.pins}
            until(lambda: wanted <= {*reasons(found.entries())}, "the pins are in the ledger")
    finally:
        client.over.set()
        leaders.close()
    with contextlib.closing(open_ledger(ledger, reading=True)) as found:
        entries = [*found.entries()]
        runs = {entry.run for entry in entries}
        wrong = [str(p) for run in runs for p in run_problems(found.entries(run))]
    return client.told, rows, killed.stored_samples(state), entries, wrong


def reasons(entries):
    """The reasons of the pins in a ledger."""
    for entry in entries:
        text = str(entry.body)
        yield from (word for word in [_pin_of(text)] if word)


def _pin_of(text):
    at = text.find("pin ")
    return text[at:].split("'")[0] if at >= 0 else ""


def _progress(client, rows, since=None):
    """Wait until so many more rows were acknowledged, or all."""
    since = client.told.taken if since is None else since
    goal = min(since + rows, len(client.rows))
    until(lambda: client.told.taken >= goal or client.told.problem, f"row {goal}")
    assert not client.told.problem, client.told.problem


def _free_ports(n):
    import socket

    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
