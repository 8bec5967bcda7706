# The top-k tokens of both kernels, and the constraints on the other tokens.
#
# K_p and K_q are the token ids that train and infer returned, I the common ones, A those of train
# only, B those of infer only.  Tokens that a side did not return are no more likely than its least
# likely returned token, and add up to its tail: only these two facts are used, so the results hold
# for every pair of kernels with these returned tokens.  Axes: R positions, K returned tokens.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from servanda.errors import EvidenceError
from servanda.theory.divergence.pairs import Floats, Pairs

_ROUNDING = 1e-3  # probabilities from logprobs in few bits may add up to slightly more than 1
_FARTHEST = 60.0  # log ratios are searched within +- this
_HALVINGS = 60


@dataclass(frozen=True)
class TopK:
    """The top-k tokens of one kernel at each position.

    Args:
        ids_RK: token ids, [R, K], unique within a row; -1 fills a row with fewer.
        logp_RK: their logprobs, [R, K], nats.  -inf means unknown, as if not returned: engines
            write it for tokens that they did not compute.
        vocabulary: size of the vocabulary; None: unknown.
        slack: largest total error of the returned probabilities of a row.  The tail is widened by
            it: 1e-6 suits logprobs stored in float32.

    Every token that was not returned must be at most as likely as each returned one: leave out a
    sampled token that an engine appends to its top k.

    Raises:
        EvidenceError: shapes differ, or an id is repeated in a row or outside the vocabulary.
    """

    ids_RK: NDArray[np.int64]
    logp_RK: Floats
    vocabulary: int | None = None
    slack: float = 2.0**-48  # of a sum of exponentials in float64

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids_RK", np.asarray(self.ids_RK, dtype=np.int64))
        object.__setattr__(self, "logp_RK", np.asarray(self.logp_RK, dtype=np.float64))
        if self.ids_RK.ndim != 2 or self.ids_RK.shape != self.logp_RK.shape:
            raise EvidenceError(f"{self.ids_RK.shape} top-k ids for {self.logp_RK.shape} logprobs")
        sorted_RK = np.sort(self.ids_RK, axis=-1)
        twice_RK = (sorted_RK[:, 1:] == sorted_RK[:, :-1]) & (sorted_RK[:, 1:] >= 0)
        if twice_RK.any():
            row = int(twice_RK.any(axis=-1).argmax())
            raise EvidenceError(f"row {row} returns a token id twice", hint="keep its first entry")
        top = int(self.ids_RK.max(initial=-1))
        if self.vocabulary is not None and top >= self.vocabulary:
            raise EvidenceError(f"token id {top} in a vocabulary of {self.vocabulary} tokens")

    @cached_property
    def known_RK(self) -> NDArray[np.bool_]:
        return (self.ids_RK >= 0) & ~np.isneginf(self.logp_RK)

    @cached_property
    def p_RK(self) -> Floats:
        """Probabilities; 0 if unknown."""
        return np.where(self.known_RK, np.exp(self.logp_RK), 0.0)

    @cached_property
    def usable_R(self) -> NDArray[np.bool_]:
        """Rows with data that is consistent with a distribution."""
        with np.errstate(over="ignore"):
            fits_R = self.p_RK.sum(axis=-1) <= 1 + _ROUNDING  # False for NaN too
        return fits_R & self.known_RK.any(axis=-1)

    @cached_property
    def tail_R(self) -> Floats:
        """Largest mass of tokens that were not returned; exactly 0 if the whole vocabulary was."""
        whole_R = (self.ids_RK >= 0).sum(axis=-1) == self.vocabulary
        tail_R = np.maximum(1 - self.p_RK.sum(axis=-1), 0.0) + self.slack
        return np.where(whole_R, 0.0, tail_R)

    @cached_property
    def least_R1(self) -> Floats:
        """The smallest returned probability, [R, 1], a bound for all other tokens."""
        return np.where(self.known_RK, self.p_RK, np.inf).min(axis=-1, keepdims=True)


