# A gateway and its upstreams on real sockets, each in a thread of its own.

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections import deque
from typing import ClassVar

import httpx2
import uvicorn

from servanda.gateway.http.listener import BoundedProtocol
from servanda.gateway.proxy import app as gateway_app
from servanda.gateway.proxy.app import App
from servanda.gateway.proxy.config import Config, Limits, Upstream
from servanda.gateway.proxy.exchange import Timeouts
from servanda.gateway.proxy.gateway import Gateway
from servanda.gateway.routing.model import SliceRoute, Snapshot
from servanda.judgement.slices.rules import Cut
from tests.clock import WAIT_S, Skipping, eventually

NOW, FOREVER = 3.9e9, 4e9  # by a leader's clock, which is not ours
NOBODY = Upstream("http://127.0.0.1:9")  # a leader that is not there: rows wait for it
SALT = "00" * 16


class Loop:
    """An event loop in a thread."""

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        return self

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def __exit__(self, *_):
        async def cancelled():
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(cancelled())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Waiting(Timeouts):
    """The timeouts of a request, and those of all that are being answered."""

    of_all: ClassVar[set] = set()

    def __init__(self, *given):
        super().__init__(*given)
        self.of_all.add(self)

    def done(self):
        super().done()
        self.of_all.discard(self)


def waits_for(what):
    """A condition of `Running.skip`: a request waits for this, as `Timeouts` names it."""
    return lambda: any(each._wait == what for each in Waiting.of_all)


class Request:
    """What a fake upstream was sent."""

    def __init__(self, head, body):
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.target, _ = first.split(" ")
        self.headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()
        self.body = body
        self.closed = threading.Event()

    @property
    def json(self):
        return json.loads(self.body)


class Fake:
    """A scripted upstream: bare sockets, one script a request.

    A script is an async function of (request, writer); None closes the connection.

    Args:
        tls: the context of its listener; None: plain HTTP.
    """

    def __init__(self, script=None, tls=None):
        self._tls = tls
        self.script, self.scripts = script or reply({"ok": True}), deque()
        self.requests = []
        self.heads = 0  # of requests, whose bodies may not have come
        self.arrived = threading.Semaphore(0)

    def __enter__(self):
        self._loop = Loop().__enter__()
        begun = asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls)
        self._server = self._loop.run(begun)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{port}"
        return self

    def __exit__(self, *_):
        self._loop.loop.call_soon_threadsafe(self._server.close)
        self._loop.__exit__()

    @property
    def last(self):
        return self.requests[-1]

    async def _connected(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
                self.heads += 1
                request = Request(head, b"")
                length = int(request.headers.get("content-length", 0))
                if request.headers.get("transfer-encoding") == "chunked":
                    request.body = await _chunks(reader)
                elif length:
                    request.body = await reader.readexactly(length)
                self.requests.append(request)
                self.arrived.release()
                script = self.scripts.popleft() if self.scripts else self.script
                task = asyncio.ensure_future(script(request, writer))
                gone = asyncio.ensure_future(_gone(reader))
                await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    request.closed.set()
                    task.cancel()
                    return
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
                if isinstance(task.exception(), ConnectionError):
                    request.closed.set()
                task.result()
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, Broken):
            pass
        finally:
            writer.close()


class Broken(Exception):  # noqa: N818 - what a script does
    """A script that ends its connection."""


async def _gone(reader):
    while not reader.at_eof() and reader.exception() is None:
        with contextlib.suppress(AssertionError):
            await reader._wait_for_data("gone")


async def _chunks(reader):
    found = b""
    while size := int((await reader.readline()).strip(), 16):
        found += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return found


def reply(data, status=200, media="application/json", **headers):
    """A script that answers with a body of a known length."""
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {media}\r\ncontent-length: {len(body)}\r\n"
    head += "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())

    async def script(request, writer):
        writer.write(head.encode() + b"\r\n" + body)

    return script


def stream(*parts, end=True, then=None):
    """A script that answers with a chunked stream of events, part by part."""

    async def script(request, writer):
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for part in parts:
            if callable(part):
                await part()
                continue
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        if then is not None:
            await then()
        if not end:
            raise Broken
        writer.write(b"0\r\n\r\n")

    return script


async def hang(request=None, writer=None):
    await asyncio.Event().wait()


async def drop(request, writer):
    raise Broken


class Running:
    """A gateway that serves on a real socket.

    Args:
        skips: whether its clock can be put forward.

    Attributes:
        gateway: itself; client: of its address; clock: of the server, where it skips.
    """

    def __init__(self, config, server=uvicorn.Server, skips=False, **options):
        self._config, self._server, self._options = config, server, options
        self.clock = Skipping() if skips else None

    def __enter__(self):
        if self.clock is not None:
            gateway_app.Timeouts = Waiting
        self.gateway = Gateway(self._config)
        self.app = App(self.gateway)
        ready = threading.Event()

        class AnnouncingServer(self._server):
            async def startup(self, sockets=None):
                await super().startup(sockets)
                ready.set()

        options = {"timeout_graceful_shutdown": 1, "log_level": "critical", **self._options}
        options |= {
            "http": BoundedProtocol,
            "ws": "none",
            "access_log": False,
            "server_header": False,
        }
        config = uvicorn.Config(self.app, **options)
        self._taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._taken.bind(("127.0.0.1", 0))
        self.port = self._taken.getsockname()[1]
        self._running = AnnouncingServer(config)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert ready.wait(WAIT_S)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx2.Client(base_url=self.url, timeout=WAIT_S)
        return self

    def _run(self):
        if self.clock is None:
            self._running.run(sockets=[self._taken])
        else:
            self.clock.serve(self._running, self._taken)

    def idle(self):
        """The gateway, once nothing is under way: rows and counts come after the last byte."""
        eventually(lambda: not self.app.in_flight and not self.gateway._tasks)
        return self.gateway

    def __exit__(self, *_):
        self.client.close()
        self._running.should_exit = True
        self._thread.join()
        self._taken.close()
        if self.clock is not None:
            gateway_app.Timeouts = Timeouts


def config(infer, stable=None, **more):
    """A configuration of two fakes, or of their urls."""
    urls = [getattr(one, "url", one) for one in (infer, stable)]
    limits = more.pop("limits", Limits())
    waits = more.pop("waits", {})
    pools = {"infer": Upstream(urls[0], defaults=more.pop("defaults", {}), **waits)}
    if stable is not None:
        pools["stable"] = Upstream(urls[1], **waits)
    return Config(**pools, limits=limits, **{"without": "stable" if stable else "infer", **more})


def snapshot(*slices, version=1, **more):
    whole = more.pop("whole", SliceRoute(Cut("all", ()), sample=0.0))
    given = {"contract": "c", "name": "toy", "valid_until": FOREVER, "salt": SALT, **more}
    return Snapshot(version=version, slices=(*slices, whole), **given)


def rows(running):
    """The rows that wait for a leader."""
    return [json.loads(row) for row in running.idle().launches.waiting()]


def everything(**more):
    """The slice of all requests; none is sampled unless a test asks for it."""
    return SliceRoute(Cut("all", ()), **{"sample": 0.0, **more})
