# What an answer costs, exactly: evidence of a known size just below and just above its price,
# for every kind of clause that chance can call violated.

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pytest

import servanda.judgement.clauses
from servanda.contract.model import Clause
from servanda.judgement.clauses import statistical
from servanda.judgement.clauses.base import Cell, Interim
from servanda.judgement.clauses.draft_acceptance import (
    DraftAcceptance,
    ServedDrafts,
)
from servanda.judgement.clauses.fidelity import Drawn, SamplerFidelity, ServedFidelity
from servanda.judgement.clauses.format_cost import FormatCertificate, FormatGrown
from servanda.judgement.clauses.guards import Coherent, Counts, UsableRatio
from servanda.judgement.clauses.reward_gap import Growth, Paired, RewardGap
from servanda.judgement.clauses.sample_ratio import SampleRatio, Split
from servanda.judgement.clauses.self_noise import SelfNoise
from servanda.judgement.clauses.service_level import (
    LOOKS,
    LoadOf,
    Samples,
    ServiceLevel,
    service_level,
)
from servanda.judgement.clauses.statistical import Certificate, Feed, Grown
from servanda.judgement.clauses.whole_responses import ResponseShare
from servanda.judgement.slices.rules import Cut
from servanda.theory.stats.bets import Refutation
from servanda.theory.stats.block_bootstrap import block_interval
from servanda.theory.stats.draft_counts import DraftCounts
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.log_moment import LogMoment
from servanda.theory.stats.mean_ratio import MeanRatio, ratios
from servanda.traces.request_log import Assignment
from tests import oracles

LIMIT = 0.1
ROOM = 8  # tokens that a prompt group has room for
PRICES = [(1, 1.0), (2, 1.0), (20, 1.0), (1, 0.25), (20, 0.25), (1, 0.001), (20, 0.001)]
DEAREST = math.log(20 / 0.001)  # nats; evidence has to be more, for an alpha below 1
CLAUSE = Clause.model_validate(
    {"id": "it", "metric": "tv", "aggregate": "mean", "at_most": LIMIT, "slices": "all"}
)


@dataclass(frozen=True)
class Case:
    """Rounds of evidence, and how many nats there are of it by an oracle.

    Args:
        red: that the promise is broken; green: that it is kept; None: none at all.
        near: nats by which the oracle and the code may differ.
    """

    kind: Any
    rounds: list[Any]
    red: float | None = None
    green: float | None = None
    claim: str = "realised"
    near: float = 1e-6
    clause: Clause = CLAUSE

    def judged(self, *, alpha: float, cells: int = 1, part: float = 1.0, first: int = 1) -> Any:
        cell = Cell(self.clause, "statistical", (), Cut("all"), self.claim, ROOM, self.kind, "w")
        look = Interim(alpha, cells, first, launched=400, intervals=False, part=part)
        return self.kind.judge(cell, self.rounds, None, look)


def bits(ones: int, n: int) -> list[float]:
    return [1.0] * ones + [0.0] * (n - ones)


def moment(xs: list[float]) -> LogMoment:
    return LogMoment.of(np.array(xs))


def grown(process: Any) -> Grown:
    return Grown(process, process.below_growth(LIMIT), process.above_growth(LIMIT))


def realised(*rounds: list[float], proves: bool = True) -> Case:
    """Speaks of what was measured so far, so the rounds are one."""
    xs = [*chain(*rounds)]
    red, green = (oracles.most([xs], bets, LIMIT) for bets in (oracles.POS, oracles.NEG))
    kind = Certificate(Feed(LIMIT, proves=proves))
    return Case(kind, [grown(moment(r)) for r in rounds], red, green if proves else None)


def population(*rounds: tuple[int, int]) -> Case:
    """Groups of three tokens that are all 1, and of eight that are all 0; what was red stays so."""
    zs = [[LIMIT + 3 * (1 - LIMIT) / ROOM] * bad + [0.0] * good for bad, good in rounds]
    found = []
    for bad, good in rounds:
        total, tokens = (np.array([a] * bad + [b] * good) for a, b in ((3.0, 0.0), (3, 8)))
        found.append(grown(GroupRatio(ROOM, bad + good, total, tokens, np.zeros_like(tokens))))
    red = oracles.most(zs, oracles.POS, LIMIT)
    green = oracles.most([[*chain(*zs)]], oracles.NEG, LIMIT)
    return Case(Certificate(Feed(LIMIT)), found, red, green, "population")


