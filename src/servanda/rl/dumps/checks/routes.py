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

import math
import re
from collections import Counter

import numpy as np

from servanda.rl.dumps.checks.base import Finding, FirstPlace, StepSums, Sums, check
from servanda.rl.dumps.checks.pairs import LAGS
from servanda.theory.stats.alpha import shared
from servanda.traces.rollouts import (
    REPLAYS,
    ROUTE,
    ROUTE_TRAIN,
    ROUTES_UNREAD,
    UNROUTED,
    Array,
    Rollouts,
)

OTHERS = tuple(lag for lag in LAGS if lag)
_INVALID_SHARE = _ODD_SHARE = 0.01
_RUN = 8  # equal rows, one after the other


@check("routes", needs="routes")
class RoutesCheck(Sums):
    """Sums per lag of pairs and common experts, see `_sums`; and rows that no router picks."""

    def __init__(self) -> None:
        self.sums = StepSums()  # [lags, 3, 2]
        # sequences whose pairs at the lag share more than those at lag 0, and fewer
        self.shifted = np.zeros((len(OTHERS), 2), np.int64)
        self.known = self.invalid = self.sequences = self.without = self.unread = 0
        self.copied = 0  # rows that are those of other tokens
        self.copies, self.first_copied = Places(), FirstPlace()
        self.recurring = 0  # sequences in which a token recurs
        self.own = StepSums()  # these sequences, the sum of their shares at lag 0, and of squares
        self.moved, self.strange = Places(), Places()
        self.moved_by: Counter[int] = Counter()
        self.first, self.first_without, self.first_odd = FirstPlace(), FirstPlace(), FirstPlace()

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
            copied_N = _copied(rollouts, route_NLK, known_N & ~invalid_N)
            self.copied += int(copied_N.sum())
            self.copies.add(rollouts, some(rollouts, known_N), some(rollouts, copied_N))
            self.first_copied.add_sequence(rollouts, some(rollouts, copied_N))
            self._compare(rollouts, _sums(rollouts, route_NK, told_N))
            self._each(rollouts, route_NK, told_N)
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
        own_S = here_SL[np.isfinite(there_SL - here_SL).all(axis=1)].mean(axis=1)
        self.recurring += len(own_S)
        self.own.add(rollouts.step, np.array([len(own_S), own_S.sum(), own_S @ own_S]))

    def _each(self, rollouts: Rollouts, route_NK: Array, told_N: Array) -> None:
        judged_S, lag_S, strange_S = odd_ones(rollouts, route_NK, told_N)
        self.moved.add(rollouts, judged_S, lag_S != 0)
        self.strange.add(rollouts, judged_S, strange_S)
        self.moved_by.update(lag_S[lag_S != 0].tolist())
        self.first_odd.add_sequence(rollouts, (lag_S != 0) | strange_S)

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
        if self.copies.affected > max(1, _ODD_SHARE * self.copies.all):
            text = (
                f"the recorded experts of {self.copied:,} of {self.known:,} tokens are those of "
                f"other tokens before them, in every layer, {self.copies.text}: filled up, counted "
                "from the beginning again, or of another response"
            )
            odd = self.copies.affected, self.copies.all, _ODD_SHARE
            return Finding("routes", "unsound", text, {}, self.first_copied.place, odd)
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
        for places, what in (
            (self.moved, "the recorded experts are shifted"),
            (self.strange, "the recorded experts are not those of the tokens"),
        ):
            if not places.affected:
                continue
            if places is self.moved:
                what += f" (row t is that of token t{self.moved_by.most_common(1)[0][0]:+d})"
            odd = places.affected, places.all, _ODD_SHARE
            state = "unsound" if places.affected > max(1, _ODD_SHARE * places.all) else "warning"
            text = f"{what} {places.text}, and fit in others"
            return Finding("routes", state, text, numbers, self.first_odd.place, odd)
        if fits <= ERROR:
            return Finding("routes", "ok", f"recorded experts fit their tokens ({common})", numbers)
        if (most := self._most(by_chance)) < _TELLING / 2:
            text = (
                "the recorded experts are not those of the tokens: in "
                f"{self.recurring:,} sequences, tokens that recur share at most {_percent(most)} "
                "of them beyond chance, and a router's choice follows the token that it is fed"
            )
            return Finding("routes", "unsound", text, numbers)
        text = (
            "nothing shows that the recorded experts are of these tokens: those that recur share "
            f"no more of them than their neighbours do in most of {self.recurring:,} sequences"
        )
        return Finding("routes", "warning", text, numbers)

    def _most(self, by_chance: float) -> float:
        """Most of the share beyond chance that tokens which recur may have of their experts."""
        n, total, squares = self.own.total(np.zeros(3))
        if n < _SEQUENCES:
            return 1.0
        error = math.sqrt(max(squares / n - (total / n) ** 2, 0.0) / n)
        return max(0.0, (total / n + _CLEARLY * error - by_chance) / (1 - by_chance))


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


