# Replies without an end, and clients that do not read: what a gateway keeps of them is bounded.
#
# The memory is that of a real process, over an upstream on another socket.

import contextlib
import functools
import json
import math
import socket
import sys

import pytest

from servanda.gateway.proxy.config import Limits
from tests.clock import eventually
from tests.gateway.serving import NOBODY, WAIT_S, Fake, Running, config, drop, everything, reply
from tests.gateway.serving import snapshot as snapshot_of
from tests.gateway.standalone import MIB, Standalone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

ASK = {"model": "m", "prompt": [1, 2], "max_tokens": 4}
STEP = {"index": 0, "text": "a", "finish_reason": None, "token_ids": [3]}
STEP |= {"logprobs": {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:3": -0.5}]}}
EVENT = b"data: %s\n\n" % json.dumps({"choices": [STEP]}).encode()
PART = EVENT * (MIB // 4 // len(EVENT))
LONG = EVENT.replace(b'"text": "a"', b'"text": "%s"' % (b"a" * 4000))  # fewer of them to read
TEXT = b"x" * len(PART)
# what the gateway keeps of one reply: its own limits here, and what copies and buffers take
KEPT = {"reply_bytes": 4 * MIB, "line_bytes": MIB}
BOUND_MIB = 32


class Endless:
    """A script that sends the same part again and again.

    Args:
        size: bytes after which the reply ends, at the end of a part; None: never.

    Attributes:
        declared: whether it says its length; sent: bytes, so far.
    """

    def __init__(self, part, media="application/json", first=b"", size=None, declared=False):
        self._part, self._media, self._first = part, media, first
        self.declared, self._size, self.sent = declared, size, 0

    async def __call__(self, request, writer):
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {self._media}\r\n"
        if self.declared:
            head += f"content-length: {self._size}\r\n\r\n"
        else:
            head += "transfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        part, sent = self._first or self._part, 0
        while self._size is None or sent < self._size:
            if self.declared:
                writer.write(part[: self._size - sent])
            else:
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
            sent += len(part)
            self.sent, part = sent, self._part
        if not self.declared:
            writer.write(b"0\r\n\r\n")


EVENTS = "text/event-stream"
DECLARED = functools.partial(Endless, TEXT, declared=True)
COMMENTS = (b": " + b"y" * 997 + b"\n") * 256
SHAPES = {
    "a body of a known length": DECLARED,
    "a body in chunks": functools.partial(Endless, TEXT),
    "events": functools.partial(Endless, PART, EVENTS),
    "long events": functools.partial(Endless, LONG * 64, EVENTS),
    "one event": functools.partial(Endless, TEXT, EVENTS, first=b"data: " + TEXT),
    "comments": functools.partial(Endless, COMMENTS, EVENTS),
}


@contextlib.contextmanager
def asking(port, asked="POST /v1/completions"):
    """A connection on which a request was sent."""
    body = json.dumps(ASK).encode()
    head = f"{asked} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        yield client


def drained(client, most=math.inf):
    """Bytes until the other side closes, or until there are so many; and the last few of them."""
    size, last, buffer = 0, b"", bytearray(MIB)
    while size < most and (got := client.recv_into(buffer)):
        size, last = size + got, (last + buffer[max(0, got - 5) : got])[-5:]
    return size, last


class Between:
    """A gateway between a client and a scripted infer; its stable answers no one."""

    def __init__(self, stack, sample, **limits):
        self.sample = sample
        self.infer = stack.enter_context(Fake(reply({})))
        self.stable = stack.enter_context(Fake(drop))
        self.gateway = stack.enter_context(
            Standalone(self.infer, self.stable, sample=sample, **limits)
        )
        self.gateway.warm(ASK)
        self._rows = len(self.gateway.lost())

    def lost(self):
        """Why each sample is no evidence, of those since this was asked before."""
        before, found = self._rows, self.gateway.lost()
        self._rows = len(found)
        return found[before:]

    @contextlib.contextmanager
    def growing_by(self, most_mib):
        """What happens meanwhile takes no more memory than that."""
        before = self.gateway.forget()
        yield
        took = self.gateway.memory()[1] - before
        print(f"{took:.1f} MiB")
        assert took < most_mib

    def asked(self, script, asked="POST /v1/completions"):
        """A connection on which a request was sent that is answered by a script."""
        self.infer.script = script
        return asking(self.gateway.port, asked)

    def passes(self, script, most_mib, asked="POST /v1/completions"):
        """A reply comes to its client whole, and takes no more memory than that."""
        with self.growing_by(most_mib), self.asked(script, asked) as client:
            size, last = drained(client)
        assert size > script.sent / 2  # a sampled stream is less than was asked for
        assert last == (b"x" * 5 if script.declared else b"0\r\n\r\n")
        assert not self.stable.requests


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["unsampled", "sampled"])
def between(request):
    with contextlib.ExitStack() as stack:
        yield Between(stack, request.param, **KEPT)


def lost_of(name):
    """Why a sampled one is no evidence: a stream of comments ends without an answer."""
    return ["cut" if name == "comments" else "overlong"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*SHAPES])
def test_a_long_reply_passes_in_little_memory(between, name):
    between.passes(SHAPES[name](size=16 * MIB), BOUND_MIB)

    assert between.lost() == (lost_of(name) if between.sample else [])


@pytest.mark.slow
@pytest.mark.parametrize("sample", [0.0, 1.0])
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "events"])
def test_a_reply_of_a_gigabyte_passes_within_the_limits_as_they_are(name, sample):
    most_mib = 4 * Limits().reply_bytes / MIB if sample else BOUND_MIB
    with contextlib.ExitStack() as stack:
        between = Between(stack, sample)
        between.passes(SHAPES[name](size=1 << 30), most_mib)

        assert between.lost() == (lost_of(name) if sample else [])


