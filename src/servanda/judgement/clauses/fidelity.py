# Fidelity: tests whether tokens were sampled from the reported distribution.
#
# Four families of tests on the same tokens: their ranks, the frequency of sets of ids that the
# text defines, the frequency of each id, and their ranks request by request.  Their mixture is
# judged.
#
# Strength is the smallest fault that a check would have rejected at this sample size, computed from
# the masses of the run's own top-k tokens, see stats/tilts.py, at the check's own threshold; "would
# have rejected" means with probability 0.9 or more.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from servanda.judgement.clauses.base import (
    DRAWS,
    GUARDS,
    ORDER,
    Array,
    Cell,
    CellVerdict,
    Interim,
    Kind,
    Outcome,
    View,
)
from servanda.judgement.clauses.guards import capture_of, errors_of, lost, refuted
from servanda.theory.divergence.precision import errors
from servanda.theory.stats import likelihood_ratio, pit
from servanda.theory.stats.alpha import log_shared
from servanda.theory.stats.bets import LEAK, SLACK, Refutation, by_request, log_mean_exp
from servanda.theory.stats.cells import Cells
from servanda.theory.stats.likelihood_ratio import LikelihoodRatio, cell_factors, log_factors
from servanda.theory.stats.pit import (
    Fidelity,
    Served,
    edges,
    log_bets,
    log_densities,
    served_factors,
)
from servanda.theory.stats.tilts import STRENGTHS, Tilts, by_cells, by_rank
from servanda.traces.token_history import SETS, sets_of
from servanda.traces.trace import Trace

SHARES = (0.5, 0.2, 0.2, 0.1)  # of the mixture: ranks, sets, cells, requests
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


# The recorded top-k tokens of positions, and their sets by earlier text.


_FULL = 1 + SLACK  # largest accepted sum of masses


@dataclass(frozen=True)
class Likeliest:
    """The positions of a trace with recorded top-k tokens.

    Args:
        ids_NK, mass_NK: best first; token_N: the sampled token; before_N: the token before it, or
            -1.
        inside: set -> which of the top-k tokens are in it, [N, K].
        error: bound of the rounding error of their logprobs, nats.
        known_N: mask of these tokens among all of the trace.
    """

    ids_NK: Array
    mass_NK: Array
    token_N: Array
    before_N: Array
    inside: Mapping[str, Array]
    error: float
    known_N: Array

    @classmethod
    def of(cls, trace: Trace, position_N: Array, inside_N: Array) -> Likeliest | None:
        """From the tokens inside; None if the trace has no top-k tokens.

        Args:
            position_N: position of each token within its sequence.
        """
        if trace.best is None:
            return None
        ids_NK, logp_NK = trace.best
        with np.errstate(over="ignore"):
            mass_NK = np.exp(logp_NK)
        known_N = inside_N & (mass_NK.sum(axis=1) <= _FULL)  # false for NaN
        before_N = np.where(position_N > 0, np.roll(trace.token_N, 1), -1)
        sets = {name: sets_of(trace, name) for name in SETS}
        # a logprob of -1e30 has an error of 1e23 nats, and no mass that it could be of
        seen_n = logp_NK[known_N][mass_NK[known_N] > 0]
        error_n = errors(seen_n, capture_of(trace))
        return cls(
            ids_NK[known_N],
            mass_NK[known_N],
            trace.token_N[known_N],
            before_N[known_N],
            {name: in_NK[known_N] for name, in_NK in sets.items() if in_NK is not None},
            max(float(error_n.max(initial=0.0)), SLACK),
            known_N,
        )

    @property
    def n(self) -> int:
        return len(self.token_N)

    def bets(self) -> Array:
        """Log factors of each set at each odds, [sets * odds, N]; empty without known sets."""
        bets = []
        for in_NK in self.inside.values():
            mass_N = np.where(in_NK, self.mass_NK, 0.0).sum(axis=1)
            low_N, high_N = mass_N * np.exp(-self.error), mass_N * np.exp(self.error)
            bets.append(log_bets(low_N, high_N, self._hit(in_NK)))
        return np.concatenate(bets) if bets else np.zeros((0, self.n))

    def drawn_and_expected(self) -> tuple[tuple[float, float], ...]:
        """The observed and expected count of each set."""
        return tuple(
            (float(self._hit(in_NK).sum()), float(self.mass_NK[in_NK].sum()))
            for in_NK in self.inside.values()
        )

    def cells(self, missing: int, log_weight: float = 0.0) -> Cells:
        """See `Cells.of`."""
        return Cells.of(
            *(self.ids_NK, self.mass_NK, self.token_N, self.before_N),
            missing=missing,
            error=self.error,
            log_weight=log_weight,
        )

    def _hit(self, in_NK: Array) -> Array:
        drawn_NK = (self.ids_NK == self.token_N[:, None]) & (self.mass_NK > 0)
        return (drawn_NK & in_NK).any(axis=1)


