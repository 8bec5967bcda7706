# Whether the logprobs of both sides are of the same tokens: shifted rows, other tokens at the start
# of turns, and weights that no two distributions have.

from __future__ import annotations

import math
from functools import cache

import numpy as np

from servanda.report.format import count
from servanda.rl.dumps.checks.base import Finding, FirstPlace, StepSums, Sums, check, heads, share
from servanda.theory.divergence.precision import captured, errors
from servanda.theory.stats.bets import CAP, SLACK, growths, log_mean_exp
from servanda.theory.stats.histogram import BINS, bin_of, edges
from servanda.traces.rollouts import Array, Rollouts

# Line-up: index i of both sides concerns one token.
#
# Two records of the same tokens correlate best without a shift.  Correlations of
# log p_train[i] with log p_infer[i + lag] are taken over pairs of trained tokens of a sequence.

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
            return Finding(
                "line_up", "unsound", text, numbers, self.first.place, problem="unrelated"
            )
        if z[best] > z[0] + margin:
            text = (
                f"the sampler's logprobs are shifted by {best:+d} against the trainer's "
                f"(correlation {_short(r[best])} at lag {best:+d}, {_short(r[0])} at lag 0)"
            )
            return Finding("line_up", "unsound", text, numbers, self.first.place)
        if z[0] <= z[best] + margin:
            text = f"the two sides line up at no lag ({lags}): are they of the same tokens?"
            state = "unsound" if margin == _LEAST else "warning"  # too few pairs for a decision
            return Finding("line_up", state, text, numbers, self.first.place, problem="unrelated")
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


# Re-tokenised turns: text that was tokenised differently after a tool call.
#
# The sampler scored its own tokens, the trainer the new ones, so the two differ strongly at the
# beginning of a turn.  To exclude a kernel that differs everywhere, the share is compared with that
# of all other tokens.


FAR_NATS = 4.0
TIMES = 10  # smallest ratio of the rate at the head of a turn to that elsewhere


@check("retokenised")
class Retokenised(Sums):
    """Counts heads of second and later turns at which the sides differ by more than 4 nats."""

    def __init__(self) -> None:
        self.turns = self.suspects = self.sequences = 0
        self.head = self.head_far = self.rest = self.rest_far = 0
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        at_TH, tokens = heads(rollouts), len(rollouts.trained_K)
        far_K = np.abs(rollouts.ratio_K) > FAR_NATS
        if far_K.any():  # a value that was not recorded is no sign of another token (see `zeros`)
            far_K &= (rollouts.train_K != 0) & (rollouts.infer_K != 0)
        head_TH = at_TH >= 0
        hit_TH = head_TH & far_K[at_TH] if len(at_TH) else head_TH
        head, head_far = int(head_TH.sum()), int(hit_TH.sum())
        self.turns += len(at_TH)
        self.head += head
        self.head_far += head_far
        self.rest += tokens - head
        self.rest_far += int(np.count_nonzero(far_K)) - head_far
        if head_far:
            self.suspects += int(hit_TH.any(axis=1).sum())
            hit_K = rollouts.trained_K[at_TH[hit_TH]]
            self.sequences += len(np.unique(rollouts.sequence_of(hit_K)))
            self.first.add_token(rollouts, int(at_TH[hit_TH][0]))

    def finding(self) -> Finding:
        numbers = {
            "turns": self.turns,
            "suspects": self.suspects,
            "sequences": self.sequences,
            "elsewhere": share(self.rest_far, self.rest),
        }
        if not self.turns:
            text = "no sequence has a second turn, so no turn can be re-tokenised"
            return Finding("retokenised", "ok", text, numbers)
        # add one token elsewhere, to avoid a division by 0
        usual = (self.rest_far + 1) / (self.rest + 1)
        if not self.suspects or share(self.head_far, self.head) <= TIMES * usual:
            text = (
                f"no gross re-tokenisation: at the start of {count(self.turns, 'later turn')}, "
                f"differences above {FAR_NATS:g} nats are not much more frequent than elsewhere"
            )
            return Finding("retokenised", "ok", text, numbers)
        text = (
            f"{self.suspects:,} of {count(self.turns, 'later turn')}, in "
            f"{count(self.sequences, 'sequence')}, "
            f"begin with tokens whose logprobs differ by more than {FAR_NATS:g} nats: "
            "re-tokenised at a tool boundary?"
        )
        return Finding("retokenised", "warning", text, numbers, self.first.place)


