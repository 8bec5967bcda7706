# Numbers and names as the page has them: three digits, one notation, and a place to link to.

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from servanda.judgement.clauses.base import CellVerdict
from servanda.report import cell_text, format

KINDS = {
    "certificate": "anytime-valid bound",
    "fact": "exact",
    "bound": "exact, two ends",
    "guard": "validity check",
}
SCOPES = {"population": "all such tokens", "realised": "these tokens"}
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_DIGITS = 3
_DECIMAL = re.compile(r"(?<![\w.])\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)(?![\w.])")


def figure(value: float | None) -> str:
    """At most three digits that mean something; very small and very large as a power of ten.

    >>> figure(0.17004), figure(20.7553), figure(170200.0), figure(4.9e-09), figure(1e-5)
    ('0.17', '20.8', '170,000', '4.9×10⁻⁹', '10⁻⁵')
    """
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if not value or 1e-4 <= abs(value) < 1e6:
        return _plain(float(f"{value:.{_DIGITS}g}"))
    mantissa, _, power = f"{value:.{_DIGITS - 1}e}".partition("e")
    times = "" if float(mantissa) == 1 else f"{float(mantissa):g}×"
    return f"{times}10{str(int(power)).translate(_RAISED)}"


def _plain(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.6f}".rstrip("0").rstrip(".")


def rounded(words: str) -> str:
    """A text of numbers with three digits each; a name is left alone.

    >>> rounded("2.5013 → 2.501 (+0.03 %)"), rounded("1.702e+05"), rounded("step_1.2345.jsonl")
    ('2.5 → 2.5 (+0.03 %)', '170,000', 'step_1.2345.jsonl')
    """
    return _DECIMAL.sub(lambda match: figure(float(match[0])), words)


def of(cell: CellVerdict, value: float | None) -> str:
    """A number of a cell; of a percentile, a share of tokens."""
    return format.percent(value) if cell.threshold is not None else figure(value)


def interval(cell: CellVerdict) -> str:
    return f"[{', '.join(of(cell, end) for end in cell.interval)}]" if cell.interval else ""


def quantity(cell: CellVerdict) -> str:
    """What is measured, in words: "mean tv", or "share of tokens with ... > 0.2"."""
    if cell.threshold is None:
        return cell_text.quantity(cell)
    return f"share of {cell_text.quantity(cell)}"


def meaning(cell: CellVerdict, place: str) -> str:
    """A cell in one sentence, for those who do not see its drawing."""
    parts = [f"{quantity(cell)} on {place}: {cell.outcome}"]
    if cell.value is not None:
        parts.append(f"measured {of(cell, cell.value)}")
    if cell.interval:
        parts.append(f"interval {interval(cell)}")
    if cell.limit is not None:
        parts.append(f"limit {cell_text.signed_limit(cell)}")
    if cell.floor is not None:
        parts.append(f"noise floor {of(cell, cell.floor)}")
    if cell.n:
        parts.append(f"n {cell.n:,} {cell.units}")
    return ", ".join(parts) + "."


def anchors(cells: Iterable[CellVerdict]) -> dict[int, str]:
    """The place of each cell on the page, by its index: no two are the same.

    A cell is found by its clause and slice, so a link to it holds for later runs of the contract.
    """
    found: dict[int, str] = {}
    taken: set[str] = set()
    for i, cell in enumerate(cells):
        name = base = f"cell-{slug(cell.clause)}-{slug(cell.slice)}"
        again = 1
        while name in taken:
            again += 1
            name = f"{base}-{again}"
        taken.add(name)
        found[i] = name
    return found


def slug(text: str) -> str:
    """A text as part of an address.

    >>> slug("depth>=16"), slug("Where, worst first")
    ('depth-ge-16', 'where-worst-first')
    """
    for sign, word in ((">=", "-ge-"), ("<", "-lt-"), ("..", "-to-")):
        text = text.replace(sign, word)
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "x"
