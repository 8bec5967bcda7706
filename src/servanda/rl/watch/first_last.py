# Ends: the first and the last steps of a run, as a state file keeps them.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servanda.rl.dumps.steps import GroupSums, Step


def plain(step: Step) -> list[Any]:
    """Number and prompt groups of a step; `steps_of` reads it."""
    return [step.step, [[name, g.total, g.n] for name, g in step.groups.items()]]


def steps_of(kept: Sequence[Any]) -> list[Step]:
    """Steps that were kept."""
    return [
        Step(number, groups={name: GroupSums(total, n) for name, total, n in groups})
        for number, groups in kept
    ]
