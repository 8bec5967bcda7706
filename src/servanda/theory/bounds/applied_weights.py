# Applied weights: the factor that a loss gave to each token, against the declared weighting.
#
# A trainer computes psi(w) with its own rounding, so the declared weight of a token is an interval:
# psi over every w that its two recorded logprobs can stand for, widened by the precision in which
# the applied weights are recorded.  Outside it, the loss used another weight.
#
# Axes: N trained tokens; S sequences.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from servanda.theory.bounds.importance_weights import Psi
from servanda.theory.bounds.theorem import Floats
from servanda.theory.divergence.precision import CAPTURES, captured, errors

Flags = NDArray[np.bool_]

_ROUNDINGS = 4  # of the ratio, its exponential (one unit is two), and the cap
_COARSEST, _FINEST = "bfloat16", "float32"  # precisions in which losses compute weights
_ENOUGH = 16  # fewest different weights that show the number of decimals of a record
_DIGITS, _WRITTEN = 6, 1e-9  # decimals in which weights may be written, and the tolerance
_LOOKED_AT = 1 << 15  # tokens whose weights are compared with every known weighting
_LARGEST = 700.0  # nats: exp of more exceeds float64

BASES = {
    "token": "the token's own w",
    "sequence": "the product of w over the sequence",
    "mean": "the geometric mean of w over the sequence",
    "next": "w of the next token: shifted by one",
    "previous": "w of the previous token: shifted by one",
    "inverse": "1 / w: infer over train",
}
SHAPES = ("is", "tis", "clip", "mis", "reject")
ONES = ("ones", "")  # a weighting without a ratio
SCALED = ("declared", "scaled")  # the declared one, times a constant


@dataclass(frozen=True)
class Applied:
    """What the loss did with some trained tokens; NaN where it is not recorded.

    Args:
        log_ratio_N: log p - log q, nats; -inf where train gives no mass, NaN if unusable.
        error_N: rounding error bound of each log ratio, nats.
        factor_N: the weight times the mask; NaN where only the mask is known to be 1, too.
        kept_N: 1 if the factor is above 0, 0 if it is 0, NaN if neither is known.
        sequence_N: sequence of each token, ascending.
        weighed: whether weights are recorded, and not the mask alone.
    """

    log_ratio_N: Floats
    error_N: Floats
    factor_N: Floats
    kept_N: Floats
    sequence_N: NDArray[np.int64]
    weighed: bool = True

    @classmethod
    def of(
        cls,
        log_ratio_N: Floats,
        error_N: Floats,
        weight_N: Floats | None,
        mask_N: Floats | None,
        sequence_N: NDArray[np.int64],
    ) -> Applied:
        """From the recorded weights and mask of the loss, each of which may be missing.

        A token that the mask drops has the factor 0, whatever its weight.

        >>> one, zero = np.ones(3), np.zeros(3)
        >>> own = Applied.of(zero, zero, np.array([0.5, 2, 0]), np.array([1.0, 0, 1]), one)
        >>> own.factor_N.tolist(), own.kept_N.tolist()
        ([0.5, 0.0, 0.0], [1.0, 0.0, 0.0])
        """
        size = len(log_ratio_N)
        weight = np.full(size, np.nan) if weight_N is None else weight_N.astype(np.float64)
        mask = np.ones(size) if mask_N is None else mask_N.astype(np.float64)
        factor_N = np.where(mask == 0, 0.0, np.where(np.isnan(mask), np.nan, weight))
        kept_N = np.where(np.isnan(factor_N), np.nan, (factor_N != 0) * 1.0)
        if weight_N is None and mask_N is not None:
            kept_N = np.where(mask == 1, 1.0, kept_N)
        return cls(log_ratio_N, error_N, factor_N, kept_N, sequence_N, weight_N is not None)

    @property
    def relative(self) -> tuple[float, float]:
        """Rounding of the applied weights: a share of each, and a number for all."""
        return precision(self.factor_N)


def precision(factor_N: Floats) -> tuple[float, float]:
    """The rounding error of recorded weights: relative, and absolute.

    The coarsest format that represents them, never finer than float32.  0, 1, and the smallest and
    largest weights are exact in every format and show nothing; without others it is bfloat16.

    >>> precision(np.array([1.0, 2.0, 0.0]))
    (0.00390625, 0.0)
    """
    known = factor_N[np.isfinite(factor_N) & (factor_N != 0) & (factor_N != 1)]
    if len(known):
        known = np.unique(known[(known > known.min()) & (known < known.max())])
    if not len(known):
        return 2.0 ** -CAPTURES[_COARSEST], 0.0
    unit = 2.0 ** -min(CAPTURES[captured(known)], CAPTURES[_FINEST])
    for digits in range(1, _DIGITS + 1) if len(known) >= _ENOUGH else ():
        if (np.abs(known - np.round(known, digits)) <= _WRITTEN).all():
            return unit, 0.5 * 10.0**-digits
    return unit, 0.0


