# A slope with an interval that is valid at every evaluation, from independent units.
#
# Model: in unit u, y = s x + noise over its values, and the sum z_u = sum x (y - s x) is symmetric
# about 0, independent of those of other units, given x.  Values within a unit may depend on each
# other in any way, and units may have any scales.  Given the magnitudes |z_u| the signs are then
# fair coins, so that exp(c T - c^2 / 2), with T = sum z / sqrt(sum z^2), is an e-value for each c,
# and |T| exceeds q with a probability of 2 exp(-q^2 / 2) at most (Efron 1969; de la Peña 1999).
#
# With the share `alpha.look_alpha` of each evaluation an interval holds at all of them at once,
# although they use the same units, whatever their dependence over time.
#
# Axes: U units, N values, K evaluations or other repetitions.

from __future__ import annotations

import math

import numpy as np

from servanda.theory.sampling import Floats, Ints
from servanda.theory.stats.alpha import log_price, shared

EVERYTHING = (-math.inf, math.inf)


def unit_sums(x_KN: Floats, y_KN: Floats, start_U: Ints) -> tuple[Floats, Floats]:
    """Sums of x y and of x x per unit, each unit weighted by 1 / |x|.

    The weight depends on x alone.  It keeps a few units with a large x from deciding alone.

    Args:
        x_KN, y_KN: values; a missing one is 0 in both.
        start_U: index of the first value of each unit.

    Returns:
        [U], [U]; units without any x are left out.
    """
    xy_U = np.add.reduceat(np.einsum("kn,kn->n", x_KN, y_KN), start_U)
    xx_U = np.add.reduceat(np.einsum("kn,kn->n", x_KN, x_KN), start_U)
    known_U = xx_U > 0
    norm_U = np.sqrt(xx_U[known_U])
    return xy_U[known_U] / norm_U, norm_U


def slope_interval(xy_U: Floats, xx_U: Floats, alpha: float) -> tuple[float, float]:
    """The slopes s whose z = xy - s xx are not excluded at alpha.

    Args:
        xy_U, xx_U: as returned by `unit_sums`.

    Returns:
        Lower and upper end; infinite if there are too few units, or x is 0 everywhere.

    Source:
        E. Fieller, Some problems in interval estimation, 1954: the set of s with
        (sum z)^2 < q^2 sum z^2 is an interval if (sum xx)^2 > q^2 sum xx^2.

    >>> slope_interval(np.full(64, 0.5), np.ones(64), 0.05)
    (0.5, 0.5)
    >>> slope_interval(np.full(4, 0.5), np.ones(4), 0.05)
    (-inf, inf)
    """
    square = 2 * log_price(shared(alpha, 2))
    a = float(xx_U.sum()) ** 2 - square * float(xx_U @ xx_U)
    if a <= 0:
        return EVERYTHING
    b = float(xx_U.sum() * xy_U.sum()) - square * float(xx_U @ xy_U)
    c = float(xy_U.sum()) ** 2 - square * float(xy_U @ xy_U)
    middle, half = b / a, math.sqrt(max(b * b - a * c, 0.0)) / a
    return middle - half, middle + half


def slope_of(xy_U: Floats, xx_U: Floats) -> float:
    """The slope at which the sum of z is 0; NaN without any x."""
    return float(xy_U.sum() / xx_U.sum()) if xx_U.size else math.nan
