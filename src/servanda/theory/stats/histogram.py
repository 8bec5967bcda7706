# Binned: log ratios counted in fixed bins, and certificates from the counts alone.
#
# A bin is the sign, the exponent and nine bits of the significand of a log ratio, so it is computed
# by a shift.  A token is then counted twice: at the largest value of its bin as evidence that a
# mean is low, at the smallest as evidence that it is high.  Both e-processes are below the exact
# ones, so the bounds stay valid and are slightly wider; see docs/explanation/binning.md.
#
# Axes: N tokens, K bins, S slices, G runs of neighbouring bins, J components of a mixture.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.errors import EvidenceError
from servanda.theory.stats.bets import NEG, POS, Floats
from servanda.theory.stats.log_moment import SCALE, LogMoment

Array = NDArray[Any]
Ints = NDArray[np.int64]

# Never change: counts of one version are added to those of another.
SIGNIFICAND_BITS = 9
SMALLEST, LARGEST = 2.0**-24, 2.0**7  # nats; smaller and larger magnitudes have one bin each
_SIDE = 2 + (math.frexp(LARGEST)[1] - math.frexp(SMALLEST)[1]) * 2**SIGNIFICAND_BITS

BINS: int = 2 * _SIDE + 1  # in ascending order; the middle one contains only 0
ZERO: int = _SIDE
_RUN = 32  # neighbouring bins that are summed first
_EPS = float(np.finfo(np.float64).eps)
_HAIR = 1e-9


@dataclass(frozen=True)
class _Format:
    """The computation of a bin from the bits of a float."""

    whole: type[np.signedinteger]
    bits: int

    @classmethod
    def of(cls, dtype: np.dtype[Any]) -> _Format:
        return cls(np.int32, 32) if dtype == np.float32 else cls(np.int64, 64)

    @cached_property
    def shift(self) -> int:
        return {32: 23, 64: 52}[self.bits] - SIGNIFICAND_BITS

    def of_value(self, value: float) -> int:
        """The bits of a value."""
        real = np.float32 if self.bits == 32 else np.float64
        return int(real(value).view(self.whole))

    @property
    def base(self) -> int:
        """The shifted bits of the smallest magnitudes, minus 1."""
        return (self.of_value(SMALLEST) >> self.shift) - 1


def bin_of(log_ratio_N: ArrayLike) -> NDArray[np.signedinteger]:
    """The bin of each log ratio, [N], in 0..BINS - 1; BINS for NaN or +inf.

    A bin contains its end that is further from 0, so 0 has its own bin and -inf is in bin 0.
    float32 stays float32; other types are computed in float64.

    >>> (bin_of([-np.inf, 0.0, np.nan]) - ZERO).tolist()
    [-15874, 0, 15875]
    """
    x_N = np.asarray(log_ratio_N)
    x_N = np.ascontiguousarray(x_N, dtype=None if x_N.dtype == np.float32 else np.float64)
    form = _Format.of(x_N.dtype)
    bits_N = x_N.view(form.whole)
    far = form.of_value(LARGEST) + 1
    bin_N = bits_N & np.iinfo(form.whole).max
    some_N = np.minimum(bin_N, 1)  # 0 stays 0, and values near 0 are in bin 1
    np.minimum(bin_N, far, out=bin_N)
    lost = bool(bin_N.size) and int(bin_N.max()) == far
    bin_N += (1 << form.shift) - 1  # upwards, so that the far end belongs to the bin
    bin_N >>= form.shift
    bin_N -= form.base
    np.maximum(bin_N, some_N, out=bin_N)
    sign_N = np.right_shift(bits_N, form.bits - 1, out=some_N)  # 0 or -1
    bin_N ^= sign_N
    bin_N -= sign_N
    bin_N += ZERO
    if lost:
        bin_N[np.isnan(x_N) | np.isposinf(x_N)] = BINS
    return bin_N


def edges() -> tuple[Floats, Floats]:
    """The closed interval of log ratios of each bin, (least_K, most_K), nats.

    float32 logprobs are subtracted in float32, which may round a difference down to the end of a
    bin from half a unit above it: so the far end is the next float32 further out. Neighbours
    overlap by this amount.  The last bin ends at the largest float.
    """
    form = _Format.of(np.dtype(np.float64))
    # the far end of each bin above 0 except the last, ascending
    far = ((np.arange(1, _SIDE, dtype=np.int64) + form.base) << form.shift).view(np.float64)
    near_P = np.r_[0.0, far]
    outward = np.nextafter(far.astype(np.float32), np.float32(np.inf)).astype(np.float64)
    far_P = np.r_[outward, np.inf]
    least_K = np.r_[-far_P[::-1], 0.0, near_P]
    most_K = np.r_[-near_P[::-1], 0.0, far_P]
    most_K[-1] = np.finfo(np.float64).max
    return least_K, most_K


