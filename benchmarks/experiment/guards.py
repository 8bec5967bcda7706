# The guards that people have for the gap between trainer and engine, as their projects define them.
#
# Two layers.  STATISTICS are pure functions of one step's arrays: logp_train_BT, logp_infer_BT
# (nats, float64) and mask_BT (bool).  A Guard reads one or more of them, one mapping a step, and
# says on which steps it rings.  What a project calls by another name or reduces in another order
# (means over tokens, or over sequences first) is written out here as that project does it.
#
# One sign everywhere: log_ratio = logp_train - logp_infer, "d" for short.
# Axes: B sequences, T tokens, N the trained tokens of all sequences.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.errors import EvidenceError
from servanda.registry import Registry

Floats = NDArray[np.float64]

TREND_STEPS = 5  # at each end, as `servanda check DUMP` compares them


@dataclass(frozen=True)
class Tokens:
    """One step's trained tokens.

    Args:
        logp_train_BT, logp_infer_BT: nats, 0 where not trained; mask_BT: trained.
    """

    logp_train_BT: Floats
    logp_infer_BT: Floats
    mask_BT: NDArray[np.bool_]

    @property
    def d_BT(self) -> Floats:
        return self.logp_train_BT - self.logp_infer_BT

    @property
    def d_N(self) -> Floats:
        return self.d_BT[self.mask_BT]

    def mean_of_sequences(self, x_BT: Floats) -> Floats:
        """Mean of x over each sequence's trained tokens [B], of sequences that have any."""
        n_B = self.mask_BT.sum(axis=1)
        sums_B = np.where(self.mask_BT, x_BT, 0.0).sum(axis=1)
        return sums_B[n_B > 0] / n_B[n_B > 0]


STATISTICS: Registry[Callable[[Tokens], float]] = Registry("statistic")


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
            hint="no guard of the field counts what is missing; leave such steps out, by name",
        )
    tokens = Tokens(np.where(mask, train, 0.0), np.where(mask, infer, 0.0), mask)
    # overflow to inf is a value above every limit, and is what the projects' float32 shows
    with np.errstate(over="ignore"):
        return {name: STATISTICS[name](tokens) for name in STATISTICS}


@STATISTICS.register("abs_d_mean")
def abs_d_mean(tokens: Tokens) -> float:
    """Mean |d| over tokens: SkyRL's rollout_train_logprobs_abs_diff_mean, TRL's difference."""
    return float(np.abs(tokens.d_N).mean())


@STATISTICS.register("abs_d_mean_by_sequence")
def abs_d_mean_by_sequence(tokens: Tokens) -> float:
    """Mean over sequences of their mean |d|: slime's and miles' train_rollout_logprob_abs_diff."""
    return float(tokens.mean_of_sequences(np.abs(tokens.d_BT)).mean())


@STATISTICS.register("abs_d_max")
def abs_d_max(tokens: Tokens) -> float:
    """Largest |d|: TRL's sampling_logp_difference/max."""
    return float(np.abs(tokens.d_N).max())


@STATISTICS.register("tme")
def tme(tokens: Tokens) -> float:
    """Mean exp |d| over tokens: NeMo-RL's token_mult_prob_error."""
    return float(np.exp(np.abs(tokens.d_N)).mean())


@STATISTICS.register("max_seq_mult_prob_error")
def max_seq_mult_prob_error(tokens: Tokens) -> float:
    """Largest over sequences of the mean exp |d|: NeMo-RL's max_seq_mult_prob_error."""
    return float(tokens.mean_of_sequences(np.exp(np.abs(tokens.d_BT))).max())


@STATISTICS.register("k3")
def k3(tokens: Tokens) -> float:
    """Mean exp(d) - d - 1: verl's k3_kl, prime-rl's mismatch_kl, NeMo-RL's gen_kl_error (k3)."""
    return float((np.expm1(tokens.d_N) - tokens.d_N).mean())


@STATISTICS.register("k1")
def k1(tokens: Tokens) -> float:
    """Mean -d: verl's rollout_corr/kl, Tinker's kl_sample_train_v1."""
    return float(-tokens.d_N.mean())


@STATISTICS.register("probs_diff_mean")
def probs_diff_mean(tokens: Tokens) -> float:
    """Mean |p_train - p_infer|: verl's rollout_probs_diff_mean."""
    p, q = (np.exp(a[tokens.mask_BT]) for a in (tokens.logp_train_BT, tokens.logp_infer_BT))
    return float(np.abs(p - q).mean())


_VERL_BOUND = 20.0  # verl clamps log ratios to it
_VERL_CAP = 2.0  # its preset decoupled_token_is


def _verl_weights(tokens: Tokens) -> Floats:
    """Token weights of verl's preset decoupled_token_is, cut at 2 [N]."""
    return np.minimum(np.exp(np.clip(tokens.d_N, -_VERL_BOUND, _VERL_BOUND)), _VERL_CAP)


