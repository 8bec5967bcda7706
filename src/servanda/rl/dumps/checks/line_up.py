# Line-up: index i of both sides concerns one token.
#
# Two records of the same tokens correlate best without a shift.  Correlations of
# log p_train[i] with log p_infer[i + lag] are taken over pairs of trained tokens of a sequence.

from __future__ import annotations

import math

import numpy as np

from servanda.rl.dumps.checks.base import Finding, check
from servanda.traces.rollouts import Array, Rollouts

LAGS = (-2, -1, 0, 1, 2)
ENOUGH = 200  # fewest pairs for a finding
LONG = 64  # fewest pairs of a sequence for its own finding
_SIGMAS = 5.0
_LEAST = 0.05  # margin, in units of atanh r
_LONG_MARGIN = 0.5
_SHIFTED_SHARE = 0.01


@check("line_up")
class LineUp:
    """Sums per lag: pairs, x, y, x^2, y^2, xy; and the count of sequences with another best lag."""

    def __init__(self) -> None:
        self.sums: dict[int, Array] = {lag: np.zeros(6) for lag in LAGS}
        self.long = self.shifted = 0
        self.first = ""

    def add(self, rollouts: Rollouts) -> None:
        with np.errstate(invalid="ignore"):
            known_N = rollouts.mask_N & np.isfinite(rollouts.logp_train_N + rollouts.logp_infer_N)
        sums_LS6 = np.stack([_sums(rollouts, known_N, lag) for lag in LAGS])
        for lag, sums_S6 in zip(LAGS, sums_LS6, strict=True):
            self.sums[lag] += sums_S6.sum(axis=0)
        pairs_S = sums_LS6[:, :, 0].min(axis=0)
        z_LS = np.arctanh(np.clip(correlation(sums_LS6), -0.999999, 0.999999))
        other_S = np.delete(z_LS, LAGS.index(0), axis=0).max(axis=0)
        with np.errstate(invalid="ignore"):
            shifted_S = (pairs_S >= LONG) & (other_S > z_LS[LAGS.index(0)] + _LONG_MARGIN)
        self.long += int((pairs_S >= LONG).sum())
        self.shifted += int(shifted_S.sum())
        if not self.first and shifted_S.any():
            self.first = rollouts.source_S[int(shifted_S.argmax())]

    def finding(self) -> Finding:
        r = {lag: float(correlation(self.sums[lag])) for lag in LAGS}
        pairs = min(float(sums[0]) for sums in self.sums.values())
        numbers = {**{f"lag{lag:+d}": value for lag, value in r.items()}, "pairs": pairs}
        if pairs < ENOUGH:
            text = f"{pairs:,.0f} pairs of tokens are too few to check that rows line up"
            return Finding("line_up", "warning", text, numbers)
        if any(map(math.isnan, r.values())):
            text = "rows cannot be checked for a shift: all logprobs of a side are equal"
            return Finding("line_up", "warning", text, numbers)
        z = {lag: math.atanh(max(-0.999999, min(value, 0.999999))) for lag, value in r.items()}
        best = max((lag for lag in LAGS if lag), key=lambda lag: z[lag])
        margin = max(_LEAST, _SIGMAS * math.sqrt(2 / pairs))
        lags = f"correlation {_short(r[0])} at lag 0, next {_short(r[best])}"
        if z[0] < -margin and -z[0] > max(map(abs, (z[lag] for lag in LAGS if lag))) + margin:
            text = (
                f"the two sides are negatively correlated ({_short(r[0])} at lag 0): losses "
                "instead of logprobs?"
            )
            return Finding("line_up", "unsound", text, numbers, self.first)
        if z[best] > z[0] + margin:
            text = (
                f"the sampler's logprobs are shifted by {best:+d} against the trainer's "
                f"(correlation {_short(r[best])} at lag {best:+d}, {_short(r[0])} at lag 0)"
            )
            return Finding("line_up", "unsound", text, numbers, self.first)
        if z[0] <= z[best] + margin:
            text = f"the two sides line up at no lag ({lags}): are they of the same tokens?"
            state = "unsound" if margin == _LEAST else "warning"  # too few pairs for a decision
            return Finding("line_up", state, text, numbers, self.first)
        odd = self.shifted, self.long, _SHIFTED_SHARE
        if self.shifted > _SHIFTED_SHARE * self.long:
            text = f"{self.shifted:,} of {self.long:,} long sequences are shifted ({lags} in all)"
            return Finding("line_up", "unsound", text, numbers, self.first, odd)
        return Finding("line_up", "ok", f"rows line up ({lags})", numbers, odd=odd)


def _sums(rollouts: Rollouts, known_N: Array, lag: int) -> Array:
    """Sums over the pairs (i, i + lag) of each sequence, [S, 6]."""
    sequence_N, total = rollouts.sequence_N, len(known_N)
    here, there = slice(max(0, -lag), total - max(0, lag)), slice(max(0, lag), total - max(0, -lag))
    both = known_N[here] & known_N[there] & (sequence_N[here] == sequence_N[there])
    at = sequence_N[here][both]
    x, y = rollouts.logp_train_N[here][both], rollouts.logp_infer_N[there][both]
    weights = (np.ones_like(x), x, y, x * x, y * y, x * y)
    return np.stack([np.bincount(at, w, minlength=len(rollouts)) for w in weights], axis=-1)


def correlation(sums: Array) -> Array:
    """Pearson's r from the six sums, [...]; NaN if a side does not vary."""
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread_x, spread_y = xx - x * x / n, yy - y * y / n
        varies = (spread_x > 1e-9 * np.abs(xx)) & (spread_y > 1e-9 * np.abs(yy))
        return np.where(varies, (xy - x * y / n) / np.sqrt(spread_x * spread_y), np.nan)


def _short(r: float) -> str:
    """A correlation as printed.

    >>> _short(0.99941), _short(-0.3)
    ('0.9994', '-0.30')
    """
    digits = 4 if abs(r) > 0.99 else 2
    return f"{r:.{digits}f}"
