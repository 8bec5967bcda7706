# The extraction of token ids and logprobs from the reply to the client.
#
# Fields that the client did not request are removed from its reply, or null if the pool sends null
# by default; everything else is unchanged, byte for byte within each field.  A reply that cannot be
# parsed is forwarded unchanged.

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from servanda.gateway.proxy.logprob_request import LogprobRequest, listed

_objects = msgspec.json.Decoder(dict[str, Raw]).decode
_lists = msgspec.json.Decoder(list[dict[str, Raw]]).decode

# Fields of a reply as raw bytes, so that unread fields stay unchanged.


def parts_of(data: bytes) -> dict[str, Raw]:
    try:
        return _objects(data)
    except msgspec.DecodeError:
        return _fields_of(json.loads(data))  # some servers write NaN, which is not JSON


def choices_of(data: Raw) -> list[dict[str, Raw]]:
    try:
        return _lists(data)
    except msgspec.DecodeError:
        choices = json.loads(bytes(data))
    if not isinstance(choices, list):
        raise ValueError("no list")
    return [_fields_of(choice) for choice in choices]


def _fields_of(fields: Any) -> dict[str, Raw]:
    if not isinstance(fields, dict):
        raise ValueError("no object")
    return {name: Raw(json.dumps(value).encode()) for name, value in fields.items()}


def value_of(part: Mapping[str, Raw], name: str) -> Any:
    raw = part.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return json.loads(bytes(raw))


Answer = dict[str, Any]  # of a row: the response, or {"lost": why}
WITHOUT_PROMPT = "without the prompt's ids"
_NAME = "token_id:"
_WORDS = ("text", "message", "delta")
_ID_FIELDS = ("token_ids", "prompt_token_ids")
_WITHOUT = "without ids and logprobs"
_NULL = Raw(b"null")
_MOST_ID, _DIGITS = 2**31 - 1, 10
_LARGEST = sys.float_info.max
_SLACK = 1e-5  # a softmax in float32 may exceed 1 by rounding
_UNKNOWN = -9999.0  # servers' placeholder for -inf
_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_LINE = re.compile(rb"\r\n|\n|\r")
_BETWEEN = re.compile(rb"(?:(?::[^\r\n]*)?(?:\r\n|\n|\r))+")
DONE = b"[DONE]"


