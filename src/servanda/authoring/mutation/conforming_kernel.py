# Conforming: the train kernel in the place of infer, which a contract has to let pass.

from __future__ import annotations

from servanda.authoring.mutation.result import Conformance, FailingCell
from servanda.contract.model import PACK, Contract, Kernels
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.plan import Plan, out_of_reach
from servanda.judgement.verdict import Verdict
from servanda.runner.fault_drill import Drill

_RECORDED = (PACK, "recorded")  # engines that answer nothing new


def against_itself(contract: Contract) -> Contract | None:
    """The contract with its train kernel on both sides; None where train is a recording."""
    train = contract.kernels.train
    if train.engine in _RECORDED:
        return None
    # a transform and a mask of its own are what train scores by; what is drawn is the workload's
    infer = train.model_copy(update={"sampling": None, "mask": "own"})
    # equal bits are what one kernel on both sides is there to show
    return contract.model_copy(
        update={"kernels": Kernels(train=train, infer=infer), "bitwise": True}
    )


def conforming(plan: Plan, drill: Drill, seconds: float) -> Conformance:
    """The contract's description in a check that should hold."""
    train, infer = str(plan.contract.kernels.train), str(plan.contract.kernels.infer)
    kernels = f"{train} against itself" if train == infer else f"{infer} against {train}"
    verdict = drill.verdict
    if verdict is None:
        why = drill.refused.problems[0].message if drill.refused else ""
        return Conformance(
            kernels, "refused", (FailingCell("identity", "refused", why),), seconds=seconds
        )
    enforced = [c for c in verdict.cells if c.enforced and c.outcome != "not applicable"]
    return Conformance(
        kernels=kernels,
        outcome=verdict.outcome,
        failing=tuple(
            FailingCell(f"{c.clause} on {c.slice}", c.outcome, reason(plan, verdict, c), c.where)
            for c in enforced
            if c.outcome != "holds"
        ),
        cells=len(enforced),
        groups=verdict.groups,
        seconds=seconds,
        open=verdict.circumstances.stopped == "time",
    )


def beyond_reach(plan: Plan) -> Conformance | None:
    """The answer where the sizes certify a limit for no one: no kernel is run for it."""
    problems = [(cell, problem) for cell in plan.cells for problem in out_of_reach(plan, cell)]
    if not problems:
        return None
    failing = tuple(
        FailingCell(f"{cell.clause.id} on {cell.cut.name}", "out of reach", p.message, p.where)
        for cell, p in problems
    )
    return Conformance(f"{plan.contract.kernels.train} against itself", "out of reach", failing)


def reason(plan: Plan, verdict: Verdict, cell: CellVerdict) -> str:
    """Why a kernel does not keep a promise with itself: its noise, or too small a size."""
    parts = []
    if cell.value is not None and cell.limit is not None:
        parts.append(f"{cell.value:.3g}, limit {cell.limit:g}")
    if cell.floor is not None and cell.limit is not None and cell.floor >= cell.limit:
        parts.append(f"the limit is below the floor {cell.floor:.3g}: train against itself")
    if cell.outcome == "inconclusive" and cell.workload and verdict.circumstances.stopped == "size":
        last = next(s.last for s in plan.schedules if s.name == cell.workload)
        more = f"; about {verdict.groups + cell.more:,} would decide" if cell.more else ""
        parts.append(f"too small a size: open after {last:,} prompt groups{more}")
    if cell.note:
        parts.append(cell.note)
    return "; ".join(parts)
