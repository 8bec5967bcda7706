# ShiryaevRoberts: detects a change of traffic from within its limit to above it.
#
# A LogMoment accumulates the whole past, so a million good units would mask a new regression.  Here
# every round is a possible change point:
#
#     S_j <- (1 + S_j) exp(db_j - dn log1p(POS_j limit))        for each bet POS_j
#
# is the sum of the evidence over all change points.  If the mean of every round, given everything
# before each of its units, is within the limit, each factor is at most 1 in expectation, so mean_j
# S_j - rounds is a supermartingale: a false alarm at mean S >= threshold comes after at least
# `threshold` rounds on average, and within k rounds with a probability of at most k / threshold.
#
# "Given everything before" is strict.  The tokens of one response depend on its prompt: after the
# first tokens of a difficult prompt the next ones are expected to exceed the limit, though the
# traffic has not changed, and an alarm on tokens fires within a few rounds.  If prompts differ, a
# unit is a prompt group: one value in [0, 1] for each, such as GroupRatio's Z, sampled at random.

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from servanda.errors import EvidenceError
from servanda.theory.stats.bets import POS, log_mean_exp
from servanda.theory.stats.log_moment import LogMoment


@dataclass(frozen=True)
class ShiryaevRoberts:
    """An alarm for a mean that rises above its limit, at any time, in rounds of one process.

    There is no `+`: S depends on the order of all rounds, and cannot be computed from two halves of
    a stream.  One controller processes every closed round in turn.

    Args:
        limit: upper bound of the mean of every round before the change, given everything before
            each of its units, in [0, 1].
        threshold: lower bound of the mean number of rounds to a false alarm.  In rounds, not
            seconds: for one false alarm in 30 days at one round per minute it is 43,200.
        rounds: number of rounds so far.
        log_s: log S of each bet, nats; -inf before the first round.

    Raises:
        EvidenceError: a limit outside [0, 1], or a threshold that the first round reaches.

    Source:
        A. N. Shiryaev 1963, S. W. Roberts 1966; for e-values: J. Shin, A. Ramdas and
        A. Rinaldo, E-detectors, 2022.
    """

    limit: float
    threshold: float
    rounds: int = 0
    log_s: tuple[float, ...] = (-math.inf,) * len(POS)

    def __post_init__(self) -> None:
        if not 0.0 <= self.limit <= 1.0:
            raise EvidenceError(f"an alarm needs a limit in [0, 1], found {self.limit}")
        if not self.threshold > 1.0:
            raise EvidenceError(
                f"an alarm after {self.threshold} rounds would fire by itself",
                hint="the threshold is the mean number of rounds to a false alarm, above 1",
            )

    def after(self, round: LogMoment) -> ShiryaevRoberts:
        """The alarm after one more closed round; an empty round does not change it."""
        if not round.n:
            return self
        log_s = np.logaddexp(0.0, self.log_s) + round.above_growth(self.limit)
        return replace(self, rounds=self.rounds + 1, log_s=tuple(log_s.tolist()))

    @property
    def log_mean(self) -> float:
        """log of the mean S, nats; -inf before the first round."""
        return log_mean_exp(np.array(self.log_s)) if self.rounds else -math.inf

    @property
    def fires(self) -> bool:
        """Whether the threshold is reached; after an action a new alarm starts."""
        return self.log_mean >= math.log(self.threshold)
