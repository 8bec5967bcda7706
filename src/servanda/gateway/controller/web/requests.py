# What is asked of a leader: JSON bodies, read strictly.  None of them can name a file or a URL.

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

import msgspec

from servanda.errors import ServandaError
from servanda.gateway.routing.model import Known, PinTo, Pool
from servanda.registry import nearest
from servanda.report.format import line
from servanda.traces import json_fields
from servanda.traces.json_fields import json_text

LONGEST_PIN_S = 30 * 86_400.0
_PINS, _POOLS = get_args(PinTo), get_args(Pool)
_LONGEST = 500  # characters of a reason
_NAME = 1024  # of any other text
_ROUTE = ("run", "leg", "share", "mirror", "sample", "turn")
# what an effect of a promotion says beside it: its webhook may be pointed here
_EFFECT = ("kind", "key", "stage", "status", "from", "why", "decided", "at", "to", "for")


class Refused(ServandaError):  # noqa: N818 - of the request, and no fault of the leader
    """A request that is not answered, and with which status."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


@dataclass(frozen=True)
class PinAsked:
    """A pin that somebody asks for.

    Args:
        ttl_s: how long it holds.
    """

    slice: str
    to: PinTo
    ttl_s: float
    reason: str


def message_of(data: bytes) -> dict[str, Any]:
    """What a gateway tells.

    Raises:
        Refused: it is no JSON object.
    """
    try:
        found = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refused(400, "the body is a JSON object")
    return found


def body_of(data: bytes, *keys: str) -> dict[str, Any]:
    """The JSON object of an act, which has these keys and no others.

    Raises:
        Refused: it is none; or it has another key, or one twice.
    """
    try:
        found = json_fields.parse_line(data.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    except json_fields.LineError as wrong:
        raise Refused(400, f"the body: {wrong}") from None
    for key in found:
        if key not in keys:
            known = f"keys: {', '.join(keys)}" if keys else "send {}"
            hint = nearest(key, keys) if keys else ""
            hint = hint if hint.startswith("did you") else known
            raise Refused(400, f"the body has no key {json_text(key)}", hint)
    return found


def pin_of(data: bytes) -> PinAsked:
    """A pin.

    Raises:
        Refused: the body is none, or it would hold for longer than 30 days.
    """
    body = body_of(data, "slice", "to", "ttl_s", "reason")
    to, ttl_s = body.get("to"), body.get("ttl_s")
    if to not in _PINS:
        raise Refused(400, f"to is {json_text(to)}", f"known: {', '.join(_PINS)}")
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not ttl_s > 0:
        raise Refused(400, f"ttl_s is {json_text(ttl_s)}, not a number of seconds", "such as 86400")
    if ttl_s > LONGEST_PIN_S:
        raise Refused(
            400,
            "a pin holds for 30 days at most",
            "pin again when it ends, or change the contract",
        )
    return PinAsked(_text(body, "slice"), cast(PinTo, to), float(ttl_s), _reason(body))


def unpin_of(data: bytes) -> tuple[str, str]:
    """The slice whose pin is released, and why.

    Raises:
        Refused: the body is none.
    """
    body = body_of(data, "slice", "reason")
    return _text(body, "slice"), _reason(body)


def route_of(data: bytes) -> dict[str, Any] | None:
    """A promotion's route; None: an effect of it that is another one, such as a page.

    Raises:
        Refused: the body is none.
    """
    given = body_of(data, *_ROUTE, *_EFFECT)
    if given.get("kind", "route") != "route":
        return None
    body = {key: given[key] for key in _ROUTE if key in given}
    for key in ("run", "leg"):
        if key in body:
            _text(body, key)
    for key in ("share", "mirror", "sample"):
        value = body.get(key)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value <= 1:
            raise Refused(400, f"{key} is {json_text(value)}, not a share", "a number from 0 to 1")
    return body


def known_of(data: bytes) -> Known:
    """What somebody else's gateway knows of a request that it is to send somewhere.

    Raises:
        Refused: the body is none.
    """
    body = body_of(data, "request", "sticky", "labels", "prompt_tokens", "session")
    labels = body.get("labels") or {}
    right = isinstance(labels, Mapping)
    if not right or not all(isinstance(v, str) and len(v) <= _NAME for v in labels.values()):
        raise Refused(400, f"labels is {json_text(labels)}", 'write {"tenant": "acme"}')
    tokens = body.get("prompt_tokens")
    whole = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0
    if tokens is not None and not (whole and tokens < math.inf):
        raise Refused(
            400, f"prompt_tokens is {json_text(tokens)}, not a whole number", "or leave it out"
        )
    session = body.get("session")
    if session is not None and session not in _POOLS:
        raise Refused(400, f"session is {json_text(session)}", f"known: {', '.join(_POOLS)}, null")
    request = _text(body, "request")
    sticky = _text(body, "sticky") if body.get("sticky") is not None else request
    return Known(request, sticky, dict(labels), tokens, session)


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value or len(value) > _NAME:
        raise Refused(400, f"{key} is {json_text(value)}, not a text", f"1 to {_NAME} characters")
    return value


def _reason(body: Mapping[str, Any]) -> str:
    value = body.get("reason")
    # on one line: it is printed where control characters would act
    if not isinstance(value, str) or not line(value):
        raise Refused(400, "an act needs a reason", "the ledger keeps it")
    if len(value) > _LONGEST:
        raise Refused(400, f"a reason has {_LONGEST} characters at most", "shorten it")
    return line(value)