def ends(log_weight_N: Floats, error_N: Floats, unit: float, psi: Psi) -> tuple[Floats, Floats]:
    """The smallest and largest psi(w) that rounding can make of each w, [N] each.

    Args:
        log_weight_N: log w, nats; -inf for a weight of 0.
        error_N: its error bound, nats; unit: relative rounding of each operation.
    """
    log_weight_N = np.clip(log_weight_N, -np.inf, _LARGEST)
    more_N = error_N + unit * np.where(np.isfinite(log_weight_N), np.abs(log_weight_N), 0.0)
    more_N = more_N + _ROUNDINGS * unit
    with np.errstate(over="ignore"):
        low_N, high_N = np.exp(log_weight_N - more_N), np.exp(log_weight_N + more_N)
    values = [psi.weight(low_N), psi.weight(high_N)]
    for bend in psi.bends:
        inside_N = (low_N <= bend) & (bend <= high_N)
        for at in (np.nextafter(bend, 0.0), bend, np.nextafter(bend, np.inf)):
            values.append(np.where(inside_N, psi.weight(np.array([at]))[0], values[0]))
    return np.minimum.reduce(values), np.maximum.reduce(values)


def _within(factor_N: Floats, low_N: Floats, high_N: Floats, own: tuple[float, float]) -> Flags:
    unit, written = own
    slack = 1 + _ROUNDINGS * unit
    return (factor_N >= low_N / slack - written) & (factor_N <= high_N * slack + written)


def _equal(factor_N: Floats, number: float, own: tuple[float, float]) -> Flags:
    return _within(factor_N, np.full(1, number), np.full(1, number), own)


def differing(of: Applied, psi: Psi) -> tuple[Flags, Flags]:
    """The tokens whose applied weight can be compared, and those where it is not the declared one.

    Where only the mask is recorded, whether the token was kept is compared.

    Returns:
        (compared, differing), [N] each.

    >>> from servanda.theory.bounds.importance_weights import PSI
    >>> log_ratio, error = np.log([0.5, 1.0, 4.0]), np.zeros(3)
    >>> applied = np.array([0.5, 1.0, 4.0])
    >>> own = Applied.of(log_ratio, error, applied, None, np.zeros(3, int))
    >>> differing(own, PSI["tis"](2.0))[1].tolist()
    [False, False, True]
    """
    known_N = ~np.isnan(of.log_ratio_N) & ~np.isnan(of.kept_N)
    low_N, high_N = ends(of.log_ratio_N, of.error_N, of.relative[0], psi)
    exact_N = known_N & ~np.isnan(of.factor_N)
    wrong_N = exact_N & ~_within(of.factor_N, low_N, high_N, of.relative)
    wrong_N |= known_N & ~exact_N & (high_N == 0)
    return known_N, wrong_N


@dataclass(frozen=True)
class Fits:
    """How many tokens each known weighting explains; `+` adds disjoint ones.

    Args:
        n: tokens with a weight and a ratio.
        explained: (base, shape) -> tokens whose applied weight it gives, and tokens for which it
            gives one.
        least, most: smallest weight above 0, and largest.
    """

    n: int = 0
    explained: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    least: float = np.inf
    most: float = 0.0

    def __add__(self, other: Fits) -> Fits:
        if not self.n or not other.n:
            return self if self.n else other
        both = {
            key: (n + other.explained[key][0], told + other.explained[key][1])
            for key, (n, told) in self.explained.items()
        }
        return Fits(
            self.n + other.n,
            both,
            min(self.least, other.least),
            max(self.most, other.most),
        )

    def best(self, least: float) -> str:
        """The simplest weighting that explains at least this share; "" if none does.

        A weighting that gives most tokens no weight explains nothing.
        """
        for (base, shape), (n, told) in self.explained.items():
            if 2 * told > self.n and n >= least * told:
                return self._words(base, shape)
        return ""

    def _words(self, base: str, shape: str) -> str:
        if (base, shape) == ONES:
            return "all 1: no correction was applied"
        if (base, shape) == SCALED:
            return "the declared weights, all times one constant"
        of = {
            "is": "as it is",
            "tis": f"at most {self.most:g}",
            "clip": f"cut to [{self.least:g}, {self.most:g}]",
            "mis": f"and 0 outside a band that contains [{self.least:g}, {self.most:g}]",
            "reject": "1 inside a band, and 0 outside",
        }[shape]
        return f"{BASES[base]}, {of}"