@pytest.mark.parametrize("asked", ["POST /v1/embeddings", "GET /v1/models"])
def test_a_long_reply_of_another_path_passes_in_little_memory(asked):
    with Fake(Endless(TEXT, size=16 * MIB)) as infer, Standalone(infer) as gateway:
        before = gateway.forget()
        with asking(gateway.port, asked) as client:
            assert drained(client)[0] > 16 * MIB
        assert gateway.memory()[1] - before < BOUND_MIB


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a body in chunks", "events", "one event", "comments"])
def test_a_reply_without_an_end_is_given_up_with_its_client(between, name):
    with between.growing_by(BOUND_MIB):
        with between.asked(SHAPES[name]()) as client:
            drained(client, 8 * MIB)
        assert between.infer.last.closed.wait(WAIT_S)

    assert len(between.lost()) == between.sample


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["unsampled", "sampled"])
def impatient(request):
    """Which gives up a client that reads nothing for a moment."""
    with contextlib.ExitStack() as stack:
        yield Between(stack, request.param, **KEPT, stall_s=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a body in chunks", "events", "one event"])
def test_an_upstream_waits_for_a_client_that_does_not_read(impatient, name):
    """Until its time is over; what the gateway and the sockets hold meanwhile is little."""
    script = SHAPES[name]()
    with impatient.growing_by(BOUND_MIB), impatient.asked(script):
        eventually(lambda: script.sent)
        assert impatient.infer.last.closed.wait(WAIT_S)

    assert script.sent < 32 * MIB


@pytest.mark.parametrize("sample", [0.0, 1.0])
def test_a_reply_that_is_too_long_to_be_read_comes_byte_for_byte(sample):
    """Whatever was read of it before its length was known."""
    body = b'{"text": "%s"}' % bytes(range(48, 58)) * 400
    with Fake(chunked(body)) as infer:
        own = config(infer, limits=Limits(reply_bytes=1000), controller=NOBODY)
        with Running(own) as running:
            running.gateway.take(snapshot_of(whole=everything(sample=sample)))
            answer = running.client.post("/v1/completions", json=ASK)
            rows = [json.loads(row) for row in running.idle().launches.waiting()]

    assert (answer.status_code, answer.content) == (200, body)
    assert [row["lost"] for row in rows] == ["overlong"] * (sample > 0)
    assert len(infer.requests) == 1


def chunked(body):
    async def script(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        for at in range(0, len(body), 700):
            part = body[at : at + 700]
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    return script


@pytest.mark.parametrize("head", [b"x-%d: " + b"y" * 1000, b"x-%d: y"])
def test_a_head_or_trailers_without_an_end_are_given_up(between, head):
    async def heads(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n")
        for n in range(10**9):
            writer.write(head % n + b"\r\n")
            await writer.drain()

    async def trailers(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
        for n in range(10**9):
            writer.write(head % n + b"\r\n")
            await writer.drain()

    for script in (heads, trailers):
        with between.growing_by(BOUND_MIB):
            with between.asked(script) as client:
                drained(client)
            assert between.infer.last.closed.wait(WAIT_S)
    between.lost()
