# The reward gap: the difference of the expected rewards of the two kernels' own responses.
#
# Both kernels respond to the same prompts, and each response has the contract's reward.  Judged is
# the mean of R_infer - R_train over dispatched sequences, from both sides:
#
#     X = (R_infer - R_train + range) / (2 range)   in [0, 1],
#
# a mean of bounded variables whatever the logprobs are, so it is informative even if the variation
# of whole responses is nearly 1 and `reward_drift` is vacuous.  The two responses to a prompt are
# sampled with the same uniforms.  This is valid: the expectation of a difference does not depend on
# the coupling.  It also reduces variance: similar kernels mostly sample the same responses, and X
# is then 1/2.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from servanda.contract.clause import Clause
from servanda.contract.model import Contract
from servanda.judgement.clauses.base import (
    DRAWS,
    REWARD,
    Array,
    Cell,
    CellVerdict,
    Interim,
    Sampled,
    View,
    blank,
    limit_of,
    peak,
)
from servanda.judgement.clauses.chain_metrics import CHAIN, ChainMetric, Lack
from servanda.judgement.clauses.statistical import BySequence, Process, Tally, sequence_units, total
from servanda.theory.stats.alpha import log_price, log_shared, shared
from servanda.theory.stats.bets import NEG, POS, mixed, weights_above, weights_below
from servanda.theory.stats.interval import interval, units_to_decide

_SAME = 0.5  # x if both responses have the same reward


@dataclass(frozen=True)
class Growth:
    """Log e-values of the mixture's components about the two ends of the limit; additive.

    Args:
        inside: for a gap below the upper end, and above the lower one.
        outside: for a gap above the upper end, and below the lower one.
    """

    inside: tuple[Array, Array]
    outside: tuple[Array, Array]


@dataclass(frozen=True)
class Paired:
    """One round's statistics, with descriptive numbers.

    Args:
        infer, train: sums of the rewards of prompts with both.
        least, most: the range of these rewards.
    """

    process: Process
    infer: float
    train: float
    least: float
    most: float
    growth: Growth = field(repr=False, compare=False)  # derived from the process


