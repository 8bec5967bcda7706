# `servanda serve` as its users run it: a contract, two fake upstreams, a gateway, a leader.

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.gateway.answers import NEARLY, WORDS, Answers
from benchmarks.gateway.running import ROOT, Running, free_port, listening, python
from benchmarks.gateway.settled import Settled
from benchmarks.gateway.stub import DOMAINS

LAW = "law-goes-wrong"  # text of a request that infer answers faultily
USERS = 40
KEYS = {
    "client": "client-key-0123456789",
    "viewer": "viewer-key-0123456789",
    "operator": "operator-key-0123456789",
    "admin": "admin-key-0123456789",
    "gateway": "gateway-key-0123456789",
}
NAME = "chaos"  # of the gateway
CONTRACT, KEYS_FILE = "fakes.kernelcontract.yaml", "keys.yaml"
_PATIENCE_S = 60.0
# one for all, for making one costs more than what it asks; a connection may not outlive what it
# leads to
_client = httpx2.Client(timeout=10, limits=httpx2.Limits(max_keepalive_connections=0))
_CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: fakes}}
kernels:
  train: {{engine: table, model: train.json}}
  infer: {{engine: openai_http, url: "{infer}", sampling_defaults: {{temperature: 1.0}}}}
stable: {{engine: openai_http, url: "{stable}"}}
workload:
  prompts: prompts.jsonl
  sampling: {{temperature: 1.0, max_new_tokens: 16, seed: 7}}
labels: {{domain: {{from: request.metadata.domain}}}}
slices: [{{name: domain, split: labels.domain}}]
confidence: 0.95
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: {limit}, slices: [domain]}}
escalation:
  - {{when: {{clause: tv, is: violated}}, do: [{{divert: slice}}]}}
routing:
  mode: enforce
  stable_in_flight: 1000
  most_diverted: 1.0
  min_users: 20
  dwell: {dwell}
  sample: {sample}
  sample_near: {sample_near}
  mirror: 1.0
  scorer_utilisation: 4.0
  expires: {expires}
