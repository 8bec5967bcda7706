# Challenges of the token-level gradient: enumerated contexts, real scores, the worst signs.

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from benchmarks.theory.base import Floats, Trial, challenge
from benchmarks.theory.importance_weights import psis
from benchmarks.theory.random_kernels import distributions
from benchmarks.theory.theorems.gradient import ppo_clip_bias, score_norm2_logits, sum_p2_from_top_k
from benchmarks.theory.weighting_gap import exact_gap, pairs, ratios
from servanda.theory.bounds.gradient import (
    LOGIT_SCORE_NORM,
    Std,
    group_advantage_bound,
    policy_gradient_bias,
    ratio_budget,
)

_UNCUT = float(np.finfo(np.float64).max)  # as good as no largest weight
STDS: tuple[Std, ...] = ("sample", "population")


def logit_scores(p_NV: Floats) -> Floats:
    """grad log p of every token in logits, e_a - p, [N, V, V]."""
    return np.eye(p_NV.shape[-1]) - p_NV[..., None, :]


def linear_scores(rng: np.random.Generator, p_NV: Floats, width: int) -> Floats:
    """grad log p of every token where logits are linear in `width` parameters, [N, V, width]."""
    feature_NVJ = rng.standard_normal((*p_NV.shape, width))
    return feature_NVJ - (p_NV[..., None] * feature_NVJ).sum(axis=-2, keepdims=True)


def worst_signs(term_NVJ: Floats) -> Floats:
    """The largest norm of sum_v s_v term_v over signs s, [N]; every sign is tried."""
    sign_SV = np.array(
        [(1.0, *rest) for rest in product((-1.0, 1.0), repeat=term_NVJ.shape[1] - 1)]
    )
    return np.linalg.norm(np.einsum("sv,nvj->nsj", sign_SV, term_NVJ), axis=-1).max(axis=-1)


