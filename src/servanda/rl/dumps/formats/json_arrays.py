# JSON data as arrays with strict types: a string is no number, null is NaN.
#
# A plain line is decoded by a Struct of its types, and its lists are packed to bytes; these are
# joined to columns of many lines.  Any other line is converted value by value.

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from servanda.rl.dumps.formats.rows import Rows
from servanda.traces.rollouts import Array

Flags = list[bool | float]
Floats = list[float | None]
NULL = msgspec.Raw(b"null")
_flags, _floats = msgspec.json.Decoder(Flags), msgspec.json.Decoder(Floats)


class Unusable(ValueError):  # noqa: N818 - a value, not a failure of the program
    """A value of a row with a wrong type; the text is the reason."""


def require(values: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if values.get(name) is None:
            raise Unusable(f"{name} is missing")


def unnested(value: Any) -> Any:
    """The single element of a batch of one, however deeply nested.

    >>> unnested([[[1, 2]]]), unnested([[3]]), unnested("math")
    ([1, 2], [3], 'math')
    """
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    return value


def scalar(value: Any) -> Any:
    """The single value of a batch of one.

    >>> scalar([[3]]), scalar(3)
    (3, 3)
    """
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value


def _converted(value: Any, kind: Any, reason: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError):
        raise Unusable(reason) from None


def integers(values: Any, name: str) -> Array:
    """int64, [T]; whole floats are no ids."""
    reason = f"{name} are not integers"
    try:
        return np.array(_converted(values, list[int], reason), dtype=np.int64)
    except OverflowError:
        raise Unusable(reason) from None


def floats(values: Any, name: str) -> Array:
    """float64, [T]; null is NaN."""
    reason = f"{name} are not numbers"
    return np.array(_converted(values, list[float | None], reason), dtype=np.float64)


def flags(values: Any, name: str) -> Array:
    """bool, [T], of true and false or of 0 and 1."""
    reason = f"{name} is neither 0 nor 1 everywhere"
    array = np.array(_converted(values, list[bool | float], reason), dtype=np.float64)
    if not np.isin(array, (0.0, 1.0)).all():
        raise Unusable(reason)
    return array == 1.0


def number(value: Any, name: str) -> float:
    """A number; NaN if missing."""
    value = _converted(scalar(value), float | None, f"{name} is not a number")
    return float("nan") if value is None else value


def packed_integers(values: list[int]) -> bytes:
    """int64, [T].

    Raises:
        ValueError: one is too large.
    """
    try:
        return struct.pack(f"{len(values)}q", *values)
    except struct.error as error:
        raise ValueError from error


def packed_floats(values: Floats) -> bytes:
    """float64, [T]; null is NaN."""
    try:
        return struct.pack(f"{len(values)}d", *values)
    except struct.error:
        return np.array(values, dtype=np.float64).tobytes()


def packed_flags(values: Flags) -> bytes:
    """bool, [T].

    Raises:
        ValueError: one is neither 0 nor 1.
    """
    try:
        return bytes(values)  # pyright: ignore[reportArgumentType] - of true and false
    except TypeError:
        number_T = np.frombuffer(packed_floats(values))  # pyright: ignore[reportArgumentType]
    flag_T = number_T == 1
    if not (flag_T | (number_T == 0)).all():
        raise ValueError
    return flag_T.tobytes()


def floats_of(text: bytes) -> bytes:
    """packed_floats of the text of a list, which is not decoded if it repeats one number."""
    cell, separator, count = _cells(text)
    repeats = text.startswith(b"[" + cell + separator + cell)  # the first two do
    if repeats and text[1:-1] == ((cell + separator) * count)[: -len(separator)]:
        (number,) = _floats.decode(b"[" + cell + b"]")
        return np.full(count, np.nan if number is None else number).tobytes()
    return packed_floats(_floats.decode(text))


def flags_of(text: bytes) -> bytes:
    """packed_flags of the text of a list, which is not decoded if it is of 0.0 and 1.0."""
    cell, separator, count = _cells(text)
    if text.startswith((b"[0", b"[1")) and cell in (b"0.0", b"1.0", b"0", b"1"):
        whole, width = text[1:-1] + separator, len(cell) + len(separator)
        plain = bytearray((b"0" + cell[1:] + separator) * count)
        flag_T = np.frombuffer(whole, np.uint8)[::width] == ord("1")
        if len(flag_T) == count:
            np.frombuffer(plain, np.uint8)[::width] += flag_T
            if plain == whole:
                return flag_T.tobytes()
    return packed_flags(_flags.decode(text))


def _cells(text: bytes) -> tuple[bytes, bytes, int]:
    """The first element of a list, what separates it from the next, and how many fit into it."""
    end = text.find(b",")
    cell = text[1:end]
    separator = b", " if text.startswith(b", ", end) else b","
    return cell, separator, (len(text) - 2 + len(separator)) // (len(cell) + len(separator))


@dataclass
class Line:
    """The sequences of a plain line, packed; the trainer's logprobs are as `Rows` has them.

    Args:
        place_S: their places; length_S: their tokens.
        token: int64; mask: bool; others: float64.
        logp_infer: 0 outside the mask marks a token that was not sampled.
        labels, per_sequence: of each sequence of the line.
    """

    place_S: list[str]
    length_S: list[int]
    token: bytes
    mask: bytes
    logp_train: bytes
    logp_infer: bytes
    labels: Mapping[str, str] = field(default_factory=dict)
    per_sequence: Mapping[str, float] = field(default_factory=dict)
    per_token: Mapping[str, bytes] = field(default_factory=dict)


class Lines:
    """Plain lines that become columns; a value that a line lacks is "" or NaN."""

    def __init__(self) -> None:
        self.tokens = 0
        self._lines: list[Line] = []

    def add(self, line: Line) -> None:
        self.tokens += len(line.mask)
        self._lines.append(line)

    def taken(self) -> Iterator[Rows]:
        """The rows of all lines so far, if there are any; none remain."""
        lines, self.tokens, self._lines = self._lines, 0, []
        if not lines:
            return
        mask_N = np.frombuffer(b"".join([line.mask for line in lines]), bool)
        infer_N = np.frombuffer(bytearray().join([line.logp_infer for line in lines]))
        np.copyto(infer_N, np.nan, where=~mask_N & (infer_N == 0))
        labels, numbers, columns = (
            dict.fromkeys(name for line in lines for name in getattr(line, of))
            for of in ("labels", "per_sequence", "per_token")
        )

        def each(values: Iterable[Any]) -> list[Any]:
            pairs = zip(values, lines, strict=True)
            return [value for value, line in pairs for _ in line.place_S]

        def column(name: str) -> Array:
            none = (np.full(len(line.mask), np.nan).tobytes() for line in lines)
            parts = [line.per_token.get(name) or nan for line, nan in zip(lines, none, strict=True)]
            return np.frombuffer(b"".join(parts))

        places = [place for line in lines for place in line.place_S]
        yield Rows(
            places,
            np.array([length for line in lines for length in line.length_S], dtype=np.int64),
            np.frombuffer(b"".join([line.token for line in lines]), np.int64),
            mask_N,
            np.frombuffer(b"".join([line.logp_train for line in lines])),
            infer_N,
            [""] * len(places),
            {name: each(line.labels.get(name, "") for line in lines) for name in labels},
            {
                name: np.array(each(line.per_sequence.get(name, np.nan) for line in lines))
                for name in numbers
            },
            {name: column(name) for name in columns},
        )
