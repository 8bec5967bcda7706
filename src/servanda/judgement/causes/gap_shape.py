# Signatures: what the numbers of a gap look like, whatever its size.
#
# A rate is the gap of some tokens over that of all tokens of about the same logprob, so that hard
# tokens do not count as a place.
#
# Axes: K tokens, Q sequences, B bins.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from servanda.judgement.causes.token_table import Array, TokenTable

# Transform: whether a sampler setting that only one side applies explains the difference.
#
# Two settings have a signature that kernel noise lacks.  A cut (top-p, top-k, min-p) that the
# engine renormalises removes mass from the trainer's distribution, so the mean weight is below 1 by
# that mass and hardly any weight exceeds 1.  A temperature changes log p to log p / T minus a
# constant of the context, so the log ratio is linear in the engine's log p; that of the trainer
# correlates with the log ratio for any noise.

ENOUGH = 1000  # fewest tokens for a finding
_FAR_NATS = math.log(2)
_FAR_SHARE = 0.002  # share of tokens with a weight above 2: none for a cut, more for heavy tails
_SIGMAS = 5.0
_STEEPEST = 0.5  # |T - 1|: independent noise has a larger slope
_EDGES_NATS = np.geomspace(1e-4, 20.0, 40)  # of bins of -log p


class Transform:
    """Sums over the tokens with both logprobs, of constant size."""

    def __init__(self) -> None:
        self.n = self.far = 0
        self.above = self.below = self.squares = 0.0  # of (w - 1)^+, (1 - w)^+ and (w - 1)^2
        # of each bin of log p_infer: tokens, and sums of x, d, xd, dd; x = log p, d = log ratio
        self.bins = np.zeros((5, len(_EDGES_NATS) + 1))

    def add(self, logp_train_N: Array, logp_infer_N: Array) -> None:
        """Both logprobs of some tokens, nats; a train logprob may be -inf."""
        d_N = logp_train_N - logp_infer_N
        gap_N = np.expm1(np.minimum(d_N, 300.0))
        self.n += len(d_N)
        self.far += int((d_N > _FAR_NATS).sum())
        self.above += float(np.maximum(gap_N, 0.0).sum())
        self.below -= float(np.minimum(gap_N, 0.0).sum())
        self.squares += float((gap_N * gap_N).sum())
        known_N = np.isfinite(d_N)
        x_K, d_K = logp_infer_N[known_N], d_N[known_N]
        bin_K = np.searchsorted(_EDGES_NATS, -x_K)
        for row, values_K in enumerate((None, x_K, d_K, x_K * d_K, d_K * d_K)):
            self.bins[row] += np.bincount(bin_K, values_K, minlength=self.bins.shape[1])

    def cut(self) -> tuple[float, float]:
        """Mass of train that infer cannot sample, and the share of the difference it explains.

        E w = 1 - mass, and E(1 - w)^+ = mass without noise.  (0, 0) where noise may be the reason.
        """
        if self.n < ENOUGH:
            return 0.0, 0.0
        mass = (self.below - self.above) / self.n
        error = math.sqrt(self.squares / self.n / self.n)
        if self.far > _FAR_SHARE * self.n or mass < _SIGMAS * error:
            return 0.0, 0.0
        return mass, mass * self.n / self.below if self.below else 0.0

    def temperature(self) -> tuple[float, float]:
        """The engine's temperature over the trainer's, and the share of the variance of d it has.

        With x = log p_infer, d is (T - 1)(x + the entropy of the context) to first order, and
        tokens come from infer, so that its variance over its covariance with x is T - 1, however
        the entropies of contexts vary.  The share of the variance of d that lies between bins of
        x is at most what T explains.  (1, 0) if unknown.
        """
        n, x, d, xd, dd = self.bins.sum(axis=1)
        if n < ENOUGH:
            return 1.0, 0.0
        spread, slope = dd / n - (d / n) ** 2, xd / n - x / n * d / n
        if not (spread > 0 and slope) or abs(b := spread / slope) > _STEEPEST:
            return 1.0, 0.0
        return 1 + b, self.between()

    def between(self) -> float:
        """The share of the variance of d that lies between bins of log p."""
        n_B, _, d_B, *_ = self.bins
        n, _, d, _, dd = self.bins.sum(axis=1)
        if n < ENOUGH or not (spread := dd / n - (d / n) ** 2) > 0:
            return 0.0
        met_B = n_B > 0
        return (float((d_B[met_B] ** 2 / n_B[met_B]).sum()) / n - (d / n) ** 2) / spread


WORST = 0.3  # share of the tokens, in the sequences with the largest rate
_FAR = 0.01  # share of the tokens that make the tail
_FEW = 30  # fewest tokens of a rate
_QUARTERS = 4
_IDS = 5  # fewest tokens of an id in each half


