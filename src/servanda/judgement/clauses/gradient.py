# Clauses about policy gradients: the share of the clip range that the gap between the kernels uses,
# the bias that the token weighting leaves, and the train mass on tokens that infer can hardly ever
# sample, which no weighting up to a cap corrects.
#
# The weight of a token's gap depends on the divisor of the trainer's loss.  If that is the
# response's own length, or the number of responses, the unit is the response: its token t counts
# 1/t, or 1.

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from servanda.contract.clause import Clause
from servanda.contract.model import Contract
from servanda.contract.objective import GroupAdvantage, Weighting
from servanda.judgement.clauses.base import Array, Cell, Reads, View, limit_of
from servanda.judgement.clauses.chain_metrics import (
    CHAIN,
    ChainCertificate,
    ChainMetric,
    Lack,
    between,
)
from servanda.judgement.clauses.statistical import (
    BySequence,
    Certificate,
    Feed,
    Noise,
    Units,
    sequence_units,
    share_beyond,
)
from servanda.theory.bounds.gradient import (
    LOGIT_SCORE_NORM,
    Loss,
    group_advantage_bound,
    loss_weights,
    policy_gradient_bias,
    ratio_budget,
)
from servanda.theory.bounds.importance_weights import PSI, Psi, naive, weight_gap
from servanda.theory.bounds.sequence import shortfall
from servanda.theory.bounds.theorem import Standing


@dataclass(frozen=True)
class SequenceCertificate(BySequence, ChainCertificate):
    """A metric of the chain with one value per sequence."""

    def units(self, cell: Cell, view: View) -> Units:
        return sequence_units(cell, view, self.feed.x(self.values(cell, view)))

    def noise(self, cell: Cell, view: View) -> Noise:
        """(sum of x, sequences) of a peer: on the slice, and on the whole."""
        x_S = self.feed.x(self.values(cell, view))
        whole_S = ~np.isnan(x_S)
        parts = (x_S[whole_S & view.may_meet[cell.cut]], x_S[whole_S])
        inside, whole = ((math.fsum(x.tolist()), len(x)) for x in parts)
        return inside, whole


@CHAIN.register("reward_drift")
@dataclass(frozen=True)
class RewardDrift(SequenceCertificate):
    """(R_max - R_min) TV(P, Q): the largest drift of any reward in the range."""

    meaning: ClassVar[str] = (
        "the largest possible difference of the expected reward of whole responses between the two "
        "kernels, for any reward within its range"
    )
    example: ClassVar[str] = "{id: reward, metric: reward_drift, at_most: 0.05, slices: [all]}"
    assumes: ClassVar[tuple[str, ...]] = ("reward_range", "same_reward")

    @classmethod
    def under(cls, contract: Contract, /) -> type[ChainMetric]:
        return RewardDriftOfTurns if has_turns(contract) else cls

    @classmethod
    def undeclared(cls, contract: Contract, /) -> Iterator[Lack]:
        if contract.reward is None:
            yield Lack(
                "reward_drift is in units of the reward, and no range is declared",
                "declare reward: {range: [0, 1]}",
            )

    @classmethod
    def of(cls, contract: Contract, clause: Clause) -> Certificate:
        assert contract.reward is not None  # lint rejects it
        low, high = contract.reward.range
        return cls(between(limit_of(clause), (0.0, 1.0), high - low))

    def values(self, cell: Cell, view: View) -> Array:
        """(R_max - R_min)(1 - W)^+ of each sequence, [S]; W is the product of its weights."""
        log_weight_S = view.over_sequences(view.log_ratio())
        return shortfall(log_weight_S) * self.feed.scale

    def of_rounding(self, error_N: Array, length_S: Array) -> float:
        """By a normal approximation of the sum of errors: 8 % too low for one token, 1 % for 8."""
        sigmas = [float(error_N[-1]) * math.sqrt(n / 3) for n in length_S.tolist()]
        # E (1 - exp S)^+ of a normal S with mean 0
        drifts = [0.5 - 0.5 * math.exp(s**2 / 2) * math.erfc(s / math.sqrt(2)) for s in sigmas]
        return self.feed.scale * float(np.mean(drifts)) if drifts else 0.0


@dataclass(frozen=True)
class RewardDriftOfTurns(RewardDrift):
    """That of conversations, in which tools or users may answer between the sampled tokens."""

    meaning: ClassVar[str] = RewardDrift.meaning
    example: ClassVar[str] = RewardDrift.example
    assumes: ClassVar[tuple[str, ...]] = (*RewardDrift.assumes, "same_environment")


def has_turns(contract: Contract) -> bool:
    """Whether responses may have several turns: a trainer's may, Servanda's own have one."""
    return any(w.source == "trainer" for w in contract.all_workloads.values())


