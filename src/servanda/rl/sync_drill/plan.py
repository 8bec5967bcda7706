# The plan of a preflight sync test, printed before it begins.

from __future__ import annotations

from dataclasses import dataclass

from servanda.rl.sync_drill.perturbation import LATEST
from servanda.rl.sync_drill.trainee import Trainee, probes
from servanda.rl.sync_drill.weight_groups import blocks, weight_groups
from servanda.rl.sync_drill.weight_snapshot import Weights


@dataclass(frozen=True)
class Plan:
    """The steps of a preflight sync test.

    Args:
        groups: names, in the order of the test.
        tensors, values: size of the trained weights, which are copied to host memory.
        least, most: number of syncs; the most if every block must be split and every fault is
            measured again.
    """

    groups: tuple[str, ...]
    tensors: int
    values: int
    least: int
    most: int

    def __str__(self) -> str:
        return (
            f"{len(self.groups)} groups in {self.tensors} tensors of {self.values:,} values; "
            f"{self.least} syncs, and at most {self.most} where something is wrong"
        )


def planned(trainee: Trainee) -> Plan:
    """The plan of `preflight`; nothing is run.

    Raises:
        MeasurementError: nothing is trained, or the probe tokens are too few.
    """
    probes(trainee, 0)
    return plan_of(Weights(trainee.module, copy=False))


def plan_of(weights: Weights) -> Plan:
    groups = weight_groups(weights.aliases)
    taken, zeros = blocks(groups), bool(weights.zeros())
    least = 3 + zeros + len(taken)
    values = sum(parameter.numel() for parameter in weights.parameters.values())
    apart = sum(len(block) for block in taken if len(block) > 1)
    again = LATEST * (len(taken) + apart) + 1  # per perturbation, plus one that shifts the order
    most = least + apart + again + 2 * LATEST + LATEST * zeros
    names = tuple(group.name for group in groups)
    return Plan(names, len(weights.parameters), values, least, most)
