# The weights of the bets against equal ones: units to a decision, and errors at the limit.
#
#   python -m benchmarks.bet_weights [--runs 200] [--attacks 500]
#
# Every unit is an evaluation.  The first table has the median number of units at alpha = 0.025 with
# equal weights and with those of the limit, and at 0.045, the share of a first attempt at
# confidence 0.95.  The second has the share of runs that ever err where the truth is the limit.

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from servanda.theory.stats.bets import NEG, POS, weights_above, weights_below

Floats = NDArray[np.float64]
Law = Callable[[np.random.Generator, float, int], Floats]
_CHUNK, _MOST = 256, 1 << 18
ALPHA = 0.045


def shares(rng: np.random.Generator, mean: float, n: int) -> Floats:
    return (rng.random(n) < mean).astype(np.float64)


def half_normal(rng: np.random.Generator, mean: float, n: int) -> Floats:
    """0 for half of the units, as the divergence of a sampled token is."""
    return np.clip(rng.standard_normal(n) * mean * math.sqrt(2 * math.pi), 0.0, 1.0)


def nearly_constant(rng: np.random.Generator, mean: float, n: int) -> Floats:
    return np.clip(mean * (1 + 0.05 * rng.standard_normal(n)), 0.0, 1.0)


ROWS: tuple[tuple[Law, str, float, float], ...] = (
    (shares, "x in {0, 1}", 0.1, 0.5),
    (half_normal, "half normal", 0.1, 0.5),
    (shares, "x in {0, 1}", 0.1, 0.8),
    (half_normal, "half normal", 0.1, 0.8),
    (shares, "x in {0, 1}", 0.1, 0.95),
    (shares, "x in {0, 1}", 0.1, 2.0),
    (half_normal, "half normal", 0.1, 2.0),
    (nearly_constant, "nearly constant", 0.1, 2.0),
    (shares, "x in {0, 1}", 0.01, 0.5),
    (half_normal, "half normal", 0.01, 0.5),
    (shares, "x in {0, 1}", 0.01, 2.0),
    (half_normal, "half normal", 0.01, 2.0),
)


def log_e(growth_JN: Floats, weight_J: Floats) -> Floats:
    top_N = growth_JN.max(axis=0)
    return top_N + np.log(weight_J @ np.exp(growth_JN - top_N))


def units(law: Law, limit: float, times: float, seed: int) -> list[float]:
    """Units of one stream until each of the three decides."""
    rng = np.random.default_rng([9, seed])
    bets, weights = (NEG, weights_below) if times < 1 else (POS, weights_above)
    rules = ((weights(), 0.025), (weights(limit), 0.025), (weights(limit), ALPHA))
    found, grown_J, n = [math.inf] * len(rules), np.zeros(len(bets)), 0
    while math.inf in found and n < _MOST:
        x_N = law(rng, limit * times, _CHUNK)
        step_JN = np.log1p(bets[:, None] * x_N) - np.log1p(bets * limit)[:, None]
        growth_JN = grown_J[:, None] + step_JN.cumsum(axis=1)
        for i, (weight_J, alpha) in enumerate(rules):
            if found[i] == math.inf:
                paid = np.flatnonzero(log_e(growth_JN, weight_J) >= -math.log(alpha))
                found[i] = n + int(paid[0]) + 1 if len(paid) else math.inf
        grown_J, n = growth_JN[:, -1], n + _CHUNK
    return found


def attacks(rng: np.random.Generator) -> Iterator[tuple[str, float, Floats, Floats]]:
    """Name, limit, and one stream whose mean is the limit: x, and its running mean."""
    yield "chance 0.1, 3,000 units", 0.1, shares(rng, 0.1, 3000), np.full(3000, 0.1)
    yield "chance 0.001, 30,000 units", 1e-3, shares(rng, 1e-3, 30_000), np.full(30_000, 1e-3)
    level_N = np.minimum(rng.lognormal(-0.5, 1.0, 3000) * 0.05, 1.0)
    level_N += 0.05 - _CAPPED  # of the cut at 1
    x_N = (rng.random(3000) < level_N).astype(np.float64)
    yield "lognormal levels, sigma 1", 0.05, x_N, np.full(3000, 0.05)
    # eight answers of a prompt are all right or all wrong; a unit is their group
    yield "prompts all or nothing, half of the room", 0.1, *_groups(rng)
    # the level rises where the sample mean is below the limit: judged against the running mean
    x, mean_N, total = np.zeros(2000), np.zeros(2000), 0.0
    for i, u in enumerate(rng.random(2000).tolist()):
        mean_N[i] = 0.15 if total < 0.1 * i else 0.05
        x[i] = float(u < mean_N[i])
        total += x[i]
    running_N = mean_N.cumsum() / np.arange(1, 2001)
    yield "levels that chase the sample mean", 0.1, x, running_N


_CAPPED = float(
    np.minimum(np.random.default_rng(0).lognormal(-0.5, 1.0, 1_000_000) * 0.05, 1.0).mean()
)


def _groups(rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Z of GroupRatio for groups that fill half of their room."""
    hit_N = shares(rng, 0.1, 3000)
    return 0.1 + 0.5 * (hit_N - 0.1), np.full(3000, 0.1)


def errs(limit: float, x_N: Floats, mean_N: Floats) -> tuple[bool, bool]:
    """Whether the truth is ever called below itself, and above, with the weights of a limit."""
    n_N, found = np.arange(1.0, len(x_N) + 1), []
    for bets, weight_J in ((NEG, weights_below(limit)), (POS, weights_above(limit))):
        best = -math.inf
        for i in range(0, len(x_N), 10_000):
            part = slice(0, i + 10_000)
            sums_JN = np.log1p(bets[:, None] * x_N[part]).cumsum(axis=1)[:, i:]
            growth_JN = sums_JN - n_N[part][i:] * np.log1p(bets[:, None] * mean_N[part][i:])
            best = max(best, float(log_e(growth_JN, weight_J).max()))
        found.append(best >= -math.log(ALPHA))
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--attacks", type=int, default=500)
    options = parser.parse_args()
    print("| limit | truth | values | equal | by limit | fewer | and alpha 0.045 | fewer |")
    print("|---|---|---|---|---|---|---|---|")
    for law, name, limit, times in ROWS:
        runs = options.runs if times < 0.9 or times > 1 else max(options.runs // 10, 10)
        found = np.array([units(law, limit, times, seed) for seed in range(runs)])
        equal, by_limit, both = np.median(found, axis=0)
        fewer = [f"{1 - n / equal:.0%}" for n in (by_limit, both)]
        cells = (limit, f"{times:g} x", name, *(f"{n:,.0f}" for n in (equal, by_limit)), fewer[0])
        print("|", " | ".join(map(str, (*cells, f"{both:,.0f}", fewer[1]))), "|", flush=True)
    wrong: dict[str, list[tuple[bool, bool]]] = {}
    for seed in range(options.attacks):
        for name, limit, x_N, mean_N in attacks(np.random.default_rng([10, seed])):
            wrong.setdefault(name, []).append(errs(limit, x_N, mean_N))
    print(f"\n| truth at the limit, {options.attacks} runs | holds | violated | allowed |")
    print("|---|---|---|---|")
    for name, of in wrong.items():
        below, above = np.mean(of, axis=0)
        print(f"| {name} | {below:.1%} | {above:.1%} | {ALPHA:.1%} |")


if __name__ == "__main__":
    main()
