# What is seen of one request, and how far two of them are apart.

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from servanda.traces.trace import Trace

Ids = tuple[int, ...]
# what a nat of noise moves in a distribution that is nearly certain, at least: over many answers,
# and in one, where a rare logprob may decide
_SURE, _SURE_ALONE = 0.02, 0.1
_MANY = 8


@dataclass(frozen=True)
class Observation:
    """One answer.

    Args:
        tokens: drawn, or given.
        logp: at each position the logprobs that are known, by token id, nats.
        cached: tokens of the prompt that were read from a cache; None where no one says.
        mass_before: the mass of ids below each token's, by which it was drawn; () where the
            engine does not record it.
    """

    tokens: Ids
    logp: tuple[Mapping[int, float], ...]
    cached: int | None = None
    mass_before: tuple[float, ...] = ()

    @classmethod
    def each(cls, trace: Trace) -> list[Observation]:
        """The answers of a trace, in its order."""
        ends = trace.length_S.cumsum()
        return [
            cls._of(trace, slice(end - length, end))
            for length, end in zip(trace.length_S.tolist(), ends.tolist(), strict=True)
        ]

    @classmethod
    def _of(cls, trace: Trace, part: slice) -> Observation:
        tokens = tuple(trace.token_N[part].tolist())
        own = trace.columns["logp"][part].tolist()
        logp: list[dict[int, float]] = [
            {token: value} for token, value in zip(tokens, own, strict=True)
        ]
        if trace.best is not None:
            for t, (ids, values) in enumerate(zip(*(b[part] for b in trace.best), strict=True)):
                best = zip(ids.tolist(), values.tolist(), strict=True)
                known = {i: value for i, value in best if i >= 0 and not math.isnan(value)}
                logp[t] = {**known, **logp[t]}
        cached = trace.columns.get("cached", np.zeros(0))[part]
        known = len(cached) and not math.isnan(cached[0])
        before = trace.columns.get("mass_before", np.zeros(0))[part]
        return cls(tokens, tuple(logp), int(cached[0]) if known else None, tuple(before.tolist()))


@dataclass(frozen=True)
class Difference:
    """The differences of two answers to one request, up to the first token that differs.

    Args:
        positions: that could be compared; of: those of which both say anything.
        moved: the sum, over positions, of the least total variation distance of the two
            distributions that the logprobs of both allow.
        given: the same sum for independent logit noise of one nat.
        largest: largest |difference| of a logprob that both report, nats.
        unequal: positions with any logprob that differs in a bit.
        unknown: positions where a logprob is NaN in one answer alone; silent: in both.
        flips: other draws of one seed that the differences explain, at most.
        at: the position that moved most; None where no bit differs.
        other_token: the first position at which another token was drawn though no logprob
            known of both there, or before it, differs in a bit; None where there is none.
        redrawn: whether another token was drawn, at equal logprobs or not.
    """

    positions: int = 0
    of: int = 0
    moved: float = 0.0
    given: float = 0.0
    largest: float = 0.0
    unequal: int = 0
    unknown: int = 0
    silent: int = 0
    flips: float = 0.0
    at: int | None = None
    other_token: int | None = None
    redrawn: bool = False

    @property
    def noise(self) -> float:
        """Logit noise, nats, that would move the distributions of this answer as much."""
        return self.moved / max(self.given, _SURE_ALONE * self.positions) if self.moved else 0.0

    @property
    def position(self) -> int:
        """Of the difference."""
        return next((p for p in (self.at, self.other_token) if p is not None), 0)


def logit_noise(differences: Sequence[Difference]) -> float:
    """Of several answers: the standard deviation, nats, of independent noise on every logit that
    would move the distributions as far as these were moved.

    Distributions differ in how much noise moves them, so a mean distance alone says as much about
    the prompts as about the kernel.  Of eight answers or more the one that moved most is left out:
    a single one says nothing of the others.
    """
    if len(differences) >= _MANY:
        odd = max(range(len(differences)), key=lambda n: differences[n].moved)
        differences = [d for n, d in enumerate(differences) if n != odd]
    moved, given = sum(d.moved for d in differences), sum(d.given for d in differences)
    positions = sum(d.positions for d in differences)
    return moved / max(given, _SURE * positions) if moved else 0.0


