# Splits a sampled stream into server-sent events without losing a byte.
#
# Lines end by \n, \r\n or \r; an event ends by an empty line; a line that begins with ":" is a
# comment; the `data` lines of an event are one text (HTML, 9.2).

from __future__ import annotations

import re

_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_LINE = re.compile(rb"\r\n|\n|\r")
_BETWEEN = re.compile(rb"(?:(?::[^\r\n]*)?(?:\r\n|\n|\r))+")
DONE = b"[DONE]"


class EventSplitter:
    """Splits the parts of a stream into complete events with the same bytes."""

    def __init__(self) -> None:
        self._held, self._searched = bytearray(), 0

    @property
    def held(self) -> int:
        """Bytes of an incomplete event."""
        return len(self._held)

    def feed(self, part: bytes) -> list[bytes]:
        """The events that end in this part, each with the empty line that ends it."""
        self._held += part
        events: list[bytes] = []
        at = 0
        while True:
            match = _END.search(self._held, max(at, self._searched))
            # a \r at the end may be the first half of \r\n
            if match is None or (match.end() == len(self._held) and self._held[-1:] == b"\r"):
                break
            events.append(bytes(self._held[at : match.end()]))
            at = self._searched = match.end()
        del self._held[:at]
        self._searched = max(0, len(self._held) - 3)
        return events

    def between(self) -> bytes:
        """Complete comment lines at the start of the buffer, which servers send as keep-alive."""
        match = _BETWEEN.match(self._held)
        if match is None:
            return b""
        comments = bytes(match[0])
        del self._held[: len(comments)]
        self._searched = max(0, self._searched - len(comments))
        return comments

    def rest(self) -> bytes:
        """The rest without a final empty line."""
        left, self._held = bytes(self._held), bytearray()
        return left


def data_of(event: bytes) -> bytes | None:
    """The text of an event; None without `data`."""
    lines = [
        line[6:] if line.startswith(b"data: ") else line[5:]
        for line in _LINE.split(event)
        if line.startswith(b"data:") or line == b"data"
    ]
    return b"\n".join(lines) if lines else None


def with_data(event: bytes, data: bytes) -> bytes:
    """The event with another text; its other lines are as they were."""
    parts = re.split(rb"(\r\n|\n|\r)", event)
    written, lines = False, []
    for line, end in zip(parts[::2], [*parts[1::2], b""], strict=True):
        if line.startswith(b"data:") or line == b"data":
            if written:
                continue
            line = (end or b"\n").join(b"data: " + part for part in _LINE.split(data))
            written = True
        lines.append(line + end)
    return b"".join(lines)