def reward_gap(*rounds: list[float], claim: str = "realised") -> Case:
    """x of a reward in [0, 1] is 1/2 where both answers have the same; two ends share alpha."""
    limit, xs = 0.2, [*chain(*rounds)]
    low, high = (1 - limit) / 2, (1 + limit) / 2
    sums = [xs] if claim == "realised" else list(rounds)
    # the weights are those of the upper end, for both ends
    neg, pos = (oracles.weights(bets, high, 0.5) for bets in (oracles.NEG, oracles.POS))
    red = max(oracles.most(sums, oracles.POS, high, pos), oracles.most(sums, oracles.NEG, low, neg))
    green = min(
        oracles.most([xs], oracles.NEG, high, neg), oracles.most([xs], oracles.POS, low, pos)
    )
    found = []
    for process in map(moment, rounds):
        inside = process.below_growth(high), process.above_growth(low)
        outside = process.above_growth(high), process.below_growth(low)
        found.append(Paired(process, 0.0, 0.0, 0.0, 1.0, Growth(inside, outside)))
    return Case(RewardGap(limit, 1.0), found, red - math.log(2), green - math.log(2), claim)


def self_noise(**ones: int) -> Case:
    """Two sides may be called unsteady, so each has half of alpha."""
    sides = {side: bits(k, 60) for side, k in ones.items()}
    red = max(oracles.most([xs], oracles.POS, LIMIT) for xs in sides.values())
    found = {side: grown(moment(xs)) for side, xs in sides.items()}
    return Case(SelfNoise(), [found], red - math.log(2))


def drafts(accepted: int, n: int) -> Case:
    """Drafts of one token; the limit is a least share, so red is evidence of less."""
    xs = bits(accepted, n)
    limit = 0.5
    below, above = (oracles.weights(bets, limit) for bets in (oracles.NEG, oracles.POS))
    red, green = (
        oracles.most([xs], bets, limit, weights)
        for bets, weights in ((oracles.NEG, below), (oracles.POS, above))
    )
    about = {"id": "it", "metric": "draft_acceptance", "at_least": limit}
    counts = DraftCounts(n, n, accepted, (accepted,))
    return Case(DraftAcceptance(), [counts], red, green, clause=Clause.model_validate(about))


def drawn_drafts(*rounds: tuple[int, int]) -> Case:
    """The same of a check: drafts of one token."""
    case = drafts(sum(yes for yes, _ in rounds), sum(n for _, n in rounds))
    found = [DraftCounts(n, n, yes, (yes,)) for yes, n in rounds]
    return replace(case, kind=ServedDrafts(), rounds=found)


def refuting(kind: Any, *rounds: float) -> Case:
    """Two alternatives grow in a round, the second by a nat less; the peak over rounds counts."""
    found: list[Any] = [Refutation(10, (growth, growth - 1.0)) for growth in rounds]
    if isinstance(kind, SamplerFidelity | ServedFidelity):
        found = [Drawn(refutation) for refutation in found]
    red = max(oracles.mixed([s, s - i]) for i, s in enumerate(accumulate(rounds), 1))
    return Case(kind, found, red)


def fidelity(*rounds: float, of: str, beside: str = "") -> Case:
    """Where both sides draw, either may be called unfaithful: they share the price."""
    case = refuting(SamplerFidelity(), *rounds)
    silent = {beside: Drawn(Refutation(10, (-1.0, -2.0)))} if beside else {}
    found = [{of: refutation, **silent} for refutation in case.rounds]
    return Case(case.kind, found, case.red - math.log(2 if beside else 1))


