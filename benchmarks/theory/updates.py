# Challenges of what comes on top of a kernel gap: enumerated contexts and episodes, worst signs.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.theory.base import Floats, Trial, challenge
from benchmarks.theory.gradient import linear_scores, logit_scores, worst_signs
from benchmarks.theory.importance_weights import psis
from benchmarks.theory.random_kernels import distributions, near
from benchmarks.theory.theorems.updates import (
    clipped_update_bias,
    episode_tv,
    gradient_cosine,
    penalised_reward_bias,
    tv_through_a_third,
)
from benchmarks.theory.weighting_gap import exact_gap, pairs, ratios

_CLIPS = ((0.2, 0.28, 1.28), (0.2, 0.2, 3.0), (0.0, 0.0, 1.0))  # low, high, dual
_SIZE = 5


def _norms(p_NV: Floats, q_NV: Floats, score_NVJ: Floats) -> Floats:
    """The largest norm of a score of a token that either kernel can draw, [N]."""
    reached_NV = (p_NV > 0) | (q_NV > 0)
    return np.where(reached_NV, np.linalg.norm(score_NVJ, axis=-1), 0.0).max(axis=1)


def _halves(rng: np.random.Generator, p_NV: Floats) -> Floats:
    """Some as (1/2, 1/2), the only law whose scores can all point one way."""
    half_V = (np.eye(_SIZE)[0] + np.eye(_SIZE)[1]) / 2
    return np.where(rng.random((len(p_NV), 1)) < 0.2, half_V, p_NV)