REJECTION_OF_TRAIN = (
    "the tokens that train drew for its own answers do not follow the distribution that it "
    "reports: an undisclosed temperature, top-p or greedy decoding, so their rewards are not "
    "those of the kernel that scores"
)


@dataclass(frozen=True)
class Drawn:
    """The evidence of a closed round's tokens against the reported distribution.

    Args:
        ranks: by ranks, or by cells of the top-k tokens.
        sets: by the sets of `token_history.SETS`, in order.
        cells: by ids and pairs of ids.
        requests: by ranks of each request.
        met: observed and expected count of each set.
        seen: the effect that simulated faults would have on `ranks` and `sets`.
    """

    ranks: Refutation = field(default_factory=Refutation)
    sets: Refutation = field(default_factory=Refutation)
    cells: Cells = field(default_factory=Cells)
    requests: Refutation = field(default_factory=Refutation)
    met: tuple[tuple[float, float], ...] = ()
    seen: Positions = field(default_factory=Positions, repr=False, compare=False)

    def __add__(self, other: Drawn) -> Drawn:
        pairs = zip(self.met, other.met, strict=False)
        met = tuple((a + c, b + d) for (a, b), (c, d) in pairs)
        return Drawn(
            self.ranks + other.ranks,
            self.sets + other.sets,
            self.cells + other.cells,
            self.requests + other.requests,
            met or self.met or other.met,
            self.seen + other.seen,
        )


def log_evidence(rounds: Sequence[Drawn]) -> tuple[float, tuple[float, ...], float]:
    """The largest log e-value over prefixes of rounds, that of each family there, and the last.

    Ids are evaluated at prefix lengths on a fixed grid, and at the last.  Families without records
    have no share of the mixture.
    """
    if not rounds:
        return 0.0, (0.0, *(-math.inf,) * (len(SHARES) - 1)), 0.0
    grid = {round(2 ** (i / 2)) for i in range(64)} | {len(rounds)}
    cells_P, total = np.full(len(rounds), -np.inf), Cells()
    for i, r in enumerate(rounds):
        total += r.cells
        if i + 1 in grid and total.n:
            cells_P[i] = log_mean_exp(np.maximum(total.growth, -1e9))
    others = (_grown([getattr(r, name) for r in rounds]) for name in ("ranks", "sets", "requests"))
    ranks_P, sets_P, requests_P = others
    there = (True, total.n > 0, total.n > 0, any(r.requests.growth for r in rounds))
    share_F = np.where(there, SHARES, 0.0)
    with np.errstate(divide="ignore"):
        log_F = np.log(share_F / share_F.sum())
    families_FP = np.stack([ranks_P, sets_P, cells_P, requests_P])
    mixed_P = np.logaddexp.reduce(families_FP + log_F[:, None], axis=0)
    best = int(np.argmax(mixed_P))
    families_F = np.where(there, families_FP[:, best], -np.inf)
    return float(mixed_P[best]), tuple(families_F.tolist()), float(mixed_P[-1])


