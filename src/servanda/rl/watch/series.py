# Series: the few metrics of a step for plots.
#
# At most MOST, so that a page stays readable.  Missing values are omitted: a gap in a plot is
# better than a zero.

from __future__ import annotations

from collections.abc import Mapping

from servanda.contract.model import WHOLE
from servanda.judgement.verdict import EXIT_CODES
from servanda.report.cell_text import excess
from servanda.rl.dumps.format import is_gradient
from servanda.rl.watch.step import WatchedStep

MOST = 13
_AT_FIRST, _LATER = 2, 2  # slices with a series: the worst at first, then newly violated ones

# name -> description
WHOLES: Mapping[str, str] = {
    "outcome": "0 holds, 1 violated, 3 inconclusive, 4 error",
    "tokens": "trained tokens of the step",
    "coverage": "share of the trained tokens that have both logprobs",
    "gradient_share": "share of the gradient that may be wrong: twice the mean total variation",
    "clipped_share": "share of all tokens that are clipped before any update",
    "worst": "the largest value on any slice, divided by its limit",
    "trend": "mean |log ratio| of the last five steps divided by that of the first five",
    "staleness": "weight updates between sampling and training, of the oldest token",
    "draft_acceptance": "share of the draft tokens that the target accepted",
}
assert len(WHOLES) + _AT_FIRST + _LATER == MOST


def placed(places: tuple[str, ...], step: WatchedStep) -> tuple[str, ...]:
    """The slices with their own series, after a step.

    The worst two of the first step that has any, and the first two others that are violated. A
    place is never reassigned, so that a run has at most MOST series in total.
    """
    cells = {name: step.worst(name) for name in step.slices}
    known = {name: cell for name, cell in cells.items() if cell is not None}
    if not places:
        worst = sorted(known, key=lambda name: -excess(known[name]))
        places = tuple(worst[:_AT_FIRST])
    red = [n for n, c in known.items() if c.outcome == "violated" and n not in places]
    return (*places, *sorted(red, key=lambda n: -excess(known[n])))[: _AT_FIRST + _LATER]


def series(step: WatchedStep, places: tuple[str, ...]) -> dict[str, float]:
    """Name -> number of a step, without missing ones."""
    gradient = next((c for c in step.cells if c.slice == WHOLE and is_gradient(c)), None)
    share = 2 * gradient.value if gradient is not None and gradient.value is not None else None
    gap = step.of_whole("weight_gap")  # without a correction already twice a TV
    clipped, worst = step.of_whole("abs_log_ratio_nats"), step.worst()
    values: dict[str, float | None] = {
        "outcome": float(EXIT_CODES[step.outcome]),
        "tokens": float(step.tokens),
        "coverage": step.coverage.value if step.coverage else None,
        "gradient_share": share if gap is None else gap.value,
        "clipped_share": clipped.value if clipped else None,
        "worst": excess(worst) if worst else None,
        "trend": step.trend.ratio if step.trend else None,
        "staleness": step.staleness,
        "draft_acceptance": step.drafts,
    }
    for name in places:
        cell = step.worst(name)
        values[f"slice/{name}"] = excess(cell) if cell else None
    return {f"servanda/{name}": value for name, value in values.items() if value is not None}
