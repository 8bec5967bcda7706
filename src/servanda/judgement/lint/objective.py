# Lint of a trainer's declarations: empty ranges, and weightings that cut valid tokens.
#
# A clip range is two distances from 1; a range around 1 is detected.  A trend has a reference,
# and a trainer's steps to compare with it.

from __future__ import annotations

from collections.abc import Iterator

from servanda.contract.clause import CALIBRATE_TREND
from servanda.contract.finding import Finding
from servanda.contract.model import EXTERNAL, Contract
from servanda.contract.objective import Reward, Weighting
from servanda.judgement.rewards import REWARDS, file_and_function
from servanda.registry import did_you_mean, quoted

_AT = ("gradient", "weighting")


def learning(contract: Contract) -> Iterator[Finding]:
    """Check the reward, the clip range, and the weighting of the gradient."""
    if contract.reward is not None:
        yield from _reward(contract.reward)
    if contract.gradient is not None and contract.gradient.clip_range is not None:
        low, high = contract.gradient.clip_range
        at = ("gradient", "clip_range")
        if low <= 0 or high <= 0:
            message = f"a clip range of [{low:g}, {high:g}] has no width on one side of 1"
            yield Finding(at, message, "write both distances from 1, such as [0.2, 0.28]")
        elif 0.5 <= low < 1 < high < 2:
            message = "clip_range holds distances from 1, and "
            message += f"[{low:g}, {high:g}] is a range around it"
            yield Finding(at, message, f"did you mean [{1 - low:.4g}, {high - 1:.4g}]?")
    weighting = contract.gradient.weighting if contract.gradient is not None else None
    if not isinstance(weighting, Weighting):
        return
    given = weighting.given
    if len(given) != 1:
        message = f"a gradient has one weighting, found {', '.join(given) or 'none'}"
        yield Finding(_AT, message, "write {tis: 2.0}, or naive")
    for name, bounds in given.items():
        if not isinstance(bounds, tuple):
            continue
        low, high = bounds
        if low >= high:
            message = f"the band of {name} is empty: {low:g} is not below {high:g}"
            yield Finding((*_AT, name), message, "write [low, high], such as [0.5, 2.0]")
        elif not low <= 1 <= high:
            message = f"the band of {name} leaves out 1, the ratio of two kernels that agree"
            yield Finding((*_AT, name), message, "write [low, high], such as [0.5, 2.0]")


def _reward(reward: Reward) -> Iterator[Finding]:
    """Check for a valid range, and a reward that is known or in a file."""
    if reward.range[0] >= reward.range[1]:
        yield Finding(("reward", "range"), "the range of the reward is empty", "write [low, high]")
    if reward.of is None or reward.of in REWARDS:
        return
    parts = file_and_function(reward.of)
    if parts is None:
        near = did_you_mean(reward.of, REWARDS)
        near += "" if near.endswith("?") else "."
        hint = f"{near} A reward of your own is rewards.py:score"
        yield Finding(("reward", "of"), f"no reward is named {quoted(reward.of)}", hint)
    elif not parts[0].endswith(".py") or not parts[1].isidentifier():
        message = f"{quoted(reward.of)} is no function in a Python file"
        hint = "write FILE.py:FUNCTION, such as rewards.py:score"
        yield Finding(("reward", "of"), message, hint)


def trend(contract: Contract) -> Iterator[Finding]:
    """Check that a trend can be judged."""
    clause, kernels = contract.trend, contract.kernels
    if clause is None:
        return
    if not clause.reference:
        yield Finding(("trend",), "trend names no reference of good runs", CALIBRATE_TREND)
    if {kernels.train.engine, kernels.infer.engine} != {EXTERNAL}:
        message = "trend is judged over the steps of a trainer, and servanda runs these kernels"
        hint = "write engine: external for both kernels, or leave trend out"
        yield Finding(("trend",), message, hint, key=True)
    for i, rule in enumerate(contract.escalation):
        masks = "trend" in (rule.when.get("clause"), rule.when.get("section")) and "mask" in rule.do
        if masks:
            message = "trend is about all tokens of a step, and mask leaves out a slice"
            yield Finding(("escalation", i, "do"), message, "write halt, correct or {page: oncall}")
    for _, place, other in contract.clauses():
        if other.id == "trend":
            yield Finding((*place, "id"), "trend is the name of the contract's trend", "rename it")
