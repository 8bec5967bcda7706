# Where affected sequences are: how many, of which steps, and of which ranks.

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from servanda.rl.dumps.checks.base import Sums
from servanda.traces.rollouts import Array, Rollouts

_RANK = re.compile(r"rank_?(\d+)")
_SHOWN = 4  # most single numbers of a list


class Places(Sums):
    """Counts of affected sequences, and of all, by step and by rank."""

    def __init__(self) -> None:
        self.all = self.affected = 0
        self.steps: Counter[int] = Counter()
        self.of_rank: Counter[str] = Counter()  # rank -> its sequences
        self.ranks: Counter[str] = Counter()  # rank -> its affected sequences

    def add(self, rollouts: Rollouts, among_S: Array, flag_S: Array) -> None:
        """Add sequences.

        Args:
            among_S: those that could be affected; flag_S: those that are.
        """
        self.all += int(among_S.sum())
        if count := int(flag_S.sum()):
            self.affected += count
            self.steps[rollouts.step] += count
        ranks = _ranks(rollouts)
        self.of_rank.update(ranks[i] for i in np.flatnonzero(among_S))
        self.ranks.update(ranks[i] for i in np.flatnonzero(flag_S))

    @property
    def text(self) -> str:
        """Such as "in 3 of 40 sequences, of steps 2 to 4, all of rank 1"."""
        found = f"in {self.affected:,} of {self.all:,} sequences"
        if self.steps:
            found += f", of step{'s' * (len(self.steps) > 1)} {_listed(sorted(self.steps))}"
        some, known = sorted(filter(None, self.ranks), key=int), {*filter(None, self.of_rank)}
        if len(known) > 1 and some and len(some) < len(known):
            found += f", all of rank{'s' * (len(some) > 1)} {_listed([*map(int, some)])}"
        return found


def _ranks(rollouts: Rollouts) -> tuple[str, ...]:
    """The rank of the trainer that wrote each sequence; "" where it is unknown."""
    labelled = rollouts.labels.get("rank")
    if labelled is not None:
        return tuple(name if name.isdecimal() else "" for name in labelled)
    found = (_RANK.search(source) for source in rollouts.source_S)
    return tuple(match[1] if match else "" for match in found)


def _listed(numbers: list[int]) -> str:
    """Whole numbers in a few words.

    >>> _listed([3, 4, 5, 6, 7]), _listed([1, 4]), _listed([1, 3, 5, 7, 9, 11])
    ('3 to 7', '1, 4', '1, 3, 5, 7 and 2 others')
    """
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    rest = len(numbers) - _SHOWN
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"{shown} and {rest} other{'s' * (rest > 1)}" if rest > 0 else shown
