# Whether the trained tokens are those that the sampler drew: the law of a drawn token, the tokens
# that the mask leaves out, and the responses that are missing from a group.

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from servanda.report.format import count
from servanda.rl.dumps.checks.base import LEAST, Finding, FirstPlace, Sums, check, digest, share
from servanda.traces.rollouts import Array, Rollouts

# Forced: a token that stands at one place of all turns was drawn there each time, or never.
#
# The sampler's own probabilities say how likely so many draws of one id are.

_NATS = math.log(1e-6) - math.log(1e6)  # so unlikely, for each of a million ids
_ALWAYS = 0.9  # share of the turns that have the id
_TURNS = 10


class _Place(Sums):
    """Ids at one place of a turn, and the sum of the sampler's logprobs of each."""

    def __init__(self) -> None:
        self.turns = 0
        self.ids: Counter[int] = Counter()
        self.nats: dict[int, float] = {}

    def add(self, token_T: Array, infer_T: Array) -> None:
        known_T = np.isfinite(infer_T) & (infer_T < 0)
        token_T, infer_T = token_T[known_T], infer_T[known_T]
        self.turns += len(token_T)
        id_I, at_T, n_I = np.unique(token_T, return_inverse=True, return_counts=True)
        nats_I = np.bincount(at_T, infer_T, minlength=len(id_I))
        self.ids.update(dict(zip(id_I.tolist(), n_I.tolist(), strict=True)))
        for token, nats in zip(id_I.tolist(), nats_I.tolist(), strict=True):
            self.nats[token] = self.nats.get(token, 0.0) + nats

    def join(self, later: _Place) -> None:
        self.turns += later.turns
        self.ids.update(later.ids)
        for token, nats in later.nats.items():
            self.nats[token] = self.nats.get(token, 0.0) + nats

    @property
    def forced(self) -> int | None:
        """An id that cannot have been drawn so often; None if there is none."""
        for token, n in self.ids.most_common(1):
            if n < max(_TURNS, _ALWAYS * self.turns):
                break
            ways = math.lgamma(self.turns + 1) - math.lgamma(n + 1)
            ways -= math.lgamma(self.turns - n + 1)
            if ways + self.nats[token] < _NATS:
                return token
        return None


@check("forced", needs="texts", asks="whether a token that was not drawn is trained")
class Forced(Sums):
    """The ids of the first trained token of answers, and of later turns."""

    def __init__(self) -> None:
        self.places = {"answers": _Place(), "later turns": _Place()}
        self.first = {name: FirstPlace() for name in self.places}

    def add(self, rollouts: Rollouts) -> None:
        turns, infer_K = rollouts.turns, rollouts.infer_K
        token_K = rollouts.token_N[rollouts.trained_K]
        for name, own_T in zip(self.places, (turns.number_T < 2, turns.number_T >= 2), strict=True):
            at_T = turns.trained_T[own_T]
            self.places[name].add(token_K[at_T], infer_K[at_T])
            if len(at_T):
                self.first[name].add_token(rollouts, int(at_T[0]))

    def finding(self) -> Finding:
        for name, place in self.places.items():
            if (token := place.forced) is None:
                continue
            n, usual = place.ids[token], math.exp(place.nats[token] / place.ids[token])
            text = (
                f"the first trained token of {name} is id {token} {n:,} of {place.turns:,} times, "
                f"and the sampler gives it a probability of about {usual:.2g}: it was not drawn "
                "(a header or a prefix of the template, or a loss mask that begins too early)"
            )
            numbers = {"turns": float(place.turns), "forced": float(n)}
            return Finding("forced", "unsound", text, numbers, self.first[name].place)
        return Finding("forced", "ok", "")


# Left out: tokens inside a response that both sides scored, and that are not trained.
#
# A filter that masks tokens on which the sides differ leaves data that looks better than they are.

_LEFT = 50  # fewest tokens
_APART = 0.9  # share of them that differ by more than every trained token of their chunk
_TIMES = 3.0  # ratio of the means


