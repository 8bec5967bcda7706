# The scalar fields of a contract: numbers, durations, names, each strict about its type.

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Annotated

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    Strict,
    WithJsonSchema,
)

# the name of a variable: in capitals, so that hardly any API key matches
VARIABLE = re.compile("[A-Z_][A-Z0-9_]{0,127}")
_DEVICE = re.compile(r"(cpu|cuda(:[0-9]{1,2})?)")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Value(BaseModel):
    """Base of everything a contract holds: frozen, and closed to unknown keys."""

    # a validator is built when it is first used: a contract's has those of all its parts
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, defer_build=True)


def seconds(duration: object) -> object:
    """'15m' -> 900.0; anything else is left for the type check.

    >>> seconds("15m")
    900.0
    """
    if isinstance(duration, str):
        match = _DURATION.fullmatch(duration)
        if not match:
            raise ValueError("a duration is a number and ms, s, m, h or d: 30s, 5m, 1h, 7d")
        return float(match[1]) * _SECONDS[match[2]]
    raise ValueError("a duration is a text such as 30s, 5m, 1h or 7d")


def _canonical(seconds: float) -> str:
    """The duration for a digest, with all digits.

    >>> _canonical(900.0), _canonical(1.5)
    ('900s', '1.5s')
    """
    return f"{Decimal(repr(seconds)).normalize():f}s"


def duration_text(seconds: float) -> str:
    """The duration in the largest unit that divides it, as written in contracts.

    >>> duration_text(900.0), duration_text(1.5), duration_text(2592000.0), duration_text(0)
    ('15m', '1.5s', '30d', '0s')
    """
    for unit in ("d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    return _canonical(seconds)


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError("a finite number is wanted")
    return number


def _device(name: str) -> str:
    if _DEVICE.fullmatch(name) is None:
        raise ValueError("a device is cpu, cuda or cuda:N")
    return name


# strict: '0.95' in quotes is text, true is no number, and yes is neither
Flag = Annotated[bool, Strict()]
Number = Annotated[float, Strict(), AllowInfNan(False)]
Whole = Annotated[int, Strict()]
Duration = Annotated[
    float,
    BeforeValidator(seconds),
    AfterValidator(_finite),
    PlainSerializer(_canonical),
    WithJsonSchema({"type": "string", "pattern": f"^{_DURATION.pattern}$"}),
]
Device = Annotated[
    str,
    AfterValidator(_device),
    WithJsonSchema({"type": "string", "pattern": f"^{_DEVICE.pattern}$"}),
]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$", max_length=80)]
Range = Annotated[tuple[Number, Number], Field()]
