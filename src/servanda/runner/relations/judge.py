# A relation's answer: equal, moved as far as rounding moves, violated, or not testable.
#
# A kernel is compared with itself, so a difference is either rounding in another order or a fault.
# Its size is the logit noise that would move the same distributions as far (`observation`).  The
# limit is twice the rounding of the kernel: what its other relations show, and not less than its
# number format does on any model, nor more than it does on the worst.
#
# Bits are compared where they are asked for.  A seeded draw that differs at equal logprobs is a
# violation whatever the limit.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from servanda.runner.relations.observation import logit_noise
from servanda.runner.relations.relation import BLOCKS, Pair, Relation
from servanda.runner.relations.subject import Request, Subject

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


# Limits.


Rounding = Literal["float32", "16-bit", "8-bit", "4-bit"]
# of a kernel compared with itself, logit noise in nats: the least that counts, whichever the model,
# and the most that is allowed.  Seen on healthy kernels (benchmarks/relations.py) was at most 8e-6
# in float32, 0.06 in 16 bits and 0.2 in 8 bits; 4 bits were not measured.
LEAST = {"float32": 2e-5, "16-bit": 0.01, "8-bit": 0.02, "4-bit": 0.03}
MOST = {"float32": 1e-3, "16-bit": 0.15, "8-bit": 0.3, "4-bit": 0.4}
TIMES = 2.0  # the limit, in units of the rounding
_TOKENS = 16  # the noise of fewer is known to a fifth or worse
# These two compare one row of a step with several, for which kernels of 16 bits round otherwise:
# vLLM 0.32 on a CPU by 0.04 nats of the real model in bfloat16, and by 0.005 or less elsewhere.
_ROWS = frozenset({"prefill-decode", "batching"})
_DENSE = 0.3  # float32 rounds nearly every logprob; a model in 16 bits may seldom show it
# times the limit: one answer that rounding cannot explain.  Of 200 answers of each of 20 healthy
# servers one was beyond it, of an engine whose fp8 scale is of all rows of a step.
ODD = 8.0
_SILENT = 0.01  # share without a logprob in both answers; llama-server leaves out up to 0.7 %


@dataclass(frozen=True)
class Limit:
    """The logit noise that a relation may show.

    Args:
        nats: up to it the relation holds; red_nats: from there on it is violated, and between the
            two it is undecided; why: where they are from.
    """

    nats: float
    red_nats: float
    why: str


@dataclass(frozen=True)
class Measured:
    """What a relation shows: the logit noise, and the share and number of positions that differ."""

    noise: float
    unequal: float
    positions: int

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Measured:
        seen = [pair.difference for pair in pairs]
        positions = max(1, sum(d.positions for d in seen))
        return cls(logit_noise(seen), sum(d.unequal for d in seen) / positions, positions)


