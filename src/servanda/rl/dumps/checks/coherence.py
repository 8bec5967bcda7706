# Coherence: the mean importance weight of tokens sampled from infer cannot exceed 1.
#
# If it does, the sampler's logprobs are not those it sampled with: raw instead of processed, or of
# other tokens.  Two cases are separated.  Re-tokenised turns have logprobs of other tokens only at
# their beginning, so the first tokens of later turns are tested separately.  And a mean above 1 by
# less than 0.001 does not affect a verdict: a float32 softmax over a large vocabulary has an error
# of about 1e-5 nats, and a filter by reward biases the remaining tokens.

from __future__ import annotations

import math
from functools import cache

import numpy as np

from servanda.rl.dumps.checks.base import Finding, StepSums, Sums, check, heads
from servanda.theory.divergence.precision import captured, errors
from servanda.theory.stats.bets import CAP, SLACK, growths, log_mean_exp
from servanda.theory.stats.histogram import BINS, bin_of, edges
from servanda.traces.rollouts import Array, Rollouts

LIMIT_NATS = math.log(1e6)  # e-value threshold of one million
GROSS_NATS = 1e-3
IMPOSSIBLE = (
    "the mean importance weight is above 1, which is impossible for two distributions: "
    "the sampler's logprobs are not those it sampled with (raw, or of other tokens), or the "
    "sequences were selected by their outcome"
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
        text = (
            "no evidence that the mean importance weight is above 1 (a small excess is sampling "
            "noise): the sampler seems to record the logprobs it sampled with (this does not test "
            "its temperature)"
        )
        return Finding("coherence", "ok", text, numbers)


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
