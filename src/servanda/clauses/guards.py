# Observability clauses: preconditions.  Where one fails, the statistical section says nothing.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from servanda.capture import CAPTURES, captured, errors
from servanda.clauses.base import (
    GUARDS,
    ORDER,
    Array,
    Cell,
    CellVerdict,
    Look,
    Source,
    View,
    blank,
    peak,
)
from servanda.clauses.reward_gap import DRAWS
from servanda.stats import Coherence, Fidelity, LikelihoodRatio, Refutation, Served
from servanda.stats.fidelity import log_densities
from servanda.stats.likelihood_ratio import log_factors
from servanda.trace import Trace

FOUND_TRAIN = (
    "the tokens that train drew for its own answers do not follow the distribution that it "
    "reports: an undisclosed temperature, top-p or greedy decoding, so their rewards are not "
    "those of the kernel that scores"
)


class _Guard:
    source: ClassVar[Source] = "workload"
    peers: ClassVar[tuple[str, ...]] = ()

    def noise(self, cell: Cell, view: View) -> None:
        return None

    def floor(self, cell: Cell, parts: list[None]) -> None:
        return None


class _Refuting(_Guard):
    """Can only reject: `violated` at the price of any cell, else met at the first look.

    `found`: what a rejection says.
    """

    counts: ClassVar[bool] = True
    found: ClassVar[str]

    def judge(self, cell: Cell, rounds: list[Refutation], floor: object, look: Look) -> CellVerdict:
        return _refuted(cell, rounds, look, self.found)


def _refuted(
    cell: Cell, rounds: list[Refutation], look: Look, found: str, unseen: str = ""
) -> CellVerdict:
    """`violated` with the note `found`, or else met.

    Args:
        unseen: why nothing can be said, where a run records nothing that could reject.
    """
    whole = sum(rounds, Refutation())
    grown = [np.array(r.growth) for r in rounds if r.growth]
    log_e = peak(grown)
    verdict = blank(
        cell,
        "inconclusive",
        kind="guard",
        n=whole.n,
        units="tokens",
        missing=whole.missing,
        alpha=look.alpha,
        e_violated=log_e if whole.n else None,
    )
    if log_e >= look.log_price_violated:
        return verdict.but(outcome="violated", note=found)
    if rounds and not grown:
        return verdict.but(note=unseen)
    if not whole.n or look.launched < look.first:
        return verdict.but(open=True, more=max(1, look.first - look.launched))
    return verdict.but(outcome="holds", note="not rejected")


def _lost(cell: Cell, view: View) -> int:
    """Tokens that the lost sequences had room for in the slice."""
    return len(view.lost(cell.cut)) * cell.cut.positions(view.width)


@GUARDS.register("sampler_fidelity")
@dataclass(frozen=True)
class SamplerFidelity(_Guard):
    """The served tokens follow the distribution the infer kernel reports.

    By the rank of each token where the whole distribution was at hand, else by the reported
    best tokens, which see less.  Where train answers the prompts as well, for their rewards,
    its tokens are held to what train reports.
    """

    counts: ClassVar[bool] = True
    found: ClassVar[str] = (
        "served tokens do not follow the reported distribution: an undisclosed "
        "temperature, top-p or mask, or logprobs of another transform"
    )
    unseen: ClassVar[str] = (
        "{side} records neither where its tokens rank nor its best tokens, so nobody can tell what "
        "it draws from: let it report top logprobs"
    )

    def weigh(self, cell: Cell, view: View) -> Mapping[str, Refutation]:
        found = {"infer": _evidence(cell, view)}
        if DRAWS in view.peers:
            found["train"] = _evidence(cell, view.peers[DRAWS])
        return found

    def judge(
        self, cell: Cell, rounds: list[Mapping[str, Refutation]], floor: object, look: Look
    ) -> CellVerdict:
        texts = {"infer": self.found, "train": FOUND_TRAIN}
        sides = [side for side in texts if side == "infer" or any(side in r for r in rounds)]
        # sides share the price, so that either may be called unfaithful
        shared = replace(look, cells=max(look.cells, 1) * len(sides))
        verdicts = []
        for side in sides:
            own, unseen = [r[side] for r in rounds if side in r], self.unseen.format(side=side)
            verdicts.append(_refuted(cell, own, shared, texts[side], unseen))
        e_values = [v.e_violated for v in verdicts if v.e_violated is not None]
        return min(verdicts, key=lambda v: ORDER.index(v.outcome)).but(
            n=sum(v.n for v in verdicts),
            missing=sum(v.missing for v in verdicts),
            e_violated=max(e_values) - math.log(len(sides)) if e_values else None,
        )


def _evidence(cell: Cell, view: View) -> Refutation:
    """Against the drawn tokens of a view, from what the kernel that drew them reports."""
    trace, inside_N = view.pair.infer, view.mask(cell.cut)
    if "mass_before" in trace.columns:
        return _by_rank(view, inside_N, _lost(cell, view))
    if trace.best is None:
        return Refutation(missing=int(inside_N.sum()) + _lost(cell, view))
    ids_NK, logp_NK = (best_NK[inside_N] for best_NK in trace.best)
    return LikelihoodRatio.of(ids_NK, logp_NK, trace.token_N[inside_N], _lost(cell, view))


