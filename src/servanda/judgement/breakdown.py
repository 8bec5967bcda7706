# The breakdown of a verdict by evaluation; of a dump by training step, by sequence, and by a
# filter's removals; and the advice on a violated one.
#
# Descriptive, except for the steps, which are judged individually with a separate threshold
# (`rl.steps.judge`); a violated step is also a cell of the verdict.

from __future__ import annotations

from dataclasses import dataclass

from servanda.judgement.clauses.base import Outcome

UNEXPLAINED = "unexplained"  # the cause, where no signature fits


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
class RuleRow:
    """A rule over the steps of a run.

    Args:
        unknown: steps at which it is not a number, for a trained token has no logprob.
        red: steps at which it is above its limit; first: the first of them.
        worst: the step with its largest number; value: that number; None: no step has one.
        largest: the largest |log ratio| of a token there, nats; lone: whether the number is above
            the limit because of that token, or of one response, alone.
    """

    project: str
    name: str
    what: str
    limit: float
    steps: int
    unknown: int = 0
    red: int = 0
    first: int | None = None
    worst: int | None = None
    value: float | None = None
    largest: float | None = None
    lone: bool = False


@dataclass(frozen=True)
class Breakdown:
    """The breakdown of a dump's verdict.

    Args:
        sequences: worst first; beyond: number of sequences that exceed the limit on their own.
        series: the whole and its worst slices over the steps, in the metric of the gradient.
        rules: the rules of other projects, each in its own formula, step by step.
    """

    steps: tuple[StepRow, ...] = ()
    sequences: tuple[SequenceRow, ...] = ()
    beyond: int = 0
    removed: Removed | None = None
    series: tuple[StepSeries, ...] = ()
    rules: tuple[RuleRow, ...] = ()


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; without one if there are too few prompt groups."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class CorrectionForecast:
    """What one correction leaves on such tokens; gradients in units of advantage x score norm.

    Args:
        bias: upper bound of the bias of the token-level surrogate.
        response_bias: upper bound of the bias of the gradient of the expected reward.
        noise: standard deviation of one token's contribution: root of the mean of psi^2.
        error: root of bias^2 + noise^2 / tokens of an update, a bound.
        masked: share of the tokens with weight 0.
        best: share of resamples in which its bound is the smallest.
    """

    name: str
    text: str
    bias: Estimate
    response_bias: Estimate
    noise: Estimate
    error: Estimate
    masked: Estimate
    best: float


@dataclass(frozen=True)
class SliceAdvice:
    """A slice that explains a part of the gap.

    Args:
        entry: as `slices:` of a contract has it.
        share: of the excess that it explains; tokens: its share of the tokens.
        rest: mean total variation of all other tokens.
    """

    entry: str
    share: float
    tokens: float
    rest: Estimate


@dataclass(frozen=True)
class Advice:
    """What to do about a gap.

    Args:
        name: of the cause in the catalogue; cause: its text, with its evidence.
        slices: most of the excess first.
        experiment, command: what separates the cause from the other most likely one.
        switch: what to change if the cause is right; "" if unknown.
        before: mean total variation of all tokens.
        update_tokens: tokens of one update, for the error of a correction.
        corrections: smallest bound first; empty without tokens.
    """

    name: str
    cause: str
    slices: tuple[SliceAdvice, ...] = ()
    experiment: str = ""
    command: str = ""
    switch: str = ""
    before: Estimate | None = None
    update_tokens: int = 0
    corrections: tuple[CorrectionForecast, ...] = ()

    @property
    def named(self) -> bool:
        return self.name != UNEXPLAINED


@dataclass(frozen=True)
class Rung:
    """One format of the precision ladder, or the candidate, on fixed texts; not judged.

    Args:
        name: of the format, such as "fp8_channel".
        tv: mean total variation to the train kernel, 0 to 1; None where it was not measured.
        flips: share of positions at which the most likely token differs.
        tokens: positions.
        candidate: whether this is the infer kernel.
        missing: why it was not measured; "" if it was.
    """

    name: str
    tv: float | None = None
    flips: float | None = None
    tokens: int = 0
    candidate: bool = False
    missing: str = ""