def _copied(rollouts: Rollouts, route_NLK: Array, known_N: Array) -> Array:
    """Whether a row is in a run of at least _RUN that are those of other tokens before it, [N].

    Filled up, taken from the text's beginning, or from another sequence.
    """
    at_M = np.flatnonzero(known_N)
    found_N = np.zeros(len(known_N), bool)
    if len(at_M) < _RUN:
        return found_N
    flat_MC = np.sort(route_NLK[at_M], axis=-1).reshape(len(at_M), -1).astype(np.uint64)
    rng = np.random.default_rng(0)
    weight_C = rng.integers(1, 1 << 62, flat_MC.shape[1], dtype=np.uint64) * np.uint64(2)
    hash_M = flat_MC @ (weight_C + np.uint64(1))  # modulo 2^64
    order_M = np.argsort(hash_M, kind="stable")
    again_M = hash_M[order_M[1:]] == hash_M[order_M[:-1]]
    back_N = np.zeros(len(known_N), np.int64)  # to the last row that is equal; 0 if there is none
    back_N[at_M[order_M[1:][again_M]]] = (at_M[order_M[1:]] - at_M[order_M[:-1]])[again_M]
    at_R = np.flatnonzero(back_N)
    goes_on_R = np.diff(at_R, prepend=-2) == 1
    goes_on_R &= np.diff(back_N[at_R], prepend=0) == 0
    goes_on_R &= np.diff(rollouts.sequence_N[at_R], prepend=-1) == 0
    run_R = np.cumsum(~goes_on_R)
    fed_N = np.roll(rollouts.token_N, 1)
    other_R = fed_N[at_R] != fed_N[at_R - back_N[at_R]]
    rows_G = np.bincount(run_R)
    long_G = (rows_G >= _RUN) & (2 * np.bincount(run_R, other_R) >= rows_G)
    found_N[at_R[long_G[run_R]]] = True
    return found_N


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


# Sequences whose record is not theirs, among others.
#
# The experts that a token id has in one half of the sequences predict those of the other half.  In
# a sequence whose record is shifted, its rows fit the neighbours' tokens; a record of another
# answer, or one that was filled in, fits neither.


_IDS = 4096  # most frequent fed tokens
_KNOWN_ROWS = 3  # fewest rows of a token in the other half
_ROWS = 16  # fewest rows of a part of a sequence
_SEQUENCES = 50  # fewest that say that no token tells its experts
_CLEARLY = 5.0  # standard errors
_LATE = (0.5, 0.7)  # shares of an answer from which its rest is judged, too
_TELLING = 0.1  # least share beyond chance that tokens predict


