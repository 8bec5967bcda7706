# Whether the sampler's logprobs are of the law that drew the tokens.
#
# Three identities of any law need no second record of it.  A token of probability p is drawn in a
# share p of such places.  Different tokens of one place have probabilities of at most 1 together.
# And two draws of one place agree as often as the mean probability of what is drawn says:
# both are the sum of p^2.  Responses to one prompt share places as long as they are alike.
#
# Axes: A responses that are alike so far, K trained tokens, T turns.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from servanda.report.format import count
from servanda.rl.dumps.checks.base import (
    LEAST,
    Finding,
    FirstPlace,
    StepSums,
    Sums,
    by_squares,
    check,
    digest,
    share,
)
from servanda.traces.rollouts import Array, Rollouts

# Draws: n places of N at which one id was drawn with probabilities of p_1 ... p_n happen with
# probability at most p_1 ... p_n times the number of ways to choose them.

_NATS = math.log(1e-6) - math.log(1e6)  # so unlikely, for each of a million ids
# at a temperature of up to 2 no token is likelier than the root of the logged probability, so
# unprocessed logprobs of a hot sampler are no sign of a token that was not drawn
_HOTTEST = 2.0
_FEWEST = 10
_LEVELS = (0.0, -2.0, -4.0, -8.0, -16.0, -math.inf)  # bounds of log p, nats
_RARE = 3  # from which level on draws are counted at any place
_EVERYWHERE, _FIRST, _LATER = (
    "trained tokens",
    "first tokens of answers",
    "first tokens of later turns",
)