def difference(a: Observation, b: Observation) -> Difference:
    """The differences of two answers to one request."""
    found = Difference(of=sum(bool(x and y) for x, y in zip(a.logp, b.logp, strict=False)))
    most, vocabulary = 0.0, 1 + max((i for row in (*a.logp, *b.logp) for i in row), default=0)
    for t, (own, theirs) in enumerate(zip(a.logp, b.logp, strict=False)):
        pairs = [(own[i], theirs[i]) for i in own.keys() & theirs.keys()]
        known = [(x, y) for x, y in pairs if not (math.isnan(x) or math.isnan(y))]
        drawn = {a.tokens[t], b.tokens[t]}
        mine, yours = _absent(own, theirs, drawn), _absent(theirs, own, drawn)
        unlike = [abs(x - y) for x, y in known if _bits(x) != _bits(y)]
        moved = _moved(known, mine, yours) if unlike or mine or yours else 0.0
        at = t if moved > most or (found.at is None and (unlike or moved)) else found.at
        most = max(most, moved)
        redrawn = len(drawn) > 1
        found = replace(
            found,
            positions=found.positions + bool(known or mine or yours),
            moved=found.moved + moved,
            given=found.given + _given([x for x, _ in known]),
            largest=max([found.largest, *unlike]),
            unequal=found.unequal + bool(unlike or moved),
            unknown=found.unknown + any(math.isnan(x) != math.isnan(y) for x, y in pairs),
            silent=found.silent + any(math.isnan(x) and math.isnan(y) for x, y in pairs),
            flips=found.flips + _flips([x for x, _ in known], moved, vocabulary),
            at=at,
            other_token=t if redrawn and at is None else None,
            redrawn=redrawn,
        )
        if redrawn:
            break
    return found


def _absent(
    own: Mapping[int, float], theirs: Mapping[int, float], drawn: Collection[int]
) -> list[tuple[float, float]]:
    """Likeliest tokens that the other answer does not list, each with the most it can have there.

    That is the smallest logprob of its list, without tokens that were drawn: each answer lists its
    own, however unlikely.
    """
    most = min((value for i, value in theirs.items() if i not in drawn), default=math.nan)
    return [(own[i], most) for i in own.keys() - theirs.keys() if own[i] > most]


def _moved(
    both: Sequence[tuple[float, float]],
    mine: Sequence[tuple[float, float]],
    yours: Sequence[tuple[float, float]],
) -> float:
    """The least total variation distance of two distributions with these logprobs.

    It is the largest gain of probability by any set of tokens, in either direction.
    """
    gains = [math.exp(x) - math.exp(y) for x, y in both]
    up = sum(g for g in gains if g > 0) + sum(math.exp(x) - math.exp(most) for x, most in mine)
    down = -sum(g for g in gains if g < 0) + sum(math.exp(x) - math.exp(most) for x, most in yours)
    return min(1.0, max(up, down))


def _given(logp: Sequence[float]) -> float:
    """The mean distance by which independent normal noise of one nat on every logit moves the
    probabilities of these tokens, and of all others together, to first order.
    """
    p_K = np.minimum(np.exp(np.array(logp)), 1.0)
    squares, rest = float(p_K @ p_K), max(0.0, 1.0 - float(p_K.sum()))
    spread_K = np.sqrt(np.maximum(1.0 - 2.0 * p_K + squares, 0.0))
    return math.sqrt(0.5 / math.pi) * (float(p_K @ spread_K) + rest * math.sqrt(squares))


def _flips(logp: Sequence[float], moved: float, vocabulary: int) -> float:
    """The probability that one seed draws another token, at most.

    A sampler that inverts the distribution function finds each border between tokens moved, by up
    to the distance of the distributions: likely tokens seldom change, those of the tail often do.
    """
    likely = [math.exp(x) for x in logp]
    rest = max(0.0, 1.0 - sum(likely))
    return sum(min(p, 2 * moved) for p in likely) + min(rest, 2 * moved * vocabulary)


def _bits(value: float) -> bytes:
    return np.float64(value).tobytes()
