# Routes: the experts that the sampler recorded are those of these tokens, in their order.
#
# The first router of a mixture sees little but the token that it is fed, so that two occurrences
# of a token in a sequence share more experts than two tokens at random.  They do so at lag 0; rows
# that are shifted do so at another.  Pairs are taken within a sequence, so that the sums do not
# depend on the chunks of a reader.
# Axes: N tokens of all sequences, R of them whose route is known, L layers, K experts of a token.

from __future__ import annotations

import numpy as np

from servanda.rl.dumps.checks.base import Finding, FirstPlace, StepSums, Sums, check
from servanda.rl.dumps.checks.line_up import LAGS
from servanda.traces.rollouts import ROUTE, UNROUTED, Array, Rollouts

ENOUGH = 2000  # fewest pairs of occurrences of a token at each lag for a finding
_MARGIN = 0.05  # of the share of common experts above chance
_INVALID_SHARE = 0.01


@check("routes")
class RoutesCheck(Sums):
    """Sums per lag: pairs and common experts of the same token, and of any two tokens."""

    def __init__(self) -> None:
        self.sums = StepSums()  # [lags, 4]
        self.known = self.invalid = self.sequences = self.without = 0
        self.first, self.first_without = FirstPlace(), FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        route_NLK = rollouts.per_token.get(ROUTE)
        known_N = np.zeros(len(rollouts.token_N), dtype=bool)
        if route_NLK is not None:
            known_N = (route_NLK != UNROUTED).all(axis=(1, 2))
            invalid_N = known_N & _repeats(route_NLK)
            self.known += int(known_N.sum())
            self.invalid += int(invalid_N.sum())
            self._place(rollouts, self.first, invalid_N)
            self.sums.add(rollouts.step, _sums(rollouts, route_NLK[:, 0], known_N & ~invalid_N))
        # the last token of a sequence is sampled by a forward, so one row at least is there
        some_S = np.bincount(rollouts.sequence_N[known_N], minlength=len(rollouts)) > 0
        self.sequences += len(rollouts)
        self.without += int((~some_S).sum())
        self.first_without.add_sequence(rollouts, ~some_S)

    @staticmethod
    def _place(rollouts: Rollouts, first: FirstPlace, flag_N: Array) -> None:
        flag_S = np.bincount(rollouts.sequence_N[flag_N], minlength=len(rollouts)) > 0
        first.add_sequence(rollouts, flag_S)

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
        pairs, same, all_pairs, chance = self.sums.total(np.zeros((len(LAGS), 4))).T
        numbers = {"tokens": float(self.known), "pairs": float(pairs.min())}
        if pairs.min() < ENOUGH:
            text = f"{pairs.min():,.0f} pairs of equal tokens are too few to check recorded experts"
            return Finding("routes", "warning", text, numbers)
        level = chance / all_pairs
        if level.min() > 1 - _MARGIN:
            text = "all tokens have the same recorded experts: they were not recorded"
            return Finding("routes", "unsound", text, numbers)
        share = dict(zip(LAGS, ((same / pairs - level) / (1 - level)).tolist(), strict=True))
        numbers |= {f"lag{lag:+d}": value for lag, value in share.items()}
        best = max((lag for lag in LAGS if lag), key=lambda lag: share[lag])
        common = (
            f"tokens that recur share {share[0]:.0%} of their experts beyond chance at lag 0, "
            f"{share[best]:.0%} at lag {best:+d}"
        )
        if share[best] > share[0] + _MARGIN:
            text = (
                f"the recorded experts are shifted: row t is that of token t{best:+d} ({common}), "
                "so a replay routes each token as another one"
            )
            return Finding("routes", "unsound", text, numbers)
        if share[0] < _MARGIN:
            text = (
                f"the recorded experts fit the tokens at no lag ({common}): are they of these "
                "sequences?"
            )
            return Finding("routes", "unsound", text, numbers)
        return Finding("routes", "ok", f"recorded experts fit their tokens ({common})", numbers)


def _repeats(route_NLK: Array) -> Array:
    """Whether a layer of a token has one expert twice, [N]."""
    sorted_NLK = np.sort(route_NLK, axis=-1)
    return (sorted_NLK[..., 1:] == sorted_NLK[..., :-1]).any(axis=(1, 2))


def _sums(rollouts: Rollouts, route_NK: Array, known_N: Array) -> Array:
    """For each lag, [lags, 4]: pairs of equal fed tokens and the experts that they share, as a mean
    over K, and both of all pairs of the sequence."""
    sequence_N, at_N = rollouts.sequence_N, np.flatnonzero(known_N)
    sums_L4 = np.zeros((len(LAGS), 4))
    for row, lag in enumerate(LAGS):
        # the route of a token is of the forward that was fed the token before it
        fed_R = at_N - 1 + lag
        inside_R = (fed_R >= 0) & (fed_R < len(sequence_N))
        inside_R[inside_R] = sequence_N[fed_R[inside_R]] == sequence_N[at_N[inside_R]]
        rows_R, token_R = at_N[inside_R], rollouts.token_N[fed_R[inside_R]]
        sequence_R, route_RK = sequence_N[rows_R], route_NK[rows_R].astype(np.int64)
        if len(rows_R):
            of_token_R = sequence_R * (int(token_R.max()) + 1) + token_R
            sums_L4[row] = (*_common(of_token_R, route_RK), *_common(sequence_R, route_RK))
    return sums_L4


def _common(class_R: Array, route_RK: Array) -> tuple[float, float]:
    """Ordered pairs of rows of one class, and the mean number of experts they share over K."""
    _, n = np.unique(class_R, return_counts=True)
    experts = int(route_RK.max()) + 1
    _, c = np.unique(class_R[:, None] * experts + route_RK, return_counts=True)
    return float((n * (n - 1)).sum()), float((c * (c - 1)).sum()) / route_RK.shape[1]