_CAP = 10.0  # of the weights of support_mass
_SUMS = {
    "token_mean": "averaged over the tokens of the batch (loss: token_mean)",
    "sequence_sum": "summed over the tokens of an answer (loss: sequence_sum)",
    "sequence_mean": "summed over the tokens of an answer, the t-th counting 1/t, since the "
    "answer's own length divides its loss (loss: sequence_mean)",
}


def psi_of(contract: Contract) -> Psi:
    """The declared weighting; naive if the contract has no valid one."""
    declared = contract.gradient.weighting if contract.gradient else None
    if not isinstance(declared, Weighting):
        return PSI[declared]() if declared else naive()
    if not declared.sound:
        return naive()
    ((name, value),) = declared.given.items()
    return PSI[name](value)


def loss_of(contract: Contract) -> Loss:
    """The divisor of a token's loss."""
    return contract.gradient.loss if contract.gradient else "token_mean"


def width_of(contract: Contract, clause: Clause) -> int:
    """Most new tokens of a response of the clause's workload."""
    workload = contract.all_workloads.get(contract.workload_of(clause))
    return workload.sampling.max_new_tokens if workload else 1  # lint reports missing parts


def advantage_bound(contract: Contract) -> float | None:
    """The declared largest |advantage|; (n-1)/sqrt(n) or sqrt(n-1) for a group."""
    declared = contract.gradient.advantage if contract.gradient else None
    if isinstance(declared, GroupAdvantage):
        return group_advantage_bound(declared.group_size, declared.std)
    return declared


def score_norm_of(contract: Contract) -> float | None:
    """The declared largest norm of grad log p."""
    declared = contract.gradient.score_norm if contract.gradient else None
    return LOGIT_SCORE_NORM if declared == "logit_space" else declared


def bias_assumes(loss: Loss) -> tuple[str, ...]:
    """Assumptions of the gradient bias beyond the weight gap.

    A response's own length is known with the response; the divisor of a whole batch is not.
    """
    always = ("advantage", "score_norm", "token_level")
    return always if loss == "sequence_mean" else (*always, "constant_divisor")


@CHAIN.register("ratio_budget")
@dataclass(frozen=True)
class RatioBudget(ChainCertificate):
    """|log w| over log(1 + high) where w > 1, and over -log(1 - low) where w < 1."""

    clip_range: tuple[float, float] = (0.2, 0.2)

    meaning: ClassVar[str] = (
        "the share of the PPO clip range that the gap between the kernels uses up before the "
        "policy has moved (1: all of it, on the side of the token's ratio)"
    )
    example: ClassVar[str] = (
        "{id: budget, metric: ratio_budget, aggregate: p99, at_most: 0.5, slices: [all]}"
    )
    takes: ClassVar[frozenset[str]] = frozenset({"aggregate", "clip"})
    assumes: ClassVar[tuple[str, ...]] = ("one_ratio",)

    @classmethod
    def undeclared(cls, contract: Contract, /) -> Iterator[Lack]:
        gradient = contract.gradient
        if gradient is None or gradient.clip_range is None:
            message = "ratio_budget is a share of the clip range, and none is declared"
            yield Lack(message, "declare gradient: {clip_range: [0.2, 0.28], ratio: bypass}")
        elif gradient.ratio == "decoupled":
            message = "in decoupled mode the clip range bounds the policy's own update only: the "
            yield Lack(
                f"{message}gap between the kernels uses none of it",
                "promise weight_gap of the weighting that corrects it, or declare ratio: bypass "
                "if the clipped ratio is new policy over infer",
            )
        elif gradient.ratio is None:
            message = "ratio_budget needs to know which ratio is clipped, and none is declared"
            hint = "declare gradient: {ratio: bypass} if it is new policy over infer"
            yield Lack(message, hint)

    @classmethod
    def amiss(cls, clause: Clause, /) -> Iterator[Lack]:
        if clause.aggregate is None:
            message = f"clause {clause.id!r} needs an aggregate"
            yield Lack(message, "add aggregate: p99, or mean with clip: 1")
        elif clause.aggregate == "max":
            message = "a sample cannot certify a maximum: the next token may exceed it"
            yield Lack(message, "write p99.9", "aggregate")
        elif clause.percentile is not None and clause.clip is not None:
            message = f"clip bounds a mean; {clause.aggregate} does not need it"
            yield Lack(message, "remove clip", "clip")
        elif clause.percentile is None and clause.clip is None:
            message = "the mean of ratio_budget has no bound, so no sample can certify it"
            yield Lack(message, "add clip: 1, or promise aggregate: p99", "aggregate")
        elif limit_of(clause) >= 1:
            message = f"a share of {limit_of(clause):g} leaves the policy's own update nothing"
            yield Lack(message, "write a share below 1, such as 0.5", "at_most")

    @classmethod
    def of(cls, contract: Contract, clause: Clause) -> Certificate:
        assert contract.gradient is not None  # lint rejects it
        assert contract.gradient.clip_range is not None
        limit, clip = limit_of(clause), clause.clip
        if clip is not None:
            feed = Feed(limit / clip, clip)
        else:
            feed = Feed(share_beyond(clause), threshold=limit)
        return cls(feed, contract.gradient.clip_range)

    def values(self, cell: Cell, view: View) -> Array:
        """The used share of its side by each token's ratio, [N]."""
        log_ratio_N = view.log_ratio()
        known_N = ~np.isnan(log_ratio_N)
        used_N = np.full(len(log_ratio_N), np.nan)
        used_N[known_N] = self._used(log_ratio_N[known_N])
        return used_N

    def _used(self, log_ratio_N: Array) -> Array:
        budget = ratio_budget(np.abs(log_ratio_N), *self.clip_range)
        return np.where(log_ratio_N > 0, budget.used_up, budget.used_down)

    def of_rounding(self, error_N: Array, length_S: Array) -> float:
        used_N = self._used(error_N)
        return float(used_N.max() if self.feed.threshold is not None else used_N.mean())


