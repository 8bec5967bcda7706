# What the trainer does by itself when some of its weights change; no sync is needed for it.
#
# Axes: N scored tokens.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import nn

from servanda.rl.sync_drill.response_slope import response_slope
from servanda.rl.sync_drill.result import AIM, AIM_LEAST, AIM_NATS
from servanda.rl.sync_drill.weight_groups import WeightGroup
from servanda.rl.sync_drill.weight_snapshot import Weights
from servanda.theory.sampling import Floats

_FIRST, _LAST = 2.0**-8, 16.0  # sizes of a perturbation, in spreads
_LEAP = 64.0  # by which a size grows at most
# root of the sum of squares, in floors, by which a piece has to move the trainer: two roundings
# of 1.25 floors each leave 1.8 on every token, so its slope is known to .03 by itself, and to a
# tenth beside pieces that do much the same
_POWER = 60.0
# what a sync may round to by mistake; an engine that is meant to hold these has scales, too,
# and rounds otherwise
_CASTS = ("float8_e4m3fn", "float8_e5m2")
_PLAIN = 5.0  # standard errors by which a rounding has to be seen

Scores = Callable[[], Floats]
Family = Literal["tensor", "use", "rows"]


@dataclass(frozen=True)
class Piece:
    """Something of a group that a sync may leave out by itself.

    Args:
        name: as reports print it.
        family: whole tensors, one use of a tied tensor, or rows of a vocabulary's tensors.
        tensors: of which it is.
        use: one of the names of a tied tensor.
        rows: [from, to).
    """

    name: str
    family: Family
    tensors: tuple[str, ...]
    use: str = ""
    rows: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Perturbation:
    """A group, how it is perturbed, and how the trainer responds.

    Args:
        size: the perturbation, in spreads of each tensor.
        sizes: tensor -> its own, where a small one is perturbed more.
        own_N: the trainer's change, nats.
        pieces: the part of its change that is missing where that piece alone is unchanged.
    """

    group: WeightGroup
    size: float
    sizes: Mapping[str, float]
    own_N: Floats
    pieces: Mapping[Piece, Floats] = field(default_factory=dict)


