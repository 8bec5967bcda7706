# Scenarios: streams that break procedures, each with ours and with common shortcuts.
#
# A scenario samples R runs and yields (procedure, whether it is ours, its wrong verdicts).
# Every x is a token's value in [0, 1]; its distribution is explicit, so that the true mean is
# known without an estimate.
# Axes: R runs, G prompt groups in dispatch order, T places for tokens, K evaluations.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.theory import baselines
from benchmarks.theory.simulation import (
    ALPHA,
    Bools,
    Draw,
    Ever,
    Floats,
    any_look,
    ever,
    group_ratio,
    log_moment,
    log_moment_e,
    share_e,
    shiryaev_roberts,
    unequal,
)
from benchmarks.theory.slice_multiplicity import e_bh, slice_alpha
from servanda.registry import Registry
from servanda.theory.stats.alpha import attempt_alpha
from servanda.theory.stats.bets import NEG, POS

GROUPS, TOKENS = 160, 8  # of a run; evaluated after every 8 groups
TRUTH = 0.1

Answers = Iterator[tuple[str, bool, Ever]]
OURS, HABIT = True, False
_REALISED, _POPULATION = "LogMoment, realised", "GroupRatio, population"


@dataclass(frozen=True)
class Scenario:
    """One kind of stream: (rng, runs) -> procedures and their verdicts."""

    name: str
    about: str
    run: Callable[[np.random.Generator, int], Answers]


SCENARIOS: Registry[Scenario] = Registry("scenario")


def scenario(
    name: str, about: str
) -> Callable[[Callable[[np.random.Generator, int], Answers]], Scenario]:
    """Register a scenario; `about` describes its streams in a line."""
    return lambda run: SCENARIOS.add(name, Scenario(name, about, run))


def _shape(runs: int) -> tuple[int, int, int]:
    return runs, GROUPS, TOKENS


def _hits(rng: np.random.Generator, mean_RGT: Floats) -> Floats:
    return (rng.random(mean_RGT.shape) < mean_RGT).astype(np.float64)


def _hot(rng: np.random.Generator, runs: int, groups: int = GROUPS) -> Floats:
    """Rates of prompts, [R, G, 1]: one in ten carries most of the divergence; 0.1 on average."""
    return np.where(rng.random((runs, groups, 1)) < 0.1, 0.73, 0.03)


def _clustered_draw(rng: np.random.Generator, runs: int) -> Draw:
    rate_RGT = np.broadcast_to(_hot(rng, runs), _shape(runs))
    return Draw.of(_hits(rng, rate_RGT), rate_RGT, TRUTH)


@scenario("autocorrelated", "tokens diverge in long stretches within a response")
def _autocorrelated(rng: np.random.Generator, runs: int) -> Answers:
    rough_RG = rng.random((runs, GROUPS)) < 0.25
    rate_RGT = np.empty(_shape(runs))
    for t in range(TOKENS):
        rate_RGT[:, :, t] = np.where(rough_RG, 0.34, 0.02)
        turns_RG = rng.random((runs, GROUPS)) < np.where(rough_RG, 0.06, 0.02)
        rough_RG = rough_RG ^ turns_RG
    draw = Draw.of(_hits(rng, rate_RGT), rate_RGT, TRUTH)
    yield _REALISED, OURS, log_moment(draw)
    yield _POPULATION, OURS, group_ratio(draw)
    yield "normal interval, every round", HABIT, baselines.normal_watched(draw)
    yield "sliding window of 5 rounds", HABIT, baselines.sliding_window(draw)
    yield "mean <= limit, every round", HABIT, baselines.mean_gate(draw)


@scenario("heavy-tailed", "one token in 660 carries 40 % of the divergence (Pareto, capped at 1)")
def _heavy(rng: np.random.Generator, runs: int) -> Answers:
    tail, scale = 0.6, 2e-5
    x_RGT = np.minimum(1.0, scale * (1 - rng.random(_shape(runs))) ** (-1 / tail))
    cut = scale**tail  # the chance of a 1
    truth = cut + scale * (1 - cut ** (1 - 1 / tail)) / (1 - 1 / tail)
    draw = Draw.of(x_RGT, truth, truth)
    yield _REALISED, OURS, log_moment(draw)
    yield _POPULATION, OURS, group_ratio(draw)
    yield "normal interval, every round", HABIT, baselines.normal_watched(draw)
    yield "normal interval, once", HABIT, baselines.normal_once(draw)


