# The verdict on the tokens of a step, or of the steps that are pooled with it.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from servanda.contract.identity import EvidenceKey
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.evidence import Evidence, Weighed
from servanda.judgement.plan import Plan
from servanda.judgement.verdict import BlindSpot, Verdict, judge, unsound
from servanda.rl.dumps.preset import WORKLOAD
from servanda.rl.monitor import statistics
from servanda.rl.monitor.ranks import Part
from servanda.rl.trend.run_chart import joined
from servanda.theory.stats.agreement import Agreement


def weighed_of(plan: Plan, parts: Sequence[Part], groups: int) -> Weighed:
    """The statistics of all ranks as one closed round, the scope of a step's verdict."""
    return Weighed(
        statistics.joined(plan.cells, [part.statistics for part in parts]),
        ((),) * len(plan.cells),  # a step has no noise floor
        sequences=sum(part.sequences for part in parts),
        tokens=sum(part.tokens for part in parts),
        groups=groups,
        agreement=sum((part.agreement for part in parts), Agreement()),
    )


@dataclass(frozen=True)
class StepEvidence:
    """What a step is judged on.

    Args:
        digest: of the contract, which takes long to compute; steps: names the steps.
        spots: effects that were not examined.
        wrong: why the data is no evidence; "" if it is.
        trend: the cells of the run's trend.
    """

    plan: Plan
    digest: str
    steps: str
    weighed: Weighed
    spots: Sequence[BlindSpot] = ()
    wrong: str = ""
    trend: tuple[CellVerdict, ...] = ()

    def verdict(self, intervals: bool = True) -> Verdict:
        """The verdict.

        Args:
            intervals: whether intervals and blind spots are computed, which takes long.
        """
        key = EvidenceKey(
            contract=self.digest,
            corpus="",
            train="external",
            infer="external",
            weights=self.steps,
            grade="declared",
        )
        evidence = Evidence(key, self.plan.digest, {(WORKLOAD, 0): self.weighed})
        verdict = judge(self.plan, evidence, intervals=intervals)
        spots = self.spots if intervals else ()
        verdict = replace(verdict, blind_spots=(*verdict.blind_spots, *spots))
        return joined(unsound(verdict, self.wrong) if self.wrong else verdict, self.trend)