def fits(of: Applied, psi: Psi) -> Fits:
    """Which weightings give the applied weights, simplest first.

    Only the first sequences are examined, up to 32,768 tokens, and at least one sequence.
    """
    known_N = ~np.isnan(of.log_ratio_N) & np.isfinite(of.factor_N)
    if len(known_N) > _LOOKED_AT:
        first, last = of.sequence_N[0], of.sequence_N[_LOOKED_AT]
        known_N &= (of.sequence_N < last) | (of.sequence_N == first)
    if not known_N.any():
        return Fits()
    factor_N, own = of.factor_N[known_N], of.relative
    positive = factor_N[factor_N > 0]
    least, most = float(positive.min(initial=np.inf)), float(positive.max(initial=0.0))
    n = int(known_N.sum())
    explained: dict[tuple[str, str], tuple[int, int]] = {}
    explained[ONES] = int(_equal(factor_N, 1.0, own).sum()), n
    for base, log_N, error_N in _bases(of, known_N):
        told_N = ~np.isnan(log_N)
        of_told = factor_N[told_N], log_N[told_N], error_N[told_N]
        for shape, fits_N in _shapes(*of_told, own, (least, most)):
            explained[base, shape] = int(fits_N.sum()), int(told_N.sum())
    explained[SCALED] = _scaled(of, known_N, psi), n
    return Fits(n, explained, least, most)


def _bases(of: Applied, known_N: Flags) -> Iterator[tuple[str, Floats, Floats]]:
    """Each base as log weights and their errors; NaN where a token has none."""
    log_K, error_K, sequence_K = (
        of.log_ratio_N[known_N],
        of.error_N[known_N],
        of.sequence_N[known_N],
    )
    yield "token", log_K, error_K
    _, row_K = np.unique(sequence_K, return_inverse=True)
    n_K = np.bincount(row_K).astype(np.float64)[row_K]
    sum_K = _summed(row_K, np.maximum(log_K, -_LARGEST))
    # each partial sum is rounded
    unit = of.relative[0] * np.sqrt(n_K)
    sum_error_K = _summed(row_K, error_K) + unit * _summed(
        row_K, np.minimum(np.abs(log_K), _LARGEST)
    )
    yield "sequence", sum_K, sum_error_K
    yield "mean", sum_K / n_K, sum_error_K / n_K
    for name, by in (("next", -1), ("previous", 1)):
        same_K = np.roll(sequence_K, by) == sequence_K
        same_K[-1 if by < 0 else 0] = False
        yield name, np.where(same_K, np.roll(log_K, by), np.nan), np.roll(error_K, by)
    yield "inverse", -log_K, error_K


def _summed(row_K: NDArray[np.int64], value_K: Floats) -> Floats:
    """The sum over the sequence of each token, [K]."""
    return np.bincount(row_K, value_K).astype(np.float64)[row_K]


def _shapes(
    factor_N: Floats,
    log_N: Floats,
    error_N: Floats,
    own: tuple[float, float],
    band: tuple[float, float],
) -> Iterator[tuple[str, Flags]]:
    """Each shape of a base, and the tokens that it explains, [N]."""
    least, most = band
    identity = Psi("is", lambda w_N: w_N, np.inf, (-np.inf, 1.0))
    low_N, high_N = ends(log_N, error_N, own[0], identity)
    is_N = _within(factor_N, low_N, high_N, own)
    capped_N = _equal(factor_N, most, own) & (high_N >= most)
    raised_N = _equal(factor_N, least, own) & (low_N <= least)
    kept_N = factor_N > 0
    # every weight is outside if none was kept
    first, last = low_N[kept_N].min(initial=np.inf), high_N[kept_N].max(initial=0.0)
    outside_N = ~kept_N & ((low_N <= first) | (high_N >= last))
    yield "is", is_N
    yield "tis", is_N | capped_N
    yield "clip", is_N | capped_N | raised_N
    yield "mis", (is_N & kept_N) | outside_N
    yield "reject", (kept_N & _equal(factor_N, 1.0, own)) | outside_N


def _scaled(of: Applied, known_N: Flags, psi: Psi) -> int:
    """The tokens whose weight is the declared one times their common factor."""
    low_N, high_N = ends(of.log_ratio_N, of.error_N, of.relative[0], psi)
    told_N = known_N & (low_N > 0) & (of.factor_N > 0)
    if not told_N.any():
        return 0
    declared_K = np.sqrt(low_N[told_N] * high_N[told_N])
    factor = float(np.median(of.factor_N[told_N] / declared_K))
    fits_N = _within(of.factor_N, factor * low_N, factor * high_N, of.relative)
    return int((fits_N & known_N).sum())


def error_of(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """The rounding error bound of log ratios of recorded logprobs, [N], nats."""
    return sum((errors(of, captured(of)) for of in (logp_train_N, logp_infer_N)), np.zeros(1))
