# Agreement: whether the two logprobs of a token could have differed, and whether they did.
#
# Two programs that evaluate one policy round differently.  Two bitwise equal columns are one
# column: copied, or from one program.  Equality is informative only if it is unlikely by chance: on
# tokens of which neither side is nearly certain.
#
# Logprobs stored with few digits coincide by chance.  Then those that differ are one step of the
# storage format apart, and besides completely equal sequences there are others that are equal
# except a few tokens.  Copies have neither property.
#
# Axes: S sequences, N tokens of all sequences, concatenated.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.theory.divergence.precision import CAPTURES, captured, errors

Array = NDArray[Any]

INFORMATIVE = 0.95  # largest probability of an informative token: beyond it rounding coincides
ENOUGH = 16  # fewest informative tokens for a conclusion
MIXED = 0.01  # share of sequences: more identical ones among others are copies
ROUNDING_NATS = 5e-6  # mean |log ratio|: float32 kernels of one program; bfloat16 gives 1e-3
_CLOSE, _LONG = 0.5, 8  # share of a sequence's tokens that are equal, and fewest tokens
_STEPS = 1.5  # steps of the storage format: rounded neighbours are one apart
_CHANCE = 1e-6  # probability that any sequence is identical by chance
_COINCIDENCE = 0.01  # smallest assumed share of tokens that coincide by chance
_FIRST, _FAR = 16, 100  # sequences that are examined first; multiple of rounding that counts as far
_DIGITS, _WRITTEN = 6, 1e-9  # decimals in which a logprob may be stored, and the tolerance
_FEW = 0.1  # nearly equal sequences per equal one
_BINS = 24  # identical sequences by the octave of their informative tokens
_LIMIT_NATS = math.log(INFORMATIVE)


