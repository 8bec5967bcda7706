# `servanda serve` as a process, its two kernels as others, and users before it.

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2

from servanda.promotion.ledger.ledger import open_ledger
from tests import kit

WAIT_S = 120  # for what comes soon, unless the test is red
USERS = 25
ADA = "ada-has-a-key-of-her-own"

# the first token after "d" is drawn from another distribution than train has
GOOD, BAD = kit.moved(kit.BASE, 0.005), kit.moved(kit.BASE, 0.34)
SERVED = {"": kit.BASE, "a": GOOD, "b": GOOD, "d": BAD}

CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: toy}}
kernels:
  train: {{engine: table, model: p.json}}
  infer: {{engine: openai_http, url: "{infer}"}}
stable: {{engine: openai_http, url: "{stable}"}}
workload:
  prompts: prompts.jsonl
  sampling: {{max_new_tokens: 1}}
labels:
  team: {{from: request.metadata.team}}
slices:
  - {{name: team, split: labels.team}}
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: {limit}, slices: [team]}}
escalation:
  - {{when: {{clause: tv, is: violated}}, do: [{{divert: slice}}, {{page: oncall}}]}}
routing:
  mode: {mode}
  stable_in_flight: 64
  min_users: 20
  dwell: 1h
  sample: {sample}
  sample_near: {sample}
  most_diverted: 0.5
  scorer_utilisation: 10
"""


def until(true, what, wait_s=WAIT_S):
    """Wait for it; what it was, once it is anything."""
    end, pause = time.monotonic() + wait_s, threading.Event()
    while time.monotonic() < end:
        found = true()
        if found:
            return found
        pause.wait(0.05)
    raise AssertionError(f"it never came: {what}")


class Program:
    """A process of `servanda`, whose lines are read as they come."""

    pass_fds = ()

    def __init__(self, *words, cwd, **environ):
        self.process = subprocess.Popen(
            self.command(words),
            pass_fds=self.pass_fds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
        )
        self.lines, self._changed, self._over = [], threading.Condition(), False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def command(self, words):
        return [sys.executable, "-m", "servanda", *map(str, words)]

    def _read(self):
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def line(self, pattern, after=0):
        """The first line that matches, from a number on."""

        def found():
            return next((m for x in self.lines[after:] if (m := re.search(pattern, x))), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self._over, WAIT_S)
            match = found()
        assert match, f"no line matches {pattern!r}:\n" + self.text
        return match

    @property
    def text(self):
        return "\n".join(self.lines)

    def end(self, number=signal.SIGTERM):
        """Tell it to end; its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(WAIT_S)
        self._thread.join(WAIT_S)
        return code

    def close(self):
        self.process.kill()
        self.process.wait()
        self._thread.join()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@contextlib.contextmanager
def kernels(folder, served=SERVED):
    """URLs of infer and stable; served: what infer draws from."""
    folder.mkdir(exist_ok=True)
    kit.table(folder, "p.json", {"": kit.BASE})
    kit.table(folder, "q.json", served)
    with contextlib.ExitStack() as stack:
        urls = []
        for name in ("q.json", "p.json"):
            words = (
                "tools",
                "serve-kernel",
                f"table:{folder / name}",
                "--port",
                0,
                "--served",
                "toy",
            )
            server = Program(*words, "--wait-ms", 0, "--test-mode", cwd=folder)
            urls.append(stack.enter_context(server).line(r"http://\S+")[0])
        yield tuple(urls)


