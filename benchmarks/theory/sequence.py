# Challenges of the bounds on whole answers: enumerated trees, and chains of two-level steps.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.theory.base import Trial, challenge
from benchmarks.theory.random_kernels import Floats, distributions
from benchmarks.theory.theorems.sequence import reward_drift_from_chi2, reward_interval, tv_from_kl
from benchmarks.theory.theorems.surrogate import surrogate_error, surrogate_error_from_tv
from benchmarks.theory.trees import Trees, binary, grove
from servanda.theory.bounds.sequence import (
    conversation_tv_from_token_tv,
    osc_for_reward_drift,
    reward_drift_from_tv,
    sequence_estimators,
    sequence_tv_from_osc,
    sequence_tv_from_token_tv,
    sequence_tv_gaussian,
)

STEPS = (1, 2, 8, 128, 1000)
_DEPTHS = (2, 3, 4)  # of answers whose drift follows what was drawn
_CLIMB = 60  # steps of a climb


def _ragged(made: Trees) -> tuple[Floats, NDArray[np.int64]]:
    """The answers of all trees one after another, as sampled tokens are given."""
    lengths = np.tile(made.length_L, len(made.train_NL))
    return made.log_ratio_NLT[:, made.live_LT].ravel(), lengths


@challenge("sequence_estimators")
def _estimators(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """TV is the exact mean, chains that part the coupling, the steps' TV the total."""
    for made in grove(rng, n):
        found = sequence_estimators(*_ragged(made))
        exact_N, coupling_N, total_N = (
            made.mean_infer(values.reshape(made.train_NL.shape))
            for values in (found.exact, found.coupling, found.total)
        )
        yield Trial(made.tv_N, exact_N, "equal", "exact")
        together_N = np.minimum(made.train_NLT, made.infer_NLT).prod(axis=2).sum(axis=1)
        yield Trial(1.0 - together_N, coupling_N, "equal", "coupled chains")
        yield Trial(exact_N, coupling_N, what="coupling")
        yield Trial(coupling_N, total_N, what="total")
        yield Trial(made.mean_infer(made.tv_NLT.sum(axis=2)), total_N, "equal", "steps' TV")


def _rewards(rng: np.random.Generator, made: Trees) -> Iterator[Floats]:
    """Rewards in [0, 1] of each answer, [N, L]: random, for and against train, off support."""
    more_NL = made.train_NL > made.infer_NL
    yield rng.random(more_NL.shape)
    yield more_NL.astype(np.float64)
    yield (~more_NL).astype(np.float64)
    yield (made.infer_NL == 0).astype(np.float64)


def _drift(made: Trees, reward_NL: Floats) -> Floats:
    """E_train R - E_infer R, without losing the digits of a small one."""
    return ((made.train_NL - made.infer_NL) * reward_NL).sum(axis=1)


@challenge("reward_drift_from_tv")
def _reward_from_tv(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for made in grove(rng, n):
        low, high = np.sort(rng.normal(size=2))
        for reward_NL in _rewards(rng, made):
            drift_N = np.abs(_drift(made, low + (high - low) * reward_NL))
            yield Trial(drift_N, reward_drift_from_tv(made.tv_N, low, high), what="rewards")


@challenge("reward_drift_from_chi2")
def _reward_from_chi2(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for support in (True, False):
        for made in grove(rng, n, support=support):
            weight_NL = np.exp(made.log_ratio_NLT.sum(axis=2))
            missing_N = (made.train_NL * (made.infer_NL == 0)).sum(axis=1) > 0
            chi2_N = np.where(missing_N, np.inf, made.mean_infer((weight_NL - 1.0) ** 2))
            steepest_NL = weight_NL / weight_NL.max(axis=1, keepdims=True)
            for reward_NL in (steepest_NL, *_rewards(rng, made)):
                centred_NL = reward_NL - made.mean_infer(reward_NL)[:, None]
                std_N = np.sqrt(made.mean_infer(centred_NL**2))
                drift_N = np.abs(_drift(made, centred_NL))
                said_N = reward_drift_from_chi2(chi2_N, std_N)
                says_N = np.isfinite(said_N)  # an endless chi2 says nothing to hold it against
                yield Trial(drift_N[says_N], said_N[says_N], what="rewards")


@challenge("reward_interval")
def _reward_interval(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for made in grove(rng, n):
        log_weight_NL = made.log_ratio_NLT.sum(axis=2)
        for reward_NL in _rewards(rng, made):
            drift_N = _drift(made, reward_NL)
            for cap in (1.0, 1.5, 10.0):
                ends = reward_interval(log_weight_NL.ravel(), reward_NL.ravel(), cap)
                low_N, high_N = (made.mean_infer(x.reshape(reward_NL.shape)) for x in ends)
                yield Trial(drift_N, high_N, what=f"upper end, cap {cap:g}")
                yield Trial(-drift_N, -low_N, what=f"lower end, cap {cap:g}")


@challenge("sequence_tv_from_token_tv")
def _from_token_tv(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for made in grove(rng, n):
        tokens_N = made.mean_infer(made.length_L[None, :].astype(np.float64))
        mean_N = made.mean_infer(made.tv_NLT.sum(axis=2)) / tokens_N
        depth = made.live_LT.shape[1]
        yield Trial(made.tv_N, sequence_tv_from_token_tv(mean_N, tokens_N), what="mean length")
        yield Trial(made.tv_N, sequence_tv_from_token_tv(mean_N, depth), what="largest length")


@challenge("conversation_tv_from_token_tv")
def _conversations(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """An environment takes the steps after one of the tokens, or every second one."""
    for made in grove(rng, n):
        after_LT = np.roll(made.token_LT, 1, axis=1) == 1
        second_LT = np.arange(made.live_LT.shape[1])[None] % 2 == 1
        for theirs_LT, what in ((after_LT, "after a call"), (second_LT, "every second step")):
            theirs_LT = theirs_LT & made.live_LT
            theirs_LT[:, 0] = False
            infer = np.where(theirs_LT[None, :, :, None], made.train_NLTV, made.infer_NLTV)
            one = Trees(made.token_LT, made.live_LT, made.train_NLTV, infer)
            own_LT = made.live_LT & ~theirs_LT
            length_L = own_LT.sum(axis=1)
            lengths = np.tile(length_L, len(one.train_NL))
            found = sequence_estimators(one.log_ratio_NLT[:, own_LT].ravel(), lengths)
            exact_N = one.mean_infer(found.exact.reshape(one.train_NL.shape))
            yield Trial(one.tv_N, exact_N, "equal", f"identity, {what}", side=True)
            tokens_N = one.mean_infer(length_L[None].astype(np.float64))
            mean_N = one.mean_infer((one.tv_NLT * own_LT).sum(axis=2)) / tokens_N
            for most, of in ((tokens_N, "mean"), (length_L.max(), "largest")):
                said_N = conversation_tv_from_token_tv(mean_N, most)
                yield Trial(one.tv_N, said_N, what=f"{what}, {of} length")


@challenge("tv_from_kl")
def _tv_from_kl(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Trees in both directions, means over contexts, and the pairs that come nearest."""
    for made in grove(rng, n, support=True):
        log_weight_NL = made.log_ratio_NLT.sum(axis=2)
        # q (e^x - 1 - x) and p (e^-x - 1 + x): no term is negative, so small ones keep digits
        kl_N = made.mean_infer(np.expm1(log_weight_NL) - log_weight_NL)
        reverse_N = made.mean_train(np.expm1(-log_weight_NL) + log_weight_NL)
        yield Trial(made.tv_N, tv_from_kl(kl_N), what="infer from train")
        yield Trial(made.tv_N, tv_from_kl(reverse_N), what="train from infer")
        share_N = distributions(rng, 1, len(kl_N))[0]
        mixed = np.array([share_N @ made.tv_N]), tv_from_kl([share_N @ kl_N])
        yield Trial(*mixed, what="mean over contexts")
    half, step = np.full(n, 0.5), 10.0 ** rng.uniform(-4.0, -1.0, n)
    kl_N = -0.5 * np.log1p(-4.0 * step**2)
    yield Trial(np.abs(half - (half + step)), tv_from_kl(kl_N), what="near a half")
    rest = 10.0 ** rng.uniform(-9.0, -1.0, n)
    kl_N = (1.0 - 2.0 * rest) * (np.log1p(-rest) - np.log(rest))
    yield Trial(1.0 - 2.0 * rest, tv_from_kl(kl_N), what="far apart")


def two_level_tv(osc_N: Floats, share_N: Floats, steps: int) -> Floats:
    """TV of so many independent steps whose logits drift by osc on a set, exactly.

    Args:
        share_N: train's mass of the set.  Only how often it was met matters: a binomial.
    """
    log_times_K = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, steps + 1)))])
    met_K = np.arange(steps + 1)
    log_ways_K = log_times_K[-1] - log_times_K - log_times_K[::-1]
    # a share of s becomes s e^o / (1 - s + s e^o)
    growth_N = np.log1p(share_N * np.expm1(osc_N))
    log_p_N, log_1p_N = np.log(share_N), np.log1p(-share_N)
    log_p_NK = met_K * log_p_N[:, None] + (steps - met_K) * log_1p_N[:, None] + log_ways_K
    moved_NK = met_K * osc_N[:, None] - steps * growth_N[:, None]
    # |P - Q| from the larger of the two, which cannot overflow
    larger_NK = np.exp(log_p_NK + np.maximum(moved_NK, 0.0))
    return -(larger_NK * np.expm1(-np.abs(moved_NK))).sum(axis=1) / 2.0


def _worst_share(rng: np.random.Generator, osc_N: Floats) -> Floats:
    """Train's mass of the set that drifts: the one that is worst for one step, or any."""
    return np.where(
        rng.random(len(osc_N)) < 0.5, 1.0 / (1.0 + np.exp(osc_N / 2.0)), rng.random(len(osc_N))
    )


def adaptive(rng: np.random.Generator, osc_N: Floats, depth: int) -> Trees:
    """Every context drifts by osc, on a share that its prefix decides, climbed to the largest TV.

    Train's log-odds of the token that drifts, and whether it goes up or down, are moved at
    random; what makes the TV of whole answers larger is kept.
    """
    shape = (len(osc_N), 2**depth - 1)
    sign_NC = rng.choice([-1.0, 1.0], shape)

    def kernels(odds_NC: Floats, sign_NC: Floats) -> Trees:
        # around the log-odds at which the two shares lie evenly on both sides of a half
        train, infer = (
            1.0 / (1.0 + np.exp(-(odds_NC + side * sign_NC * osc_N[:, None] / 2.0)))
            for side in (-1.0, 1.0)
        )
        return binary(train, infer)

    odds_NC = rng.normal(0.0, 1e-3, shape)
    best_N = kernels(odds_NC, sign_NC).tv_N
    for step in range(_CLIMB):
        width = 2.0 * 0.9**step
        tried_NC = odds_NC + width * rng.normal(size=shape) * (rng.random(shape) < 0.5)
        turned_NC = np.where(rng.random(shape) < 0.1, -sign_NC, sign_NC)
        tv_N = kernels(tried_NC, turned_NC).tv_N
        better_N1 = (tv_N > best_N)[:, None]
        odds_NC = np.where(better_N1, tried_NC, odds_NC)
        sign_NC = np.where(better_N1, turned_NC, sign_NC)
        best_N = np.maximum(tv_N, best_N)
    return kernels(odds_NC, sign_NC)


@challenge("sequence_tv_from_osc")
def _from_osc(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for made in grove(rng, n, support=True):
        bound_N = sequence_tv_from_osc(made.osc_N, made.live_LT.shape[1])
        yield Trial(made.tv_N, bound_N, what="trees")
    for steps in STEPS:
        osc_N = 10.0 ** rng.uniform(-4.0, 1.0, n // len(STEPS) + 1)
        exact_N = two_level_tv(osc_N, _worst_share(rng, osc_N), steps)
        yield Trial(exact_N, sequence_tv_from_osc(osc_N, steps), what=f"{steps} equal steps")
    for depth in _DEPTHS:
        osc_N = 10.0 ** rng.uniform(-3.0, 1.0, n // 20 + 1)
        exact_N = adaptive(rng, osc_N, depth).tv_N
        yield Trial(exact_N, sequence_tv_from_osc(osc_N, depth), what=f"{depth} climbed steps")


@challenge("osc_for_reward_drift")
def _for_reward_drift(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Kernels that drift by what it allows, and the reward of an answer that drifts most."""
    low, high = -1.0, 2.0
    for steps in STEPS:
        drift_N = (high - low) * 10.0 ** rng.uniform(-4.0, -0.01, n // len(STEPS) + 1)
        osc_N = osc_for_reward_drift(drift_N, steps, low, high)
        exact_N = (high - low) * two_level_tv(osc_N, _worst_share(rng, osc_N), steps)
        yield Trial(exact_N, drift_N, what=f"{steps} equal steps")
    for depth in _DEPTHS:
        drift_N = (high - low) * 10.0 ** rng.uniform(-4.0, -0.01, n // 20 + 1)
        osc_N = osc_for_reward_drift(drift_N, depth, low, high)
        exact_N = (high - low) * adaptive(rng, osc_N, depth).tv_N
        yield Trial(exact_N, drift_N, what=f"{depth} climbed steps")


@challenge("sequence_tv_gaussian")
def _gaussian(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Two normal laws a distance apart: what it claims of them is exact, by quadrature."""
    apart_N = 10.0 ** rng.uniform(-3.0, 1.0, n)
    node_K, weight_K = np.polynomial.legendre.leggauss(200)
    # beyond the middle the second density is the larger
    x_NK = apart_N[:, None] / 2.0 + 8.0 * (node_K + 1.0)
    density_NK = np.exp(-(x_NK**2) / 2.0) / np.sqrt(2.0 * np.pi)
    above_NK = density_NK * np.expm1(apart_N[:, None] * x_NK - apart_N[:, None] ** 2 / 2.0)
    exact_N = 8.0 * (above_NK * weight_K).sum(axis=1)
    yield Trial(exact_N, sequence_tv_gaussian(apart_N**2 / 2.0), "equal", "normal laws")


@challenge("surrogate_error")
def _surrogate(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for made in grove(rng, n, support=True):
        bound_N = made.mean_infer(surrogate_error(*_ragged(made)).reshape(made.train_NL.shape))
        for error_N in _surrogate_errors(rng, made):
            yield Trial(error_N, bound_N, what="trees")


@challenge("surrogate_error_from_tv")
def _surrogate_from_tv(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for made in grove(rng, n, support=True):
        mean_NT = (made.infer_NL[:, :, None] * made.tv_NLT).sum(axis=1)
        largest_N = made.tv_NLT.max(axis=(1, 2))
        pairs = zip(mean_NT, largest_N, strict=True)
        bound_N = np.array([surrogate_error_from_tv(mean_T, most) for mean_T, most in pairs])
        for error_N in _surrogate_errors(rng, made):
            yield Trial(error_N, bound_N, what="trees")
    for made, tv_N in even(rng, n // 4, 2):
        bound_N = np.array([surrogate_error_from_tv([tv, tv], tv) for tv in tv_N])
        for error_N in _surrogate_errors(rng, made):
            yield Trial(error_N, bound_N, what="two steps of one drift")


def even(rng: np.random.Generator, n: int, depth: int) -> Iterator[tuple[Trees, Floats]]:
    """Steps that drift alike after every prefix, around a half of infer and of train; their TV."""
    tv_N = 0.5 * 10.0 ** rng.uniform(-3.0, 0.0, n)
    half_NC = np.full((n, 2**depth - 1), 0.5)
    for train, infer in ((half_NC + tv_N[:, None], half_NC), (half_NC, half_NC + tv_N[:, None])):
        yield binary(train, infer), tv_N


def _surrogate_errors(rng: np.random.Generator, made: Trees) -> Iterator[Floats]:
    """|J(P) - surrogate| of the reward in [0, 1] that makes it largest, and of random ones.

    E_infer (w_t - 1) A_t is E_infer (w_t - 1) R, so the error is linear in R.
    """
    away_NL = np.expm1(made.log_ratio_NLT).sum(axis=2)
    missed_NL = made.train_NL - made.infer_NL - made.infer_NL * away_NL
    yield np.maximum(missed_NL, 0.0).sum(axis=1)
    yield np.maximum(-missed_NL, 0.0).sum(axis=1)
    yield np.abs((missed_NL * rng.random(missed_NL.shape)).sum(axis=1))
