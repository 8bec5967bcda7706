# An explanation of a gap: cause, evidence, slices, and the next experiment as a command.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from statistics import NormalDist
from typing import Any

import numpy as np

from servanda.contract.clause import SliceRule
from servanda.judgement.breakdown import Advice, CorrectionForecast, Estimate, SliceAdvice
from servanda.judgement.causes.catalogue import CAUSES, UNEXPLAINED, Cause
from servanda.judgement.causes.cause_rules import RULES, Case
from servanda.judgement.causes.gap_shape import WORST, signatures_of
from servanda.judgement.causes.sequence_search import find_sequences
from servanda.judgement.causes.slice_search import find_slices, mask_of, measured
from servanda.judgement.causes.switches import REMEDIES
from servanda.judgement.causes.token_table import Array, TokenTable
from servanda.judgement.contract_text import slice_text
from servanda.judgement.slices.rules import LABEL
from servanda.theory.bounds.corrections import CORRECTIONS, Correction, token_errors
from servanda.theory.bounds.sequence import shortfall
from servanda.theory.stats.block_bootstrap import student_t

# The decision: from signatures and slices to a cause, or to none.
#
# The first rule that fits names the cause: a failed check comes first, then a place or a transform,
# then what only fits the shape.  Each rule returns its evidence, with numbers, or "".  The
# thresholds were chosen on some models and strengths and tested on others (benchmarks/causes.py).


ORDER = (
    *("missing_data", "shift", "replay", "raw_logprobs"),
    *("stale_replica", "one_engine", "one_kind", "old_weights", "retokenised"),
    *("top_p", "temperature", "penalty"),
    *("vocabulary", "end_of_answer", "blocks", "stale_cache", "batch", "attention_window"),
    *("padding", "packing", "template", "odd_sequences", "precision_drift", "stale_weights"),
    *("positions", "routing", "softcap", "head", "numerics"),
)


def causes_of(case: Case) -> list[tuple[Cause, str]]:
    """The causes that fit, most likely first, with their evidence; `unexplained` if none does."""
    found = [(CAUSES[name], text) for name in ORDER if (text := RULES[name](case))]
    if found:
        return found
    s = case.signatures
    grown = f", x{s.growth:.2g} over the steps" if s.growth is not None else ""
    text = (
        f"{100 * s.tail:.0f} % of the gap in 1 % of the tokens, {100 * s.concentration:.0f} % in "
        f"the sequences with {100 * WORST:.0f} % of them{grown}; no signature fits"
    )
    return [(CAUSES[UNEXPLAINED], text)]


@dataclass(frozen=True)
class Explanation:
    """The likely cause of a gap.

    Args:
        cause, rival: names of the two most likely causes; `unexplained` where no signature fits.
        evidence: the measured numbers that suggest it.
        experiment, command: what separates the two.
        case: the signatures, slices and failed checks that it was decided on.
    """

    cause: str
    rival: str
    evidence: str
    experiment: str
    command: str
    case: Case

    @property
    def named(self) -> bool:
        return self.cause != UNEXPLAINED

    @property
    def text(self) -> str:
        """The cause and its evidence in one line."""
        words = CAUSES[self.cause].words.replace("{where}", self._where)
        return f"{words}; {self.evidence}"

    @property
    def _where(self) -> str:
        """The label of the main slice, such as "env math"."""
        for name, conditions in (self.case.main.match if self.case.main else {}).items():
            if name.startswith(LABEL):
                return f"{name.removeprefix(LABEL)} {conditions['in'][0]}"
        return "one label"

    @property
    def rules(self) -> list[SliceRule]:
        """The slices as a contract has them."""
        return [
            SliceRule(name=f"found-{number}", match=found.match)  # type: ignore[call-arg]
            for number, found in enumerate(self.case.slices, 1)
        ]


def explain(
    table: TokenTable,
    limit: float = 0.0,
    problems: Mapping[str, str] | None = None,
    place: str = "DIR",
    violated: Sequence[Mapping[str, Mapping[str, Any]]] = (),
) -> Explanation:
    """The likely cause of a gap.

    Args:
        limit: of the mean of |p - q| / (p + q), which a slice has to exceed.
        violated: conditions of slices that a contract has and that are violated, which count
            where the search finds none.
        problems: failed data quality checks, by name, with what they found.
        place: of the data, for commands.
    """
    slices = find_slices(table, limit)
    slices = slices or tuple(filter(None, (measured(table, match) for match in violated)))
    most = max((found.share for found in slices), default=0.0)
    sequences = None if most >= 0.5 else find_sequences(table, limit)
    signatures = signatures_of(table)
    return explained(Case(signatures, slices, sequences, limit, problems or {}), place)


def explained(case: Case, place: str = "DIR") -> Explanation:
    """The likely cause of a case; `place` is that of the data, for commands."""
    (cause, evidence), *_ = causes_of(case)
    command = cause.command.replace("{dir}", quote(place))
    command = command.replace("{step}", str(case.signatures.first_step))
    return Explanation(cause.name, cause.rival, evidence, cause.experiment, command, case)


# The advice on an explained gap, with the effects that its tokens predict.  Intervals are those
# of a bootstrap over prompt groups.
#
# Axes: R resamples, G prompt groups, K tokens, S sequences.


