# Routes: the experts that the sampler recorded are those of these tokens, in their order.
#
# The first router of a mixture sees little but the token that it is fed, so that two occurrences
# of a token in a sequence share more experts than two tokens at random.  Row t is compared with the
# token that was fed for it, at lag 0, and with its neighbours.  Where one token often follows
# another, pairs that are equal at one lag are equal at the next as well, so that only those pairs
# count that are equal at one of the two.  Pairs are taken within a sequence, and their shares are
# compared sequence by sequence: `paired_shares` gives the error probability.
# Axes: N tokens of all sequences, R of them whose route is known, S sequences, L layers, K experts
# of a token.

from __future__ import annotations

import numpy as np

from servanda.rl.dumps.checks.base import Finding, FirstPlace, StepSums, Sums, check
from servanda.rl.dumps.checks.line_up import LAGS
from servanda.rl.dumps.checks.paired_shares import ERROR, chance, share, signs, told_before
from servanda.theory.stats.alpha import shared
from servanda.traces.rollouts import ROUTE, ROUTES_UNREAD, UNROUTED, Array, Rollouts

OTHERS = tuple(lag for lag in LAGS if lag)
_INVALID_SHARE = 0.01


@check("routes", needs="routes")
class RoutesCheck(Sums):
    """Sums per lag of pairs and common experts, see `_sums`; and rows that no router picks."""

    def __init__(self) -> None:
        self.sums = StepSums()  # [lags, 3, 2]
        # sequences whose pairs at the lag share more than those at lag 0, and fewer
        self.shifted = np.zeros((len(OTHERS), 2), np.int64)
        self.known = self.invalid = self.sequences = self.without = self.unread = 0
        self.recurring = 0  # sequences in which a token recurs
        self.first, self.first_without = FirstPlace(), FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        some_S = np.zeros(len(rollouts), dtype=bool)
        route_NLK = rollouts.per_token.get(ROUTE)
        if route_NLK is not None and route_NLK.size:
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
            told_N = known_N & ~invalid_N & ~told_before(rollouts)
            self._compare(rollouts, _sums(rollouts, route_NK, told_N))
            some_S = some(rollouts, known_N)
        self.sequences += len(rollouts)
        self.without += int((~some_S).sum())
        self.first_without.add_sequence(rollouts, ~some_S)
        unread_S = rollouts.per_sequence.get(ROUTES_UNREAD)
        self.unread += 0 if unread_S is None else int((unread_S == 1).sum())

    def _compare(self, rollouts: Rollouts, sums_SL32: Array) -> None:
        there_SL, here_SL, _ = np.moveaxis(share(sums_SL32[..., 1], sums_SL32[..., 0]), -1, 0)
        self.sums.add(rollouts.step, sums_SL32.sum(axis=0))
        self.shifted = self.shifted + [signs(*of) for of in zip(there_SL.T, here_SL.T, strict=True)]
        self.recurring += int(np.isfinite(there_SL - here_SL).all(axis=1).sum())

    def finding(self) -> Finding:
        if not self.known:
            return self._unread() or Finding("routes", "ok", "")
        if self.invalid > _INVALID_SHARE * self.known:
            text = (
                f"the recorded experts of {self.invalid:,} of {self.known:,} tokens have one "
                "expert twice, which no router picks: rows of padding, or never filled in"
            )
            odd = self.invalid, self.known, _INVALID_SHARE
            return Finding("routes", "unsound", text, first=self.first.place, odd=odd)
        found = self._lag()
        if found.state == "unsound":
            return found
        if unread := self._unread():
            return unread
        if self.without:
            text = (
                f"{self.without:,} of {self.sequences:,} sequences have no recorded experts: the "
                "trainer routes them by itself"
            )
            return Finding("routes", "warning", text, first=self.first_without.place)
        return found

    def _unread(self) -> Finding | None:
        if not self.unread:
            return None
        text = (
            f"the experts of {self.unread:,} of {self.sequences:,} sequences are recorded in a "
            "form that is not read, so whether they are those of the tokens is unknown"
        )
        return Finding("routes", "warning", text)

    def _lag(self) -> Finding:
        sums_L32 = self.sums.total(np.zeros((len(OTHERS), 3, 2)))
        any_2, apart_L22 = sums_L32[0, 2], sums_L32[:, :2]
        numbers = {"tokens": float(self.known), "pairs": float(apart_L22[..., 0].min())}
        if any_2[0] and any_2[0] == any_2[1]:
            text = "all tokens have the same recorded experts: they were not recorded"
            return Finding("routes", "unsound", text, numbers)
        by_chance = float(share(any_2[1], any_2[0]))
        share_L2 = (share(apart_L22[..., 1], apart_L22[..., 0]) - by_chance) / (1 - by_chance)
        p_L = np.array([chance(*of) for of in self.shifted.tolist()])
        fits = max(chance(*of) for of in self.shifted[:, ::-1].tolist())  # at each lag
        numbers |= {"p_shifted": float(min(1.0, len(OTHERS) * p_L.min())), "p_fits": fits}
        sure_L = p_L <= shared(ERROR, len(OTHERS))
        at = int(
            np.nan_to_num(np.where(sure_L | ~sure_L.any(), share_L2[:, 0], -1), nan=-1).argmax()
        )
        lag, (there, here) = OTHERS[at], share_L2[at].tolist()
        numbers |= {"lag+0": here, f"lag{lag:+d}": there}
        common = (
            f"tokens that recur at lag 0 share {_percent(here)} of their experts beyond chance, at "
            f"lag {lag:+d} {_percent(there)}"
        )
        if sure_L.any():
            text = f"the recorded experts are shifted: row t is that of token t{lag:+d} ({common})"
            return Finding("routes", "unsound", text, numbers)
        if fits <= ERROR:
            return Finding("routes", "ok", f"recorded experts fit their tokens ({common})", numbers)
        text = (
            "nothing shows that the recorded experts are of these tokens: those that recur share "
            f"no more of them than their neighbours do in most of {self.recurring:,} sequences"
        )
        return Finding("routes", "warning", text, numbers)