@check("left_out")
class LeftOut(Sums):
    """Sums of |log ratio| of trained tokens, and of others within a response."""

    def __init__(self) -> None:
        self.trained = self.left = self.beyond = 0
        self.trained_nats = self.left_nats = 0.0
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        mask_N = rollouts.mask_N.astype(bool)
        ratio_K = np.abs(rollouts.ratio_K)
        ratio_K = ratio_K[np.isfinite(ratio_K)]
        self.trained += len(ratio_K)
        self.trained_nats += float(ratio_K.sum())
        # between the first trained token and the last
        inside_N = _between(rollouts, mask_N) & ~mask_N
        if not inside_N.any() or not len(ratio_K):
            return
        at_N = np.flatnonzero(inside_N)
        train_N, infer_N = rollouts.logp_train_N[at_N], rollouts.logp_infer_N[at_N]
        scored = np.isfinite(train_N) & np.isfinite(infer_N) & (train_N != 0) & (infer_N != 0)
        apart_N = np.abs(train_N - infer_N)[scored]
        self.left += len(apart_N)
        self.left_nats += float(apart_N.sum())
        self.beyond += int((apart_N > ratio_K.max()).sum())
        if scored.any():
            sequence = int(rollouts.sequence_of(at_N[scored][:1])[0])
            self.first.place = self.first.place or rollouts.source_S[sequence]

    def finding(self) -> Finding:
        numbers = {"left_out": self.left, "beyond": self.beyond}
        if self.left < _LEFT or not self.trained_nats:
            return Finding("left_out", "ok", "", numbers)
        times = (self.left_nats / self.left) / (self.trained_nats / self.trained)
        text = (
            f"{count(self.left, 'token')} inside the responses have both logprobs and are not "
            f"trained; their mean |log ratio| is {times:.2g} times that of the trained ones"
        )
        if self.beyond > _APART * self.left:
            text += (
                ", and nearly each is further apart than all of those: a filter by the mismatch "
                "was applied to the mask, so the rest shows nothing (write the mask before it)"
            )
            return Finding("left_out", "unsound", text, numbers, self.first.place)
        state = "warning" if times > _TIMES else "ok"
        return Finding("left_out", state, text if state != "ok" else "", numbers, self.first.place)


def _between(rollouts: Rollouts, mask_N: Array) -> Array:
    """Whether a token is behind the first trained token of its sequence, and before the last."""
    before_N = np.cumsum(mask_N)
    start_S, some_S = rollouts.start_S, rollouts.length_S > 0
    base_S = np.zeros(len(rollouts), np.int64)
    base_S[some_S] = before_N[start_S[some_S]] - mask_N[start_S[some_S]]
    before_N = before_N - base_S[rollouts.sequence_N]
    return (before_N > 0) & (before_N < rollouts.trained_S[rollouts.sequence_N])


# Siblings: responses to one prompt that begin alike have one law there, so one logprob.

_BEGINNING = 4  # tokens
_UNSURE_NATS = -0.2
_FAR_NATS = 1.0  # kernels, their batches, and an update differ by less
_PAIRS = 30


