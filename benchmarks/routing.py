"""How often routing takes a sound slice away, and how soon a broken one; beside two simpler rules.

    python -m benchmarks.routing [--slices 150] [--write]

Each slice is a stream of scored requests, one value in [0, 1] each; every rule sees the same
streams.  The machine is the one that serves, `servanda.gateway.routing`, at the prices of a
contract that says nothing.  Seeds are fixed.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import committed
from benchmarks.assumptions import table
from servanda.contract.model import Contract
from servanda.gateway.routing.evidence_price import evidence_above
from servanda.gateway.routing.model import AWAY
from servanda.gateway.routing.state import RoutingState, Rules, Score, TrafficFacts, WatchedCell
from servanda.gateway.routing.state_machine import absorb, advance, begin
from servanda.judgement.slices.rules import Cut, Term
from servanda.theory.stats.bets import NEG, POS, log_mean_exp
from servanda.theory.stats.group_ratio import GroupRatio

Array = NDArray[Any]

DOCS = Path(__file__).parents[1] / "docs" / "explanation" / "routing.md"
LIMIT = 0.05
SOUND = 0.03
REQUESTS = 3000
USERS = 40
DWELL = 100  # scored requests; the clock of these streams ticks once a request
WINDOW, BLOCK, BLOCKS = 100, 50, 3
PAST = 100_000
LEFT = tuple((status, "quarantined") for status in ("active", "suspect", "recovering"))
MOVES = (*LEFT, ("probation", "recovering"))


def stream(rng: np.random.Generator, mean: float, n: int) -> Array:
    """Values of a skewed metric with that mean, [n]."""
    return rng.beta(0.6, 0.6 / mean - 0.6, n)


def contract() -> Contract:
    return Contract.model_validate(
        {
            "apiVersion": "servanda.dev/v1alpha1",
            "kind": "KernelContract",
            "metadata": {"name": "simulated"},
            "kernels": {"train": {"engine": "table"}, "infer": {"engine": "table"}},
            "stable": {"engine": "table"},
            "routing": {"mode": "enforce", "stable_in_flight": 100, "dwell": f"{DWELL}s"},
        }
    )


def rules() -> Rules:
    cut = Cut("slice", (Term("labels.slice", "exists", True),))
    return Rules(contract(), (WatchedCell("tv", cut, LIMIT, diverts="slice"),))


RULES = rules()


@dataclass(frozen=True)
class Course:
    """What a rule did with one stream.

    Args:
        away: whether stable served, after each request, [n].
        moves: how often the slice left infer, or began to come back.
    """

    away: Array
    moves: int

    @property
    def delay(self) -> float:
        """Requests until it was taken away; inf where it never was."""
        return float(np.argmax(self.away)) + 1 if self.away.any() else math.inf


Rule = Callable[[Array, Array], Course]


def switching(away_N: Array) -> Course:
    return Course(away_N, int(np.abs(np.diff(away_N.astype(int), prepend=0)).sum()))


def window(x_N: Array, _: Array) -> Course:
    """Away while the mean of the latest hundred is beyond the limit."""
    sums_N = np.cumsum(x_N)
    late_N = sums_N - np.concatenate([np.zeros(WINDOW), sums_N[:-WINDOW]])
    away_N = late_N / WINDOW > LIMIT
    away_N[: WINDOW - 1] = False
    return switching(away_N)


def blocks(x_N: Array, _: Array) -> Course:
    """Away after three blocks of fifty in a row beyond the limit, back after three within it."""
    away, away_N, row = False, np.zeros(len(x_N), dtype=bool), 0
    for end in range(BLOCK, len(x_N) + 1, BLOCK):
        wrong = bool(x_N[end - BLOCK : end].mean() > LIMIT)
        row = row + 1 if wrong != away else 0
        if row == BLOCKS:
            away, row = not away, 0
        away_N[end - 1 : end - 1 + BLOCK] = away
    return switching(away_N)


def asked(state: RoutingState, x: float, key: str) -> RoutingState:
    one = GroupRatio(1, 1, np.array([x]), np.array([1]), np.array([0]))
    return absorb(RULES, state, Score(0.0, key, 1.0, {("tv", "slice"): one}))


def facts(now: float) -> TrafficFacts:
    return TrafficFacts(now, {"slice": 0.1}, {"slice": 1.0}, 1.0)


def machine(x_N: Array, user_N: Array, *, until_away: bool = False) -> Course:
    """What serves: a look after every request."""
    state, away_N, moves = begin(RULES, now=0.0), np.zeros(len(x_N), dtype=bool), 0
    for i, (x, user) in enumerate(zip(x_N.tolist(), user_N.tolist(), strict=True)):
        state, changes = advance(RULES, asked(state, x, f"user {user}"), facts(float(i)))
        away_N[i] = state.slices["slice"].status in AWAY
        moves += sum((c.before, c.after) in MOVES for c in changes)
        if until_away and away_N[i]:
            return Course(away_N[: i + 1], moves)
    return Course(away_N, moves)


NAMES: dict[str, Rule] = {
    "a window of 100": window,
    "3 blocks of 50": blocks,
    "the machine": machine,
}


def streams(seed: int, slices: int, *parts: tuple[float, int]) -> Iterator[tuple[Array, Array]]:
    """(values, users) of so many slices; parts: (mean, requests), one after another."""
    for i in range(slices):
        rng = np.random.default_rng([seed, i])
        x_N = np.concatenate([stream(rng, mean, n) for mean, n in parts])
        yield x_N, rng.integers(0, USERS, len(x_N))


def at_the_bound(slices: int) -> Iterator[tuple[str, ...]]:
    """How often a sound slice is taken away, and how often it goes to and fro."""
    yield ("rule", *(f"{mean:g} of {LIMIT:g}: ever diverted, moves" for mean in (0.04, LIMIT)))
    for name, rule in NAMES.items():
        cells = []
        for mean in (0.04, LIMIT):
            found = [rule(*one) for one in streams(1, slices, (mean, REQUESTS))]
            ever = sum(c.delay < math.inf for c in found) / slices
            cells.append(f"{ever:.1%}, {statistics.mean(c.moves for c in found):.1f}")
        yield (name, *cells)


def rate(mean: float) -> float:
    """The growth of the best bet, nats a request: what no rule with these bets can exceed."""
    x_N = stream(np.random.default_rng(2), mean, 200_000)
    return max(float(np.log1p(t * x_N).mean() - np.log1p(t * LIMIT)) for t in POS)


def delays(slices: int) -> Iterator[tuple[str, ...]]:
    """Requests until a slice that is broken from its first request is taken away."""
    yield ("rule", *(f"{m:g}: mean, 95th of 100" for m in (1.6 * LIMIT, 3 * LIMIT)))
    for name, rule in NAMES.items():
        cells = []
        for mean in (1.6 * LIMIT, 3 * LIMIT):
            given = streams(3, slices, (mean, REQUESTS))
            found = (machine(*g, until_away=True) if rule is machine else rule(*g) for g in given)
            cells.append(shown([c.delay for c in found]))
        yield (name, *cells)
    price = math.log(RULES.policy.enter_evidence)
    theory = [price / rate(m) for m in (1.6 * LIMIT, 3 * LIMIT)]
    yield ("log threshold over the growth of the best bet", *(f"{t:.0f}" for t in theory))
    mixed = [(price + math.log(len(POS))) / rate(m) for m in (1.6 * LIMIT, 3 * LIMIT)]
    yield (f"the same, with {len(POS)} bets to choose from", *(f"{t:.0f}" for t in mixed))


def shown(found: list[float]) -> str:
    missed = sum(map(math.isinf, found))
    if missed:
        return f"not seen in {missed} of {len(found)}"
    return f"{statistics.mean(found):.0f}, {np.quantile(found, 0.95):.0f}"


def recoveries(slices: int) -> Iterator[tuple[str, ...]]:
    """A fault of 600 requests that ends: when infer serves again, and what follows."""
    begins, lasts = 300, 600
    yield (
        "rule",
        "away within the fault",
        "requests from its end until it comes back",
        "moves after it came back",
    )
    for name, rule in NAMES.items():
        backs, again, seen = [], [], 0
        given = streams(4, slices, (SOUND, begins), (3 * LIMIT, lasts), (SOUND, REQUESTS))
        for one in given:
            course = rule(*one)
            ends = begins + lasts
            seen += bool(course.away[begins:ends].any())
            back = int(np.argmin(course.away[ends:])) if course.away[ends:].any() else 0
            backs.append(float(back))
            again.append(int(np.abs(np.diff(course.away[ends + back :].astype(int))).sum()))
        yield (name, f"{seen / slices:.0%}", shown(backs), f"{statistics.mean(again):.2f}")
    x_N = stream(np.random.default_rng(5), SOUND, 200_000)
    grows = max(float(np.log1p(t * x_N).mean() - np.log1p(t * LIMIT)) for t in NEG)
    shows = math.log(RULES.policy.leave_evidence) / grows
    yield (
        "log threshold over the growth of the best bet",
        "",
        f"{shows:.0f}, after the hold time",
        "",
    )


def adversaries(slices: int) -> Iterator[tuple[str, ...]]:
    """Traffic that was made to mislead: how many slices were ever taken away, and moves."""
    yield ("traffic", "on the mean", *NAMES)
    for said, mean, make in (
        ("one key is half of it and at 0.1, the others are sound", 0.065, _flood(0.5, 0.1)),
        ("one key is 19 of 20 and at 0.1, the others are sound", 0.0965, _flood(0.95, 0.1)),
        ("one key is half of it and at 0.5, the others are sound", 0.265, _flood(0.5, 0.5)),
        ("50 at 0.01 and 50 at 0.08, in turn", 0.045, _turns(50, 0.01, 0.08)),
        ("50 at 0.01 and 50 at 0.09, in turn", 0.05, _turns(50, 0.01, 0.09)),
        ("400 at 0.01 and 400 at 0.09, in turn", 0.05, _turns(400, 0.01, 0.09)),
    ):
        cells = []
        for rule in NAMES.values():
            found = [rule(*make(np.random.default_rng([6, i]))) for i in range(slices)]
            ever = sum(c.delay < math.inf for c in found) / slices
            cells.append(f"{ever:.0%}, {statistics.mean(c.moves for c in found):.1f}")
        yield (said, f"{mean:g}", *cells)


Made = Callable[[np.random.Generator], tuple[Array, Array]]


def _flood(part: float, mean: float) -> Made:
    def make(rng: np.random.Generator) -> tuple[Array, Array]:
        flood_N = rng.random(REQUESTS) < part
        x_N = np.where(flood_N, stream(rng, mean, REQUESTS), stream(rng, SOUND, REQUESTS))
        return x_N, np.where(flood_N, USERS, rng.integers(0, USERS, REQUESTS))

    return make


def _turns(length: int, low: float, high: float) -> Made:
    def make(rng: np.random.Generator) -> tuple[Array, Array]:
        high_N = (np.arange(REQUESTS) // length) % 2 == 1
        x_N = np.where(high_N, stream(rng, high, REQUESTS), stream(rng, low, REQUESTS))
        return x_N, rng.integers(0, USERS, REQUESTS)

    return make


def after_a_good_past(slices: int) -> Iterator[tuple[str, ...]]:
    """Requests from the fault to its being seen, after a hundred thousand sound ones."""
    most = 5000
    yield (
        "fault",
        "the machine: mean, 95th of 100",
        "its plain process alone",
        "log threshold over its growth",
    )
    dear = math.log(RULES.policy.enter_evidence * RULES.policy.horizon)
    for mean in (1.6 * LIMIT, 3 * LIMIT):
        found, plain = [], []
        for x_N, user_N in streams(7, slices, (SOUND, PAST), (mean, most)):
            both = _after(x_N, user_N)
            found.append(both[0])
            plain.append(both[1])
        unseen = f"not seen in {most:,}" if all(map(math.isinf, plain)) else shown(plain)
        yield (f"{mean:g}", shown(found), unseen, f"{dear / rate(mean):.0f}")


def _after(x_N: Array, user_N: Array) -> tuple[float, float]:
    """Requests until the machine, and until the plain process alone, have their price."""
    state, seen = begin(RULES, now=0.0), math.inf
    cell = RULES.watched[0]
    for i, (x, user) in enumerate(zip(x_N.tolist(), user_N.tolist(), strict=True)):
        state = asked(state, x, f"user {user}")
        if i >= PAST and evidence_above(RULES, cell, state.slices["slice"].tracks["tv"]).paid:
            seen = i - PAST + 1
            break
    log_n, plain = np.log1p(POS[:, None] * x_N[None, PAST:]), math.inf
    start = np.array([np.log1p(t * x_N[:PAST]).sum() - PAST * np.log1p(t * LIMIT) for t in POS])
    grown = start[:, None] + np.cumsum(log_n - np.log1p(POS * LIMIT)[:, None], axis=1)
    paid = [log_mean_exp(column) >= math.log(RULES.policy.enter_evidence) for column in grown.T]
    if any(paid):
        plain = float(paid.index(True) + 1)
    return float(seen), plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slices", type=int, default=150)
    parser.add_argument("--write", action="store_true", help=f"into {DOCS.name}")
    options = parser.parse_args()
    slices = options.slices
    few = max(1, slices // 5)
    text = "\n\n".join(
        f"### {title}\n\n{about}\n\n{table([*rows])}"
        for title, about, rows in (
            (
                "At the bound",
                f"{slices} slices of {REQUESTS:,} scored requests. Both means are sound; a move is "
                "a diversion, or the beginning of a return.",
                at_the_bound(slices),
            ),
            (
                "Delay",
                "Requests until a slice is diverted that exceeds its limit from the first one, "
                f"{slices} slices.",
                delays(slices),
            ),
            (
                "After a good past",
                f"{PAST:,} sound requests, then the fault; {max(2, slices // 15)} slices.",
                after_a_good_past(max(2, slices // 15)),
            ),
            (
                "Recovery",
                f"Sound for 300 requests, at {3 * LIMIT:g} for 600, then sound; {few} slices. The "
                f"machine's hold time is {DWELL} requests here.",
                recoveries(few),
            ),
            (
                "Adversaries",
                f"{few} slices of {REQUESTS:,} requests each: ever diverted, moves per slice.",
                adversaries(few),
            ),
        )
    )
    print(text)
    if options.write:
        committed.write(DOCS, text, "python -m benchmarks.routing --write")


if __name__ == "__main__":
    main()
