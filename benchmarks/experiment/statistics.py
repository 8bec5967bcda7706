# Statistics of a step's logprobs: those of other projects and those of a contract, no limits.
#
# Each is computed as its framework does, where frameworks differ.
# Axes: S sequences, N tokens of all sequences one after another.

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from servanda.theory.bounds.importance_weights import PSI, weight_gap

Floats = NDArray[np.float64]
_CLAMP = 20.0  # nats: verl cuts log ratios before it takes their exponential


def _ratios(compute: Callable[[Floats], float]) -> Callable[..., float]:
    """Of log ratios alone."""
    return lambda d_N, _p, _q, _: float(compute(d_N))


def _probabilities(compute: Callable[[Floats, Floats], float]) -> Callable[..., float]:
    return lambda _d, p_N, q_N, _: float(compute(p_N, q_N))


def _log_ratio_S(d_N: Floats, length_S: NDArray[np.int64]) -> Floats:
    start_S = np.cumsum(length_S) - length_S
    return np.add.reduceat(d_N, start_S)


def _weight(d_N: Floats) -> Floats:
    return np.exp(np.clip(d_N, -_CLAMP, _CLAMP))


def _pearson(p_N: Floats, q_N: Floats) -> float:
    if p_N.std() == 0 or q_N.std() == 0:
        return float("nan")
    return float(np.corrcoef(p_N, q_N)[0, 1])


def _ess(w_N: Floats) -> float:
    """Effective sample size over the number of tokens, in (0, 1]."""
    return float(w_N.sum() ** 2 / (len(w_N) * (w_N**2).sum()))


def _gap(name: str, *args: float | tuple[float, float]) -> Callable[..., float]:
    psi = PSI[name](*args)
    return _ratios(lambda d_N: weight_gap(d_N, psi).mean())


def _sequences(compute: Callable[[Floats], float]) -> Callable[..., float]:
    return lambda d_N, _p, _q, length_S: float(compute(_log_ratio_S(d_N, length_S)))


def _by_sequence(d_N: Floats, _p: Floats, _q: Floats, length_S: NDArray[np.int64]) -> float:
    return float((_log_ratio_S(np.abs(d_N), length_S) / length_S).mean())


def _worst_sequence(d_N: Floats, _p: Floats, _q: Floats, length_S: NDArray[np.int64]) -> float:
    exp_N = np.exp(np.minimum(np.abs(d_N), _CLAMP))
    return float((_log_ratio_S(exp_N, length_S) / length_S).max())


def _geometric(d_N: Floats, _p: Floats, _q: Floats, length_S: NDArray[np.int64]) -> float:
    mean_S = np.exp(_log_ratio_S(d_N, length_S) / length_S)
    return float(((mean_S < 0.999) | (mean_S > 1.001)).mean())


# name -> (log_ratio_N, p_N, q_N, length_S) -> value
STATISTICS: Mapping[str, Callable[..., float]] = {
    # |d|: SkyRL and TRL over tokens; slime and miles over sequences of their means
    "abs_d_mean": _ratios(lambda d: np.abs(d).mean()),
    "abs_d_mean_by_sequence": _by_sequence,
    "abs_d_p99": _ratios(lambda d: np.quantile(np.abs(d), 0.99)),
    "abs_d_max": _ratios(lambda d: np.abs(d).max()),
    # mean of infer - train: verl `kl`, Tinker v1; of its half square: Tinker v2
    "k1": _ratios(lambda d: -d.mean()),
    "k2": _ratios(lambda d: (d**2).mean() / 2),
    # verl `k3_kl`, prime-rl `mismatch_kl`, NeMo `gen_kl`
    "k3": _ratios(lambda d: (np.expm1(np.clip(d, -_CLAMP, _CLAMP)) - d).mean()),
    # NeMo `token_mult_prob_error`
    "tme": _ratios(lambda d: np.exp(np.minimum(np.abs(d), _CLAMP)).mean()),
    # verl `rollout_probs_diff_*`
    "probs_diff_mean": _probabilities(lambda p, q: np.abs(p - q).mean()),
    "probs_diff_max": _probabilities(lambda p, q: np.abs(p - q).max()),
    "probs_diff_std": _probabilities(lambda p, q: np.abs(p - q).std(ddof=1)),
    "pearson": _probabilities(_pearson),
    # verl `chi2_token`, `chi2_seq`
    "chi2_token": _ratios(lambda d: (_weight(d) ** 2).mean() - 1),
    "chi2_seq": _sequences(lambda d_S: (_weight(d_S) ** 2).mean() - 1),
    # verl `rollout_is_*`: token weights cut at 2; the last line is without the cut
    "is_mean": _ratios(lambda d: np.minimum(_weight(d), 2.0).mean()),
    "is_std": _ratios(lambda d: np.minimum(_weight(d), 2.0).std()),
    "is_mean_raw": _ratios(lambda d: _weight(d).mean()),
    "is_min": _ratios(lambda d: _weight(d).min()),
    "is_max": _ratios(lambda d: _weight(d).max()),
    "ess": _ratios(lambda d: _ess(np.minimum(_weight(d), 2.0))),
    "ess_raw": _ratios(lambda d: _ess(_weight(d))),
    # sequences: the product of weights, and TRL's mask at 3
    "seq_is_mean": _sequences(lambda d_S: _weight(d_S).mean()),
    "seq_is_min": _sequences(lambda d_S: _weight(d_S).min()),
    "seq_is_max": _sequences(lambda d_S: _weight(d_S).max()),
    "seq_masked_share": _sequences(lambda d_S: (d_S > np.log(3.0)).mean()),
    "seq_geometric_out": _geometric,
    # NeMo `max_seq_mult_prob_error`
    "max_seq_mult_prob_error": _worst_sequence,
    # shares of tokens: above TIS's cap, outside MIS's band, outside PPO's clip range
    "over_cap": _ratios(lambda d: (d > np.log(2.0)).mean()),
    "outside_band": _ratios(lambda d: (np.abs(d) > np.log(2.0)).mean()),
    "outside_clip": _ratios(lambda d: ((d < np.log(0.8)) | (d > np.log(1.2))).mean()),
    # means of what a contract bounds: D of no weighting (2 TV), TIS at 2, MIS at [0.5, 2]
    "gap_none": _gap("naive"),
    "gap_tis": _gap("tis", 2.0),
    "gap_mis": _gap("mis", (0.5, 2.0)),
}


def of_step(
    logp_train_N: Floats, logp_infer_N: Floats, length_S: NDArray[np.int64]
) -> dict[str, float]:
    """Every statistic of one step's tokens.

    Args:
        logp_train_N, logp_infer_N: nats, finite, of the sampled tokens.
        length_S: tokens of each sequence, at least 1.

    >>> two = of_step(np.log([0.5, 0.25]), np.log([0.25, 0.5]), np.array([1, 1]))
    >>> two["abs_d_mean"], two["gap_none"]
    (0.6931471805599453, 0.5)
    """
    d_N = logp_train_N - logp_infer_N
    p_N, q_N = np.exp(logp_train_N), np.exp(logp_infer_N)
    return {name: compute(d_N, p_N, q_N, length_S) for name, compute in STATISTICS.items()}