@dataclass(frozen=True)
class Agreement:
    """Counts over tokens that could have differed; `+` adds disjoint ones.

    Args:
        tokens: informative tokens; equal: those with the same bits on both sides.
        sequences: sequences with an informative token.
        identical: completely equal sequences, by octaves of their tokens.
        identical_tokens: informative tokens in them.
        distance: sum of finite |log ratio| over the informative tokens, nats.
        close: sequences of which most, but not all, tokens are equal.
        differing: informative tokens of these that are not equal; apart: of these, the ones not
            explained by rounding to the storage format.
    """

    tokens: int = 0
    equal: int = 0
    sequences: int = 0
    identical: tuple[int, ...] = (0,) * _BINS
    identical_tokens: int = 0
    distance: float = 0.0
    close: int = 0
    differing: int = 0
    apart: int = 0

    @classmethod
    def of(cls, logp_train_N: Array, logp_infer_N: Array, length_S: Array) -> Agreement:
        """From the judged tokens of some sequences, nats; NaN if missing.

        >>> Agreement.of(np.log([0.5, 0.2]), np.log([0.5, 0.3]), np.array([2])).equal
        1
        """
        with np.errstate(invalid="ignore"):
            told_N = (np.minimum(logp_train_N, logp_infer_N) < _LIMIT_NATS) & np.isfinite(
                logp_infer_N
            )
            told_N &= ~np.isnan(logp_train_N) & (logp_train_N < np.inf)
            distance_N = np.abs(logp_train_N - logp_infer_N)[told_N]
        if not len(distance_N):
            return cls()
        sequence_N = np.repeat(np.arange(len(length_S)), length_S)[told_N]
        n_S = np.bincount(sequence_N, minlength=len(length_S))
        equal_S = np.bincount(sequence_N[distance_N == 0], minlength=len(length_S))
        same_S = n_S[(n_S > 0) & (equal_S == n_S)]
        close_S = (n_S >= _LONG) & (equal_S >= _CLOSE * n_S) & (equal_S < n_S)
        differ_N = close_S[sequence_N] & (distance_N > 0)
        apart = 0
        if differ_N.any():
            step_N = np.minimum(*(_step(of_N[told_N]) for of_N in (logp_train_N, logp_infer_N)))
            apart = int((distance_N > _STEPS * step_N)[differ_N].sum())
        octave_S = np.minimum(np.frexp(same_S)[1] - 1, _BINS - 1)
        return cls(
            len(distance_N),
            int(equal_S.sum()),
            int(np.count_nonzero(n_S)),
            tuple(np.bincount(octave_S, minlength=_BINS).tolist()),
            int(same_S.sum()),
            float(distance_N[np.isfinite(distance_N)].sum(dtype=np.float64)),
            int(close_S.sum()),
            int(differ_N.sum()),
            apart,
        )

    @classmethod
    def of_rows(cls, logp_train_BT: Array, logp_infer_BT: Array, mask_BT: Array) -> Agreement:
        """From padded sequences, [B, T], in a few passes.

        If no sequence seems copied, even partly, and the first ones differ by far more than
        rounding, the distance is not summed over all: the mean of the first ones is used.
        """
        distant = cls.of_distant(logp_train_BT, logp_infer_BT, mask_BT)
        if distant is not None:
            return distant
        logp = (logp_train_BT[mask_BT], logp_infer_BT[mask_BT])
        return cls.of(*logp, np.count_nonzero(mask_BT, axis=1))

    @classmethod
    def of_distant(cls, logp_train_BT: Any, logp_infer_BT: Any, mask_BT: Any) -> Agreement | None:
        """From many sequences that differ by far more than rounding; None if they do not.

        Args:
            logp_train_BT, logp_infer_BT, mask_BT: NumPy's or torch's, [B, T].
        """
        with np.errstate(invalid="ignore"):
            # NaN and -inf of infer compare false; tokens on which only train is unsure are not
            # counted
            told_BT = mask_BT & (logp_infer_BT < _LIMIT_NATS) & (logp_infer_BT > -np.inf)
            equal_BT = logp_train_BT == logp_infer_BT
            equal_BT &= told_BT
            n_B, equal_B = (of.sum(axis=1) for of in (told_BT, equal_BT))
            first = told_BT[:_FIRST] & ~equal_BT[:_FIRST]
            moved = abs(logp_train_BT[:_FIRST] - logp_infer_BT[:_FIRST])[first]
        moved = moved[moved < np.inf]
        wide = moved.double() if hasattr(moved, "double") else moved.astype(np.float64)
        mean = float(wide.mean()) if len(moved) else 0.0
        like = ((equal_B >= _CLOSE * n_B) & (n_B >= _LONG)) | ((equal_B == n_B) & (n_B > 0))
        if len(n_B) <= _FIRST or mean <= _FAR * ROUNDING_NATS or like.any():
            return None
        tokens, equal = int(n_B.sum()), int(equal_B.sum())
        return cls(tokens, equal, int((n_B > 0).sum()), distance=mean * (tokens - equal))

    def __add__(self, other: Agreement) -> Agreement:
        mine, theirs = vars(self), vars(other)
        sums = {name: mine[name] + theirs[name] for name in mine if name != "identical"}
        pairs = zip(self.identical, other.identical, strict=True)
        return Agreement(identical=tuple(a + b for a, b in pairs), **sums)

    @property
    def everywhere(self) -> bool:
        """Whether every token that could have differed is bitwise equal."""
        return 0 < self.tokens == self.equal

    @property
    def copies(self) -> int:
        """Identical sequences, among others, that are too long to be identical by chance.

        The probability is estimated from the sequences that differ: two similar kernels with
        logprobs stored in bfloat16 coincide on most of their tokens.
        """
        others = self.tokens - self.identical_tokens
        if not others:
            return sum(self.identical)
        share = (self.equal - self.identical_tokens) / others
        least = math.log(_CHANCE) / math.log(min(max(share, _COINCIDENCE), 1 - 1e-9))
        return sum(n for octave, n in enumerate(self.identical) if 2**octave >= least)

    @property
    def mixed(self) -> bool:
        """Whether there are copies among sequences that differ by more than rounding.

        If equality comes by chance, more than a few sequences differ at a few tokens.
        """
        among = not self.everywhere and self.copies > max(1, MIXED * self.sequences)
        return among and self.close <= _FEW * self.copies and not self.one_program

    @property
    def mostly(self) -> bool:
        """Whether sequences are equal except tokens that differ by more than rounding."""
        many = self.close > max(1, MIXED * self.sequences)
        return many and 2 * self.apart > self.differing and not self.one_program

    @property
    def one_program(self) -> bool:
        """Whether all differences are within float32 rounding."""
        differing = self.tokens - self.equal
        return (
            differing > 0 and self.tokens >= ENOUGH and (self.distance <= ROUNDING_NATS * differing)
        )

    @property
    def mean_distance(self) -> float:
        """Mean |log ratio| over the tokens that differ, nats; NaN if none does."""
        differing = self.tokens - self.equal
        return self.distance / differing if differing else math.nan


def _step(logp_N: Array) -> Array:
    """The step from a recorded logprob to its neighbour in the storage format, nats, [N]."""
    capture = captured(logp_N)
    known_K = logp_N[np.isfinite(logp_N)]
    # decimals may be stored in float32; values of coarser formats are near some decimals, too
    fine = CAPTURES[capture] >= CAPTURES["float32"]
    held_K = np.maximum(errors(known_K, capture), _WRITTEN) if fine else _WRITTEN
    for digits in range(1, _DIGITS + 1):
        if (np.abs(known_K - np.round(known_K, digits)) <= held_K).all():
            return np.full(len(logp_N), 10.0**-digits)
    return 2 * errors(logp_N, capture)
