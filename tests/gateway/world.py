# A gateway between users and scripted servers, all of them on real sockets in this process.

import asyncio
import contextlib
import threading
import time

import httpx2
import uvicorn

from servanda.gateway.proxy.app import App
from servanda.gateway.proxy.config import Config
from servanda.gateway.proxy.config import Upstream as Pool
from servanda.gateway.proxy.gateway import Gateway
from tests.gateway.fakes.leader_stub import Stub
from tests.gateway.fakes.upstream import Upstream

WAIT_S = 60.0


class World:
    """Upstreams by their names, a leader, a gateway, and a client that asks it."""

    def __init__(self, stack, close, stub, servers, urls):
        self._stack, self._close = stack, close
        self.stub, self.servers, self.urls = stub, servers, urls

    @property
    def infer(self):
        return self.servers["infer"]

    @property
    def stable(self):
        return self.servers["stable"]

    def gateway(self, name="gateway", **config):
        """A client of one more gateway before the same upstreams."""
        pools = {pool: Pool(self.urls[pool], defaults={}) for pool in ("infer", "stable")}
        leader = Pool(self.urls["leader"], key="follower") if self.stub else None
        own = App(Gateway(Config(**{**pools, "controller": leader, "name": name, **config})))
        base = self._stack.enter_context(serving(own))
        if self.stub is not None and self.stub.snapshot is not None:
            self.followed(name)
        return self._stack.enter_context(httpx2.Client(base_url=base, timeout=WAIT_S))

    def follow(self, snapshot, name="gateway"):
        """Hand out another snapshot, and wait until the gateway follows it."""
        self.stub.snapshot = snapshot
        self.followed(name)

    def followed(self, name="gateway"):
        """Wait until the gateway follows what the leader hands out."""
        until(lambda: self.stub.versions.get(name, 0) >= self.stub.snapshot.version)

    def pool(self, name, **more):
        """One of the upstreams, for a gateway's configuration."""
        return Pool(self.urls[name], **{"defaults": {}, **more})

    def hang_up(self):
        """The leader is gone, and no one listens where it was."""
        self._close("leader")

    def counts(self, name="gateway"):
        """What the gateway counts, reported after this was asked."""
        self.stub.counts.pop(name, None)
        until(lambda: name in self.stub.counts)
        return self.stub.counts[name]

    def rows(self, n):
        """The n rows that the leader was sent."""
        until(lambda: len(self.stub.rows) >= n)
        return self.stub.rows


def until(true):
    """Wait for what other threads do."""
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.002)


@contextlib.contextmanager
def serving(own):
    """The address of an ASGI application on a free port."""
    ready = threading.Event()

    class AnnouncingServer(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            ready.set()

    config = uvicorn.Config(
        own, port=0, log_level="critical", ws="none", timeout_graceful_shutdown=1
    )
    server = AnnouncingServer(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def world(snapshot=None, *, leader=True, names=("infer", "stable"), keep=256):
    """Servers that keep what they were asked, and a leader with this snapshot."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def done(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)

    with contextlib.ExitStack() as stack:
        servers = {name: Upstream(keep=keep) for name in names}
        stub = Stub(snapshot, keep=keep) if leader else None
        listening = {name: done(server.serve()) for name, server in servers.items()}
        if stub is not None:
            listening["leader"] = done(stub.serve())
        urls = {
            name: f"http://127.0.0.1:{own.sockets[0].getsockname()[1]}"
            for name, own in listening.items()
        }

        async def end(name):
            own = listening.pop(name)
            own.close()
            ended = servers.get(name) or stub
            for connection in [*ended.connections]:
                connection.abort()
            await asyncio.sleep(0.01)  # connections that were closed say so in their next turn

        def close(name):
            done(end(name))

        def over():
            for name in [*listening]:
                close(name)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

        stack.callback(over)
        yield World(stack, close, stub, servers, urls)
