# Threshold checks for the gap between trainer and engine, as their projects define them.
#
# A check reads the statistics (statistics.py) of one step after another, and fires on some.
#
# One sign everywhere: log_ratio = logp_train - logp_infer, "d" for short.
# Axes: B sequences, T tokens.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.experiment.statistics import of_step
from servanda.errors import EvidenceError
from servanda.registry import Registry

TREND_STEPS = 5  # at each end, as `servanda check DUMP` compares them


def measure(
    logp_train_BT: ArrayLike, logp_infer_BT: ArrayLike, mask_BT: ArrayLike
) -> dict[str, float]:
    """Every statistic of one step, by its name.

    Args:
        logp_train_BT, logp_infer_BT: [B, T], nats; mask_BT: [B, T], true where trained.

    Raises:
        EvidenceError: shapes differ, no token is trained, or a trained one lacks a finite
            logprob; the projects' own code would skip it, or read it as agreement.

    >>> found = measure([[0.0, -1.0]], [[-0.5, -1.0]], [[1, 1]])
    >>> found["abs_d_mean"], found["abs_d_max"]
    (0.25, 0.5)
    """
    mask = np.asarray(mask_BT).astype(bool)
    train, infer = (np.asarray(a, dtype=np.float64) for a in (logp_train_BT, logp_infer_BT))
    if not train.shape == infer.shape == mask.shape or mask.ndim != 2:
        raise EvidenceError(
            f"logp_train is {train.shape}, logp_infer {infer.shape} and the mask {mask.shape}",
            hint="each is [sequences, tokens]",
        )
    if not mask.any():
        raise EvidenceError("no token of this step is trained", hint="check the mask")
    lost = int((~np.isfinite(train) | ~np.isfinite(infer))[mask].sum())
    if lost:
        raise EvidenceError(
            f"{lost:,} of {int(mask.sum()):,} trained tokens have no finite logprob",
            hint="no check of another project counts missing tokens; leave such steps out, by name",
        )
    length_B = mask.sum(axis=1)
    return of_step(train[mask], infer[mask], length_B[length_B > 0])


@dataclass(frozen=True)
class Bar:
    """A statistic and its thresholds: it breaks above `at_most` and below `at_least`."""

    reads: str
    at_most: float = math.inf
    at_least: float = -math.inf

    def breaks(self, value: float) -> bool:
        return not self.at_least <= value <= self.at_most


@dataclass(frozen=True)
class Guard:
    """Some bars, one of which is enough, on so many steps in a row.

    Args:
        who: the project; rule: formula and threshold in short; source: the metric's name there,
            its place, and the consequence when it fires, in Markdown.
    """

    who: str
    rule: str
    source: str
    bars: tuple[Bar, ...]
    in_a_row: int = 1

    def fires(self, steps: Sequence[Mapping[str, float]]) -> list[int]:
        """Indices of the steps on which it fires.

        Args:
            steps: of each what measure() found, in order.

        Raises:
            EvidenceError: a step lacks a statistic.

        >>> guard = Guard("", "", "", (Bar("abs_d_mean", at_most=0.1),), in_a_row=2)
        >>> guard.fires([{"abs_d_mean": x} for x in (0.2, 0.0, 0.2, 0.3, 0.4)])
        [3, 4]
        """
        found, row = [], 0
        for i, step in enumerate(steps):
            for bar in self.bars:
                if math.isnan(step.get(bar.reads, math.nan)):
                    raise EvidenceError(f"step {i} has no {bar.reads}, which {self.who} reads")
            row = row + 1 if any(bar.breaks(step[bar.reads]) for bar in self.bars) else 0
            if row >= self.in_a_row:
                found.append(i)
        return found