@dataclass(frozen=True)
class Gap(ChainCertificate):
    """D_psi = sum |p - q psi(w)| of each token, times a factor.

    Args:
        factor: metric units per unit of gap.
    """

    psi: Psi = naive()  # noqa: RUF009 - frozen
    loss: Loss = "token_mean"
    factor: float = 1.0
    reads: ClassVar[Reads] = "ratio"

    @classmethod
    def undeclared(cls, contract: Contract, /) -> Iterator[Lack]:
        if psi_of(contract).name == "is":
            yield Lack(
                "importance weights have no largest value, so no sample can certify their gap",
                "declare gradient: {weighting: {tis: 2.0}}, or promise support_mass: where infer "
                "can draw whatever train can, nothing is left",
            )

    @classmethod
    def of(cls, contract: Contract, clause: Clause) -> Gap:
        psi, loss, factor = psi_of(contract), loss_of(contract), cls.factor_of(contract)
        # a span contains 0, so that of the longest response contains all others
        tokens = width_of(contract, clause) if cls.each == "sequence" else 1
        most = factor * float(loss_weights(loss, [tokens]).sum())
        return cls(between(limit_of(clause), psi.span, most), psi, loss, factor)

    @classmethod
    def factor_of(cls, _: Contract, /) -> float:
        return 1.0

    @property
    def phrase(self) -> str:
        return f"{self.meaning}, {_SUMS[self.loss]}"

    def of_rounding(self, error_N: Array, length_S: Array) -> float:
        # errors are symmetric, and weights above 1 may give a negative value
        return self.factor * max(float(weight_gap(error_N, self.psi).mean()), 0.0)

    def values(self, cell: Cell, view: View) -> Array:
        return self.factor * self.gap(view)

    def gap(self, view: View) -> Array:
        """g(w) of each token, [N]; for a kernel with itself |psi - w|, with the same mean.

        For a kernel with itself E w = 1, and its noise would only blur a floor near 0.
        """
        if not view.itself:
            return weight_gap(view.log_ratio(), self.psi)
        with np.errstate(over="ignore"):
            w_N = np.exp(view.log_ratio())
        return np.abs(self.psi.weight(w_N) - w_N)


class BiasGap(Gap):
    """Advantage x score norm x D_psi: see bounds.policy_gradient_bias."""

    standing: ClassVar[Standing] = "conditional bound"

    @classmethod
    def undeclared(cls, contract: Contract, /) -> Iterator[Lack]:
        if advantage_bound(contract) is None:
            yield Lack(
                "policy_gradient_bias is proportional to the largest advantage, and none is "
                "declared",
                "declare gradient: {advantage: {group_size: 8}}, or the number that advantages "
                "are clipped to",
            )
        if score_norm_of(contract) is None:
            yield Lack(
                "policy_gradient_bias is proportional to the largest score norm, and none is "
                "declared",
                "declare gradient: {score_norm: logit_space} (sqrt 2, of the gradient in logits), "
                "or promise weight_gap, which needs none",
            )
        yield from super().undeclared(contract)

    @classmethod
    def factor_of(cls, contract: Contract, /) -> float:
        advantage, score_norm = advantage_bound(contract), score_norm_of(contract)
        assert advantage is not None  # lint refuses it
        assert score_norm is not None
        return float(policy_gradient_bias(1.0, advantage, score_norm))