"""


class Deployment:
    """One `servanda serve` in a folder of its own.

    Args:
        options: of the command line, besides addresses, keys and the state's folder.
        logs: whether it keeps a log of sampled requests.
        rate: tokens a second of the upstreams' streams.
        said: of the contract: limit, dwell, sample, sample_near, expires.
    """

    def __init__(
        self,
        folder: Path,
        *,
        options: tuple[str, ...] = (),
        logs: bool = False,
        rate: float = 200.0,
        **said: Any,
    ) -> None:
        self.folder, self.rate = folder, rate
        self.options = (*options, *(("--log", str(self.served)) if logs else ()))
        self.said = said
        self.settled = Settled()
        self.pools: dict[str, Running] = {}
        self.port, self.admin_port = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.signalled = 0.0  # when it was told to end, by a steady clock
        self._stack = ExitStack()
        self._pools: dict[str, ExitStack] = {}
        self._ports = {name: free_port() for name in ("infer", "stable")}

    def __enter__(self) -> Deployment:
        urls = {name: f"http://127.0.0.1:{port}" for name, port in self._ports.items()}
        written(self.folder, **urls, **self.said)
        try:
            for name in self._ports:
                self.start_pool(name)
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for name in [*self._pools]:
            self.stop_pool(name)
        self._stack.close()

    @property
    def contract(self) -> Path:
        return self.folder / CONTRACT

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.db"

    @property
    def log(self) -> Path:
        return self.folder / "serve.log"

    @property
    def served(self) -> Path:
        """The folder of the log of sampled requests."""
        return self.folder / "served"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    # upstreams

    def start_pool(self, name: str) -> None:
        stack = self._pools[name] = ExitStack()
        marked = ["--marked", LAW] if name == "infer" else []
        more = [*marked, "--least", "4", "--most", "16", "--keep", "32"]
        more += ["--rate", str(self.rate), "--name", name]
        command = python("upstream", "--port", str(self._ports[name]), *more)
        log = self.folder / f"{name}.log"
        self.pools[name] = stack.enter_context(listening(command, self._ports[name], log=log))

    def stop_pool(self, name: str) -> None:
        self._pools.pop(name).close()

    def behave(self, name: str, kind: str = "", **how: Any) -> dict[str, Any]:
        """Let a pool misbehave from now on; what it counts."""
        url = f"{self.pools[name].url}/behave"
        return _client.post(url, json={"kind": kind, **how}).json()

    def seen(self, name: str) -> dict[str, Any]:
        return _client.get(f"{self.pools[name].url}/seen").json()

    # the process and its children

    def start(self) -> None:
        command = [sys.executable, "-m", "servanda", "serve", str(self.contract)]
        command += ["--port", str(self.port), "--admin", f"127.0.0.1:{self.admin_port}"]
        command += ["--state", str(self.state), "--keys", str(self.folder / KEYS_FILE)]
        command += ["--name", NAME, "--ledger", str(self.ledger), "--show-pool"]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, *self.options],
                cwd=ROOT,
                stdout=out,
                stderr=out,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.until(self.ready, "servanda serve does not answer")

    def ready(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            raise RuntimeError(f"servanda serve ended\n{self.log.read_text()[-3000:]}")
        return self.healthy(self.url) and self.status() is not None

    def healthy(self, url: str) -> bool:
        with contextlib.suppress(httpx2.HTTPError):
            return _client.get(f"{url}/healthz", timeout=2).status_code < 500
        return False

    def readyz(self) -> int:
        """Whether a balancer would send it requests, as a status of HTTP."""
        return _client.get(f"{self.url}/readyz", timeout=5).status_code

    def stop(self, how: int = signal.SIGTERM) -> int | None:
        """End it, and whatever of it a kill left behind; the exit code."""
        if self.process is None:
            return None
        left = tree(self.process.pid)
        self.process.send_signal(how)
        self.signalled = time.monotonic()
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.process = None
        # children end by themselves when their parent is gone
        self.until(lambda: not any(alive(pid) for pid in left), "a child outlives its parent")
        return code

    @property
    def gateway_pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def leader_pid(self) -> int | None:
        """The process that listens for the admin."""
        return next((pid for pid in tree(self.gateway_pid)[1:2]), None)

    @property
    def worker_pid(self) -> int | None:
        """The process of the train engine."""
        pids = tree(self.gateway_pid)
        return pids[-1] if len(pids) > 2 else None

    def rss_mib(self, pid: int | None = None) -> float:
        """Of one process; of all together without one."""
        pids = tree(self.gateway_pid) if pid is None else [pid]
        return sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in pids) / 256

    # the admin's listener

    def ask(self, method: str, path: str, role: str = "admin", **more: Any) -> httpx2.Response:
        headers = {"authorization": f"Bearer {KEYS[role]}"}
        return _client.request(method, self.admin + path, headers=headers, **more)

    def status(self) -> dict[str, Any] | None:
        """What the leader says of itself; None where it does not answer."""
        with contextlib.suppress(httpx2.HTTPError):
            reply = self.ask("GET", "/v1/status", "viewer")
            return reply.json() if reply.status_code == 200 else None
        return None

    def slice(self, name: str) -> Mapping[str, Any]:
        return next(one for one in (self.status() or {})["slices"] if one["name"] == name)

    def durable(self) -> int:
        """Rows that the leader's store says are safe, of all starts of the gateway."""
        file = self.state / "leader.db"
        with contextlib.closing(
            sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=30)
        ) as db:
            return db.execute("SELECT coalesce(sum(number), 0) FROM taken").fetchone()[0]

    def pin(self, name: str, to: str, reason: str = NAME) -> None:
        """Pin a slice; it was acknowledged where nothing is raised."""
        act = {"slice": name, "to": to, "ttl_s": 600, "reason": reason}
        self.ask("POST", "/v1/admin/pin", json=act).raise_for_status()

    def unpin(self, name: str, reason: str = NAME) -> None:
        act = {"slice": name, "reason": reason}
        self.ask("POST", "/v1/admin/unpin", json=act).raise_for_status()

    def route(self, share: float) -> None:
        """A promotion's route effect, by hand."""
        act = {"run": NAME, "leg": "full", "share": share}
        self.ask("POST", "/v1/admin/route", "operator", json=act).raise_for_status()

    @staticmethod
    def until(true: Callable[[], Any], otherwise: str, seconds: float = _PATIENCE_S) -> None:
        """Wait for it.

        Raises:
            RuntimeError: it does not come to be.
        """
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                raise RuntimeError(otherwise)
            time.sleep(0.02)


def written(folder: Path, *, infer: str, stable: str, **said: Any) -> Path:
    """The contract of these pools in a folder, with the train kernel, the prompts and the keys.

    Args:
        said: of the contract: limit, dwell, sample, sample_near, expires.
    """
    folder.mkdir(parents=True, exist_ok=True)
    Answers(NEARLY).table(folder / "train.json")
    words = " ".join(WORDS[:3])
    lines = [json.dumps({"prompt": words, "labels": {"domain": domain}}) for domain in DOMAINS]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    held = [{"name": role, "role": role, "key": key} for role, key in KEYS.items()]
    held += [{"name": f"user-{n:02d}", "role": "client", "key": user_key(n)} for n in range(USERS)]
    keys = folder / KEYS_FILE
    keys.write_text(json.dumps(held))
    keys.chmod(0o600)
    told = {"limit": 0.05, "dwell": "1h", "sample": 1.0, "sample_near": 1.0, "expires": "60s"}
    contract = folder / CONTRACT
    contract.write_text(_CONTRACT.format(infer=infer, stable=stable, **{**told, **said}))
    return contract


def user_key(number: int) -> str:
    return f"{KEYS['client']}-{number % USERS:02d}"


def tree(pid: int) -> list[int]:
    """A process and its descendants, parents first."""
    found = [pid]
    with contextlib.suppress(OSError):
        for child in sorted(_children(pid)):
            found += tree(child)
    return found


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return False
    return state != "Z"