def ends(values: Callable[[Floats], Array], bends: Sequence[float] = ()) -> tuple[Floats, Floats]:
    """The smallest and the largest value of a function over each bin, (least_K, most_K).

    Args:
        values: function of log ratios [N], nats, including -inf, to values [N], possibly infinite.
        bends: log ratios, nats, between which the function is monotone and continuous; 0 is
            implied.  The function is evaluated on both sides of each.

    Returns:
        Wider than the function's own extremes by the rounding error, 16 units in the last place of
        the larger of it and 1; exact in the bin of 0.

    Raises:
        ValueError: the function is NaN somewhere.
    """
    low_K, high_K = edges()
    at_low, at_high = _known(values, low_K), _known(values, high_K)
    least_K, most_K = np.minimum(at_low, at_high), np.maximum(at_low, at_high)
    for bend in bends:
        beside = 8 * _EPS * max(1.0, abs(bend))
        inside_K = (low_K - beside <= bend) & (bend <= high_K + beside)
        at = _known(values, np.array([bend - beside, bend, bend + beside]))
        least_K[inside_K] = np.minimum(least_K[inside_K], at.min())
        most_K[inside_K] = np.maximum(most_K[inside_K], at.max())
    apart_K = np.arange(BINS) != ZERO
    with np.errstate(over="ignore"):  # the last bin ends at the largest float
        for end_K, way in ((least_K, -16 * _EPS), (most_K, 16 * _EPS)):
            moved_K = apart_K & np.isfinite(end_K)
            end_K[moved_K] += way * np.maximum(1.0, np.abs(end_K[moved_K]))
    return least_K, most_K


def _known(values: Callable[[Floats], Array], at_N: Floats) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):
        found_N = np.asarray(values(at_N), dtype=np.float64)
    if np.isnan(found_N).any():
        raise ValueError(
            f"the function has no value at a log ratio of {at_N[np.isnan(found_N)][0]}"
        )
    return found_N


class Binned:
    """A function with values in [0, 1] on the bins, and its certificates from counts.

    Args:
        least_K, most_K: results of `ends`; rounding outside [0, 1] is clipped.

    Raises:
        EvidenceError: a bin has values outside [0, 1].
    """

    def __init__(self, least_K: Floats, most_K: Floats) -> None:
        self._least = _Spread(_unit(least_K), POS)
        self._most = _Spread(_unit(most_K), NEG)

    def moments(self, count_SK: ArrayLike, missing_S: Sequence[int]) -> list[LogMoment]:
        """The statistics of each row of counts.

        `below` takes each unit at the largest value of its bin, `above` at the smallest; then both
        are reduced again, by chords.  So neither exceeds LogMoment.of for the same units, up to
        rounding.  `total` takes the middle of the bin: its error is at most half of the sum of
        (most - least).

        Args:
            count_SK: units in each bin, [S, BINS].
            missing_S: units without a value.
        """
        count_SGR = _runs(np.atleast_2d(np.asarray(count_SK)))
        n_SG = count_SGR @ np.ones(_RUN)
        above_SJ, least_S = self._least.logs(count_SGR, n_SG)
        below_SJ, most_S = self._most.logs(count_SGR, n_SG)
        n_S = n_SG.sum(axis=-1)
        moments = []
        for s, missing in enumerate(missing_S):
            below_J = below_SJ[s] + missing * np.log1p(NEG)
            moments.append(
                LogMoment(
                    n=int(n_S[s]) + missing,
                    below=tuple(math.floor(v * SCALE) for v in below_J.tolist()),
                    above=tuple(math.floor(v * SCALE) for v in above_SJ[s].tolist()),
                    total=float(least_S[s] + most_S[s]) / 2,
                    missing=missing,
                )
            )
        return moments


def moment(count_K: ArrayLike, least_K: Floats, most_K: Floats, missing: int = 0) -> LogMoment:
    """The statistics of one histogram; see `Binned.moments` for many."""
    return Binned(least_K, most_K).moments(np.atleast_2d(count_K), [missing])[0]


class _Spread:
    """sum log1p(theta x) over counted bins, from below, run by run.

    A logarithm is concave, so over the bins of one run it is above its chord: the number of units
    and the sum of their x give a lower bound, with 1/32 of the logarithms.
    """

    def __init__(self, x_K: Floats, theta_J: Floats) -> None:
        self._x_GR = _runs(np.atleast_2d(x_K), fill=x_K[-1])[0]
        self._first_G, last_G = self._x_GR.min(axis=-1), self._x_GR.max(axis=-1)
        width_G = last_G - self._first_G
        self._per_width_G = np.divide(1.0, width_G, out=np.zeros_like(width_G), where=width_G > 0)
        at_first_GJ = np.log1p(self._first_G[:, None] * theta_J)
        self._log_2GJ = np.vstack([at_first_GJ, np.log1p(last_G[:, None] * theta_J) - at_first_GJ])

    def logs(self, count_SGR: Floats, n_SG: Floats) -> tuple[Floats, Floats]:
        """(the sum of logarithms [S, J], the sum of x [S])."""
        total_SG = np.einsum("sgr,gr->sg", count_SGR, self._x_GR)
        risen_SG = (total_SG - n_SG * self._first_G) * self._per_width_G
        # rounding outside the range would be extrapolated
        risen_SG = np.minimum(np.maximum(risen_SG, 0.0), n_SG)
        return np.hstack([n_SG, risen_SG]) @ self._log_2GJ, total_SG.sum(axis=-1)


def _runs(values_SK: Array, fill: float = 0.0) -> Floats:
    """[S, G, R], the last run padded."""
    size, bins = values_SK.shape
    if bins != BINS:
        raise EvidenceError(f"{bins} counts for {BINS} bins")
    padded = np.empty((size, -(-BINS // _RUN) * _RUN))
    padded[:, :BINS] = values_SK
    padded[:, BINS:] = fill
    return padded.reshape(size, -1, _RUN)


def _unit(x_K: Floats) -> Floats:
    x_K = np.asarray(x_K, dtype=np.float64)
    if not (x_K.min() >= -_HAIR and x_K.max() <= 1.0 + _HAIR):
        bad = x_K[~((x_K >= -_HAIR) & (x_K <= 1.0 + _HAIR))][0]
        raise EvidenceError(f"a certified value must lie in [0, 1], found {bad}")
    return np.clip(x_K, 0.0, 1.0)
