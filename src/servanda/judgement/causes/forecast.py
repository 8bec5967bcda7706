# The advice on an explained gap, with the effects that its tokens predict.  Intervals are those
# of a bootstrap over prompt groups.
#
# Axes: R resamples, G prompt groups, K tokens, S sequences.

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from servanda.judgement.breakdown import Advice, CorrectionForecast, Estimate, SliceAdvice
from servanda.judgement.causes.catalogue import REMEDIES
from servanda.judgement.causes.gap_cause import Explanation
from servanda.judgement.causes.slice_search import entry_of, mask_of
from servanda.judgement.causes.token_table import Array, TokenTable
from servanda.theory.bounds.corrections import CORRECTIONS, Correction, token_errors
from servanda.theory.bounds.sequence import shortfall
from servanda.theory.stats.block_bootstrap import student_t

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
    for number, found in enumerate(explanation.slices, 1):
        rest = resamples.mean(tv_K, ~mask_of(found.match, table))
        entry = entry_of(found.match, f"found-{number}")
        slices.append(SliceAdvice(entry, found.share, found.tokens, rest))
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
    """What each correction leaves at most, smallest bound first."""
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