@scenario("clustered", "one prompt in ten carries most of the divergence; 8 tokens per prompt")
def _clustered(rng: np.random.Generator, runs: int) -> Answers:
    draw = _clustered_draw(rng, runs)
    yield _REALISED, OURS, log_moment(draw)
    yield _POPULATION, OURS, group_ratio(draw)
    yield "normal interval of tokens, once", HABIT, baselines.normal_once(draw)
    yield "bootstrap of tokens, once", HABIT, baselines.bootstrap_once(draw, rng)


@scenario(
    "adaptive",
    "the mean depends on the last four tokens, and is 0 while the sum is far below its expectation",
)
def _adaptive(rng: np.random.Generator, runs: int) -> Answers:
    n = GROUPS * TOKENS
    x_RN, mean_RN = np.zeros((runs, n)), np.zeros((runs, n))
    excess_R, variance_R = np.zeros(runs), np.zeros(runs)
    for i in range(n):
        mean_R = 0.05 + 0.25 * x_RN[:, max(i - 4, 0) : i].sum(axis=1) / 4
        mean_R = np.where(excess_R < -2 * np.sqrt(variance_R + 1), 0.0, mean_R)
        mean_RN[:, i], x_RN[:, i] = mean_R, _hits(rng, mean_R)
        excess_R += x_RN[:, i] - mean_R
        variance_R += mean_R * (1 - mean_R)
    shape = _shape(runs)
    draw = Draw.of(x_RN.reshape(shape), mean_RN.reshape(shape))
    yield _REALISED, OURS, log_moment(draw)
    yield "normal interval, every round", HABIT, baselines.normal_watched(draw)
    yield "mean <= limit, every round", HABIT, baselines.mean_gate(draw)


@scenario("drifting", "the mean alternates between 0.02 and 0.18 every 160 tokens")
def _drifting(rng: np.random.Generator, runs: int) -> Answers:
    stretch_N = np.arange(GROUPS * TOKENS) // 160 % 2
    rate_RGT = np.broadcast_to(
        np.where(stretch_N, 0.18, 0.02).reshape(1, GROUPS, TOKENS), _shape(runs)
    )
    draw = Draw.of(_hits(rng, rate_RGT), rate_RGT)
    yield _REALISED, OURS, log_moment(draw)
    yield "bets chosen from the last 64 tokens", HABIT, baselines.bets_from_the_past(draw)
    yield "sliding window of 5 rounds", HABIT, baselines.sliding_window(draw)


