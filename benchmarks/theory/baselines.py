# Common shortcuts, simulated for their error rates only.
#
# Each of them treats the numbers as most dashboards and gates do: tokens as independent samples,
# evaluations without a correction for their number, and returned tokens as all tokens.

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from benchmarks.theory.simulation import (
    ALPHA,
    Draw,
    Ever,
    Floats,
    any_look,
    ever,
    log_moment_e,
)

Z = NormalDist().inv_cdf(1 - ALPHA)
_RESAMPLES = 400
HEAD_START = 1.1  # the gate of means has limits that differ from the true mean by this factor


def _tokens(draw: Draw) -> tuple[Floats, Floats, Floats]:
    """Returned tokens, and the sums of x and of its square over them, at each evaluation."""
    known_RGT = draw.there_RGT & ~draw.lost_RGT
    x_RGT = np.where(known_RGT, draw.x_RGT, 0.0)
    sums = (known_RGT.sum(axis=2), x_RGT.sum(axis=2), (x_RGT**2).sum(axis=2))
    n_RK, sum_RK, square_RK = (draw.at_looks(s_RG) for s_RG in sums)
    return np.maximum(n_RK, 1.0), sum_RK, square_RK


def _normal(n_RK: Floats, sum_RK: Floats, square_RK: Floats) -> tuple[Floats, Floats]:
    mean_RK = sum_RK / n_RK
    sd_RK = np.sqrt(np.maximum(square_RK / n_RK - mean_RK**2, 0.0) / n_RK)
    return mean_RK - Z * sd_RK, mean_RK + Z * sd_RK


def _outside(low_RK: Floats, high_RK: Floats, target_RK: Floats) -> Ever:
    return Ever(any_look(high_RK < target_RK), any_look(low_RK > target_RK))


def normal_watched(draw: Draw) -> Ever:
    """mean +- z sd / sqrt(tokens), made for one evaluation, evaluated after every round."""
    return _outside(*_normal(*_tokens(draw)), draw.target_RK)


def normal_once(draw: Draw) -> Ever:
    """The same interval at the end only: its one error is that tokens are not independent."""
    low_RK, high_RK = _normal(*_tokens(draw))
    return _outside(low_RK[:, -1:], high_RK[:, -1:], draw.target_RK[:, -1:])


def bootstrap_once(draw: Draw, rng: np.random.Generator) -> Ever:
    """A percentile bootstrap of single tokens at the end; x is 0 or 1, so it is binomial."""
    n_RK, sum_RK, _ = _tokens(draw)
    n_R1, share_R1 = n_RK[:, -1:].astype(np.int64), sum_RK[:, -1:] / n_RK[:, -1:]
    drawn_RB = rng.binomial(n_R1, share_R1, (len(n_R1), _RESAMPLES)) / n_R1
    low_R, high_R = np.quantile(drawn_RB, [ALPHA, 1 - ALPHA], axis=1)
    return _outside(low_R[:, None], high_R[:, None], draw.target_RK[:, -1:])


def sequence_means(draw: Draw) -> Ever:
    """The mean of per-sequence means at the end, sequences taken as independent, which they are."""
    known_RGT = draw.there_RGT & ~draw.lost_RGT
    mean_RG = np.where(known_RGT, draw.x_RGT, 0.0).sum(axis=2) / np.maximum(
        known_RGT.sum(axis=2), 1
    )
    n = float(mean_RG.shape[1])
    sums = (mean_RG.sum(axis=1), (mean_RG**2).sum(axis=1))
    low_R, high_R = _normal(np.full(len(mean_RG), n), *sums)
    return _outside(low_R[:, None], high_R[:, None], draw.target_RK[:, -1:])


def sliding_window(draw: Draw, rounds: int = 5) -> Ever:
    """The normal interval over the last rounds only, after every round."""
    window = [_windowed(a_RK, rounds) for a_RK in _tokens(draw)]
    return _outside(*_normal(*window), draw.target_RK[:, rounds - 1 :])


def mean_gate(draw: Draw, head_start: float = HEAD_START) -> Ever:
    """`mean <= limit`, after every round, with limits 10 % away from the true mean."""
    n_RK, sum_RK, _ = _tokens(draw)
    mean_RK, target_RK = sum_RK / n_RK, draw.target_RK
    below_R = any_look(mean_RK <= target_RK / head_start)
    return Ever(below_R, any_look(mean_RK > target_RK * head_start))


def window_gate(draw: Draw, rounds: int = 5, factor: float = 1.5) -> Ever:
    """An alert where the mean of the last rounds is above 1.5 times the limit."""
    n_RK, sum_RK, _ = (_windowed(a_RK, rounds) for a_RK in _tokens(draw))
    over_RK = sum_RK / n_RK > factor * draw.target_RK[:, rounds - 1 :]
    return Ever(np.zeros(len(over_RK), dtype=bool), any_look(over_RK))


def bets_from_the_past(draw: Draw, window: int = 64) -> Ever:
    """prod (1 + bet_i (x_i - limit)), each bet from the tokens just before: betting as usual.

    About a constant mean it is right.  About the mean so far it is not: it bets where the mean
    is low, and stays away where it is high.  Every token is there.
    """
    runs, places = draw.x_RGT.shape[0], draw.every * draw.x_RGT.shape[2]
    x_RN = draw.x_RGT.reshape(runs, -1)
    sum_RN = np.concatenate([np.zeros((runs, 1)), x_RN.cumsum(axis=1)], axis=1)
    first_N = np.maximum(np.arange(x_RN.shape[1]) - window, 0)
    past_RN = (sum_RN[:, :-1] - sum_RN[:, first_N] + 0.5) / (np.arange(len(first_N)) - first_N + 5)
    grown: list[tuple[Floats, Floats]] = []
    for k, limit_R in enumerate(draw.target_RK.T):
        n, limit_R1 = (k + 1) * places, limit_R[:, None]
        edge_RN = past_RN[:, :n] - limit_R1
        bet_RN = edge_RN / (past_RN[:, :n] * (1 - past_RN[:, :n]) + edge_RN**2)
        below_RN, above_RN = bet_RN.clip(-0.9, 0.0), bet_RN.clip(0.0, 0.9 / limit_R1.max())
        log_e = [np.log1p(b * (x_RN[:, :n] - limit_R1)).sum(axis=1) for b in (below_RN, above_RN)]
        grown.append((log_e[0], log_e[1]))
    below, above = zip(*grown, strict=True)
    return ever((np.stack(below, axis=1), np.stack(above, axis=1)))


def merged_again(draw: Draw, copies: int) -> Ever:
    """LogMoment with the same shard merged more than once."""
    return ever(log_moment_e(draw, draw.running_RK, copies))


def _windowed(sum_RK: Floats, rounds: int) -> Floats:
    """Sums over the last rounds, from sums over all."""
    before_RK = np.concatenate([np.zeros((len(sum_RK), 1)), sum_RK], axis=1)
    return before_RK[:, rounds:] - before_RK[:, :-rounds]
