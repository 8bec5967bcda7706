# Values as people read them: names on one line, numbers, shares, counts and durations.

from __future__ import annotations

import math
import re
import textwrap
import unicodedata
from xml.etree.ElementTree import Element, indent, tostring

from servanda.contract.model import WHOLE

# what XML 1.0 cannot hold, not even escaped
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_DURATIONS = (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))  # seconds


def line(text: str, longest: int = 0) -> str:
    """A name on one line, without control characters, cut to `longest` characters."""
    visible = "".join(
        " " if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") else c for c in text
    )
    text = " ".join(visible.split())
    return text if not longest or len(text) <= longest else text[: longest - 1] + "…"


def number(value: float | None) -> str:
    """Four decimals, or two digits where they would not show it."""
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.2g}"


def percent(value: float | None) -> str:
    """A share as percent; more digits where it is small."""
    if value is None or math.isnan(value):
        return ""
    digits = f"{100 * value:.1f}"
    if digits == "0.0" and value:
        digits = f"{100 * value:.2g}"
    if digits == "100.0" and value != 1:
        return "> 99.9 %" if value < 1 else "> 100 %"
    return f"{100 * value:.0f} %" if value in (0, 1) else f"{digits} %"


def place(name: str, longest: int = 0) -> str:
    """A slice as people call it."""
    return "whole traffic" if name == WHOLE else line(name, longest)


def rough(value: float, *, share: bool = False) -> str:
    """An estimate, of which two digits mean something.

    >>> rough(0.04581), rough(0.0123, share=True)
    ('0.046', '1.2 %')
    """
    return f"{100 * value:.2g} %" if share else f"{value:.2g}"


def exact_percent(value: float) -> str:
    """A share that someone wrote as percent, in the digits that were written.

    >>> exact_percent(0.05), exact_percent(0.125)
    ('5 %', '12.5 %')
    """
    return f"{100 * value:.4g} %"


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
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"
