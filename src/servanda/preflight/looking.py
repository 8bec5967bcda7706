# What the trainer does by itself when one group changes; no sync is needed for it.
#
# Axes: N scored tokens.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from servanda.preflight.groups import Group
from servanda.preflight.keeping import Weights
from servanda.preflight.nudging import distance
from servanda.preflight.result import AIM
from servanda.sampling import Floats

_FIRST, _LAST = 2.0**-8, 1.0  # sizes of a nudge, in spreads of a tensor
_LEAP = 64.0  # by which a size grows at most
# what a sync may round to by mistake; an engine that is meant to hold these has scales, too,
# and rounds otherwise
_CASTS = ("float8_e4m3fn", "float8_e5m2")

Scores = Callable[[], Floats]


def sized(
    weights: Weights, groups: Sequence[Group], logp_N: Floats, scores: Scores, floor: float
) -> tuple[float, Floats]:
    """How large a nudge has to be to be seen, and the trainer's change by it.

    It is doubled, or more where it is far off, until the trainer's own scores move AIM floors.

    Args:
        logp_N: the trainer's scores before.
        scores: them now.

    Returns:
        size, in spreads of each tensor; change [N], nats.
    """
    names = [name for group in groups for name in group.tensors]
    size = _FIRST
    while True:
        weights.nudge(names, size)
        change_N = scores() - logp_N
        moved = float(np.abs(change_N).mean()) / floor
        if moved >= AIM or size >= _LAST:
            weights.settle(names)
            return size, change_N
        wanted = AIM / moved if moved > 0 else _LEAP
        size = min(_LAST, size * min(_LEAP, max(2.0, 2.0 ** np.ceil(np.log2(wanted)))))


def parts_of(
    weights: Weights, group: Group, size: float, logp_N: Floats, scores: Scores
) -> dict[str, Floats]:
    """The trainer's change by each part of a group: its tensors, or the uses of a tied one."""
    found: dict[str, Floats] = {}
    if group.kind == "tied":
        for name in group.tensors:
            weights.nudge([name], size)
            for alias in weights.aliases[name]:
                others = [a for a in weights.aliases[name] if a != alias]
                with _held(weights, others, name):
                    found[alias] = scores() - logp_N
            weights.settle([name])
        return found
    for part, names in group.parts.items():
        weights.nudge(names, size)
        found[part] = scores() - logp_N
        weights.settle(names)
    return found


@contextmanager
def _held(weights: Weights, aliases: Sequence[str], name: str) -> Iterator[None]:
    """Some uses of a tied tensor as if they had not been nudged with it.

    The module's slots are given a tensor of their own, and then the tied one again.
    """
    tied = weights.parameters[name]
    own = nn.Parameter(weights.start(name).to(tied.device), requires_grad=False)
    slots = []
    for alias in aliases:
        path, _, leaf = alias.rpartition(".")
        slots.append((weights.module.get_submodule(path), leaf))
    try:
        for owner, leaf in slots:
            owner._parameters[leaf] = own
        yield
    finally:
        for owner, leaf in slots:
            owner._parameters[leaf] = tied


def cast_of(weights: Weights, lack_N: Floats, logp_N: Floats, scores: Scores) -> str:
    """The format that explains what the engine lacks at equal weights; "" where none does.

    Args:
        lack_N: engine minus trainer, after a sync of unchanged weights.
    """
    for name in _CASTS:
        for parameter, kept in weights.pairs():
            with torch.no_grad():
                parameter.copy_(kept.to(getattr(torch, name)).to(kept.dtype))
        rounding_N = scores() - logp_N
        weights.settle(weights.parameters)
        if not np.isfinite(rounding_N).all() or not distance(rounding_N, 0 * rounding_N):
            continue
        together = float(np.corrcoef(rounding_N, lack_N)[0, 1]) if lack_N.any() else 0.0
        if together > 0.9:
            return name
    return ""