class _Place(Sums):
    """Draws of each id at one kind of place, by the level of the sampler's logprob."""

    def __init__(self) -> None:
        self.tokens = 0
        self.drawn: dict[int, tuple[int, float]] = {}  # id and level -> draws, sum of log p

    def add(self, token_K: Array, infer_K: Array, least: int = 0) -> None:
        known_K = np.isfinite(infer_K) & (infer_K < 0)
        self.tokens += int(known_K.sum())
        level_K = np.searchsorted(-np.array(_LEVELS), -infer_K, side="left") - 1
        known_K &= level_K >= least
        key_K = token_K[known_K].astype(np.int64) * len(_LEVELS) + level_K[known_K]
        key_I, at_K, n_I = np.unique(key_K, return_inverse=True, return_counts=True)
        nats_I = np.bincount(at_K, infer_K[known_K], minlength=len(key_I))
        self._more(zip(key_I.tolist(), n_I.tolist(), nats_I.tolist(), strict=True))

    def _more(self, drawn: Iterable[tuple[int, int, float]]) -> None:
        for key, n, nats in drawn:
            known_n, known_nats = self.drawn.get(key, (0, 0.0))
            self.drawn[key] = known_n + n, known_nats + nats

    def join(self, later: _Place) -> None:
        self.tokens += later.tokens
        self._more((key, n, nats) for key, (n, nats) in later.drawn.items())

    def impossible(self) -> Iterator[tuple[int, int, float]]:
        """(id, draws, their mean log p) of each id that cannot have been drawn so often."""
        for token in {key // len(_LEVELS) for key in self.drawn}:
            n, nats, most = 0, 0.0, None
            for level in range(len(_LEVELS) - 2, -1, -1):  # the least likely first
                own_n, own_nats = self.drawn.get(token * len(_LEVELS) + level, (0, 0.0))
                n, nats = n + own_n, nats + own_nats
                ways = math.lgamma(self.tokens + 1) - math.lgamma(n + 1)
                ways -= math.lgamma(self.tokens - n + 1)
                if n >= _FEWEST and ways + nats / _HOTTEST < _NATS:
                    most = token, n, nats / n
            if most:
                yield most


@check("draws", needs="texts", asks="whether a token that was not drawn is trained")
class Draws(Sums):
    """Ids that were drawn more often than the sampler's probabilities allow."""

    def __init__(self) -> None:
        self.places = {name: _Place() for name in (_FIRST, _LATER, _EVERYWHERE)}
        self.first: dict[int, str] = {}  # id -> place of its first rare draw

    def add(self, rollouts: Rollouts) -> None:
        turns, infer_K = rollouts.turns, rollouts.infer_K
        token_K = rollouts.token_N[rollouts.trained_K]
        for name, own_T in ((_FIRST, turns.number_T < 2), (_LATER, turns.number_T >= 2)):
            at_T = turns.trained_T[own_T]
            self.places[name].add(token_K[at_T], infer_K[at_T])
        self.places[_EVERYWHERE].add(token_K, infer_K, _RARE)
        rare_K = np.flatnonzero(infer_K < _LEVELS[_RARE])
        id_I, at_I = np.unique(token_K[rare_K], return_index=True)
        of_I = rollouts.sequence_of(rollouts.trained_K[rare_K[at_I]])
        for token, sequence in zip(id_I.tolist(), of_I.tolist(), strict=True):
            self.first.setdefault(token, rollouts.source_S[sequence])

    def join(self, later: Draws) -> None:
        for name, place in self.places.items():
            place.join(later.places[name])
        self.first = {**later.first, **self.first}

    def finding(self) -> Finding:
        for name, place in self.places.items():
            found = sorted(place.impossible(), key=lambda of: -of[1])
            if not found:
                continue
            (token, n, nats), more = found[0], sum(n for _, n, _ in found[1:])
            text = (
                f"id {token} is {n:,} of {place.tokens:,} {name}, where the sampler gives it a "
                f"probability of about {math.exp(nats):.2g}: it was not drawn (a header, padding "
                "or another text under the loss mask, or the logprobs are of other tokens)"
            )
            if more:
                text += f"; likewise {count(more, 'token')} of {count(len(found) - 1, 'other id')}"
            numbers = {"tokens": float(place.tokens), "undrawn": float(n + more)}
            return Finding("draws", "unsound", text, numbers, self.first.get(token, ""))
        return Finding("draws", "ok", "")


def _first(place: FirstPlace, rollouts: Rollouts, sequence: Array) -> None:
    if len(sequence) and not place.place:
        place.place = rollouts.source_S[int(sequence[0])]


# Siblings: responses to one prompt that begin alike have one law there.
#
# Unless something that is not recorded tells them apart, such as an image, an adapter, or a
# temperature of each request: then one token has several logprobs, and no more is asked.  First
# tokens, whose law is that of the prompt, and later ones are taken apart.

_UNSURE_NATS = -0.2
_FAR_NATS = 1.0  # kernels, their batches, and an update differ by less
_BEGINNING, _PAIRS, _FAR = 4, 30, 0.5  # tokens; draws of one of them; share that is far apart
_APART_NATS, _APART, _ALIKE = 0.2, 0.05, 5  # of one token; share of such pairs; fewest pairs
_DEEPEST = 256  # tokens of a beginning
_ABOVE, _PLACES = 1.1, 10  # sum of probabilities; places
_SIGMAS, _NOTED, _PROMPTS = 5.0, 4.0, 20  # of the agreement; fewest prompts with a shared place


@check("siblings", needs="texts", asks="whether responses that begin alike have one law there")
class Siblings(Sums):
    """Sums over the places that two or more responses of a step share."""

    def __init__(self) -> None:
        # of first tokens, and of later ones: draws of one token at a place, and those with a
        # somewhat other logprob; places with different tokens, and those that sum above 1
        self.counts = np.zeros((2, 4), np.int64)
        self.pairs = self.far = 0  # of the beginnings: draws, and those with a far other logprob
        self.groups = self.mixed = self.shared = 0  # prompt groups; prompts of several of them
        # of first tokens, and of all: prompts, sum of the agreement beyond chance, and of squares
        self.agreed = StepSums()
        self.first, self.first_mixed = FirstPlace(), FirstPlace()
        self.first_above = {0: FirstPlace(), 1: FirstPlace()}  # of first tokens, and of later ones

    def add(self, rollouts: Rollouts) -> None:
        first_S = np.cumsum(rollouts.trained_S) - rollouts.trained_S
        own_S = np.flatnonzero(rollouts.trained_S)
        first_S = rollouts.trained_K[first_S[own_S]]
        prompted = first_S > rollouts.start_S[own_S]  # else nothing says that two laws are one
        own_S, first_S = own_S[prompted], first_S[prompted]
        token_N = np.ascontiguousarray(rollouts.token_N)
        prompt_S = [
            token_N[start:end] for start, end in zip(rollouts.start_S[own_S], first_S, strict=True)
        ]
        of_S = [digest(prompt) for prompt in prompt_S]
        self._prompts(rollouts, own_S, dict(zip(own_S.tolist(), prompt_S, strict=True)), of_S)
        numbers = {name: i for i, name in enumerate(dict.fromkeys(of_S))}
        prompt_A = np.array([numbers[name] for name in of_S], np.int64)
        beyond_P, met_P = np.zeros(len(numbers)), np.zeros(len(numbers), bool)
        agreed = np.zeros((2, 3))
        like_A, at_A, row_A = prompt_A, first_S, own_S
        end_A = (rollouts.start_S + rollouts.length_S)[own_S]
        for depth in range(_DEEPEST):
            _, like_A, n_L = np.unique(like_A, return_inverse=True, return_counts=True)
            known_A = (n_L[like_A] > 1) & (at_A < end_A)
            known_A[known_A] = rollouts.mask_N[at_A[known_A]]
            known_A[known_A] = np.isfinite(rollouts.logp_infer_N[at_A[known_A]])
            like_A, at_A, row_A, end_A, prompt_A = (
                column[known_A] for column in (like_A, at_A, row_A, end_A, prompt_A)
            )
            if not len(like_A):
                break
            like_A = self._place(rollouts, like_A, at_A, row_A, prompt_A, depth, beyond_P, met_P)
            at_A = at_A + 1
            own_P = beyond_P[met_P]
            agreed[min(depth, 1) :] = len(own_P), own_P.sum(), (own_P**2).sum()
        self.agreed.add(rollouts.step, agreed)

    def _place(
        self,
        rollouts: Rollouts,
        like_A: Array,
        at_A: Array,
        row_A: Array,
        prompt_A: Array,
        depth: int,
        beyond_P: Array,
        met_P: Array,
    ) -> Array:
        """Add one token of each response; returns which are alike with it, [A].

        Args:
            like_A: which are alike before it; at_A: its index; row_A, prompt_A: of the response.
            depth: how many tokens were before.
            beyond_P, met_P: of each prompt, the agreement beyond chance, and whether a place is
                shared; added to.
        """
        logp_A = rollouts.logp_infer_N[at_A]
        order = np.lexsort((logp_A, rollouts.token_N[at_A], like_A))
        like_A, logp_A = like_A[order], logp_A[order]
        token_A, row_A = rollouts.token_N[at_A[order]], row_A[order]
        same_A = (np.diff(token_A) == 0) & (np.diff(like_A) == 0)
        drawn_A = np.cumsum(np.append(True, ~same_A)) - 1  # of one token at one place
        begins_D = np.flatnonzero(np.append(True, ~same_A))
        n_D = np.bincount(drawn_A)
        # two draws of one token; the least logprob is the first
        again_A = np.append(False, same_A)
        least_A = logp_A[begins_D][drawn_A]
        again_A &= least_A <= _UNSURE_NATS
        far_A = again_A & (logp_A - least_A > _FAR_NATS)
        apart_A = again_A & (logp_A - least_A > _APART_NATS)
        # probabilities of different tokens of one place
        p_A = np.exp(np.minimum(logp_A, 0.0))
        sum_L = np.bincount(like_A[begins_D], p_A[begins_D])
        kinds_L, n_L = np.bincount(like_A[begins_D]), np.bincount(like_A)
        above_L = (kinds_L > 1) & (sum_L > _ABOVE)
        found = again_A, apart_A, kinds_L > 1, above_L
        self.counts[min(depth, 1)] += [int(of.sum()) for of in found]
        if depth < _BEGINNING:
            self.pairs += int(again_A.sum())
            self.far += int(far_A.sum())
            _first(self.first, rollouts, row_A[far_A])
        _first(self.first_above[min(depth, 1)], rollouts, row_A[above_L[like_A]])
        # how often two draws agree, and how often they should
        pairs_L = np.bincount(like_A[begins_D], n_D * (n_D - 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            beyond_L = np.where(n_L > 1, pairs_L / (n_L - 1) - np.bincount(like_A, p_A), 0.0)
        prompt_L = np.zeros(len(n_L), np.int64)
        prompt_L[like_A] = prompt_A[order]
        np.add.at(beyond_P, prompt_L[n_L > 1], beyond_L[n_L > 1])
        met_P[prompt_L[n_L > 1]] = True
        after_A = np.empty(len(like_A), np.int64)
        after_A[order] = drawn_A
        return after_A

    def _prompts(
        self, rollouts: Rollouts, own_S: Array, prompts: dict[int, Array], of_S: list[int]
    ) -> None:
        """Count the groups whose responses have different prompts."""
        by_group: dict[str, dict[int, Array]] = {}
        for s, name in zip(own_S.tolist(), of_S, strict=True):
            by_group.setdefault(rollouts.group_S[s], {})[name] = prompts[s]
        groups_of = Counter(prompt for own in by_group.values() for prompt in own)
        self.shared += sum(n > 1 for n in groups_of.values())
        for group, own in by_group.items():
            self.groups += 1
            shortest = min(own.values(), key=len)  # a mask may begin later in some responses
            if not all(np.array_equal(of[: len(shortest)], shortest) for of in own.values()):
                self.mixed += 1
                place = rollouts.source_S[rollouts.group_S.index(group)]
                self.first_mixed.place = self.first_mixed.place or place

    def finding(self) -> Finding:
        pairs, apart, places, above = self.counts.T
        one_law = (pairs >= _ALIKE) & (apart <= _APART * pairs)
        last = 1 if one_law.all() else 0  # later places are those of one law, too
        places, above = int(places[: last + 1].sum()), int(above[: last + 1].sum())
        prompts, beyond, square = self.agreed.total(np.zeros((2, 3)))[last].tolist()
        z, often = by_squares(beyond, square, prompts)
        numbers = {"pairs": self.pairs, "far": self.far, "mixed": self.mixed}
        numbers |= {"places": places, "above": above, "agreement_t": often}
        if self.pairs >= _PAIRS and self.far > _FAR * self.pairs:
            text = (
                "responses of a step that have the same prompt and begin alike have other logprobs "
                f"there, by more than {_FAR_NATS:g} nat in {self.far:,} of {self.pairs:,} "
                "tokens: the sampler's logprobs are of other tokens, or the prompts are not those "
                "that it had"
            )
            return Finding("siblings", "unsound", text, numbers, self.first.place)
        if one_law[0] and above >= _PLACES and share(above, places) > 0.01:
            text = (
                f"at {above:,} of {places:,} places that responses to one prompt share, "
                "the sampler's probabilities of different tokens sum to more than 1: its logprobs "
                "are of no law"
            )
            first = next((p.place for p in [*self.first_above.values()][: last + 1] if p.place), "")
            return Finding("siblings", "unsound", text, numbers, first)
        if one_law[0] and prompts >= _PROMPTS and abs(often) > _NOTED:
            how = "more often" if z > 0 else "less often"
            text = (
                f"responses to one prompt that begin alike have the same next token {how} than "
                f"the sampler's probabilities say (t = {often:+.1f}, {prompts:,.0f} "
                "prompts): the tokens were drawn at another temperature, or with a filter, and not "
                "from the law that was recorded"
            )
            if z < 0:  # groups whose answers are all alike may have been left out for their rewards
                text += ", or prompt groups were selected by their outcome"
            state = "unsound" if z > _SIGMAS else "warning"
            return Finding("siblings", state, text, numbers)
        if min(self.mixed, self.shared) >= LEAST and share(self.mixed, self.groups) > 0.01:
            text = (
                f"{self.mixed:,} of {count(self.groups, 'prompt group')} have responses to "
                f"different prompts, and {self.shared:,} prompts are in several groups: do the "
                "groups belong to these rows?"
            )
            return Finding("siblings", "warning", text, numbers, self.first_mixed.place)
        return Finding("siblings", "ok", "", numbers)