def compared(kind: Any, own: tuple[int, int], **peers: tuple[int, int]) -> Case:
    """Each side of the comparison at half of alpha, which the peers share."""

    def ends(nats: float) -> tuple[tuple[float, float], tuple[float, float]]:
        alpha = math.exp(-nats) / 2
        theirs = [oracles.bernoulli_ends(*p, alpha / len(peers)) for p in peers.values()]
        low, high = (kind.times * max(side) for side in zip(*theirs, strict=True))
        return oracles.bernoulli_ends(*own, alpha), (low, high)

    red = crossing(lambda nats: ends(nats)[0][0] - ends(nats)[1][1])
    green = crossing(lambda nats: ends(nats)[1][0] - ends(nats)[0][1])
    moments = {name: moment(bits(*p)) for name, p in peers.items()}
    return Case(kind, [statistical.Compared(moment(bits(*own)), moments)], red, green, near=0.02)


def mass_gap(inside: tuple[int, int], outside: tuple[int, int], limit: float = LIMIT) -> Case:
    """Two bounds, each at half of alpha; x is 1/2 where a token says nothing."""

    def ends(nats: float) -> tuple[float, float]:
        below, above = (oracles.bernoulli_ends(*p, math.exp(-nats) / 2)[1] for p in sides)
        return 1 - 2 * below, 2 * above - 1

    sides = inside, outside
    red = crossing(lambda nats: max(ends(nats)[0], -ends(nats)[1]) - limit)
    green = crossing(lambda nats: limit - max(-ends(nats)[0], ends(nats)[1]))
    rounds = [tuple(moment(bits(*p)) for p in sides)]
    return Case(statistical.MassGap(limit), rounds, red, green, near=0.02)


def sample_ratio(*hits: float, planned: float) -> Case:
    """The most, over the users so far, of a mean of likelihood ratios to the bound on each side."""
    clause = Clause.model_validate({"id": "it", "metric": "sample_ratio", "at_most": 0.1})
    low, high = 0.9 * planned, 1.1 * planned
    apart = [0.02 * 200 ** (i / 19) for i in range(20)]  # of a share from its bound
    pairs = [(low * math.exp(-d), low) for d in apart]
    odds = [high / (1 - high) * math.exp(d) for d in apart]
    pairs += [(o / (1 + o), high) for o in odds]
    ratios, red = [1.0] * len(pairs), 0.0
    for hit in hits:
        ratios = [
            r * (p / q if hit else (1 - p) / (1 - q))
            for r, (p, q) in zip(ratios, pairs, strict=True)
        ]
        red = max(red, math.log(math.fsum(ratios) / len(ratios)))
    users = [
        Assignment("", "", 0.0, str(i), "infer" if h else "stable") for i, h in enumerate(hits)
    ]
    cell = Cell(clause, "observability", (), Cut("all"), "realised", ROOM, SampleRatio(), "w")
    shares = SampleRatio().weigh(cell, Split(planned, tuple(users)))
    return Case(SampleRatio(), [shares], red, clause=clause)


def beside_format(*units: tuple[float, float, int]) -> Case:
    """x and y of units, and how many; red needs both rules, green mixes them four to one."""
    times, bets = 1.5, [0.02 * 49 ** (i / 5) for i in range(6)]
    xs, ys = zip(*[(x, y) for x, y, n in units for _ in range(n)], strict=True)

    def by_format(sign: int) -> float:
        sums = [
            math.fsum(
                math.log1p(b / (times if sign < 0 else 1) * sign * (times * y - x))
                for x, y in zip(xs, ys, strict=True)
            )
            for b in bets
        ]
        return oracles.mixed(sums)

    red = min(oracles.most([[*xs]], oracles.POS, LIMIT), by_format(-1))
    number = oracles.most([[*xs]], oracles.NEG, LIMIT)
    green = math.log(0.8 * math.exp(number) + 0.2 * math.exp(by_format(1)))
    pairs = MeanRatio.of_units(np.array(xs), np.array(ys), ratios(times))
    own = grown(moment([*xs]))
    found = FormatGrown(own.process, own.below, own.above, pairs)
    return Case(FormatCertificate(Feed(LIMIT), times, "bfloat16"), [found], red, green)


def crossing(excess: Callable[[float], float]) -> float | None:
    """The nats at which an excess, which falls as they grow, is gone."""
    low, high = 1.0, 100.0
    if excess(low) <= 0:
        return None
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


NOISE = statistical.RelativeToNoise(Feed(limit=1.0), times=3.0)
STABLE = statistical.RelativeToStable(Feed(limit=1.0), times=2.0)