def odd_ones(rollouts: Rollouts, route_NK: Array, told_N: Array) -> tuple[Array, Array, Array]:
    """Of each sequence: whether it was judged, the lag at which it fits, whether it fits nowhere.

    The prompt and the answer are judged apart; a lag of 0 means that it is not shifted.
    """
    size = len(rollouts)
    none = np.zeros(size, bool), np.zeros(size, np.int64), np.zeros(size, bool)
    at_R = np.flatnonzero(told_N)
    at_R = at_R[rollouts.start_S[rollouts.sequence_N[at_R]] < at_R]  # no token is fed for the first
    if size < 2 or not len(at_R):
        return none
    excess_LR = _predicted(rollouts, route_NK, at_R)
    of_R = rollouts.sequence_N[at_R]
    place_R = at_R - rollouts.start_S[of_R] - rollouts.prompt_tokens_S[of_R]
    length_S = rollouts.length_S - rollouts.prompt_tokens_S
    late = [place_R >= share * length_S[of_R] for share in _LATE]  # also where it starts within one
    parts = [_means(excess_LR, of_R, part_R, size) for part_R in (place_R >= 0, *late, place_R < 0)]
    usual = max((_usual(mean_LS[0], n_S) for mean_LS, _, _, n_S in parts), default=0.0)
    judged_S, lag_S, strange_S = none
    if usual < _TELLING:
        return none
    for mean_LS, error_S, apart_LS, n_S in parts:
        enough_S = n_S >= _ROWS
        judged_S |= enough_S
        best_S = apart_LS.argmax(axis=0)
        at_S = np.arange(size)
        moved_S = enough_S & (apart_LS[best_S, at_S] > _CLEARLY)
        moved_S &= mean_LS[1 + best_S, at_S] > usual / 2
        lag_S[moved_S] = np.array(OTHERS)[best_S[moved_S]]
        strange_S |= enough_S & ~moved_S & (mean_LS[0] + _CLEARLY * error_S < usual / 2)
    return judged_S, lag_S, strange_S & (lag_S == 0)


def _predicted(rollouts: Rollouts, route_NK: Array, at_R: Array) -> Array:
    """How much likelier a row's experts are given a token of its sequence, [1 + lags, R].

    The token that was fed for it, then its neighbours; NaN where there is none, or it is rare.
    """
    ids, of_N, n_I = np.unique(rollouts.token_N, return_inverse=True, return_counts=True)
    common = np.full(len(ids), -1)
    most = np.argsort(-n_I, kind="stable")[:_IDS]
    common[most] = np.arange(len(most))
    id_N = common[of_N.reshape(-1)]
    route_RK, half_R = route_NK[at_R].astype(np.int64), rollouts.sequence_N[at_R] % 2
    experts, shown = int(route_RK.max()) + 1, len(most)
    fed_R = id_N[at_R - 1]
    kept_R = fed_R >= 0
    n_HI, chosen_HIE = np.zeros((2, shown)), np.zeros((2, shown * experts))
    for half in (0, 1):
        own_R = kept_R & (half_R == half)
        n_HI[half] = np.bincount(fed_R[own_R], minlength=shown)
        key_P = (fed_R[own_R, None] * experts + route_RK[own_R]).reshape(-1)
        chosen_HIE[half] = np.bincount(key_P, minlength=shown * experts)
    usual_E = np.bincount(route_RK.reshape(-1), minlength=experts) / len(route_RK)
    excess_LR = np.full((1 + len(OTHERS), len(at_R)), np.nan)
    for at, lag in enumerate((0, *OTHERS)):
        there_R = at_R - 1 + lag
        inside_R = (there_R >= 0) & (there_R < len(id_N))
        there_R = np.where(inside_R, there_R, 0)
        inside_R &= rollouts.sequence_N[there_R] == rollouts.sequence_N[at_R]
        id_R = id_N[there_R]
        n_R = n_HI[1 - half_R, id_R]
        inside_R &= (id_R >= 0) & (n_R >= _KNOWN_ROWS)
        key_RK = id_R[inside_R, None] * experts + route_RK[inside_R]
        share_RK = chosen_HIE[1 - half_R[inside_R, None], key_RK] / n_R[inside_R, None]
        excess_LR[at, inside_R] = (share_RK - usual_E[route_RK[inside_R]]).mean(axis=1)
    return excess_LR


