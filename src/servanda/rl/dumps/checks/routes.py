# Routes: the experts that the sampler recorded are those of these tokens, in their order.
#
# The first router of a mixture sees little but the token that it is fed, so that two occurrences
# of a token in a sequence share more experts than two tokens at random.  Row t is compared with the
# token that was fed for it, at lag 0, and with its neighbours.  Where one token often follows
# another, pairs that are equal at one lag are equal at the next as well, so that only those pairs
# count that are equal at one of the two.  Pairs are taken within a sequence: the sums do not depend
# on the chunks of a reader.
# Axes: N tokens of all sequences, R of them whose route is known, S sequences, L layers, K experts
# of a token.

from __future__ import annotations

import math

import numpy as np

from servanda.rl.dumps.checks.base import Finding, FirstPlace, StepSums, Sums, check
from servanda.rl.dumps.checks.line_up import LAGS
from servanda.traces.rollouts import ROUTE, UNROUTED, Array, Rollouts

OTHERS = tuple(lag for lag in LAGS if lag)
ENOUGH = 1000  # fewest ordered pairs of tokens that are equal at one lag only, for a finding
_MARGIN, _SIGMAS = 0.05, 5.0  # of the share of common experts beyond chance
_INVALID_SHARE = 0.01


@check("routes")
class RoutesCheck(Sums):
    """Sums per lag of pairs and common experts, see `_sums`; and rows that no router picks."""

    def __init__(self) -> None:
        self.sums = StepSums()  # [lags, 3, 2]
        self.known = self.invalid = self.sequences = self.without = 0
        self.first, self.first_without = FirstPlace(), FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        some_S = np.zeros(len(rollouts), dtype=bool)
        if (route_NLK := rollouts.per_token.get(ROUTE)) is not None and route_NLK.size:
            known_N = known(route_NLK)
            routed_SL = _routed(rollouts, route_NLK, known_N)
            routed_NL = routed_SL[rollouts.sequence_N]
            invalid_N = (_repeats(route_NLK) & routed_NL).any(axis=1) | ~routed_NL.any(axis=1)
            invalid_N &= known_N
            self.known += int(known_N.sum())
            self.invalid += int(invalid_N.sum())
            self.first.add_sequence(rollouts, some(rollouts, invalid_N))
            first_N = routed_SL.argmax(axis=1)[rollouts.sequence_N]
            route_NK = route_NLK[np.arange(len(first_N)), first_N]
            self.sums.add(rollouts.step, _sums(rollouts, route_NK, known_N & ~invalid_N))
            some_S = some(rollouts, known_N)
        self.sequences += len(rollouts)
        self.without += int((~some_S).sum())
        self.first_without.add_sequence(rollouts, ~some_S)

    def finding(self) -> Finding:
        if not self.known:
            return Finding("routes", "ok", "")
        if self.invalid > _INVALID_SHARE * self.known:
            text = (
                f"the recorded experts of {self.invalid:,} of {self.known:,} tokens have one "
                "expert twice, which no router picks: rows of padding, or never filled in"
            )
            odd = self.invalid, self.known, _INVALID_SHARE
            return Finding("routes", "unsound", text, first=self.first.place, odd=odd)
        if self.without:
            text = (
                f"{self.without:,} of {self.sequences:,} sequences have no recorded experts: the "
                "trainer routes them by itself"
            )
            return Finding("routes", "warning", text, first=self.first_without.place)
        return self._lag()

    def _lag(self) -> Finding:
        sums_L32 = self.sums.total(np.zeros((len(OTHERS), 3, 2)))
        any_2, apart_L22 = sums_L32[0, 2], sums_L32[:, :2]
        numbers = {"tokens": float(self.known), "pairs": float(apart_L22[..., 0].min())}
        if numbers["pairs"] < ENOUGH:
            text = (
                f"{numbers['pairs']:,.0f} pairs of equal tokens are too few to check recorded "
                "experts"
            )
            return Finding("routes", "warning", text, numbers)
        chance = any_2[1] / any_2[0]
        if chance > 1 - _MARGIN:
            text = "all tokens have the same recorded experts: they were not recorded"
            return Finding("routes", "unsound", text, numbers)
        share_L2 = (apart_L22[..., 1] / apart_L22[..., 0] - chance) / (1 - chance)
        at = int((share_L2[:, 0] - share_L2[:, 1]).argmax())
        lag, (there, here) = OTHERS[at], share_L2[at].tolist()
        numbers |= {"lag+0": here, f"lag{lag:+d}": there}
        common = (
            f"tokens that recur at lag 0 share {_percent(here)} of their experts beyond chance, at "
            f"lag {lag:+d} {_percent(there)}"
        )
        # at most chance / (1 - chance) for a pair, as of 0 and 1; each is there in both orders
        variance = chance / (1 - chance) * (2 / apart_L22[at, :, 0]).sum()
        if there > here + _MARGIN:
            sure = there > here + _SIGMAS * math.sqrt(variance)
            text = (
                f"the recorded experts {'are' if sure else 'may be'} shifted: row t is that of "
                f"token t{lag:+d} ({common})"
            )
            return Finding("routes", "unsound" if sure else "warning", text, numbers)
        if here < _MARGIN:
            text = (
                f"the recorded experts fit the tokens at no lag ({common}): are they of these "
                "sequences?"
            )
            return Finding("routes", "warning", text, numbers)
        return Finding("routes", "ok", f"recorded experts fit their tokens ({common})", numbers)


