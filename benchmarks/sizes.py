"""Whether nine of ten runs decide at the edges that docs/start/how_many_tokens.md prints.

python -m benchmarks.sizes [--write]     six laws of x; about ten minutes
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from copy import deepcopy

import numpy as np
from numpy.typing import NDArray

from benchmarks.committed import ROOT, write
from benchmarks.experiment.tables import markdown
from servanda.report.format import rough
from servanda.theory.stats.alpha import log_price, shared
from servanda.theory.stats.bets import NEG, POS, weights_above, weights_below
from servanda.theory.stats.interval import units_at_best
from servanda.theory.stats.reachable import reach

PAGE = ROOT / "docs" / "start" / "how_many_tokens.md"
ALPHA, CELLS = 0.045, 2  # of a first attempt at 95 %, with one clause on one slice beside `all`
LIMITS = (0.01, 0.03, 0.1)
SIZES = {"tokens": (6_144, 24_576, 98_304), "prompt groups": (256, 1_024, 4_096)}
MEASURED = ((0.01, 6_144), (0.03, 24_576), (0.03, 1_024), (0.1, 4_096))  # limit, units
ANSWER, LOOKS, RUNS, SEED = 24, 32, 300, 20261201  # tokens; evaluations of a run
_FAR = 2_000_000  # draws that find the scale of a law

Array = NDArray[np.float64]
Law = Callable[[np.random.Generator, int, float], Array]  # of a number of units, and a scale


def _tv(d_N: Array) -> Array:
    return -np.expm1(np.minimum(d_N, 0.0))


def _clustered(rng: np.random.Generator, n: int, scale: float) -> Array:
    """All or nothing, with a lognormal level of each answer: the claim is about these levels."""
    chance_N = _levels(rng, n, scale)
    return (rng.random(n) < chance_N).astype(float)


def _levels(rng: np.random.Generator, n: int, mean: float) -> Array:
    """The probability of each token, whose mean is given, in spite of the cut at 1."""
    chance_N = np.repeat(np.exp(rng.normal(size=-(-n // ANSWER))), ANSWER)[:n]
    for _ in range(20):
        chance_N = np.minimum(chance_N * mean / chance_N.mean(), 1.0)
    return chance_N


LAWS: dict[str, Law] = {
    "all or nothing": lambda rng, n, s: (rng.random(n) < s).astype(float),
    "dense, normal log ratios": lambda rng, n, s: _tv(rng.normal(size=n) * s),
    "heavy, log ratios t(1.5)": lambda rng, n, s: _tv(rng.standard_t(1.5, n) * s),
    "clustered by answer": _clustered,
    "lognormal": lambda rng, n, s: np.minimum(s * np.exp(rng.normal(size=n)), 1.0),
    "exceedance, t(1.5)": lambda rng, n, s: (abs(rng.standard_t(1.5, n)) * s > 1).astype(float),
}


def scale_of(law: Law, mean: float) -> float:
    """The scale at which a law has a mean."""
    if law in (LAWS["all or nothing"], _clustered):
        return mean
    low, high = 1e-6, 1e3
    for _ in range(25):
        middle = float(np.sqrt(low * high))
        below = law(np.random.default_rng(SEED), _FAR, middle).mean() < mean
        low, high = (middle, high) if below else (low, middle)
    return high


def decided(x_N: Array, limit: float, mean_N: Array | None = None) -> tuple[bool, bool]:
    """Whether a run says holds, and violated, at one of its evaluations.

    Args:
        mean_N: the mean of each unit: only answers that their average so far contradicts count.
    """
    of_L = np.linspace(0, len(x_N), LOOKS + 1).astype(int)[1:]
    value_V, at_N = np.unique(x_N, return_inverse=True)
    found = []
    for bets, weight, price, sign in (
        (NEG, weights_below(limit), log_price(ALPHA), 1),
        (POS, weights_above(limit), log_price(shared(ALPHA, CELLS)), -1),
    ):
        each_JV = np.log1p(bets[:, None] * value_V) - np.log1p(bets * limit)[:, None]
        grown_JL = np.add.reduceat(each_JV[:, at_N], [0, *of_L[:-1]], axis=1).cumsum(axis=1)
        top_L = grown_JL.max(axis=0)
        said_L = top_L + np.log(weight @ np.exp(grown_JL - top_L)) >= price
        if mean_N is not None:
            said_L &= sign * (np.cumsum(mean_N)[of_L - 1] / of_L - limit) >= -1e-9
        found.append(bool(said_L.any()))
    return found[0], found[1]


def shares(law: Law, limit: float, n: int) -> Iterator[str]:
    """Of the runs at the lower edge, the upper edge and the limit, those that decide."""
    for i, mean in enumerate((*printed(limit, n)[::2], f"{limit:g}")):
        scale, rng = scale_of(law, float(mean)), np.random.default_rng([SEED, i, n])
        answers = []
        for _ in range(RUNS):
            drawn = _levels(deepcopy(rng), n, scale) if law is _clustered else np.full(n, limit)
            answers.append(decided(law(rng, n, scale), limit, drawn if i > 1 else None))
        holds, violated = (f"{100 * sum(said) / RUNS:.1f} %" for said in zip(*answers, strict=True))
        yield (holds, violated, f"{holds}, {violated}")[i]


def printed(limit: float, n: int) -> list[str]:
    """The edges of holds and of violated, each of the worst case and of equal differences."""
    of = reach(n, limit, alpha=ALPHA, cells=CELLS)
    ends = (of.holds, -1), (of.holds_even, -1), (of.violated, 1), (of.violated_even, 1)
    return ["never" if x is None else rough(x, side=side) for x, side in ends]


def edges(units: str) -> str:
    """The table of the edges for one claim."""
    rows = []
    for limit in LIMITS:
        row, least = [f"{limit:g}"], units_at_best(limit, ALPHA)
        for n in SIZES[units]:
            if least is None or n < least:
                row.append(f"refused: at least {least} are needed")
            else:
                row.append("{} ({}) … {} ({})".format(*printed(limit, n)))
        rows.append(row)
    return markdown(["limit", *(f"{n:,} {units}" for n in SIZES[units])], rows)


def measured() -> str:
    """The table of the six laws."""
    rows = []
    for limit, n in MEASURED:
        for name, law in LAWS.items():
            rows.append((f"{limit:g}", f"{n:,}", name, *shares(law, limit, n)))
            print(*rows[-1], sep=" | ", flush=True)
    edges = f"of {RUNS} runs: holds at the lower edge", "violated at the upper edge"
    promised = f"{ALPHA:.1%} and {shared(ALPHA, CELLS):.2%}"
    head = ("limit", "units", "law of x", *edges, f"holds, violated at the limit ({promised})")
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write the tables of {PAGE.name}")
    keep, table = parser.parse_args().write, measured()
    for name, text in (
        ("edges realised", edges("tokens")),
        ("edges population", edges("prompt groups")),
        ("decided", table),
    ):
        if keep:
            ends = f"<!-- {name} -->", f"<!-- end of {name} -->"
            write(PAGE, text, "python -m benchmarks.sizes --write", *ends)
        else:
            print(text)


if __name__ == "__main__":
    main()
