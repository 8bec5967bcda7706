# Strict reading of JSON lines: values that are what they should be, or words for what they are.

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_ID = 2**31 - 1
_LEAST = -9999.0  # what servers write where they mean -inf
_SLACK = 1e-5  # a softmax in float32 may exceed 1 by rounding
_SHOWN = 40  # characters of a value that a message repeats
_DIGITS = "a number of too many digits"


class Wrong(Exception):  # noqa: N818 - what is wrong with a line, and not a failure of ours
    """A line is not what it should be; `hint`: the next move, where it is not the usual one."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def parsed(line: str) -> dict[str, Any]:
    try:
        data = json.loads(line, object_pairs_hook=_object, parse_constant=_no_number)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise Wrong("not a request: nested too deeply") from None
    except ValueError:  # a whole number of thousands of digits
        raise Wrong(f"not a request: {_DIGITS}") from None
    if not isinstance(data, dict):
        raise Wrong("a line is a JSON object")
    # only an escape can write one: the line itself is UTF-8
    if "\\u" in line and _SURROGATE.search(json.dumps(data, ensure_ascii=False)):
        raise Wrong("a lone surrogate is not text")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Wrong(f"the key {key!r} is there twice")
        found[key] = value
    return found


def _no_number(text: str) -> NoReturn:
    raise Wrong(f"{text} is no number of JSON", "write null for a logprob that nobody knows")


def items(value: Any, place: str) -> Iterator[tuple[int, Any]]:
    if not isinstance(value, list):
        raise Wrong(f"{place} is {said(value)}, not a list")
    return enumerate(value)


def ids_of(value: Any, place: str) -> tuple[int, ...]:
    plain = place.strip("'")
    ids = tuple(id_of(token, f"{plain}[{i}]") for i, token in items(value, place))
    if not ids:
        raise Wrong(f"{place} is empty")
    return ids


def id_of(value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_ID:
        raise Wrong(f"{place} is {said(value)}, not a token id")
    return value


def logprob_of(value: Any, place: str) -> float:
    """Nats; NaN where the server does not know it: null, and everything from -9999 down."""
    if value is None:
        return math.nan
    number = number_of(value, place)
    if number > _SLACK:
        raise Wrong(f"{place} is {said(value)}: a logprob is never above 0")
    return number if number > _LEAST else math.nan


def number_of(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise Wrong(f"{place} is {said(value)}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise Wrong(f"{place} is {said(value)}, not a number") from None


def whole_of(value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Wrong(f"{place} is {said(value)}, not a whole number")
    return value


def name_of(value: Any, place: str) -> str:
    text = text_of(value, place)
    if not text:
        raise Wrong(f"{place} is empty")
    return text


def text_of(value: Any, place: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Wrong(f"{place} is {said(value)}, not a text")
    return value


def said(value: Any) -> str:
    """A value as JSON has it, in at most 40 characters."""
    try:
        text = json.dumps(value)
    except ValueError:  # a whole number of thousands of digits
        return _DIGITS
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
