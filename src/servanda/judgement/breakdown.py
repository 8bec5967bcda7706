# The breakdown of a verdict by evaluation; of a dump by training step, by sequence, and by a
# filter's removals.
#
# Descriptive, except for the steps, which are judged individually with a separate threshold
# (`rl.dumps.window`); a violated step is also a cell of the verdict.

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
        outcome: outcome of its enforced cells on this step; red: "clause[slice]" of violated ones.
        tv: mean (1 - w)^+; abs_log_ratio, k3: means, nats; exp_abs: mean exp |log ratio|.
        first: first of the steps with which its outcome is, if it has too few tokens alone.
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
    first: int | None = None


@dataclass(frozen=True)
class SequenceRow:
    """One of the sequences with the largest sum of (1 - w)^+ above the limit.

    Args:
        source: its place, "file:line"; tokens: trained tokens with both logprobs.
        log_ratio: summed over them, nats; exp_abs, tv: means.
        share: its share of the dump's sum of (1 - w)^+.
        beyond: whether its own tokens show that it exceeds the limit.
        removed: whether the trainer's filter removed it.
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
    """Sequences that the trainer's filter removed although both sides scored them.

    Args:
        sequences, tokens: number removed, of `of_sequences` and `of_tokens` sampled by a policy.
        tv: their mean (1 - w)^+; kept: that of the others; before: that of all.
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
    """A mean on one step, with its own interval; None without tokens."""

    step: int
    tokens: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class StepSeries:
    """The mean of one cell, step by step.

    Args:
        since: first step after which every mean exceeds the limit; None: none.
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
    """The breakdown of a dump's verdict.

    Args:
        sequences: worst first; beyond: number of sequences that exceed the limit on their own.
        series: the whole and its worst slices over the steps, in the metric of the gradient.
    """

    steps: tuple[StepRow, ...] = ()
    sequences: tuple[SequenceRow, ...] = ()
    beyond: int = 0
    removed: Removed | None = None
    series: tuple[StepSeries, ...] = ()
