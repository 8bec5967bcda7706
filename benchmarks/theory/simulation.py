# Simulated evaluations: many runs at once, and the verdicts of our procedures at each evaluation.
#
# The limit is exactly the true mean, so every verdict is wrong: `holds` claims that the mean is
# below, `violated` that it is above.  A run counts if it ever has a verdict, at any evaluation.
# These are LogMoment, Unequal and GroupRatio for arrays of runs; a test compares them with the
# classes.
# Axes: R runs, G prompt groups in dispatch order, T places for tokens, K evaluations, J bets.

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from servanda.theory.stats.bets import NEG, POS

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ALPHA = 0.05  # of every procedure, ours or not, for each of its two verdicts


@dataclass(frozen=True)
class Ever:
    """Of each run: whether it ever had a wrong verdict, or the share of its wrong verdicts."""

    holds_R: Floats | Bools
    violated_R: Floats | Bools


@dataclass(frozen=True)
class Draw:
    """The data of R runs.

    Args:
        x_RGT: values in [0, 1] of tokens.
        mean_RGT: what each was expected to be, given everything earlier.
        there_RGT: where a token was launched.
        lost_RGT: of those, which never came back.
        truth: the token-weighted mean over the population; NaN where groups are not drawn
            from one.
        every: groups of a round; somebody looks after each.
    """

    x_RGT: Floats
    mean_RGT: Floats
    there_RGT: Bools
    lost_RGT: Bools
    truth: float = math.nan
    every: int = 8

    @classmethod
    def of(
        cls,
        x_RGT: Floats,
        mean_RGT: Floats | float,
        truth: float = math.nan,
        *,
        there_RGT: Bools | None = None,
        lost_RGT: Bools | None = None,
        every: int = 8,
    ) -> Draw:
        """By default every token is there, and none is lost."""
        shape = x_RGT.shape
        there = np.ones(shape, dtype=bool) if there_RGT is None else there_RGT
        lost = np.zeros(shape, dtype=bool) if lost_RGT is None else lost_RGT & there
        mean = np.broadcast_to(np.asarray(mean_RGT, dtype=np.float64), shape)
        return cls(np.where(there, x_RGT, 0.0), mean, there, lost, truth, every)

    def reordered(self, order_RG: NDArray[np.int64], every: int | None = None) -> Draw:
        """The groups in another order."""
        at_RG1 = order_RG[:, :, None]
        return replace(
            self,
            x_RGT=np.take_along_axis(self.x_RGT, at_RG1, axis=1),
            mean_RGT=np.take_along_axis(self.mean_RGT, at_RG1, axis=1),
            there_RGT=np.take_along_axis(self.there_RGT, at_RG1, axis=1),
            lost_RGT=np.take_along_axis(self.lost_RGT, at_RG1, axis=1),
            every=every or self.every,
        )

    def only(self, kept_RGT: Bools) -> Draw:
        """As if no other token had been dispatched."""
        there = self.there_RGT & kept_RGT
        x = np.where(there, self.x_RGT, 0.0)
        return replace(self, x_RGT=x, there_RGT=there, lost_RGT=self.lost_RGT & there)

    def at_looks(self, value_RG: Floats | Bools | NDArray[np.int64]) -> Floats:
        """Sums over the closed rounds, [R, K]."""
        return value_RG.cumsum(axis=1)[:, self.every - 1 :: self.every].astype(np.float64)

    @property
    def tokens_RG(self) -> NDArray[np.int64]:
        return self.there_RGT.sum(axis=2)

    @property
    def n_RK(self) -> Floats:
        return self.at_looks(self.tokens_RG)

    @property
    def running_RK(self) -> Floats:
        """The mean expectation of the dispatched tokens: the true value of the claim `realised`."""
        total_RG = (self.mean_RGT * self.there_RGT).sum(axis=2)
        return self.at_looks(total_RG) / np.maximum(self.n_RK, 1)

    @property
    def target_RK(self) -> Floats:
        """The value that users assume: the mean of the population, if there is one."""
        running_RK = self.running_RK
        return running_RK if math.isnan(self.truth) else np.full_like(running_RK, self.truth)


def log_mean_exp(log_JRK: Floats) -> Floats:
    """log(mean(exp(.))) over the bets."""
    top = log_JRK.max(axis=0)
    return top + np.log(np.exp(log_JRK - top).mean(axis=0))


