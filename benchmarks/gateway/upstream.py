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
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from benchmarks.gateway.answers import FAIR, FAULTY, ID, Answers, Asked, events, reply
from benchmarks.gateway.misbehaving import Behaviour, chunks, vast
from benchmarks.gateway.wire import MARK, asked, tokenized, unchunked

_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%s"
_HEAD = _OK + b"content-length: %d\r\n\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n%s"
) + _CHUNKED
_MOST = 1024  # different paths that are counted
_MARK = re.compile(rb"(?i)\r\n" + MARK.encode() + rb": *([!-~]*)")


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
        name: of its pool: the ids of its replies are made of it and of the marks of requests.
    """

    answers: Answers = field(default_factory=Answers)
    rate: float = 0.0
    keep: int = 0
    behaviour: Behaviour = field(default_factory=Behaviour)
    other: Answers | None = None
    marked: str = ""
    name: str = ""
    count: int = 0
    open: int = 0
    most: int = 0
    struck: int = 0  # requests that met its misbehaviour
    gone: int = 0  # streams whose client hung up before the end
    seen: deque[Seen] = field(default_factory=deque)
    asked: Counter[str] = field(default_factory=Counter)  # "METHOD path"
    connections: set[asyncio.WriteTransport] = field(default_factory=set)
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.seen = deque(maxlen=self.keep)

    async def serve(self, port: int = 0, host: str = "127.0.0.1") -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: _Connection(self), host, port)

    def misbehaves(self, path: bytes, body: bytes) -> str:
        how = self.behaviour
        if not how.kind or how.words.encode() not in body or how.path.encode() not in path:
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
        self.mark = b""  # a header that the reply repeats

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
        if path in (b"/behave", b"/seen"):
            self._control(path, body)
            return
        upstream.count += 1
        upstream.open += 1
        upstream.most = max(upstream.most, upstream.open)
        self.busy = True
        if upstream.keep:
            self._keep(head, body)
        found = _MARK.search(head)
        self.mark = b"%s: %s\r\n" % (MARK.encode(), found[1]) if found else b""
        kind = upstream.misbehaves(path, body)
        if kind == "hang":
            return
        if kind == "slow":
            loop = asyncio.get_running_loop()
            self.timer = loop.call_later(upstream.behaviour.seconds, self._answer, path, body, "")
            return
        self._answer(path, body, kind)

    def _keep(self, head: bytes, body: bytes) -> None:
        upstream, (line, *lines) = self.upstream, head.decode("latin-1").split("\r\n")
        method, path, _ = line.split(" ", 2)
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        upstream.seen.append(Seen(method, path, headers, body))
        if len(upstream.asked) < _MOST:
            upstream.asked[f"{method} {path}"] += 1

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
        elif path == b"/tokenize":
            self._tokenize(body)
        elif path == b"/v1/models":
            self._json(b'{"object":"list","data":[{"id":"fake","object":"model"}]}')
        else:
            self._json(json.dumps({"path": path.decode("latin-1"), "bytes": len(body)}).encode())

    def _tokenize(self, body: bytes) -> None:
        try:
            self._json(tokenized(body))
        except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        self._json(json.dumps({"error": {"message": str(error)}}).encode(), 400)

    def _complete(self, path: bytes, body: bytes, kind: str) -> None:
        upstream = self.upstream
        try:
            wanted = asked(path, body)
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError) as error:
            self._refuse(error)
            return
        answers = upstream.answers
        if upstream.other is not None and upstream.marked.encode() in body:
            answers = upstream.other
        if kind in ("nan", "short"):
            answers = Answers(answers.probs, answers.seed, answers.least, answers.most, kind)
        if kind == "swapped":
            wanted = replace(wanted, prompt=(*wanted.prompt[::-1], 0))
        drawn = answers.drawn[upstream.rng.randrange(len(answers.drawn))]
        if not wanted.stream:
            data = self._marked(wanted, reply(wanted, drawn, answers))
            if kind == "cut":
                self.transport.write(_HEAD % (self.mark, len(data)) + data[: len(data) // 2])
                self.transport.close()
            elif kind in ("vast", "vaster"):
                self._vast(data, chunked=kind == "vaster")
            else:
                self._json(data if kind != "garble" else b"{" + data[1 : len(data) // 2])
            return
        self.transport.write(_STREAM % self.mark)
        told = (self._marked(wanted, event) for event in events(wanted, drawn, answers))
        source = chunks(told, kind, upstream.behaviour.after)
        if upstream.rate and kind != "chatter":
            self._pace(source)
        else:
            self._pour(source)

    def _marked(self, wanted: Asked, data: bytes) -> bytes:
        """A reply that says whose it is, and to which request."""
        if not (wanted.mark and self.upstream.name):
            return data
        named = f'"cmpl-{self.upstream.name}-{wanted.mark}"'
        return data.replace(f'"{ID}"'.encode(), named.encode(), 1)

    def _vast(self, data: bytes, *, chunked: bool) -> None:
        parts = vast(data, self.upstream.behaviour.size, chunked=chunked)
        if chunked:
            self.transport.write(_OK % self.mark + _CHUNKED)
        else:
            size = sum(map(len, vast(data, self.upstream.behaviour.size, chunked=False)))
            self.transport.write(_HEAD % (self.mark, size))
        self._pour(parts)

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
        while not self.paused and not self.transport.is_closing():
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
        counts: dict[str, Any] = {
            "count": upstream.count,
            "open": upstream.open,
            "most": upstream.most,
        }
        counts |= {"struck": struck, "connections": len(upstream.connections)}
        requests = [{**asdict(one), "body": one.body.decode("latin-1")} for one in upstream.seen]
        data = json.dumps(
            {**counts, "gone": upstream.gone, "seen": requests, "asked": upstream.asked}
        ).encode()
        self.transport.write(_HEAD % (b"", len(data)) + data)

    def _json(self, data: bytes, status: int = 200) -> None:
        head = _HEAD if status == 200 else _HEAD.replace(b"200 OK", b"%d Error" % status)
        self.transport.write(head % (self.mark, len(data)) + data)
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
        name=options.name,
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
    parser.add_argument("--name", default="", help="of its pool, which its replies repeat")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=int, default=1)
    parser.add_argument("--most", type=int, default=64)
    parser.add_argument("--keep", type=int, default=0)
    options = parser.parse_args()
    import uvloop

    uvloop.new_event_loop().run_until_complete(_serve(options))


if __name__ == "__main__":
    main()
