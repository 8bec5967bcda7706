# Line-up: index i of both sides concerns one token.
#
# Two records of the same tokens correlate best without a shift.  Correlations of
# log p_train[i] with log p_infer[i + lag] are taken over pairs of trained tokens of a sequence.

from __future__ import annotations

import math

import numpy as np

from servanda.rl.dumps.checks.base import Finding, FirstPlace, StepSums, Sums, check
from servanda.traces.rollouts import Array, Rollouts

LAGS: tuple[int, ...] = (-2, -1, 0, 1, 2)
ENOUGH = 200  # fewest pairs for a finding
LONG = 64  # fewest pairs of a sequence for its own finding
_SIGMAS = 5.0
_LEAST = 0.05  # margin, in units of atanh r
_LONG_MARGIN = 0.5
_SHIFTED_SHARE = 0.01


@check("line_up")
class LineUp(Sums):
    """Sums per lag: pairs, x, y, x^2, y^2, xy; and the count of sequences with another best lag."""

    def __init__(self) -> None:
        self.sums = StepSums()  # [lags, 6]
        self.long = self.shifted = 0
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        sums_LS6 = _sums(rollouts)
        self.sums.add(rollouts.step, sums_LS6.sum(axis=1))
        pairs_S = sums_LS6[:, :, 0].min(axis=0)
        z_LS = np.arctanh(np.clip(correlation(sums_LS6), -0.999999, 0.999999))
        other_S = np.delete(z_LS, LAGS.index(0), axis=0).max(axis=0)
        with np.errstate(invalid="ignore"):
            shifted_S = (pairs_S >= LONG) & (other_S > z_LS[LAGS.index(0)] + _LONG_MARGIN)
        self.long += int((pairs_S >= LONG).sum())
        self.shifted += int(shifted_S.sum())
        self.first.add_sequence(rollouts, shifted_S)

    def finding(self) -> Finding:
        sums_L6 = self.sums.total(np.zeros((len(LAGS), 6)))
        r = dict(zip(LAGS, correlation(sums_L6).tolist(), strict=True))
        pairs = float(sums_L6[:, 0].min())
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
            return Finding("line_up", "unsound", text, numbers, self.first.place)
        if z[best] > z[0] + margin:
            text = (
                f"the sampler's logprobs are shifted by {best:+d} against the trainer's "
                f"(correlation {_short(r[best])} at lag {best:+d}, {_short(r[0])} at lag 0)"
            )
            return Finding("line_up", "unsound", text, numbers, self.first.place)
        if z[0] <= z[best] + margin:
            text = f"the two sides line up at no lag ({lags}): are they of the same tokens?"
            state = "unsound" if margin == _LEAST else "warning"  # too few pairs for a decision
            return Finding("line_up", state, text, numbers, self.first.place)
        odd = self.shifted, self.long, _SHIFTED_SHARE
        if self.shifted > _SHIFTED_SHARE * self.long:
            text = f"{self.shifted:,} of {self.long:,} long sequences are shifted ({lags} in all)"
            return Finding("line_up", "unsound", text, numbers, self.first.place, odd)
        return Finding("line_up", "ok", f"rows line up ({lags})", numbers, odd=odd)


def _sums(rollouts: Rollouts) -> Array:
    """Sums over the pairs (i, i + lag) of each sequence for each lag, [L, S, 6].

    Sums of one side are those of all known tokens, less the few that have no partner.
    """
    some_S = rollouts.length_S > 0
    start_S, size = rollouts.start_S[some_S], int(some_S.sum())
    sums_LS6 = np.zeros((len(LAGS), len(rollouts), 6))
    if not size:
        return sums_LS6
    known_N = rollouts.mask_N
    if not np.isfinite(rollouts.ratio_K).all():
        with np.errstate(invalid="ignore"):
            known_N = known_N & np.isfinite(rollouts.logp_train_N + rollouts.logp_infer_N)
    x_N = np.where(known_N, rollouts.logp_train_N, 0.0)
    y_N = np.where(known_N, rollouts.logp_infer_N, 0.0)
    product_N, pairs_N = np.empty_like(x_N), np.empty_like(known_N)
    n_S = np.add.reduceat(known_N, start_S, dtype=np.int64)
    x_S, y_S = np.add.reduceat(x_N, start_S), np.add.reduceat(y_N, start_S)
    xx_S, yy_S, *xy_LS = (
        np.add.reduceat(_paired(a_N, b_N, lag, start_S, product_N), start_S)
        for a_N, b_N, lag in [(x_N, x_N, 0), (y_N, y_N, 0), *((x_N, y_N, lag) for lag in LAGS)]
    )
    # sums over the known tokens without a partner at a lag
    alone = {}
    for lag in LAGS:
        at = np.flatnonzero(known_N & ~_paired(known_N, known_N, lag, start_S, pairs_N))
        sequence = np.searchsorted(start_S, at, side="right") - 1
        columns = (np.ones(len(at)), x_N[at], x_N[at] ** 2, y_N[at], y_N[at] ** 2)
        alone[lag] = [np.bincount(sequence, column, minlength=size) for column in columns]
    for sums_S6, lag, xy_S in zip(sums_LS6, LAGS, xy_LS, strict=True):
        (n, x, xx, *_), (*_, y, yy) = alone[lag], alone[-lag]
        sums = (n_S - n, x_S - x, y_S - y, xx_S - xx, yy_S - yy, xy_S)
        sums_S6[some_S] = np.stack(sums, axis=-1)
    return sums_LS6


def _paired(x_N: Array, y_N: Array, lag: int, start_S: Array, out_N: Array) -> Array:
    """x[i] * y[i + lag], in `out_N`, [N]; 0 if the two are in different sequences."""
    far = min(abs(lag), len(x_N))
    early, late = slice(0, len(x_N) - far), slice(far, None)
    here, there = (early, late) if lag >= 0 else (late, early)
    np.multiply(x_N[here], y_N[there], out=out_N[here])
    across = start_S[:, None] + np.arange(far) - (far if lag > 0 else 0)
    # also the ends of the column
    edge = slice(len(x_N) - far, None) if lag > 0 else slice(0, far)
    out_N[edge] = 0
    out_N[across[(across >= 0) & (across < len(x_N))]] = 0
    return out_N


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