def limit_of(
    name: str,
    found: Mapping[str, Measured],
    rounding: Rounding | None,
    stated: float | None = None,
) -> Limit:
    """The limit of one relation.

    Args:
        found: of all relations that were measured.
        rounding: of the kernel's number format; None where it is not known.
        stated: nats, by the user.
    """
    if stated is not None:
        return Limit(stated, stated, "as stated")
    others = {key: one for key, one in found.items() if key != name and one.noise}
    sure = {key: one for key, one in others.items() if one.positions >= _TOKENS} or others
    shown = sorted(one.noise for one in sure.values())
    own = shown[(len(shown) - 1) // 2] if shown else 0.0
    near = {"replay", *(_ROWS if name in _ROWS else ())}
    own = max([own, *(one.noise for key, one in others.items() if key in near)])
    if rounding is None and own:
        dense = sum(one.unequal for one in others.values()) / len(others) >= _DENSE
        rounding = "float32" if dense and own < MOST["float32"] else "16-bit"
    if rounding is None:
        low, high = TIMES * LEAST["float32"], TIMES * LEAST["16-bit"]
        return Limit(low, high, "no other relation shows this kernel's rounding")
    least, most = LEAST[rounding], MOST[rounding]
    if not own:
        # a single shape that rounds otherwise: nothing of this kernel to compare it with
        return Limit(most, most, f"the most that {rounding} rounding shows; no other relation does")
    limit = min(most, TIMES * max(own, least))
    why = "twice what the other relations show"
    if own <= least:
        why = f"twice the least of {rounding} rounding"
    elif limit == most:
        why = f"the most of {rounding} rounding"
    return Limit(limit, limit, why)


# Findings.


Outcome = Literal["holds", "violated", "inconclusive", "untestable"]
_MANY_FLIPS = 1e-4  # probability of so many


@dataclass(frozen=True)
class Finding:
    """The answer of one relation.

    Args:
        answer: a sentence.
        answers: that were compared; positions: tokens that were, of so many tokens.
        moved: mean total variation distance of the two distributions of a token, at least.
        noise_nats: the logit noise that moves them as far; limit_nats: that may be.
        largest_nats: the largest |difference| of a logprob; None where nothing was compared.
        alpha: of a test that tokens follow their logprobs.
        example: the smallest violation that was found; position: of its new token.
    """

    relation: str
    outcome: Outcome
    answer: str
    answers: int = 0
    positions: int = 0
    of: int = 0
    moved: float | None = None
    noise_nats: float | None = None
    limit_nats: float | None = None
    largest_nats: float | None = None
    alpha: float | None = None
    example: Request | None = None
    position: int | None = None


def unwatched(done: int, of: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class Judge:
    """How relations are judged.

    Args:
        bitwise: whether every bit has to be equal.
        alpha: the error probability of a test of draws.
        draws: whether replays draw the same tokens.
        watch: is called with (cases done, all cases).
    """

    subject: Subject
    alpha: float
    bitwise: bool = False
    draws: bool = True
    watch: Callable[[int, int], None] = unwatched

    def measured(self, relation: Relation, requests: Sequence[Request]) -> list[Pair]:
        pairs: list[Pair] = []
        for n, request in enumerate(requests):
            self.watch(n, len(requests))
            pairs += relation.pairs(self.subject, request)
        self.watch(len(requests), len(requests))
        return pairs

    def judged(
        self,
        relation: Relation,
        pairs: Sequence[Pair],
        limit: Limit,
        more: Callable[[], list[Pair]] | None = None,
        small: bool = True,
    ) -> Finding:
        """The answer of a relation.

        Args:
            more: pairs of requests that were not sent before: a mean beyond the limit has to be
                beyond it there as well.
            small: whether a counterexample is made smaller, which runs the relation again.
        """
        known = self._known(relation, pairs, limit)
        if not known.positions:
            why = "no logprob of the two answers belongs to the same token"
            return replace(known, answer=why, noise_nats=None, largest_nats=None)
        bad = [pair for pair in pairs if self._broken(pair, limit.red_nats)]
        if bad:
            return self._violated(relation, known, pairs, bad, limit, small)
        noise = second = known.noise_nats or 0.0
        if noise > limit.nats and more is not None:
            fresh = more()
            second, pairs = Measured.of(fresh).noise, [*pairs, *fresh]
            known = self._known(relation, pairs, limit)
        if min(noise, second) > limit.red_nats:
            bad = [pair for pair in pairs if pair.difference.noise > limit.red_nats]
            return self._violated(relation, known, pairs, bad or pairs, limit, small)
        if (known.noise_nats or 0.0) > limit.nats:
            why = f"{_size(known)}; {limit.why}: name its number format by --rounding"
            return replace(known, answer=why)
        return self._held(relation, known, pairs, limit)

    def _known(self, relation: Relation, pairs: Sequence[Pair], limit: Limit) -> Finding:
        seen = [pair.difference for pair in pairs]
        positions = sum(d.positions for d in seen)
        return Finding(
            relation.name,
            "inconclusive",
            "",
            answers=len(pairs),
            positions=positions,
            of=sum(d.of for d in seen),
            moved=sum(d.moved for d in seen) / max(1, positions),
            noise_nats=logit_noise(seen),
            limit_nats=limit.nats,
            largest_nats=max((d.largest for d in seen), default=None),
        )

    def _broken(self, pair: Pair, limit: float) -> bool:
        """Whether a single pair violates the relation, however many others do not."""
        d = pair.difference
        if pair.seeded and self.draws and d.other_token is not None:
            return True
        return bool(d.unequal) if self.bitwise else d.noise > ODD * limit

    def _held(
        self, relation: Relation, known: Finding, pairs: Sequence[Pair], limit: Limit
    ) -> Finding:
        """The answer where nothing is beyond a limit: whether enough was looked at."""
        seen = [pair.difference for pair in pairs]
        state, why = relation.unseen(pairs)
        if state:
            return replace(known, outcome=state, answer=why)
        if unknown := sum(d.unknown for d in seen):
            return replace(known, answer=f"{unknown} tokens have a logprob in one answer alone")
        silent = sum(d.silent for d in seen)
        if silent > _SILENT * known.of:
            return replace(known, answer=f"{silent} of {known.of:,} tokens have no logprob")
        share = f"{known.positions:,} of {known.of:,} tokens"
        if known.positions < relation.compared * known.of:
            why = f"only {share} could be compared: other tokens are drawn"
            return replace(known, answer=why)
        drawn = [pair.difference for pair in pairs if pair.seeded and self.draws]
        flips = sum(d.redrawn for d in drawn)
        if _too_many(flips, sum(d.flips for d in drawn)):
            why = f"other tokens are drawn in {flips} of {len(drawn)} answers, which differences "
            why += f"of {known.moved:.2g} in probability do not explain"
            return replace(known, outcome="violated", answer=why)
        answer = f"equal bit for bit: {known.answers} answers, {share}"
        if any(d.unequal for d in seen):
            answer = f"within rounding: {_size(known)} ({limit.nats:.2g} allowed: {limit.why}); "
            answer += f"{known.answers} answers, {share}"
        answer += relation.caveat(self.subject)
        return replace(known, outcome="holds", answer=answer)

    def _violated(
        self,
        relation: Relation,
        known: Finding,
        pairs: Sequence[Pair],
        bad: Sequence[Pair],
        limit: Limit,
        small: bool,
    ) -> Finding:
        first = min(bad, key=lambda pair: pair.request.tokens)
        if small and relation.smaller(self.subject):

            def failing(request: Request) -> Pair | None:
                found = relation.pairs(self.subject, request)
                return next((pair for pair in found if self._fails(pair, limit)), None)

            example = shrink(relation, first.request, lambda one: failing(one) is not None)
            first = failing(example) or first
        size = f"{_size(known)} ({limit.nats:.2g} allowed: {limit.why})"
        if self.bitwise:
            size = f"not equal bit for bit: |Δlogp| up to {known.largest_nats:.3g} nats"
        if all(pair.difference.at is None for pair in bad):
            size = "other tokens are drawn from equal logprobs"
        what = "requests" if len({pair.request for pair in pairs}) == len(pairs) else "answers"
        where = f"{len(bad)} of {len(pairs)} {what}{_pattern(relation, pairs, bad)}"
        return replace(
            known,
            outcome="violated",
            answer=f"{size}, in {where}; the smallest: {_of(first)} {first.where}",
            example=first.request,
            position=first.difference.position,
        )

    def _fails(self, pair: Pair, limit: Limit) -> bool:
        return self._broken(pair, limit.red_nats) or (
            not self.bitwise and pair.difference.noise > limit.red_nats
        )


def _too_many(found: int, expected: float) -> bool:
    """Whether a Poisson variable is so large with a probability of less than 1e-4."""
    below, term = 0.0, math.exp(-expected)
    for n in range(found):
        below += term
        term *= expected / (n + 1)
    return found > 0 and 1.0 - below < _MANY_FLIPS


def _size(known: Finding) -> str:
    moved = 100 * (known.moved or 0.0)
    return f"probabilities move by {moved:.2g} %, as by logit noise of {known.noise_nats:.2g} nats"


def _of(pair: Pair) -> str:
    d = pair.difference
    if d.at is None:
        return f"another draw of new token {d.position}"
    return f"{d.largest:.3g} nats at new token {d.at}"


def _pattern(relation: Relation, pairs: Sequence[Pair], bad: Sequence[Pair]) -> str:
    """Where a residue of a block size tells the violations from the other cases.

    A case that moved more than the others, and not beyond the limit, is neither.
    """
    wrong = {n for pair in bad if (n := relation.size(pair)) is not None}
    good = [pair for pair in pairs if relation.size(pair) not in wrong]
    usual = 2 * median([pair.difference.noise for pair in good] or [0.0])
    sizes = (relation.size(pair) for pair in good if pair.difference.noise <= usual)
    right = {n for n in sizes if n is not None}
    if len(wrong) < 2 or not right:
        return ""
    for block in reversed(BLOCKS):
        rests = {n % block for n in wrong}
        if len(rests) == 1 and not rests & {n % block for n in right if n > min(wrong)}:
            return f" (those of {rests.pop()} modulo {block} tokens, from {min(wrong)} on)"
    if min(wrong) > max(right):
        return f" (those of {min(wrong)} tokens or more)"
    return ""
