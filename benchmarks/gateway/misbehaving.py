# How a fake server misbehaves, and what its streams are like then.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

KINDS = (
    "",
    "hang",  # no answer
    "slow",  # an answer after `seconds`
    "refuse",  # the connection closes before an answer
    "status",  # an error of `status`
    "stall",  # nothing more after `after` events
    "cut",  # the connection closes after `after` events, or in the middle of a body
    "garble",  # events and bodies that are no JSON
    "nan",  # logprobs that are not numbers
    "short",  # fewer logprobs than tokens
    "redirect",  # 307 to `to`
    "endless",  # one line of a stream that never ends
    "chatter",  # good events of a stream that never ends, as fast as they are read
    "vast",  # a body of `size` bytes; "vaster": the same in chunks, so that no length is known
    "vaster",
    "swapped",  # the ids of another prompt than was asked
)


@dataclass
class Behaviour:
    """How a server misbehaves.

    Args:
        share: of requests; the others are answered as usual.
        words: only requests whose body has this text, and path: whose path has it; "": any.
    """

    kind: str = ""
    share: float = 1.0
    seconds: float = 1.0
    after: int = 3
    status: int = 503
    to: str = ""
    words: str = ""
    path: str = "completions"
    size: int = 1 << 30


def chunks(source: Iterator[bytes], kind: str, after: int) -> Iterator[bytes]:
    """The chunks of a stream; b"cut" where its connection is to close, b"" where it is to stall."""
    for n, event in enumerate(source):
        if kind == "cut" and n == after:
            yield b"cut"
            return
        if kind == "stall" and n == after:
            yield b""
            return
        if kind == "endless" and n == after:
            line = b"data: " + b"x" * 65_530
            while True:
                yield chunk(line)
        while kind == "chatter" and n == after:
            yield chunk(event)
        sent = event if kind != "garble" or n < after else b"data: {nonsense\n\n\x00: \xff\xfe\n\n"
        yield chunk(sent)
    yield b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def vast(data: bytes, size: int, *, chunked: bool) -> Iterator[bytes]:
    """A body of JSON, made long by a text that nobody asked for."""
    part = b"x" * 65_536
    more = -(-size // len(part))
    yield from map(chunk if chunked else bytes, [data[:-1] + b',"padding":"'])
    wrapped = chunk(part) if chunked else part
    for _ in range(more):
        yield wrapped
    yield from map(chunk if chunked else bytes, [b'"}'])
    if chunked:
        yield b"0\r\n\r\n"