class TopRows:
    """The top-k tokens of both kernels at the same positions, matched by id.

    Raises:
        EvidenceError: the sides have different numbers of rows, or different vocabularies.
    """

    def __init__(self, train: TopK, infer: TopK) -> None:
        if len(train.ids_RK) != len(infer.ids_RK):
            raise EvidenceError(
                f"{len(train.ids_RK)} train rows of top-k for {len(infer.ids_RK)} infer rows"
            )
        if train.vocabulary != infer.vocabulary:
            raise EvidenceError(
                f"a vocabulary of {train.vocabulary} train tokens for {infer.vocabulary} of infer"
            )
        self.train = train
        self.infer = infer

    @cached_property
    def usable_R(self) -> NDArray[np.bool_]:
        return self.train.usable_R & self.infer.usable_R

    @cached_property
    def _at_RK(self) -> NDArray[np.int64]:
        """The index of each of train's tokens in infer's, [R, K of train]; -1 if missing."""
        size = 1 + max(int(side.ids_RK.max(initial=-1)) for side in (self.train, self.infer))
        rows_R1 = np.arange(len(self.train.ids_RK))[:, None] * size
        wanted = np.where(self.train.known_RK, rows_R1 + self.train.ids_RK, -1)
        there = np.where(self.infer.known_RK, rows_R1 + self.infer.ids_RK, -2).ravel()
        order = there.argsort()
        place = np.searchsorted(there, wanted, sorter=order).clip(max=max(len(there) - 1, 0))
        found = order[place]
        return np.where(there[found] == wanted, found % self.infer.ids_RK.shape[1], -1)

    @cached_property
    def shared_RK(self) -> NDArray[np.bool_]:
        """The mask of train's tokens in I."""
        return self._at_RK >= 0

    @cached_property
    def pairs(self) -> Pairs:
        """p and q of the tokens of I, in train's order; no mass elsewhere."""
        infer_RK = np.take_along_axis(self.infer.logp_RK, self._at_RK.clip(min=0), axis=-1)
        train_RK = np.where(self.shared_RK, self.train.logp_RK, -np.inf)
        infer_RK = np.where(self.shared_RK, infer_RK, -np.inf)
        both_RK = np.where(self.shared_RK, self.train.logp_RK - infer_RK, 0.0)
        return Pairs(train_RK, infer_RK, both_RK)

    @cached_property
    def only_train_RK(self) -> Floats:
        """p of the tokens of A; 0 elsewhere."""
        return np.where(self.shared_RK, 0.0, self.train.p_RK)

    @cached_property
    def only_infer_RK(self) -> Floats:
        """q of the tokens of B; 0 elsewhere."""
        shared_RK = np.zeros(self.infer.ids_RK.shape, dtype=bool)
        row_N, at_N = np.nonzero(self.shared_RK)
        shared_RK[row_N, self._at_RK[row_N, at_N]] = True
        return np.where(shared_RK, 0.0, self.infer.p_RK)

    @cached_property
    def unmatched_R(self) -> Floats:
        """p and q of everything outside I, together."""
        known_R = self.only_train_RK.sum(axis=-1) + self.only_infer_RK.sum(axis=-1)
        return known_R + self.train.tail_R + self.infer.tail_R

    @cached_property
    def unnamed_R(self) -> Floats:
        """The number of tokens that neither side returned; inf if the vocabulary is unknown."""
        if self.train.vocabulary is None:
            return np.full(len(self.usable_R), np.inf)
        named_R = self.train.known_RK.sum(axis=-1) + self.infer.known_RK.sum(axis=-1)
        return self.train.vocabulary - (named_R - self.shared_RK.sum(axis=-1)).astype(np.float64)

    @cached_property
    def log_ratios(self) -> tuple[Floats, Floats]:
        """log p/q of the unknown masses, at the least favourable completion: [R, 1] each.

        The first is that of A's tokens, the second that of B's, if the cap of a tail (no token
        above the smallest returned) does not bind.  One completion is least favourable for every
        f-divergence at once, like Huber and Strassen's least favourable pair; both ratios equal
        that of the rest of the vocabulary, unless A and B can absorb the tails.
        """
        tail_p_R, tail_q_R = self.train.tail_R, self.infer.tail_R

        def left_of_infer(log_R1: Floats) -> Floats:
            return tail_q_R - self.hidden_infer(log_R1).sum(axis=-1)

        def left_of_train(log_R1: Floats) -> Floats:
            return tail_p_R - self.hidden_train(log_R1).sum(axis=-1)

        # left_of_infer grows with the ratio, left_of_train falls
        a_R1 = _crossing(lambda r: -left_of_infer(r), len(tail_p_R))
        b_R1 = _crossing(left_of_train, len(tail_p_R))
        meet_R1 = _crossing(
            lambda r: left_of_train(r) - np.exp(r[:, 0]) * left_of_infer(r), len(tail_p_R)
        ).clip(np.minimum(a_R1, b_R1), np.maximum(a_R1, b_R1))
        apart_R1 = b_R1 <= a_R1
        return np.where(apart_R1, a_R1, meet_R1), np.where(apart_R1, b_R1, meet_R1)

    def hidden_infer(self, log_R1: Floats) -> Floats:
        """q of A's tokens at log p/q, never above the smallest that infer returned."""
        return np.minimum(self.only_train_RK * np.exp(-log_R1), self.infer.least_R1)

    def hidden_train(self, log_R1: Floats) -> Floats:
        """p of B's tokens at log p/q, never above the smallest that train returned."""
        return np.minimum(self.only_infer_RK * np.exp(log_R1), self.train.least_R1)


def _crossing(falling: Callable[[Floats], Floats], n: int) -> Floats:
    """The zero crossing of a function of a log ratio, from positive, by bisection, [n, 1]."""
    low, high = np.full((n, 1), -_FARTHEST), np.full((n, 1), _FARTHEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = falling(middle)[:, None] > 0
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return (low + high) / 2
