# The breakdown of a verdict: by evaluation; of a dump, by step, by sequence, and what was removed.
#
# It describes.  Of it only the steps were judged, each alone and at a price of its own
# (`rl.dumps.window`); a step that is violated alone is a cell of the verdict as well.

from __future__ import annotations

from dataclasses import dataclass

from servanda.judgement.clauses.base import Outcome


@dataclass(frozen=True)
class EValuePath:
    """The evidence for one cell at each evaluation of a run.

    Args:
        groups: prompt groups so far, an entry per evaluation.
        e_holds, e_violated: log e-values, nats.
    """

    clause: str
    slice: str
    groups: tuple[int, ...]
    e_holds: tuple[float, ...]
    e_violated: tuple[float, ...]


@dataclass(frozen=True)
class StepRow:
    """One training step.

    Args:
        outcome: of its enforced cells, judged on this step; red: "clause[slice]" of those violated.
        tv: mean (1 - w)^+; abs_log_ratio, k3: means, nats; exp_abs: mean exp |log ratio|.
    """

    step: int
    outcome: Outcome
    sequences: int
    tokens: int
    tv: float | None = None
    abs_log_ratio: float | None = None
    exp_abs: float | None = None
    k3: float | None = None
    red: tuple[str, ...] = ()


@dataclass(frozen=True)
class SequenceRow:
    """One of the sequences with the largest sum of (1 - w)^+ above the limit.

    Args:
        source: where it stands, "file:line"; tokens: trained ones with both logprobs.
        log_ratio: summed over them, nats; exp_abs, tv: means.
        share: of the sum of (1 - w)^+ of the whole dump.
        beyond: whether its own tokens are evidence that it is beyond the limit.
        removed: whether the trainer's filter took it out.
    """

    step: int
    source: str
    group: str
    tokens: int
    log_ratio: float
    exp_abs: float
    tv: float
    share: float
    beyond: bool = False
    removed: bool = False


@dataclass(frozen=True)
class Removed:
    """Sequences that the trainer's filter took out although both sides scored them.

    Args:
        sequences, tokens: of `of_sequences` and `of_tokens` that a policy drew.
        tv: their mean (1 - w)^+; kept: that of all others; before: of both together.
    """

    sequences: int
    tokens: int
    of_sequences: int
    of_tokens: int
    tv: float | None = None
    kept: float | None = None
    before: float | None = None


@dataclass(frozen=True)
class StepPoint:
    """A mean on one step, with an interval of this step alone; None where it met no token."""

    step: int
    tokens: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class StepSeries:
    """The mean of one cell, step by step.

    Args:
        since: the first step from which on every mean is beyond the limit; None: there is none.
        confidence: of each end of an interval.
    """

    clause: str
    metric: str
    slice: str
    limit: float
    confidence: float
    since: int | None = None
    points: tuple[StepPoint, ...] = ()


@dataclass(frozen=True)
class Breakdown:
    """What a dump's verdict is made of.

    Args:
        sequences: the worst ones first; beyond: how many are beyond the limit on their own.
        series: the whole and its worst slices over the steps, in the metric of the gradient.
    """

    steps: tuple[StepRow, ...] = ()
    sequences: tuple[SequenceRow, ...] = ()
    beyond: int = 0
    removed: Removed | None = None
    series: tuple[StepSeries, ...] = ()