def _percent(share: float) -> str:
    """A share beyond chance, which may be below it.

    >>> _percent(0.283), _percent(-0.01)
    ('28 %', '0 %')
    """
    return f"{100 * max(share, 0.0):.0f} %"


def known(route_NLK: Array) -> Array:
    """Whether the route of a token was recorded, [N]."""
    return (route_NLK != UNROUTED).all(axis=(1, 2))


def some(rollouts: Rollouts, flag_N: Array) -> Array:
    """Whether a sequence has a flagged token, [S]."""
    return np.bincount(rollouts.sequence_N[flag_N], minlength=len(rollouts)) > 0


def _routed(rollouts: Rollouts, route_NLK: Array, known_N: Array) -> Array:
    """Whether a layer has a router, [S, L]: servers write 0 for those that have none."""
    filled_NL = (route_NLK != 0).any(axis=-1) & known_N[:, None]
    return np.stack([some(rollouts, filled_N) for filled_N in filled_NL.T], axis=1)


def _repeats(route_NLK: Array) -> Array:
    """Whether a layer of a token has one expert twice, [N, L]."""
    sorted_NLK = np.sort(route_NLK, axis=-1)
    return (sorted_NLK[..., 1:] == sorted_NLK[..., :-1]).any(axis=-1)


def _sums(rollouts: Rollouts, route_NK: Array, known_N: Array) -> Array:
    """For each other lag, pairs of rows and the experts that they share over K, [lags, 3, 2].

    Of pairs whose fed tokens are equal at that lag and not at lag 0, equal at lag 0 and not at that
    lag, and of all pairs of a sequence.
    """
    sequence_N, at_N = rollouts.sequence_N, np.flatnonzero(known_N)
    at_N = at_N[rollouts.start_S[sequence_N[at_N]] < at_N]  # no token is fed for the first
    sums_L32 = np.zeros((len(OTHERS), 3, 2))
    every_2 = _common(sequence_N[at_N], route_NK[at_N])
    # ids from 0 on: a dump may have any number, and three of them share one integer below
    token_N = np.unique(rollouts.token_N, return_inverse=True)[1]
    words = int(token_N.max(initial=0)) + 1
    for sums_32, lag in zip(sums_L32, OTHERS, strict=True):
        # the route of a token is of the forward that was fed the token before it
        fed_R = at_N - 1 + lag
        inside_R = (fed_R >= 0) & (fed_R < len(sequence_N))
        inside_R[inside_R] = sequence_N[fed_R[inside_R]] == sequence_N[at_N[inside_R]]
        row_R, route_RK = at_N[inside_R], route_NK[at_N[inside_R]]
        there_R, here_R = token_N[fed_R[inside_R]], token_N[row_R - 1]
        of_R = sequence_N[row_R] * words
        both_2 = _common((of_R + there_R) * words + here_R, route_RK)
        there_2, here_2 = (_common(of_R + token_R, route_RK) for token_R in (there_R, here_R))
        sums_32[:] = there_2 - both_2, here_2 - both_2, every_2
    return sums_L32


def _common(class_R: Array, route_RK: Array) -> Array:
    """Ordered pairs of rows of one class, and the mean number of experts they share over K, [2]."""
    if not len(class_R):
        return np.zeros(2)
    _, class_R, n = np.unique(class_R, return_inverse=True, return_counts=True)
    experts = int(route_RK.max()) + 1
    _, c = np.unique(class_R[:, None] * experts + route_RK, return_counts=True)
    return np.array([(n * (n - 1)).sum(), (c * (c - 1)).sum() / route_RK.shape[1]])
