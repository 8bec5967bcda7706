# Challenges of the gradient of whole answers: enumerated trees, real scores, the worst rewards.
#
# Axes as in trees.py; J parameters.  Every answer is enumerated, so a bias is an exact sum.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from benchmarks.theory.base import Floats, Trial, challenge
from benchmarks.theory.importance_weights import psis
from benchmarks.theory.random_kernels import distributions
from benchmarks.theory.sequence import even
from benchmarks.theory.theorems.trajectory import (
    grpo_bias,
    rloo_bias,
    sequence_mis_bias,
    sequence_naive_bias,
    sequence_tis_bias,
    token_is_trajectory_bias,
)
from benchmarks.theory.trees import Trees, grove, trees
from servanda.theory.bounds.gradient import (
    Loss,
    Std,
    group_advantage_bound,
    loss_weights,
    policy_gradient_bias,
)
from servanda.theory.bounds.importance_weights import weight_gap

_LOSSES: tuple[Loss, ...] = ("token_mean", "sequence_sum", "sequence_mean")
_STDS: tuple[Std, ...] = ("sample", "population")
_CLIMBS = 4
_GROUP_CLIMB = 80  # steps


@dataclass(frozen=True)
class Scored:
    """Trees whose logits are linear in J parameters, with the scores of train.

    Args:
        score_NLTJ: grad log p of each step of each answer; 0 past its end.
    """

    trees: Trees
    score_NLTJ: Floats

    @cached_property
    def sum_NLJ(self) -> Floats:
        """S, of whole answers; its mean under train is 0."""
        return self.score_NLTJ.sum(axis=2)

    @cached_property
    def norm_N(self) -> Floats:
        """The largest |grad log p| of a token."""
        return np.linalg.norm(self.score_NLTJ, axis=3).max(axis=(1, 2))

    @cached_property
    def norm_sum_N(self) -> Floats:
        """The largest |S| of an answer."""
        return np.linalg.norm(self.sum_NLJ, axis=2).max(axis=1)

    @cached_property
    def weight_NL(self) -> Floats:
        """W = P / Q of each answer; 0 where infer never draws it, which weighs nothing."""
        p_NL, q_NL = self.trees.train_NL, self.trees.infer_NL
        return np.divide(p_NL, q_NL, out=np.zeros_like(p_NL), where=q_NL > 0)

    @cached_property
    def one_step_train_NLT(self) -> Floats:
        """Mass of each answer where train draws step t and infer every other one."""
        q_NLT, p_NLT = self.trees.infer_NLT, self.trees.train_NLT
        steps = range(q_NLT.shape[2])
        return np.stack([np.delete(q_NLT, t, 2).prod(axis=2) * p_NLT[..., t] for t in steps], 2)


def scored(rng: np.random.Generator, made: Trees, width: int) -> Scored:
    """Random features of every token after every prefix, shared by all answers through it."""
    steps, tokens = made.train_NLTV.shape[2:]
    digits_LT = (made.token_LT + 1) * (tokens + 1) ** np.arange(steps)
    before_LT = np.cumsum(digits_LT, axis=1) - digits_LT
    prefix, node_L = np.unique(before_LT, return_inverse=True)
    node_LT = node_L.reshape(before_LT.shape)
    feature_NCVJ = rng.standard_normal((len(made.train_NL), len(prefix), tokens, width))
    signs_N = rng.random((len(feature_NCVJ), 1, 1, 1)) < 0.5
    feature_NLTVJ = np.where(signs_N, np.sign(feature_NCVJ), feature_NCVJ)[:, node_LT]
    mean_NLTJ = np.einsum("nltv,nltvj->nltj", made.train_NLTV, feature_NLTVJ)
    own_NLTJ = np.take_along_axis(feature_NLTVJ, made.token_LT[None, :, :, None, None], 3)[
        ..., 0, :
    ]
    return Scored(made, np.where(made.live_LT[None, :, :, None], own_NLTJ - mean_NLTJ, 0.0))