class AnswerGap(SequenceCertificate, Gap):
    """The gaps of whole responses: the sum over tokens, by the divisor of the loss."""

    metric_unit: ClassVar[str] = "per answer"

    def not_in_a_step(self, clause: Clause) -> str:
        return "a step is judged by token, and this contract's loss is defined on whole responses"

    def of_rounding(self, error_N: Array, length_S: Array) -> float:
        token, n = Gap.of_rounding(self, error_N, length_S), len(length_S)
        return token * float(loss_weights(self.loss, length_S).sum()) / n if n else token

    def values(self, cell: Cell, view: View) -> Array:
        """[S]; NaN for a lost response or one with a token without a logprob."""
        length_S = view.pair.infer.length_S
        weight_N = loss_weights(self.loss, length_S[length_S > 0])
        return view.over_sequences(weight_N * self.factor * self.gap(view))


@CHAIN.register("weight_gap")
@dataclass(frozen=True)
class WeightGap(Gap):
    """The mean over tokens of the uncorrected gap."""

    meaning: ClassVar[str] = (
        "the share of a policy gradient that the declared weighting of tokens leaves uncorrected "
        "(0 to 2 per token; twice the total variation without a weighting)"
    )
    example: ClassVar[str] = "{id: weights, metric: weight_gap, at_most: 0.02, slices: [all]}"

    @classmethod
    def under(cls, contract: Contract, /) -> type[ChainMetric]:
        return cls if loss_of(contract) == "token_mean" else WeightGapOfAnswers


@dataclass(frozen=True)
class WeightGapOfAnswers(AnswerGap):
    """The uncorrected gap of a response."""

    meaning: ClassVar[str] = WeightGap.meaning
    example: ClassVar[str] = WeightGap.example


@CHAIN.register("policy_gradient_bias")
@dataclass(frozen=True)
class PolicyGradientBias(BiasGap):
    """The bias of a gradient whose loss is averaged over the tokens of a batch."""

    assumes: ClassVar[tuple[str, ...]] = bias_assumes("token_mean")
    meaning: ClassVar[str] = (
        "the largest bias of the token-level policy gradient, because the other kernel sampled the "
        "tokens: the declared advantage times the declared score norm times the weight gap, with "
        "contexts as the infer kernel samples them (it does not bound the gradient of the "
        "expected reward)"
    )
    example: ClassVar[str] = "{id: bias, metric: policy_gradient_bias, at_most: 0.1, slices: [all]}"

    @classmethod
    def under(cls, contract: Contract, /) -> type[ChainMetric]:
        return {
            "token_mean": cls,
            "sequence_sum": BiasOfSums,
            "sequence_mean": BiasOfAnswers,
        }[loss_of(contract)]


@dataclass(frozen=True)
class BiasOfAnswers(AnswerGap, BiasGap):
    """The bias of a gradient that averages over responses, each divided by its own length."""

    assumes: ClassVar[tuple[str, ...]] = bias_assumes("sequence_mean")
    meaning: ClassVar[str] = PolicyGradientBias.meaning
    example: ClassVar[str] = PolicyGradientBias.example


@dataclass(frozen=True)
class BiasOfSums(BiasOfAnswers):
    """The bias of a gradient that sums over the tokens of a response."""

    assumes: ClassVar[tuple[str, ...]] = bias_assumes("sequence_sum")


@CHAIN.register("support_mass")
@dataclass(frozen=True)
class SupportMass(ChainCertificate):
    """U_C = 1 - E_infer min(w, C) = sum (p - C q)^+: see bounds.missing_mass."""

    cap: float = _CAP

    meaning: ClassVar[str] = (
        "the train kernel's mass on tokens that infer cannot sample, plus its mass beyond `clip` "
        "(10) times infer's on the others: the part that no weight up to `clip` can correct"
    )
    example: ClassVar[str] = "{id: support, metric: support_mass, at_most: 0.01, slices: [all]}"
    takes: ClassVar[frozenset[str]] = frozenset({"clip"})

    @classmethod
    def amiss(cls, clause: Clause, /) -> Iterator[Lack]:
        if clause.clip is not None and clause.clip < 1:
            message = f"clip caps the weights of support_mass: at {clause.clip:g} even identical "
            yield Lack(
                f"{message}kernels would lack {1 - clause.clip:g}",
                "write clip: 10, or leave it out; clip: 1 gives the total variation",
                "clip",
            )

    @classmethod
    def of(cls, contract: Contract, clause: Clause) -> Certificate:  # noqa: ARG003 - the protocol's
        cap = _CAP if clause.clip is None else clause.clip
        return cls(between(limit_of(clause), (1.0 - cap, 1.0)), cap)

    def values(self, cell: Cell, view: View) -> Array:
        """1 - min(w, C) of each token, [N]; of a kernel with itself (w - C)^+ (see `Gap.gap`)."""
        if view.itself:
            with np.errstate(over="ignore"):
                return np.maximum(np.exp(view.log_ratio()) - self.cap, 0.0)
        return -np.expm1(np.minimum(view.log_ratio(), np.log(self.cap)))
