# Messages of gateways and promotions to a controller, validated strictly.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from servanda.errors import EvidenceError
from servanda.traces.json_fields import LineError, json_text
from servanda.traces.request_log import Assignment, assignment_of

_MOST = 2**53  # larger integers are not exact in JSON
T = TypeVar("T")
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Count = Annotated[int, Meta(ge=0, lt=_MOST)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Message(msgspec.Struct, frozen=True):
    """The body of POST /v1/follow.

    Args:
        gateway: its name; start: start of its process, unix seconds.
        version: version of its snapshot; 0: none.
        first: number of the first row in the message.
        assigned: the users of a promotion's step, see docs/how-to/traffic.md.
    """

    gateway: Name
    start: Annotated[float, Meta(gt=-_MOST, lt=_MOST)]
    version: Count = 0
    first: Count = 0
    rows: list[Any] = []
    counts: dict[str, Any] = {}
    assigned: list[dict[str, Any]] = []

    @property
    def assignments(self) -> Iterator[Assignment]:
        """The assignments of users that can be read."""
        for line in self.assigned:
            with suppress(LineError):
                yield assignment_of(line)

    @property
    def latest(self) -> float | None:
        """Dispatch time of its last row, by its own clock; None: it has no row."""
        rows = (row for row in self.rows if isinstance(row, Mapping))
        return max((float(row["at"]) for row in rows if _is_number(row.get("at"))), default=None)

    @property
    def launched(self) -> int:
        """Rows since its start, including those without a response yet; 0: unknown."""
        sampled: Any = self.counts.get("sampled")
        return int(sampled) if _is_number(sampled) else 0


class PromotionRoute(msgspec.Struct, frozen=True):
    """A promotion's route effect, see docs/how-to/effects.md; turn: its revision, if any."""

    run: Name
    leg: Name
    share: Share
    mirror: Share | None = None
    sample: Share | None = None
    turn: Count | None = None


def message_of(data: Any) -> Message:
    """Validate a JSON message.

    Raises:
        EvidenceError: it is invalid.
    """
    return converted(Message, data, "a gateway's message", "do both have this version of servanda?")


def converted(kind: type[T], data: Any, noun: str, hint: str) -> T:
    """JSON data as a struct.

    Raises:
        EvidenceError: invalid data; the text names the field, its value and the expected type.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        expected, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`").partition("[")[0]
        value = f"{name} is {json_text(data[name])}, " if name else ""
        text = f"{noun}: {value}{expected[0].lower()}{expected[1:]}"
        raise EvidenceError(text, hint=hint) from None


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < _MOST and not math.isnan(value)
