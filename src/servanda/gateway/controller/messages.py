# Messages: what gateways and promotions send to a controller, read strictly.

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from servanda.errors import EvidenceError
from servanda.traces.json_fields import json_text

_MOST = 2**53  # beyond, not every number of JSON is a whole one
T = TypeVar("T")
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Count = Annotated[int, Meta(ge=0, lt=_MOST)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Message(msgspec.Struct, frozen=True):
    """The body of POST /v1/follow.

    Args:
        gateway: its name; start: of its process, unix seconds.
        version: of the snapshot that it has; 0: none.
        first: number of the first row.
    """

    gateway: Name
    start: Annotated[float, Meta(gt=-_MOST, lt=_MOST)]
    version: Count = 0
    first: Count = 0
    rows: list[Any] = []
    counts: dict[str, Any] = {}

    @property
    def latest(self) -> float | None:
        """When its last row was launched, by its own clock; None: it has no row."""
        rows = (row for row in self.rows if isinstance(row, Mapping))
        return max((float(row["at"]) for row in rows if _is_number(row.get("at"))), default=None)

    @property
    def launched(self) -> int:
        """Rows since its start, those included that have no answer yet; 0: not known."""
        sampled: Any = self.counts.get("sampled")
        return int(sampled) if _is_number(sampled) else 0


class PromotionRoute(msgspec.Struct, frozen=True):
    """A promotion's route effect, see docs/how-to/effects.md; turn: None: of no promotion."""

    run: Name
    leg: Name
    share: Share
    mirror: Share | None = None
    sample: Share | None = None
    turn: Count | None = None


def message_of(data: Any) -> Message:
    """A message as JSON has it.

    Raises:
        EvidenceError: it is none.
    """
    return converted(Message, data, "a gateway's message", "are both of this version?")


def converted(kind: type[T], data: Any, noun: str, hint: str) -> T:
    """JSON data as a struct.

    Raises:
        EvidenceError: it is none; which field, its value, and the type that is expected.
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