@dataclass(frozen=True)
class RewardGap(BySequence, ChainMetric, Sampled):
    """|E R_infer - E R_train| is at most the limit; each end is certified at half of alpha.

    Args:
        limit: limit of the gap, in units of the reward.
        span: largest less smallest reward.
    """

    limit: float
    span: float
    counts: ClassVar[bool] = True
    peers: ClassVar[tuple[str, ...]] = (DRAWS,)
    meaning: ClassVar[str] = (
        "the difference of the expected rewards of whole responses, up or down, where each kernel "
        "generates its own"
    )
    nonnegative: ClassVar[bool] = False
    offline_only: ClassVar[str] = "train does not answer users: rewards are compared offline"
    example: ClassVar[str] = "{id: reward, metric: reward_gap, at_most: 0.05, slices: [all]}"

    @classmethod
    def lacks(cls, contract: Contract, clause: Clause) -> Iterator[Lack]:
        """Problems: a missing reward, or a limit that the gap cannot exceed."""
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
        assert contract.reward is not None  # lint rejects it
        low, high = contract.reward.range
        return cls(limit_of(clause), high - low)

    def weigh(self, cell: Cell, view: View) -> Paired:
        infer_S, train_S = rewards(view), rewards(view.peers[DRAWS])
        met_S = view.may_meet[cell.cut] & ~np.isnan(infer_S + train_S)
        both = (infer_S[met_S].tolist(), train_S[met_S].tolist())
        process = sequence_units(cell, view, self._x(infer_S - train_S)).process(cell)
        low, high = self._x(-self.limit), self._x(self.limit)
        return Paired(
            process,
            *map(math.fsum, both),
            least=min(min(side, default=math.inf) for side in both),
            most=max(max(side, default=-math.inf) for side in both),
            growth=Growth(
                (process.below_growth(high), process.above_growth(low)),
                (process.above_growth(high), process.below_growth(low)),
            ),
        )

    @property
    def most(self) -> float:
        return self.span

    words: ClassVar[Mapping[str, str]] = {
        "holds": "the data show the two expected rewards within the limit of each other",
        "violated": "they show them further apart than the limit",
        "measured": "the train kernel generates responses of its own, with the same seeds",
    }

    def units_at_best(self, alpha: float) -> int | None:
        """If both responses to every prompt have the same reward."""
        ends = (
            np.log1p(NEG * _SAME) - np.log1p(NEG * self._x(self.limit)),
            np.log1p(POS * _SAME) - np.log1p(POS * self._x(-self.limit)),
        )
        units = [
            units_to_decide(growth, weight, 1, log_price(shared(alpha, 2)))
            for growth, weight in zip(ends, self.weights, strict=True)
        ]
        return None if None in units else max(u for u in units if u is not None)

    def judge(
        self, cell: Cell, rounds: list[Paired], floor: float | None, look: Interim
    ) -> CellVerdict:
        measured = [r for r in rounds if r.process.n]
        tally = Tally.of([r.process for r in measured])
        verdict = blank(
            cell,
            "inconclusive",
            kind="certificate",
            unit=self.metric_unit,
            value=self._gap(tally.mean) if tally.known else None,
            limit=self.limit,
            n=tally.n,
            units=cell.units_of(self.each),
            missing=tally.missing,
            alpha=look.alpha,
            # no logprob is used, but other clauses identify train with its scoring distribution
            assumptions=(
                "order",
                "own_law",
                *(("independent",) if cell.claim == "population" else ()),
            ),
            note=_note(measured),
            open=True,
        )
        if not measured:
            return verdict.but(note=f"slice {cell.cut.name!r} met no answer; widen the workload")
        if look.intervals:
            process = total(cell, [r.process for r in rounds])
            low, high = interval(process, shared(look.alpha, 2), self._x(self.limit), _SAME)
            verdict = verdict.but(interval=(self._gap(low), self._gap(high)))
        inside = [sum((r.growth.inside[i] for r in measured), np.zeros(1)) for i in (0, 1)]
        outside = [[r.growth.outside[i] for r in measured] for i in (0, 1)]
        # `holds` needs both ends, `violated` one: each takes half of alpha.
        # For `holds` each end could be tested at alpha, since only one of them can be false;
        # but then the outcome and the printed two-sided interval would disagree.
        e_holds = min(map(mixed, inside, self.weights)) - log_shared(2)
        ends = zip(outside, self.weights[::-1], strict=True)
        e_violated = max(peak(end, cell.claim, weight) for end, weight in ends) - log_shared(2)
        verdict = verdict.but(e_holds=e_holds, e_violated=e_violated)
        if e_violated >= look.log_price_violated:
            return verdict.but(outcome="violated", open=False)
        if e_holds >= look.log_price_holds and look.launched >= look.first:
            return verdict.but(outcome="holds", open=False)
        if tally.known and abs(self._gap(tally.mean)) > self.limit:
            price = look.log_price_violated + log_shared(2)
            end = int(tally.mean < _SAME)
            growths = [(sum(outside[end], np.zeros(1)), self.weights[1 - end])]
        else:
            price = look.log_price_holds + log_shared(2)
            growths = [*zip(inside, self.weights, strict=True)]
        units = [units_to_decide(growth, weight, tally.n, price) for growth, weight in growths]
        if None in units:
            near = "too near the limit to tell; raise the limit or the sizes"
            return verdict.but(note=f"{verdict.note}; {near}" if verdict.note else near)
        # a slice meets only some of the groups: convert its units to dispatched groups
        most = max(u for u in units if u is not None)
        more = math.ceil((most - tally.n) * look.launched / tally.n)
        return verdict.but(more=max(more, look.first - look.launched, 1))

    @cached_property
    def weights(self) -> tuple[Array, Array]:
        """The weights of NEG and of POS: those of the upper end, for both ends and the interval."""
        high = self._x(self.limit)
        return weights_below(high, _SAME), weights_above(high, _SAME)

    def _x(self, gap: Any) -> Any:
        """x of one gap or of an array."""
        return (gap / self.span + 1) / 2

    def _gap(self, x: float) -> float:
        return (2 * x - 1) * self.span


def _note(rounds: list[Paired]) -> str:
    """The mean rewards of both kernels, and a warning if all rewards are equal."""
    n = sum(r.process.known for r in rounds)
    if not n:
        return ""
    least, most = min(r.least for r in rounds), max(r.most for r in rounds)
    if least == most:
        return f"every answer of both kernels has the reward {least:g}: is it the one you mean?"
    infer, train = (math.fsum(getattr(r, s) for r in rounds) / n for s in ("infer", "train"))
    return f"infer earns {infer:.4g} on average, train {train:.4g}"


CHAIN.add("reward_gap", RewardGap)


def rewards(view: View) -> Array:
    """The reward of each dispatched sequence, [S]; NaN if it was lost."""
    trace = view.pair.infer
    starts_S = np.cumsum(trace.length_S) - trace.length_S
    met_S = trace.length_S > 0
    reward_S = np.full(len(met_S), np.nan)
    reward_S[met_S] = trace.columns[REWARD][starts_S[met_S]]
    return reward_S
