# ShiryaevRoberts: when did traffic that was within its limit stop being so?
#
# A LogMoment remembers everything, so a million good units would mask a new regression.  Here
# every round may be the one at which it began:
#
#     S_j <- (1 + S_j) exp(db_j - dn log1p(POS_j limit))        for each bet POS_j
#
# is the sum of the evidence over all those beginnings.  While the mean of every round, given
# all that came before each of its units, is within the limit, each factor is at most 1 in
# expectation, so mean_j S_j - rounds is a supermartingale: an alarm at mean S >= threshold
# comes after `threshold` rounds or more on average, and within k rounds with a chance of at
# most k / threshold.
#
# "Given all that came before" is strict.  The tokens of one answer follow its prompt: after a
# hot prompt's first tokens the next ones are expected beyond the limit, though no traffic
# changed, and an alarm fed with tokens fires within a few rounds.  Where prompts differ, a unit
# is a prompt group: one value in [0, 1] for each, such as GroupRatio's Z, drawn at random.

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from servanda.errors import EvidenceError
from servanda.theory.stats.log_moment import POS, LogMoment, log_mean_exp


@dataclass(frozen=True)
class ShiryaevRoberts:
    """An alarm for a mean that rises above its limit, at any time, in rounds of one process.

    There is no `+`: S depends on the order of all rounds, and what two halves of a stream
    know does not make up what the whole would.  One leader sees every closed round in turn.

    Args:
        limit: within which the mean of every round is before the change, whatever came
            before each of its units, in [0, 1].
        threshold: rounds to a false alarm, on average, at least.  It counts rounds, not
            seconds: for one false alarm in 30 days at a round a minute it is 43,200.
        rounds: seen so far.
        log_s: log S of each bet, nats; -inf before the first round.

    Raises:
        EvidenceError: a limit outside [0, 1], or a threshold that the first round would reach.

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
        """The alarm once it has seen one more closed round; one without a unit says nothing."""
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
        """Whether the threshold is reached now; a new one starts after whatever was done."""
        return self.log_mean >= math.log(self.threshold)
