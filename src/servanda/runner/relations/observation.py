# What is seen of one request, and in what two of them differ.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from servanda.theory.stats.bets import Floats
from servanda.traces.trace import Trace

Ids = tuple[int, ...]


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
        positions: that could be compared.
        largest, at: largest |difference| of a logprob, nats, and its position; None where no bit
            differs.
        other_token: the first position at which another token was drawn though no logprob
            known of both there, or before it, differs in a bit; None where there is none.
        unequal: positions with any logprob that differs in a bit.
        unknown: positions where a logprob is NaN.
    """

    positions: int = 0
    largest: float = 0.0
    at: int | None = None
    other_token: int | None = None
    unequal: int = 0
    unknown: int = 0

    @property
    def position(self) -> int:
        """Of the difference."""
        return next((p for p in (self.at, self.other_token) if p is not None), 0)

    def exceeds(self, limit: float, draws: bool) -> bool:
        """Whether it is more than a limit allows.

        Args:
            limit: nats; one of 0 compares bits, and draws where a seed fixes them.
        """
        if limit:
            return self.largest > limit
        return self.at is not None or (draws and self.other_token is not None)


def difference(a: Observation, b: Observation) -> Difference:
    """The differences of two answers to one request."""
    largest, at, other, unequal, unknown = 0.0, None, None, 0, 0
    positions = 0
    for t, (own, theirs) in enumerate(zip(a.logp, b.logp, strict=False)):
        pairs = [(own[i], theirs[i]) for i in own.keys() & theirs.keys()]
        known = [(x, y) for x, y in pairs if not (math.isnan(x) or math.isnan(y))]
        known += [*_absent(own, theirs, b.tokens[t]), *_absent(theirs, own, a.tokens[t])]
        unknown += len(known) < len(pairs) or bool(own and theirs and not known)
        positions += bool(known)
        unlike = [abs(x - y) for x, y in known if _bits(x) != _bits(y)]
        unequal += bool(unlike)
        if unlike and (at is None or max(unlike) > largest):
            largest, at = max(unlike), t
        if a.tokens[t] != b.tokens[t]:
            other = t if at is None else None
            break
    return Difference(positions, largest, at, other, unequal, unknown)


def _absent(
    own: Mapping[int, float], theirs: Mapping[int, float], drawn: int
) -> Iterator[tuple[float, float]]:
    """Likeliest tokens that the other answer does not list, each with the most it can have there.

    That is the smallest logprob of its list, without the token that was drawn: it may have been
    added to the list.
    """
    listed = [value for i, value in theirs.items() if i != drawn]
    most = min(listed, default=math.nan)
    yield from ((own[i], most) for i in own.keys() - theirs.keys() if own[i] > most)


def _bits(value: float) -> bytes:
    return np.float64(value).tobytes()


def features(runs: Sequence[Observation]) -> Floats:
    """The numbers that all runs of a request have, [R, F], whichever way each was run.

    The logprobs that every run reports, at the positions before which all have the same tokens.
    """
    columns: list[list[float]] = []
    for t in range(min(len(run.tokens) for run in runs)):
        ids = sorted(set.intersection(*({*run.logp[t]} for run in runs)))
        values = ([run.logp[t][i] for run in runs] for i in ids)
        columns += [known for known in values if all(map(math.isfinite, known))]
        if len({run.tokens[t] for run in runs}) > 1:
            break
    return np.array(columns, dtype=np.float64).reshape(len(columns), len(runs)).T
