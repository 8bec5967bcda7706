# Messages: what gateways and promotions send to a leader, read strictly.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servanda.errors import EvidenceError
from servanda.gateway.controller.intake import Start

_MOST = 2**53  # beyond, not every number of JSON is a whole one
_NAME = 200  # characters


@dataclass(frozen=True)
class Message:
    """What a gateway says, see POST /v1/follow.

    Args:
        version: of the snapshot that it has; 0: none.
        first: number of the first row.
        latest: when its last row was launched, by its own clock; None: nothing came.
        launched: rows since its start, those included that have no answer yet; 0: not known.
    """

    start: Start
    version: int
    first: int
    rows: Sequence[Any]
    counts: Mapping[str, Any]
    latest: float | None = None
    launched: int = 0


def message_of(data: Any) -> Message:
    """A message as JSON has it.

    Raises:
        EvidenceError: it is none.
    """
    if not isinstance(data, Mapping):
        raise EvidenceError("a gateway's message is a JSON object")
    name = data.get("gateway")
    if not isinstance(name, str) or not 0 < len(name) <= _NAME:
        raise EvidenceError("'gateway' is not the name of a gateway")
    rows, counts = data.get("rows", []), data.get("counts", {})
    if not isinstance(rows, list):
        raise EvidenceError("'rows' is not a list")
    if not isinstance(counts, Mapping):
        raise EvidenceError("'counts' is not an object")
    return Message(
        (name, _number(data, "start")),
        _whole(data, "version"),
        _whole(data, "first"),
        rows,
        counts,
        _latest(rows),
        _launched(counts.get("sampled")),
    )


def _launched(value: Any) -> int:
    return int(value) if _is_number(value) else 0


def _latest(rows: Sequence[Any]) -> float | None:
    at = [row["at"] for row in rows if isinstance(row, Mapping) and _is_number(row.get("at"))]
    return float(max(at)) if at else None


@dataclass(frozen=True)
class Route:
    """A promotion's route effect, see docs/how-to/effects.md; turn: None: of no promotion."""

    share: float
    mirror: float
    sample: float
    run: str
    leg: str
    turn: int | None


def route_of(body: Any) -> Route:
    """A promotion's route effect as JSON has it.

    Raises:
        EvidenceError: it is none.
    """
    if not isinstance(body, Mapping):
        raise EvidenceError("a route is a JSON object")
    run, leg = _named(body, "run"), _named(body, "leg")
    share = _share(body, "share")
    mirror, sample = _share(body, "mirror", 0.0), _share(body, "sample", 0.0)
    turn = None if body.get("turn") is None else _whole(body, "turn")
    return Route(share, mirror, sample, run, leg, turn)


def _share(body: Mapping[str, Any], name: str, absent: float | None = None) -> float:
    value: Any = body.get(name)
    value = absent if value is None else value
    if not _is_number(value) or not 0 <= value <= 1:
        raise EvidenceError(
            f"{name!r} of a route is {value!r}, not a share between 0 and 1",
            hint="send the body of a promotion's route effect as it is",
        )
    return float(value)


def _named(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _NAME:
        raise EvidenceError(
            f"{name!r} of a route is not a name",
            hint="send the body of a promotion's route effect as it is",
        )
    return value


def _whole(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise EvidenceError(f"{name!r} is not a whole number from 0 on")
    if value >= _MOST:
        raise EvidenceError(f"{name!r} is larger than any there can be")
    return value


def _number(data: Mapping[str, Any], name: str) -> float:
    value = data.get(name)
    if not _is_number(value):
        raise EvidenceError(f"{name!r} is not a number")
    return float(value)  # type: ignore[arg-type]


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < _MOST and not math.isnan(value)
