# Lines of JSON files, one at a time, whatever is in them.

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from servanda.errors import MeasurementError
from servanda.rl.dumps.formats.base import File, Refused

LONGEST = 1 << 28  # bytes of a line: a sequence of a million tokens takes a third of it
_FILES, _HEADS = 4, 4  # that a format is told by: files, and lines of each
_BROKEN = (msgspec.MsgspecError, ValueError, RecursionError)


def lines(file: File, refused: Refused) -> Iterator[tuple[str, bytes]]:
    """The lines of a file and their places, "file:line"; blank ones are left out.

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
                elif line.strip():
                    yield place, line
    except (EOFError, zlib.error, gzip.BadGzipFile):
        refused.cut(f"{file.name}:{number + 1}")
    except OSError as error:
        raise MeasurementError(
            f"{file.name} cannot be read: {error}", hint="see whether the file is still there"
        ) from None


def opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb"))


def plain(line: bytes) -> dict[str, Any] | None:
    """A line as plain data; NaN and Infinity are read as Python's json writes them.

    Returns:
        None where the line is no JSON object.
    """
    try:
        value = msgspec.json.decode(line)
    except _BROKEN:
        try:
            value = json.loads(line)
        except _BROKEN:
            return None
    return value if isinstance(value, dict) else None


def objects(
    file: File, refused: Refused, decoder: msgspec.json.Decoder[Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file and their places; a line that is none is refused.

    Args:
        decoder: of a Struct with the columns that are read; the others are skipped.

    Raises:
        MeasurementError: the file cannot be read.
    """
    for place, line in lines(file, refused):
        try:
            yield place, msgspec.structs.asdict(decoder.decode(line))
        except _BROKEN:  # NaN, or no JSON at all
            if (values := plain(line)) is not None:
                yield place, values
            elif line.endswith(b"\n"):
                refused.add("the line is no JSON", place)
            else:
                refused.cut(place)


def head(files: Sequence[File], needed: Sequence[str]) -> dict[str, Any]:
    """A line that has what a format needs, from the beginnings of the first files and of the last.

    One line that cannot be read, or one step without logprobs, is no reason to refuse a dump.

    Returns:
        The first such line; without one, the first that is a JSON object; {} where none is.
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
