# The noise floor of each kernel: its difference from itself in other batches.
#
# All other cells are violated only above twice the noise floor, because no kernel can be nearer to
# another than to itself.  So causes of noise (dropout left on, padding that is attended to, rows
# that leak into their neighbours) need a separate check.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from servanda.judgement.clauses.base import (
    GUARDS,
    SELVES,
    Cell,
    CellVerdict,
    Interim,
    Kind,
    View,
    blank,
    limit_of,
    peak,
)
from servanda.judgement.clauses.statistical import Grown, Tally, units_of
from servanda.theory.stats.alpha import log_shared
from servanda.theory.stats.bets import mixed, weights_above, weights_below


@GUARDS.register("self_noise")
@dataclass(frozen=True)
class SelfNoise(Kind):
    """The mean total variation of each side from itself is at most the limit."""

    counts = True
    peers = SELVES

    def weigh(self, cell: Cell, view: View) -> Mapping[str, Grown]:
        limit = limit_of(cell.clause)
        grown = {}
        for side in SELVES:
            if side in view.peers:
                peer = view.peers[side]
                process = units_of(cell, peer, peer.values("tv")).process(cell)
                below, above = process.below_growth(limit), process.above_growth(limit)
                grown[side] = Grown(process, below, above)
        return grown

    def judge(
        self, cell: Cell, rounds: list[Mapping[str, Grown]], floor: object, look: Interim
    ) -> CellVerdict:
        limit = limit_of(cell.clause)
        verdict = blank(
            cell,
            "inconclusive",
            kind="guard",
            limit=limit,
            units=cell.units,
            alpha=look.alpha,
        )
        measured = {
            side: [r[side] for r in rounds if side in r and r[side].process.n] for side in SELVES
        }
        measured = {side: grown for side, grown in measured.items() if grown}
        if not measured:
            more = max(1, look.first - look.launched)
            return verdict.but(open=True, more=more, note="nothing was measured twice yet")
        tallies = {side: Tally.of([g.process for g in grown]) for side, grown in measured.items()}
        if not all(tally.known for tally in tallies.values()):
            return verdict.but(open=True, note="no token was measured twice with a usable logprob")
        noisier = max(tallies, key=lambda side: tallies[side].mean)
        # two sides share alpha, because each is tested
        e_violated = {
            side: peak([g.above for g in grown], cell.claim, weights_above(limit)) - log_shared(2)
            for side, grown in measured.items()
        }
        e_holds = min(
            mixed(sum((g.below for g in gs), np.zeros(1)), weights_below(limit))
            for gs in measured.values()
        )
        verdict = verdict.but(
            value=tallies[noisier].mean,
            n=tallies[noisier].n,
            missing=tallies[noisier].missing,
            e_holds=e_holds,
            e_violated=max(e_violated.values()),
        )
        if max(e_violated.values()) >= look.log_price_violated:
            side = max(e_violated, key=lambda s: e_violated[s]).removeprefix("self_")
            return verdict.but(
                outcome="violated",
                note=f"{side} differs from itself in other batches, on the tokens that infer drew: "
                "dropout left on, padding that is attended to, or numbers that depend on the batch",
            )
        if look.launched < look.first:
            return verdict.but(open=True, more=look.first - look.launched)
        if e_holds >= look.log_price_holds:
            return verdict.but(outcome="holds")
        return verdict.but(outcome="holds", note="not rejected")
