# Strict reading of JSON lines: valid values, or a description of invalid ones.
#
# Not by msgspec, whose errors contain the place of a value but not the value.

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from servanda.errors import Problem, ServandaError, Where
from servanda.registry import cut, did_you_mean

T = TypeVar("T")

_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_ID = 2**31 - 1
_MOST = sys.float_info.max
_LEAST = -9999.0  # servers' placeholder for -inf
_SLACK = 1e-5  # a softmax in float32 may exceed 1 by rounding
_SHOWN = 40  # most characters of a value in a message
_LINE = 120  # and of a line
_REPORTED = 20  # problems printed per file; the rest is counted
_DIGITS = "a number of too many digits"
# whether messages leave out the words of files and of servers: engines.foreign_code decides
hides_data: Callable[[], bool] = bool


def words(text: str) -> str:
    """The words of a file or of a server, as a message repeats them."""
    return f"[{len(text)} characters]" if hides_data() else text


class LineError(Exception):
    """An invalid line; `hint`: the next step, if not the usual one."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def read_lines(
    text: str,
    file: str,
    read: Callable[[str, Where], T],
    hint: str,
    error: type[ServandaError],
    growing: bool = False,
) -> list[T]:
    """The results of `read` for each line that is not blank.

    Args:
        hint: the next step for a wrong line.
        growing: whether to skip an incomplete last line, which is being written.

    Raises:
        ServandaError: of the class `error`: lines that are wrong, each with its place.
    """
    values: list[T] = []
    problems: list[Problem] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        start = line if len(line) <= _LINE else f"{line[: _LINE - 3]}..."
        where = Where(file, number, 1, "" if hides_data() else start)
        try:
            values.append(read(line, where))
        except json.JSONDecodeError as wrong:
            if number < len(lines) or not growing:
                message = f"not JSON: {wrong.msg} at column {wrong.colno}"
                problems.append(Problem(message, where, hint))
        except LineError as wrong:
            problems.append(Problem(str(wrong), where, wrong.hint or hint))
    if len(problems) > _REPORTED:
        more = len(problems) - _REPORTED
        problems = [*problems[:_REPORTED], Problem(f"{file}: {more} more lines like these")]
    if problems:
        raise error.all(problems)
    return values


def parse_line(line: str, noun: str = "request", nan: bool = False) -> dict[str, Any]:
    """The JSON object of a line.

    Args:
        noun: of the content of a line, for messages; nan: whether NaN and Infinity are accepted.

    Raises:
        json.JSONDecodeError: it is not JSON.
        LineError: not an object, or a value that JSON does not allow.
    """
    try:
        data = (_WITH_NAN if nan else _STRICT).decode(line)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise LineError(f"not a {noun}: nested too deeply") from None
    except ValueError:  # a whole number of thousands of digits
        raise LineError(f"not a {noun}: {_DIGITS}") from None
    if not isinstance(data, dict):
        raise LineError("a line is a JSON object")
    # only an escape can write one: the line itself is UTF-8
    if "\\u" in line and _SURROGATE.search(json.dumps(data, ensure_ascii=False)):
        raise LineError("a lone surrogate is not text")
    return data


def check_keys(
    data: Mapping[str, Any], noun: str, known: Collection[str], needed: Iterable[str] = ()
) -> None:
    """Refuse a line of another key, unless it begins with x-, or without one that is needed."""
    for key in data:
        if key not in known and not key.startswith("x-"):
            raise LineError(f"{noun} has no key {words(repr(key))}", did_you_mean(key, known))
    for key in needed:
        if data.get(key) is None:
            raise LineError(f"{key!r} is missing")


def unique_keys(pairs: list[tuple[str, Any]], noun: str = "key") -> dict[str, Any]:
    """A JSON object; repeated keys are refused."""
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise LineError(f"the {noun} {words(repr(twice))} is there twice")
    return values


def _no_number(text: str) -> NoReturn:
    raise LineError(f"{text} is not a JSON number", "write null for an unknown logprob")


_WITH_NAN = json.JSONDecoder(object_pairs_hook=unique_keys)
_STRICT = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=_no_number)


def items(value: Any, place: str) -> Iterator[tuple[int, Any]]:
    if not isinstance(value, list):
        raise LineError(f"{place} is {json_text(value)}, not a list")
    return enumerate(value)


def ids_of(value: Any, place: str) -> tuple[int, ...]:
    plain = place.strip("'")
    ids = tuple(id_of(token, f"{plain}[{i}]") for i, token in items(value, place))
    if not ids:
        raise LineError(f"{place} is empty")
    return ids


def id_of(value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_ID:
        raise LineError(f"{place} is {json_text(value)}, not a token id")
    return value


def logprob_of(value: Any, place: str) -> float:
    """A logprob in nats; NaN if unknown: null, and values from -9999 down."""
    if value is None:
        return math.nan
    number = number_of(value, place)
    if number > _SLACK:
        raise LineError(f"{place} is {json_text(value)}: a logprob is never above 0")
    return number if number > _LEAST else math.nan


def number_of(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST:
        raise LineError(f"{place} is {json_text(value)}, not a number")
    return float(value)


def whole_of(value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise LineError(f"{place} is {json_text(value)}, not a whole number")
    return value


def name_of(value: Any, place: str) -> str:
    text = text_of(value, place)
    if not text:
        raise LineError(f"{place} is empty")
    return text


def text_of(value: Any, place: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise LineError(f"{place} is {json_text(value)}, not a text")
    return value


def labels_of(value: Any) -> dict[str, str]:
    """The labels of a request, as texts."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise LineError(f"'labels' is {json_text(value)}, not an object of texts")
    for name, label in value.items():
        if isinstance(label, list | dict):
            raise LineError(f"labels.{name} is {json_text(label)}, not a text")
    return {name: str(label) for name, label in value.items() if label is not None}


def time_of(value: Any) -> float:
    """Unix seconds."""
    at = number_of(value, "'at'")
    if at < 0:
        raise LineError(f"'at' is {json_text(value)}, not seconds since 1970")
    return at


def json_text(value: Any, most: int = _SHOWN) -> str:
    """A value as JSON, in at most so many characters."""
    try:
        text = json.dumps(value)
    except ValueError:  # a whole number of thousands of digits
        return _DIGITS
    return words(cut(text, most))