# Coherence: the mean importance weight of tokens sampled from infer cannot exceed 1.
#
# If it does, the sampler's logprobs are not those it sampled with (raw instead of processed, or of
# other tokens), or the trainer's probabilities add up to more than 1.  Two cases are separated.
# Re-tokenised turns have logprobs of other tokens only at their beginning, so the first tokens of
# later turns are tested separately.  And a mean above 1 by less than 0.001 does not affect a
# verdict: a float32 softmax over a large vocabulary has an error of about 1e-5 nats, and a filter
# by reward biases the remaining tokens.


NEVER, _CLEARLY = 5e-4, 8.0  # least deficit of the mean weight, and in standard errors
_SEQUENCES = 50  # fewest for a standard error
LIMIT_NATS = math.log(1e6)  # e-value threshold of one million
GROSS_NATS = 1e-3
IMPOSSIBLE = (
    "the mean importance weight is above 1, which is impossible for two distributions: the "
    "sampler's logprobs are not those it sampled with (raw, or of other tokens), the trainer's are "
    "too high to be of a distribution, or the sequences were selected by their outcome"
)
_RUN_BITS = 5  # 32 neighbouring bins
_RUNS = (BINS >> _RUN_BITS) + 1
_MOST_NATS = 50.0  # cap of a log weight in the contribution of a sequence
_LOOKED_AT = 4096  # a coarser precision only weakens the evidence


