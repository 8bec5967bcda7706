# The reward gap: by how much the expected reward of the two kernels' own answers differs.
#
# Both kernels answer the same prompts, and each answer has the contract's reward.  What is
# judged is the mean of R_infer - R_train over launched sequences, from both sides:
#
#     X = (R_infer - R_train + range) / (2 range)   in [0, 1],
#
# a mean of bounded variables whatever the logprobs are, so it says something where the
# variation of whole answers is nearly 1 and `reward_drift` says nothing.  The two answers
# of a prompt are drawn with the same uniforms.  That is free: an expectation of a difference
# does not depend on how the two are coupled.  And it pays: kernels that are nearly one draw
# mostly the same answers, and X is then 1/2 with hardly any variance.

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from servanda.clauses.base import Array, Cell, CellVerdict, Look, Sampled, Source, View, blank
from servanda.clauses.certificate import Process, total
from servanda.clauses.chain import CHAIN, Lack, limit_of
from servanda.clauses.sequences import BySequence, sequence_process
from servanda.contract import Clause, Contract
from servanda.slices import Known
from servanda.stats import interval, units_to_decide
from servanda.stats.log_moment import NEG, POS

DRAWS = "train_draws"  # the peer that holds what train drew for the same units
REWARD = "reward"  # the column of a trace: of the whole answer, at each of its tokens
_SAME = 0.5  # x where both answers have the same reward


@dataclass(frozen=True)
class RewardGap(BySequence, Sampled):
    """|E R_infer - E R_train| is at most the limit; each end is certified at half of alpha.

    Args:
        limit: of the gap, in units of the reward.
        span: largest less smallest reward.
    """

    limit: float
    span: float
    each: ClassVar[Literal["token", "sequence"]] = "sequence"
    counts: ClassVar[bool] = True
    source: ClassVar[Source] = "workload"
    peers: ClassVar[tuple[str, ...]] = (DRAWS,)
    meaning: ClassVar[str] = (
        "by how much the expected reward of whole answers differs, up or down, where each kernel "
        "draws its own"
    )
    metric_unit: ClassVar[str] = ""
    example: ClassVar[str] = "{id: reward, metric: reward_gap, at_most: 0.05, slices: [all]}"
    takes: ClassVar[frozenset[str]] = frozenset()
    known: ClassVar[Known] = "request"

    @classmethod
    def under(cls, _: Contract, /) -> type[RewardGap]:
        return cls

    @classmethod
    def lacks(cls, contract: Contract, clause: Clause) -> Iterator[Lack]:
        """A reward that is not declared, or a limit that it cannot exceed."""
        reward, example = contract.reward, "reward: {range: [0, 1], of: exact_answer}"
        if reward is None:
            yield Lack(
                "reward_gap is measured in the contract's reward, and none is declared",
                f"declare {example}, or of: rewards.py:score for a reward of your own",
            )
        elif reward.of is None:
            yield Lack(
                "reward_gap needs the reward of each answer, and reward: has no `of`",
                f"declare {example}, or of: rewards.py:score for a reward of your own",
            )
        elif 0 < reward.range[1] - reward.range[0] <= limit_of(clause):
            span = reward.range[1] - reward.range[0]
            message = f"reward_gap is at most {span:g} here: a limit of {limit_of(clause):g}"
            yield Lack(f"{message} can never fail", f"write a limit below {span:g}", "at_most")

    @classmethod
    def of(cls, contract: Contract, clause: Clause) -> RewardGap:
        assert contract.reward is not None  # lint refuses it
        low, high = contract.reward.range
        return cls(limit_of(clause), high - low)

    def weigh(self, cell: Cell, view: View) -> Process:
        drawn = view.peers[DRAWS]
        gap_S = rewards(view) - rewards(drawn)
        return sequence_process(cell, view, self._x(gap_S))

    def noise(self, cell: Cell, view: View) -> None:
        """None: no answer is drawn again in another batch."""
        return

    def floor(self, cell: Cell, parts: list[None]) -> None:
        return None

    def units_at_best(self, alpha: float) -> int | None:
        """Units that `holds` needs if every prompt's two answers have the same reward."""
        ends = (
            np.log1p(NEG * _SAME) - np.log1p(NEG * self._x(self.limit)),
            np.log1p(POS * _SAME) - np.log1p(POS * self._x(-self.limit)),
        )
        units = [units_to_decide(growth, 1, math.log(2 / alpha)) for growth in ends]
        return None if None in units else max(u for u in units if u is not None)

    def judge(
        self, cell: Cell, rounds: list[Process], floor: float | None, look: Look
    ) -> CellVerdict:
        process = total(cell, rounds)
        verdict = blank(
            cell,
            "inconclusive",
            kind="certificate",
            unit=self.metric_unit,
            value=self._gap(process.mean) if process.known else None,
            limit=self.limit,
            n=process.n,
            units=f"{self.each}s" if cell.claim == "realised" else "prompt groups",
            missing=process.missing,
            alpha=look.alpha,
            # no logprob is used, so it does not matter whether they are right
            assumptions=("order", *(("independent",) if cell.claim == "population" else ())),
            open=True,
        )
        if not process.n:
            return verdict.but(note=f"slice {cell.cut.name!r} met no answer; widen the workload")
        low, high = self._ends(process, look.alpha)
        verdict = verdict.but(interval=(low, high))
        if -self.limit <= low and high <= self.limit and look.launched >= look.first:
            return verdict.but(outcome="holds", open=False)
        low, high = self._ends(process, look.alpha / max(look.cells, 1))
        if low > self.limit or high < -self.limit:
            return verdict.but(outcome="violated", open=False)
        units = self._units(process, look)
        if units is None:
            return verdict.but(note="too near the limit to tell; raise the limit or the sizes")
        # a slice meets only some of the groups: convert its units to launched groups
        more = math.ceil((units - process.n) * look.launched / process.n)
        return verdict.but(more=max(more, look.first - look.launched, 1))

    def _units(self, process: Process, look: Look) -> int | None:
        """Units in all that would decide, as a projection; None where the evidence stands."""
        low, high = self._x(-self.limit), self._x(self.limit)
        mean = process.mean if process.known else _SAME
        red = math.log(2 * max(look.cells, 1) / look.alpha)
        if mean > high:
            return units_to_decide(process.above_growth(high), process.n, red)
        if mean < low:
            return units_to_decide(process.below_growth(low), process.n, red)
        growths = (process.below_growth(high), process.above_growth(low))
        units = [units_to_decide(g, process.n, math.log(2 / look.alpha)) for g in growths]
        return None if None in units else max(u for u in units if u is not None)

    def _ends(self, process: Process, alpha: float) -> tuple[float, float]:
        """The gap lies between these, at confidence 1 - alpha and at every look."""
        low, high = interval(process, alpha / 2)
        return self._gap(low), self._gap(high)

    def _x(self, gap: Any) -> Any:
        """x of a gap, or of each of many."""
        return (gap / self.span + 1) / 2

    def _gap(self, x: float) -> float:
        return (2 * x - 1) * self.span


CHAIN.add("reward_gap", RewardGap)


def rewards(view: View) -> Array:
    """The reward of each launched sequence, [S]; NaN where it was lost."""
    trace = view.pair.infer
    starts_S = np.cumsum(trace.length_S) - trace.length_S
    met_S = trace.length_S > 0
    reward_S = np.full(len(met_S), np.nan)
    reward_S[met_S] = trace.columns[REWARD][starts_S[met_S]]
    return reward_S