@cache  # the oracles of these take seconds, which collecting the tests need not wait for
def every() -> dict[str, Case]:
    return {
        "realised": realised(bits(20, 40), bits(4, 20)),
        "realised, kept": realised(bits(2, 150), bits(0, 100)),
        "responses": replace(realised(bits(20, 40), bits(4, 20)), kind=ResponseShare(Feed(LIMIT))),
        "unbounded": realised(bits(24, 60), proves=False),
        "population": population((40, 10), (0, 50)),
        "population, red later": population((3, 30), (40, 10)),
        "population, kept": population((2, 150), (0, 100)),
        "reward gap up": reward_gap(bits(38, 40), bits(10, 10)),
        "reward gap down": reward_gap(bits(2, 40), bits(0, 10)),
        "reward gap, kept": reward_gap([0.5] * 300, [0.55] * 20),
        "reward gap of a population": reward_gap([1.0] * 40, [0.4] * 30, claim="population"),
        "drafts": drafts(10, 100),
        "drafts, kept": drafts(90, 100),
        "drawn drafts": drawn_drafts((2, 40), (8, 60)),
        "drawn drafts, kept": drawn_drafts((30, 40), (50, 60)),
        "train unsteady": self_noise(self_train=27, self_infer=0),
        "infer unsteady": self_noise(self_infer=27),
        "fidelity of infer alone": fidelity(9.0, 6.0, of="infer"),
        "fidelity of infer": fidelity(15.0, of="infer", beside="train"),
        "fidelity of train": fidelity(16.0, -3.0, of="train", beside="infer"),
        "served": refuting(ServedFidelity(), 14.0, 1.0),
        "coherence": refuting(Coherent(), 14.0, -5.0, 2.0),
        "noise": compared(NOISE, (140, 200), self_train=(3, 300), self_infer=(8, 300)),
        "noise of one side": compared(NOISE, (140, 200), self_train=(8, 300)),
        "noise, kept": compared(NOISE, (10, 600), self_train=(90, 300), self_infer=(40, 300)),
        "stable": compared(STABLE, (140, 200), stable=(15, 200)),
        "stable, kept": compared(STABLE, (20, 400), stable=(120, 400)),
        "too few users": sample_ratio(*bits(20, 300), planned=0.2),
        "too many users": sample_ratio(*bits(0, 50), *bits(60, 100), planned=0.2),
        "mass gap up": mass_gap((20, 200), (100, 200)),
        "mass gap down": mass_gap((100, 200), (20, 200)),
        "beyond the format": beside_format((0.5, 0.1, 120), (0.0, 0.1, 40)),
        "as the format": beside_format((0.2, 0.3, 80), (0.3, 0.2, 40)),
        "within the number, beyond the format": beside_format((0.02, 0.0, 300)),
        "mass gap, kept": mass_gap((400, 800), (400, 800), limit=0.35),
    }


def broken() -> dict[str, Case]:
    return {name: case for name, case in every().items() if case.red and case.red > DEAREST}


def test_a_violation_costs_cells_over_the_legs_part_of_alpha():
    assert len(broken()) >= 20
    for name, case in broken().items():
        for cells, part in PRICES:
            for more, outcome in ((-case.near, True), (case.near, False)):
                alpha = cells / part * math.exp(-case.red - more)
                found = case.judged(alpha=alpha, cells=cells, part=part)
                assert (found.outcome == "violated") == outcome, (name, cells, part, more)
                if found.e_violated is not None:
                    assert found.e_violated == pytest.approx(case.red, abs=case.near), name


def test_holding_costs_alpha_whatever_the_cells_and_the_leg():
    kept = {name: case for name, case in every().items() if case.green and case.green > 1}
    assert len(kept) >= 10
    for name, case in kept.items():
        for cells, part in PRICES:
            for more, outcome in ((-case.near, True), (case.near, False)):
                found = case.judged(alpha=math.exp(-case.green - more), cells=cells, part=part)
                assert (found.outcome == "holds") == outcome, (name, cells, part, more)


