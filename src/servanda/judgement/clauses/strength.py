# Strength: the smallest fault that a fidelity check would have rejected at this sample size.
#
# Computed from the masses of the run's own top-k tokens, see stats/tilts.py, at the check's own
# threshold; "would have rejected" means with probability 0.9 or more.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servanda.judgement.clauses.base import Array, Cell, Interim, Outcome
from servanda.theory.stats.bets import LEAK
from servanda.theory.stats.cells import Cells
from servanda.theory.stats.likelihood_ratio import cell_factors
from servanda.theory.stats.pit import edges, log_bets, log_densities
from servanda.theory.stats.tilts import STRENGTHS, Tilts, by_cells, by_rank

SHARES = (0.5, 0.25, 0.25)  # of the mixture: ranks, sets, cells
NOTHING = (
    "{name}: the record holds no likeliest tokens, so penalties, banned tokens and the smallest "
    "temperature or top-p that is seen were not examined"
)
_EACH = 64  # positions stored per round
_MOST = 384  # positions examined per run: strength varies little between them
# scope of a penalty: engines differ in whether the prompt counts
_SET = {"presence": "answer", "repetition": "text"}
# engines scale logits, whose sign logprobs do not show
_ON = {"presence": "", "repetition": " on logprobs"}
_TRANSFORMS = ("colder", "hotter", "top_p")


@dataclass(frozen=True)
class Positions:
    """Positions of a run at which the strength of a check is computed; `+` adds later rounds.

    Args:
        n: number of positions that they represent.
        masses: per round, the top-k tokens' masses at some positions, [n, K], reported by the side
            whose masses are used.
        inside: per round, set -> which of them are in it.
        drift, spread: sum and sum of squares of the log-ratios that weight each factor.
        by_rank: whether the check uses ranks in addition to the cells of these tokens.
        missing: tokens charged to every component.
    """

    n: int = 0
    masses: tuple[Array, ...] = ()
    inside: tuple[Mapping[str, Array], ...] = ()
    drift: float = 0.0
    spread: float = 0.0
    by_rank: bool = False
    missing: int = 0

    def __add__(self, other: Positions) -> Positions:
        return Positions(
            self.n + other.n,
            self.masses + other.masses,
            self.inside + other.inside,
            self.drift + other.drift,
            self.spread + other.spread,
            self.by_rank or other.by_rank,
            self.missing + other.missing,
        )

    def reached(self, price: float) -> dict[str, float | None]:
        """The smallest rejected strength of each fault; None if none is."""
        width = max(mass_NK.shape[1] for mass_NK in self.masses)
        sets = set.intersection(*({*inside} for inside in self.inside))
        mass_NK = np.concatenate([_wide(mass_nK, width) for mass_nK in self.masses])
        at = np.arange(0, len(mass_NK), max(1, math.ceil(len(mass_NK) / _MOST)))
        mass_nK, times = mass_NK[at], self.n / len(at)
        factors_JnC = cell_factors(mass_nK)
        spread = max(self.spread - self.drift**2 / self.n, 0.0)
        smallest: dict[str, float | None] = {}
        for fault, strengths in STRENGTHS.items():
            share, beside = SHARES[0], 1
            if fault in _TRANSFORMS:
                tilts = by_cells(fault, mass_nK, np.zeros(mass_nK.shape, dtype=bool), factors_JnC)
                if self.by_rank:
                    tilts = tilts.beside(by_rank(fault, mass_nK, log_densities, edges()))
            elif _SET[fault] in sets:
                in_NK = np.concatenate([_wide(i[_SET[fault]], width) for i in self.inside])
                tilts, share, beside = _of_penalty(fault, mass_nK, in_NK[at]), SHARES[1], len(sets)
            else:
                continue
            needed = price + math.log(tilts.mean.shape[1] * beside / share)
            needed -= self.missing * math.log(LEAK)
            reached = tilts.scaled(times).reached(needed, self.drift, spread)
            smallest[fault] = None if reached is None else strengths[reached]
        return smallest


