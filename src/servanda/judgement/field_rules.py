# The rules of other projects, each in its own formula on one training step.
#
# Names, formulas, limits and the places where they stand are the projects' own, at the commits that
# tests/data/field_rules.json names; it has what their functions return for the same arrays.  The
# numbers are of all trained tokens of a step at once: a project that averages over micro-batches or
# ranks without weights logs a slightly different one.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from servanda.judgement.breakdown import RuleRow
from servanda.judgement.token_profile import Sums
from servanda.theory.stats.tails import FAR

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RuleSums:
    """What the rules need of a step; `+` adds its blocks.

    Args:
        tokens: sums over trained tokens with both logprobs; lost: trained tokens without.
        answers: sequences, those without a trained token included; drift, gap: over them, sums of
            the mean |log ratio| and of the mean log ratio, nats.
        worst_answer: the largest mean exp |log ratio| of a sequence; largest: the largest |log
            ratio| of a token, nats.
    """

    tokens: Sums = field(default_factory=Sums)
    lost: int = 0
    answers: int = 0
    drift: float = 0.0
    gap: float = 0.0
    worst_answer: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(
        cls, tokens: Sums, n_S: Ints, drift_S: Floats, gap_S: Floats, exp_S: Floats, largest: float
    ) -> RuleSums:
        """Of the trained tokens of some sequences.

        Args:
            tokens: sums over those with both logprobs; n_S: trained tokens of each sequence.
            drift_S, gap_S, exp_S: sums over those with both of |log ratio|, log ratio, nats, and
                exp |log ratio|; largest: |log ratio| of them.
        """
        some_S = np.maximum(n_S, 1)
        with np.errstate(over="ignore", invalid="ignore"):
            drift, gap = (float((of_S / some_S).sum()) for of_S in (drift_S, gap_S))
            worst = float((exp_S / some_S).max(initial=0.0))
        lost = int(n_S.sum()) - tokens.n
        return cls(tokens, lost, len(n_S), drift, gap, worst, largest)

    @classmethod
    def of_counts(cls, ratio_U: Floats, count_U: Floats, lost: int, mean_S: Floats) -> RuleSums:
        """Of log ratios in narrow bins; what needs more than these is not a number.

        Args:
            ratio_U, count_U: log ratio of each bin, nats, and its tokens; mean_S: mean |log ratio|
                of each sequence.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            size_U, weight_U = np.abs(ratio_U), np.exp(ratio_U)
            sums = (of_U @ count_U for of_U in (size_U, np.exp(size_U), weight_U - 1 - ratio_U))
            abs_sum, exp_abs, k3 = map(float, sums)
            k1 = -float(ratio_U @ count_U)
        tokens = Sums(
            n=int(count_U.sum()), abs_log_ratio=abs_sum, exp_abs=exp_abs, k1=k1, k3=k3,
            prob_diff=math.nan,
        )  # fmt: skip
        return cls(tokens, lost, len(mean_S), float(mean_S.sum()), math.nan, math.nan)

    def __add__(self, other: RuleSums) -> RuleSums:
        return RuleSums(
            self.tokens + other.tokens,
            *(getattr(self, n) + getattr(other, n) for n in ("lost", "answers", "drift", "gap")),
            *(
                float(np.maximum(getattr(self, n), getattr(other, n)))  # NaN stays
                for n in ("worst_answer", "largest")
            ),
        )


@dataclass(frozen=True)
class Rule:
    """One number of another project, and the limit above which the project calls it wrong.

    Args:
        what: the number in words; where: the limit's place in its repository.
    """

    project: str
    name: str
    limit: float
    what: str
    where: str
    _of: Callable[[RuleSums], float]

    def value(self, sums: RuleSums) -> float | None:
        """Its number; NaN where a trained token lacks a logprob, as in the project's own formula.

        None without a trained token.
        """
        if sums.lost or not sums.tokens.n:
            return math.nan if sums.lost else None
        with np.errstate(over="ignore", invalid="ignore"):
            return self._of(sums)

    @property
    def metric(self) -> str:
        """Its name among the metrics of a monitor.

        >>> RULES[0].metric
        'servanda/rules/nemo_rl/token_mult_prob_error'
        """
        project = self.project.lower().replace("-", "_")
        return f"servanda/rules/{project}/{self.name.replace(', ', '_')}"


def _mean(name: str) -> Callable[[RuleSums], float]:
    return lambda sums: getattr(sums.tokens, name) / sums.tokens.n


ONE_RESPONSE = "seq_logprob_error"  # the rule about the worst response, whatever the others are
RULES: tuple[Rule, ...] = (
    Rule(
        *("NeMo-RL", "token_mult_prob_error", 1.05, "mean of exp |Δ logp|"),
        *("docs/adding-new-models.md", _mean("exp_abs")),
    ),
    Rule("NeMo-RL", "gen_kl_error", 1e-3, "mean k3", "docs/guides/grpo.md", _mean("k3")),
    Rule(
        *("NeMo-RL", ONE_RESPONSE, 2.0, "largest mean of exp |Δ logp| of a response"),
        *("recipes for Nemotron", lambda sums: sums.worst_answer),
    ),
    Rule("prime-rl", "mismatch_kl", 0.015, "mean k3", "docs/development.md", _mean("k3")),
    Rule(
        *("miles", "log_probs, rollout_log_probs", 0.03, "difference of the means of responses"),
        *("log_utils.py, --ci-test", lambda sums: abs(sums.gap) / sums.answers),
    ),
    Rule(
        *("slime", "train_rollout_logprob_abs_diff", 0.1, "mean over responses of mean |Δ logp|"),
        *("model.py, --ci-test", lambda sums: sums.drift / sums.answers),
    ),
    Rule(
        *("verl", "rollout_corr/kl", 0.1, "|mean Δ logp|", "docs/algo/rollout_corr.md"),
        lambda sums: abs(sums.tokens.k1) / sums.tokens.n,
    ),
    Rule(
        *("verl", "rollout_probs_diff_mean", 0.01, "mean |Δ probability|", "docs/faq/faq.rst"),
        _mean("prob_diff"),
    ),
    Rule(
        *("SkyRL", "rollout_train_logprobs_abs_diff_mean", 0.0193, "mean |Δ logp|"),
        *("CI of the fully async example", _mean("abs_log_ratio")),
    ),
)


# what one token of size x, in nats, adds to the sum of a mean that has no bound
_ADDED: Mapping[str, Callable[[float], float]] = {
    "token_mult_prob_error": math.expm1,
    "gen_kl_error": lambda x: math.expm1(-x) + x,
    "mismatch_kl": lambda x: math.expm1(-x) + x,
}
_FLOATS = 700.0  # largest x whose exponential is a float


def rows(steps: Iterable[tuple[int, RuleSums]]) -> tuple[RuleRow, ...]:
    """Each rule over the steps of a run, in the order of RULES."""
    known = list(steps)
    return tuple(_row(rule, known) for rule in RULES)


def _row(rule: Rule, steps: Sequence[tuple[int, RuleSums]]) -> RuleRow:
    values = [(step, v, sums) for step, sums in steps if (v := rule.value(sums)) is not None]
    numbers = [of for of in values if not math.isnan(of[1])]
    found = RuleRow(
        *(rule.project, rule.name, rule.what, rule.limit, len(steps)), len(values) - len(numbers)
    )
    if not numbers:
        return found
    red = [step for step, v, _ in numbers if v > rule.limit]
    worst, value, sums = max(numbers, key=lambda of: of[1])
    return replace(
        found,
        red=len(red),
        first=red[0] if red else None,
        worst=worst,
        value=value,
        largest=sums.largest,
        lone=bool(red) and _is_lone(rule, value, sums),
    )


def _is_lone(rule: Rule, value: float, sums: RuleSums) -> bool:
    """Whether a rule would be within its limit without one token, or one response, of the step."""
    if rule.name == ONE_RESPONSE:
        return True
    if sums.largest < FAR or rule.name not in _ADDED:
        return False
    added = _ADDED[rule.name](min(sums.largest, _FLOATS)) / sums.tokens.n
    return value - added <= rule.limit
