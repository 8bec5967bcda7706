"""A fake server of the OpenAI API: a bare asyncio protocol, fast enough to vanish in a measurement.

It answers with the kernel of answers.py, at once or at a given rate, and misbehaves on demand.

    python -m benchmarks.gateway.upstream --port 9001 [--rate 50] [--probs faulty]

`POST /behave {"kind": "cut", "share": 0.5, "seconds": 1.0, "after": 3, "to": URL}` makes it
misbehave from then on; {"kind": ""} ends that.  `GET /seen` says what it was asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from benchmarks.gateway.answers import FAIR, FAULTY, Answers, events, reply
from benchmarks.gateway.misbehaving import Behaviour, chunks
from benchmarks.gateway.wire import asked, unchunked

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
        marked: requests whose body has this text are answered by `other`.
    """

    answers: Answers = field(default_factory=Answers)
    rate: float = 0.0
    keep: int = 0
    behaviour: Behaviour = field(default_factory=Behaviour)
    other: Answers | None = None
    marked: str = ""
    count: int = 0
    open: int = 0
    most: int = 0
    struck: int = 0  # requests that met its misbehaviour
    gone: int = 0  # streams whose client hung up before the end
    seen: deque[Seen] = field(default_factory=deque)
    connections: set[asyncio.WriteTransport] = field(default_factory=set)
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.seen = deque(maxlen=self.keep)

    async def serve(self, port: int = 0, host: str = "127.0.0.1") -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: _Connection(self), host, port)

    def misbehaves(self, body: bytes) -> str:
        how = self.behaviour
        if not how.kind or (how.words and how.words.encode() not in body):
            return ""
        if how.share < 1 and self.rng.random() >= how.share:
            return ""
        self.struck += 1
        return how.kind


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
        if self.busy:
            self.upstream.open -= 1
            self.upstream.gone += 1
            self.busy = False

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.pending is not None and not self.upstream.rate:
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
        method, path, _ = head[: head.find(b"\r\n") if b"\r\n" in head else None].split(b" ", 2)
        if path in (b"/behave", b"/seen"):
            self._control(path, body)
            return
        upstream.count += 1
        upstream.open += 1
        upstream.most = max(upstream.most, upstream.open)
        self.busy = True
        if upstream.keep:
            lines = head.decode("latin-1").split("\r\n")[1:]
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
            upstream.seen.append(Seen(method.decode(), path.decode("latin-1"), headers, body))
        kind = upstream.misbehaves(body)
        if kind == "hang":
            return
        if kind == "slow":
            loop = asyncio.get_running_loop()
            self.timer = loop.call_later(upstream.behaviour.seconds, self._answer, path, body, "")
            return
        self._answer(path, body, kind)

    def _answer(self, path: bytes, body: bytes, kind: str) -> None:
        upstream = self.upstream
        if kind == "refuse":
            self.transport.abort()
        elif kind == "status":
            self._json(b'{"error":{"message":"overloaded"}}', upstream.behaviour.status)
        elif kind == "redirect":
            location = upstream.behaviour.to.encode()
            self.transport.write(
                b"HTTP/1.1 307 Temporary Redirect\r\nlocation: %s\r\ncontent-length: 0\r\n\r\n"
                % location
            )
            self._done()
        elif path.endswith(b"/completions"):
            self._complete(path, body, kind)
        elif path == b"/v1/models":
            self._json(b'{"object":"list","data":[{"id":"fake","object":"model"}]}')
        else:
            self._json(json.dumps({"path": path.decode("latin-1"), "bytes": len(body)}).encode())

    def _complete(self, path: bytes, body: bytes, kind: str) -> None:
        upstream = self.upstream
        try:
            wanted = asked(path, body)
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError) as error:
            self._json(json.dumps({"error": {"message": str(error)}}).encode(), 400)
            return
        answers = upstream.answers
        if upstream.other is not None and upstream.marked.encode() in body:
            answers = upstream.other
        if kind in ("nan", "short"):
            answers = Answers(answers.probs, answers.seed, answers.least, answers.most, kind)
        drawn = answers.drawn[upstream.rng.randrange(len(answers.drawn))]
        if not wanted.stream:
            data = reply(wanted, drawn, answers)
            if kind == "cut":
                self.transport.write(_HEAD % len(data) + data[: len(data) // 2])
                self.transport.close()
            else:
                self._json(data if kind != "garble" else b"{" + data[1 : len(data) // 2])
            return
        self.transport.write(_STREAM)
        source = chunks(events(wanted, drawn, answers), kind, upstream.behaviour.after)
        if upstream.rate:
            self._pace(source)
        else:
            self._pour(source)

    def _pace(self, source: Iterator[bytes]) -> None:
        data = next(source, None)
        if data is None or self.transport.is_closing():
            self._done()
        elif data == b"cut":
            self.transport.abort()
        elif data:
            self.transport.write(data)
            wait = 1.0 / self.upstream.rate
            self.timer = asyncio.get_running_loop().call_later(wait, self._pace, source)

    def _pour(self, source: Iterator[bytes]) -> None:
        self.pending = source
        while not self.paused:
            data = next(source, None)
            if data is None:
                self.pending = None
                self._done()
                return
            if data == b"cut":
                self.pending = None
                self.transport.abort()
                return
            if not data:
                return
            self.transport.write(data)

    def _control(self, path: bytes, body: bytes) -> None:
        upstream, struck = self.upstream, self.upstream.struck
        if path == b"/behave":  # how many met what it ends is told once more
            upstream.behaviour, upstream.struck = Behaviour(**json.loads(body or b"{}")), 0
        counts = {"count": upstream.count, "open": upstream.open, "most": upstream.most}
        counts |= {"struck": struck}
        requests = [{**asdict(one), "body": one.body.decode("latin-1")} for one in upstream.seen]
        data = json.dumps({**counts, "gone": upstream.gone, "seen": requests}).encode()
        self.transport.write(_HEAD % len(data) + data)

    def _json(self, data: bytes, status: int = 200) -> None:
        head = _HEAD if status == 200 else _HEAD.replace(b"200 OK", b"%d Error" % status)
        self.transport.write(head % len(data) + data)
        self._done()

    def _done(self) -> None:
        if self.busy:
            self.busy = False
            self.upstream.open -= 1
            if self.buffer:
                self.data_received(b"")


async def _serve(options: argparse.Namespace) -> None:
    probs = {"fair": FAIR, "faulty": FAULTY}
    answers = Answers(probs[options.probs], options.seed, options.least, options.most)
    other = Answers(FAULTY, options.seed + 1, options.least, options.most)
    upstream = Upstream(
        answers,
        options.rate,
        options.keep,
        other=other if options.marked else None,
        marked=options.marked,
    )
    server = await upstream.serve(options.port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0, help="tokens a second of a stream")
    parser.add_argument("--probs", choices=("fair", "faulty"), default="fair")
    parser.add_argument("--marked", default="", help="bodies with this text are answered faultily")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=int, default=1)
    parser.add_argument("--most", type=int, default=64)
    parser.add_argument("--keep", type=int, default=0)
    options = parser.parse_args()
    import uvloop

    uvloop.new_event_loop().run_until_complete(_serve(options))


if __name__ == "__main__":
    main()