@STATISTICS.register("is_mean")
def is_mean(tokens: Tokens) -> float:
    """verl's rollout_is_mean: of the weights after the cut."""
    return float(_verl_weights(tokens).mean())


@STATISTICS.register("is_std")
def is_std(tokens: Tokens) -> float:
    """verl's rollout_is_std: of the weights after the cut."""
    return float(_verl_weights(tokens).std())


@STATISTICS.register("ess")
def ess(tokens: Tokens) -> float:
    """verl's rollout_is_eff_sample_size: (mean w)^2 / mean w^2 after the cut."""
    w_N = _verl_weights(tokens)
    return float(w_N.mean() ** 2 / (w_N**2).mean())


@STATISTICS.register("chi2_token")
def chi2_token(tokens: Tokens) -> float:
    """verl's chi2_token: mean w^2 - 1; it can be negative, for tokens came from the engine."""
    return float(np.exp(2 * np.clip(tokens.d_N, -_VERL_BOUND, _VERL_BOUND)).mean() - 1)


@STATISTICS.register("seq_masked_share")
def seq_masked_share(tokens: Tokens) -> float:
    """Share of sequences that TRL's sequence_mask drops: product of their weights above 3.

    TRL logs no such share and gates on nothing.
    """
    trained_B = tokens.mask_BT.any(axis=1)
    return float((tokens.d_BT.sum(axis=1)[trained_B] > math.log(3)).mean())


@dataclass(frozen=True)
class Bar:
    """A statistic and where it is too much (above `at_most`) or too little (below `at_least`)."""

    reads: str
    at_most: float = math.inf
    at_least: float = -math.inf

    def breaks(self, value: float) -> bool:
        return not self.at_least <= value <= self.at_most


@dataclass(frozen=True)
class Guard:
    """Some bars, one of which is enough, on so many steps in a row.

    Args:
        who: says so; rule: formula and threshold in short; source: the name there, where it
            stands, and what they do when it rings, in Markdown.
    """

    who: str
    rule: str
    source: str
    bars: tuple[Bar, ...]
    in_a_row: int = 1

    def rings(self, steps: Sequence[Mapping[str, float]]) -> list[int]:
        """Indices of the steps on which it rings.

        Args:
            steps: of each what measure() found, in order.

        Raises:
            EvidenceError: a step lacks a statistic.

        >>> guard = Guard("", "", "", (Bar("abs_d_mean", at_most=0.1),), in_a_row=2)
        >>> guard.rings([{"abs_d_mean": x} for x in (0.2, 0.0, 0.2, 0.3, 0.4)])
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


def trend_rings(
    means: Sequence[float], *, factor: float = 2.0, ends: int = TREND_STEPS
) -> list[int]:
    """Indices at which mean |d| of the last steps is beyond `factor` times that of the first.

    Args:
        means: mean |d| of each step, nats.
        ends: steps at each end; the two do not overlap.

    >>> trend_rings([1.0, 1.0, 1.0, 5.0], ends=2)
    [3]
    """
    if len(means) < 2 * ends:
        return []
    first = math.fsum(means[:ends])
    last = ((i, math.fsum(means[i + 1 - ends : i + 1])) for i in range(2 * ends - 1, len(means)))
    return [i for i, total in last if total > factor * first]


FIELD: Registry[Guard] = Registry("guard of the field")


def _add(name: str, who: str, rule: str, source: str, *bars: Bar, in_a_row: int = 1) -> None:
    FIELD.add(name, Guard(who, rule, source, bars, in_a_row))


_add(
    "slime",
    "slime",
    "mean |d| > 0.1",
    "an assertion of `--ci-test`; over sequences of their means",
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
    "an assertion of `--ci-test`; over sequences of their means",
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
    "`mismatch_kl`: what a pull request with a new model has to show, docs/development.md",
    Bar("k3", at_most=0.015),
)
_add(
    "verl-bad",
    "verl FAQ",
    "mean |p - q| > 0.01",
    "`rollout_probs_diff_mean`: above it, a precision issue",
    Bar("probs_diff_mean", at_most=0.01),
)
_add(
    "verl-normal",
    "verl FAQ",
    "mean |p - q| > 0.005",
    "`rollout_probs_diff_mean`: below it, normal",
    Bar("probs_diff_mean", at_most=0.005),
)
_add(
    "verl-health",
    "verl health check",
    "weights, |kl| > 0.1 or chi2 > 1",
    "`check_rollout_correction_health`, an example of docs/algo/rollout_corr.md: token weights cut "
    "at 2 with mean < 0.5 or > 2, std > 1 or ESS < 0.3; |`kl`| > 0.1; `chi2_token` > 1",
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
    "`kl_sample_train_v1`: training is stable below, say its documents",
    Bar("k1", at_most=0.01),
)
_add(
    "drift-guard",
    "a user of miles",
    "mean |d| > 0.75, twice",
    "a guard of their own, on two steps in a row, that stops the run",
    Bar("abs_d_mean_by_sequence", at_most=0.75),
    in_a_row=2,
)