def trend_fires(
    means: Sequence[float], *, factor: float = 2.0, ends: int = TREND_STEPS
) -> list[int]:
    """Indices at which mean |d| of the last steps exceeds `factor` times that of the first.

    Args:
        means: mean |d| of each step, nats.
        ends: steps at each end; the two do not overlap.

    >>> trend_fires([1.0, 1.0, 1.0, 5.0], ends=2)
    [3]
    """
    if len(means) < 2 * ends:
        return []
    first = math.fsum(means[:ends])
    last = ((i, math.fsum(means[i + 1 - ends : i + 1])) for i in range(2 * ends - 1, len(means)))
    return [i for i, total in last if total > factor * first]


FIELD: Registry[Guard] = Registry("check of another project")


def _add(name: str, who: str, rule: str, source: str, *bars: Bar, in_a_row: int = 1) -> None:
    FIELD.add(name, Guard(who, rule, source, bars, in_a_row))


_add(
    "slime",
    "slime",
    "mean |d| > 0.1",
    "an assertion of `--ci-test`; the mean over sequences of their means",
    Bar("abs_d_mean_by_sequence", at_most=0.1),
)
_add(
    "skyrl",
    "SkyRL",
    "mean |d| > 0.09",
    "an assertion of its CI runs on `rollout_train_logprobs_abs_diff_mean`",
    Bar("abs_d_mean", at_most=0.09),
)
_add(
    "miles",
    "miles",
    "mean |d| > 0.03",
    "an assertion of `--ci-test`; the mean over sequences of their means",
    Bar("abs_d_mean_by_sequence", at_most=0.03),
)
_add(
    "nemo-tme",
    "NeMo-RL",
    "mean exp |d| > 1.05",
    "`token_mult_prob_error`: its guide, and assertions of its test suites",
    Bar("tme", at_most=1.05),
)
_add(
    "nemo-kl",
    "NeMo-RL guide",
    "mean k3 > 0.001",
    "`gen_kl_error`: docs/guides/grpo.md",
    Bar("k3", at_most=1e-3),
)
_add(
    "nemo-sequence",
    "NeMo-RL recipes",
    "a sequence's mean exp |d| > 2",
    "`seq_logprob_error_threshold`, which masks the sequence; off by default",
    Bar("max_seq_mult_prob_error", at_most=2.0),
)
_add(
    "prime-rl",
    "prime-rl",
    "mean k3 > 0.015",
    "`mismatch_kl`: the limit for a pull request with a new model, docs/development.md",
    Bar("k3", at_most=0.015),
)
_add(
    "verl-bad",
    "verl FAQ",
    "mean |p - q| > 0.01",
    "`rollout_probs_diff_mean`: a precision issue above this value",
    Bar("probs_diff_mean", at_most=0.01),
)
_add(
    "verl-normal",
    "verl FAQ",
    "mean |p - q| > 0.005",
    "`rollout_probs_diff_mean`: normal below this value",
    Bar("probs_diff_mean", at_most=0.005),
)
_add(
    "verl-health",
    "verl health check",
    "weights, |kl| > 0.1 or chi2 > 1",
    "`check_rollout_correction_health`, an example of docs/algo/rollout_corr.md: token weights "
    "truncated at 2 with mean < 0.5 or > 2, std > 1 or ESS < 0.3; |`kl`| > 0.1; `chi2_token` > 1",
    Bar("is_mean", at_most=2.0, at_least=0.5),
    Bar("ess", at_least=0.3),
    Bar("is_std", at_most=1.0),
    Bar("k1", at_most=0.1, at_least=-0.1),
    Bar("chi2_token", at_most=1.0),
)
_add(
    "tinker",
    "Tinker",
    "mean -d > 0.01",
    "`kl_sample_train_v1`: training is stable below this value, says its documentation",
    Bar("k1", at_most=0.01),
)
_add(
    "drift-guard",
    "a user of miles",
    "mean |d| > 0.75, twice",
    "a check of their own, which stops the run after two such steps in a row",
    Bar("abs_d_mean_by_sequence", at_most=0.75),
    in_a_row=2,
)
