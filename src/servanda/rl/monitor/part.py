# The part of this rank in a step: everything that a verdict needs of its tokens.

from __future__ import annotations

from servanda.contract.model import Contract
from servanda.judgement.clauses.gradient import psi_of
from servanda.rl.dumps.steps import StepSums, TokenSum
from servanda.rl.monitor import soundness
from servanda.rl.monitor.batch import Batch
from servanda.rl.monitor.device_batch import agreement
from servanda.rl.monitor.ranks import Part
from servanda.rl.monitor.statistics import StepStatistics, contributions


def part_of(
    member: str, digest: str, contract: Contract, statistics: StepStatistics, batch: Batch
) -> Part:
    """Reduce a batch to what is sent to the other ranks.

    Args:
        digest: of the contract, which takes long to compute.
    """
    own = statistics.of(batch)
    names = batch.group_B or tuple(f"{b}@{member}" for b in range(batch.sequences))
    sums = StepSums(batch.weights)
    drifts = zip(own.drift_B.tolist(), own.known_B.tolist(), strict=True)
    for name, drift, selected in zip(names, drifts, batch.selected_B.tolist(), strict=True):
        if selected:
            sums.add_groups({name: TokenSum(*drift)})
    return Part(
        member,
        digest,
        batch.weights,
        statistics=own.statistics,
        groups=tuple(sums.groups.items()),
        sequences=batch.selected,
        offered=batch.offered,
        tokens=batch.tokens,
        usable=own.usable,
        staleness=batch.staleness,
        contributions=contributions(batch, psi_of(contract)),
        unsound=soundness.problems(batch),
        agreement=agreement(batch),
        scalars=own.scalars,
    )
