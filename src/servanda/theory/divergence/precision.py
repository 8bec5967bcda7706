# Capture: the precision of recorded logprobs, and its cost (law 9).
#
# Rounding a logprob to t significand bits moves it by at most half a unit in its last place:
# eta = 2^(k - t) for |logp| in [2^k, 2^(k+1)).  Two bitwise equal kernels then seem to diverge, and
# no limit below that can be verified.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from servanda.theory.divergence.base import DIVERGENCES, sampled
from servanda.theory.sampling import Floats

# significand bits, including the hidden one
CAPTURES: Mapping[str, int] = MappingProxyType(
    {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
)
TYPICAL_NATS = 3.0  # a token of open text: |logp| in [2, 4), with eta 2^(1 - t)
_GRID = 2049
_FEW = 64
_EXPONENT = np.float64(np.inf).view(np.int64)
_BY_BITS = tuple(sorted(CAPTURES, key=CAPTURES.__getitem__))


def eta(capture: str, nats: float = TYPICAL_NATS) -> float:
    """The largest error of a recorded logprob of this size, nats.

    >>> eta("bfloat16", 0.3) == 2**-10, eta("bfloat16", 5.0) == 2**-6
    (True, True)
    """
    _, exponent = np.frexp(nats)
    return float(2.0 ** (int(exponent) - 1 - CAPTURES[capture]))


def errors(values: Floats, capture: str) -> Floats:
    """eta of each recorded logprob, nats; 0 if not finite.

    A value that was rounded up to a power of 2 has the larger eta, so this is also a bound for it.
    """
    # the bits of the exponent alone are the power of 2 below a value, or an infinity
    bits = np.ascontiguousarray(values, dtype=np.float64).view(np.int64) & _EXPONENT
    unit = 2.0 ** -CAPTURES[capture]
    found = bits.view(np.float64)
    found *= unit
    if found.size and not 0 < found.min() <= found.max() < np.inf:
        found[found == np.inf] = 0.0
        found[values == 0] = unit / 2
    return found


def rounded(values: Floats, capture: str) -> Floats:
    """The values rounded to this precision, in float64."""
    if capture == "bfloat16":  # NumPy lacks bfloat16: 8 bits of the float32 significand
        part, exponent = np.frexp(values)
        kept = np.ldexp(np.rint(np.ldexp(part, CAPTURES[capture])), exponent - CAPTURES[capture])
        return np.where(np.isfinite(values), kept, values)
    return values.astype(capture).astype(np.float64)


def captured(values: Floats) -> str:
    """The coarsest format that represents every value: the precision of a record.

    >>> captured(np.float32([-0.1, -2.7]).astype(float)), captured(np.array([-0.1, -2.7]))
    ('float32', 'float64')
    """
    return next(iter(exact_in(values)), _BY_BITS[-1])


def exact_in(values: Floats, captures: Sequence[str] = ()) -> tuple[str, ...]:
    """The formats, coarsest first, that represent every value; () without finite values but 0.

    Args:
        captures: candidates, coarsest first; default all.
    """
    some = np.isfinite(values) & (values != 0)
    known = values if some.all() else values[some]
    if not len(known):
        return ()
    with np.errstate(over="ignore"):  # float16 ends at 65504
        return tuple(c for c in captures or _BY_BITS if _exact(known, c))


def _exact(values: Floats, capture: str) -> bool:
    if capture == "float64":
        return True
    few = values[:_FEW]  # most often, some of these are not
    for some in (few, values):
        kept = rounded(some, capture) if capture == "bfloat16" else some.astype(capture)
        if not np.array_equal(kept, some):
            return False
    return True


def capture_floor(metric: str, capture: str, aggregate: str = "mean") -> float:
    """The smallest value of a sampled metric that a record of this precision can resolve.

    The metric of two identical kernels if the logprob of one is rounded: the error is uniform on
    [-eta, eta] (its mean is the floor of a mean, its largest value that of a percentile or
    maximum).  For k3 that is eta^2 / 6, for tv eta / 4.

    Args:
        metric: a divergence; without a form on logprobs its floor is 0.
        capture: precision of the coarser side.

    Returns:
        In units of the metric, for tokens of TYPICAL_NATS.
    """
    if metric not in DIVERGENCES or "logprob" not in DIVERGENCES[metric].forms:
        return 0.0
    error_N = np.linspace(-1.0, 1.0, _GRID) * eta(capture)
    exact_N = np.full_like(error_N, -TYPICAL_NATS)
    values_N = sampled(metric, {"logp_train": exact_N + error_N, "logp_infer": exact_N})
    if aggregate != "mean":
        return float(values_N.max())
    # the errors of a signed metric average out
    return 0.0 if DIVERGENCES[metric].signed else float(values_N.mean())
