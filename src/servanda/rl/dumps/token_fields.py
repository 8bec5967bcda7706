# The trained tokens of a block: their fields for slices, and the columns that its statistics share.
#
# Axes: S sequences, N trained tokens, K usable ones, which have both logprobs.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.judgement.slices.atoms import Classes
from servanda.judgement.slices.columns import columns
from servanda.theory.divergence.base import sampled
from servanda.traces.trace import TracePair

Array = NDArray[Any]
_COUNTED = ("context.length", "context.turn", "context.turn_position")  # whole, always known


@dataclass(frozen=True)
class PairFields:
    """The `TokenFields` of a pair."""

    pair: TracePair

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pair.infer.token_N.shape

    def labels(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        none = ("",) * len(self.pair.infer.length_S)
        return [*zip(*(self.pair.labels.get(name, none) for name in names), strict=True)]

    def of_sequences(self, code_S: Array) -> Array:
        return np.repeat(code_S, self.pair.infer.length_S)

    def codes(self, field: str, classes: Classes) -> tuple[Array, int]:
        trace, size = self.pair.infer, len(classes)
        if field == "request.prompt_tokens":
            return self.of_sequences(classes.of_values(trace.prompt_tokens_S)), size - 1
        if field == "context.position":
            return _looked_up(classes, self.pair.position_N), size - 1
        if field in _COUNTED and (name := field.partition(".")[2]) in trace.columns:
            return _looked_up(classes, trace.columns[name].astype(np.int32)), size - 1
        return classes.of_values(columns(self.pair, (), [field])[field]), size


def _looked_up(classes: Classes, count_N: Array) -> Array:
    return classes.of_counts(int(count_N.max(initial=0))).take(count_N)


class ScoredTokens:
    """The columns of a pair that several statistics use, each computed once."""

    def __init__(self, pair: TracePair) -> None:
        self.pair = pair
        self.usable_N = pair.usable_N
        self.train_K = pair.train.columns["logp"][self.usable_N]
        self.infer_K = pair.infer.columns["logp"][self.usable_N]
        self.log_ratio_K = self.train_K - self.infer_K  # -inf where train has no mass

    @cached_property
    def tv_K(self) -> Array:
        """(1 - w)^+ of each token."""
        return sampled("tv", {"logp_train": self.train_K, "logp_infer": self.infer_K})

    @cached_property
    def sequence_K(self) -> Array:
        """The sequence of each token."""
        length_S = self.pair.infer.length_S
        return np.repeat(np.arange(len(length_S)), length_S)[self.usable_N]

    @cached_property
    def tokens_S(self) -> Array:
        """Usable tokens of each sequence."""
        return np.bincount(self.sequence_K, minlength=len(self.pair.infer.length_S))
