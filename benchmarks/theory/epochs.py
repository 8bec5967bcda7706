# Challenges of the gradient that a trainer applies: PPO's clip beside weights, a KL penalty, the
# direction of a biased gradient, and the norm that a sample shows.
#
# Axes: N contexts, V tokens, J parameters; C chances of a coin, K counts of its heads.

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from benchmarks.theory.base import Floats, Trial, challenge
from benchmarks.theory.gradient import linear_scores, logit_scores
from benchmarks.theory.importance_weights import psis
from benchmarks.theory.random_kernels import distributions, near
from benchmarks.theory.weighting_gap import exact_gap, pairs, ratios
from servanda.theory.bounds.gradient import (
    clipped_gradient_bias,
    gradient_direction,
    gradient_norm_at_least,
    kl_penalty_bias,
)
from servanda.theory.bounds.importance_weights import Psi

_CLIPS = ((0.2, 0.28, 3.0), (0.2, 0.2, 1.0), (1.0, 4.0, 1.5))  # low, high, dual
_PENALTIES = ((0.0, 1.0), (0.1, 10.0), (1.0, 0.5))  # beta, clip


def clipped_slope(r_NV: Floats, advantage: float, low: float, high: float, dual: float) -> Floats:
    """The derivative in r of min(r A, clip(r) A), and of its maximum with dual A where A < 0."""
    kept_NV = r_NV <= 1.0 + high if advantage > 0 else (r_NV >= 1.0 - low) & (r_NV <= dual)
    return np.where(kept_NV, advantage, 0.0)


def _largest(off_NV: Floats, ends: list[Floats], score_NVJ: Floats) -> Floats:
    """The largest norm of sum_v off h g over h between two ends for each token, [N]."""
    best_N = np.zeros(len(off_NV))
    for choice in product((0, 1), repeat=off_NV.shape[1]):
        h_NV = np.where(np.array(choice) == 0, *ends)
        term_NJ = np.einsum("nv,nvj->nj", off_NV * h_NV, score_NVJ)
        best_N = np.maximum(best_N, np.linalg.norm(term_NJ, axis=1))
    return best_N


def _off(p_NV: Floats, q_NV: Floats, psi: Psi) -> Floats:
    return p_NV - q_NV * psi.weight(ratios(p_NV, q_NV))


def _norms(score_NVJ: Floats) -> Floats:
    return np.linalg.norm(score_NVJ, axis=2).max(axis=1)