@scenario("shared prompts", "eight shards, prompts as in clustered")
def _shared(rng: np.random.Generator, runs: int) -> Answers:
    yield (
        f"{_POPULATION}, different prompts in each shard",
        OURS,
        group_ratio(_clustered_draw(rng, runs)),
    )
    rate_RG1 = np.repeat(_hot(rng, runs, GROUPS // 8), 8, axis=1)
    rate_RGT = np.broadcast_to(rate_RG1, _shape(runs))
    twin = Draw.of(_hits(rng, rate_RGT), rate_RGT, TRUTH)
    yield f"{_POPULATION}, the same prompts in each shard", HABIT, group_ratio(twin)


@scenario(
    "shared batches",
    "8 prompt groups share a batch; in one batch of ten all groups diverge",
)
def _shared_batches(rng: np.random.Generator, runs: int) -> Answers:
    batches = GROUPS // 8
    rate_RGT = np.broadcast_to(np.repeat(_hot(rng, runs, batches), 8, axis=1), _shape(runs))
    draw = Draw.of(_hits(rng, rate_RGT), rate_RGT, TRUTH)
    whole = (runs, batches, 8 * TOKENS)
    batch = Draw.of(draw.x_RGT.reshape(whole), rate_RGT.reshape(whole), TRUTH, every=1)
    yield f"{_POPULATION}, a batch as the unit", OURS, group_ratio(batch)
    yield f"{_POPULATION}, a prompt group as the unit", HABIT, group_ratio(draw)


@scenario(
    "file order", "seven domains that hardly diverge, then three that do; the run may stop early"
)
def _file_order(rng: np.random.Generator, runs: int) -> Answers:
    for name, ours in (("in random order", OURS), ("in file order", HABIT)):
        domain_RG = np.broadcast_to(np.arange(GROUPS) * 10 // GROUPS, (runs, GROUPS))
        if ours:
            domain_RG = rng.integers(0, 10, (runs, GROUPS))
        rate_RG = np.where(domain_RG < 7, 0.01, 0.31)
        rate_RGT = np.broadcast_to(rate_RG[:, :, None], _shape(runs))
        draw = Draw.of(_hits(rng, rate_RGT), rate_RGT, TRUTH)
        yield f"{_POPULATION}, prompts {name}", ours, group_ratio(draw)


@scenario("filtered", "groups of 8 responses; groups with both passes and failures diverge most")
def _filtered(rng: np.random.Generator, runs: int) -> Answers:
    mixed_RG1 = rng.random((runs, GROUPS, 1)) < 0.4
    rate_RGT = np.broadcast_to(np.where(mixed_RG1, 0.095, 0.02), _shape(runs))
    passes_RGT = rng.random(_shape(runs)) < np.where(mixed_RG1, 0.5, 0.02)
    draw = Draw.of(_hits(rng, rate_RGT), rate_RGT, 0.05)
    passed_RG1 = passes_RGT.sum(axis=2, keepdims=True)
    kept_RGT = np.broadcast_to((passed_RG1 > 0) & (passed_RG1 < TOKENS), _shape(runs))
    yield f"{_POPULATION}, all groups", OURS, group_ratio(draw)
    yield f"{_POPULATION}, all-equal groups dropped", HABIT, group_ratio(draw.only(kept_RGT))


def _going_on(rng: np.random.Generator, runs: int) -> Draw:
    """Answers that go on for 8 tokens where their first diverged, and end there else."""
    rate_RGT = np.full(_shape(runs), 0.3)
    rate_RGT[:, :, 0] = 0.2
    x_RGT = _hits(rng, rate_RGT)
    there_RGT = np.broadcast_to(x_RGT[:, :, :1] > 0, _shape(runs)).copy()
    there_RGT[:, :, 0] = True
    more = 0.2 * (TOKENS - 1)
    truth = (0.2 + more * 0.3) / (1 + more)
    return Draw.of(x_RGT, rate_RGT, truth, there_RGT=there_RGT)


@scenario("lengths", "a response has 8 tokens if the first one diverged, else one token")
def _lengths(rng: np.random.Generator, runs: int) -> Answers:
    draw = _going_on(rng, runs)
    yield _REALISED, OURS, log_moment(draw)
    yield _POPULATION, OURS, group_ratio(draw)
    yield "mean of per-sequence means, once", HABIT, baselines.sequence_means(draw)


@scenario("completion order", "as in lengths; a long response completes after a hundred short ones")
def _completion(rng: np.random.Generator, runs: int) -> Answers:
    draw = _going_on(rng, runs)
    done_RG = np.arange(GROUPS) + 15 * draw.tokens_RG
    by_completion = draw.reordered(np.argsort(done_RG, axis=1, kind="stable"))
    yield f"{_REALISED}, dispatch order", OURS, log_moment(draw)
    yield f"{_REALISED}, completion order", HABIT, log_moment(by_completion)


@scenario("missing", "half of the diverging tokens are missing, and 2 % of the others")
def _missing(rng: np.random.Generator, runs: int) -> Answers:
    x_RGT = _hits(rng, np.full(_shape(runs), TRUTH))
    lost_RGT = rng.random(_shape(runs)) < np.where(x_RGT > 0, 0.5, 0.02)
    draw = Draw.of(x_RGT, TRUTH, TRUTH, lost_RGT=lost_RGT)
    yield f"{_REALISED}, missing tokens counted", OURS, log_moment(draw)
    yield f"{_POPULATION}, missing tokens counted", OURS, group_ratio(draw)
    yield f"{_REALISED}, missing tokens left out", HABIT, log_moment(draw.only(~lost_RGT))


@scenario(
    "uneven sampling",
    "a fifth of the traffic diverges most, and a tenth of it is scored; half of the diverging "
    "scored tokens are missing",
)
def _uneven(rng: np.random.Generator, runs: int) -> Answers:
    rare_RG1 = rng.random((runs, GROUPS, 1)) < 0.2
    rate_RGT = np.broadcast_to(np.where(rare_RG1, 0.34, 0.04), _shape(runs))
    chance_RGT = np.broadcast_to(np.where(rare_RG1, 0.1, 1.0), _shape(runs))
    x_RGT, scored_RGT = _hits(rng, rate_RGT), rng.random(_shape(runs)) < chance_RGT
    lost_RGT = scored_RGT & (rng.random(_shape(runs)) < np.where(x_RGT > 0, 0.5, 0.02))
    served = Draw.of(x_RGT, rate_RGT, TRUTH)
    some_lost = Draw.of(x_RGT, rate_RGT, TRUTH, lost_RGT=lost_RGT)
    yield "Unequal, over all served tokens", OURS, unequal(served, scored_RGT, chance_RGT, 0.1)
    counted = unequal(some_lost, scored_RGT, chance_RGT, 0.1)
    yield "Unequal, missing tokens counted", OURS, counted
    unseen = unequal(served, scored_RGT & ~lost_RGT, chance_RGT, 0.1)
    yield "Unequal, missing tokens as if never sampled", HABIT, unseen
    about = log_moment_e(served.only(scored_RGT), served.running_RK)
    yield "LogMoment of the scored tokens", HABIT, ever(about)


@scenario("one seed", "contexts with many rates; fresh noise for each request, or the same for all")
def _one_seed(rng: np.random.Generator, runs: int) -> Answers:
    rate_RGT = np.broadcast_to(rng.uniform(0.02, 0.18, (runs, GROUPS, 1)), _shape(runs))
    fresh = Draw.of(_hits(rng, rate_RGT), rate_RGT, TRUTH)
    same = Draw.of((rng.random((runs, 1, TOKENS)) < rate_RGT).astype(np.float64), rate_RGT, TRUTH)
    yield f"{_REALISED}, fresh noise", OURS, log_moment(fresh)
    yield f"{_REALISED}, one seed for every request", HABIT, log_moment(same)


@scenario("shards", "eight shards, prompts as in clustered; diverging prompts take longer")
def _shards(rng: np.random.Generator, runs: int) -> Answers:
    draw = _clustered_draw(rng, runs)
    yield f"{_POPULATION}, in closed rounds", OURS, group_ratio(draw)
    spent_RG = 1 + 10 * draw.x_RGT.sum(axis=2)
    done_RG = spent_RG.reshape(runs, -1, 8).cumsum(axis=1).reshape(runs, GROUPS)
    arrived = draw.reordered(np.argsort(done_RG, axis=1, kind="stable"), every=1)
    yield f"{_POPULATION}, merged on arrival", HABIT, group_ratio(arrived)
    rate_RGT = np.full(_shape(runs), TRUTH)
    even = Draw.of(_hits(rng, rate_RGT), rate_RGT, TRUTH, every=1)
    yield f"{_REALISED}, each shard once", OURS, log_moment(even)
    yield f"{_REALISED}, each shard twice", HABIT, baselines.merged_again(even, 2)
    yield f"{_REALISED}, each shard four times", HABIT, baselines.merged_again(even, 4)


@scenario("retries", "20 fresh attempts until one passes; alpha covers all of them")
def _retries(rng: np.random.Generator, runs: int) -> Answers:
    attempts, looks, a_look = 20, 60, 64
    hits_RAK = rng.binomial(a_look, TRUTH, (runs, attempts, looks)).cumsum(axis=2).astype(float)
    n_RAK = np.broadcast_to(a_look * np.arange(1, looks + 1, dtype=np.float64), hits_RAK.shape)
    best_RA = share_e(NEG, hits_RAK, n_RAK, TRUTH).max(axis=2)
    price_A = np.array([-math.log(attempt_alpha(ALPHA, r + 1)) for r in range(attempts)])
    none_R = np.zeros(runs, dtype=bool)
    ours_R = any_look(best_RA >= price_A)
    all_R = any_look(best_RA >= -math.log(ALPHA))
    yield "LogMoment, alpha shared by the attempts", OURS, Ever(ours_R, none_R)
    yield "LogMoment at alpha, every time", HABIT, Ever(all_R, none_R)


@scenario(
    "steady traffic", "200 rounds within the limit; the distribution of x depends on the past"
)
def _steady(rng: np.random.Generator, runs: int) -> Answers:
    rounds = 200
    x_RGT = np.empty((runs, rounds, TOKENS))
    calm_R1 = np.zeros((runs, 1), dtype=bool)
    for g in range(rounds):
        u_RT = rng.random((runs, TOKENS))
        x_RGT[:, g] = np.where(calm_R1, 0.2 * (u_RT < TRUTH / 0.2), u_RT < TRUTH)
        calm_R1 = x_RGT[:, g].sum(axis=1, keepdims=True) > TRUTH * TOKENS
    draw = Draw.of(x_RGT, TRUTH, TRUTH, every=1)
    yield "ShiryaevRoberts", OURS, shiryaev_roberts(draw, TRUTH, rounds / ALPHA)
    yield "LogMoment, every round", OURS, Ever(np.zeros(runs), log_moment(draw).violated_R)
    sliding = baselines.sliding_window(draw).violated_R
    yield "sliding window of 5 rounds", HABIT, Ever(np.zeros(runs), sliding)
    yield "mean of 5 rounds > 1.5 limit", HABIT, baselines.window_gate(draw)


@scenario(
    "many slices", "39 slices at the limit, some of them identical, and one a little above it"
)
def _slices(rng: np.random.Generator, runs: int) -> Answers:
    slices, looks, a_look = 40, 60, 64
    rate_S1 = np.where(np.arange(slices) == 0, 1.15 * TRUTH, TRUTH)[:, None]
    hits_RSK = rng.binomial(a_look, rate_S1, (runs, slices, looks)).cumsum(axis=2).astype(float)
    alike_R11 = rng.random((runs, 1, 1)) < 0.5
    hits_RSK[:, 20:] = np.where(alike_R11, hits_RSK[:, 20:21], hits_RSK[:, 20:])
    n_RSK = np.broadcast_to(a_look * np.arange(1, looks + 1, dtype=np.float64), hits_RSK.shape)
    log_e_RSK = share_e(POS, hits_RSK, n_RSK, TRUTH)
    mean_RSK = hits_RSK / n_RSK
    spread_RSK = np.sqrt(np.maximum(mean_RSK * (1 - mean_RSK), 1e-9) / n_RSK)
    paid_RSK = np.apply_along_axis(e_bh, 1, log_e_RSK, ALPHA)
    shared_RSK = log_e_RSK >= -math.log(slice_alpha(ALPHA, slices))
    each_RSK = log_e_RSK >= -math.log(ALPHA)
    normal_RSK = mean_RSK - baselines.Z * spread_RSK > TRUTH
    yield "e-BH, share of false discoveries", OURS, _discovered(paid_RSK)
    yield "LogMoment at alpha / slices, any", OURS, _discovered(shared_RSK, any_=True)
    yield "LogMoment at alpha, false discoveries", HABIT, _discovered(each_RSK)
    yield "normal interval, false discoveries", HABIT, _discovered(normal_RSK)


def _discovered(found_RSK: Bools, *, any_: bool = False) -> Ever:
    """Of the slices that are found when the first one is: the share of those at the limit.

    Args:
        any_: whether a slice at the limit is found at any look, instead.
    """
    none_R = np.zeros(len(found_RSK))
    if any_:
        return Ever(none_R, np.logical_or.reduce(found_RSK[:, 1:], axis=(1, 2)))
    stop_R = found_RSK.any(axis=1).argmax(axis=1)  # 0 where none is ever found
    at_RS = np.take_along_axis(found_RSK, stop_R[:, None, None], axis=2)[:, :, 0]
    return Ever(none_R, at_RS[:, 1:].sum(axis=1) / np.maximum(at_RS.sum(axis=1), 1))