def test_a_promise_holds_from_the_first_size_on_and_is_broken_at_any_size():
    for name, case in every().items():
        for nats, outcome in ((case.green, "holds"), (case.red, "violated")):
            if nats and nats > 1:
                alpha = math.exp(case.near - nats)
                found = [case.judged(alpha=alpha, first=size).outcome for size in (400, 401)]
                any_size = outcome == "violated" or name == "drafts, kept"  # of a training step
                assert found == [outcome, outcome if any_size else "inconclusive"], name


def timed(key: str, near: float = 0.001) -> Case:
    """Ten blocks of two requests, and a limit that their interval just misses at all of alpha."""
    blocks = tuple((1.0 + i % 7 / 20, 1.1 + i % 3 / 20) for i in range(10))
    end, factor = {"at_most": (0, 1 - near), "at_least": (1, 1 + near)}[key]
    limit = factor * block_interval(blocks, None, 0.025 / len(LOOKS) / 2, seed=1)[end]
    about = {"id": "it", "metric": "time_to_first_token_seconds", "aggregate": "mean"}
    clause = Clause.model_validate(about | {key: limit, "load": {"concurrency": 2}})
    kind = service_level(clause, LoadOf("w", 2, 8), seed=1)
    return Case(kind, [Samples(blocks, blocks)], clause=clause)


def by_chance() -> dict[Any, str]:
    """How each kind judges that statistics can call red, and one of the kinds that do so."""
    found = {}
    for module in pkgutil.iter_modules(servanda.judgement.clauses.__path__):
        there = importlib.import_module(f"servanda.judgement.clauses.{module.name}")
        for name, kind in inspect.getmembers(there, inspect.isclass):
            if getattr(kind, "counts", False) is True or issubclass(kind, ServiceLevel):
                found[kind.judge] = name
    return found


def priced() -> dict[str, Case]:
    times = {"time at most": timed("at_most"), "time at least": timed("at_least")}
    return broken() | times


def test_every_kind_that_chance_can_call_violated_is_priced_here():
    """A new kind belongs among the cases: its evidence just below and just above the price."""
    missing = by_chance().keys() - {type(case.kind).judge for case in priced().values()}
    assert not missing, [by_chance()[judge] for judge in missing]


def test_red_for_all_of_alpha_is_not_red_for_a_thousandth_of_it():
    for name, case in priced().items():
        alpha = 0.025 if case.red is None else 1.01 * math.exp(case.near - case.red)
        assert case.judged(alpha=alpha).outcome == "violated", name
        assert case.judged(alpha=alpha, part=1 / 1000).outcome != "violated", name


@pytest.mark.parametrize("key", ["at_most", "at_least"])
def test_a_time_is_judged_at_both_ends_of_a_third_of_alpha(key):
    outcomes = [timed(key, near).judged(alpha=0.025).outcome for near in (0.001, -0.001)]
    assert outcomes == ["violated", "inconclusive"]


@pytest.mark.parametrize("alpha", [0.045, 1e-4])
def test_rewards_that_never_differ_need_the_units_of_two_ends(alpha):
    needed = RewardGap(0.2, 1.0).units_at_best(alpha)
    few, enough = (reward_gap([0.5] * n).green for n in (needed - 1, needed))
    assert few < -math.log(alpha) <= enough


def test_a_mean_without_bound_is_an_estimate_however_small_it_is():
    found = realised(bits(0, 400), proves=False).judged(alpha=0.5)
    assert (found.outcome, found.kind, found.more) == ("inconclusive", "estimate", None)
    assert "never certified" in found.note


@pytest.mark.parametrize(("ones", "open_"), [(0, False), (1, True)])
def test_times_a_noise_of_0_is_closed_where_the_kernels_do_not_differ_either(ones, open_):
    found = compared(NOISE, (ones, 400), self_train=(0, 300)).judged(alpha=0.025)
    assert (found.outcome, found.open) == ("inconclusive", open_)
    assert (found.more is None) == (not open_)


def test_a_share_of_nothing_stays_open():
    clause = Clause.model_validate({"id": "it", "metric": "usable_ratio", "at_least": 0.9})
    case = Case(UsableRatio(), [Counts(0, 0)], clause=clause)
    found = case.judged(alpha=0.025)
    assert (found.outcome, found.open) == ("inconclusive", True)
    assert found.note == "nothing was measured yet"