def _grown(parts: Sequence[Refutation]) -> Array:
    """The log e-value of each prefix, [rounds]; 0 nats if not evaluated."""
    width = max((len(p.growth) for p in parts), default=0)
    if not width:
        return np.zeros(len(parts))
    # a round may lack the last alternatives, which count as no bet
    growth_PJ = np.array([(*p.growth, *(0.0,) * width)[:width] for p in parts]).cumsum(axis=0)
    top_P = growth_PJ.max(axis=1)
    return top_P + np.log(np.exp(growth_PJ - top_P[:, None]).mean(axis=1))


class _Fidelity(Kind):
    rejection: ClassVar[str]
    unseen: ClassVar[str]

    def _judged(
        self, cell: Cell, rounds: Sequence[Drawn], look: Interim, rejection: str, unseen: str
    ) -> CellVerdict:
        log_e, families, now = log_evidence(rounds)
        whole = sum(rounds, Drawn())
        why = _why(whole, families, rejection)
        return refuted(cell, whole.ranks, log_e, look, why, unseen, now)


def _why(whole: Drawn, families: Sequence[float], rejection: str) -> str:
    """The text of a rejection, by the family with the most evidence."""
    ranks, sets, cells, requests = families
    if ranks >= max(sets, cells, requests):
        return rejection
    if requests > max(sets, cells):
        return (
            "the samplers of single requests differ from the reported one, some in one direction "
            "and some in the other: a temperature or another parameter of other requests"
        )
    if sets >= cells and whole.sets.growth:
        growth = np.array(whole.sets.growth).reshape(len(SETS), -1).max(axis=1)
        worst = int(np.argmax(growth))
        drawn, expected = whole.met[worst]
        return (
            f"{[*SETS.values()][worst]} were drawn {drawn:,.0f} times where {expected:,.1f} are "
            "expected of the reported distribution: an undisclosed repetition, presence or "
            "frequency penalty, or another sampler that depends on the text so far"
        )
    if whole.cells.in_pairs():
        return (
            "tokens are drawn otherwise than reported in a way that depends on the token before "
            "them: another model, or a sampler that looks at the text so far"
        )
    return whole.cells.worst() + ": tokens that are banned or favoured without a report of it"


@GUARDS.register("sampler_fidelity")
@dataclass(frozen=True)
class SamplerFidelity(_Fidelity):
    """Tests whether served tokens follow the distribution that the infer kernel reports.

    By the rank of each token if the whole distribution was available, otherwise by the reported
    top-k tokens, with less power; and by the frequencies of ids that occurred before in the text,
    and of each id.  If train generates responses too, for their rewards, its tokens are tested
    against train's own report.
    """

    counts = True
    rejection: ClassVar[str] = (
        "served tokens do not follow the reported distribution: an undisclosed "
        "temperature, top-p or mask, logprobs of another transform, or speculation that accepts "
        "drafts by other probabilities than it draws them by"
    )
    unseen: ClassVar[str] = (
        "{side} records neither where its tokens rank nor its best tokens, so no one can tell what "
        "it draws from: let it report top logprobs"
    )

    def weigh(self, cell: Cell, view: View) -> Mapping[str, Drawn]:
        drawn = {"infer": _evidence(cell, view)}
        if DRAWS in view.peers:
            drawn["train"] = _evidence(cell, view.peers[DRAWS])
        return drawn

    def judge(
        self, cell: Cell, rounds: list[Mapping[str, Drawn]], floor: object, look: Interim
    ) -> CellVerdict:
        texts = {"infer": self.rejection, "train": REJECTION_OF_TRAIN}
        sides, shared = self._shared(rounds, look)
        verdicts = []
        for side in sides:
            own, unseen = [r[side] for r in rounds if side in r], self.unseen.format(side=side)
            verdict = self._judged(cell, own, shared, texts[side], unseen)
            if side == "train" and verdict.outcome == "violated":
                verdict = verdict.but(reason="train draws otherwise")
            verdicts.append(verdict)
        e_values = [v.e_violated for v in verdicts if v.e_violated is not None]
        return min(verdicts, key=lambda v: ORDER.index(v.outcome)).but(
            n=sum(v.n for v in verdicts),
            missing=sum(v.missing for v in verdicts),
            e_violated=max(e_values) - log_shared(len(sides)) if e_values else None,
        )

    def unexamined(
        self, cell: Cell, rounds: list[Mapping[str, Drawn]], look: Interim
    ) -> tuple[str, ...]:
        """Effects below the power of this check, one sentence each."""
        sides, shared = self._shared(rounds, look)
        return tuple(
            text
            for side in sides
            for text in _unexamined(
                cell,
                sum((r[side] for r in rounds if side in r), Drawn()),
                shared,
                "" if side == "infer" else f" of {side}'s own tokens",
            )
        )

    @staticmethod
    def _shared(rounds: list[Mapping[str, Drawn]], look: Interim) -> tuple[list[str], Interim]:
        """The tested sides with their thresholds."""
        sides = ["infer", *(["train"] if any("train" in r for r in rounds) else [])]
        return sides, replace(look, cells=max(look.cells, 1) * len(sides))


