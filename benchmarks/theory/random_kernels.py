# Random kernels of the falsification: pairs of next-token distributions and small trees.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def distributions(rng: np.random.Generator, n: int, size: int, *, zeros: bool = True) -> Floats:
    """n distributions over `size` outcomes, [n, size]: flat to peaked, some without mass.

    Args:
        zeros: whether every other row may leave outcomes without mass.
    """
    sharpness_N1 = 10.0 ** rng.uniform(-1.0, 1.0, (n, 1))
    mass_NV = rng.gamma(sharpness_N1, size=(n, size)) + 1e-300
    if zeros:
        cut_NV = (rng.random((n, size)) < 0.3) & (rng.random((n, 1)) < 0.5)
        cut_NV[np.arange(n), rng.integers(0, size, n)] = False
        mass_NV = np.where(cut_NV, 0.0, mass_NV)
    return mass_NV / mass_NV.sum(axis=1, keepdims=True)


def near(rng: np.random.Generator, p_NV: Floats) -> Floats:
    """For each distribution another one, from nearly equal to unrelated, [n, V]."""
    n, size = p_NV.shape
    share_N1 = 10.0 ** rng.uniform(-4.0, 0.0, (n, 1))
    return (1 - share_N1) * p_NV + share_N1 * distributions(rng, n, size)