def _means(
    excess_LR: Array, of_R: Array, part_R: Array, size: int
) -> tuple[Array, Array, Array, Array]:
    """Of each sequence: the means [1 + lags, S], the error of the first, by how many standard
    errors each lag is above lag 0, and the number of rows."""
    known_R = np.isfinite(excess_LR).all(axis=0) & part_R
    of_R, excess_LR = of_R[known_R], excess_LR[:, known_R]
    n_S = np.bincount(of_R, minlength=size)

    def mean(x_R: Array) -> tuple[Array, Array]:
        with np.errstate(invalid="ignore", divide="ignore"):
            mean_S = np.bincount(of_R, x_R, minlength=size) / n_S
            square_S = np.bincount(of_R, x_R**2, minlength=size) / n_S
            return mean_S, np.sqrt(np.maximum(square_S - mean_S**2, 1e-12) / n_S)

    mean_LS = np.stack([mean(x_R)[0] for x_R in excess_LR])
    apart = [mean(x_R - excess_LR[0]) for x_R in excess_LR[1:]]
    apart_LS = np.nan_to_num(np.stack([m / e for m, e in apart]), nan=0.0)
    return mean_LS, mean(excess_LR[0])[1], apart_LS, n_S


def _usual(mean_S: Array, n_S: Array) -> float:
    enough_S = n_S >= _ROWS
    return float(np.median(mean_S[enough_S])) if enough_S.any() else 0.0


# Whether one of two shares is the larger one in most sequences, with an error probability.
#
# If the first is the larger one with a probability of at most 1/2 in each sequence, the number of
# sequences in which it is has a binomial tail: the sign test.  It needs neither a size nor a
# distribution of the shares.  The tokens of a sequence depend on each other, and count once.
# Answers to one prompt are independent given the prompt, so a prompt that neighbours share counts
# in the first of them alone.
# Axes: N tokens, S sequences.


ERROR = 1e-4  # probability that a check names what is not there, over all its lags


def signs(first_S: Array, second_S: Array) -> Array:
    """Sequences in which the first share is the larger one, and the smaller one, [2].

    Equal ones count as neither, as do those in which one is NaN.
    """
    return np.array([(first_S > second_S).sum(), (first_S < second_S).sum()])


def chance(larger: int, smaller: int) -> float:
    """The probability of so many sequences or more, if each is as likely the larger as the smaller.

    >>> chance(0, 0), chance(2, 0), chance(0, 5)
    (1.0, 0.25, 1.0)
    """
    if not larger:
        return 1.0
    n = larger + smaller
    k_K = np.arange(1, n + 1)
    ways_K = np.cumsum(np.log((n + 1 - k_K) / k_K))[larger - 1 :]  # log of n over k
    return float(np.exp(ways_K - n * math.log(2)).sum())


def told_before(rollouts: Rollouts) -> Array:
    """Whether a token is of a prompt that the sequence before has, too, [N]."""
    names = rollouts.group_S
    again_S = np.array([a == b for a, b in zip(names, ("", *names), strict=False)], dtype=bool)
    again_S[:1] = False
    at_N = np.arange(len(rollouts.token_N)) - np.repeat(rollouts.start_S, rollouts.length_S)
    return again_S[rollouts.sequence_N] & (at_N < rollouts.prompt_tokens_S[rollouts.sequence_N])


