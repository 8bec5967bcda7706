# Requests to a controller: JSON bodies, validated strictly.  None can name a file or a URL.

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast, get_args

import msgspec
from msgspec import Meta

from servanda.errors import EvidenceError, ServandaError
from servanda.gateway.controller import messages
from servanda.gateway.controller.messages import PromotionRoute
from servanda.gateway.routing.model import PinTo, Pool, RequestFacts
from servanda.registry import did_you_mean
from servanda.report.format import line
from servanda.traces import json_fields
from servanda.traces.json_fields import json_text

LONGEST_PIN_S = 30 * 86_400.0
_PINS = get_args(PinTo)
_FACTS = 'session is infer, stable or null, and labels are texts, such as {"tenant": "acme"}'
T = TypeVar("T")
_LONGEST = 500  # characters of a reason
_NAME = 1024  # of any other text
# further fields of a promotion's route: its webhook may point here
_EFFECT = ("kind", "key", "stage", "status", "from", "why", "decided", "at", "to", "for")


class RequestError(ServandaError):
    """A refused request, with its HTTP status."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class _Facts(msgspec.Struct):
    request: Annotated[str, Meta(min_length=1, max_length=_NAME)]
    sticky: Annotated[str, Meta(min_length=1, max_length=_NAME)] | None = None
    labels: dict[str, Annotated[str, Meta(max_length=_NAME)]] | None = None
    prompt_tokens: messages.Count | None = None
    session: Pool | None = None


@dataclass(frozen=True)
class PinRequest:
    """A request for a pin.

    Args:
        to: None: the pin is released; ttl_s: its lifetime.
    """

    slice: str
    reason: str
    to: PinTo | None = None
    ttl_s: float = 0.0


def message_of(data: bytes) -> dict[str, Any]:
    """A gateway's message.

    Raises:
        RequestError: not a JSON object.
    """
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not a JSON object: {error}") from None


def body_of(data: bytes, *keys: str) -> dict[str, Any]:
    """The JSON object of a request, which may have only these keys.

    Raises:
        RequestError: not a JSON object, or an unknown or repeated key.
    """
    try:
        body = json_fields.parse_line(data.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    except json_fields.LineError as wrong:
        raise RequestError(400, f"the body: {wrong}") from None
    for key in body:
        if key not in keys:
            known = f"keys: {', '.join(keys)}" if keys else "send {}"
            hint = did_you_mean(key, keys) if keys else ""
            hint = hint if hint.startswith("did you") else known
            raise RequestError(400, f"the body has no key {json_text(key)}", hint)
    return body


def pin_of(data: bytes) -> PinRequest:
    """A pin.

    Raises:
        RequestError: the body is invalid, or the pin would last longer than 30 days.
    """
    body = body_of(data, "slice", "to", "ttl_s", "reason")
    to, ttl_s = body.get("to"), body.get("ttl_s")
    if to not in _PINS:
        raise RequestError(400, f"to is {json_text(to)}", f"known: {', '.join(_PINS)}")
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not ttl_s > 0:
        message = f"ttl_s is {json_text(ttl_s)}, not a number of seconds"
        raise RequestError(400, message, "such as 86400")
    if ttl_s > LONGEST_PIN_S:
        hint = "pin again when it ends, or change the contract"
        raise RequestError(400, "a pin holds for 30 days at most", hint)
    return PinRequest(_text(body, "slice"), _reason(body), cast(PinTo, to), float(ttl_s))


def unpin_of(data: bytes) -> PinRequest:
    """A request to release a pin.  Raises: see `pin_of`."""
    body = body_of(data, "slice", "reason")
    return PinRequest(_text(body, "slice"), _reason(body))


def route_of(data: bytes) -> PromotionRoute | None:
    """A promotion's route; None: another notification of it, such as a page.

    Raises:
        RequestError: the body is invalid.
    """
    body = body_of(data, *PromotionRoute.__struct_fields__, *_EFFECT)
    if body.get("kind", "route") != "route":
        return None
    hint = "send the body of a promotion's route effect as it is"
    return _converted(PromotionRoute, body, "a route", hint)


def request_facts_of(data: bytes) -> RequestFacts:
    """The facts of a request that another gateway asks to route.

    Raises:
        RequestError: the body is invalid.
    """
    body = body_of(data, *_Facts.__struct_fields__)
    facts = _converted(_Facts, body, "a request", _FACTS)
    sticky = facts.request if facts.sticky is None else facts.sticky
    labels, tokens = facts.labels or {}, facts.prompt_tokens
    return RequestFacts(facts.request, sticky, labels, tokens, facts.session)


def _converted(kind: type[T], body: dict[str, Any], noun: str, hint: str) -> T:
    try:
        return messages.converted(kind, body, noun, hint)
    except EvidenceError as error:
        raise RequestError(400, error.problems[0].message, error.problems[0].hint) from None


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value or len(value) > _NAME:
        message = f"{key} is {json_text(value)}, not a text"
        raise RequestError(400, message, f"1 to {_NAME} characters")
    return value


def _reason(body: Mapping[str, Any]) -> str:
    value = body.get("reason")
    # on one line: it is printed where control characters would take effect
    if not isinstance(value, str) or not line(value):
        raise RequestError(400, "an act needs a reason", "the ledger keeps it")
    if len(value) > _LONGEST:
        raise RequestError(400, f"a reason has {_LONGEST} characters at most", "shorten it")
    return line(value)
