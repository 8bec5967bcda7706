# Reads the lines of JSON files one by one, with any content.

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from servanda.errors import MeasurementError
from servanda.rl.dumps import storage
from servanda.rl.dumps.formats.base import File, Placed, Refused
from servanda.rl.dumps.formats.json_arrays import Line, Lines, Unusable
from servanda.rl.dumps.formats.rows import BATCH_TOKENS, Rows
from servanda.rl.dumps.storage import Place

LONGEST = 1 << 28  # most bytes of a line: three times a sequence of a million tokens
_FILES, _HEADS = 4, 4  # for detection: number of files, and of lines per file
_BROKEN = (msgspec.MsgspecError, ValueError, RecursionError)


def lines(file: File, refused: Refused) -> Iterator[tuple[str, bytes]]:
    """The lines of a file and their places, "file:line", without blank lines.

    Raises:
        MeasurementError: the file cannot be read.
    """
    number = 0
    try:
        with opened(file.path) as stream:
            while line := stream.readline(LONGEST):
                number += 1
                place = f"{file.name}:{number}"
                if len(line) == LONGEST and not line.endswith(b"\n"):
                    refused.add(f"the line is longer than {LONGEST >> 20} MiB", place)
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(LONGEST)
                elif not line.isspace():
                    yield place, line
    except (EOFError, zlib.error, gzip.BadGzipFile):
        refused.cut(f"{file.name}:{number + 1}")
    except OSError as error:
        raise MeasurementError(
            f"{file.name} cannot be read: {error}", hint="see whether the file is still there"
        ) from None


@contextmanager
def opened(path: Place) -> Iterator[BinaryIO]:
    with storage.opened(path) as stream:
        yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if path.suffix == ".gz" else stream


def plain(line: bytes) -> dict[str, Any] | None:
    """A line as plain data; NaN and Infinity are parsed as Python's json writes them.

    Returns:
        None if the line is not a JSON object.
    """
    try:
        value = msgspec.json.decode(line)
    except _BROKEN:
        try:
            value = json.loads(line)
        except _BROKEN:
            return None
    return value if isinstance(value, dict) else None


def read(
    file: File,
    refused: Refused,
    plain_line: msgspec.json.Decoder[Any],
    line_of: Callable[[Any, str], Line],
    any_line: msgspec.json.Decoder[Any],
    rows_of_any: Callable[[dict[str, Any], str], Iterable[Placed]],
) -> Iterator[Placed | Rows]:
    """The sequences of a file in the order of its lines; lines without one are rejected.

    Args:
        plain_line: decoder of a Struct with the known columns and their types.
        line_of: a decoded line and its place -> the line, packed; raises
            ValueError if it is not plain.
        any_line: decoder of a Struct with the known columns, of any type; others are skipped.
        rows_of_any: a line that is not plain and its place -> its rows; raises Unusable.

    Raises:
        MeasurementError: the file cannot be read.
    """
    known = Lines()
    for place, line in lines(file, refused):
        try:
            known.add(line_of(plain_line.decode(line), place))
        except _BROKEN:
            yield from known.taken()
            if (values := _values(line, place, refused, any_line)) is not None:
                try:
                    yield from rows_of_any(values, place)
                except Unusable as unusable:
                    refused.add(str(unusable), place)
        if known.tokens >= BATCH_TOKENS:
            yield from known.taken()
    yield from known.taken()


def _values(
    line: bytes, place: str, refused: Refused, decoder: msgspec.json.Decoder[Any]
) -> dict[str, Any] | None:
    """A line as a dict; None if it is rejected."""
    try:
        return msgspec.structs.asdict(decoder.decode(line))
    except _BROKEN:  # NaN, or not JSON
        values = plain(line)
    if values is None and line.endswith(b"\n"):
        refused.add("the line is no JSON", place)
    elif values is None:
        refused.cut(place)
    return values


def unfinished(file: File) -> bool:
    """Whether a file ends in the middle of a line, by its last byte.

    Not asked of compressed files, nor of objects of a store, which appear whole.
    """
    if file.path.suffix != ".jsonl" or not isinstance(file.path, Path) or not file.bytes:
        return False
    with file.path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) not in b"\n}"


def head(files: Sequence[File], needed: Sequence[str]) -> dict[str, Any]:
    """A line with the columns of a format, from the beginnings of the first files and the last.

    One unreadable line, or one step without logprobs, is no reason to refuse a dump.

    Returns:
        The first such line; otherwise the first JSON object; {} if there is none.
    """
    first: dict[str, Any] = {}
    for file in dict.fromkeys((*files[:_FILES], *files[-1:])):
        try:
            with opened(file.path) as stream:
                for _ in range(_HEADS):
                    values = plain(stream.readline(LONGEST)) or {}
                    if all(name in values for name in needed):
                        return values
                    first = first or values
        except (OSError, EOFError, zlib.error):
            continue
    return first
