# Series: the log ratios of a slice's tokens, per prompt group, in one line of text.
#
#   0.01x400          the log ratio 0.01, in each of 400 prompt groups
#   gap(0.01)x400     sampled for each token
#   _x3               tokens without a logprob: lost
#
# Unit nat, one sign: log_ratio = logp_train - logp_infer.

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from servanda.registry import did_you_mean, quoted

Array = NDArray[Any]

MOST_GROUPS = 10_000_000  # of one series
LOST = "_"
_GRID = 2.0**40  # of log ratios; finer than any clause looks

_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:e[-+]?[0-9]+)?")
_WORD = re.compile(r"(?=[^\s)])[^\s()]*(?:\([^()]*\)?)?[^\s()]*|\S")
_COUNTED = re.compile(r"(.*?[^x])x([0-9]+)")
_CALL = re.compile(r"([A-Za-z_]\w*)\((.*)\)")
_NEXT_MOVE = 'write items such as "gap(0.01)x400 0.02x10 _x3"'


@dataclass(frozen=True)
class Chance:
    """The random numbers of a sample: a standard normal and a uniform per token, [N]."""

    normal_N: Array
    uniform_N: Array

    def at(self, index: Array) -> Chance:
        return Chance(self.normal_N[index], self.uniform_N[index])


@dataclass(frozen=True)
class Draw:
    """A distribution of the log ratio of one token.

    Args:
        takes: names of its arguments; summary: description in one line.
        of: (arguments, chance) -> nats, [N].
        refuses: the problem of its arguments; "" if none.
    """

    takes: tuple[str, ...]
    summary: str
    of: Callable[[tuple[float, ...], Chance], Array]
    refuses: Callable[[tuple[float, ...]], str]


def _gap(args: tuple[float, ...], chance: Chance) -> Array:
    (sd,) = args
    return sd * chance.normal_N - sd**2 / 2


def _spike(args: tuple[float, ...], chance: Chance) -> Array:
    share, size = args
    rest = np.log1p(-share * np.exp(-size)) - np.log1p(-share)
    return np.where(chance.uniform_N < share, -size, rest)


def _spread(args: tuple[float, ...]) -> str:
    return "" if 0 <= args[0] <= 50 else "sd is between 0 and 50 nats"


def _share_and_size(args: tuple[float, ...]) -> str:
    share, size = args
    if not 0 < share < 1:
        return "share is between 0 and 1"
    return "" if 0 < size <= 50 else "size is above 0 and at most 50 nats"


DRAWS: Mapping[str, Draw] = MappingProxyType(
    {
        "gap": Draw(
            ("sd",),
            "Normal(-sd^2/2, sd): two honest kernels, whose weights average 1",
            _gap,
            _spread,
        ),
        "spike": Draw(
            ("share", "size"),
            "a share of the tokens at -size, the rest a little above 0, so that the weights "
            "average 1",
            _spike,
            _share_and_size,
        ),
    }
)


@dataclass(frozen=True)
class Item:
    """A stretch of a series: a draw, a value (draw ""), or lost tokens (draw "_")."""

    draw: str
    args: tuple[float, ...]
    count: int


@dataclass(frozen=True)
class Series:
    """The series of a slice over dispatched prompt groups."""

    items: tuple[Item, ...]
    text: str

    def __len__(self) -> int:
        return sum(item.count for item in self.items)

    def __str__(self) -> str:
        return self.text

    @cached_property
    def _starts(self) -> Array:
        return np.cumsum([0, *(item.count for item in self.items)])

    def values(self, group_N: Array, chance: Chance) -> Array:
        """The log ratio of each token, [N], nats; NaN if it is lost, or after the series.

        Args:
            group_N: dispatched prompt group of each token, from 0.
        """
        values_N = np.full(len(group_N), np.nan)
        near = slice(0, 0)
        if len(group_N):
            # of many items a round meets a few
            first, last = np.searchsorted(self._starts, [group_N.min(), group_N.max()], "right")
            near = slice(max(first - 1, 0), last)
        for item, start in zip(self.items[near], self._starts[near], strict=False):
            at_N = np.flatnonzero((group_N >= start) & (group_N < start + item.count))
            if not len(at_N) or item.draw == LOST:
                continue
            if item.draw:
                values_N[at_N] = DRAWS[item.draw].of(item.args, chance.at(at_N))
            else:
                values_N[at_N] = item.args[0]
        # towards 0: a value that is written as the limit does not exceed it by rounding
        return np.where(np.isinf(values_N), values_N, np.trunc(values_N * _GRID) / _GRID)