def woods(rng: np.random.Generator, n: int) -> Iterator[Scored]:
    """Scored trees: with one parameter, with two, and those that one-step bounds want."""
    for width in (1, 2):
        for made in grove(rng, n // 2):
            yield scored(rng, made, width)
    # p = (1/2, 1/2) and one parameter: every answer has the largest score
    flat = trees(rng, n // 10, tokens=2, depth=1)
    half = np.full_like(flat.train_NLTV, 0.5)
    infer = np.repeat(distributions(rng, len(half), 2)[:, None, None], 2, axis=1)
    yield scored(rng, Trees(flat.token_LT, flat.live_LT, half, infer), 1)


def worst(term_NLJ: Floats) -> Floats:
    """Norm of sum_l r_l term_l at rewards in [-1, 1] that make it large, [N].

    The largest there is for one parameter; climbed towards it for more.
    """
    along_NJ = term_NLJ.sum(axis=1) + 1e-9
    for _ in range(_CLIMBS):
        sign_NL = np.where(np.einsum("nlj,nj->nl", term_NLJ, along_NJ) >= 0, 1.0, -1.0)
        along_NJ = np.einsum("nlj,nl->nj", term_NLJ, sign_NL)
    return np.linalg.norm(along_NJ, axis=1)


def biases(wood: Scored, off_NL: Floats) -> Floats:
    """The bias at the worst rewards, of weights that are `off_NL` in mass from train."""
    return worst(off_NL[..., None] * wood.sum_NLJ)


@challenge("loss_weights")
def _loss_weights(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Contexts as infer draws them; the advantage and the divisor are those of the answer."""
    for wood, psi in product(woods(rng, n // 4), psis()):
        made = wood.trees
        weight_NLT = psi.weight(made.weight_NLT)
        off_NLT = made.infer_NL[..., None] * weight_NLT - wood.one_step_train_NLT
        gap_NLT = weight_gap(made.log_ratio_NLT, psi) * made.live_LT
        for loss in _LOSSES:
            factor_LT = np.zeros(made.live_LT.shape)
            factor_LT[made.live_LT] = loss_weights(loss, made.length_L)
            gap_N = made.mean_infer((gap_NLT * factor_LT).sum(axis=2))
            divisor_NL = np.ones_like(made.infer_NL)
            if loss == "sequence_mean":
                divisor_NL = divisor_NL * made.length_L
            if loss == "token_mean":
                divisor_NL = divisor_NL * made.mean_infer(divisor_NL * made.length_L)[:, None]
                gap_N = gap_N / divisor_NL[:, 0]
            term_NLJ = np.einsum("nlt,nltj->nlj", off_NLT, wood.score_NLTJ)
            exact_N = worst(term_NLJ / divisor_NL[..., None])
            said_N = policy_gradient_bias(gap_N, 1.0, wood.norm_N)
            yield Trial(exact_N, said_N, what=f"{loss}, {psi.name}")


@challenge("sequence_naive_bias")
def _sequence_naive_bias(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for wood in woods(rng, n):
        made = wood.trees
        off_NL = made.infer_NL - made.train_NL
        chi2_N = np.divide(
            off_NL**2,
            made.train_NL,
            out=np.where(off_NL > 0, np.inf, 0.0),
            where=made.train_NL > 0,
        ).sum(axis=1)
        fisher_NJJ = np.einsum("nl,nlj,nlk->njk", made.train_NL, wood.sum_NLJ, wood.sum_NLJ)
        largest_N = np.linalg.eigvalsh(fisher_NJJ)[:, -1].clip(0.0)
        steps = made.live_LT.shape[1]
        for fisher, what in ((np.inf, "no Fisher matrix"), (largest_N, "with the Fisher matrix")):
            said_N = sequence_naive_bias(made.tv_N, chi2_N, steps, 1.0, wood.norm_N, fisher)
            yield Trial(biases(wood, off_NL), said_N, what=what)


@challenge("sequence_tis_bias")
def _sequence_tis_bias(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for wood in woods(rng, n):
        for cap in (1.0, 2.0, 10.0):
            capped_NL = np.minimum(wood.weight_NL, cap)
            off_NL = wood.trees.infer_NL * capped_NL - wood.trees.train_NL
            said_N = sequence_tis_bias(wood.trees.mean_infer(capped_NL), 1.0, wood.norm_sum_N)
            yield Trial(biases(wood, off_NL), said_N, what=f"cap {cap:g}")


@challenge("sequence_mis_bias")
def _sequence_mis_bias(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for wood in woods(rng, n):
        for low, high in ((0.5, 2.0), (0.9, 1.1), (0.0, 3.0)):
            inside_NL = (wood.weight_NL >= low) & (wood.weight_NL <= high)
            kept_NL = np.where(inside_NL, wood.weight_NL, 0.0)
            off_NL = wood.trees.infer_NL * kept_NL - wood.trees.train_NL
            outside_N = 1.0 - wood.trees.mean_infer(kept_NL)
            said_N = sequence_mis_bias(outside_N, 1.0, wood.norm_sum_N)
            yield Trial(biases(wood, off_NL), said_N, what=f"band {low:g}, {high:g}")


@challenge("token_is_trajectory_bias")
def _token_is_trajectory_bias(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    for wood in woods(rng, n):
        made = wood.trees
        tv_N, steps = made.tv_NLT.max(axis=(1, 2)), made.live_LT.shape[1]
        for cap in (np.inf, 2.0, 1.0):
            weight_NLT = np.minimum(made.weight_NLT, cap)
            off_NLT = made.infer_NL[..., None] * weight_NLT - made.train_NL[..., None]
            exact_N = worst(np.einsum("nlt,nltj->nlj", off_NLT, wood.score_NLTJ))
            left_N = made.mean_infer(((1.0 - weight_NLT) * made.live_LT).sum(axis=2)).clip(0.0)
            said_N = token_is_trajectory_bias(tv_N, steps, 1.0, wood.norm_N, left_N)
            what = f"token weights capped at {cap:g}"
            yield Trial(exact_N, said_N, what=what, side=True)  # what is left alone may attain it
    supported = [
        scored(rng, made, width) for width in (1, 2) for made in grove(rng, n // 4, support=True)
    ]
    balanced = [_opposed(made) for made, _ in even(rng, n // 4, 2)]
    for wood, what in (*((w, "support") for w in supported), *((w, "even") for w in balanced)):
        made = wood.trees
        off_NLT = made.infer_NL[..., None] * made.weight_NLT - made.train_NL[..., None]
        exact_N = worst(np.einsum("nlt,nltj->nlj", off_NLT, wood.score_NLTJ))
        tv_N, steps = made.tv_NLT.max(axis=(1, 2)), made.live_LT.shape[1]
        said_N = token_is_trajectory_bias(tv_N, steps, 1.0, wood.norm_N, 0.0)
        yield Trial(exact_N, said_N, what=f"importance weights, {what}")


def _opposed(made: Trees) -> Scored:
    """One parameter, whose score differs by 2 between the two tokens, and is of mean 0."""
    sign_LT = 2.0 * made.token_LT - 3.0
    mean_NLT = made.train_NLTV[..., 2] - made.train_NLTV[..., 1]
    return Scored(made, (sign_LT - mean_NLT)[..., None])


@challenge("grpo_bias")
def _grpo_bias(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Groups of three answers, every group enumerated."""
    small = [wood for wood in woods(rng, n) if len(wood.trees.length_L) <= 7]
    random = [(wood, _group_rewards(rng, wood)) for wood in small]
    for (wood, reward_NL), std in product((*random, _standing_out(rng, n // 10)), _STDS):
        advantage_NKKK = _group_advantages(reward_NL, std)
        bound_N = np.full(len(reward_NL), group_advantage_bound(3, std))
        largest_N = np.abs(advantage_NKKK).max(axis=(1, 2, 3))
        yield Trial(largest_N, bound_N, what="advantages", side=True)
        for whole in (False, True):
            yield _against_groups(wood, advantage_NKKK, std, whole)
    for std in _STDS:
        wood, reward_NL = _climbed_groups(rng, n // 20, std)
        yield _against_groups(wood, _group_advantages(reward_NL, std), std, True)


def _against_groups(wood: Scored, advantage_NKKK: Floats, std: Std, whole: bool) -> Trial:
    """The bias where infer draws the whole group and train one answer of it, or all."""
    p_NL, q_NL = wood.trees.train_NL, wood.trees.infer_NL

    def gradient(first_NL: Floats, others_NL: Floats) -> Floats:
        mass_NL = first_NL * np.einsum("nabc,nb,nc->na", advantage_NKKK, others_NL, others_NL)
        return np.einsum("na,naj->nj", mass_NL, wood.sum_NLJ)

    exact_N = np.linalg.norm(gradient(q_NL, q_NL) - gradient(p_NL, p_NL if whole else q_NL), axis=1)
    said_N = grpo_bias(wood.trees.tv_N, 3, wood.norm_sum_N, std, whole_group=whole)
    return Trial(exact_N, said_N, what="a whole group" if whole else "one answer")


def _group_advantages(reward_NL: Floats, std: Std) -> Floats:
    """Of the first of three answers, for all groups, [N, L, L, L]; 0 where rewards are equal.

    Of rewards that differ by less than 1e-6 rounding would decide the ninth digit.
    """
    group_NKKK3 = _groups(reward_NL)
    spread_NKKK = group_NKKK3.std(axis=-1, ddof=1 if std == "sample" else 0)
    apart_NKKK = group_NKKK3[..., 0] - group_NKKK3.mean(axis=-1)
    none_NKKK = np.zeros_like(apart_NKKK)
    return np.divide(apart_NKKK, spread_NKKK, out=none_NKKK, where=spread_NKKK > 1e-6)


def _climbed_groups(rng: np.random.Generator, n: int, std: Std) -> tuple[Scored, Floats]:
    """Four answers; laws, scores and rewards are moved to the largest bias of a whole group."""
    one = trees(rng, n, tokens=4, depth=1)

    def made(numbers_4NL: Floats) -> tuple[Scored, Floats]:
        odds_NL, drift_NL, score_NL, reward_NL = numbers_4NL
        laws = [np.exp(odds_NL), np.exp(odds_NL + 0.1 * drift_NL)]
        laws = [law_NL / law_NL.sum(axis=1, keepdims=True) for law_NL in laws]
        score_NL = score_NL - (laws[0] * score_NL).sum(axis=1, keepdims=True)
        train, infer = (np.repeat(law_NL[:, None, None], 4, axis=1) for law_NL in laws)
        pair = Trees(one.token_LT, one.live_LT, train, infer)
        return Scored(pair, score_NL[:, :, None, None]), np.round(reward_NL, 1)

    def height(numbers_4NL: Floats) -> Floats:
        wood, reward_NL = made(numbers_4NL)
        trial = _against_groups(wood, _group_advantages(reward_NL, std), std, True)
        return trial.exact / trial.bound

    best_4NL = rng.normal(size=(4, n, 4))
    best_N = height(best_4NL)
    for step in range(_GROUP_CLIMB):
        moved_4NL = best_4NL + 0.97**step * rng.normal(size=best_4NL.shape)
        moved_N = height(moved_4NL)
        best_4NL = np.where((moved_N > best_N)[None, :, None], moved_4NL, best_4NL)
        best_N = np.maximum(moved_N, best_N)
    return made(best_4NL)


def _group_rewards(rng: np.random.Generator, wood: Scored) -> Floats:
    shape = wood.trees.train_NL.shape
    return rng.integers(0, 2, shape) + rng.random((shape[0], 1)) * rng.random(shape)


def _standing_out(rng: np.random.Generator, n: int) -> tuple[Scored, Floats]:
    """One sure answer; infer has a rare better one where train has a rare worse one.

    Either stands out from a group of the sure answer as far as any answer can.
    """
    rare_N1 = 10.0 ** rng.uniform(-6.0, -1.0, (n, 1))
    infer_NV = np.hstack([1.0 - rare_N1, rare_N1, np.zeros_like(rare_N1)])
    one = trees(rng, n, tokens=3, depth=1)
    train, infer = (
        np.repeat(rows[:, None, None], 3, axis=1) for rows in (infer_NV[:, [0, 2, 1]], infer_NV)
    )
    score_NL = np.hstack([-rare_N1 / (1.0 - rare_N1), np.ones((n, 2))])  # of mean 0 under train
    made = Scored(Trees(one.token_LT, one.live_LT, train, infer), score_NL[:, :, None, None])
    return made, np.repeat([[0.0, 1.0, -1.0]], n, axis=0)


def _groups(reward_NL: Floats) -> Floats:
    """The rewards of all groups of three answers, [N, L, L, L, 3]."""
    members = (reward_NL[:, :, None, None], reward_NL[:, None, :, None], reward_NL[:, None, None])
    return np.stack(np.broadcast_arrays(*members), axis=-1)


@challenge("rloo_bias")
def _rloo_bias(rng: np.random.Generator, n: int) -> Iterator[Trial]:
    """Groups of two: E (R_1 - R_2) S_1 over enumerated pairs, against E_train R S."""
    for wood in (*woods(rng, n), _balanced(rng, n // 10)):
        p_NL, q_NL = wood.trees.train_NL, wood.trees.infer_NL
        # the worst for the sign of each answer's drift and score
        sided_NL = np.where((q_NL - p_NL) * wood.sum_NLJ[..., 0] >= 0, 1.0, 0.0)
        for reward_NL, what in ((rng.random(p_NL.shape), "random"), (sided_NL, "worst")):
            apart_NLL = reward_NL[:, :, None] - reward_NL[:, None]
            drawn_NJ = np.einsum("na,nb,nab,naj->nj", q_NL, q_NL, apart_NLL, wood.sum_NLJ)
            wanted_NJ = np.einsum("na,na,naj->nj", p_NL, reward_NL, wood.sum_NLJ)
            mean_N1 = (q_NL * reward_NL).sum(axis=1, keepdims=True)
            centred_N = np.abs(reward_NL - mean_N1).max(axis=1)
            said_N = rloo_bias(wood.trees.tv_N, centred_N, wood.norm_sum_N)
            exact_N = np.linalg.norm(drawn_NJ - wanted_NJ, axis=1)
            yield Trial(exact_N, said_N, what=f"{what} rewards")


def _balanced(rng: np.random.Generator, n: int) -> Scored:
    """One step, four equal tokens of infer; drift and score have every pair of signs."""
    drift_N1 = rng.uniform(0.0, 0.25, (n, 1))
    infer_NV = np.full((n, 4), 0.25)
    train_NV = infer_NV + drift_N1 * [1.0, -1.0, 1.0, -1.0]
    one = trees(rng, n, tokens=4, depth=1)
    train, infer = (np.repeat(rows[:, None, None], 4, axis=1) for rows in (train_NV, infer_NV))
    feature_L = np.array([1.0, 1.0, -1.0, -1.0])  # of mean 0 under train
    score_NLTJ = np.repeat(feature_L[None, :, None, None], n, axis=0)
    return Scored(Trees(one.token_LT, one.live_LT, train, infer), score_NLTJ)