@challenge("clipped_gradient_bias")
def _clipped(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Any policy of any epoch against train and infer; every sign of the advantages is tried."""
    p_NV, q_NV = pairs(rng, n // 5)
    far_NV = distributions(rng, len(p_NV), p_NV.shape[1])
    new_NV = np.where(rng.random((len(p_NV), 1)) < 0.5, near(rng, p_NV), far_NV)
    r_NV = np.divide(new_NV, p_NV, out=np.full_like(p_NV, np.inf), where=p_NV > 0)
    a = 1.5
    for psi, (low, high, dual) in product(psis(), _CLIPS):
        off_NV, gap_N = _off(p_NV, q_NV, psi), exact_gap(p_NV, q_NV, psi)
        slopes = [clipped_slope(r_NV, side, low, high, dual) for side in (a, -a)]
        weighed = [np.where(slope == 0.0, 0.0, r_NV) * slope for slope in slopes]
        for score_NVJ, what in (
            (logit_scores(new_NV), "logits"),
            (linear_scores(rng, new_NV, 1), "one parameter"),
        ):
            said_N = clipped_gradient_bias(gap_N, a, _norms(score_NVJ), high, dual)
            exact_N = _largest(off_NV, weighed, score_NVJ)
            yield Trial(exact_N, said_N, what=f"{psi.name}, clip {low:g}, {high:g}, {what}")
        yield _at_the_clip(rng, n // 20, psi, (low, high, dual))


def _at_the_clip(
    rng: np.random.Generator, n: int, psi: Psi, clip: tuple[float, float, float]
) -> Trial:
    """Two tokens at the largest ratio, on which the kernels differ, and a third one."""
    low, high, dual = clip
    most, side = (1.0 + high, 1.0) if 1.0 + high >= dual else (dual, -1.0)
    mass_N = rng.uniform(0.01, 0.5, n) / most
    p_NV = np.stack([mass_N, mass_N, 1.0 - 2.0 * mass_N], axis=1)
    moved_N = mass_N * rng.choice([rng.random(), 1.0], n)
    q_NV = p_NV + moved_N[:, None] * np.array([1.0, -1.0, 0.0])
    slope_NV = clipped_slope(np.full_like(p_NV, most), side, low, high, dual)
    slope_NV[:, 2] = 0.0  # whatever is left for the third token, it has no gap
    score_V = np.array([1.0, -1.0, 0.0])  # of one parameter, of mean 0 under the new policy
    exact_N = np.abs((_off(p_NV, q_NV, psi) * most * slope_NV) @ score_V)
    said_N = clipped_gradient_bias(exact_gap(p_NV, q_NV, psi), 1.0, 1.0, high, dual)
    return Trial(exact_N, said_N, what=f"{psi.name}, at the clip")


@challenge("kl_penalty_bias")
def _kl_penalty(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """The penalty of the token itself, and of up to three that follow it, at any size."""
    p_NV, q_NV = pairs(rng, n // 5)
    reference_NV = np.where(rng.random((len(p_NV), 1)) < 0.5, near(rng, p_NV), p_NV[::-1])
    with np.errstate(divide="ignore", invalid="ignore"):
        drift_NV = np.nan_to_num(np.log(p_NV) - np.log(reference_NV), posinf=1e3, neginf=-1e3)
    # p = (1/2, 1/2): the reference gives most mass to a token that the policy never draws
    half_NV = np.broadcast_to(np.array([0.5, 0.5, 0.0, 0.0, 0.0]), p_NV.shape)
    apart_N = 0.5 * rng.random(len(p_NV))
    other_NV = half_NV + apart_N[:, None] * np.array([1.0, -1.0, 0.0, 0.0, 0.0])
    sides_NVJ = np.array([1.0, -1.0, 0.0, 0.0, 0.0])[None, :, None] + 0.0 * p_NV[..., None]
    a = 0.7
    for psi, (beta, clip), tokens in product(psis(), _PENALTIES, (1, 4)):
        for train_NV, infer_NV, own_NV, score_NVJ, what in (
            (p_NV, q_NV, drift_NV, logit_scores(p_NV), "logits"),
            (p_NV, q_NV, drift_NV, linear_scores(rng, p_NV, 1), "one parameter"),
            (half_NV, other_NV, np.full_like(p_NV, 1e3), sides_NVJ, "even"),
        ):
            own_NV, later = beta * np.clip(own_NV, -clip, clip), beta * (tokens - 1) * clip
            ends = [a - (own_NV - later), -a - (own_NV + later)]
            exact_N = _largest(_off(train_NV, infer_NV, psi), ends, score_NVJ)
            gap_N = exact_gap(train_NV, infer_NV, psi)
            said_N = kl_penalty_bias(gap_N, a, _norms(score_NVJ), beta, clip, tokens)
            yield Trial(exact_N, said_N, what=f"{psi.name}, beta {beta:g}, clip {clip:g}, {what}")


@challenge("gradient_direction")
def _direction(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """The exact gradient, a biased one, and the one that is farthest from it."""
    g_NJ = rng.standard_normal((n, 4)) * 10.0 ** rng.uniform(-3.0, 3.0, (n, 1))
    norm_N = np.linalg.norm(g_NJ, axis=1)
    bias_N = norm_N * rng.random(n)
    along_NJ = g_NJ / norm_N[:, None]
    across_NJ = np.cross(along_NJ[:, :3], rng.standard_normal((n, 3)))
    across_NJ = np.concatenate([across_NJ, np.zeros((n, 1))], axis=1)
    across_NJ -= (across_NJ * along_NJ).sum(axis=1, keepdims=True) * along_NJ
    across_NJ /= np.linalg.norm(across_NJ, axis=1, keepdims=True)
    sine_N1 = (bias_N / norm_N)[:, None]
    tangent_NJ = bias_N[:, None] * (np.sqrt(1.0 - sine_N1**2) * across_NJ - sine_N1 * along_NJ)
    drawn_NJ = rng.standard_normal(g_NJ.shape)
    drawn_NJ *= bias_N[:, None] / np.linalg.norm(drawn_NJ, axis=1, keepdims=True)
    for off_NJ, what in ((tangent_NJ, "farthest"), (drawn_NJ, "random")):
        exact_N = _cosine(g_NJ, g_NJ + off_NJ)
        yield Trial(exact_N, gradient_direction(bias_N, norm_N), "at least", what)
        other_N = np.maximum(np.linalg.norm(g_NJ + off_NJ, axis=1), 1e-300)
        yield Trial(exact_N, gradient_direction(bias_N, other_N), "at least", "of the other norm")
    # a policy gradient of enumerated contexts, whatever the certificate says of it
    p_NV, q_NV = pairs(rng, n)
    advantage_NV1 = rng.uniform(-1.0, 1.0, p_NV.shape)[..., None]
    score_NVJ = logit_scores(p_NV)
    for psi in psis():
        exact_NJ = (p_NV[..., None] * advantage_NV1 * score_NVJ).sum(axis=1)
        off_NJ = (_off(p_NV, q_NV, psi)[..., None] * advantage_NV1 * score_NVJ).sum(axis=1)
        biased_NJ = exact_NJ - off_NJ
        norms = (np.linalg.norm(x_NJ, axis=1) for x_NJ in (exact_NJ, biased_NJ))
        known_N = np.minimum(*norms) > 1e-9
        said_N = gradient_direction(
            exact_gap(p_NV, q_NV, psi)[known_N] * _norms(score_NVJ)[known_N],
            np.linalg.norm(biased_NJ[known_N], axis=1),
        )
        cosine_N = _cosine(exact_NJ[known_N], biased_NJ[known_N])
        yield Trial(cosine_N, said_N, "at least", f"policy gradient, {psi.name}", side=True)


def _cosine(one_NJ: Floats, other_NJ: Floats) -> Floats:
    norms_N = np.linalg.norm(one_NJ, axis=1) * np.linalg.norm(other_NJ, axis=1)
    return (one_NJ * other_NJ).sum(axis=1) / norms_N


@challenge("gradient_norm_at_least")
def _norm(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Gradients of +B or -B: the probability that any of N bounds exceeds |g|, by enumeration."""
    for planned, alpha in ((8, 0.5), (40, 0.05), (200, 0.2)):
        chance_C = np.r_[0.5, rng.random(n // 3)]
        g_C = np.abs(2.0 * chance_C - 1.0)
        alive_CK = np.zeros((len(chance_C), planned + 1))  # by the number of +B so far
        alive_CK[:, 0] = 1.0
        for k in range(1, planned + 1):
            up_CK = np.concatenate([0.0 * alive_CK[:, :1], alive_CK[:, :-1]], axis=1)
            alive_CK = chance_C[:, None] * up_CK + (1.0 - chance_C)[:, None] * alive_CK
            mean_K = np.abs(2.0 * np.arange(planned + 1) - k) / k
            said_K = gradient_norm_at_least(mean_K, 1.0, k, planned, alpha)
            alive_CK = np.where(said_K[None] > g_C[:, None], 0.0, alive_CK)
        wrong_C = 1.0 - alive_CK.sum(axis=1)
        yield Trial(wrong_C, np.full(len(wrong_C), alpha), what=f"{planned} gradients")