def parse(value: object) -> Series:
    """A series from its text.

    Raises:
        PydanticCustomError: it is invalid; the context has `at`, the offset in the text, and
            `hint`.
    """
    if isinstance(value, Series):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        hint = 'put it in quotes: 0x100 is a number of YAML, and "0x100" is 0, a hundred times'
        _refuse(f"a series is a text, found the number {quoted(value)}", 0, hint)
    if not isinstance(value, str):
        _refuse("a series is a text", 0, _NEXT_MOVE)
    items, at = [], 0
    while at < len(value):
        if value[at].isspace():
            at += 1
            continue
        match = _WORD.match(value, at)
        assert match is not None  # any character begins a word
        items.append(_item(match[0], at))
        at = match.end()
    series = Series(tuple(items), value)
    if not items:
        _refuse("a series has at least one item; this text is empty", 0, _NEXT_MOVE)
    if len(series) > MOST_GROUPS:
        message = f"a series has at most {MOST_GROUPS:,} prompt groups, this one {len(series):,}"
        _refuse(message, 0, "a contract is decided by a few thousand")
    return series


SeriesText = Annotated[
    Series,
    PlainValidator(parse),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "minLength": 1}),
]


def _refuse(message: str, at: int, hint: str) -> NoReturn:
    context = {"message": message, "at": at, "hint": hint}
    raise PydanticCustomError("series", "{message}", context)


def _item(word: str, at: int) -> Item:
    counted = _COUNTED.fullmatch(word)
    head, times = (counted[1], counted[2]) if counted else (word, "1")
    # by its length first: the digits of a number may be a megabyte
    if len(times) > 2 * len(str(MOST_GROUPS)) or int(times) > MOST_GROUPS:
        message = f"{quoted(word)} is for more than {MOST_GROUPS:,} prompt groups"
        _refuse(message, at + len(head) + 1, "x400 is for 400; a run ends after some thousand")
    if int(times) == 0:
        hint = "x400 says how many prompt groups show it"
        _refuse(f"{quoted(word)} is for no prompt group", at + len(head) + 1, hint)
    if head == LOST:
        return Item(LOST, (), int(times))
    if call := _CALL.fullmatch(head):
        return Item(call[1], _arguments(call, at), int(times))
    if head == "-inf":
        return Item("", (-math.inf,), int(times))
    return Item("", (_value(head, at, _NEXT_MOVE),), int(times))


def _arguments(call: re.Match[str], at: int) -> tuple[float, ...]:
    name, inside = call[1], call[2]
    draw = DRAWS.get(name)
    if draw is None:
        _refuse(f"no draw is named {quoted(name)}", at, did_you_mean(name, DRAWS))
    example = f"write {name}({', '.join(draw.takes)}): {draw.summary}"
    parts = inside.split(",") if inside.strip() else []
    if len(parts) != len(draw.takes):
        message = f"{name} takes {' and '.join(draw.takes)}, found {len(parts)} arguments"
        _refuse(message, at, example)
    values, offset = [], at + len(name) + 1
    for part in parts:
        lead = len(part) - len(part.lstrip())
        values.append(_value(part.strip(), offset + lead, example))
        offset += len(part) + 1
    if wrong := draw.refuses(tuple(values)):
        _refuse(f"{name}: {wrong}", at + len(name) + 1, example)
    return tuple(values)


def _value(text: str, at: int, hint: str) -> float:
    if _NUMBER.fullmatch(text) is None:
        _refuse(f"{quoted(text)} cannot be read as a part of a series", at, hint)
    value = float(text)
    if abs(value) > 50:
        message = f"a log ratio of {value:g} nats is none that two kernels show"
        _refuse(message, at, "write -inf where train gives the token no mass")
    return value