@dataclass(frozen=True)
class Signatures:
    """The measured numbers of a gap; None where the record cannot give one.

    Args:
        tokens, sequences, steps: how many.
        gap: mean |p - q| / (p + q); rms: of the log ratio, cut at 5 nats.
        cut, cut_share: see `Transform.cut`; temperature, temperature_share: see there.
        curve: share of the variance of the log ratio that is a function of the logprob.
        tail: share of the gap in the hundredth of the tokens with the largest.
        concentration: share of the gap in the worst sequences with 30 % of a step's tokens.
        first: rate of the first step over that of the last third; first_gap: its gap.
        first_step: its number.
        growth: rate of the last third of the steps over that of the first third.
        uneven: largest rate of a step over the smallest.
        growth_z: the same, in standard errors over the sequences, of the logarithm.
        start: rate of the first four response tokens over that of the others.
        turn_start: rate of the first three tokens of later turns over that of the others.
        length: rate in the last quarter of context lengths over that in the first.
        length_z: the trend of the rate over the quarters, in standard errors.
        equal: share of log ratios that are exactly 0.
        zeros: share of the gap in tokens whose sampler's logprob is exactly 0.
        ids: share of the variance of the log ratio that ids explain, from two halves.
        repeated: mean log ratio of repeated tokens above that of others, in standard errors.
        repeated_share: share of the variance that it explains.
        stale: rate of tokens of older weights over that of the current ones.
    """

    tokens: int
    sequences: int
    steps: int
    gap: float
    rms: float
    cut: float
    cut_share: float
    temperature: float
    temperature_share: float
    curve: float
    tail: float
    concentration: float
    first: float | None
    first_gap: float | None
    first_step: int
    growth: float | None
    growth_z: float | None
    uneven: float | None
    start: float | None
    turn_start: float | None
    length: float | None
    length_z: float | None
    equal: float
    zeros: float
    ids: float | None
    repeated: float | None
    repeated_share: float | None
    stale: float | None


def signatures_of(table: TokenTable) -> Signatures:
    """The signatures of a table."""
    all_K = np.ones(len(table), dtype=bool)
    base_K = table.expected(all_K)
    transform = Transform()
    transform.add(table.train_K, table.infer_K)
    cut, cut_share = transform.cut()
    temperature, temperature_share = transform.temperature()
    ratio_K = np.clip(table.log_ratio_K, -5.0, 5.0)
    first, first_gap, growth, growth_z, uneven = _over_steps(table, base_K)
    repeated, repeated_share = _repeated(table, ratio_K)
    position_K = table.numbers["context.position"]
    far = max(1, round(_FAR * len(table.gap_K)))
    return Signatures(
        len(table),
        len(np.unique(table.sequence_K)),
        len(np.unique(table.step_K)),
        float(table.gap_K.mean()),
        float(np.sqrt((ratio_K**2).mean())),
        cut,
        cut_share,
        temperature,
        temperature_share,
        transform.between(),
        float(np.partition(table.gap_K, -far)[-far:].sum() / max(table.gap_K.sum(), 1e-300)),
        _concentration(table, base_K),
        first,
        first_gap,
        int(table.step_K.min()),
        growth,
        growth_z,
        uneven,
        _ratio(table, base_K, position_K < 4),
        _turn_start(table, base_K),
        *_by_length(table, base_K),
        float((table.log_ratio_K == 0).mean()),
        float(table.gap_K[table.infer_K == 0].sum() / max(table.gap_K.sum(), 1e-300)),
        _ids(table, ratio_K),
        repeated,
        repeated_share,
        _stale(table, base_K),
    )


def _rate(table: TokenTable, base_K: Array, of_K: Array) -> float | None:
    if of_K.sum() < _FEW:
        return None
    return float(table.gap_K[of_K].sum() / max(base_K[of_K].sum(), 1e-300))


def _ratio(table: TokenTable, base_K: Array, of_K: Array) -> float | None:
    """The rate of some tokens over that of the others."""
    inside, outside = _rate(table, base_K, of_K), _rate(table, base_K, ~of_K)
    if inside is None or not outside:
        return None
    return inside / outside


def _concentration(table: TokenTable, base_K: Array) -> float:
    """Within steps: where a gap grows, the sequences of late steps are not few odd ones."""
    _, first_Q, code_K = np.unique(table.sequence_K, return_index=True, return_inverse=True)
    x_Q, b_Q, n_Q = (np.bincount(code_K, of_K) for of_K in (table.gap_K, base_K, None))
    step_Q, worst = table.step_K[first_Q], 0.0
    for step in np.unique(step_Q):
        x_P, b_P, n_P = (column[step_Q == step] for column in (x_Q, b_Q, n_Q))
        order = np.argsort(-x_P / b_P, kind="stable")
        before_P = n_P[order].cumsum() - n_P[order]
        part_P = np.clip((WORST * n_P.sum() - before_P) / n_P[order], 0, 1)
        worst += float(part_P @ x_P[order])
    return worst / max(float(x_Q.sum()), 1e-300)