def log_moment_e(
    draw: Draw, target_RK: Floats, copies: int = 1, worth_RGT: Floats | float = 1.0
) -> tuple[Floats, Floats]:
    """log e-values of LogMoment below and above the target at every evaluation, each [R, K].

    Args:
        copies: how often the same evidence was merged; more than 1 is a mistake.
        worth_RGT: what each x is multiplied by, in [0, 1]; the target is one of the products.
    """
    found = []
    for bets, missing_as in ((NEG, 1.0), (POS, 0.0)):
        x_RGT = worth_RGT * np.where(draw.lost_RGT, missing_as, draw.x_RGT)
        grown = [
            draw.at_looks(np.log(np.prod(1.0 + bet * x_RGT, axis=2)))
            - draw.n_RK * np.log1p(bet * target_RK)
            for bet in bets
        ]
        found.append(log_mean_exp(copies * np.stack(grown)))
    return found[0], found[1]


def unequal_e(
    draw: Draw, scored_RGT: Bools, chance_RGT: Floats, least: float
) -> tuple[Floats, Floats]:
    """log e-values of Unequal below and above the realised truth of all served, each [R, K].

    Args:
        scored_RGT: which served tokens were chosen, the lost ones included.
        chance_RGT: with what chance each was; least: the smallest that the plan allows.
    """
    worth_RGT = np.where(scored_RGT, least / chance_RGT, 0.0)
    return log_moment_e(draw, least * draw.running_RK, worth_RGT=worth_RGT)


def group_ratio_e(draw: Draw) -> tuple[Floats, Floats]:
    """log e-values of GroupRatio below and above the population's truth, each [R, K]."""
    capacity, limit = draw.x_RGT.shape[2], draw.truth
    known_RGT = np.where(draw.lost_RGT, 0.0, draw.x_RGT)
    lost_RG, met_RG = draw.lost_RGT.sum(axis=2), draw.tokens_RG > 0
    found = []
    for bets, missing_as in ((NEG, 1.0), (POS, 0.0)):
        total_RG = known_RGT.sum(axis=2) + missing_as * lost_RG
        z_RG = np.clip(limit + (total_RG - limit * draw.tokens_RG) / capacity, 0.0, 1.0)
        grown = [np.where(met_RG, np.log1p(b * z_RG) - np.log1p(b * limit), 0.0) for b in bets]
        found.append(log_mean_exp(np.stack([draw.at_looks(g_RG) for g_RG in grown])))
    return found[0], found[1]


def share_e(bets_J: Floats, hits: Floats, n: Floats, limit: float) -> Floats:
    """log e-value of LogMoment where every x is 0 or 1, from how many of n are 1.

    Args:
        hits, n: of one shape, whatever it is; so is what is returned.
    """
    grown = [hits * np.log1p(bet) - n * np.log1p(bet * limit) for bet in bets_J]
    return log_mean_exp(np.stack(grown))


def any_look(wrong_RK: Bools) -> Bools:
    """Whether it happened at any evaluation, [R]."""
    return np.logical_or.reduce(wrong_RK, axis=1)


def ever(log_e: tuple[Floats, Floats], alpha: float = ALPHA) -> Ever:
    """Which runs have an e-value of 1 / alpha for `holds`, or for `violated`, at any evaluation."""
    price = math.log(1 / alpha)
    below_R, above_R = (any_look(e_RK >= price) for e_RK in log_e)
    return Ever(below_R, above_R)


def log_moment(draw: Draw, alpha: float = ALPHA) -> Ever:
    """LogMoment, of the dispatched tokens: the claim `realised`."""
    return ever(log_moment_e(draw, draw.running_RK), alpha)


def unequal(draw: Draw, scored_RGT: Bools, chance_RGT: Floats, least: float) -> Ever:
    """Unequal, over all served: the claim `realised` where only some are scored."""
    return ever(unequal_e(draw, scored_RGT, chance_RGT, least))


def group_ratio(draw: Draw, alpha: float = ALPHA) -> Ever:
    """GroupRatio: the claim `population`."""
    return ever(group_ratio_e(draw), alpha)


def shiryaev_roberts(draw: Draw, limit: float, threshold: float) -> Ever:
    """Whether the alarm ever fired; its verdict is never `holds`."""
    log_s_JR = np.full((len(POS), len(draw.x_RGT)), -np.inf)
    fired_R = np.zeros(len(draw.x_RGT), dtype=bool)
    for g in range(0, draw.x_RGT.shape[1], draw.every):
        x_RN = draw.x_RGT[:, g : g + draw.every].reshape(len(fired_R), -1)
        n_R = draw.there_RGT[:, g : g + draw.every].sum(axis=(1, 2))
        grown_JR = np.stack(
            [np.log1p(b * x_RN).sum(axis=1) - n_R * np.log1p(b * limit) for b in POS]
        )
        log_s_JR = np.logaddexp(0.0, log_s_JR) + grown_JR
        fired_R |= log_mean_exp(log_s_JR) >= math.log(threshold)
    return Ever(np.zeros_like(fired_R), fired_R)
