# A gateway in a process of its own, whose memory is measured: python -m tests.gateway.standalone.

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import httpx2

from servanda.gateway.http.listener import Listener, bind
from servanda.gateway.proxy.app import App
from servanda.gateway.proxy.config import Limits
from servanda.gateway.proxy.gateway import Gateway
from tests.clock import WAIT_S
from tests.gateway.serving import NOBODY, config, everything, snapshot

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


class Standalone:
    """A gateway before two upstreams, as a process.

    Args:
        sample: share of infer's answers; limits: of `Limits`, those that are not the default.
    """

    def __init__(self, infer, stable=None, sample=0.0, **limits):
        pools = [one.url for one in (infer, stable) if one is not None]
        told = json.dumps({"pools": pools, "sample": sample, "limits": limits})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gateway.standalone", told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def __enter__(self):
        line = self.process.stdout.readline()
        assert line, "it did not start"
        self.port = int(line)
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(WAIT_S)
        self.process.stdout.close()

    def lost(self):
        """Why each sample so far is no evidence, once nothing is under way."""
        print("lost", file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def memory(self):
        """MiB that it has, and the most that it had since `forget`."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = dict(line.split(":", 1) for line in status.splitlines())
        return tuple(int(found[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))

    def forget(self):
        """Begin anew to look for the most; what it has now."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.memory()[0]

    def warm(self, body):
        """Have it answer a few requests: what a process needs once is not what a reply takes."""
        with httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=WAIT_S) as client:
            for _ in range(3):
                client.post("/v1/completions", json=body).raise_for_status()


def main():
    told = json.loads(sys.argv[1])
    own = config(*told["pools"], limits=Limits(**told["limits"]), controller=NOBODY)
    gateway = Gateway(own)
    gateway.take(snapshot(whole=everything(sample=told["sample"])))
    with bind("127.0.0.1", 0, "--port") as taken:
        port = taken.getsockname()[1]
        app = App(gateway)
        listening = Listener(app, taken, grace_s=1, ready=lambda: print(port, flush=True))

        def obey():
            for _ in sys.stdin:
                while app.in_flight or gateway._tasks:
                    threading.Event().wait(0.001)
                rows = [json.loads(row) for row in gateway.launches.waiting()]
                print(json.dumps([row.get("lost") for row in rows]), flush=True)
            listening.end()

        threading.Thread(target=obey, daemon=True).start()
        listening.run()


if __name__ == "__main__":
    main()