def _unexamined(cell: Cell, whole: Drawn, look: Interim, of: str = "") -> tuple[str, ...]:
    name = cell.clause.id if not cell.cut.terms else f"{cell.clause.id} on {cell.cut.name}"
    if not whole.cells.n:
        return (NOTHING.format(name=name + of),)
    return weakest(name + of, whole.cells, whole.seen, look)


def _evidence(cell: Cell, view: View) -> Drawn:
    """Evidence against the tokens of a view, from the reports of the sampling kernel."""
    trace, inside_N, absent = view.pair.infer, view.mask(cell.cut), lost(cell, view)
    by_rank = "mass_before" in trace.columns
    tests: list[Refutation] = []
    apart: list[Refutation] = []
    if trace.best is not None:
        ids_NK, logp_NK = (best_NK[inside_N] for best_NK in trace.best)
        tests.append(LikelihoodRatio.of(ids_NK, logp_NK, trace.token_N[inside_N], absent))
        factors_JN, known_N = log_factors(ids_NK, logp_NK, trace.token_N[inside_N])
        request_N = view.sequence_N[inside_N][known_N]
        apart.append(_requests(factors_JN, likelihood_ratio.OPPOSITE, request_N, tests[0].missing))
    if by_rank:
        u_N, request_N, missing = _ranks(view, inside_N, absent)
        tests.insert(0, Fidelity.of(u_N, missing))
        apart.append(_requests(log_densities(u_N), pit.OPPOSITE, request_N, missing))
    if not tests:
        return Drawn(Refutation(missing=int(inside_N.sum()) + absent))
    ranks, requests = _beside(tests), _beside(apart)
    table = Likeliest.of(trace, view.pair.position_N, inside_N)
    if table is None:
        return Drawn(ranks, requests=requests)
    missing = int(inside_N.sum()) - table.n + absent
    bets_JN = table.bets()
    growth_J = bets_JN.sum(axis=1) + missing * math.log(LEAK)
    return Drawn(
        ranks,
        Refutation(table.n, tuple(growth_J.tolist()), missing) if len(bets_JN) else Refutation(),
        table.cells(missing),
        requests,
        table.drawn_and_expected(),
        positions_of(table.mass_NK, table.inside, by_rank=by_rank, missing=missing),
    )


def _beside(tests: Sequence[Refutation]) -> Refutation:
    """Combine tests of the same tokens: a mixture of their alternatives."""
    growth = tuple(g for test in tests for g in test.growth)
    return replace(max(tests, key=lambda test: test.n), growth=growth)


def _requests(
    log_JN: Array, opposite: Sequence[tuple[int, int]], request_N: Array, missing: int
) -> Refutation:
    growth_P = by_request(log_JN, opposite, request_N) + missing * math.log(LEAK)
    return Refutation(len(request_N), tuple(growth_P.tolist()), missing)


def _ranks(view: View, inside_N: Array, absent: int) -> tuple[Array, Array, int]:
    """The PIT value of each known token, its request, and the number of missing ones."""
    columns = view.pair.infer.columns
    known_N = inside_N & np.isfinite(columns["logp"]) & np.isfinite(columns["mass_before"])
    assert view.uniform_N is not None  # every workload view has one
    u_N = columns["mass_before"] + view.uniform_N * np.exp(columns["logp"])
    missing = int((inside_N & ~known_N).sum()) + absent
    return np.minimum(u_N[known_N], 1.0), view.sequence_N[known_N], missing


