# The start of a path of the chain: the clause's number and its assumptions.
#
# Without a verdict it is the limit; with one it is the certified upper bound.

from __future__ import annotations

import math
from dataclasses import dataclass

from servanda.contract.clause import WHOLE, Clause, Section
from servanda.contract.model import Contract
from servanda.judgement.bound_chain.steps import STANDINGS, Step, joined
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.clauses.chain_metrics import CHAIN, ChainMetric, chain_metric
from servanda.judgement.clauses.reward_gap import RewardGap
from servanda.judgement.verdict import Verdict
from servanda.theory.bounds.sequence import is_vacuous
from servanda.theory.bounds.theorem import Standing
from servanda.theory.sampling import Sampling

_RAW = Sampling.model_validate({})  # raw logits, if nothing is sampled
_SAMPLED = ("sampler", "order", "same_tokens")


class LeaveOut(Exception):  # noqa: N818 - a reason, not an error
    """No (further) consequence follows from a clause, with the reason."""


def tokens_of(contract: Contract, workload: str) -> int | None:
    """Most tokens of a response, including the end-of-text step; None if unknown."""
    declared = contract.all_workloads.get(workload)
    if declared is None:
        return None
    written = "max_new_tokens" in declared.sampling.model_fields_set
    return declared.sampling.max_new_tokens if written or declared.source == "prompts" else None


@dataclass(frozen=True)
class Start:
    """A clause of a contract with its cell on the whole traffic."""

    contract: Contract
    section: Section
    clause: Clause
    verdict: Verdict | None

    def cell(self) -> CellVerdict | None:
        """The cell of the whole traffic; None without a verdict."""
        if self.verdict is None:
            return None
        mine = (self.clause.id, self.section, WHOLE)
        of = (c for c in self.verdict.cells if (c.clause, c.section, c.slice) == mine)
        cell = next(of, None)
        if cell is None:
            raise LeaveOut("the verdict has no such cell")
        failed = [
            guard.clause
            for guard in self.verdict.cells
            if guard.section == "observability" and guard.enforced
            if guard.workload == cell.workload and guard.outcome in ("violated", "error")
        ]
        if failed and self.section == "statistical":
            raise LeaveOut(f"a precondition failed ({', '.join(failed)}), so it shows nothing")
        if cell.outcome == "not applicable" or (cell.interval is None and cell.value is None):
            raise LeaveOut(cell.note or "nothing was measured")
        if cell.outcome == "error":
            raise LeaveOut(f"it is in error, so it shows nothing: {cell.note}".rstrip(": "))
        if cell.interval is None and self.section != "numerical":
            raise LeaveOut("it has an estimate and no interval, so it shows no upper end")
        if cell.interval is not None and cell.interval[0] > cell.interval[1]:
            raise LeaveOut("its interval is empty, so it shows no upper end")
        return cell

    def start(self, what: str, unit: str = "", most: float = math.inf) -> Step:
        """The limit, or the certified upper bound."""
        cell, clause = self.cell(), self.clause
        if cell is not None:
            number = cell.interval[1] if cell.interval else cell.value
        elif isinstance(clause.at_most, float):
            number = clause.at_most
            if clause.percentile is not None and self.section == "statistical":
                number = round((100.0 - clause.percentile) / 100.0, 12)
        else:
            raise LeaveOut("its limit is known once it is measured: give the run directory")
        if number is None or not math.isfinite(number):
            raise LeaveOut("it has no upper end")
        return Step(
            clause.id,
            0,
            what,
            number,
            unit,
            standing=self.standing(cell),
            assumes=joined(self.assumes(), cell.assumptions if cell else ()),
            enforced=clause.enforced,
            vacuous=is_vacuous(number, most),
        )

    def standing(self, cell: CellVerdict | None) -> Standing:
        """The guarantee type of the clause's number."""
        if self.section == "numerical":
            return "fact"
        for standing in STANDINGS:
            if cell is not None and cell.kind == standing:
                return standing
        return getattr(CHAIN.get(self.clause.metric), "standing", "certificate")

    def assumes(self) -> tuple[str, ...]:
        """The assumptions of the clause's number."""
        if self.section == "numerical":
            return ()
        drawn = ("independent",) if self.claim == "population" else ()
        if self.clause.metric == "reward_gap":
            return ("order", *drawn)  # no logprob is used
        own = getattr(self.metric, "assumes", ()) if self.clause.metric in CHAIN else ()
        return joined((*_SAMPLED, *drawn), own)

    @property
    def claim(self) -> str:
        """Its scope: population or observed sample."""
        return self.clause.claim or self.contract.claim

    @property
    def metric(self) -> type[ChainMetric]:
        """The metric of the chain under this contract."""
        return chain_metric(self.contract, self.clause)

    @property
    def most(self) -> float:
        """The largest value that the clause's own metric can have."""
        if not isinstance(self.clause.at_most, float):
            return math.inf
        kind = self.metric.of(self.contract, self.clause)
        if isinstance(kind, RewardGap):
            return kind.span
        feed = getattr(kind, "feed", None)
        return math.inf if feed is None else feed.value(1.0)

    @property
    def transforms(self) -> tuple[Sampling, Sampling]:
        """The transforms of infer's and train's logits before sampling."""
        workload = self.contract.all_workloads.get(self.contract.workload_of(self.clause))
        infer = workload.sampling.transform if workload else _RAW
        return infer, self.contract.kernels.train.sampling or infer

    @property
    def raw(self) -> bool:
        """Whether both kernels sample from raw logits."""
        return self.transforms == (_RAW, _RAW)

    @property
    def tokens(self) -> int | None:
        """Most tokens of a response of its workload."""
        return tokens_of(self.contract, self.contract.workload_of(self.clause))
