# The schedule of a workload: its prompts, their order, and their rounds.
#
# Order and inclusion are decided before the outcome (law 5): they follow from the contract, the
# corpus and the attempt.  On a live step users choose the requests, which are taken in dispatch
# order, in rounds that close as they fill.  The cells, and the largest number of tokens of a prompt
# group in each, still follow from the contract's prompts, which are fixed before any request.

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from servanda.contract.workload import Workload
from servanda.judgement.slices.rules import Cut
from servanda.judgement.traffic import Traffic
from servanda.theory.sampling import uniforms
from servanda.traces.corpus import Corpus, Prompt

NOISE_STRIDE = 10  # every tenth sequence or text is scored again


@dataclass(frozen=True)
class Unit:
    """One dispatched sequence: its index, its prompt's row, and the draw of its prompt group."""

    sequence: int
    row: int
    group: int


@dataclass(frozen=True)
class Schedule:
    """The dispatched sequences of one workload.

    Args:
        name: of the workload.
        seed: seed of all its random numbers, new in every attempt.
        first, last: fewest prompt groups for `holds`, and the number at which a run ends.
    """

    name: str
    workload: Workload
    corpus: Corpus
    seed: int
    first: int
    last: int

    @property
    def width(self) -> int:
        """Most new tokens of a sequence."""
        return self.workload.sampling.max_new_tokens

    @property
    def rounds(self) -> int:
        return math.ceil(self.last / self.workload.round)

    @property
    def folder(self) -> str:
        """The folder of the rounds in a run directory."""
        return "rounds" if self.name == "workload" else f"rounds/{self.name}"

    def units(self, index: int) -> tuple[Unit, ...]:
        """The sequences of a round, in dispatch order; every round is full, including the last.

        Each draw takes a prompt group at random with replacement, so that the groups are
        independent samples from the population of the contract's claim.
        """
        groups, samples = self.corpus.groups, self.workload.samples
        stride = max(map(len, groups)) * samples
        start = index * self.workload.round
        units = []
        for draw in range(start, start + self.workload.round):
            rows = groups[int(uniforms(self.seed, "prompt", draw, 1)[0] * len(groups))]
            sampled = (row for row in rows for _ in range(samples))
            units += [Unit(draw * stride + i, row, draw) for i, row in enumerate(sampled)]
        return tuple(units)

    def capacity(self, cut: Cut) -> int:
        """The largest number of tokens that one prompt group can have in a slice."""
        most, _ = self._rows(cut)
        return most * self.workload.samples * cut.positions(self.width)

    def sequences(self, cut: Cut) -> int:
        """The largest number of sequences of one prompt group that can meet a slice."""
        most, _ = self._rows(cut)
        return most * self.workload.samples

    def meeting(self, cut: Cut) -> int:
        """Prompt groups of a whole run that are expected to meet a slice."""
        _, groups = self._rows(cut)
        return self.last * groups // len(self.corpus.groups)

    def _rows(self, cut: Cut) -> tuple[int, int]:
        """Most lines of one prompt group that can meet a slice, and the number of such groups."""
        if cut not in self._rows_by_cut:  # clauses share slices
            prompts, (kind_R, examples) = self.corpus.prompts, self._kinds
            meets = np.array([cut.may_meet(prompts[row]) for row in examples])
            rows_G = np.bincount(self._group_R, weights=meets[kind_R])
            self._rows_by_cut[cut] = int(rows_G.max()), int(np.count_nonzero(rows_G))
        return self._rows_by_cut[cut]

    @cached_property
    def _rows_by_cut(self) -> dict[Cut, tuple[int, int]]:
        return {}

    @cached_property
    def _kinds(self) -> tuple[NDArray[np.int64], list[int]]:
        """The kind of each line, and one line per kind; lines with equal labels form a kind."""
        kinds: dict[tuple[tuple[str, str], ...], int] = {}
        examples: list[int] = []
        kind_R = []
        for row, prompt in enumerate(self.corpus.prompts):
            labels = tuple(sorted(prompt.labels.items()))
            if labels not in kinds:
                kinds[labels] = len(kinds)
                examples.append(row)
            kind_R.append(kinds[labels])
        return np.array(kind_R), examples

    @cached_property
    def _group_R(self) -> NDArray[np.int64]:
        group_R = np.zeros(len(self.corpus), dtype=np.int64)
        for group, rows in enumerate(self.corpus.groups):
            group_R[list(rows)] = group
        return group_R

    def noise_rows(self, n: int) -> list[int]:
        """The sequences of a round that are scored again, in order.

        Every tenth or slightly fewer, so that each line of a prompt group has its turn.
        """
        lines = max(map(len, self.corpus.groups)) * self.workload.samples
        stride = next(s for s in itertools.count(NOISE_STRIDE) if math.gcd(s, lines) == 1)
        return noise_rows(n, stride)


def noise_rows(n: int, stride: int = NOISE_STRIDE) -> list[int]:
    """The sequences, of n, that are scored again, in order.

    Reversed and without their neighbours, for another composition of the batch.  A round of one
    sequence has no other composition.
    """
    if n < 2:
        return []
    return list(range(0, n, stride))[::-1]


@dataclass(frozen=True)
class Arrivals(Schedule):
    """The schedule of live traffic.

    Args:
        corpus: the served prompts, in dispatch order.
        traffic: requests of the step; planned: the schedule of the contract's own prompts.
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
        """The number of closed rounds, which are full."""
        arrived = len(self.traffic.groups) // self.workload.round
        return arrived if self.endless else min(arrived, super().rounds)

    def units(self, index: int) -> tuple[Unit, ...]:
        """The served requests of a round, in dispatch order; a sequence is a request's index."""
        start = index * self.workload.round
        draws = range(start, start + self.workload.round)
        launched = ((request, draw) for draw in draws for request in self.traffic.groups[draw])
        return tuple(
            Unit(request.index, row, draw)
            for row, (request, draw) in enumerate(launched, self._first_G[start])
        )

    @cached_property
    def _first_G(self) -> list[int]:
        return [0, *itertools.accumulate(map(len, self.traffic.groups))]

    def capacity(self, cut: Cut) -> int:
        return self.planned.capacity(cut)

    def sequences(self, cut: Cut) -> int:
        return self.planned.sequences(cut)

    def meeting(self, cut: Cut) -> int:
        return self.planned.meeting(cut)
