# Values as people read them: names on one line, numbers, shares, counts and durations.

from __future__ import annotations

import math
import re
import textwrap
import unicodedata
from typing import TYPE_CHECKING

from servanda.contract.model import WHOLE
from servanda.registry import cut

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

WRITTEN = 6  # most digits of a number that a person wrote, such as a limit
# what XML 1.0 cannot hold, not even escaped
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_DECIMAL = re.compile(r"(?<![\w.])\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)(?![\w.])")
_DURATIONS = (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))  # seconds


def line(text: str, longest: int = 0) -> str:
    """A name on one line, without control characters, cut to `longest` characters."""
    visible = "".join(
        " " if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") else c for c in text
    )
    text = " ".join(visible.split())
    return cut(text, longest) if longest else text


def number(value: float | None, digits: int = 3) -> str:
    """At most three digits that mean something; very small and very large as a power of ten.

    Near 1, where ratios and weights lie, two digits of the distance from it.

    Args:
        digits: `WRITTEN` for a number of a contract.

    >>> number(0.17004), number(20.7553), number(170200.0), number(4.9e-09), number(1e-5)
    ('0.17', '20.8', '170,000', '4.9×10⁻⁹', '10⁻⁵')
    >>> number(0.99874), number(1.000388), number(1.0)
    ('0.9987', '1.00039', '1')
    """
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if 0 < abs(value - 1) < 0.1:
        value = 1 + round(float(f"{value - 1:.{max(digits - 1, 1)}g}"), 6)
    elif not value or 1e-4 <= abs(value) < 1e6:
        value = float(f"{value:.{digits}g}")
    else:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        times = "" if float(mantissa) == 1 else f"{float(mantissa):g}×"
        return f"{times}10{str(int(power)).translate(_RAISED)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.9f}".rstrip("0").rstrip(".")


def rounded(words: str) -> str:
    """A text of numbers with three digits each; a name is left alone.

    >>> rounded("2.5013 → 2.501 (+0.03 %)"), rounded("1.702e+05"), rounded("step_1.2345.jsonl")
    ('2.5 → 2.5 (+0.03 %)', '170,000', 'step_1.2345.jsonl')
    """
    return _DECIMAL.sub(lambda match: number(float(match[0])), words)


def percent(value: float | None) -> str:
    """A share as percent; more digits where it is small; above 1, a ratio.

    >>> percent(0.104), percent(0.0004), percent(1.0), percent(0.9999), percent(1.649)
    ('10.4 %', '0.04 %', '100 %', '> 99.9 %', '1.65 times')
    """
    if value is None or math.isnan(value):
        return ""
    if value > 1:
        return f"{number(value)} times"
    digits = f"{100 * value:.1f}"
    if digits == "0.0" and value:
        digits = f"{100 * value:.2g}"
    if digits == "100.0" and value != 1:
        return "> 99.9 %"
    return f"{100 * value:.0f} %" if value in (0, 1) else f"{digits} %"


def part_of(value: float, whole: str) -> str:
    """A part of something; beyond the whole, a ratio.

    >>> part_of(0.096, "the limit"), part_of(1.649, "the limit")
    ('9.6 % of the limit', '1.65 times the limit')
    """
    return f"{percent(value)} {'of ' * (value <= 1)}{whole}"


def place(name: str, longest: int = 0) -> str:
    """A slice as people call it."""
    return "whole traffic" if name == WHOLE else line(name, longest)


def rough(value: float, *, share: bool = False, side: int = 0) -> str:
    """An estimate, of which two digits mean something.

    Args:
        side: 1: rounded up, -1: rounded down.

    >>> rough(0.04581), rough(0.0123, share=True), rough(0.0249, side=-1)
    ('0.046', '1.2 %', '0.024')
    """
    if side and value:
        unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
        value = side * math.ceil(side * value / unit - 1e-9) * unit
    return f"{number(100 * value, 2)} %" if share else number(value, 2)


def exact_percent(value: float) -> str:
    """A share that someone wrote as percent, in the digits that were written.

    >>> exact_percent(0.05), exact_percent(0.125)
    ('5 %', '12.5 %')
    """
    return f"{number(100 * value, 4)} %"


def count(n: int, noun: str) -> str:
    """A number of things.

    >>> count(1, "key"), count(1200, "request")
    ('1 key', '1,200 requests')
    """
    return f"{n:,} {noun}{'s' * (n != 1)}"


def duration(seconds: float) -> str:
    """How long something takes, in its two largest units.

    >>> duration(0.35), duration(12.2), duration(150), duration(120), duration(12_000)
    ('0.35 s', '12 s', '2 min 30 s', '2 min', '3 h 20 min')
    >>> duration(183_600), duration(0)
    ('2 d 3 h', '0 s')
    """
    if seconds < 1:
        return f"{round(max(seconds, 0.0), 2):g} s"
    whole = round(seconds)
    for unit, size, smaller_unit, smaller in _DURATIONS:
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{whole} s"


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """A paragraph in lines, none of which parts a number from its percent sign."""
    lines = textwrap.wrap(
        text.replace(" %", "\xa0%"),
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\xa0%", " %") for line in lines]


def xml_text(text: str) -> str:
    """A text that XML can hold: other characters are replaced."""
    return _NOT_XML.sub("\ufffd", text)


def xml_document(root: Element) -> str:
    from xml.etree.ElementTree import indent, tostring  # no other format needs it

    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"
