# The course of a promotion in plain English: its legs, what each takes, what a violation costs.

from __future__ import annotations

from servanda.contract.fields import duration_text
from servanda.contract.model import Contract
from servanda.contract.stages import Leg, course_of
from servanda.report.table import table

_HEAD = ("leg", "infer gets", "prompt groups", "requests, about", "lasts at least", "and then")
_TEXT = (
    "Each leg begins without evidence, and is left when every enforced promise holds on it. A "
    "violation on any of them gives all traffic back to stable. The table has the first look and "
    "the limit of each, and about how many requests of users it takes to have enough of them "
    "scored for the first look."
)


def explain_course(contract: Contract) -> tuple[str, list[str]]:
    """A paragraph, and the lines of a table; ("", []) where nothing goes live."""
    course = course_of(contract)
    if not any(leg.live for leg in course):
        return "", []
    rows = [_HEAD, *(_row(course, i) for i in range(len(course)))]
    return f"{_TEXT} All {len(course)} legs share the chance of a wrong red one.", table(rows)


def _row(course: tuple[Leg, ...], i: int) -> tuple[str, ...]:
    leg = course[i]
    following = course[i + 1] if i + 1 < len(course) else None
    asks = leg.approval and following is not None and following.stage != leg.stage
    undecided = {"wait": "goes on", "hold": "halts", "roll_back": "rolls back"}
    then = [
        *(["a person says yes"] if asks else []),
        f"undecided: {undecided[leg.if_inconclusive]}",
    ]
    return (
        leg.name,
        leg.traffic,
        f"{leg.first:,} to {leg.last:,}",
        f"{leg.requests:,}" if leg.requests is not None else "",
        duration_text(leg.dwell_s) if leg.dwell_s else "",
        "; ".join(then),
    )
