# Fidelity: tests whether served tokens follow the distribution that the kernel reports.
#
# U = mass_before + V * own mass is uniform on [0, 1), given everything earlier, exactly if the
# token was sampled from the reported distribution (V a fresh uniform).  The alternatives are
# densities on [0, 1) of faulty samplers; prod f(U_t) is a test martingale for each of them, and so
# is their mean (Ville).  It can only reject.
#
# Every density is at least LEAK everywhere, so a lost token is charged LEAK, its smallest possible
# factor: for any reason of the loss, the product is below the martingale.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from servanda.theory.stats.bets import LEAK, SLACK, Floats, Refutation

# A cut tail (top-p, top-k, min-p): almost no token beyond c is sampled.
_CUTS = np.array([0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999])
# A tilt of the head or the tail (temperature, a lost top-1 token): (1+a) u^a, (1+b)(1-u)^b.
_TILTS = np.array([-0.3, -0.15, -0.08, -0.04, -0.02, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6])
_EDGE = 1e-12


def log_densities(u_N: Floats) -> Floats:
    """log f(u) of every alternative, [J, N]; each integrates to 1 over [0, 1), f >= LEAK."""
    u_N = np.clip(u_N, _EDGE, 1 - _EDGE)
    cuts_JN = np.where(u_N < _CUTS[:, None], 1 / _CUTS[:, None], 0.0)
    tilts_J1 = _TILTS[:, None]
    head_JN = (1 + tilts_J1) * u_N**tilts_J1
    tail_JN = (1 + tilts_J1) * (1 - u_N) ** tilts_J1
    return np.log((1 - LEAK) * np.concatenate([cuts_JN, head_JN, tail_JN]) + LEAK)


# of two opposite tilts of a size the alternatives, for `bets.by_request`
OPPOSITE = tuple(
    (len(_CUTS) + at, len(_CUTS) + len(_TILTS) + at)
    for at, tilt in enumerate(_TILTS)
    if 0.04 <= tilt <= 0.3
)


def edges() -> Floats:
    """Edges of bins of [0, 1] without jumps of a density, narrow at steep parts."""
    near = np.geomspace(1e-4, 0.25, 12)
    return np.unique(np.concatenate([[0.0, 1.0], near, 1 - near, _CUTS, np.linspace(0, 1, 17)]))


@dataclass(frozen=True)
class Fidelity(Refutation):
    """Evidence against the reported sampler, from ranks."""

    @classmethod
    def of(cls, u_N: Floats, missing: int = 0) -> Fidelity:
        """From one closed round of PIT values in [0, 1), in dispatch order.

        Args:
            missing: dispatched tokens without a value; an upper bound if unknown.
        """
        sums = log_densities(np.asarray(u_N, dtype=np.float64)).sum(axis=1)
        sums += missing * math.log(LEAK)
        return cls(len(u_N), tuple(sums.tolist()), missing)


ODDS: Floats = np.array([0.02, 0.4, 0.6, 0.75, 0.86, 0.93, 1.08, 1.16, 1.33, 1.7, 2.5])


# Sets of ids defined by earlier text: tests their frequency against their mass.
#
# Let m be the reported mass of such a set at a position, and r the odds by which a sampler favours
# it: the sampled token is then in the set with probability r m / (1 + (r - 1) m).  The ratio of
# that to m is a factor with a mean of 1 if the token is sampled as reported, for any set defined by
# earlier text.  A presence penalty of x nats is r = exp(-x).
#
# Each mass is taken at the end of its rounding interval that makes the factor smallest.


def log_bets(low_N: Floats, high_N: Floats, hit_N: NDArray[np.bool_]) -> Floats:
    """Log factor of each odds at each token, [R, N].

    Args:
        low_N, high_N: bounds of the reported mass of the set.
        hit_N: whether the sampled token is in it.

    >>> np.round(log_bets(np.array([0.5]), np.array([0.5]), np.array([True]))[-1], 2).tolist()
    [0.34]
    """
    odds_R1 = ODDS[:, None]
    mass_RN = np.where(odds_R1 < 1, low_N, np.minimum(high_N, 1.0))
    factor_RN = np.where(hit_N, odds_R1, 1.0) / (1 + (odds_R1 - 1) * mass_RN)
    return np.log((1 - LEAK) * factor_RN + LEAK)


# Served tokens under the reference: tests whether they follow the candidate's report.
#
# Under the reference, the randomised PIT of a token sampled by the reference is uniform, and a
# density f on [0, 1) has a mean of 1 over it.  The candidate sampled the token, from q and not from
# p; but its reported logprob gives w = p / q, and E_q [w f] = E_p [f] = 1, for any difference of
# the kernels.  So w f is a factor of a valid test of the candidate's sampler that needs the whole
# distribution only from the reference.
#
# It detects an undisclosed temperature, top-p or lost token with logprobs of the declared
# distribution.  It does not detect them with logprobs that disclose them: the log-ratios detect
# those.


@dataclass(frozen=True)
class Served(Refutation):
    """Evidence against the candidate's sampler, by the reference's distribution."""

    @classmethod
    def of(
        cls,
        log_density_JN: Floats,
        log_ratio_N: Floats,
        missing: int = 0,
        error_N: Floats | float = 0.0,
    ) -> Served:
        """From one closed round, in dispatch order.

        Args:
            log_density_JN: log f of each alternative at each token, under the reference; see
                `log_densities` and `likelihood_ratio.log_factors`.
            log_ratio_N: log p - log q of the token, nats; -inf without mass under the reference;
                neither NaN nor +inf.
            missing: dispatched tokens without a value; each is charged LEAK.
            error_N: rounding error bound of each log-ratio, nats.

        Source:
            importance weighting of test martingales; derived in docs/explanation/verdicts.md.
        """
        factor_JN = served_factors(log_density_JN, log_ratio_N, error_N)
        sums_J = factor_JN.sum(axis=1) + missing * math.log(LEAK)
        return cls(len(log_ratio_N), tuple(sums_J.tolist()), missing)


def served_factors(
    log_density_JN: Floats, log_ratio_N: Floats, error_N: Floats | float = 0.0
) -> Floats:
    """Log factor of each alternative at each token, [J, N]; the arguments are those of Served."""
    least_N = log_ratio_N - np.maximum(error_N, SLACK)
    # mixed with 1, so that no factor is below LEAK
    return np.log((1 - LEAK) * np.exp(log_density_JN + least_N) + LEAK)
