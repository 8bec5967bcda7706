# Under a red verdict: what it means for the tokens, and which of them drift.

from __future__ import annotations

import math
from typing import NamedTuple

from servanda.contract.model import WHOLE
from servanda.judgement.causes.drift_location import contrast, explains, parted
from servanda.judgement.token_profile import Portrait, Sums
from servanda.judgement.verdict import Verdict
from servanda.report.cell_text import worst_first
from servanda.report.format import number, percent
from servanda.report.summary import flips


def consequence(verdict: Verdict) -> list[str]:
    """One line on the tokens that are hit, and one on where they are; [] where nothing is known."""
    if verdict.outcome != "violated":
        return []
    if not (affected := _affected(verdict)):
        return []
    found = drift(verdict.portraits.get("infer"), verdict.portraits.get("self_infer"))
    return [affected, *([f"where: {found.place}; {found.text}."] if found else [])]


def _affected(verdict: Verdict) -> str:
    """How many tokens, and how many of them have another most likely one."""
    red = [c for c in verdict.cells if c.enforced and c.outcome == "violated"]
    red = [c for c in worst_first(red) if c.section == "statistical" and c.workload]
    shares = {c.slice: c.share for c in red if c.share is not None}
    if not shares:
        return ""
    share = 1.0 if WHOLE in shares else max(shares.values())
    least = "at least " if len(shares) > 1 and WHOLE not in shares else ""
    text = f"{least}{percent(share)} of the tokens" if share < 1 else "all traffic"
    text = f"impact: this hits {text}"
    name = WHOLE if WHOLE in shares else next(iter(shares))
    found = flips(verdict, name)
    if found is None:
        return f"{text}."
    text += f"; the most likely token differs at {percent(found.there)} of the positions"
    return f"{text}." if name == WHOLE else f"{text} there ({percent(found.whole)} overall)."


class Drift(NamedTuple):
    """The edge of prompt length, position or entropy that separates the tokens that drift.

    Args:
        text: how much they drift, and whether the infer kernel's own noise explains it.
    """

    place: str
    text: str
    inside: Sums
    outside: Sums


def drift(portrait: Portrait | None, own: Portrait | None) -> Drift | None:
    """None where no edge separates them.

    Args:
        own: of the infer kernel compared with itself.
    """
    sharpest = contrast(portrait) if portrait is not None else None
    if sharpest is None:
        return None
    ratio = f"{number(sharpest.ratio)} times that of other tokens"
    ratio = ratio if math.isfinite(sharpest.ratio) else "above 0 there alone"
    text = f"their mean TV is {ratio}"
    noise = parted(own, sharpest) if own is not None else None
    if noise is not None:
        says = "explains this" if explains(noise, sharpest) else "does not explain this"
        text += f"; the infer kernel's own noise is {number(noise)} times as large there: it {says}"
    return Drift(sharpest.words, text, sharpest.inside, sharpest.outside)