class LogprobCapture:
    """Captures one sampled reply while it is forwarded.

    Args:
        line_bytes: most bytes of one event of a stream; reply_bytes: of all events.

    Attributes:
        whole: whether the response is complete; broken: why it is no evidence, "" if it may be.
        prompt_tokens: the pool's count; None if not reported.
    """

    def __init__(
        self, logprob_request: LogprobRequest, line_bytes: int, reply_bytes: float = math.inf
    ) -> None:
        self._request, self._split, self._line_bytes = logprob_request, EventSplitter(), line_bytes
        self._room = reply_bytes  # bytes still allowed
        self._unread = False  # whether the rest of the stream is forwarded unchanged
        self._prompt: Any = None
        self._ids: list[Any] = []
        self._logps: list[Any] = []
        self._tops: list[Any] = []
        self._finish: Any = None
        self._ended_by: Any = None  # the server's stop reason
        self._drawn: Any = None  # the server's count of response tokens
        self._fingerprint: Any = None
        self.prompt_tokens: int | None = None
        self.whole = False
        self._has_text = False  # whether there is any text
        self.broken = ""

    def reply(self, body: bytes) -> bytes:
        """The client's version of a reply that is not streamed."""
        stripped = self._stripped(body, part=False)
        self.whole = True
        return body if stripped is None else stripped

    def feed(self, part: bytes) -> bytes:
        """Process a part of a stream; returns the client's part.

        After an event beyond the limits, the stream is forwarded unchanged.
        """
        if self._unread:
            return part
        self._room -= len(part)
        out = b"".join(map(self._event, self._split.feed(part)))
        out += self._split.between()
        if self._split.held > self._line_bytes:
            self.broken, self._unread = "overlong", True
            out += self._split.rest()
        return out

    @property
    def held(self) -> int:
        """Bytes at the end of the stream so far of which the client has no part yet."""
        return self._split.held

    def rest(self) -> bytes:
        """The client's rest at the end of a stream."""
        left = self._split.rest()
        return self._event(left) if left else b""

    def _event(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            return event
        if data.strip() == DONE:
            self.whole = True
            return event
        stripped = self._stripped(data)
        if stripped is None:
            return event
        return with_data(event, stripped) if stripped else b""

    def _stripped(self, data: bytes, *, part: bool = True) -> bytes | None:
        """JSON without the fields that the client did not request: None if there are none; empty if
        there is nothing else in a part of a stream.
        """
        try:
            reply = parts_of(data)
            choices = choices_of(reply["choices"]) if "choices" in reply else []
            if "error" in reply:
                self.broken = self.broken or "error"
            self._fingerprint = value_of(reply, "system_fingerprint") or self._fingerprint
            changed = self._take_ids(reply)
            for choice in choices:
                # one sample, however many choices were requested
                first = value_of(choice, "index") in (None, 0)
                changed |= self._choice(choice, first)
                if first and self._request.kind.by_step:
                    usage = value_of(reply, "usage")
                    if isinstance(usage, dict):  # reported at the end
                        self._drawn = usage.get("completion_tokens")
                        self.prompt_tokens = usage.get("prompt_tokens")
        except (ValueError, msgspec.MsgspecError, RecursionError):
            self.broken = "malformed"
            return None
        if not changed:
            return None
        if part and self._is_beside(reply, choices):
            return b""
        return msgspec.json.encode({**reply, "choices": choices} if choices else reply)

    def _is_beside(self, reply: Mapping[str, Raw], choices: list[dict[str, Raw]]) -> bool:
        """Whether an event contained only added fields, and is empty without them."""
        if not choices:
            return "choices" in reply and value_of(reply, "usage") is None
        own = self._request.ids or self._request.logprobs
        return self._request.kind.quiet and not own and all(map(_is_empty, choices))

    def _choice(self, choice: dict[str, Raw], first: bool) -> bool:
        """Process a response or its next part; returns whether fields were removed.

        Args:
            first: whether it is the choice that is evidence.
        """
        logprobs = value_of(choice, "logprobs")
        if first:
            self._finish = value_of(choice, "finish_reason") or self._finish
            for name in ("stop_reason", "matched_stop"):
                value = value_of(choice, name)
                self._ended_by = self._ended_by if value is None else value
            self._has_text = self._has_text or any(_says(value_of(choice, name)) for name in _WORDS)
            self._keep(choice, logprobs)
        changed = self._take_ids(choice)
        if not self._request.logprobs and logprobs is not None:
            if self._request.kind.bare and self._request.chat:
                del choice["logprobs"]
            else:
                choice["logprobs"] = _NULL
            changed = True
        return changed

    def _keep(self, choice: Mapping[str, Raw], logprobs: Any) -> None:
        """Record the tokens of a part; none if the response exceeds its limit or the capacity."""
        if self._room < 0 or len(self._ids) > self._request.sampling["max_new_tokens"]:
            self.broken = self.broken or "overlong"
            self._ids, self._logps, self._tops = [], [], []
            return
        self._ids += listed(value_of(choice, "token_ids"))
        if isinstance(logprobs, dict):
            self._take(logprobs)

    def _take(self, logprobs: Mapping[str, Any]) -> None:
        by_step = self._request.kind.by_step
        if by_step or self._request.chat:
            steps = [s for s in listed(logprobs.get("content")) if isinstance(s, dict)]
            self._ids += [step.get("id") for step in steps] if by_step else []
            self._logps += [step.get("logprob") for step in steps]
            self._tops += [dict(map(_likely, listed(step.get("top_logprobs")))) for step in steps]
        else:
            self._logps += listed(logprobs.get("token_logprobs"))
            self._tops += listed(logprobs.get("top_logprobs"))

    def _take_ids(self, part: dict[str, Raw]) -> bool:
        prompt = value_of(part, "prompt_token_ids")
        self._prompt = self._prompt if prompt is None else prompt
        ext = value_of(part, "sglext")
        if isinstance(ext, dict):  # of a complete stream
            self._prompt = ext.get("input_ids") or self._prompt
            self._ids += listed(next(iter(listed(ext.get("output_ids"))), None))
            del part["sglext"]
        if self._request.ids:
            return isinstance(ext, dict)
        there = [name for name in _ID_FIELDS if name in part]
        for name in there:
            if self._request.kind.nulls:
                part[name] = _NULL
            else:
                del part[name]
        return bool(there) or isinstance(ext, dict)

    @property
    def prompt(self) -> list[int] | None:
        """The prompt tokens that the pool ran; None if not reported."""
        return self._prompt if _are_ids(self._prompt) else None

    @property
    def odd(self) -> str:
        """A fault of the response that needs no statistics; "" for none."""
        if any(not _is_number(value) for value in self._logps):
            return "unknown logprob"
        if self._finish == "length" and not (self._has_text or self._ids or self._logps):
            return "empty answer"
        return "malformed" if self.broken == "malformed" else ""

    def answer(self) -> Answer:
        """The response for a row, or the reason why there is none."""
        tokens, logps = self._ids, [_logprob(value) for value in self._logps]
        if self.broken or not self.whole:
            return {"lost": self.broken or "cut"}
        if self._finish not in ("stop", "length", "tool_calls"):
            return {"lost": _text(f"ended by {self._finish}"[:80])}
        most, by_step = self._request.sampling["max_new_tokens"], self._request.kind.by_step
        if not _are_ids(tokens) or len(logps) != len(tokens) or len(tokens) > most:
            return {"lost": _WITHOUT}
        if by_step and self._drawn != len(tokens):
            return {"lost": _WITHOUT}  # such as a token that is half a character
        if self.prompt is None and not by_step:
            return {"lost": WITHOUT_PROMPT}
        if any(value is not None and value > _SLACK for value in logps):
            return {"lost": "malformed"}
        answer: Answer = {"token_ids": tokens, "logprobs": logps, "finish": self._end}
        best = self._best()
        if best is not None:
            answer["best"] = best
        if isinstance(self._fingerprint, str):
            answer["fingerprint"] = _text(self._fingerprint)
        return answer

    @property
    def _end(self) -> str:
        """The end of the response: by the model, its length, or a stop of the request."""
        if self._finish == "length":
            return "length"
        by = self._ended_by
        named = isinstance(by, str) or (type(by) is int and by in self._request.stop_ids)
        return "stop_string" if named else "stop"

    def _best(self) -> list[list[list[Any]]] | None:
        """The top-k tokens of each step; None if they have no ids."""
        k = self._request.best
        if not k or len(self._tops) != len(self._ids):
            return None
        steps = [_pairs(step)[:k] for step in self._tops]
        return steps if all(len(pairs) == k for pairs in steps) else None


def _is_empty(choice: Mapping[str, Raw]) -> bool:
    """Whether it is an empty part of a chat's stream, and not the last."""
    return value_of(choice, "delta") == {} and value_of(choice, "finish_reason") is None


def _says(part: Any) -> bool:
    """Whether a text or a message is not empty."""
    if isinstance(part, dict):
        return any(value for name, value in part.items() if name != "role")
    return bool(part)


def _likely(candidate: Any) -> tuple[str, Any]:
    """The name and logprob of a top-k token; None for an invalid name."""
    if not isinstance(candidate, dict):
        return "", None
    name = f"{_NAME}{candidate['id']}" if "id" in candidate else candidate.get("token")
    return name if isinstance(name, str) else "", candidate.get("logprob")


def _text(value: str) -> str:
    """Text that a row can store: without lone surrogates."""
    return value.encode(errors="replace").decode()


def _pairs(step: Any) -> list[list[Any]]:
    """[token id, logprob] of a step, best first, unknown last; None if one has no id."""
    if not isinstance(step, dict):
        return []
    pairs = []
    for name, value in step.items():
        if not isinstance(name, str) or not name.startswith(_NAME):
            return []
        digits = name[len(_NAME) :]
        if not digits.isdecimal() or len(digits) > _DIGITS or int(digits) > _MOST_ID:
            return []
        pairs.append([int(digits), _logprob(value)])
    return sorted(pairs, key=lambda p: (math.inf if p[1] is None else -p[1], p[0]))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST


def _logprob(value: Any) -> float | None:
    """A logprob in nats; None if unknown."""
    return float(value) if _is_number(value) and value > _UNKNOWN else None


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(i) is int and 0 <= i <= _MOST_ID for i in value)
    )


# Splits a sampled stream into server-sent events without losing a byte.
#
# Lines end by \n, \r\n or \r; an event ends by an empty line; a line that begins with ":" is a
# comment; the `data` lines of an event are one text (HTML, 9.2).


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
