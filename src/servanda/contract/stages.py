# The rollout plan of a promotion (its course): its steps (legs), from the contract's own block.
#
# Each step starts without evidence: the offline stage, the shadow, each step of the canary
# (evidence at 1 % of the traffic says nothing about the batches at 25 %), and, once infer serves
# all traffic, one evaluation window (span) after another.

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from servanda.contract.clause import STAGES, Stage
from servanda.contract.model import Contract
from servanda.contract.policy import StageRule
from servanda.errors import ContractError
from servanda.theory.stats.alpha import look_alpha, next_look, shared

MIRRORED = 0.05  # default share of the traffic of a shadow
FIRST_STEP = 0.05  # default steps of a canary, shares of the traffic
SAMPLED = 0.01  # default sample of the requests in full


@dataclass(frozen=True)
class Leg:
    """One step of a promotion.

    Args:
        stage: step: of a canary, from 0; span: evaluation window of full, from 1, a new one after
            each limit.
        share: share of the traffic that infer serves; mirror: share of the traffic that is mirrored
            to infer; sample: share of infer's responses that train scores.
        first, last: fewest prompt groups for `holds`, and the number at which the step is decided.
        dwell_s: minimum hold time.
        approval: whether the stage after it needs an approval.
        if_inconclusive: the action if `last` is reached undecided.
        valid_for_s: lifetime of its evidence; None: unlimited.
        part: share of alpha for violations on this step; the shares of all steps add up to 1.
    """

    stage: Stage
    step: int = 0
    span: int = 1
    share: float = 0.0
    mirror: float = 0.0
    sample: float = 1.0
    first: int = 200
    last: int = 4000
    dwell_s: float = 0.0
    approval: bool = False
    if_inconclusive: Literal["wait", "hold", "roll_back"] = "hold"
    valid_for_s: float | None = None
    part: float = 1.0

    @property
    def name(self) -> str:
        """Its name in ledger and files: offline, shadow, canary-1, canary-2, full-1, full-2."""
        return f"{self.stage}-{self.number}" if self.stage in ("canary", "full") else self.stage

    @property
    def number(self) -> int:
        return self.step + 1 if self.stage == "canary" else self.span

    @property
    def live(self) -> bool:
        """Whether its tokens come from traffic."""
        return self.stage != "offline"

    @property
    def traffic(self) -> str:
        """The traffic of infer, as text."""
        if self.mirror:
            return f"{100 * self.mirror:.3g} % mirrored"
        return f"{100 * self.share:.3g} %" if self.share else "none"

    @property
    def requests(self) -> int | None:
        """Approximate number of user requests for the first evaluation; None offline."""
        scored = max(self.share, self.mirror) * self.sample
        return math.ceil(self.first / scored) if scored else None

    @property
    def following(self) -> Leg:
        """The next evaluation window of full; windows share the part of full by 1/(k(k+1))."""
        assert self.stage == "full"
        return replace(self, span=self.span + 1, part=next_look(self.part, self.span))


def course_of(contract: Contract) -> tuple[Leg, ...]:
    """The steps of a contract's promotion; the last is the first window of full, if any."""
    legs = [leg for stage in STAGES for leg in _legs(stage, getattr(contract.promotion, stage))]
    valid_for_s = contract.promotion.valid_for
    part = shared(1.0, len(legs))
    return tuple(
        replace(
            leg,
            valid_for_s=valid_for_s,
            part=look_alpha(part, leg.span) if leg.stage == "full" else part,
        )
        for leg in legs
    )


def refuse_absent(contract: Contract, stage: str) -> None:
    """Refuse a stage that a contract's promotion does not have.

    Raises:
        ContractError: it has none of this name.
    """
    stages = [*dict.fromkeys(leg.stage for leg in course_of(contract))]
    if stage not in stages:
        raise ContractError(
            f"the promotion of {contract.metadata.name} has no stage {stage!r}",
            where=contract.where("promotion"),
            hint=f"it has {', '.join(stages)}",
        )


def _legs(stage: Stage, rule: StageRule | None) -> list[Leg]:
    if rule is None:
        return []
    first, last = rule.sequences
    leg = Leg(
        stage,
        share=1.0 if stage == "full" else 0.0,
        mirror=(rule.share or MIRRORED) if stage == "shadow" else 0.0,
        sample=rule.sample or (SAMPLED if stage == "full" else 1.0),
        first=first,
        last=last,
        dwell_s=rule.dwell or 0.0,
        if_inconclusive=rule.if_inconclusive,
    )
    made = [leg]
    if stage == "canary":
        steps = rule.steps or (FIRST_STEP,)
        made = [replace(leg, step=i, share=share) for i, share in enumerate(steps)]
    # an approval is needed before the next stage, not before each step
    return [*made[:-1], replace(made[-1], approval=rule.approval == "required")]
