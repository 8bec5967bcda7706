# A cell of a verdict in words: what was measured, where, against which limit, with what answer.

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from servanda.contract.model import WHOLE, Clause
from servanda.judgement.clauses.base import ORDER, CellVerdict, Outcome
from servanda.judgement.clauses.draft_acceptance import DRAFT_ACCEPTANCE
from servanda.judgement.clauses.statistical import ALWAYS
from servanda.judgement.lint.sections import RUNTIME_METRICS
from servanda.report.format import WRITTEN, count, exact_percent, line, number, percent, place
from servanda.theory.bounds.assumptions import ASSUMPTIONS

GLYPH = {"violated": "✗", "error": "!", "inconclusive": "?", "holds": "✓", "not applicable": "–"}
KINDS = {
    "certificate": "anytime-valid bound",
    "fact": "exact",
    "bound": "exact, two ends",
    "guard": "validity check",
}
SCOPES = {"population": "all such tokens", "realised": "these tokens"}
# what the interval of a realised claim is an interval of
REALISED = (
    "an interval covers the average, over the contexts that occurred, of the value expected at the "
    "next token; the tokens drawn there are its sample"
)
GIVEN_UP = "stopped early: broken as a whole"


def shown(value: float | None, share: bool) -> str:
    """A number in the clause's own terms: a percentile concerns a share of the tokens."""
    return percent(value) if share else number(value)


def shown_interval(low: float | None, high: float | None, share: bool) -> str:
    """Both ends, or "" where it has none."""
    if low is None or high is None:
        return ""
    return f"[{shown(low, share)}, {shown(high, share)}]"


def shown_limit(value: float | None, share: bool) -> str:
    """The limit, in the digits of the contract; three where it was measured.

    >>> shown_limit(0.012345, False), shown_limit(0.0219083128, False), shown_limit(0.03, True)
    ('0.012345', '0.0219', '3 %')
    """
    if value is None:
        return ""
    written = float(f"{value:.{WRITTEN}g}") == value
    return exact_percent(value) if share else number(value, WRITTEN if written else 3)


def size(n: int, units: str) -> str:
    """How many units, which are named in the plural, such as "1 prompt group"."""
    return count(n, units.removesuffix("s")) if units else f"{n:,}"


def short_size(cell: CellVerdict) -> str:
    """The same in a column of a table, where prompt groups are groups; "" without a unit."""
    return size(cell.n, cell.units.removeprefix("prompt ")) if cell.units else ""


def limit(cell: CellVerdict) -> str:
    return shown_limit(cell.limit, cell.threshold is not None)


def of_cell(cell: CellVerdict, value: float | None) -> str:
    return shown(value, cell.threshold is not None)


def interval(cell: CellVerdict) -> str:
    return shown_interval(*(cell.interval or (None, None)), cell.threshold is not None)


def log_e_value(cell: CellVerdict) -> str:
    """The evidence against a validity check that is a test; "" of any other cell."""
    if cell.kind != "guard" or cell.e_violated is None:
        return ""
    return f"log e-value {number(cell.e_violated)}"


def signed_limit(cell: CellVerdict) -> str:
    return f"{limit_sign(cell)} {limit(cell)}" if cell.limit is not None else ""


def each_of(of: CellVerdict | Clause) -> str:
    """What a share of a percentile clause is a share of."""
    return "responses" if of.metric.startswith("response_") else "tokens"


def quantity(cell: CellVerdict) -> str:
    """What is measured, such as "mean tv" or "tokens with abs_log_ratio_nats > 0.2"."""
    if cell.threshold is not None:
        return f"{each_of(cell)} with {cell.metric} > {cell.threshold:g}"
    return f"{cell.aggregate} {cell.metric}".strip()


def certified(cell: CellVerdict) -> bool:
    """Whether its interval is valid at every evaluation: on its own, or times what is declared."""
    return cell.kind in ("certificate", "conditional bound")