def _by_rank(view: View, inside_N: Array, lost: int) -> Fidelity:
    columns = view.pair.infer.columns
    known_N = inside_N & np.isfinite(columns["logp"]) & np.isfinite(columns["mass_before"])
    assert view.uniform_N is not None  # every workload view has one
    u_N = columns["mass_before"] + view.uniform_N * np.exp(columns["logp"])
    missing = int((inside_N & ~known_N).sum()) + lost
    return Fidelity.of(np.minimum(u_N[known_N], 1.0), missing)


@GUARDS.register("served_fidelity")
@dataclass(frozen=True)
class ServedFidelity(_Refuting):
    """The served tokens are drawn from what infer reports, by train's distribution.

    Where infer reports nothing but the token's own logprob, train knows where it ranks.
    """

    found: ClassVar[str] = (
        "served tokens do not follow the distribution that their logprobs speak of, as train "
        "ranks them: an undisclosed temperature, top-p or mask, or a token that is never drawn"
    )

    def weigh(self, cell: Cell, view: View) -> Refutation:
        train, infer = view.pair.train, view.pair.infer
        inside_N = view.mask(cell.cut)
        seen_N = inside_N & view.usable_N
        if "mass_before" in train.columns:
            seen_N &= np.isfinite(train.columns["mass_before"])
            own_N = np.exp(train.columns["logp"])
            assert view.uniform_N is not None  # every workload view has one
            u_N = np.minimum(train.columns["mass_before"] + view.uniform_N * own_N, 1.0)
            factors_JN = log_densities(u_N[seen_N])
        elif train.best is not None:
            ids_NK, logp_NK = (best_NK[seen_N] for best_NK in train.best)
            factors_JN, told_n = log_factors(ids_NK, logp_NK, infer.token_N[seen_N])
            seen_N[seen_N] = told_n
        else:
            return Refutation(missing=int(inside_N.sum()) + _lost(cell, view))
        missing = int((inside_N & ~seen_N).sum()) + _lost(cell, view)
        error_N = _errors(train) + _errors(infer)
        return Served.of(factors_JN, view.log_ratio()[seen_N], missing, error_N[seen_N])

    def judge(self, cell: Cell, rounds: list[Refutation], floor: object, look: Look) -> CellVerdict:
        unseen = (
            "train records neither where the served tokens rank nor its best tokens: let it report "
            "top logprobs"
        )
        return _refuted(cell, rounds, look, self.found, unseen)


@GUARDS.register("coherence")
@dataclass(frozen=True)
class Coherent(_Refuting):
    """The two logprobs of each token can be those of two distributions: E_infer w <= 1."""

    found: ClassVar[str] = (
        "the weights train / infer average above 1, which no two distributions give: raw "
        "logprobs on one side and processed ones on the other, or logprobs of other tokens"
    )

    def weigh(self, cell: Cell, view: View) -> Coherence:
        inside_N = view.mask(cell.cut)
        known_N = inside_N & view.usable_N
        missing = int((inside_N & ~known_N).sum()) + _lost(cell, view)
        error_N = _errors(view.pair.train) + _errors(view.pair.infer)
        return Coherence.of(view.log_ratio()[known_N], missing, error_N[known_N])


def _errors(trace: Trace) -> Array:
    """The most that rounding moved each recorded logprob by, [N], nats.

    By the precision that the trace declares, or else the coarsest that its values can have
    been kept in: never a finer one than theirs.
    """
    logp_N = trace.columns["logp"]
    said = trace.about.get("capture", "")
    return errors(logp_N, said if said in CAPTURES else captured(logp_N))


@dataclass(frozen=True)
class Counts:
    usable: int = 0
    launched: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.usable + other.usable, self.launched + other.launched)


@GUARDS.register("usable_ratio")
@dataclass(frozen=True)
class UsableRatio(_Guard):
    """Share of launched tokens that both sides have a usable logprob for.

    A lost sequence counts with all the tokens it had room for.
    """

    counts: ClassVar[bool] = False  # counted, not inferred

    def weigh(self, cell: Cell, view: View) -> Counts:
        inside_N = view.mask(cell.cut)
        launched = int(inside_N.sum()) + _lost(cell, view)
        return Counts(int((inside_N & view.usable_N).sum()), launched)

    def judge(self, cell: Cell, rounds: list[Counts], floor: object, look: Look) -> CellVerdict:
        counts = sum(rounds, Counts())
        limit = float(cell.clause.at_least)  # type: ignore[arg-type]
        verdict = blank(
            cell,
            "inconclusive",
            kind="fact",
            limit=limit,
            n=counts.launched,
            units="tokens",
            missing=counts.launched - counts.usable,
        )
        if not counts.launched:
            return verdict.but(open=True, note="nothing was measured yet")
        value = counts.usable / counts.launched
        verdict = verdict.but(value=value)
        if value >= limit:
            return verdict.but(outcome="holds")
        if look.launched < look.first:
            return verdict.but(open=True, more=max(1, look.first - look.launched))
        return verdict.but(
            outcome="error",
            note=f"{counts.launched - counts.usable} of {counts.launched} launched tokens have "
            "no usable logprob (NaN, infinite, or a lost sequence)",
        )
