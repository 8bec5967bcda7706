# Observability clauses: preconditions.  Where one fails, the statistical section says nothing.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from servanda.clauses.base import GUARDS, Cell, CellVerdict, Look, Source, View, blank, peak
from servanda.stats import Fidelity


class _Guard:
    source: ClassVar[Source] = "workload"
    peers: ClassVar[tuple[str, ...]] = ()

    def noise(self, cell: Cell, view: View) -> None:
        return None

    def floor(self, cell: Cell, parts: list[None]) -> None:
        return None


@GUARDS.register("sampler_fidelity")
@dataclass(frozen=True)
class SamplerFidelity(_Guard):
    """The served tokens follow the distribution the infer kernel reports.

    It can only reject: `violated` at the price of any cell, else met once the first look
    is reached.
    """

    counts: ClassVar[bool] = True

    def weigh(self, cell: Cell, view: View) -> Fidelity:
        columns = view.pair.infer.columns
        inside_N = view.mask(cell.cut)
        known_N = inside_N & np.isfinite(columns["logp"]) & np.isfinite(columns["mass_before"])
        assert view.uniform_N is not None  # every workload view has one
        u_N = columns["mass_before"] + view.uniform_N * np.exp(columns["logp"])
        missing = int((inside_N & ~known_N).sum())
        missing += len(view.lost(cell.cut)) * cell.cut.positions(view.width)
        return Fidelity.of(np.minimum(u_N[known_N], 1.0), missing)

    def judge(self, cell: Cell, rounds: list[Fidelity], floor: object, look: Look) -> CellVerdict:
        fidelity = sum(rounds, Fidelity())
        log_e = peak([np.array(r.growth) for r in rounds])
        verdict = blank(
            cell,
            "inconclusive",
            kind="guard",
            n=fidelity.n,
            units="tokens",
            missing=fidelity.missing,
            alpha=look.alpha,
            e_violated=log_e if fidelity.n else None,
        )
        if log_e >= look.log_price_violated:
            return verdict.but(
                outcome="violated",
                note="served tokens do not follow the reported distribution: an undisclosed "
                "temperature, top-p or mask, or logprobs of another transform",
            )
        if not fidelity.n or look.launched < look.first:
            return verdict.but(open=True, more=max(1, look.first - look.launched))
        return verdict.but(outcome="holds", note="not rejected")


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
        lost = len(view.lost(cell.cut)) * cell.cut.positions(view.width)
        return Counts(int((inside_N & view.usable_N).sum()), int(inside_N.sum()) + lost)

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
