# Numbers and times as people read them, on the page and in a terminal.

from __future__ import annotations

import math
from datetime import datetime, timezone

from servanda.report.format import WRITTEN, number

_LEAST = math.log(0.001)  # nats; smaller values are printed as "< ..."
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def evidence(log_e: float) -> str:
    """An e-value from its logarithm, in nats.

    >>> evidence(0.0), evidence(6.9), evidence(-3.0), evidence(-20.0), evidence(float("-inf"))
    ('1', '992', '0.05', '< 0.001', '0')
    >>> evidence(17.73), evidence(23.5), evidence(40.0), evidence(1e4)
    ('50.1 million', '16.1 billion', '2.4×10¹⁷', '8.8×10⁴³⁴²')
    """
    if math.isnan(log_e):
        return "–"
    if math.isinf(log_e):
        return "∞" if log_e > 0 else "0"
    if log_e < _LEAST:
        return "< 0.001"
    tens = math.floor(log_e / math.log(10))
    if tens >= 12:
        # of a power, the last place is lost in rounding the logarithm
        digits = f"{math.exp(log_e - tens * math.log(10)):.1f}"
        return _power(*(("1", tens + 1) if digits == "10.0" else (digits, tens)))
    value = math.exp(log_e)
    for word, unit in (("billion", 1e9), ("million", 1e6)):
        if value >= 0.9999995 * unit:
            parts = value / unit
            return f"{parts:,.0f} {word}" if parts >= 100 else f"{parts:.3g} {word}"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _power(digits: str, tens: int) -> str:
    """
    >>> _power("2.4", -5), _power("1", 17)
    ('2.4×10⁻⁵', '10¹⁷')
    """
    power = f"10{str(tens).translate(_RAISED)}"
    return power if digits in ("1", "1.0") else f"{digits}×{power}"


def figure(value: float) -> str:
    """A number that a person wrote, such as a limit."""
    return number(value, WRITTEN)


def measured(value: float | None) -> str:
    return number(value) or "–"


def clock(at: float, now: float) -> str:
    """The time of day, with the date if it is not today.

    >>> clock(0.0, 60.0), clock(0.0, 90_000.0)
    ('00:00:00', '01-01 00:00:00')
    """
    moment = _moment(at)
    return moment.strftime("%H:%M:%S" if moment.date() == _moment(now).date() else "%m-%d %H:%M:%S")


def stamp(at: float) -> str:
    return _moment(at).strftime("%Y-%m-%d %H:%M:%S UTC")


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(min(max(at, 0.0), 4e9), timezone.utc)