class Serving(Program):
    """`servanda serve` of the toy contract; verify: what its https is verified against."""

    def __init__(
        self,
        folder,
        urls,
        *words,
        mode="enforce",
        limit=0.1,
        sample=1.0,
        keys=True,
        more="",
        verify=True,
        **environ,
    ):
        self.folder, self.more, self.verify = Path(folder), more, verify
        self.given = {"sample": sample}
        self.folder.mkdir(exist_ok=True)
        kit.table(folder, "p.json", {"": kit.BASE})
        lines = [json.dumps({"prompt": t, "labels": {"team": t}}) for t in "abd"]
        (self.folder / "prompts.jsonl").write_text("\n".join(lines))
        self.infer, self.stable = urls
        self.contract = self.folder / "toy.kernelcontract.yaml"
        self.write(mode=mode, limit=limit)
        given = ["serve", self.contract.name]
        if "--leader-only" not in words:
            given += ["--port", 0, "--show-pool"]
        if "--leader" not in words:
            given += ["--admin", "127.0.0.1:0", "--state", "state", "--ledger", "ledger.db"]
        if keys:
            file = self.folder / "keys.yaml"
            rows = [f"- {{name: user-{n}, role: client, key: {key(n)}}}" for n in range(USERS)]
            rows.append(f"- {{name: ada, role: admin, key: {ADA}}}")
            file.touch(0o600)
            file.write_text("\n".join(rows))
            given += ["--keys", file.name]
        super().__init__(*given, *words, cwd=folder, **environ)

    def write(self, **more):
        more = {"mode": "enforce", "limit": 0.1, **self.given, **more}
        text = CONTRACT.format(infer=self.infer, stable=self.stable, **more) + self.more
        new = self.contract.with_suffix(".new")
        new.write_text(text)
        new.replace(self.contract)

    @property
    def url(self):
        return self.line(r"serving users at (https?://\S+)/v1")[1]

    def begun(self):
        """Where users ask, once the first routes are there: until then stable serves."""
        with self.client() as client:
            until(lambda: ask(client, "a")[2] == "infer", "infer serves")
        return self.url

    def client(self):
        return httpx2.Client(base_url=self.url, timeout=WAIT_S, verify=self.verify)

    @property
    def page(self):
        return self.line(r"page (https?://\S+)/ ")[1]

    def status(self, holder=ADA):
        headers = {"authorization": f"Bearer {holder}"}
        at = f"{self.page}/v1/status"
        reply = httpx2.get(at, headers=headers, timeout=WAIT_S, verify=self.verify)
        reply.raise_for_status()
        return reply.json()

    def slice(self, name, holder=ADA):
        return next(s for s in self.status(holder)["slices"] if s["name"] == f"team={name}")

    def leader(self):
        """The process id of its leader."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        found = [int(pid) for file in (children, *tasks) for pid in file.read_text().split()]
        return next(iter(dict.fromkeys(found)))

    def ledger(self):
        with open_ledger(str(self.folder / "ledger.db"), reading=True) as ledger:
            return [*ledger.entries()]


def key(user):
    return f"the-key-of-user-{user:04d}"


class Users:
    """Several who ask, each in a thread, until the block ends; pause_s: after each answer."""

    def __init__(self, url, teams="abd", at_a_time=4, pause_s=0.0):
        self.probe, self._stop = [], threading.Event()
        self._url, self._teams, self._pause_s = url, teams, pause_s
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(at_a_time)]
        self._at_a_time = at_a_time

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _ask(self, number):
        with httpx2.Client(base_url=self._url, timeout=WAIT_S) as client:
            while not self._stop.wait(self._pause_s):
                number += self._at_a_time
                self.probe.append(ask(client, self._teams[number % len(self._teams)], number))

    def pools(self, team, since=0):
        return {pool for t, status, pool in self.probe[since:] if t == team}


def ask(client, team, number=0, **more):
    """(team, status or the error, pool) of one request."""
    body = {"prompt": [("abcd").index(team)], "max_tokens": 1, "metadata": {"team": team}, **more}
    path = "/v1/completions"
    headers = {"authorization": f"Bearer {key(number % USERS)}"}
    try:
        reply = client.post(path, json=body, headers=headers)
    except httpx2.HTTPError as error:
        return team, repr(error), ""
    return team, reply.status_code, reply.headers.get("x-servanda-pool", "")
