# A fake server of the OpenAI API: a bare asyncio protocol, which answers with the kernel of
# answers.py, at once or at a given rate, and misbehaves on demand.

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tests.gateway.fakes.answers import Answers, events, reply
from tests.gateway.fakes.wire import asked, tokenized, unchunked

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


@dataclass
class Seen:
    """One request, as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Upstream:
    """What all connections of one server share.

    Args:
        rate: tokens a second of each stream; 0: as fast as they are read.
        keep: how many of the latest requests are kept to be looked at.
        misbehaves: "garble": bodies and events of completions that are no JSON; "hang": no
            answer to them; "".
    """

    answers: Answers = field(default_factory=Answers)
    rate: float = 0.0
    keep: int = 0
    misbehaves: Literal["", "garble", "hang"] = ""
    count: int = 0
    seen: deque[Seen] = field(default_factory=deque)
    connections: set[asyncio.WriteTransport] = field(default_factory=set)
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.seen = deque(maxlen=self.keep)

    async def serve(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)


class _Connection(asyncio.Protocol):
    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.buffer = b""
        self.timer: asyncio.TimerHandle | None = None
        self.busy = False
        self.paused = False
        self.pending: Iterator[bytes] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.upstream.connections.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.upstream.connections.discard(self.transport)
        if self.timer is not None:
            self.timer.cancel()
        self.busy = False

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.pending is not None:
            self._pour(self.pending)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while not self.busy and (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end]
            lowered = head.lower()
            at = lowered.find(b"\r\ncontent-length:")
            if at >= 0:
                stop = lowered.find(b"\r\n", at + 2)
                length = int(lowered[at + 17 : stop if stop >= 0 else None])
                if len(self.buffer) < end + 4 + length:
                    return
                body = self.buffer[end + 4 : end + 4 + length]
                self.buffer = self.buffer[end + 4 + length :]
            elif b"\r\ntransfer-encoding: chunked" in lowered:
                found = unchunked(self.buffer, end + 4)
                if found is None:
                    return
                body, after = found
                self.buffer = self.buffer[after:]
            else:
                body, self.buffer = b"", self.buffer[end + 4 :]
            self._request(head, body)

    def _request(self, head: bytes, body: bytes) -> None:
        upstream = self.upstream
        path = head.split(b" ", 2)[1]
        upstream.count += 1
        self.busy = True
        if upstream.keep:
            self._keep(head, body)
        if path.endswith(b"/completions"):
            if upstream.misbehaves != "hang":
                self._complete(path, body)
        elif path == b"/tokenize":
            self._tokenize(body)
        elif path == b"/v1/models":
            self._json(b'{"object":"list","data":[{"id":"fake","object":"model"}]}')
        else:
            self._json(json.dumps({"path": path.decode("latin-1"), "bytes": len(body)}).encode())

    def _keep(self, head: bytes, body: bytes) -> None:
        line, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = line.split(" ", 2)
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        self.upstream.seen.append(Seen(method, path, headers, body))

    def _tokenize(self, body: bytes) -> None:
        try:
            self._json(tokenized(body))
        except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        self._json(json.dumps({"error": {"message": str(error)}}).encode(), 400)

    def _complete(self, path: bytes, body: bytes) -> None:
        upstream = self.upstream
        try:
            wanted = asked(path, body)
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError) as error:
            self._refuse(error)
            return
        answers, garbled = upstream.answers, upstream.misbehaves == "garble"
        drawn = answers.drawn[upstream.rng.randrange(len(answers.drawn))]
        if not wanted.stream:
            data = reply(wanted, drawn, answers)
            self._json(data if not garbled else b"{" + data[1 : len(data) // 2])
            return
        self.transport.write(_STREAM)
        source = _chunks(events(wanted, drawn, answers), garbled=garbled)
        if upstream.rate:
            self._pace(source)
        else:
            self._pour(source)

    def _pace(self, source: Iterator[bytes]) -> None:
        data = next(source, None)
        if data is None or self.transport.is_closing():
            self._done()
        else:
            self.transport.write(data)
            wait = 1.0 / self.upstream.rate
            self.timer = asyncio.get_running_loop().call_later(wait, self._pace, source)

    def _pour(self, source: Iterator[bytes]) -> None:
        self.pending = source
        while not self.paused and not self.transport.is_closing():
            data = next(source, None)
            if data is None:
                self.pending = None
                self._done()
                return
            self.transport.write(data)

    def _json(self, data: bytes, status: int = 200) -> None:
        head = _HEAD if status == 200 else _HEAD.replace(b"200 OK", b"%d Error" % status)
        self.transport.write(head % len(data) + data)
        self._done()

    def _done(self) -> None:
        if self.busy:
            self.busy = False
            if self.buffer:
                self.data_received(b"")


def _chunks(source: Iterator[bytes], *, garbled: bool) -> Iterator[bytes]:
    """The chunks of a stream; garbled after three events."""
    for n, event in enumerate(source):
        data = b"data: {nonsense\n\n\x00: \xff\xfe\n\n" if garbled and n >= 3 else event
        yield b"%x\r\n%s\r\n" % (len(data), data)
    yield b"0\r\n\r\n"