def _percent(share: float) -> str:
    """A share beyond chance, which may be below it.

    >>> _percent(0.283), _percent(-0.01)
    ('28 %', '0 %')
    """
    return f"{100 * max(share, 0.0):.0f} %" if share == share else "none known"


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
    """Pairs of rows of a sequence and the experts that they share over K, [S, lags, 3, 2].

    Of pairs whose fed tokens are equal at that lag and not at lag 0, equal at lag 0 and not at that
    lag, and of all pairs.
    """
    sequence_N, at_N = rollouts.sequence_N, np.flatnonzero(known_N)
    at_N = at_N[rollouts.start_S[sequence_N[at_N]] < at_N]  # no token is fed for the first
    sums_SL32 = np.zeros((len(rollouts), len(OTHERS), 3, 2))
    # ids from 0 on: a dump may have any number, and three of them share one integer below
    token_N = np.unique(rollouts.token_N, return_inverse=True)[1]
    words = int(token_N.max(initial=0)) + 1
    size = len(rollouts)
    every_S2 = _common(sequence_N[at_N], sequence_N[at_N], route_NK[at_N], size)
    for at, lag in enumerate(OTHERS):
        # the route of a token is of the forward that was fed the token before it
        fed_R = at_N - 1 + lag
        inside_R = (fed_R >= 0) & (fed_R < len(sequence_N))
        inside_R[inside_R] = sequence_N[fed_R[inside_R]] == sequence_N[at_N[inside_R]]
        row_R, route_RK = at_N[inside_R], route_NK[at_N[inside_R]]
        there_R, here_R = token_N[fed_R[inside_R]], token_N[row_R - 1]
        of_R = sequence_N[row_R]
        both_S2, there_S2, here_S2 = (
            _common(class_R, of_R, route_RK, size)
            for class_R in (
                (of_R * words + there_R) * words + here_R,
                of_R * words + there_R,
                of_R * words + here_R,
            )
        )
        found = there_S2 - both_S2, here_S2 - both_S2, every_S2
        sums_SL32[:, at] = np.stack(found, axis=1)
    return sums_SL32


def _common(class_R: Array, sequence_R: Array, route_RK: Array, size: int) -> Array:
    """Ordered pairs of rows of one class, and the mean experts they share over K, [S, 2].

    Args:
        class_R: of rows of one sequence only; size: S.
    """
    if not len(class_R):
        return np.zeros((size, 2))
    _, at_C, class_R, n_C = np.unique(
        class_R, return_index=True, return_inverse=True, return_counts=True
    )
    experts, picked = int(route_RK.max()) + 1, route_RK.shape[1]
    key_P, c_P = np.unique(class_R[:, None] * experts + route_RK, return_counts=True)
    of_C = sequence_R[at_C]
    pairs_S = np.bincount(of_C, n_C * (n_C - 1), minlength=size)
    shared_S = np.bincount(of_C[key_P // experts], c_P * (c_P - 1), minlength=size)
    return np.stack([pairs_S, shared_S / picked], axis=1)
