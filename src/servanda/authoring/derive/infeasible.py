# What no run can certify: budgets below the precision of the record, or of a run's size.

from __future__ import annotations

import math
from dataclasses import replace

from servanda.authoring.derive.budget import Asked
from servanda.authoring.derive.contract_text import Line
from servanda.authoring.derive.sizes import Held, Room
from servanda.errors import ContractError
from servanda.theory.bounds.drift import rounding_eps
from servanda.theory.divergence.precision import CAPTURES, TYPICAL_NATS, eta

_STEPS = 14  # of a bisection: to a thousandth
_LONGEST = 1e9  # prompt groups that anybody would ask for


def refuse_unresolved(asked: Asked) -> None:
    """A budget below what rounding alone reads as: of the record, or of a kernel's own logits.

    Raises:
        ContractError: which one, and which budget is above.
    """
    error = eta(asked.capture)
    bias = 2 * error * asked.factor * asked.counted[0] if asked.bias is not None else 0.0
    floors = (
        (asked.reward_drift, "reward drift", asked.tokens * error * asked.span),
        (asked.bias, "bias", bias),
    )
    for budget, name, floor in floors:
        if budget is None or (name == "reward drift" and asked.reward_gap) or budget > floor:
            continue
        raise ContractError(
            f"a {name} of {budget:g} lies under the precision of the record: logprobs in "
            f"{asked.capture} are off by up to {error:.1e} nats (tokens of about "
            f"{TYPICAL_NATS:g} nats), which alone may read as {floor:.2g}",
            hint=f"let the engines record float32, or give a budget above {floor:.2g}",
        )
    if asked.ratio_share is not None and asked.rho <= error:
        raise ContractError(
            f"{asked.ratio_share:g} of the clip range is a log-ratio of {asked.rho:.1e} nats, and "
            f"logprobs in {asked.capture} are off by up to {error:.1e}",
            hint="let the engines record float32, or give a larger share",
        )
    coarse = min((asked.train.dtype, asked.infer.dtype), key=lambda dtype: CAPTURES[dtype])
    rounding = float(rounding_eps(1.0, CAPTURES[coarse]))
    if asked.ratio_share is not None and asked.rho <= rounding:
        raise ContractError(
            f"{asked.ratio_share:g} of the clip range is a log-ratio of {asked.rho:.1e} nats, and "
            f"rounding a single logit between 1 and 2 to {coarse} moves it by up to "
            f"{rounding:.1e}: no such kernel keeps 99 % of its tokens within that",
            hint="give a larger share; of kernels that are equal bit by bit promise logit_osc_nats "
            "at_most 0 on golden texts",
        )


def too_many(line: Line, held: Held, needed: float, room: Room, cells: int) -> ContractError:
    """That a budget is too small for a run, and which one is not."""
    hints = []
    if line.aggregate != "p99":  # a share of tokens needs the same run whatever its threshold
        enough = _enough(line.limit, held, room, cells)
        if enough is None:
            hints.append(f"no budget is decided by {room.most:,}")
        else:
            hints.append(f"{room.most:,} decide a budget of {enough:g}")
    if needed <= _LONGEST:
        unit = 10 ** max(math.floor(math.log10(needed)) - 2, 0)
        hints.append(f"--most {math.ceil(needed / unit) * unit} gives a run that is long enough")
    counted = f"about {needed:,.0f}" if math.isfinite(needed) else "more than 10^12"
    return ContractError(
        f"no run of {room.most:,} prompt groups can certify {line.metric} at most "
        f"{line.limit:g}: a kernel at half of it would take {counted}",
        hint="; ".join(hints),
    )


def _enough(limit: float, held: Held, room: Room, cells: int) -> float | None:
    """The smallest budget of two digits that a run decides; None: none below the range is."""
    over_best = held.limit - held.best
    most = (1.0 - held.best) / over_best

    def decided(factor: float) -> bool:
        wider = replace(held, limit=held.best + factor * over_best)
        return factor < most and room.groups(wider, cells) <= room.most

    # a violation of a limit near the top takes long, too: begin below
    tops = (most * tenths / 10 for tenths in range(9, 0, -1))
    low, high = 1.0, next((top for top in tops if top > 1 and decided(top)), None)
    if high is None:
        return None
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if decided(middle) else (middle, high)
    for digits in (2, 3, 4):
        unit = 10.0 ** (math.floor(math.log10(high * limit)) + 1 - digits)
        found = float(f"{math.ceil(high * limit / unit) * unit:.{digits}g}")
        if decided(found / limit):
            return found
    return None