class Trials:
    """The trainer's scores with some of its weights perturbed, and others not.

    Args:
        scores: the trainer's, now, [N], nats.
        rows: the ranges of the vocabulary that are told from one another; () for none.
    """

    def __init__(
        self, weights: Weights, scores: Scores, rows: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.weights, self.scores, self.rows = weights, scores, rows

    def without(
        self,
        sizes: Mapping[str, float],
        left_out: Sequence[Piece] = (),
        scaled: Sequence[str] = (),
        factor: float = 1.0,
    ) -> Floats:
        """With all of them perturbed but some pieces, and some tensors scaled by a factor."""
        with ExitStack() as stack:
            self.weights.perturb(sizes)
            for piece in left_out:
                if piece.family == "tensor":
                    self.weights.settle(piece.tensors)
                elif piece.family == "use":
                    stack.enter_context(_untied(self.weights, piece.use, piece.tensors[0]))
                else:
                    for name in piece.tensors:
                        self.weights.settle_rows(name, *piece.rows)
            self.weights.scale(scaled, factor)
            logp_N = self.scores()
        self.weights.settle({*sizes, *scaled})
        return logp_N

    def pieces_of(self, group: WeightGroup) -> list[Piece]:
        """What of a group is told apart; none where it is of one piece."""
        pieces: list[Piece] = []
        if group.kind == "tied":
            for name in group.tensors:
                uses = self.weights.aliases[name]
                pieces += [Piece(use, "use", (name,), use) for use in uses if len(uses) > 1]
        else:
            pieces = [Piece(part, "tensor", names) for part, names in group.parts.items()]
        pieces = pieces if len(pieces) > 1 else []
        if group.kind in ("embed", "head", "tied"):
            pieces += self._rows_of(group)
        return pieces

    def _rows_of(self, group: WeightGroup) -> list[Piece]:
        count = max((high for _, high in self.rows), default=0)
        tensors = self.weights.parameters
        names = tuple(
            name
            for name in group.tensors
            if tensors[name].dim() == 2 and tensors[name].shape[0] >= count > 0
        )
        return [
            Piece(f"row {low}" if high == low + 1 else f"rows {low}-{high - 1}", "rows", names, "",
                  (low, high))
            for low, high in self.rows
            if names
        ]  # fmt: skip

    def perturb_group(self, group: WeightGroup, logp_N: Floats, floor: float) -> Perturbation:
        """The perturbation that makes a group visible, and the response of all of its pieces.

        Args:
            logp_N: the trainer's scores before.
        """
        size, own_N = perturbation_size(self.weights, group.tensors, logp_N, self.scores, floor)
        sizes = dict.fromkeys(group.tensors, size)
        while True:
            # what each does where the others are perturbed, too: two that are multiplied do other
            # things by themselves
            pieces = {
                piece: own_N - (self.without(sizes, [piece]) - logp_N)
                for piece in self.pieces_of(group)
            }
            weak = [
                piece
                for piece, own in pieces.items()
                if piece.family == "tensor"
                and np.linalg.norm(own) < _POWER * floor
                and sizes[piece.tensors[0]] < _LAST
            ]
            if not weak:
                return Perturbation(group, size, sizes, own_N, pieces)
            for piece in weak:
                sizes.update(dict.fromkeys(piece.tensors, 2 * sizes[piece.tensors[0]]))
            own_N = self.without(sizes) - logp_N


def perturbation_size(
    weights: Weights, names: Sequence[str], logp_N: Floats, scores: Scores, floor: float
) -> tuple[float, Floats]:
    """The size of a visible perturbation, and the trainer's change by it.

    It is doubled, or more where it is far off, until the trainer's own scores move AIM floors, or
    AIM_NATS where that is less: far from its weights a model is another one, and two kernels of
    it differ by more than the floor.

    Args:
        logp_N: the trainer's scores before.
        scores: them now.

    Returns:
        size, in spreads of each tensor; change [N], nats.
    """
    enough = min(AIM * floor, max(AIM_LEAST * floor, AIM_NATS))
    size = _FIRST
    while True:
        weights.perturb(dict.fromkeys(names, size))
        change_N = scores() - logp_N
        moved = float(np.abs(change_N).mean())
        if moved >= enough or size >= _LAST:
            weights.settle(names)
            return size, change_N
        wanted = enough / moved if moved > 0 else _LEAP
        # a group's response grows as its size or, where two tensors of it are multiplied, squared
        size = min(_LAST, size * min(_LEAP, max(2.0, 2.0 ** np.ceil(np.log2(wanted) / 2))))


@contextmanager
def _untied(weights: Weights, use: str, name: str) -> Iterator[None]:
    """One use of a tied tensor as if it had not been perturbed with it.

    The module's slot is given a tensor of its own, and then the tied one again.
    """
    tied = weights.parameters[name]
    own = nn.Parameter(weights.start(name).to(tied.device), requires_grad=False)
    try:
        weights.attach(use, own)
        yield
    finally:
        weights.attach(use, tied)


def cast_of(weights: Weights, lack_N: Floats, logp_N: Floats, scores: Scores) -> str:
    """The format whose rounding is part of what the engine lacks at equal weights; "" for none.

    It need not be most of it: an engine of four bits lacks more by itself.

    Args:
        lack_N: engine minus trainer, after a sync of unchanged weights.
    """
    residuals = {}
    for name in _CASTS:
        for tensor, parameter in weights.parameters.items():
            own = weights.kept[tensor]
            with torch.no_grad():
                parameter.copy_(own.to(getattr(torch, name)).to(own.dtype))
        rounding_N = scores() - logp_N
        weights.settle(weights.parameters)
        if not np.isfinite(rounding_N).all() or not rounding_N.any():
            continue
        fit = response_slope(rounding_N, lack_N)
        if abs(fit.follow - 1) < 0.5 and fit.follow > _PLAIN * fit.spread:
            residuals[name] = fit.residual_nats
    return min(residuals, key=residuals.__getitem__, default="")
