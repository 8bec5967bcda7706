# Which runs are a ground for limits: those whose numbers are what they claim to be.

from __future__ import annotations

from servanda.errors import EvidenceError
from servanda.judgement.plan import Plan
from servanda.judgement.verdict import Verdict


def accept(plan: Plan, verdict: Verdict) -> None:
    """Refuse a run that says nothing about a pair one could accept.

    A run that breaks its limits is taken: whoever calibrates says that the pair is good.

    Raises:
        EvidenceError: a kernel with a fault on purpose, a guard that failed, or trouble in
            measuring.
    """
    kernels = plan.contract.kernels
    for side, kernel in (("train", kernels.train), ("infer", kernels.infer)):
        if kernel.fault:
            raise EvidenceError(
                f"the {side} kernel of this run has a fault on purpose "
                f"({', '.join(kernel.fault)}): that is no pair to keep",
                hint=f"take kernels.{side}.fault out, and measure",
            )
    for cell in verdict.cells:
        wrong = cell.outcome == "error" and cell.enforced
        guard = cell.section == "observability" and cell.enforced and cell.outcome == "violated"
        if wrong or guard:
            word = "violated" if guard else "in error"
            raise EvidenceError(
                f"{cell.clause!r} on slice {cell.slice!r} is {word}, so the numbers of this run "
                f"are not what they claim ({cell.note})",
                hint="mend what it says, and measure with --fresh",
            )
