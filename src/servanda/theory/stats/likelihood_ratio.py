# Fidelity from top-k logprobs: likelihood ratios over cells.
#
# The cells of a step are the returned tokens, and all others together.  The report gives the
# probability m of each; an alternative another one, a.  If the token is sampled as reported, a / m
# of its cell has a mean of 1.  The alternatives are common sampler faults: another temperature, a
# cut tail, too much or too little mass on tokens that were not returned.
#
# It tests only the masses of cells: a sampler that permutes tokens that were not returned is not
# detected, and with one returned token these are nearly all.

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from servanda.errors import EvidenceError
from servanda.theory.stats.bets import LEAK, SLACK, Floats, Refutation

_TEMPERATURES = (0.6, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25)
_DEEPER = (1.0, 4.0)  # the smallest returned mass over that of a token not returned
_CUTS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)  # top-p: no token beyond this mass is sampled
_OTHERS = (0.5, 0.9, 1.2)  # factors of the mass that was not returned
# of two opposite temperatures the alternatives, for `bets.by_request`
OPPOSITE = tuple(
    (len(_DEEPER) * _TEMPERATURES.index(colder), len(_DEEPER) * _TEMPERATURES.index(hotter))
    for colder, hotter in ((0.8, 1.25), (0.9, 1.1), (0.95, 1.05))
)
_SPILL = 0.01  # share of the mass for it, even if the report leaves none

_BY_CHANCE = math.log(1e-9)  # probability of sampling the last token at every step that has one


@dataclass(frozen=True)
class LikelihoodRatio(Refutation):
    """Evidence against the reported sampler, from its top-k tokens."""

    @classmethod
    def of(
        cls,
        ids_NK: NDArray[np.int64],
        logp_NK: Floats,
        token_N: NDArray[np.int64],
        missing: int = 0,
    ) -> LikelihoodRatio:
        """From one closed round, in dispatch order.

        Args:
            ids_NK, logp_NK: the returned tokens of each step and their reported logprobs, [N, K],
                nats; -inf means no mass.
            token_N: the sampled token.
            missing: dispatched tokens without a value; each is charged LEAK.

        A step whose logprobs are NaN, or add up to more than 1, is missing too.

        Raises:
            EvidenceError: the last column contains only sampled tokens: they were appended after
                sampling.
        """
        factors_JN, usable_N = log_factors(ids_NK, logp_NK, token_N)
        missing += int((~usable_N).sum())
        sums_J = factors_JN.sum(axis=1) + missing * math.log(LEAK)
        return cls(int(usable_N.sum()), tuple(sums_J.tolist()), missing)


@dataclass(frozen=True)
class RequestDraws:
    """The sampler evidence of one request.

    Args:
        known: tokens with top-k logprobs; missing: tokens without.
        total: sum over them of the log mass of the sampled cell minus its mean under the report,
            nats: above 0 if tokens are likelier than reported.
        above: per alternative the log e-value, nats, for it against the report; below: per
            alternative the log e-value against it.
    """

    known: int
    missing: int
    total: float
    above: tuple[float, ...]
    below: tuple[float, ...]
    n: int = 1

    @classmethod
    def nothing(cls, missing: int) -> RequestDraws:
        """The evidence of a request without known tokens."""
        least = (missing * math.log(LEAK),) * len(names())
        return cls(0, missing, 0.0, least, least)

    @classmethod
    def of(
        cls, ids_NK: NDArray[np.int64], logp_NK: Floats, token_N: NDArray[np.int64]
    ) -> RequestDraws:
        """From one request: see `LikelihoodRatio.of`."""
        best_NK, hit_NK, usable_N = _drawn(ids_NK, logp_NK, token_N)
        factors_JN = _log_ratios(best_NK, hit_NK)
        missing = int((~usable_N).sum())
        least = missing * math.log(LEAK)
        # a share LEAK of 1 keeps these above LEAK, too; the slack of the report's masses, which
        # makes `factors_JN` smaller, would make them larger: at most three times over a step
        inverse_JN = np.log((1 - LEAK) * np.exp(-factors_JN) / (1 + 3 * SLACK) + LEAK)
        mass_NC = np.column_stack([best_NK, np.maximum(1 - best_NK.sum(axis=1), SLACK)])
        hit_NC = np.column_stack([hit_NK, ~hit_NK.any(axis=1)])
        log_NC = np.log(np.where(mass_NC > 0, mass_NC, 1.0))
        excess = float(log_NC[hit_NC].sum() - (mass_NC * log_NC).sum())
        return cls(
            int(usable_N.sum()),
            missing,
            excess,
            tuple((factors_JN.sum(axis=1) + least).tolist()),
            tuple((inverse_JN.sum(axis=1) + least).tolist()),
        )

    def above_growth(self, limit: float) -> Floats:
        """Log factors against the report, one per alternative; `limit` is unused."""
        return np.array(self.above)

    def below_growth(self, limit: float) -> Floats:
        """Log factors against each alternative."""
        return np.array(self.below)


def log_factors(
    ids_NK: NDArray[np.int64], logp_NK: Floats, token_N: NDArray[np.int64]
) -> tuple[Floats, NDArray[np.bool_]]:
    """log a / m of the sampled cell of each usable token, [J, n], and the usable mask, [N].

    Raises:
        EvidenceError: as in `LikelihoodRatio.of`.
    """
    best_NK, hit_NK, usable_N = _drawn(ids_NK, logp_NK, token_N)
    return _log_ratios(best_NK, hit_NK), usable_N


