# The promotion as the last link of the chain: a plan, a state and a verdict -> a state, effects.

from __future__ import annotations

from typing import TYPE_CHECKING

from servanda.contract.identity import EvidenceKey, digest_of
from servanda.contract.model import Contract
from servanda.contract.stages import course_of
from servanda.errors import EvidenceError
from servanda.promotion.advance import advance as advanced
from servanda.promotion.advance import begin, leg_of
from servanda.promotion.finding import leg_finding
from servanda.promotion.state import Effect, State
from servanda.traces.serialization import to_plain

if TYPE_CHECKING:
    from servanda.judgement.plan import Plan
    from servanda.judgement.verdict import Verdict


def advance(
    plan: Plan, state: State | None, verdict: Verdict, *, now: float
) -> tuple[State, tuple[Effect, ...]]:
    """Where a promotion stands after a verdict, and what the world is to be told; pure.

    Args:
        plan: of the leg that was judged; its contract says which legs there are.
        state: where it stood; None: it begins.
        now: unix seconds, never before what the state saw last.

    Returns:
        the state, and effects with a key each: an effect that is delivered twice has one key.

    Raises:
        EvidenceError: the clock went back, or the plan or the verdict is of another leg, or of
            none.
    """
    course = course_of(plan.contract)
    begun: tuple[Effect, ...] = ()
    if state is None:
        name = run_name(plan.contract, verdict.key)
        state, begun = begin(name, verdict.key, course, now=now)
    leg = leg_of(course, state)
    for what, name in (("plan", plan.leg.name if plan.leg else ""), ("verdict", verdict.leg)):
        if name != leg.name:
            raise EvidenceError(
                f"the {what} is of {name or 'a check by itself'}, and run {state.run} is at "
                f"{leg.name}",
                hint="judge that leg: each has evidence and a part of alpha of its own; "
                "compile(contract, leg=...) plans it, and course_of(contract) lists them",
            )
    after, effects = advanced(course, state, leg_finding(plan.contract, leg, verdict), now=now)
    return after, (*begun, *effects)


def run_name(contract: Contract, key: EvidenceKey) -> str:
    """Of the only run that a key may have: whoever promotes it again meets the same one."""
    return f"{beginning_of(contract.metadata.name)}{digest_of(to_plain(key))[:8]}"


def beginning_of(name: str) -> str:
    """Of the names of all runs of a contract; of another's too, whose name goes on with -."""
    return f"{name}-"