@check("siblings", needs="texts", asks="whether responses that begin alike have one logprob there")
class Siblings(Sums):
    """Counts beginnings that two responses of a step share, and those with other logprobs."""

    def __init__(self) -> None:
        self.pairs = self.far = 0
        self.groups = self.mixed = self.shared = 0  # prompt groups; prompts of several of them
        self.first, self.first_mixed = FirstPlace(), FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        infer_N, token_N = rollouts.logp_infer_N, np.ascontiguousarray(rollouts.token_N)
        known: dict[tuple[int, ...], float] = {}  # prompt and beginning -> the first logprob
        prompts: dict[str, dict[int, Array]] = {}  # group -> its prompts, by their digests
        trained_S = np.cumsum(rollouts.trained_S) - rollouts.trained_S
        for s in np.flatnonzero(rollouts.trained_S):
            start, first = int(rollouts.start_S[s]), int(rollouts.trained_K[trained_S[s]])
            if first == start:  # without a prompt, nothing says that two laws are one
                continue
            prompt = digest(token_N[start:first])
            prompts.setdefault(rollouts.group_S[s], {})[prompt] = token_N[start:first]
            end = min(first + _BEGINNING, start + int(rollouts.length_S[s]))
            for at in range(first, end):
                logp = float(infer_N[at])
                if not (rollouts.mask_N[at] and math.isfinite(logp)):
                    break
                like = known.setdefault((prompt, *token_N[first : at + 1].tolist()), logp)
                if min(like, logp) > _UNSURE_NATS or like is logp:
                    continue
                self.pairs += 1
                if abs(like - logp) > _FAR_NATS:
                    self.far += 1
                    self.first.place = self.first.place or rollouts.source_S[s]
        groups_of = Counter(prompt for own in prompts.values() for prompt in own)
        self.shared += sum(n > 1 for n in groups_of.values())
        for group, own in prompts.items():
            self.groups += 1
            shortest = min(own.values(), key=len)  # a mask may begin later in some responses
            if not all(np.array_equal(of[: len(shortest)], shortest) for of in own.values()):
                self.mixed += 1
                place = rollouts.source_S[rollouts.group_S.index(group)]
                self.first_mixed.place = self.first_mixed.place or place

    def finding(self) -> Finding:
        numbers = {"pairs": self.pairs, "far": self.far, "mixed": self.mixed}
        if self.pairs >= _PAIRS and self.far > self.pairs / 2:
            text = (
                f"responses of a step that have the same prompt and begin alike have other "
                f"logprobs there, by more than {_FAR_NATS:g} nat in {self.far:,} of {self.pairs:,} "
                "tokens: the sampler's logprobs are of other tokens, or the prompts are not those "
                "that it had"
            )
            return Finding("siblings", "unsound", text, numbers, self.first.place)
        if min(self.mixed, self.shared) >= LEAST and share(self.mixed, self.groups) > 0.01:
            text = (
                f"{self.mixed:,} of {count(self.groups, 'prompt group')} have responses to "
                f"different prompts, and {self.shared:,} prompts are in several groups: do the "
                "groups belong to these rows?"
            )
            return Finding("siblings", "warning", text, numbers, self.first_mixed.place)
        return Finding("siblings", "ok", "", numbers)


# Group sizes: responses that are missing from a group were left out.

_USUAL, _FEWEST = 0.05, 3  # share of the groups that have the whole size, and their number


@check("groups", needs="texts")
class GroupSizes(Sums):
    """The sizes of prompt groups, of each step, in all and by the values of each label."""

    def __init__(self) -> None:
        self.sizes: dict[str, Counter[tuple[str, int]]] = {"": Counter()}  # label -> (value, size)
        self._step: int | None = None
        self._open: dict[str, tuple[int, dict[str, str]]] = {}

    def add(self, rollouts: Rollouts) -> None:
        if rollouts.step != self._step:
            self._close()
            self._step = rollouts.step
        for s, group in enumerate(rollouts.group_S):
            n, labels = self._open.get(group) or (0, {k: v[s] for k, v in rollouts.labels.items()})
            self._open[group] = n + 1, labels

    def _close(self) -> None:
        for n, labels in self._open.values():
            for name, value in {"": "", **labels}.items():
                self.sizes.setdefault(name, Counter())[value, n] += 1
        self._step, self._open = None, {}

    def join(self, later: GroupSizes) -> None:
        self._close()
        later._close()
        for name, sizes in later.sizes.items():
            self.sizes.setdefault(name, Counter()).update(sizes)

    def finding(self) -> Finding:
        self._close()
        groups = self.sizes[""].total()
        found = [_incomplete(sizes) for sizes in self.sizes.values() if sizes.total() == groups]
        fewer, usual = min(found, default=(0, 0))
        if fewer < LEAST:
            return Finding("groups", "ok", "")
        text = (
            f"{fewer:,} of {count(groups, 'prompt group')} have fewer responses than the {usual} "
            "of others: if some were left out by their reward, their length or their mismatch, "
            "the dump is a selection"
        )
        return Finding("groups", "warning", text, {"groups": groups, "incomplete": fewer})


def _incomplete(sizes: Counter[tuple[str, int]]) -> tuple[int, int]:
    """How many groups are smaller than the largest of their value of a label, and that size.

    A size that a few groups have is no rule.
    """
    of_value: dict[str, Counter[int]] = {}
    for (value, size), n in sizes.items():
        of_value.setdefault(value, Counter())[size] += n
    fewer, largest = 0, 0
    for own in of_value.values():
        size = max(own)
        if size > 1 and own[size] >= max(_FEWEST, _USUAL * own.total()):
            fewer += own.total() - own[size]
            largest = max(largest, size)
    return fewer, largest