def assumed(cells: Iterable[CellVerdict]) -> list[str]:
    """What every certified number rests on: the sampler, the order, the tokens, the groups."""
    named = dict.fromkeys(name for cell in cells for name in cell.assumptions if name in ALWAYS)
    return [ASSUMPTIONS[name].text for name in named]


def where(cell: CellVerdict, longest: int = 0) -> str:
    """Where a cell was judged: a slice of the traffic, or of the golden texts."""
    if cell.section != "numerical":
        return place(cell.place, longest)
    return "golden texts" if cell.place == WHOLE else f"{line(cell.place, longest)} (golden texts)"


def limit_sign(cell: CellVerdict) -> str:
    if cell.metric in RUNTIME_METRICS:
        return "≥" if RUNTIME_METRICS[cell.metric].limit == "at_least" else "≤"
    return "≥" if cell.metric.endswith("_ratio") and cell.section == "observability" else "≤"


def worst_first(cells: Iterable[CellVerdict]) -> list[CellVerdict]:
    """By outcome, then by how far beyond the limit; the order of the contract breaks ties."""
    rank = {outcome: i for i, outcome in enumerate(ORDER)}
    return sorted(cells, key=lambda c: (rank.get(c.outcome, len(ORDER)), -excess(c)))


def worst_promise(cells: Iterable[CellVerdict]) -> CellVerdict | None:
    """The enforced promise to name first: violated before others, then the largest of its limit."""
    measured = (
        c
        for c in cells
        if c.enforced and c.section != "observability" and c.value is not None and c.limit
    )
    return max(measured, key=lambda c: (c.outcome == "violated", excess(c)), default=None)


def excess(cell: CellVerdict) -> float:
    """The value in units of its limit; 0 where there is none, and for guards."""
    guard = cell.section == "observability"
    if guard or cell.value is None or not cell.limit or math.isnan(cell.value):
        return 0.0
    if cell.metric == DRAFT_ACCEPTANCE:  # a share: what was lost, in units of what may be
        return (1 - cell.value) / (1 - cell.limit)
    if limit_sign(cell) == "≥":
        return abs(cell.limit) / abs(cell.value) if cell.value else math.inf
    return abs(cell.value) / abs(cell.limit)


def reason(cell: CellVerdict) -> str:
    """Why a cell is not decided, in two or three words; "" where it is."""
    if cell.outcome != "inconclusive":
        return ""
    noisy = cell.reason == "within noise"
    if noisy or (cell.floor and cell.limit and cell.floor >= cell.limit):
        return "unreliable baseline"
    if cell.open and cell.more:
        return "too few data"
    return "not decided"


def scope(cell: CellVerdict) -> str:
    """The tokens that a number is about; "" where it claims no more than it counts."""
    return SCOPES[cell.claim] if certified(cell) or cell.kind == "estimate" else ""


def meaning(cell: CellVerdict, place: str = "") -> str:
    """What a number says and of what: kind, scope, interval, limit, n, alpha (law 3).

    Args:
        place: the slice as the reader knows it; "": its name.
    """
    parts = [f"{quantity(cell)} on {place or where(cell)}: {cell.outcome}"]
    if cell.value is not None:
        parts.append(f"measured {of_cell(cell, cell.value)}")
    if cell.interval:
        parts.append(f"interval {interval(cell)}")
    if cell.limit is not None:
        parts.append(f"limit {signed_limit(cell)}")
    if cell.floor is not None:
        parts.append(f"noise floor {of_cell(cell, cell.floor)}")
    if cell.n:
        parts.append(f"n {size(cell.n, cell.units)}")
    if cell.missing:
        parts.append(f"{cell.missing:,} missing")
    if cell.kind:
        about = scope(cell)
        parts.append(f"{KINDS.get(cell.kind, cell.kind)}{f' for {about}' if about else ''}")
    if cell.alpha is not None:
        parts.append(f"alpha {number(cell.alpha)}")
    return f"{', '.join(parts)}."


