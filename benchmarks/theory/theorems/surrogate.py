# Surrogates: the error of a trainer's first-order objective against the expected reward.
#
# The surrogate of TRPO and PPO is J(Q) + E_infer of the sum of (w_t - 1) A_t, with A_t the
# advantage under infer.  Its error is of second order: pairs of steps that both drift.

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from servanda.theory.bounds.sequence import shortfall
from servanda.theory.bounds.theorem import Floats, given, lengths, log_ratios, theorem


@theorem("estimate", assumes=("sampler", "same_tokens", "support", "same_reward"), sharp=True)
def surrogate_error(log_ratio_N: ArrayLike, length_S: ArrayLike) -> Floats:
    """|J(P) - surrogate| is at most E_infer of the sum over t < s of |w_t - 1| (1 - w_s)^+.

    In units of the reward's range.  Unbounded, so no sample certifies the mean.

    Args:
        log_ratio_N: log p - log q of the sampled tokens of all sequences, concatenated, [N], nats;
            -inf without mass under train.
        length_S: tokens of each sequence, [S].

    Returns:
        The sum of each sequence, [S], >= 0; 0 with fewer than two tokens.

    Raises:
        EvidenceError: a log ratio is NaN or +inf, or the lengths do not fit.

    >>> surrogate_error(np.log([1.5, 0.5, 0.5]), [2, 1]).round(6).tolist()
    [0.25, 0.0]
    """
    log_ratio_N = log_ratios(log_ratio_N)
    length_S = lengths(length_S, len(log_ratio_N))
    with np.errstate(over="ignore"):
        away_N = np.abs(np.expm1(log_ratio_N))
    short_N = shortfall(log_ratio_N)
    start_S = np.cumsum(length_S) - length_S
    error_S, so_far_S = np.zeros(len(length_S)), np.zeros(len(length_S))
    for step in range(int(length_S.max(initial=0))):
        inside_S = np.flatnonzero(length_S > step)
        at = start_S[inside_S] + step
        falls = short_N[at] > 0  # 0 adds nothing, for any weights before
        error_S[inside_S[falls]] += so_far_S[inside_S[falls]] * short_N[at[falls]]
        so_far_S[inside_S] += away_N[at]
    return error_S


@theorem("conditional bound", assumes=("support", "every_context", "same_reward"))
def surrogate_error_from_tv(mean_tv_T: ArrayLike, largest_tv: float) -> float:
    """|J(P) - surrogate| is at most 2 times the sum of mean TV_t min(1, (T - t) largest TV).

    In units of the reward's range.

    Args:
        mean_tv_T: E_infer of the TV of step t, t = 1 .. T; a response that has ended counts as 0,
            [T].
        largest_tv: largest TV of one token, at any context.

    >>> round(surrogate_error_from_tv([0.01, 0.01, 0.01], 0.02), 6)
    0.0012
    """
    mean_tv_T = np.atleast_1d(given("mean_tv", mean_tv_T, high=1.0))
    largest = float(given("largest_tv", largest_tv, high=1.0))
    left_T = np.arange(len(mean_tv_T))[::-1]
    return float(2.0 * (mean_tv_T * np.minimum(left_T * largest, 1.0)).sum())
