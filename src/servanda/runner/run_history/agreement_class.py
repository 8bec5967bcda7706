# The class of a pair of kernels: the rounding that its measured differences are like.
#
# Each class has a measured floor.  Of float32 it is the mean |log ratio| between float32 kernels of
# one program; of bfloat16 and FP8 it is the distance of that format of the same model, on the same
# texts, from the precision ladder of the run.

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from servanda.judgement.breakdown import Rung
from servanda.judgement.token_profile import Sums
from servanda.judgement.verdict import Verdict
from servanda.report.format import line, number
from servanda.theory.stats.agreement import ENOUGH, ROUNDING_NATS

AgreementClass = Literal[
    "bitwise equal",
    "agrees to float32 rounding",
    "agrees to bf16 rounding",
    "agrees to fp8 rounding",
    "disagrees",
    "not classified",
]
# another order of the sums changes the distance of a format a little; the next format of the
# ladder is about twice as far away
SPREAD = 1.25
_FORMATS: tuple[tuple[AgreementClass, tuple[str, ...]], ...] = (
    ("agrees to bf16 rounding", ("bfloat16",)),
    ("agrees to fp8 rounding", ("fp8_channel", "mxfp8")),
)
_SIDES = ("infer", "golden")  # token profiles of the infer kernel against train


class Agreed(NamedTuple):
    """The class of a pair, and the numbers that decide it in one sentence."""

    name: AgreementClass
    reason: str


def agreement_class(verdict: Verdict) -> Agreed:
    """The first class whose rule the measured differences meet.

    1. bitwise equal: every compared token has the same logprob on both sides, and no exact metric
       of the golden texts is above 0.
    2. agrees to float32 rounding: mean |log ratio| at most ROUNDING_NATS on each slice, and so is
       the exact mean tv of the golden texts.
    3. disagrees, if the verdict is violated; not classified, if it is an error, or if the precision
       ladder was not measured.
    4. agrees to bf16, or fp8 rounding: the mean tv on the texts of the ladder is at most SPREAD
       times that of this format.
    5. disagrees.
    """
    totals = {side: p.total for side in _SIDES if (p := verdict.portraits.get(side))}
    tokens = sum(total.n for total in totals.values())
    if tokens < ENOUGH:
        return Agreed("not classified", f"{tokens} tokens were compared, and {ENOUGH} are needed")
    if not any(total.abs_log_ratio for total in totals.values()) and not _exact(verdict):
        return Agreed("bitwise equal", f"no logprob of {tokens:,} compared tokens differs")
    largest, place = max(_distances(verdict))
    if largest <= ROUNDING_NATS:
        reason = f"mean |log ratio| at most {number(largest)} nats on each slice ({line(place)})"
        return Agreed("agrees to float32 rounding", f"{reason}, floor {number(ROUNDING_NATS)}")
    if verdict.outcome == "violated":
        return Agreed("disagrees", "the contract is violated")
    if verdict.outcome == "error":
        return Agreed("not classified", "the verdict is an error")
    return _of_ladder(verdict.circumstances.rungs)


def _of_ladder(rungs: tuple[Rung, ...]) -> Agreed:
    tv = {r.name: r.tv for r in rungs if r.tv is not None and not r.candidate}
    mine = next((r.tv for r in rungs if r.candidate), None)
    last = Agreed("not classified", "measure the precision ladder too: check --ladder")
    for name, formats in _FORMATS:
        floor = max((tv[f] for f in formats if f in tv), default=None)
        if mine is None or floor is None:
            return last
        nearest = max((f for f in formats if f in tv), key=lambda f: tv[f])
        shown = f"mean tv {number(mine)}, {number(mine / floor) if floor else '∞'} times that of "
        last = Agreed("disagrees", f"{shown}{nearest}; at most {SPREAD:g} times would agree")
        if mine <= SPREAD * floor:
            return Agreed(name, f"{shown}{nearest}, at most {SPREAD:g} times agree")
    return last


def _distances(verdict: Verdict) -> Iterator[tuple[float, str]]:
    """Mean |log ratio| of the whole and of each slice, nats, with its name; and exact mean tv.

    Between two distributions that are this near, tv is at most half of the mean |log ratio|.
    """
    for cell in verdict.cells:
        exact = cell.section == "numerical" and cell.metric == "tv" and cell.aggregate == "mean"
        if exact and cell.value is not None:
            yield cell.value, f"{cell.slice}, tv of the golden texts"
    for side in _SIDES:
        portrait = verdict.portraits.get(side)
        if portrait is None:
            continue
        slices: dict[str, Sums] = {"all": portrait.total, **portrait.slices}
        for name, sums in slices.items():
            mean = sums.mean("abs_log_ratio")
            if mean is not None:
                yield mean, name


def _exact(verdict: Verdict) -> bool:
    """Whether an exact metric of the golden texts is above 0."""
    return any(c.section == "numerical" and c.value for c in verdict.cells)