@challenge("policy_gradient_bias")
def _policy_gradient_bias(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    p_NV, q_NV = pairs(rng, n)
    # p = (1/2, 1/2): the only place where scores, whose mean is 0, can all point one way
    half_NV = np.where(rng.random((n, 1)) < 0.1, np.eye(5)[0] / 2 + np.eye(5)[1] / 2, p_NV)
    advantage_N = rng.exponential(2.0, n)
    for psi in psis():
        for train_NV in (p_NV, half_NV):
            gap_N = exact_gap(train_NV, q_NV, psi)
            off_NV1 = (train_NV - q_NV * psi.weight(ratios(train_NV, q_NV)))[..., None]
            for score_NVJ, what in (
                (logit_scores(train_NV), "logits"),
                (linear_scores(rng, train_NV, 1), "one parameter"),
                (linear_scores(rng, train_NV, 3), "three parameters"),
            ):
                reached_NV = (train_NV > 0) | (q_NV > 0)
                norm_N = np.where(reached_NV, np.linalg.norm(score_NVJ, axis=-1), 0.0).max(axis=1)
                said_N = policy_gradient_bias(gap_N, advantage_N, norm_N)
                worst_N = advantage_N * worst_signs(off_NV1 * score_NVJ)
                yield Trial(worst_N, said_N, what=f"{psi.name}, {what}, worst advantages")
                a_NV1 = advantage_N[:, None, None] * rng.uniform(-1.0, 1.0, (n, 5, 1))
                drawn_N = np.linalg.norm((off_NV1 * a_NV1 * score_NVJ).sum(axis=1), axis=-1)
                yield Trial(drawn_N, said_N, what=f"{psi.name}, {what}, random advantages")


@challenge("ppo_clip_bias")
def _ppo_clip_bias(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """The mean over infer's tokens is the train mass whose gradient the clip drops."""
    p_NV, q_NV = pairs(rng, n)
    drawn_NV = q_NV > 0
    w_NV = ratios(p_NV, q_NV)
    with np.errstate(divide="ignore"):
        log_ratio_NV = np.log(w_NV)
    sign_NV = rng.integers(-1, 2, p_NV.shape) * 1.0
    for low, high in ((0.2, 0.28), (0.0, 3.0), (1.0, 0.1)):
        clipped_NV = (sign_NV > 0) & (w_NV > 1 + high) | (sign_NV < 0) & (w_NV < 1 - low)
        lost_NV = np.where(drawn_NV & ~clipped_NV, 0.0, p_NV)
        for largest in (_UNCUT, 2.0, 1.0):
            sense = "equal" if largest == _UNCUT else "at most"
            g_NV = ppo_clip_bias(log_ratio_NV, sign_NV, low, high, largest)
            said_N = np.where(drawn_NV, q_NV * g_NV, 0.0).sum(axis=1)
            yield Trial(lost_NV.sum(axis=1), said_N, sense, f"clip range {low:g}, {high:g}")
        # the gradient itself: min(r A, clip(r) A) at r = w, against E_p[A g]
        kept_NV = np.where(clipped_NV, 0.0, q_NV * w_NV)
        term_NVJ = ((p_NV - kept_NV) * sign_NV)[..., None] * logit_scores(p_NV)
        bias_N = np.linalg.norm(term_NVJ.sum(axis=1), axis=-1)
        said_N = LOGIT_SCORE_NORM * lost_NV.sum(axis=1)
        yield Trial(bias_N, said_N, what="gradient in logits", side=True)


@challenge("ratio_budget")
def _ratio_budget(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """An update within what is left is never clipped, wherever the kernels are within rho."""
    rho_N = rng.exponential(0.1, n)
    at_N = rng.uniform(-1.0, 1.0, n)
    for low, high in ((0.2, 0.28), (0.2, 0.2), (0.9, 5.0), (1.5, 0.1)):
        left = ratio_budget(rho_N, low, high)
        update_N = 1.0 - left.low + rng.random(n) * (left.high + left.low)
        for drift_N in (rho_N, -rho_N, at_N * rho_N):
            inside_N = left.high >= -left.low
            ratio_N = np.where(inside_N, update_N * np.exp(drift_N), 1.0)
            what = f"clip range {low:g}, {high:g}"
            yield Trial(ratio_N, np.full(n, 1 + high), "at most", what)
            yield Trial(ratio_N, np.full(n, 1 - low), "at least", what)
        # the ends are just reached
        yield Trial((1 + left.high) * np.exp(rho_N), np.full(n, 1 + high), "equal", "upper end")
        if low < 1:
            yield Trial((1 - left.low) * np.exp(-rho_N), np.full(n, 1 - low), "equal", "lower end")
        yield Trial(rho_N, left.used_up * np.log1p(high), "equal", "fraction used up")
        if low < 1:
            yield Trial(rho_N, left.used_down * -np.log1p(-low), "equal", "fraction used down")


@challenge("score_norm2_logits")
def _score_norm2_logits(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    p_NV = distributions(rng, n, 5)
    exact_NV = (logit_scores(p_NV) ** 2).sum(axis=-1)
    with np.errstate(divide="ignore"):
        said_NV = score_norm2_logits(np.log(p_NV), (p_NV**2).sum(axis=1, keepdims=True))
    yield Trial(exact_NV.ravel(), said_NV.ravel(), "equal")
    yield Trial(exact_NV.ravel(), np.full(exact_NV.size, LOGIT_SCORE_NORM**2), side=True)


@challenge("sum_p2_from_top_k")
def _sum_p2_from_top_k(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    p_NV = distributions(rng, n, 6)
    # the rest as heavy as it can be: copies of the smallest token that is returned
    heavy_NV = np.repeat(rng.random((n, 2)) + np.eye(2)[0], [1, 5], axis=1)
    heavy_NV /= heavy_NV.sum(axis=1, keepdims=True)
    for whole_NV, what in ((p_NV, "random kernels"), (heavy_NV, "heavy rest")):
        sorted_NV = np.sort(whole_NV, axis=1)[:, ::-1]
        exact_N = (sorted_NV**2).sum(axis=1)
        for k in (1, 2, 4, 6):
            with np.errstate(divide="ignore"):
                low_N, high_N = sum_p2_from_top_k(np.log(sorted_NV[:, :k]))
            yield Trial(exact_N, low_N, "at least", f"{what}, k = {k}")
            yield Trial(exact_N, high_N, "at most", f"{what}, k = {k}")


@challenge("group_advantage_bound")
def _group_advantage_bound(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for size in (2, 3, 8, 16):
        reward_NG = rng.standard_t(2, (n // 8, size))
        reward_NG[: n // 16] = rng.random((n // 16, 1)) * (np.arange(size) == 0)  # one answer wins
        centred_NG = reward_NG - reward_NG.mean(axis=1, keepdims=True)
        for std in STDS:
            ddof = 1 if std == "sample" else 0
            spread_N1 = reward_NG.std(axis=1, ddof=ddof, keepdims=True)
            advantage_N = np.abs(centred_NG / spread_N1).max(axis=1)
            bound = group_advantage_bound(size, std)
            yield Trial(advantage_N, np.full(len(advantage_N), bound), what=f"groups of {size}")