def positions_of(
    mass_NK: Array,
    inside: Mapping[str, Array],
    ratio_N: Array | None = None,
    *,
    by_rank: bool,
    missing: int = 0,
) -> Positions:
    """The positions of one round; see `Positions`.

    Args:
        ratio_N: log train / infer of the sampled token, if it weights each factor.
    """
    n = len(mass_NK)
    if not n:
        return Positions(missing=missing)
    at = np.arange(0, n, max(1, math.ceil(n / _EACH)))
    finite_N = ratio_N[np.isfinite(ratio_N)] if ratio_N is not None else np.zeros(0)
    return Positions(
        n,
        (mass_NK[at],),
        ({name: in_NK[at] for name, in_NK in inside.items()},),
        float(finite_N.sum()),
        float((finite_N**2).sum()),
        by_rank,
        missing,
    )


def _wide(of_NK: Array, width: int) -> Array:
    return np.pad(of_NK, ((0, 0), (0, width - of_NK.shape[1])))


def _of_penalty(fault: str, mass_NK: Array, in_NK: Array) -> Tilts:
    mass_N = np.where(in_NK, mass_NK, 0.0).sum(axis=1)
    no_N = np.zeros(len(mass_N), dtype=bool)
    out_RN, hit_RN = (log_bets(mass_N, mass_N, hit_N) for hit_N in (no_N, ~no_N))
    rest_N1 = np.zeros((len(mass_N), 1), dtype=bool)
    factors_RNC = np.where(np.column_stack([in_NK, rest_N1]), hit_RN[..., None], out_RN[..., None])
    return by_cells(fault, mass_NK, in_NK, factors_RNC)


def weakest(guard: str, cells: Cells, positions: Positions, look: Interim) -> tuple[str, ...]:
    """Effects below the power of a check, as sentences; none for a check without data."""
    price = look.log_price_violated
    reached = positions.reached(price)
    colder, hotter = reached["colder"], reached["hotter"]
    off = None if colder is None or hotter is None else max(1 - colder, hotter - 1)
    parts = [
        "no temperature" if off is None else f"a temperature that is off by {100 * off:.3g} %",
        "no top-p" if reached["top_p"] is None else f"a top-p of {reached['top_p']:g} or less",
    ]
    for kind in _SET:
        if kind in reached:
            value, name = reached[kind], f"{kind} penalty"
            parts.append(f"no {name}" if value is None else f"a {name} of {value:g}{_ON[kind]}")
    texts = [
        f"{guard} would have rejected, on these {cells.n:,} tokens and with probability 0.9, "
        f"{', '.join(parts[:-1])} and {parts[-1]}; smaller ones may pass"
    ]
    if "repetition" not in reached:
        texts.append(f"{guard}: penalties were not examined, for the record has no column of them")
    ids, pairs = cells.smallest_lie(price + math.log(1 / SHARES[2]))
    texts.append(
        f"{guard}: a sampler that draws from another distribution than it reports is not detected "
        f"if it moves less than {_tv(ids)} of the probability between token ids (less than "
        f"{_tv(pairs)} if the change depends on the token before), or if the change has no such "
        "pattern"
    )
    return tuple(texts)


def weak_guards(judged: Sequence[tuple[Cell, list[Any], Interim, Outcome]]) -> tuple[str, ...]:
    """Effects below the power of the checks: per workload and slice, by the first check.

    Args:
        judged: cells with their total statistics and their verdicts.
    """
    limited = [
        (cell, cell.kind.unexamined(cell, rounds, look))
        for cell, rounds, look, outcome in judged
        if outcome == "holds"
    ]
    by_place: dict[tuple[str, str], tuple[str, ...]] = {}
    for cell, texts in limited:
        place = (cell.workload, cell.cut.name)
        by_place[place] = by_place.get(place) or texts
    return tuple(text for texts in by_place.values() for text in texts)


def _tv(value: float | None) -> str:
    return "all" if value is None else f"{value:.2g}"
