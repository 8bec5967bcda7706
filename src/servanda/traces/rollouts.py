# Rollouts: the data of one step in a trainer's dump, for any framework.
#
# Axes: S sequences in the order of the dump, N tokens of all sequences, concatenated, including
# prompts, K trained tokens among them, T turns.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servanda.errors import EvidenceError

Array = NDArray[Any]
REMOVED = "removed"  # of per_token: 1 for a sampled token that a filter removed
# of per_token, and of the columns of a trace: what the loss applied to a token
LOSS_WEIGHT, LOSS_MASK = "loss_weight", "loss_mask"
# of per_token: the experts of a mixture that the sampler recorded, and those of the trainer's
# forward pass, [N, L, K], int16, of the forward that predicted the token
ROUTE, ROUTE_TRAIN, UNROUTED = "route", "route_train", -1
# of per_sequence: 1 where the trainer says that it replays the sampler's experts
REPLAYS = "replays_routes"
# of per_sequence: how many weight versions sampled it
VERSIONS = "weight_versions"
# of per_sequence: which update of its rollout trained it, from 1
UPDATE = "update"
# of per_sequence: 1 where experts are recorded in a form that is not read
ROUTES_UNREAD = "routes_unread"


class Turns(NamedTuple):
    """The turns of all sequences, in order; a turn is a run of trained tokens of a sequence.

    Args:
        first_T: index of its first token; trained_T: the same among trained tokens.
        length_T: its tokens; number_T: its number in the sequence, from 1.
        final_T: whether it is the last of its sequence.
    """

    first_T: Array
    trained_T: Array
    length_T: Array
    number_T: Array
    final_T: Array


