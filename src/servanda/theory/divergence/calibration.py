# Calibration: whether two kernels' confidences have the same meaning.
#
# A property of many positions together, so it is not in the registry: one number for a set of
# golden positions, from four columns.

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from servanda.theory.divergence.base import DIVERGENCES

CALIBRATION = "calibration"  # the name of the metric in a contract
DIVERGENCES.reserve(CALIBRATION)
BINS = 15


def calibration_error(conf_N: ArrayLike, hit_N: ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error of one kernel, in [0, 1].

    Bins of equal width, as in publications: their edges do not depend on the data, so that two
    kernels are compared bin by bin.  Bins of equal mass would depend on each kernel's
    confidences, of which a language model has many ties near 1.

    Args:
        conf_N: probability of the top-1 token at each position, in [0, 1].
        hit_N: whether that token is the golden one.
        bins: number of bins; bin i contains (i / bins, (i + 1) / bins].

    Returns:
        sum over bins of |sum of confidence - hits| / N; NaN without positions or if a value is NaN:
        absent is not zero.

    Source:
        C. Guo et al., On Calibration of Modern Neural Networks, 2017, with M = 15.
    """
    conf_N, hit_N = np.asarray(conf_N, dtype=np.float64), np.asarray(hit_N, dtype=np.float64)
    if conf_N.shape != hit_N.shape:
        raise ValueError(f"{conf_N.shape} confidences for {hit_N.shape} hits")
    if not len(conf_N) or np.isnan(conf_N + hit_N).any():
        return float("nan")
    inner = np.arange(1, bins) / bins
    bin_N = np.searchsorted(inner, conf_N, side="left")
    gap_B = np.bincount(bin_N, weights=conf_N - hit_N, minlength=bins)
    return float(np.abs(gap_B).sum() / len(conf_N))


def calibration(
    conf_train_N: ArrayLike, hit_train_N: ArrayLike, conf_infer_N: ArrayLike, hit_infer_N: ArrayLike
) -> float:
    """|calibration error of infer - that of train| over the same positions, in [0, 1].

    It does not detect kernels with the same degree of error: use it together with `tv`.

    >>> round(calibration([0.9, 0.9], [1, 1], [0.7, 0.7], [1, 0]), 6)
    0.1
    """
    infer = calibration_error(conf_infer_N, hit_infer_N)
    train = calibration_error(conf_train_N, hit_train_N)
    return abs(infer - train)