def sentence(cell: CellVerdict) -> str:
    """A cell in a sentence: what was found, against what, and why it is not decided."""
    answer = reason(cell) or cell.outcome
    text = f"{answer if cell.enforced else f'{answer} (monitored)'}: {quantity(cell)}"
    if cell.value is not None:
        text += f" is {of_cell(cell, cell.value)}"
    text += f" on {where(cell)}"
    if cell.limit is not None:
        text += f", limit {signed_limit(cell)}"
    if cell.interval:
        text += f", interval {interval(cell)}"
    if cell.n:
        text += f", n {size(cell.n, cell.units)}"
    if said := remark(cell):
        text += f"; {said}"
    if cell.outcome == "inconclusive" and cell.more:
        text += f"; about {count(cell.more, 'more prompt group')} would decide"
    return f"{text}."


def remark(cell: CellVerdict) -> str:
    """How it stands to the rounding of a number format, then its note without the same ratio."""
    _, _, ratio = cell.rounding.partition(": ")
    note = cell.note.replace(f"{ratio}, ", "") if ratio else cell.note
    return "; ".join(line(text) for text in (cell.rounding, note) if text)


def measured(cell: CellVerdict) -> str:
    """The number with its name: "Mean tv 0.0125", or "4.7 % of tokens with ... > 0.03"."""
    value = of_cell(cell, cell.value)
    if cell.threshold is not None:
        return f"{value} of {quantity(cell)}"
    text = f"{quantity(cell)} {value}"
    return text[0].upper() + text[1:] if cell.aggregate else text


# Ticks: every surface takes its mark and its word from here, the page and the status of a gateway,
# an audit, a promotion and the reports.  Nothing found so far is no tick: a test that has not
# decided gathers evidence, and says at how many units it would decide.


class Tick(NamedTuple):
    """The answer of one test, or the worst of several.

    Args:
        outcome: "inconclusive": it gathers evidence.
        n, units: size of the evidence, and its unit in the plural.
        more: projected number of further units for a decision; None: unknown.
    """

    outcome: Outcome
    n: int = 0
    more: int | None = None
    units: str = ""

    @property
    def glyph(self) -> str:
        return GLYPH[self.outcome]

    @property
    def text(self) -> str:
        """One word, and for evidence that is gathered how much there is.

        >>> [Tick("inconclusive", 1, more, "requests").text for more in (69, None)]
        ['gathering: 1 of about 70 requests', 'gathering: 1 request']
        """
        if self.outcome != "inconclusive":
            return self.outcome
        if self.more is None:
            return f"gathering: {size(self.n, self.units)}"
        return f"gathering: {self.n:,} of about {size(_rough(self.n + self.more), self.units)}"


def tick(outcome: Outcome, n: int, more: int | None = None, units: str = "") -> Tick:
    """The answer of one test; without evidence none holds."""
    return Tick("inconclusive" if outcome == "holds" and n <= 0 else outcome, n, more, units)


def glyph_of(cell: CellVerdict) -> str:
    """The glyph of a cell of a verdict."""
    return GLYPH[tick(cell.outcome, cell.n).outcome]


def together(ticks: Iterable[Tick]) -> Tick:
    """The worst answer; of those that gather evidence, the one that is farthest from its decision.

    >>> together([Tick("holds", 9), Tick("inconclusive", 5, 7), Tick("inconclusive", 2, 8)]).n
    2
    """

    def rank(one: Tick) -> tuple[int, float]:
        return -ORDER.index(one.outcome), math.inf if one.more is None else one.more

    judged = [one for one in ticks if one.outcome in ORDER]
    return max(judged, key=rank, default=Tick("inconclusive"))


def _rough(n: int) -> int:
    """A projection in two digits, rounded up.

    >>> _rough(69), _rough(70), _rough(12_345)
    (69, 70, 13000)
    """
    unit = 10 ** max(0, len(f"{n}") - 2)
    return -(-n // unit) * unit
