# Arrivals: the schedule of a live leg.  What is launched is not ours to choose: it is what
# users asked, in the order in which it was sent to infer, in rounds that close as they fill.
#
# What cells there are, and how many tokens a prompt group can have in one, follows from the
# contract's own prompts all the same: it was fixed before any user asked.

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from servanda.corpus import Corpus, Prompt
from servanda.schedule import Schedule, Unit
from servanda.slices import Cut
from servanda.traffic import Traffic


@dataclass(frozen=True)
class Arrivals(Schedule):
    """What traffic launched.

    Args:
        corpus: the served prompts, in launch order.
        traffic: of the leg; planned: the schedule of the contract's own prompts.
        endless: whether there is no last round.
    """

    traffic: Traffic
    planned: Schedule
    endless: bool = False

    @classmethod
    def of(cls, traffic: Traffic, planned: Schedule, seed: int, *, endless: bool) -> Arrivals:
        prompts = tuple(
            Prompt(line=r.index, token_ids=r.prompt, labels=dict(r.labels))
            for r in traffic.requests
        )
        corpus = Corpus(traffic.file, prompts, "")
        first, last = planned.first, planned.last
        return cls(
            planned.name, planned.workload, corpus, seed, first, last, traffic, planned, endless
        )

    @property
    def rounds(self) -> int:
        """Rounds that have closed: they are full, or they are none."""
        arrived = len(self.traffic.groups) // self.workload.round
        return arrived if self.endless else min(arrived, super().rounds)

    def units(self, index: int) -> Iterator[Unit]:
        """The served requests of a round, in launch order; a sequence is a request's index."""
        start = index * self.workload.round
        row = self._first_G[start]
        for draw in range(start, start + self.workload.round):
            for request in self.traffic.groups[draw]:
                yield Unit(request.index, row, draw)
                row += 1

    @cached_property
    def _first_G(self) -> list[int]:
        """Row of the first request of each prompt group."""
        return [0, *itertools.accumulate(map(len, self.traffic.groups))]

    def capacity(self, cut: Cut) -> int:
        return self.planned.capacity(cut)

    def sequences(self, cut: Cut) -> int:
        return self.planned.sequences(cut)

    def meeting(self, cut: Cut) -> int:
        return self.planned.meeting(cut)