def _over_steps(table: TokenTable, base_K: Array) -> tuple[float | None, ...]:
    """first, first_gap, growth, growth_z and uneven."""
    steps = np.unique(table.step_K)
    if len(steps) < 3:
        return None, None, None, None, None
    third = max(1, len(steps) // 3)
    early_K, late_K = table.step_K < steps[third], table.step_K >= steps[-third]
    first_K = table.step_K == steps[0]
    begin, early, late = (_rate(table, base_K, of) for of in (first_K, early_K, late_K))
    if begin is None or not early or not late:
        return None, None, None, None, None
    error = math.hypot(*(_log_error(table, base_K, of) for of in (early_K, late_K)))
    growth = late / early
    z = math.log(growth) / error if error else None
    rates = [r for step in steps if (r := _rate(table, base_K, table.step_K == step))]
    return begin / late, float(table.gap_K[first_K].mean()), growth, z, max(rates) / min(rates)


def _log_error(table: TokenTable, base_K: Array, of_K: Array) -> float:
    """The standard error of the logarithm of a rate, over sequences."""
    _, code_M = np.unique(table.sequence_K[of_K], return_inverse=True)
    x_Q = np.bincount(code_M, table.gap_K[of_K])
    b_Q = np.bincount(code_M, base_K[of_K])
    rate = x_Q.sum() / max(b_Q.sum(), 1e-300)
    return float(np.sqrt(((x_Q - rate * b_Q) ** 2).sum()) / max(x_Q.sum(), 1e-300))


def _turn_start(table: TokenTable, base_K: Array) -> float | None:
    turn_K = table.numbers.get("context.turn")
    at_K = table.numbers.get("context.turn_position")
    if turn_K is None or at_K is None:
        return None
    return _ratio(table, base_K, (turn_K > 1) & (at_K < 3))


def _by_length(table: TokenTable, base_K: Array) -> tuple[float | None, float | None]:
    """length and length_z."""
    length_K = table.numbers.get("context.length")
    if length_K is None:
        length_K = table.numbers["context.position"] + table.numbers["request.prompt_tokens"]
    edges = np.quantile(length_K, np.arange(1, _QUARTERS) / _QUARTERS)
    quarter_K = np.searchsorted(edges, length_K, side="right")
    rates = [_rate(table, base_K, quarter_K == q) for q in range(_QUARTERS)]
    known = [(q, r) for q, r in enumerate(rates) if r]
    if len(known) < _QUARTERS:
        return None, None
    low, high = known[0][1], known[-1][1]
    error = math.hypot(*(_log_error(table, base_K, quarter_K == q) for q in (0, _QUARTERS - 1)))
    return high / low, math.log(high / low) / error if error else None


def _ids(table: TokenTable, ratio_K: Array) -> float | None:
    """The share of the variance that an id's mean has, from the covariance of two halves."""
    if (table.token_K < 0).all():
        return None
    n_B = np.bincount(table.bin_K)
    mean_B = np.bincount(table.bin_K, ratio_K) / np.maximum(n_B, 1)
    centred_K = ratio_K - mean_B[table.bin_K]
    half_K = table.sequence_K % 2 == 0
    sums, counts = [], []
    size = int(table.token_K.max()) + 1
    for of_K in (half_K, ~half_K):
        at = table.token_K[of_K]
        counts.append(np.bincount(at, minlength=size))
        sums.append(np.bincount(at, centred_K[of_K], minlength=size))
    met = (counts[0] >= _IDS) & (counts[1] >= _IDS)
    if met.sum() < _IDS:
        return None
    means = [s[met] / c[met] for s, c in zip(sums, counts, strict=True)]
    weight = np.minimum(counts[0][met], counts[1][met])
    covariance = float((weight * means[0] * means[1]).sum() / weight.sum())
    inside_K = np.isin(table.token_K, np.flatnonzero(met))
    variance = float(centred_K[inside_K].var())
    return covariance / variance if variance else 0.0


def _repeated(table: TokenTable, ratio_K: Array) -> tuple[float | None, float | None]:
    """repeated and repeated_share, at the same logprob."""
    again_K = table.repeated_K
    if min(again_K.sum(), (~again_K).sum()) < _FEW:
        return None, None
    n_B, m_B = (np.bincount(table.bin_K[of_K], minlength=16) for of_K in (again_K, ~again_K))
    sum_B, other_B = (
        np.bincount(table.bin_K[of_K], ratio_K[of_K], minlength=16) for of_K in (again_K, ~again_K)
    )
    met_B = (n_B >= 5) & (m_B >= 5)
    if not met_B.any():
        return None, None
    weight_B = n_B[met_B] * m_B[met_B] / (n_B + m_B)[met_B]
    apart_B = sum_B[met_B] / n_B[met_B] - other_B[met_B] / m_B[met_B]
    shift = float((weight_B * apart_B).sum() / weight_B.sum())
    spread = float(ratio_K.std())
    if not spread:
        return None, None
    share = float((weight_B * apart_B**2).sum() / len(ratio_K)) / spread**2
    return shift / spread * math.sqrt(float(weight_B.sum())), share


def _stale(table: TokenTable, base_K: Array) -> float | None:
    age_K = table.numbers.get("outcome.staleness")
    if age_K is None or np.isnan(age_K).all():
        return None
    return _ratio(table, base_K, age_K > 0)
