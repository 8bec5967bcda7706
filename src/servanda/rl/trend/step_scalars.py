# The numbers of one step that are followed over a run, from the bins of its log ratios.
#
# Sums and counts, so that ranks and blocks add up.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.theory.stats.histogram import SIGNIFICAND_BITS, SMALLEST, ZERO, edges

Array = NDArray[Any]

PREFIX = "servanda/"  # of the metrics of a step
COVERAGE, K3 = "coverage", "k3_nats"
MEAN, P99 = "abs_log_ratio_nats", "abs_log_ratio_p99_nats"
_TAIL = 0.99
_PER_OCTAVE = 16  # magnitudes of |log ratio| per factor of 2, which is their resolution


@dataclass(frozen=True)
class StepScalars:
    """The sums of one step.

    Args:
        usable, lost: trained tokens with and without a log ratio.
        k3, drift: sums of k3 and of |log ratio|, nats; inf with a token without mass.
        magnitudes: index of a magnitude of |log ratio| -> tokens; 0 is equality.
    """

    usable: int = 0
    lost: int = 0
    k3: float = 0.0
    drift: float = 0.0
    magnitudes: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, count_K: Array, lost: int) -> StepScalars:
        """From counts of tokens by the bin of their log ratio, [BINS]."""
        used = np.flatnonzero(count_K)
        ratio_U, magnitude_U = (of_K[used] for of_K in _bins())
        n_U = count_K[used]
        with np.errstate(over="ignore"):
            k3_U = np.expm1(ratio_U) - ratio_U
        size_M = np.bincount(magnitude_U, n_U)
        of_M = np.flatnonzero(size_M)
        counts = dict(zip(of_M.tolist(), size_M[of_M].astype(int).tolist(), strict=True))
        k3, drift = (float(x_U @ n_U) if len(used) else 0.0 for x_U in (k3_U, np.abs(ratio_U)))
        return cls(int(n_U.sum()), lost, k3, drift, counts)

    def __add__(self, other: StepScalars) -> StepScalars:
        counts = dict(self.magnitudes)
        for magnitude, n in other.magnitudes.items():
            counts[magnitude] = counts.get(magnitude, 0) + n
        return StepScalars(
            self.usable + other.usable,
            self.lost + other.lost,
            self.k3 + other.k3,
            self.drift + other.drift,
            counts,
        )

    @property
    def values(self) -> dict[str, float]:
        """Name -> number; one that the step does not have is absent."""
        tokens = self.usable + self.lost
        values = {COVERAGE: self.usable / tokens} if tokens else {}
        if self.usable:
            values |= {K3: self.k3 / self.usable, MEAN: self.drift / self.usable}
            values[P99] = self._quantile(_TAIL)
        return values

    def _quantile(self, share: float) -> float:
        """A quantile of |log ratio|, nats: the upper end of its magnitude."""
        below, need = 0, math.ceil(share * self.usable)
        for magnitude, n in sorted(self.magnitudes.items()):
            below += n
            if below >= need:
                return _upper_end(magnitude)
        raise AssertionError("counts and tokens differ")


@cache
def _bins() -> tuple[Array, Array]:
    """The log ratio of each bin, nats, and its magnitude; -inf is in the first bin."""
    least_K, most_K = edges()
    ratio_K = least_K / 2 + most_K / 2
    ratio_K[ZERO] = 0.0
    step = 2**SIGNIFICAND_BITS // _PER_OCTAVE
    apart_K = np.abs(np.arange(len(ratio_K)) - ZERO)
    return ratio_K, np.where(apart_K > 0, 1 - (1 - apart_K) // step, 0)


def _upper_end(magnitude: int) -> float:
    """The largest |log ratio| of a magnitude, nats: within an octave they are equally wide."""
    octave, part = divmod(magnitude - 1, _PER_OCTAVE)
    return SMALLEST * 2.0**octave * (1 + part / _PER_OCTAVE) if magnitude else 0.0


def scalars_of(metrics: Mapping[str, object]) -> dict[str, float]:
    """The numbers of a step's metrics, under their names without the prefix."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
        if name.startswith(PREFIX) and not math.isnan(number):
            found[name.removeprefix(PREFIX)] = number
    return found