def share(part_S: Array, whole_S: Array) -> Array:
    """A share, NaN of nothing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return part_S / whole_S


# Replay: the trainer's forward pass used the experts that the sampler recorded.
#
# A trainer that replays (R3, arXiv 2510.11370) has the recorded experts in every layer of every
# token.  One that routes by itself has others where rounding decides.  Where the trainer's rows
# equal a neighbour of the sampler more often than their own row, they are misaligned: the shares
# are compared sequence by sequence, see `paired_shares`.
# Axes: N tokens of all sequences, S sequences, L layers, K experts of a token.


# Where affected sequences are: how many, of which steps, and of which ranks.


_RANK = re.compile(r"rank_?(\d+)")
_SHOWN = 4  # most single numbers of a list


class Places(Sums):
    """Counts of affected sequences, and of all, by step and by rank."""

    def __init__(self) -> None:
        self.all = self.affected = 0
        self.steps: Counter[int] = Counter()
        self.of_rank: Counter[str] = Counter()  # rank -> its sequences
        self.ranks: Counter[str] = Counter()  # rank -> its affected sequences

    def add(self, rollouts: Rollouts, among_S: Array, flag_S: Array) -> None:
        """Add sequences.

        Args:
            among_S: those that could be affected; flag_S: those that are.
        """
        self.all += int(among_S.sum())
        if count := int(flag_S.sum()):
            self.affected += count
            self.steps[rollouts.step] += count
        ranks = _ranks(rollouts)
        self.of_rank.update(ranks[i] for i in np.flatnonzero(among_S))
        self.ranks.update(ranks[i] for i in np.flatnonzero(flag_S))

    @property
    def text(self) -> str:
        """Such as "in 3 of 40 sequences, of steps 2 to 4, all of rank 1"."""
        found = f"in {self.affected:,} of {self.all:,} sequences"
        if self.steps:
            found += f", of step{'s' * (len(self.steps) > 1)} {_listed(sorted(self.steps))}"
        some, known = sorted(filter(None, self.ranks), key=int), {*filter(None, self.of_rank)}
        if len(known) > 1 and some and len(some) < len(known):
            found += f", all of rank{'s' * (len(some) > 1)} {_listed([*map(int, some)])}"
        return found


def _ranks(rollouts: Rollouts) -> tuple[str, ...]:
    """The rank of the trainer that wrote each sequence; "" where it is unknown."""
    labelled = rollouts.labels.get("rank")
    if labelled is not None:
        return tuple(name if name.isdecimal() else "" for name in labelled)
    found = (_RANK.search(source) for source in rollouts.source_S)
    return tuple(match[1] if match else "" for match in found)


def _listed(numbers: list[int]) -> str:
    """Whole numbers in a few words.

    >>> _listed([3, 4, 5, 6, 7]), _listed([1, 4]), _listed([1, 3, 5, 7, 9, 11])
    ('3 to 7', '1, 4', '1, 3, 5, 7 and 2 others')
    """
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    rest = len(numbers) - _SHOWN
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"{shown} and {rest} other{'s' * (rest > 1)}" if rest > 0 else shown


_STRAY = 0.001  # declared: the share of tokens that a replay may miss before the data are unsound
_MOST = 0.5  # more than half of the tokens touched is a warning, as "most tokens" says
_LAYERS_SHOWN = 5  # layers that are named


@check("replay", needs="routes")
class ReplayCheck(Sums):
    """Counts of tokens and of (token, layer) pairs that are known on both sides.

    Of tokens whose trainer says that it replays (`said`) and of all.
    """

    def __init__(self) -> None:
        self.tokens = self.touched = self.said = self.missed = self.pairs = self.shapes = 0
        self.claimed = 0  # tokens that are said to be replayed, without the trainer's experts
        self.at: Counter[int] = Counter()  # layer -> pairs that differ
        self.missed_at: Counter[int] = Counter()  # the same, of tokens that are said to be replayed
        self.lags: Counter[tuple[int, bool]] = Counter()  # (lag, whether the pair is equal)
        # sequences in which more pairs are equal at the lag than at 0, and in which fewer are
        self.shifted = np.zeros((len(OTHERS), 2), np.int64)
        self.gap = StepSums()  # [2, 2]: tokens and sum of |log ratio|, of untouched and of touched
        self.first, self.first_touched = FirstPlace(), FirstPlace()
        self.missing, self.touching = Places(), Places()

    def add(self, rollouts: Rollouts) -> None:
        train_NLK, infer_NLK = (rollouts.per_token.get(name) for name in (ROUTE_TRAIN, ROUTE))
        says_S = rollouts.per_sequence.get(REPLAYS, np.zeros(len(rollouts))) == 1
        if infer_NLK is None or (train_NLK is None and not says_S.any()):
            return
        if train_NLK is None:
            train_NLK = np.full_like(infer_NLK, UNROUTED)
        if train_NLK.shape != infer_NLK.shape:
            self.shapes += 1
            return
        train_NLK, infer_NLK = np.sort(train_NLK), np.sort(infer_NLK)
        known_N = known(train_NLK) & known(infer_NLK)
        differ_NL = (train_NLK != infer_NLK).any(axis=-1) & known_N[:, None]
        touched_N = differ_NL.any(axis=1)
        says_N = says_S[rollouts.sequence_N]
        self.claimed += int((says_N & known(infer_NLK) & ~known(train_NLK)).sum())
        says_N &= known_N
        missed_NL = differ_NL & says_N[:, None]
        self.tokens += int(known_N.sum())
        self.pairs += int(known_N.sum()) * differ_NL.shape[1]
        self.touched += int(touched_N.sum())
        self.said += int(says_N.sum())
        self.missed += int((touched_N & says_N).sum())
        for counts, of_NL in ((self.at, differ_NL), (self.missed_at, missed_NL)):
            counts.update({at: n for at, n in enumerate(of_NL.sum(axis=0).tolist()) if n})
        self._compare(rollouts, train_NLK, infer_NLK, known_N)
        self.touching.add(rollouts, some(rollouts, known_N), some(rollouts, touched_N))
        self.missing.add(rollouts, some(rollouts, says_N), some(rollouts, touched_N & says_N))
        self.first.add_sequence(rollouts, some(rollouts, touched_N & says_N))
        self.first_touched.add_sequence(rollouts, some(rollouts, touched_N))
        self.gap.add(rollouts.step, _gap(rollouts, touched_N, known_N))

    def _compare(
        self, rollouts: Rollouts, train_NLK: Array, infer_NLK: Array, known_N: Array
    ) -> None:
        """Counts of equal pairs at each lag; a prompt that neighbours share counts once."""
        fresh_N, share_S = known_N & ~told_before(rollouts), {}
        for lag in LAGS:
            equal_S, pairs_S = _equal_at(rollouts, train_NLK, infer_NLK, fresh_N, lag)
            equal, pairs = int(equal_S.sum()), int(pairs_S.sum())
            self.lags.update({(lag, True): equal, (lag, False): pairs - equal})
            share_S[lag] = share(equal_S, pairs_S)
        self.shifted = self.shifted + [signs(share_S[lag], share_S[0]) for lag in OTHERS]

    def finding(self) -> Finding:
        if self.shapes:
            text = "the experts of the trainer and those of the sampler are of other models"
            return Finding("replay", "unsound", text)
        if not self.tokens:
            return self._unproven() or Finding("replay", "ok", "")
        p_L = [chance(*of) for of in self.shifted.tolist()]
        sure = [p <= shared(ERROR, len(OTHERS)) for p in p_L]
        best = max(OTHERS, key=lambda lag: (sure[OTHERS.index(lag)], self._equal(lag)))
        numbers = {
            "tokens": float(self.tokens),
            "touched": self.touched / self.tokens,
            "flipped": self.at.total() / self.pairs,
            "p_misaligned": min(1.0, len(OTHERS) * min(p_L)),
        }
        if any(sure):
            text = (
                f"the trainer's experts are misaligned: row t is the sampler's row t{best:+d} "
                f"({_fine(self._equal(best))} of the layers of a token are equal at that lag, "
                f"{_fine(self._equal(0))} at lag 0, {self.touching.text})"
            )
            return Finding("replay", "unsound", text, numbers, self.first_touched.place)
        if self.missed:
            text = (
                "the trainer says that it replays the sampler's experts, and "
                f"{self.missed:,} of {self.said:,} tokens have others "
                f"({_layers(self.missed_at)}; {self.missing.text})"
            )
            odd = self.missed, self.said, _STRAY
            state = "unsound" if self.missed > _STRAY * self.said else "warning"
            return Finding("replay", state, text, numbers, self.first.place, odd)
        if unproven := self._unproven():
            return unproven
        if not self.touched:
            text = (
                f"the trainer's experts are the sampler's, in every layer of {self.tokens:,} tokens"
            )
            return Finding("replay", "ok", text, numbers)
        text = (
            "the trainer routes by itself: other experts than the sampler's in "
            f"{_fine(numbers['flipped'])} of the layers of a token, and in one or more layers "
            f"of {_fine(numbers['touched'])} of the tokens ({_layers(self.at)}{self._of_gap()})"
        )
        state = "warning" if numbers["touched"] > _MOST else "ok"
        return Finding("replay", state, text, numbers, self.first_touched.place)

    def _unproven(self) -> Finding | None:
        """That a replay is claimed, and cannot be seen."""
        if self.claimed <= _STRAY * (self.said + self.claimed):
            return None
        text = (
            "the trainer says that it replays the sampler's experts, and of "
            f"{self.claimed:,} tokens its own are not in the dump, so whether it does is unknown: "
            "pass routes_train="
        )
        return Finding("replay", "warning", text)

    def _equal(self, lag: int) -> float:
        equal, other = self.lags[lag, True], self.lags[lag, False]
        return equal / (equal + other) if equal else 0.0

    def _of_gap(self) -> str:
        """What touched tokens have of the sum of |log ratio|."""
        (others, near), (tokens, far) = self.gap.total(np.zeros((2, 2)))
        if not (others and tokens and far):
            return ""
        return (
            f"; their mean |log ratio| is {far / tokens:.2g} nats, that of the others "
            f"{near / others:.2g}, and {_fine(far / (far + near))} of the gap is theirs"
        )


def _fine(share: float) -> str:
    """A share, with two digits where it is small.

    >>> _fine(0.9412), _fine(0.0123), _fine(1.0)
    ('94 %', '1.2 %', '100 %')
    """
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _layers(at: Counter[int]) -> str:
    """The layers with most of the pairs, in their order."""
    most = sorted(layer for layer, _ in at.most_common(_LAYERS_SHOWN))
    more = f" and {len(at) - _LAYERS_SHOWN} others" if len(at) > _LAYERS_SHOWN else ""
    return f"layer{'s' if len(at) > 1 else ''} {', '.join(map(str, most))}{more}"


def _equal_at(
    rollouts: Rollouts, train_NLK: Array, infer_NLK: Array, known_N: Array, lag: int
) -> tuple[Array, Array]:
    """Pairs (token, layer) whose trainer's experts are those of the sampler `lag` rows on; all.

    Of each sequence, [S].
    """
    row_R = np.flatnonzero(known_N)
    row_R = row_R[(row_R + lag >= 0) & (row_R + lag < len(known_N))]
    there_R = row_R + lag
    inside_R = known_N[there_R] & (rollouts.sequence_N[row_R] == rollouts.sequence_N[there_R])
    row_R, there_R = row_R[inside_R], there_R[inside_R]
    equal_RL = (train_NLK[row_R] == infer_NLK[there_R]).all(axis=-1)
    of_R, size = rollouts.sequence_N[row_R], len(rollouts)
    equal_S = np.bincount(of_R, equal_RL.sum(axis=1), minlength=size)
    return equal_S, np.bincount(of_R, minlength=size) * equal_RL.shape[1]


def _gap(rollouts: Rollouts, touched_N: Array, known_N: Array) -> Array:
    """Trained tokens and their sum of |log ratio|, of those that are not touched and that are."""
    ratio_K, at_K = np.abs(rollouts.ratio_K), rollouts.trained_K
    usable_K = np.isfinite(ratio_K) & known_N[at_K]
    sides = (usable_K & ~touched_N[at_K], usable_K & touched_N[at_K])
    return np.array([[side_K.sum(), ratio_K[side_K].sum()] for side_K in sides])
