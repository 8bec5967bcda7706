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
from servanda.preflight.nudging import following
from servanda.preflight.result import AIM, AIM_LEAST, AIM_NATS
from servanda.sampling import Floats

_FIRST, _LAST = 2.0**-8, 16.0  # sizes of a nudge, in spreads of a tensor
_LEAP = 64.0  # by which a size grows at most
# what a sync may round to by mistake; an engine that is meant to hold these has scales, too,
# and rounds otherwise
_CASTS = ("float8_e4m3fn", "float8_e5m2")

Scores = Callable[[], Floats]


def sized(
    weights: Weights, groups: Sequence[Group], logp_N: Floats, scores: Scores, floor: float
) -> tuple[float, Floats]:
    """How large a nudge has to be to be seen, and the trainer's change by it.

    It is doubled, or more where it is far off, until the trainer's own scores move AIM floors, or
    AIM_NATS where that is less: far from its weights a model is another one, and two kernels of
    it differ by more than the floor.

    Args:
        logp_N: the trainer's scores before.
        scores: them now.

    Returns:
        size, in spreads of each tensor; change [N], nats.
    """
    names = [name for group in groups for name in group.tensors]
    enough = min(AIM * floor, max(AIM_LEAST * floor, AIM_NATS))
    size = _FIRST
    while True:
        weights.nudge(names, size)
        change_N = scores() - logp_N
        moved = float(np.abs(change_N).mean())
        if moved >= enough or size >= _LAST:
            weights.settle(names)
            return size, change_N
        wanted = enough / moved if moved > 0 else _LEAP
        # what a group does grows as its nudge or, where two tensors of it are multiplied, squared
        size = min(_LAST, size * min(_LEAP, max(2.0, 2.0 ** np.ceil(np.log2(wanted) / 2))))


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
    try:
        for alias in aliases:
            weights.attach(alias, own)
        yield
    finally:
        for alias in aliases:
            weights.attach(alias, tied)


def cast_of(weights: Weights, lack_N: Floats, logp_N: Floats, scores: Scores) -> str:
    """The format whose rounding is part of what the engine lacks at equal weights; "" for none.

    It need not be most of it: an engine of four bits lacks more by itself.

    Args:
        lack_N: engine minus trainer, after a sync of unchanged weights.
    """
    found = {}
    for name in _CASTS:
        for parameter, kept in weights.pairs():
            with torch.no_grad():
                parameter.copy_(kept.to(getattr(torch, name)).to(kept.dtype))
        rounding_N = scores() - logp_N
        weights.settle(weights.parameters)
        if not np.isfinite(rounding_N).all() or not rounding_N.any():
            continue
        fit = following(rounding_N, lack_N)
        if abs(fit.follow - 1) < 0.5 and fit.spread < 0.1:
            found[name] = fit.residual_nats
    return min(found, key=lambda name: found[name], default="")
