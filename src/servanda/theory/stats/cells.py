# Cells: frequencies of ids, and of pairs of neighbouring ids, compared with their masses.
#
# A dictionary assigns each top-k token of a position to a cell defined by earlier text, and all
# other tokens to one more.  Let O be the count of a cell and E the sum of its reported masses. For
# any tilts t of the cells, prod exp(t O - E (e^t - 1)) has a mean of at most 1 if tokens are
# sampled as reported: the mean of exp(t of the sampled cell) is 1 + sum p (e^t - 1), and 1 + x <=
# exp x.  O and E are additive over rounds, so a mixture over fixed tilts can be computed at any
# evaluation.
#
# It detects a token that is never sampled, or too often, and a report with the same error for the
# same ids.

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from servanda.theory.stats.bets import Floats
from servanda.theory.stats.tilts import Z

SIZES = (2048, 8192)  # cells of a dictionary: ids, and pairs of neighbouring ids
TILTS: Floats = np.array([0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 3.0])
SHARES = (1.0, 0.02, 0.001)  # share of the cells that are tilted, in each direction
COMPONENTS = len(SIZES) * len(TILTS) * len(SHARES)
_NEAR = math.log(2.5)  # tilts near a strength that are examined
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
_SHIFT = np.uint64(33)


@dataclass(frozen=True)
class Cells:
    """Observed and expected counts of the cells of both dictionaries; `+` adds later rounds.

    Args:
        n: tokens; missing: dispatched tokens without a value.
        error: rounding error bound of recorded logprobs, nats.
        log_weight: the sum of log train / infer, if train's masses are used for tokens sampled by
            infer; 0 if the masses are those of the sampling kernel.
        drawn, mass: O and E of all cells, one dictionary after the other.
        digest: digest of both dictionaries.
    """

    n: int = 0
    missing: int = 0
    error: float = 0.0
    log_weight: float = 0.0
    digest: str = ""
    drawn: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)
    mass: NDArray[np.float32] | Floats | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        ids_NK: NDArray[np.int64],
        mass_NK: Floats,
        token_N: NDArray[np.int64],
        before_N: NDArray[np.int64],
        *,
        missing: int = 0,
        error: float = 0.0,
        log_weight: float = 0.0,
    ) -> Cells:
        """From one closed round.

        Args:
            ids_NK, mass_NK: the top-k tokens of each position and their probabilities; a mass of 0
                means no token.
            token_N: the sampled token; before_N: the token before it, -1 if unknown.
        """
        drawn, mass = [], []
        hit_NK = (ids_NK == token_N[:, None]) & (mass_NK > 0)
        other_N = np.maximum(1 - mass_NK.sum(axis=1), 0.0)
        for size, cell_NK in zip(SIZES, _cells(ids_NK, before_N), strict=True):
            expected = np.bincount(cell_NK.ravel(), mass_NK.ravel(), minlength=size)
            observed = np.bincount(cell_NK[hit_NK], minlength=size)
            expected[-1] = other_N.sum()
            observed[-1] = int((~hit_NK.any(axis=1)).sum())
            drawn.append(observed)
            mass.append(expected.astype(np.float32))
        whole = (np.concatenate(drawn), np.concatenate(mass))
        digest = hashlib.blake2b(b"".join(a.tobytes() for a in whole), digest_size=8).hexdigest()
        return cls(len(token_N), missing, error, log_weight, digest, *whole)

    def __add__(self, other: Cells) -> Cells:
        if self.drawn is None or other.drawn is None:
            kept = other if self.drawn is None else self
            return Cells(
                *(kept.n, self.missing + other.missing, kept.error, kept.log_weight, kept.digest),
                *(kept.drawn, kept.mass),
            )
        assert self.mass is not None and other.mass is not None
        return Cells(
            self.n + other.n,
            self.missing + other.missing,
            max(self.error, other.error),
            self.log_weight + other.log_weight,
            "",
            self.drawn + other.drawn,
            self.mass + other.mass.astype(np.float64),
        )

    @property
    def growth(self) -> Floats:
        """Log of each component, nats, [COMPONENTS]; [0] without data."""
        if self.drawn is None or self.mass is None:
            return np.zeros(1)
        found = []
        ends = np.cumsum(SIZES)
        for start, end in zip(ends - SIZES, ends, strict=True):
            met = (self.mass[start:end] > 0) | (self.drawn[start:end] > 0)
            drawn_C = self.drawn[start:end][met].astype(np.float64)
            mass_C = self.mass[start:end][met].astype(np.float64)
            up_TC, down_TC = _tilted(drawn_C, mass_C, self.error)
            either_TC = np.logaddexp(up_TC, down_TC) - math.log(2)
            for share in SHARES:
                rest = math.log1p(-share) if share < 1 else -math.inf
                mixed_TC = np.logaddexp(either_TC + math.log(share), rest)
                found.append(mixed_TC.sum(axis=1))
        # a lost token is unknown: it is charged the smallest possible factor
        charge_T = self.missing * (TILTS + np.expm1(TILTS))
        return np.concatenate(found) - np.tile(charge_T, len(found)) + self.log_weight

    def in_pairs(self) -> bool:
        """Whether pairs of neighbouring tokens have more evidence than ids."""
        of_ids, of_pairs = self.growth.reshape(len(SIZES), -1).max(axis=1)
        return bool(of_pairs > of_ids)

    def worst(self) -> str:
        """The cell of the first dictionary with the largest deviation from its mass, as text."""
        assert self.drawn is not None and self.mass is not None
        drawn_C, mass_C = (a[: SIZES[0]].astype(np.float64) for a in (self.drawn, self.mass))
        with np.errstate(divide="ignore", invalid="ignore"):
            log_C = np.where(drawn_C > 0, drawn_C * np.log(drawn_C / mass_C), 0.0)
        apart_C = np.nan_to_num(log_C - drawn_C + mass_C, posinf=0.0)
        at = int(np.argmax(apart_C))
        name = "the tokens beside the likeliest" if at == SIZES[0] - 1 else f"token id {at}"
        if at < SIZES[0] - 1:
            name += f" (or one that is {at} more than a multiple of {SIZES[0] - 1:,})"
        return f"{name} came {drawn_C[at]:,.0f} times where {mass_C[at]:,.1f} are expected"

    def smallest_lie(self, price: float) -> tuple[float | None, float | None]:
        """The smallest misplaced mass of a report, per dictionary, that is rejected.

        A report with errors of the factor exp(+-s) in every cell is the hardest to detect of all
        that move the same mass between cells (Cauchy-Schwarz).  Under it the mean of a cell's log
        factor is E[log cosh(t x sqrt(E))] - E t^2 / 2 with x ~ N(+-s sqrt(E), 1), which is summed
        over cells and compared with the threshold as in `stats.tilts`.

        Returns:
            For ids and for pairs, half the moved mass, per token; None if none is detected.
        """
        assert self.mass is not None
        found: list[float | None] = []
        ends = np.cumsum(SIZES)
        node_X, weight_X = np.polynomial.hermite_e.hermegauss(16)
        weight_X = weight_X / weight_X.sum()
        needed = price + math.log(COMPONENTS) - self.log_weight
        for start, end in zip(ends - SIZES, ends, strict=True):
            mass_C = self.mass[start:end].astype(np.float64)
            root_C1 = np.sqrt(mass_C[mass_C > 0])[:, None]
            strengths = np.geomspace(0.005, 2.0, 64)
            at, beyond = -1, len(strengths)
            while beyond - at > 1:  # the weakest that reaches it, by bisection
                middle = (at + beyond) // 2
                strength, best = float(strengths[middle]), -math.inf
                for tilt in TILTS[np.abs(np.log(TILTS / strength)) < _NEAR]:
                    x_CX = node_X + strength * root_C1
                    at_CX = tilt * root_C1 * x_CX
                    cosh_CX = np.logaddexp(at_CX, -at_CX) - math.log(2)
                    each_CX = cosh_CX - (tilt * root_C1) ** 2 / 2
                    mean_C = each_CX @ weight_X
                    spread = float(((each_CX**2) @ weight_X - mean_C**2).sum())
                    charge = self.missing * (float(tilt) + math.expm1(tilt))
                    reached = float(mean_C.sum()) - Z * math.sqrt(max(spread, 0.0)) - charge
                    best = max(best, reached)
                at, beyond = (at, middle) if best >= needed else (middle, beyond)
            answer = None
            if beyond < len(strengths):
                moved = math.tanh(strengths[beyond] / 2)
                answer = float(moved * mass_C.sum() / max(self.n, 1))
            found.append(answer)
        return found[0], found[1]


def _tilted(drawn_C: Floats, mass_C: Floats, error: float) -> tuple[Floats, Floats]:
    """t O - E (e^t - 1) of each tilt, upwards and downwards, [T, C] each."""
    tilt_T1 = TILTS[:, None]
    up_TC = tilt_T1 * drawn_C - np.expm1(tilt_T1) * mass_C * math.exp(error)
    down_TC = -tilt_T1 * drawn_C - np.expm1(-tilt_T1) * mass_C * math.exp(-error)
    return up_TC, down_TC


def _cells(ids_NK: NDArray[np.int64], before_N: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The cell of each top-k token in each dictionary, [N, K]; the last cell is for the others."""
    pairs = (ids_NK.astype(np.uint64) + before_N.astype(np.uint64)[:, None] * _MIX[1]) * _MIX[0]
    pairs ^= pairs >> _SHIFT
    return [ids_NK % (SIZES[0] - 1), (pairs % np.uint64(SIZES[1] - 1)).astype(np.int64)]