@GUARDS.register("served_fidelity")
@dataclass(frozen=True)
class ServedFidelity(_Fidelity):
    """Tests served tokens against infer's reported logprobs, by means of train's distribution.

    If infer reports only each token's own logprob, train provides its rank, and the mass of ids
    that occurred before in the text.
    """

    counts = True
    rejection: ClassVar[str] = (
        "served tokens do not follow the distribution that their logprobs describe, as train "
        "ranks them: an undisclosed temperature, top-p or mask, a token that is never drawn, or "
        "speculation that accepts drafts by other probabilities than it draws them by"
    )
    unseen: ClassVar[str] = (
        "train records neither where the served tokens rank nor its best tokens: let it report "
        "top logprobs"
    )

    def weigh(self, cell: Cell, view: View) -> Drawn:
        train, infer, absent = view.pair.train, view.pair.infer, lost(cell, view)
        inside_N = view.mask(cell.cut)
        known_N = inside_N & view.usable_N
        ratio_N, error_N = view.log_ratio(), errors_of(train) + errors_of(infer)

        def weighed(
            factors_JN: Array, seen_N: Array, opposite: Sequence[tuple[int, int]]
        ) -> tuple[Refutation, Refutation]:
            missing = int((inside_N & ~seen_N).sum()) + absent
            served = (factors_JN, ratio_N[seen_N])
            apart = _requests(
                served_factors(*served, error_N[seen_N]),
                opposite,
                view.sequence_N[seen_N],
                missing,
            )
            return Served.of(*served, missing, error_N[seen_N]), apart

        tests: list[tuple[Refutation, Refutation]] = []
        by_rank = "mass_before" in train.columns
        if by_rank:
            seen_N = known_N & np.isfinite(train.columns["mass_before"])
            own_N = np.exp(train.columns["logp"])
            assert view.uniform_N is not None  # every workload view has one
            u_N = np.minimum(train.columns["mass_before"] + view.uniform_N * own_N, 1.0)
            tests.append(weighed(log_densities(u_N[seen_N]), seen_N, pit.OPPOSITE))
        if train.best is not None:
            seen_N = known_N.copy()
            ids_NK, logp_NK = (best_NK[seen_N] for best_NK in train.best)
            factors_JN, told_n = log_factors(ids_NK, logp_NK, infer.token_N[seen_N])
            seen_N[seen_N] = told_n
            tests.append(weighed(factors_JN, seen_N, likelihood_ratio.OPPOSITE))
        if not tests:
            return Drawn(Refutation(missing=int(inside_N.sum()) + absent))
        ranks, requests = map(_beside, zip(*tests, strict=True))
        table = Likeliest.of(train, view.pair.position_N, inside_N & view.usable_N)
        if table is None:
            return Drawn(ranks, requests=requests)
        missing = int(inside_N.sum()) - table.n + absent
        ratio_n, error_n = ratio_N[table.known_N], error_N[table.known_N]
        bets_JN = table.bets()
        weight = float((ratio_n - np.maximum(error_n, SLACK)).sum())
        return Drawn(
            ranks,
            Served.of(bets_JN, ratio_n, missing, error_n) if len(bets_JN) else Refutation(),
            table.cells(missing, weight),
            requests,
            table.drawn_and_expected(),
            positions_of(table.mass_NK, table.inside, ratio_n, by_rank=by_rank, missing=missing),
        )

    def judge(self, cell: Cell, rounds: list[Drawn], floor: object, look: Interim) -> CellVerdict:
        return self._judged(cell, rounds, look, self.rejection, self.unseen)

    def unexamined(self, cell: Cell, rounds: list[Drawn], look: Interim) -> tuple[str, ...]:
        """See `SamplerFidelity.unexamined`."""
        return _unexamined(cell, sum(rounds, Drawn()), look)
