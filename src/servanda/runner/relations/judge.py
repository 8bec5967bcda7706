# A relation's answer: equal, within the kernel's own noise, violated, or not testable.
#
# A kernel whose replays are equal bit for bit is compared bit by bit, or with the stated limit.
# Without one, a difference that rounding can make is undecided: the precision is not known.
# One whose replays differ is tested: each request runs several times in both ways, and the
# exchangeability of the two is rejected at the relation's share of alpha.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

from servanda.runner.relations.observation import Difference, Observation, difference, features
from servanda.runner.relations.relation import BLOCKS, Relation
from servanda.runner.relations.subject import Request, Subject
from servanda.theory.sampling import uniforms
from servanda.theory.stats.bets import Floats

# Exchangeability: whether two ways to run the same requests give the same numbers up to noise.
#
# An exact test: under the hypothesis the runs of a request are exchangeable, so the statistic of
# the true labels is as likely to be the largest as that of any other labelling.
# Axes: K requests, R runs of a request, the first half of one way, F numbers of a run.


LABELLINGS = 1999  # random ones; the smallest p-value is 1 / (LABELLINGS + 1)
_TIE = 1e-9


def exchangeability(runs_K: Sequence[Floats], seed: int = 0, rounds: int = LABELLINGS) -> float:
    """The p-value of "the first half of the runs is distributed as the second half".

    The statistic adds up, over requests and numbers, the distance of the two means in units of
    the number's own spread.  Randomisation is part of the p-value, which is valid for any number
    of labellings: Phipson and Smyth, Permutation p-values should never be zero, 2010.

    Args:
        runs_K: of each request its runs, [R, F]; R is even, and F may differ between requests.

    Returns:
        In (0, 1]; 1 where no number varies.

    Raises:
        ValueError: an odd number of runs.

    >>> exchangeability([np.zeros((4, 3))])
    1.0
    """
    statistic = np.zeros(rounds + 1)
    for k, runs_RF in enumerate(runs_K):
        n = len(runs_RF)
        if n % 2:
            raise ValueError(f"{n} runs are no two halves")
        center_RF = runs_RF - np.median(runs_RF, axis=0)
        spread_F = np.abs(center_RF).mean(axis=0)
        unit_RF = center_RF[:, spread_F > 0] / spread_F[spread_F > 0]
        keys_LR = uniforms(seed, "permutation", k, rounds * n).reshape(rounds, n)
        order_LR = np.concatenate([np.arange(n)[None], keys_LR.argsort(axis=1)])
        sign_LR = np.where(order_LR < n // 2, 2.0 / n, -2.0 / n)
        statistic += np.abs(sign_LR @ unit_RF).sum(axis=1)
    least = statistic[0] - _TIE * (1 + abs(statistic[0]))
    return float((statistic >= least).mean())


# The smallest counterexample: fewer requests beside it, fewer tokens of each.


BUDGET = 80  # cases that are run for it


def shrink(relation: Relation, request: Request, fails: Callable[[Request], bool]) -> Request:
    """A request that fails as the given one does, and is not larger.

    Greedy: every cut that still fails is kept, the largest cuts first.

    Args:
        fails: whether the relation is violated by a request.
    """
    left, best = BUDGET, request

    def attempt(smaller: Request) -> bool:
        nonlocal left, best
        if left <= 0:
            return False
        left -= 1
        if fails(smaller):
            best = smaller
            return True
        return False

    def fewer(keep: int) -> bool:
        dropped = len(best.others) - keep
        return any(
            attempt(replace(best, others=best.others[:at] + best.others[at + dropped :]))
            for at in range(0, keep + 1, dropped)
        )

    def shortened(n: int) -> Callable[[int], bool]:
        def cut(keep: int) -> bool:
            others = (*best.others[:n], best.others[n][:keep], *best.others[n + 1 :])
            return attempt(replace(best, others=others))

        return cut

    _cut(best.width, lambda keep: attempt(replace(best, width=keep)))
    _cut(len(best.others), fewer, least=0)
    _cut(len(best.prompt), lambda keep: attempt(replace(best, prompt=best.prompt[:keep])))
    _cut(
        len(best.prompt),
        lambda keep: attempt(relation.cut_front(best, len(best.prompt) - keep)),
    )
    for n in range(len(best.others)):
        _cut(len(best.others[n]), shortened(n))
    return best


def _cut(length: int, attempt: Callable[[int], bool], least: int = 1) -> None:
    """Try to keep less and less of something; an accepted attempt is kept."""
    step = (length + 1) // 2
    while step:
        while length - step >= least and attempt(length - step):
            length -= step
        step //= 2


Outcome = Literal["holds", "violated", "inconclusive", "untestable"]
ROUNDING_NATS = 0.3  # rounding in 16 bits moves few logprobs by more
RUNS = 4  # of each request in each way at least, where replays differ
_ROOM = 40  # labellings over 1 / alpha, so that a p-value can be far below it
NOISY_REQUESTS = 6


@dataclass(frozen=True)
class Finding:
    """The answer of one relation.

    Args:
        answer: a sentence.
        requests: cases; positions: of tokens that were compared.
        largest_nats: the largest |difference| of a logprob; None where nothing was compared.
        p_value, alpha: of the test, where replays differ.
        example: the smallest violation that was found; position: of its new token.
    """

    relation: str
    outcome: Outcome
    answer: str
    requests: int = 0
    positions: int = 0
    largest_nats: float | None = None
    p_value: float | None = None
    alpha: float | None = None
    example: Request | None = None
    position: int | None = None


@dataclass(frozen=True)
class Pair:
    """A request and its two answers."""

    request: Request
    plain: Observation
    other: Observation

    @property
    def difference(self) -> Difference:
        return difference(self.plain, self.other)


def unwatched(done: int, of: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class Judge:
    """How relations are judged.

    Args:
        limit: nats; 0 compares bits and draws.
        assumed: whether no limit was stated, so that rounding is no violation.
        noisy: whether replays of one request differ; draws: whether they draw the same tokens.
        alpha: the error probability of one relation's test.
        watch: is called with (cases done, all cases).
    """

    subject: Subject
    limit: float
    alpha: float
    assumed: bool = False
    noisy: bool = False
    draws: bool = True
    watch: Callable[[int, int], None] = unwatched

    def pair(self, relation: Relation, request: Request) -> Pair:
        plain = relation.plain(self.subject, request)
        pair = Pair(request, plain, relation.other(self.subject, request, plain))
        for _ in range(relation.tries - 1):
            if pair.difference.exceeds(self.limit, self.draws):
                break
            pair = Pair(request, plain, relation.other(self.subject, request, plain))
        return pair

    def measured(self, relation: Relation, requests: Sequence[Request]) -> list[Pair]:
        pairs = []
        for n, request in enumerate(requests):
            self.watch(n, len(requests))
            pairs.append(self.pair(relation, request))
        self.watch(len(requests), len(requests))
        return pairs

    def judge(self, relation: Relation, requests: Sequence[Request]) -> Finding:
        """The relation on the given requests."""
        why = relation.refusal(self.subject)
        if why:
            return Finding(relation.name, "untestable", why)
        if self.noisy:
            return self._tested(relation, requests[:: max(1, len(requests) // NOISY_REQUESTS)])
        return self.compared(relation, self.measured(relation, requests))

    def compared(self, relation: Relation, pairs: Sequence[Pair], small: bool = True) -> Finding:
        """By bits, or by the limit.

        Args:
            small: whether a counterexample is made smaller, which runs the relation again.
        """
        seen = [pair.difference for pair in pairs]
        known = Finding(
            relation.name,
            "holds",
            "",
            requests=len(pairs),
            positions=sum(d.positions for d in seen),
            largest_nats=max((d.largest for d in seen), default=None),
        )
        if not known.positions:
            why = "no logprob of the two answers belongs to the same token"
            return replace(known, outcome="inconclusive", answer=why, largest_nats=None)
        bad = [p for p, d in zip(pairs, seen, strict=True) if d.exceeds(self.limit, self.draws)]
        if bad:
            return self._violated(relation, known, pairs, bad, small)
        state, why = relation.unseen([pair.other for pair in pairs])
        if state:
            return replace(known, outcome=state, answer=why)
        if unknown := sum(d.unknown for d in seen):
            why = f"{unknown} tokens have no usable logprob to compare"
            return replace(known, outcome="inconclusive", answer=why)
        answer = f"equal bit for bit: {known.requests} requests, {known.positions} tokens"
        if known.largest_nats:
            answer = f"within {self.limit:g} nats: {sum(d.unequal for d in seen)} of "
            answer += f"{known.positions} tokens differ, by at most {known.largest_nats:.3g} nats"
        return replace(known, answer=answer + relation.caveat(self.subject))

    def _violated(
        self,
        relation: Relation,
        known: Finding,
        pairs: Sequence[Pair],
        bad: Sequence[Pair],
        small: bool,
    ) -> Finding:
        first = min(bad, key=lambda pair: pair.request.tokens)
        if small:
            example = shrink(relation, first.request, lambda one: self._fails(relation, one))
            again = self.pair(relation, example)
            first = again if again.difference.exceeds(self.limit, self.draws) else first
        largest = max((p.difference for p in (*bad, first)), key=lambda d: d.largest)
        rounding = self.assumed and relation.reshapes and largest.at is not None
        rounding &= largest.largest <= ROUNDING_NATS
        size = f"|Δlogp| up to {largest.largest:.3g} nats"
        if largest.at is None:
            size = "other tokens are drawn from equal logprobs"
        size = f"not equal bit for bit: {size}" if rounding else size
        where = relation.place(first.request, first.other)
        pattern = _pattern(relation, pairs, bad)
        return replace(
            known,
            outcome="inconclusive" if rounding else "violated",
            largest_nats=largest.largest,
            answer=f"{size} in {len(bad)} of {len(pairs)} requests{pattern}; the smallest: "
            f"{_of(first.difference)} {where}",
            example=first.request,
            position=first.difference.position,
        )

    def _fails(self, relation: Relation, request: Request) -> bool:
        return self.pair(relation, request).difference.exceeds(self.limit, self.draws)

    def _runs(self, requests: int) -> int:
        """Of each request in each way: enough that the test can reject."""
        runs = RUNS
        while math.comb(2 * runs, runs) ** requests * self.alpha < _ROOM:
            runs += 1
        return runs

    def _tested(self, relation: Relation, requests: Sequence[Request]) -> Finding:
        """By runs in random order: is one way distributed as the other?"""
        runs_K, cases, runs = [], [], self._runs(len(requests))
        for k, request in enumerate(requests):
            self.watch(k, len(requests))
            first = relation.plain(self.subject, request)
            plain: list[Observation] = []
            other: list[Observation] = []
            order = uniforms(request.seed, "order", k, 2 * runs).argsort()
            for n in order.tolist():
                if n < runs:
                    plain.append(relation.plain(self.subject, request))
                else:
                    other.append(relation.other(self.subject, request, first))
            runs_K.append(features([*plain, *other]))
            cases.append((request, plain, other))
        self.watch(len(requests), len(requests))
        p = exchangeability([runs_RF for runs_RF in runs_K if runs_RF.shape[1]])
        seen = [difference(a, b) for _, plain, other in cases for a, b in product(plain, other)]
        known = Finding(
            relation.name,
            "inconclusive",
            "",
            requests=len(cases),
            positions=sum(runs_RF.shape[1] for runs_RF in runs_K),
            largest_nats=max((d.largest for d in seen), default=None),
            p_value=p,
            alpha=self.alpha,
        )
        test = f"p = {p:.2g}, α = {self.alpha:.2g}, {2 * runs} runs of each request"
        state, why = relation.unseen([one for _, _, other in cases for one in other])
        if not known.positions:
            return replace(known, answer="the answers have no logprob in common", p_value=None)
        apart = [
            (request, least)
            for request, plain, other in cases
            # the smallest over all pairs of runs of their largest difference
            if (least := min(difference(a, b).largest for a, b in product(plain, other)))
            > self.limit
        ]
        if p <= self.alpha and (self.limit == 0 or apart):
            worst = max(apart, key=lambda one: one[1])[0] if apart else cases[0][0]
            return replace(
                known,
                outcome="violated",
                answer=f"differs by more than replays do ({test}); |Δlogp| up to "
                f"{known.largest_nats:.3g} nats",
                example=worst,
            )
        if state:
            return replace(known, outcome=state, answer=why)
        if self.limit and (known.largest_nats or 0.0) <= self.limit:
            answer = f"within {self.limit:g} nats in every run: at most {known.largest_nats:.3g}"
            return replace(known, outcome="holds", answer=f"{answer} ({test})")
        answer = f"within the kernel's own noise, not equal ({test})"
        return replace(known, answer=answer)


def _of(found: Difference) -> str:
    if found.at is None:
        return f"another draw of new token {found.position}"
    return f"{found.largest:.3g} nats at new token {found.at}"


def _pattern(relation: Relation, pairs: Sequence[Pair], bad: Sequence[Pair]) -> str:
    """Where a residue of a block size tells the violations from the other cases."""
    sizes = {id(pair): relation.size(pair.request, pair.other) for pair in pairs}
    wrong = {n for pair in bad if (n := sizes[id(pair)]) is not None}
    right = {n for n in sizes.values() if n is not None} - wrong
    if len(wrong) < 2 or not right:
        return ""
    for block in reversed(BLOCKS):
        rests = {n % block for n in wrong}
        if len(rests) == 1 and not rests & {n % block for n in right if n > min(wrong)}:
            return f" (those of {rests.pop()} modulo {block} tokens, from {min(wrong)} on)"
    if min(wrong) > max(right):
        return f" (those of {min(wrong)} tokens or more)"
    return ""