@dataclass(frozen=True)
class Rollouts:
    """Sequences of one training step, or of a part of it: index i of a column concerns token i.

    Args:
        step: step number of the trainer.
        length_S: tokens of each sequence, including its prompt, without padding.
        token_N: token ids.
        mask_N: whether the trainer learns from the token: sampled tokens, without prompts and tool
            results.
        logp_train_N, logp_infer_N: nats, float64; NaN if missing in the dump.
        group_S: the prompt group of each sequence, any text; sequences with one prompt share it.
        source_S: place of each sequence, such as "train_data_step14.jsonl:3".
        labels: name -> text of each sequence, [S]: "env", "replica".
        per_sequence: name -> number of each sequence, [S]: "reward".
        per_token: name -> number of each token, [N]: "staleness", "advantage", "entropy_nats",
            "removed", "loss_weight", "loss_mask", "weight_version"; "route" and "route_train", of
            [N, layers, experts].
    """

    step: int
    length_S: Array
    token_N: Array
    mask_N: Array
    logp_train_N: Array
    logp_infer_N: Array
    group_S: tuple[str, ...]
    source_S: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    per_sequence: Mapping[str, Array] = field(default_factory=dict)
    per_token: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sequences, tokens = len(self.length_S), int(self.length_S.sum())
        own = {"group_S": self.group_S, "source_S": self.source_S}
        wanted = {
            sequences: {**own, **self.labels, **self.per_sequence},
            tokens: {
                "token_N": self.token_N,
                "mask_N": self.mask_N,
                "logp_train_N": self.logp_train_N,
                "logp_infer_N": self.logp_infer_N,
                **self.per_token,
            },
        }
        for size, columns in wanted.items():
            for name, column in columns.items():
                if len(column) != size:
                    raise EvidenceError(
                        f"rollouts of step {self.step} have {sequences} sequences of {tokens} "
                        f"tokens, and {len(column)} values of {name}"
                    )

    def __len__(self) -> int:
        return len(self.length_S)

    @cached_property
    def start_S(self) -> Array:
        """The index of the first token of each sequence, [S]."""
        return np.cumsum(self.length_S) - self.length_S

    @cached_property
    def sequence_N(self) -> Array:
        """The sequence of each token, [N]."""
        return np.repeat(np.arange(len(self)), self.length_S)

    def sequence_of(self, token: Any) -> Any:
        """The sequence of one token, or of each of several, by their indices in 0..N-1."""
        return np.searchsorted(self.start_S, token, side="right") - 1

    @cached_property
    def trained_K(self) -> Array:
        """The index of each trained token, [K]."""
        return np.flatnonzero(self.mask_N)

    @cached_property
    def train_K(self) -> Array:
        """The trainer's logprob of each trained token, [K]."""
        return self.logp_train_N[self.trained_K]

    @cached_property
    def infer_K(self) -> Array:
        """The sampler's logprob of each trained token, [K]."""
        return self.logp_infer_N[self.trained_K]

    @cached_property
    def ratio_K(self) -> Array:
        """log p_train - log p_infer of each trained token, [K], nats."""
        with np.errstate(invalid="ignore", over="ignore"):
            return self.train_K - self.infer_K

    @cached_property
    def trained_S(self) -> Array:
        """Number of trained tokens of each sequence, [S]."""
        ends_S = np.searchsorted(self.trained_K, self.start_S + self.length_S)
        return np.diff(ends_S, prepend=0)

    @cached_property
    def turns(self) -> Turns:
        inside_N = np.append(self.mask_N[1:] & self.mask_N[:-1], False)  # the next is trained, too
        inside_N[(self.start_S - 1)[self.start_S > 0]] = False
        last_T = np.flatnonzero(self.mask_N & ~inside_N)
        end_T = np.searchsorted(self.trained_K, last_T) + 1
        length_T = np.diff(end_T, prepend=0)
        sequence_T = self.sequence_of(last_T)
        before_S = np.searchsorted(sequence_T, np.arange(len(self)))
        final_T = np.append(sequence_T[1:] != sequence_T[:-1], True)[: len(last_T)]
        return Turns(
            last_T - length_T + 1,
            end_T - length_T,
            length_T,
            np.arange(len(last_T)) - before_S[sequence_T] + 1,
            final_T,
        )

    def sums_S(self, values_K: Array) -> Array:
        """The sum over the trained tokens of each sequence, [S]."""
        sums_S, some_S = np.zeros(len(self)), self.trained_S > 0
        if some_S.any():
            starts_S = np.cumsum(self.trained_S) - self.trained_S
            sums_S[some_S] = np.add.reduceat(values_K, starts_S[some_S])
        return sums_S

    @property
    def prompt_tokens_S(self) -> Array:
        """Number of tokens before the first trained one, [S]; all tokens if none is trained."""
        return np.bincount(self.sequence_N[self._trained_before_N == 0], minlength=len(self))

    @property
    def position_N(self) -> Array:
        """The index of each trained token among those of its sequence, [N]; -1 for others."""
        return np.where(self.mask_N, self._trained_before_N - 1, -1)

    @cached_property
    def removed_N(self) -> Array | None:
        """Mask of sampled tokens that a filter of the trainer removed, [N]; None if none were."""
        column_N = self.per_token.get(REMOVED)
        if column_N is None or not (column_N == 1).any():
            return None
        return (column_N == 1) & ~self.mask_N

    @cached_property
    def turn_N(self) -> Array:
        """The turn of each trained token, from 1, [N]; 0 for others.

        A turn is a run of trained tokens: tokens between two are a tool's or a user's.
        """
        before_N = np.concatenate(([False], self.mask_N))[:-1]
        before_N[self.start_S] = False
        starts_N = self.mask_N & ~before_N
        return np.where(self.mask_N, self._within(starts_N), 0)

    @cached_property
    def turn_token_N(self) -> Array:
        """The index of each trained token in its turn, [N]; -1 for others."""
        at_N = np.arange(len(self.mask_N))
        last_other_N = np.maximum.accumulate(np.where(self.mask_N, -1, at_N))
        opens_N = np.maximum(last_other_N, np.repeat(self.start_S, self.length_S) - 1)
        return np.where(self.mask_N, at_N - opens_N - 1, -1)

    @cached_property
    def _trained_before_N(self) -> Array:
        """Number of trained tokens of the sequence up to each token, inclusive, [N]."""
        return self._within(self.mask_N)

    def _within(self, flag_N: Array) -> Array:
        """Number of flags in the sequence so far, [N]."""
        count_N = np.cumsum(flag_N)
        before_S = np.concatenate(([0], count_N))[self.start_S]
        return count_N - np.repeat(before_S, self.length_S)