def _drawn(
    ids_NK: NDArray[np.int64], logp_NK: Floats, token_N: NDArray[np.int64]
) -> tuple[Floats, NDArray[np.bool_], NDArray[np.bool_]]:
    """`_sorted` for the usable steps, and their mask, [N]."""
    _refuse_appended(ids_NK, logp_NK, token_N)
    with np.errstate(over="ignore"):
        mass_NK = np.exp(logp_NK)
    usable_N = mass_NK.sum(axis=1) <= 1 + SLACK  # false for NaN
    return *_sorted(ids_NK[usable_N], mass_NK[usable_N], token_N[usable_N]), usable_N


def _refuse_appended(
    ids_NK: NDArray[np.int64], logp_NK: Floats, token_N: NDArray[np.int64]
) -> None:
    """Refuse appended tokens: cells must be fixed before a token is sampled."""
    if ids_NK.shape[1] < 2:
        return
    last_N = logp_NK[:, -1]
    there_N = np.isfinite(last_N)
    # if a correct report has a last token at a few steps, it may be sampled by chance
    if there_N.all() or last_N[there_N].sum() > _BY_CHANCE:
        return
    least_N = np.min(logp_NK[there_N, :-1], axis=1)
    if (ids_NK[there_N, -1] == token_N[there_N]).all() and (last_N[there_N] <= least_N).all():
        raise EvidenceError(
            f"the last of the {ids_NK.shape[1]} best tokens is the drawn one in all of the "
            f"{int(there_N.sum())} of {len(token_N)} steps that have it: it was appended after "
            "the draw",
            hint="drop the appended token: report the k likeliest tokens, whichever was drawn "
            "(vLLM's logprobs=k adds it to them)",
        )


def _sorted(
    ids_NK: NDArray[np.int64], mass_NK: Floats, token_N: NDArray[np.int64]
) -> tuple[Floats, NDArray[np.bool_]]:
    """Masses, best first, and the sampled token's cell as a mask, [N, K]; none: the others."""
    order_NK = np.argsort(-mass_NK, axis=1, kind="stable")
    best_NK = np.take_along_axis(mass_NK, order_NK, axis=1)
    at_NK = np.take_along_axis(ids_NK, order_NK, axis=1)
    hit_NK = (at_NK == token_N[:, None]) & (best_NK > 0)
    return best_NK, hit_NK & (hit_NK.cumsum(axis=1) == 1)  # a repeated id counts once


def _log_ratios(best_NK: Floats, hit_NK: NDArray[np.bool_]) -> Floats:
    """log a / m of the sampled cells, one row per alternative, [J, N]."""
    hit_NC = np.column_stack([hit_NK, ~hit_NK.any(axis=1)])
    return np.array([factors_NC[hit_NC] for factors_NC in cell_factors(best_NK)])


def cell_factors(best_NK: Floats) -> Floats:
    """log a / m of every cell: the masses, best first, and the rest; [J, N, K + 1]."""
    rest_N = np.maximum(1 - best_NK.sum(axis=1), 0.0)
    # upper end of each mass: rounding must not look like a fault
    null_NC = np.column_stack([best_NK * (1 + SLACK), rest_N + SLACK])
    null_NC = np.where(null_NC > 0, null_NC, 1.0)  # a cell without mass is never sampled
    found = []
    for _, cells_NC in _alternatives(best_NK, rest_N):
        share_NC = cells_NC / cells_NC.sum(axis=1, keepdims=True)
        # the report adds its own LEAK, minus the slack in null_NC
        found.append(np.log((1 - LEAK) * share_NC / null_NC + LEAK))
    return np.array(found)


def names() -> tuple[str, ...]:
    """The names of the alternatives, in the order of `cell_factors`."""
    return tuple(name for name, _ in _alternatives(np.ones((1, 1)), np.zeros(1)))


def _alternatives(best_NK: Floats, rest_N: Floats) -> list[tuple[str, Floats]]:
    """The cell masses of alternative samplers, [N, K + 1], not normalised."""
    least_N = np.where(best_NK > 0, best_NK, np.inf).min(axis=1, initial=1.0)
    before_NK = best_NK.cumsum(axis=1) - best_NK
    beyond_N = best_NK.sum(axis=1)
    found = []
    for temperature, deeper in itertools.product(_TEMPERATURES, _DEEPER):
        power = 1 / temperature
        # tokens that were not returned are less likely than the smallest returned: two guesses
        rest = rest_N * (least_N / deeper) ** (power - 1)
        cells_NC = np.column_stack([best_NK**power, rest])
        found.append((f"temperature {temperature:g}", cells_NC))
    for cut in _CUTS:
        kept_NK = np.where(before_NK < cut, best_NK, 0.0)
        cells_NC = np.column_stack([kept_NK, np.clip(cut - beyond_N, 0.0, rest_N)])
        found.append((f"top-p {cut:g}", cells_NC))
    for times in _OTHERS:
        other_N = np.minimum(times * rest_N, (1 + rest_N) / 2)
        scale_N = (1 - other_N) / np.maximum(1 - rest_N, SLACK)
        cells_NC = np.column_stack([best_NK * scale_N[:, None], other_N])
        found.append((f"{times:g} times as many unlikely tokens", cells_NC))
    cells_NC = np.column_stack([(1 - _SPILL) * best_NK, (1 - _SPILL) * rest_N + _SPILL])
    found.append((f"{_SPILL:.0%} more unlikely tokens", cells_NC))
    return found
