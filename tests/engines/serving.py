# A server in a thread, and the engines that its tests put behind it.

from __future__ import annotations

import contextlib
import threading

import httpx2
import uvicorn

from servanda.contract.model import Kernel
from servanda.engines.server.app import Limits, Server
from servanda.engines.server.sockets import bound
from servanda.engines.table import TableEngine
from tests import kit

WAIT_S = 60  # for what comes at once, unless the test is red


def table_engine(folder, rows=None, tokens=kit.TOKENS, cls=TableEngine, **kernel):
    kit.table(
        folder, "p.json", rows or {"": kit.BASE, "a": kit.moved(kit.BASE, 0.2)}, tokens=tokens
    )
    return cls(Kernel(engine="table", model=str(folder / "p.json"), **kernel))


class Gated(TableEngine):
    """Waits at every step until the test lets it go on."""

    def __init__(self, kernel):
        super().__init__(kernel)
        self.reached, self.gate = threading.Semaphore(0), threading.Semaphore(0)
        self.batches = []

    def steps(self, batch, sampling, seed, best=0):
        self.batches.append(batch.sequence_S)
        for step in super().steps(batch, sampling, seed, best):
            self.reached.release()
            assert self.gate.acquire(timeout=WAIT_S)
            yield step

    def generate(self, batch, sampling, seed):
        raise AssertionError("a server streams")

    def open(self):
        """Nothing waits any more."""
        self.gate.release(1_000_000)


class Locked:
    """An app behind a key: `asked` has the Authorization header of every request.

    A refusal repeats what was sent, as some servers do.
    """

    def __init__(self, app, key):
        self.app, self.key, self.asked = app, key, []

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            sent = dict(scope["headers"]).get(b"authorization", b"").decode()
            self.asked.append(sent)
            if sent != f"Bearer {self.key}":
                await send({"type": "http.response.start", "status": 401, "headers": []})
                body = f"no such key: {sent}".encode()
                return await send({"type": "http.response.body", "body": body})
        return await self.app(scope, receive, send)


@contextlib.contextmanager
def live(engine, test_mode=False, faulty=None, clock=None, locked=None, **limits):
    """(client, server) of a real socket; clock: the loop that it runs in.

    Args:
        locked: wraps the app.
    """
    server = Server(engine, "toy", Limits(**{"wait_s": 0.0} | limits), test_mode, faulty)
    app = locked(server.app()) if locked else server.app()
    config = uvicorn.Config(app, log_level="critical", ws="none", timeout_graceful_shutdown=1)
    ready = threading.Event()

    class AnnouncingServer(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            ready.set()

    with bound("127.0.0.1", 0) as taken:
        running = AnnouncingServer(config)
        if clock is None:
            thread = threading.Thread(target=running.run, args=([taken],))
        else:
            thread = threading.Thread(target=clock.serve, args=(running, taken))
        thread.start()
        try:
            assert ready.wait(WAIT_S)
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
            with httpx2.Client(base_url=url, timeout=WAIT_S) as client:
                yield client, server
        finally:
            running.should_exit = True
            thread.join()
