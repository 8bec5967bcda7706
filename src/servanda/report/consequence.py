# Under a red verdict: what it means for the tokens, and which of them drift.

from __future__ import annotations

import math
from collections.abc import Mapping

from servanda.contract.model import WHOLE
from servanda.judgement.drift_location import contrast, explains, parted
from servanda.judgement.token_profile import Portrait
from servanda.judgement.verdict import Verdict
from servanda.report.cell_text import worst_first
from servanda.report.format import percent
from servanda.report.summary import flips


def consequence(verdict: Verdict) -> list[str]:
    """One line on the tokens that are hit, and one on where they are; [] where nothing is known."""
    if verdict.outcome != "violated":
        return []
    affected = _affected(verdict)
    return [text for text in (affected, affected and _where(verdict.portraits)) if text]


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


def _where(portraits: Mapping[str, Portrait]) -> str:
    """The edge of prompt length, position or entropy that separates the tokens that drift."""
    infer, own = portraits.get("infer"), portraits.get("self_infer")
    sharpest = contrast(infer) if infer is not None else None
    if sharpest is None:
        return ""
    ratio = f"{sharpest.ratio:.3g} times that of other tokens"
    ratio = ratio if math.isfinite(sharpest.ratio) else "above 0 there alone"
    text = f"where: {sharpest.words}; their mean TV is {ratio}"
    noise = parted(own, sharpest) if own is not None else None
    if noise is None:
        return f"{text}."
    if explains(noise, sharpest):
        return f"{text}, and so is the infer kernel's own noise ({noise:.2g} times)."
    return f"{text}, and the infer kernel's own noise does not explain it ({noise:.2g} times)."
