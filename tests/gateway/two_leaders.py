# Two leaders of one state in PostgreSQL, as processes of `servanda serve`, that are killed or
# stopped in turn; and a gateway that sends rows to whichever leads, and notes what it is told.

import contextlib
import random
import signal
import socket
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from servanda.gateway.controller.ledger_history import run_problems
from servanda.promotion.ledger.entry import LedgerError
from servanda.promotion.ledger.ledger import open_ledger
from tests.gateway.controller import controllers, killed
from tests.gateway.running import ADA, WAIT_S, Program, until

GATEWAY = "the-key-of-a-gateway"
_KEYS = f"""\
- {{name: ada, role: admin, key: {ADA}}}
- {{name: g1, role: gateway, key: {GATEWAY}}}
"""
LEASE_S = 1.0
_PART = 8  # rows of a message
_ANSWERS_S = 2.0
_PINNED_EVERY = 5  # messages


@dataclass
class Told:
    """What the two leaders said to one client, in the order in which it heard it.

    Args:
        terms: of each reply, with the number of the leader that sent it.
        pins: reasons of the pins that were acknowledged.
        taken: rows that were acknowledged; fell: how often an acknowledgement was withdrawn.
        gaps_s: ("killed", "stopped" or "database", "led" or "waited": to which leader) -> seconds
            until the next row was acknowledged, for each time.
    """

    terms: list = field(default_factory=list)
    pins: list = field(default_factory=list)
    taken: int = 0
    fell: int = 0
    gaps_s: dict = field(default_factory=lambda: defaultdict(list))
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
            # one that is stopped does not answer
            with httpx2.Client(timeout=_ANSWERS_S, trust_env=False) as client:
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
            reply = client.request(method, self.urls[leader] + path, headers=headers, json=body)
        except httpx2.HTTPError:
            return None
        if reply.status_code == 503:
            return None
        assert reply.status_code == 200, reply.text
        self.told.terms.append((int(reply.headers["x-servanda-term"]), leader))
        return reply.json()


class Leaders:
    """Two leaders of the contract at `path`; state, ledger: URLs of theirs."""

    def __init__(self, path, state, ledger):
        self.path, self.state, self.ledger = path, state, ledger
        keys = path.parent / "leaders.yaml"
        keys.touch(0o600)
        keys.write_text(_KEYS)
        self.at = [f"127.0.0.1:{port}" for port in _free_ports(2)]
        self.processes = [self._start(i) for i in range(2)]

    def started(self):
        """Wait until both have begun to lead or to wait."""
        for process in self.processes:
            process.line("^standby: |^the leader is running")

    def status(self):
        """(index of the one that leads, its status), or None."""
        headers = {"authorization": f"Bearer {ADA}"}
        for i, at in enumerate(self.at):
            with contextlib.suppress(httpx2.HTTPError):
                reply = httpx2.get(f"http://{at}/v1/status", headers=headers, trust_env=False)
                if reply.status_code == 200:
                    return i, reply.json()
        return None

    def _start(self, i):
        return Program(
            *("serve", self.path.name, "--leader-only", "--admin", self.at[i]),
            *("--state", self.state, "--lease", f"{LEASE_S:g}s", "--ledger", self.ledger),
            *("--keys", "leaders.yaml"),
            cwd=self.path.parent,
        )

    @contextlib.contextmanager
    def killed(self, i):
        """It is killed, and started again at once."""
        self.processes[i].close()
        self.processes[i] = self._start(i)
        yield

    @contextlib.contextmanager
    def stopped(self, i):
        """It stands still meanwhile, as the process of a machine that is suspended."""
        process = self.processes[i].process
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def close(self):
        for process in self.processes:
            process.close()


def survived(folder, cluster, times, seed=0, *, stops=0.3, restarts=0.0):
    """Kill or stop leaders so many times while rows and pins come.

    Args:
        cluster: of PostgreSQL, see `tests.cluster`.
        stops, restarts: shares of the times in which a leader is stopped, or the database is
            restarted, instead of a kill.

    Returns:
        What the client was told, the rows that it sent, the stored samples, the entries of the
        ledger, and what is wrong with the ledger.
    """
    path = controllers.contract(Path(folder), q=controllers.FAULTY, routing=controllers.ACTING)
    # every time is followed by rows, and the last by enough of them
    n = 40 * (times + 2)
    # none is dispatched later than it arrives: its time would be set back
    rows = controllers.rows(path, n, seed=seed, at=time.time() - n / 10)
    state, ledger, rng = cluster.place(), cluster.place(), random.Random(seed)
    leaders = Leaders(path, state, ledger)
    client = Client([f"http://{at}" for at in leaders.at], rows)
    try:
        client.start()
        for _ in range(times):
            _progress(client, rng.randrange(1, 25))
            _, leading = client.told.terms[-1]
            led = rng.random() < 0.8  # mostly the one that leads
            i, act = leading if led else 1 - leading, rng.random()
            what, during = "killed", leaders.killed
            if act < restarts:
                what, during = "database", lambda _: _restarted(cluster)
            elif act < restarts + stops:
                what, during = "stopped", leaders.stopped
            before, at = client.told.taken, time.monotonic()
            with during(i):
                _progress(client, 1 if led else _PART, before)
                gap_s = time.monotonic() - at
            client.told.gaps_s[what, "led" if led else "waited"].append(gap_s)
        _progress(client, len(rows))
        client.over.set()
        client.join(WAIT_S)
        until(lambda: {*client.told.pins} <= {*_pins(_entries(ledger))}, "the pins are kept")
    except AssertionError as error:
        said = "\n".join(process.text for process in leaders.processes)
        raise AssertionError(f"{error}\n{client.told.gaps_s}\n{said}") from None
    finally:
        client.over.set()
        leaders.close()
    entries = _entries(ledger)
    with contextlib.closing(open_ledger(ledger, reading=True)) as found:
        runs = {entry.run for entry in entries}
        wrong = [str(problem) for run in runs for problem in run_problems(found.entries(run))]
    return client.told, rows, killed.stored_samples(state), entries, wrong


@contextlib.contextmanager
def _restarted(cluster):
    cluster.restart()
    yield


def _entries(ledger):
    """The entries, of which the last are delivered a moment after they were acknowledged."""
    try:
        with contextlib.closing(open_ledger(ledger, reading=True)) as found:
            return [*found.entries()]
    except LedgerError:  # there is none yet
        return []


def _pins(entries):
    return [e.body["reason"] for e in entries if str(e.body.get("reason", "")).startswith("pin ")]


def _progress(client, rows, since=None):
    """Wait until so many more rows were acknowledged, or all."""
    since = client.told.taken if since is None else since
    goal = min(since + rows, len(client.rows))
    until(lambda: client.told.taken >= goal or client.told.problem, f"row {goal}")
    assert not client.told.problem, client.told.problem


def _free_ports(n):
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
