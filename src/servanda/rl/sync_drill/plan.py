# The plan of a preflight sync test, printed before it begins.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np

from servanda.rl.sync_drill.held_weights import matrices_of, plain_kinds, tried_of
from servanda.rl.sync_drill.perturbation import LATEST
from servanda.rl.sync_drill.sparse_update import SYNCS
from servanda.rl.sync_drill.trainee import Trainee, probes
from servanda.rl.sync_drill.trainer_response import Trials
from servanda.rl.sync_drill.vocabulary import ranges_of
from servanda.rl.sync_drill.weight_groups import blocks, weight_groups
from servanda.rl.sync_drill.weight_snapshot import Weights


@dataclass(frozen=True)
class Plan:
    """The steps of a preflight sync test.

    Args:
        groups: names, in the order of the test.
        tensors, values: size of the trained weights, of all ranks together.
        least, most: number of syncs; the most if every block must be split and every fault is
            measured again.
        forwards: least number of passes of the trainer over the probe tokens.
        host_bytes: memory for the copy of this process's weights; a journal takes as much disk.
    """

    groups: tuple[str, ...]
    tensors: int
    values: int
    least: int
    most: int
    forwards: int = 0
    host_bytes: int = 0
    is_sharded: bool = False

    def __str__(self) -> str:
        return (
            f"{len(self.groups)} groups in {self.tensors} tensors of {self.values:,} values; "
            f"{self.least} syncs, and at most {self.most} where something is wrong; "
            f"{self.forwards} forward passes or more; {self.host_bytes / 1e6:,.1f} MB of host "
            "memory" + (" on each rank" if self.is_sharded else "")
        )


def planned(trainee: Trainee) -> Plan:
    """The plan of `preflight`; nothing is run.

    Raises:
        MeasurementError: nothing is trained, or the probe tokens are too few.
    """
    rows = probes(trainee, 0)
    return plan_of(Weights(trainee.module, copy=False), ranges_of(trainee.module, rows))


def plan_of(weights: Weights, ranges: Sequence[tuple[int, int]] = ()) -> Plan:
    groups = weight_groups(weights.aliases)
    taken, zeros = blocks(groups), bool(weights.zeros())
    least = 3 + zeros + len(taken) + SYNCS
    values = sum(map(prod, weights.shapes.values()))
    apart = sum(len(block) for block in taken if len(block) > 1)
    again = LATEST * (len(taken) + apart) + 1  # per perturbation, plus one that shifts the order
    most = least + apart + again + 2 * LATEST + LATEST * zeros
    names = tuple(group.name for group in groups)
    trials = Trials(weights, lambda: np.zeros(0), ranges)
    # twice as found, two roundings, all weights random, few values, two shares of each kind of
    # matrix; each group, and without a part
    forwards = 5 + SYNCS + zeros + 2 * len(matrices_of(weights))
    if len(taken) < len(groups):
        # a block; tensors that random weights show one by one are no pieces of a group
        kinds = plain_kinds(weights)
        forwards += len(taken) + sum(len(tried_of(names)) for names in kinds)
        trials.shown = frozenset(chain.from_iterable(kinds))
    forwards += sum(1 + len(trials.pieces_of(group)) for group in groups)
    here = weights.local
    return Plan(
        names,
        len(weights.parameters),
        values,
        least,
        most,
        forwards,
        sum(here.values(name).nbytes for name in weights.parameters),
        any(not place.is_whole for place in here.places.values()),
    )