@challenge("clipped_update_bias")
def _clipped_update_bias(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    p_NV, q_NV = pairs(rng, n)
    p_NV = _halves(rng, p_NV)
    most_N = rng.exponential(2.0, n)
    for psi in psis():
        off_NV = p_NV - q_NV * psi.weight(ratios(p_NV, q_NV))
        gap_N = exact_gap(p_NV, q_NV, psi)
        for low, high, dual in _CLIPS:
            # anywhere in the range, at its upper ends, and beyond
            for at in ("drawn", "ends"):
                sign_NV = rng.choice([-1.0, 1.0], p_NV.shape)
                ratio_NV = rng.uniform(0.0, 2 * dual, p_NV.shape)
                if at == "ends":
                    ratio_NV = np.where(sign_NV > 0, 1 + high, dual)
                clipped_NV = (sign_NV > 0) & (ratio_NV > 1 + high)
                clipped_NV |= (sign_NV < 0) & ((ratio_NV < 1 - low) | (ratio_NV > dual))
                kept_NV = np.where(clipped_NV, 0.0, ratio_NV * most_N[:, None])
                for score_NVJ in (logit_scores(p_NV), linear_scores(rng, p_NV, 1)):
                    norm_N = _norms(p_NV, q_NV, score_NVJ)
                    said_N = clipped_update_bias(gap_N, most_N, norm_N, high, dual)
                    term_NVJ = (off_NV * kept_NV)[..., None] * score_NVJ
                    what = f"{psi.name}, clip {high:g}, dual {dual:g}, {at}"
                    # any signs: a bound on every choice of the advantages' signs at once
                    yield Trial(worst_signs(term_NVJ), said_N, what=what)
                    given_N = np.linalg.norm((term_NVJ * sign_NV[..., None]).sum(axis=1), axis=-1)
                    yield Trial(given_N, said_N, what=what)


@challenge("penalised_reward_bias")
def _penalised_reward_bias(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    p_NV, q_NV = pairs(rng, n)
    p_NV = _halves(rng, p_NV)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_NV = np.log(p_NV) - np.log(distributions(rng, n, _SIZE))
    most_N = rng.exponential(1.0, n)
    for psi in psis():
        off_NV = p_NV - q_NV * psi.weight(ratios(p_NV, q_NV))
        gap_N = exact_gap(p_NV, q_NV, psi)
        for beta, clip in ((0.1, 10.0), (1.0, 0.5), (0.0, 3.0)):
            cut_NV = np.clip(np.nan_to_num(log_NV, nan=0.0), -clip, clip)
            sign_NV = rng.choice([-1.0, 1.0], p_NV.shape)
            drawn_NV = most_N[:, None] * sign_NV - beta * cut_NV
            worst_NV = np.broadcast_to(most_N[:, None] + beta * clip, p_NV.shape)
            for score_NVJ in (logit_scores(p_NV), linear_scores(rng, p_NV, 1)):
                norm_N = _norms(p_NV, q_NV, score_NVJ)
                said_N = penalised_reward_bias(gap_N, most_N, norm_N, beta, clip)
                what = f"{psi.name}, beta {beta:g}, clip {clip:g}"
                term_NVJ = (off_NV * drawn_NV)[..., None] * score_NVJ
                yield Trial(np.linalg.norm(term_NVJ.sum(axis=1), axis=-1), said_N, what=what)
                # rewards and log ratios at their ends, with any signs
                term_NVJ = (off_NV * worst_NV)[..., None] * score_NVJ
                yield Trial(worst_signs(term_NVJ), said_N, what=f"{what}, ends")


@challenge("episode_tv")
def _episode_tv(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Two turns of one token, of 3, with one of 2 answers of an environment between them."""
    m = max(1, n // 8)
    for alike in ("both", "first", "second"):
        one_MA = distributions(rng, m, 3)
        other_MA = one_MA if alike == "second" else near(rng, one_MA)
        world_MAO = distributions(rng, 3 * m, 2).reshape(m, 3, 2)
        then = distributions(rng, 6 * m, 3)
        later = then if alike == "first" else near(rng, then)
        then_MAOB, later_MAOB = (law.reshape(m, 3, 2, 3) for law in (then, later))
        train_ME, infer_ME = (
            (first[:, :, None, None] * world_MAO[..., None] * second).reshape(m, -1)
            for first, second in ((one_MA, then_MAOB), (other_MA, later_MAOB))
        )
        exact_M = np.abs(train_ME - infer_ME).sum(axis=1) / 2
        first_M = np.abs(one_MA - other_MA).sum(axis=1) / 2
        second_MAO = np.abs(then_MAOB - later_MAOB).sum(axis=-1) / 2
        reached_MAO = other_MA[:, :, None] * world_MAO
        sums = episode_tv(
            np.stack(
                [np.broadcast_to(first_M[:, None, None], second_MAO.shape), second_MAO], -1
            ).reshape(-1),
            np.full(second_MAO.size, 2),
        )
        said_M = (reached_MAO * sums.reshape(second_MAO.shape)).sum(axis=(1, 2))
        yield Trial(exact_M, said_M, what=f"two turns, {alike}")
        # the environment cancels: the weight of an episode is the product of the model's
        with np.errstate(divide="ignore", invalid="ignore"):
            weight = (one_MA / other_MA)[:, :, None, None] * then_MAOB / later_MAOB
        weight_ME = np.where(infer_ME > 0, np.nan_to_num(weight.reshape(m, -1)), 0.0)
        drawn_ME = np.where(infer_ME > 0, train_ME, 0.0)
        yield Trial((infer_ME * weight_ME).ravel(), drawn_ME.ravel(), "equal", "weights", side=True)


@challenge("tv_through_a_third")
def _tv_through_a_third(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    a_NV, b_NV = pairs(rng, n)
    share_N1 = rng.random((n, 1))
    for c_NV, what in (
        (distributions(rng, n, _SIZE), "any third"),
        (share_N1 * a_NV + (1 - share_N1) * b_NV, "between"),
        (near(rng, b_NV), "near one"),
    ):
        exact_N, one_N, other_N = (
            np.abs(x - y).sum(axis=1) / 2 for x, y in ((a_NV, b_NV), (a_NV, c_NV), (c_NV, b_NV))
        )
        low_N, high_N = tv_through_a_third(one_N, other_N)
        yield Trial(exact_N, high_N, what=what)
        yield Trial(exact_N, low_N, "at least", what)
        low_N, _ = tv_through_a_third(exact_N, one_N)
        yield Trial(other_N, low_N, "at least", f"{what}, the other way")


@challenge("gradient_cosine")
def _gradient_cosine(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    exact_NJ = rng.normal(size=(n, 3))
    norm_N = np.linalg.norm(exact_NJ, axis=1)
    share_N = rng.random(n) * 0.999
    bias_N = share_N * norm_N
    error_NJ = rng.normal(size=(n, 3))
    error_NJ *= (bias_N / np.linalg.norm(error_NJ, axis=1))[:, None]
    # the worst: at a right angle to the biased gradient, so that it turns most
    side_NJ = np.cross(exact_NJ, error_NJ)
    side_NJ /= np.linalg.norm(side_NJ, axis=1)[:, None]
    along_NJ = exact_NJ / norm_N[:, None]
    turned_NJ = np.sqrt(1 - share_N**2)[:, None] * side_NJ - share_N[:, None] * along_NJ
    for bent_NJ, what in ((error_NJ, "any error"), (bias_N[:, None] * turned_NJ, "worst error")):
        found_NJ = exact_NJ + bent_NJ
        cosine_N = (found_NJ * exact_NJ).sum(axis=1) / np.linalg.norm(found_NJ, axis=1) / norm_N
        yield Trial(cosine_N, gradient_cosine(bias_N, norm_N), "at least", what)
