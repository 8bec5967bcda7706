# Limits relative to a measurement: the noise floor of the two kernels, or the stable kernel.
#
# Two unknown means are compared by anytime-valid intervals, each at its share of alpha: x <= times
# * y holds if the upper end of x is at most `times` the lower end of y.  No assumption is made
# about their dependence.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from servanda.judgement.clauses.base import WITHIN_NOISE, Cell, CellVerdict, Interim, View
from servanda.judgement.clauses.statistical import Certificate, Process, total
from servanda.theory.stats.alpha import shared
from servanda.theory.stats.interval import interval

if TYPE_CHECKING:
    from servanda.contract.clause import Clause


@dataclass(frozen=True)
class Compared:
    """The statistics of one round: of the pair, and of each peer."""

    own: Process
    peers: Mapping[str, Process]


@dataclass(frozen=True)
class RelativeCertificate(Certificate):
    """A certificate whose limit is `times` the largest of the peers' means."""

    times: float = 1.0
    whose: ClassVar[str] = ""

    @property
    def certificate(self) -> None:
        """The limit is known only once it is measured."""
        return None

    def units_at_best(self, alpha: float) -> int | None:
        return 0

    def not_in_a_step(self, clause: Clause) -> str:
        return "a training step has no noise floor and no stable kernel to compare with"

    def weigh(self, cell: Cell, view: View) -> Compared:  # type: ignore[override]
        peers = {
            name: self.process(cell, view.peers[name]) for name in self.peers if name in view.peers
        }
        return Compared(self.process(cell, view), peers)

    def judge(  # type: ignore[override]
        self, cell: Cell, rounds: list[Compared], floor: float | None, look: Interim
    ) -> CellVerdict:
        own = total(cell, [r.own for r in rounds])
        peers = [
            total(cell, [r.peers[name] for r in rounds if name in r.peers]) for name in self.peers
        ]
        peers = [peer for peer in peers if peer.n]
        verdict = self.described(cell, [own], floor, look)
        if not own.n or not peers:
            what = "the slice met no token" if not own.n else f"{self.whose} was not measured there"
            return verdict.but(note=f"{what}; widen the workload")
        feed = self.feed
        mean = feed.value(own.mean)
        limit = self.times * max(feed.value(peer.mean) for peer in peers)
        verdict = verdict.but(
            limit=limit,
            note=f"the limit is {self.times:g} times {self.whose}, which was measured beside it",
        )
        share = shared(look.alpha, 2)  # own and peers
        ends = [self._ends(peer, shared(share, len(peers))) for peer in peers]
        if self._ends(own, share)[1] <= self.times * max(low for low, _ in ends):
            if look.launched >= look.first:
                return verdict.but(outcome="holds", open=False)
            return verdict
        share = shared(look.alpha_violated, 2)
        ends = [self._ends(peer, shared(share, len(peers))) for peer in peers]
        noise = 2 * feed.value(floor) if floor else 0.0
        if self._ends(own, share)[0] > max(self.times * max(high for _, high in ends), noise):
            return verdict.but(outcome="violated", open=False)
        if limit < mean <= noise:
            return verdict.but(note=WITHIN_NOISE, reason="within noise")
        # a doubling, because one evaluation does not predict when two intervals separate
        more = max(look.launched, look.first - look.launched, math.ceil(own.n / 2), 1)
        if not limit:
            note = f"{self.whose} is exactly 0 so far: no sample can show that a mean is 0; "
            # if the kernels differ, more rounds can still show it
            return verdict.but(
                open=mean > 0,
                more=more if mean > 0 else None,
                note=note + "write a number as the limit",
            )
        return verdict.but(more=more)

    def _ends(self, process: Process, alpha: float) -> tuple[float, float]:
        low, high = interval(process, alpha)
        return self.feed.value(low), self.feed.value(high)


@dataclass(frozen=True)
class RelativeToNoise(RelativeCertificate):
    peers: ClassVar[tuple[str, ...]] = ("self_train", "self_infer")
    whose: ClassVar[str] = "the noise floor of the noisier side"


@dataclass(frozen=True)
class RelativeToStable(RelativeCertificate):
    peers: ClassVar[tuple[str, ...]] = ("stable",)
    whose: ClassVar[str] = "what the stable kernel has"