CONFIDENCE = 0.95
_RESAMPLES, _FEWEST_RESAMPLES = 1000, 200
_COUNTS = 4_000_000  # of groups in resamples; beyond it there are fewer resamples
_FEWEST = 5  # prompt groups for an interval
_SEED = 0


def advise(
    table: TokenTable,
    explanation: Explanation,
    update_tokens: int,
    command: Callable[[str], str] | None = None,
) -> Advice:
    """The advice on an explained gap.

    Args:
        update_tokens: trained tokens of one update.
        command: name of a cause -> the experiment as a command; "" for that of the explanation.
    """
    resamples = _Resamples(table)
    tv_K = shortfall(table.log_ratio_K)
    slices = []
    for rule, found in zip(explanation.rules, explanation.case.slices, strict=True):
        outside_K = ~mask_of(found.match, table)
        rest = resamples.mean(tv_K, outside_K)
        slices.append(SliceAdvice(slice_text(rule), found.share, found.tokens, rest))
    own = command(explanation.cause) if command is not None else ""
    return Advice(
        explanation.cause,
        explanation.text,
        tuple(slices),
        explanation.experiment,
        own or explanation.command,
        REMEDIES[explanation.cause].switch,
        resamples.mean(tv_K),
        update_tokens,
        _forecasts(table, resamples, max(update_tokens, 1)),
    )


class _Resamples:
    """Resampled prompt groups of a table: how often each of them is in each resample."""

    def __init__(self, table: TokenTable) -> None:
        _, self._group_K = np.unique(table.group_K, return_inverse=True)
        self.groups = int(self._group_K.max(initial=-1)) + 1
        rng = np.random.default_rng(_SEED)
        each = np.full(self.groups, 1 / self.groups)
        resamples = max(_FEWEST_RESAMPLES, min(_RESAMPLES, _COUNTS // max(self.groups, 1)))
        counts_RG = rng.multinomial(self.groups, each, size=resamples)
        # the first row is the sample itself
        self.counts_RG = np.vstack([np.ones((1, self.groups), dtype=np.int64), counts_RG])

    def ratio(self, above_K: Array, below_K: Array) -> Array:
        """Sum of one column over that of another, of the sample and of each resample, [1 + R]."""
        sums = [np.bincount(self._group_K, of, self.groups) for of in (above_K, below_K)]
        above_R, below_R = (self.counts_RG @ sum_G for sum_G in sums)
        return np.divide(above_R, below_R, out=np.zeros_like(above_R), where=below_R > 0)

    def mean(self, value_K: Array, of_K: Array | None = None) -> Estimate:
        """The mean over some tokens."""
        of_K = np.ones(len(value_K)) if of_K is None else of_K * 1.0
        return self.estimate(self.ratio(value_K * of_K, of_K))

    def estimate(self, value_R: Array) -> Estimate:
        """The sample's value, and expanded percentiles of the resamples."""
        n = self.groups
        if n < _FEWEST:
            return Estimate(float(value_R[0]))
        reach = math.sqrt(n / (n - 1)) * student_t((1 + CONFIDENCE) / 2, n - 1)
        out = NormalDist().cdf(-reach)
        low, high = np.quantile(value_R[1:], [out, 1 - out])
        return Estimate(float(value_R[0]), float(low), float(high))


def _forecasts(
    table: TokenTable, resamples: _Resamples, update_tokens: int
) -> tuple[CorrectionForecast, ...]:
    """What each correction leaves, smallest error first."""
    columns = {
        name: _columns(correction, table, resamples) for name, correction in CORRECTIONS.items()
    }
    errors = {
        name: np.sqrt(np.maximum(bias_R, 0.0) ** 2 + square_R / update_tokens)
        for name, (bias_R, _, square_R, _) in columns.items()
    }
    error_CR = np.stack([*errors.values()])
    least_R = error_CR[:, 1:].min(axis=0)
    best_C = (error_CR[:, 1:] <= least_R).mean(axis=1)
    forecasts = [
        CorrectionForecast(
            name,
            CORRECTIONS[name].text,
            resamples.estimate(np.maximum(bias_R, 0.0)),
            resamples.estimate(np.maximum(response_R, 0.0)),
            resamples.estimate(np.sqrt(square_R)),
            resamples.estimate(errors[name]),
            resamples.estimate(masked_R),
            float(best),
        )
        for (name, (bias_R, response_R, square_R, masked_R)), best in zip(
            columns.items(), best_C, strict=True
        )
    ]
    return tuple(sorted(forecasts, key=lambda one: one.error.value))


def _columns(
    correction: Correction, table: TokenTable, resamples: _Resamples
) -> tuple[Array, Array, Array, Array]:
    """Means of what a correction leaves, of the sample and of each resample, [1 + R]."""
    starts = np.flatnonzero(np.diff(table.sequence_K, prepend=-1))
    length_S = np.diff(np.append(starts, len(table)))
    errors = token_errors(correction, table.log_ratio_K, length_S)
    one_K, first_K = np.ones(len(table)), np.zeros(len(table))
    first_K[starts] = 1.0
    bias, square, masked = (
        resamples.ratio(column_K, one_K)
        for column_K in (errors.surrogate, errors.square, errors.masked)
    )
    at_first_K = np.zeros(len(table))
    at_first_K[starts] = errors.response
    return bias, resamples.ratio(at_first_K, first_K), square, masked