@check("coherence")
class MeanWeight(Sums):
    """Evidence that E w > 1, w = p_train / p_infer, over all trained tokens with both logprobs.

    `fine` covers all tokens as recorded; `heads` and `rest` cover the first tokens of later turns
    and all others, with each weight reduced by 0.001.  Tokens are counted in bins of their lower
    log weight, and each run of bins by a chord: the evidence is slightly less than exact.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.sums = StepSums()  # the growths of fine, rest and heads, and the sum of weights
        self.weights = StepSums()  # sequences, their sum of w - 1, and of its square
        self.most: list[tuple[int, float, str]] = []  # step, largest excess of a sequence, place

    def add(self, rollouts: Rollouts) -> None:
        train_K, infer_K, ratio_K = rollouts.train_K, rollouts.infer_K, rollouts.ratio_K
        known_K, head_K = np.isfinite(ratio_K), np.zeros(len(ratio_K), dtype=bool)
        at_TH = heads(rollouts)
        head_K[at_TH[at_TH >= 0]] = True
        excess_K = np.minimum(ratio_K, _MOST_NATS)
        np.expm1(excess_K, out=excess_K)
        if not known_K.all():  # a token without mass under train has a weight of 0
            known_K = ~np.isnan(train_K) & np.isfinite(infer_K) & (train_K < np.inf)
            excess_K[~known_K] = 0.0
            train_K, infer_K, head_K = train_K[known_K], infer_K[known_K], head_K[known_K]
            ratio_K = ratio_K[known_K]
        if not len(ratio_K):
            return
        least_K = _error(train_K)  # in place, for new memory costs more than the computation
        least_K += _error(infer_K)
        np.maximum(least_K, SLACK, out=least_K)
        np.subtract(ratio_K, least_K, out=least_K)
        run_K = bin_of(least_K.astype(np.float32)) >> _RUN_BITS
        x_K = np.minimum(least_K, math.log(CAP), out=least_K)
        np.expm1(x_K, out=x_K)
        n_G, head_n_G = _counted(run_K), _counted(run_K[head_K])
        x_G, head_x_G = _counted(run_K, x_K), _counted(run_K[head_K], x_K[head_K])
        excess_S = rollouts.sums_S(excess_K)
        most = int(excess_S.argmax())
        growth_3J = (
            _growth(n_G, x_G, 0.0),
            _growth(n_G - head_n_G, x_G - head_x_G, GROSS_NATS),
            _growth(head_n_G, head_x_G, GROSS_NATS),
        )
        self.weights.add(rollouts.step, np.array([len(excess_S), *_moments(excess_S)]))
        weights = float(excess_S.sum()) + len(ratio_K)
        if ratio_K.max() > _MOST_NATS:
            weights = float(np.exp(ratio_K).sum())
        self.sums.add(rollouts.step, np.hstack([*growth_3J, weights]))
        self.tokens += len(ratio_K)
        own = rollouts.step, float(excess_S[most]), rollouts.source_S[most]
        if self.most and self.most[-1][0] == rollouts.step:
            self.most[-1] = max(self.most[-1], own, key=lambda of: of[1])
        else:
            self.most.append(own)

    def _first(self, log_e_S3: Array) -> str:
        """The sequence with the largest contribution in the step that reaches the threshold."""
        return self.most[int((log_e_S3[:, 1:].max(axis=1) >= LIMIT_NATS).argmax())][2]

    def finding(self) -> Finding:
        if not self.tokens:
            text = "no token to compute the mean importance weight from"
            numbers = {"tokens": 0.0, "log_e": -math.inf}
            return Finding("coherence", "warning", text, numbers)
        grown = np.cumsum(self.sums.steps, axis=0)
        log_e_S3 = np.array([[*map(log_mean_exp, row[:-1].reshape(3, -1))] for row in grown])
        fine, rest, heads = log_e_S3[-1].tolist()
        numbers = {"tokens": float(self.tokens), "log_e": fine}
        if math.isfinite(grown[-1, -1]):
            numbers["mean"] = float(grown[-1, -1]) / self.tokens
        if rest >= LIMIT_NATS:
            return Finding("coherence", "unsound", IMPOSSIBLE, numbers, self._first(log_e_S3))
        if heads >= LIMIT_NATS:
            text = (
                "the mean importance weight is above 1 only at the first tokens of later turns: "
                "the logprobs there are of other tokens (re-tokenised at a tool boundary?)"
            )
            return Finding("coherence", "warning", text, numbers, self._first(log_e_S3))
        if fine >= LIMIT_NATS:
            text = (
                "the mean importance weight is above 1 by less than a thousandth: the sides are "
                "swapped, or sequences were selected by their outcome"
            )
            return Finding("coherence", "warning", text, numbers)
        if never := self._never():
            text = (
                f"{100 * never:.2g} % of the trainer's probability is on tokens that the engine "
                "(almost) never draws (the mean importance weight is below 1 by as much): a filter "
                "such as top-p or min-p that the trainer does not apply?"
            )
            return Finding("coherence", "warning", text, {**numbers, "never": never})
        text = (
            "no evidence that the mean importance weight is above 1 (a small excess is sampling "
            "noise): the sampler seems to record the logprobs it sampled with (this does not test "
            "its temperature)"
        )
        return Finding("coherence", "ok", text, numbers)

    def _never(self) -> float:
        """By how much the mean weight is below 1; 0.0 if that may be chance.

        E w is the trainer's probability of all that the sampler can draw.
        """
        n, total, squares = self.weights.total(np.zeros(3))
        never = -total / self.tokens
        clearly = total < -_CLEARLY * math.sqrt(squares)
        return float(never) if n >= _SEQUENCES and clearly and never > NEVER else 0.0


def _moments(x_S: Array) -> tuple[float, float]:
    return float(x_S.sum()), float(x_S @ x_S)


def _counted(run_K: Array, x_K: Array | None = None) -> Array:
    """The number of tokens, or their sum of x, in each run of bins, [G]."""
    return np.bincount(run_K, x_K, minlength=_RUNS).astype(np.float64, copy=False)


def _growth(n_G: Array, x_G: Array, nats: float) -> Array:
    """The growth of each bet, [bets], if each log weight is reduced by `nats`.

    A logarithm is concave, so over a run of bins it is above its chord.

    Args:
        n_G, x_G: number of tokens and sum of their x = w - 1 in each run of bins.
    """
    first_G, width_G, log_GJ, rise_GJ = _chords(nats)
    x_G = math.exp(-nats) * (x_G + n_G) - n_G
    risen_G = np.divide(x_G - n_G * first_G, width_G, out=np.zeros(_RUNS), where=width_G > 0)
    # rounding outside the run would be extrapolated
    return n_G @ log_GJ + np.clip(risen_G, 0.0, n_G) @ rise_GJ


@cache
def _chords(nats: float) -> tuple[Array, Array, Array, Array]:
    """Of each run: least x, its width, growths at the least x [G, bets], their rise to the most."""
    least_B, most_B = edges()
    low_G = least_B[:: 1 << _RUN_BITS]
    high_G = np.append(most_B[(1 << _RUN_BITS) - 1 :: 1 << _RUN_BITS], most_B[-1])
    low_G, high_G = (np.minimum(end_G, math.log(CAP)) - nats for end_G in (low_G, high_G))
    log_GJ = growths(low_G).T
    return np.expm1(low_G), np.expm1(high_G) - np.expm1(low_G), log_GJ, growths(high_G).T - log_GJ


def _error(logp_K: Array) -> Array:
    """The rounding error bound of each recorded value; the first ones tell the precision."""
    return errors(logp_K, captured(logp_K[:_LOOKED_AT]))
