# The response of the trainer to a change of some of its weights, without a sync.
#
# Axes: N scored tokens.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from servanda.rl.sync_drill.response_slope import response_slope, tokens_of
from servanda.rl.sync_drill.result import AIM, AIM_LEAST, AIM_NATS
from servanda.rl.sync_drill.weight_groups import PARTS, Kind, WeightGroup, expert_of
from servanda.rl.sync_drill.weight_snapshot import Size, Weights
from servanda.theory.sampling import Floats

_FIRST, _LAST = 2.0**-8, 16.0  # sizes of a perturbation, in spreads
_LEAP = 64.0  # largest growth factor of a size
_MARGIN = 1.5  # of the size that the group before would have needed
_LARGE = 4.0  # times the effect that is enough: a search from the least size gives less
# least effect of a piece on the trainer, root of the sum of squares in noise floors: two roundings
# of 1.25 floors each give 1.8 per token, so its slope has a precision of 0.03 alone, and 0.1 with
# similar pieces
_POWER = 60.0
# fewest effective tokens of an expert that is judged: an engine's rounding may route some of them
# elsewhere, where they do not use it
FEWEST = 6
# formats to which a sync may round by mistake; an engine intended for these also has scales, and
# rounds differently
_CASTS = ("float8_e4m3fn", "float8_e5m2")
_PLAIN = 5.0  # standard errors by which a rounding must be significant

Scores = Callable[[], Floats]
Family = Literal["tensor", "use", "rows", "shard"]


@dataclass(frozen=True)
class Piece:
    """A part of a group that a sync may omit alone.

    Args:
        name: display name.
        family: whole tensors, one use of a tied tensor, rows of tensors (of a vocabulary, or of
            stacked experts), or the shards of one process.
        tensors: the tensors that contain it.
        use: one of the names of a tied tensor.
        rows: [from, to), of ranks for shards.
    """

    name: str
    family: Family
    tensors: tuple[str, ...]
    use: str = ""
    rows: tuple[int, int] = (0, 0)

    @property
    def is_expert(self) -> bool:
        """Whether it is one expert of a layer, or a bundle of them."""
        if self.family == "rows":
            return self.name.startswith("expert")
        return self.family == "tensor" and all(map(expert_of, self.tensors))


@dataclass(frozen=True)
class Perturbation:
    """A group with its perturbation and the trainer's response.

    Args:
        size: the perturbation, in spreads of each tensor.
        sizes: tensor -> its own size, if a small one is perturbed more; for a stacked tensor, one
            for each expert, if one of few tokens is perturbed more.
        own_N: the trainer's change, nats.
        pieces: for each piece, the change that is missing if only this piece is unchanged.
    """

    group: WeightGroup
    size: float
    sizes: Mapping[str, Size]
    own_N: Floats
    pieces: Mapping[Piece, Floats] = field(default_factory=dict)


class Trials:
    """The trainer's scores with some of its weights perturbed.

    Args:
        scores: returns the trainer's current scores, [N], nats.
        rows: the distinguished ranges of the vocabulary; () for none.

    Attributes:
        shown: tensors of which random weights showed that they are synced; see
            held_weights.shown_alone.  They are no pieces of their own while it has them.
    """

    def __init__(
        self, weights: Weights, scores: Scores, rows: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.weights, self.scores, self.rows = weights, scores, rows
        self.shown: frozenset[str] = frozenset()
        self._sizes: dict[Kind, float] = {}  # to begin with, by kind of group
        self._times: dict[tuple[Kind, str], float] = {}  # that of the group, by its parts

    def without(
        self,
        sizes: Mapping[str, Size],
        left_out: Sequence[Piece] = (),
        scaled: Sequence[str] = (),
        factor: float = 1.0,
    ) -> Floats:
        """The scores with all perturbed except some pieces, and some tensors scaled by a factor."""
        with ExitStack() as stack:
            self.weights.perturb(sizes)
            for piece in left_out:
                if piece.family == "tensor":
                    self.weights.settle(piece.tensors)
                elif piece.family == "use":
                    stack.enter_context(_untied(self.weights, piece.use, piece.tensors[0]))
                elif piece.family == "shard":
                    for rank in range(*piece.rows):
                        self.weights.settle_shard(piece.tensors, rank)
                else:
                    self.weights.settle_rows(piece.tensors, *piece.rows)
            self.weights.scale(scaled, factor)
            logp_N = self.scores()
        self.weights.settle({*sizes, *scaled})
        return logp_N

    def pieces_of(self, group: WeightGroup) -> list[Piece]:
        """The distinguished pieces of a group; empty if there is only one."""
        pieces: list[Piece] = []
        if group.kind == "tied":
            for name in group.tensors:
                uses = self.weights.aliases[name]
                pieces += [Piece(use, "use", (name,), use) for use in uses if len(uses) > 1]
        else:
            pieces = [Piece(part, "tensor", names) for part, names in group.parts.items()]
        pieces = pieces if len(pieces) > 1 else []
        pieces = [piece for piece in pieces if not self.shown.issuperset(piece.tensors)]
        if group.kind in ("embed", "head", "tied"):
            pieces += self._rows_of(group)
        return pieces + self._experts_of(group)

    def _rows_of(self, group: WeightGroup) -> list[Piece]:
        count = max((high for _, high in self.rows), default=0)
        shapes = self.weights.shapes
        names = tuple(
            name
            for name in group.tensors
            if len(shapes[name]) == 2 and shapes[name][0] >= count > 0
        )
        return [
            Piece(f"row {low}" if high == low + 1 else f"rows {low}-{high - 1}", "rows", names, "",
                  (low, high))
            for low, high in self.rows
            if names
        ]  # fmt: skip

    def _experts_of(self, group: WeightGroup) -> list[Piece]:
        """The experts of stacked tensors [experts, ...], bundled if there are many."""
        stacked: dict[int, list[str]] = {}
        for name in group.tensors:
            shape = self.weights.shapes[name]
            if len(shape) == 3 and "expert" in name:
                stacked.setdefault(shape[0], []).append(name)
        return [
            Piece(_numbered("expert", *span), "rows", tuple(names), "", span)
            for count, names in stacked.items()
            for span in _spans(count)
        ]

    def shards_of(self, group: WeightGroup) -> list[Piece]:
        """The shards of each process, bundled if there are many; empty for whole tensors."""
        places = self.weights.places
        names = tuple(name for name in group.tensors if len({*places[name]}) > 1)
        if not names:
            return []
        # copies of a shard belong to the first process that has it
        owners = sorted({places[name].index(place) for name in names for place in places[name]})
        return [
            Piece(_numbered("shard of rank", low, high), "shard", names, "", (low, high))
            for first, last in _spans(len(owners))
            for low, high in [(owners[first], owners[last - 1] + 1)]
        ]

    def split(self, piece: Piece) -> list[Piece]:
        """The experts of a bundle; empty for another piece."""
        if piece.family == "rows" and piece.name.startswith("experts "):
            return [
                replace(piece, name=f"expert {row}", rows=(row, row + 1))
                for row in range(*piece.rows)
            ]
        experts: dict[str, tuple[str, ...]] = {}
        for name in piece.tensors:
            if part := expert_of(name):
                experts[part] = (*experts.get(part, ()), name)
        if piece.family != "tensor" or len(experts) < 2:
            return []
        return [Piece(part, "tensor", names) for part, names in experts.items()]

    def perturb_group(self, group: WeightGroup, logp_N: Floats, floor: float) -> Perturbation:
        """The perturbation that makes a group visible, and the response of all of its pieces.

        Args:
            logp_N: the trainer's scores before.
        """
        size, own_N = perturbation_size(
            self.weights,
            group.tensors,
            logp_N,
            self.scores,
            floor,
            first=self._sizes.get(group.kind, _FIRST),
        )
        moved = float(np.abs(own_N).mean())
        if moved:  # what the next one needs, if its effect is as large and proportional to its size
            needed = _MARGIN * size * enough_of(floor) / moved
            self._sizes[group.kind] = min(_LAST, max(_FIRST, needed))
        sizes: dict[str, Size] = dict.fromkeys(group.tensors, size)
        before = dict(sizes)
        for part, names in group.parts.items():
            times = 1.0 if self.shown.issuperset(names) else self._times.get((group.kind, part), 1)
            sizes |= dict.fromkeys(names, times * size)
        if sizes != before:
            own_N = self.without(sizes) - logp_N
        while True:
            found = self.in_pieces(Perturbation(group, size, sizes, own_N), logp_N)
            larger = dict(sizes)
            for piece, piece_N in found.pieces.items():
                self._grow(larger, piece, piece_N, floor)
            if larger == sizes:
                self._remember(found, floor)
                return found
            sizes = larger
            own_N = self.without(sizes) - logp_N

    def _remember(self, found: Perturbation, floor: float) -> None:
        """How much larger than the group's the sizes of its tensors have to be, for the next."""
        for piece, piece_N in found.pieces.items():
            size, effect = found.sizes[piece.tensors[0]], float(np.linalg.norm(piece_N))
            if piece.family == "tensor" and not isinstance(size, tuple) and effect:
                needed = size / found.size * min(1.0, _MARGIN * _POWER * floor / effect)
                self._times[found.group.kind, piece.name] = max(1.0, needed)

    def in_pieces(self, perturbation: Perturbation, logp_N: Floats) -> Perturbation:
        """The same with the effect of each piece."""
        sizes, own_N = perturbation.sizes, perturbation.own_N
        # of each while the others are perturbed too, because factors interact
        pieces = {
            piece: own_N - (self.without(sizes, [piece]) - logp_N)
            for piece in self.pieces_of(perturbation.group)
        }
        return replace(perturbation, pieces=pieces)

    def _grow(self, sizes: dict[str, Size], piece: Piece, piece_N: Floats, floor: float) -> None:
        """Enlarge the perturbation of a tensor or an expert that has too little effect.

        By the power of 2 that is enough if its effect is proportional to its size.
        """
        effect, enough = float(np.linalg.norm(piece_N)), _POWER * floor
        if effect >= enough:
            return
        if piece.is_expert and tokens_of(piece_N) < FEWEST:
            return  # a larger one would not reach more tokens
        wanted = min(enough / effect, _LEAP) if effect else _LEAP
        times = 2.0 ** max(1, math.ceil(math.log2(wanted)))
        largest = float(np.max(sizes[piece.tensors[0]]))
        grows = piece.family == "tensor" and largest < _LAST
        while grows and times > 2 and times * largest >= 2 * _LAST:
            times /= 2
        for name in piece.tensors:
            size = sizes[name]
            if grows:
                sizes[name] = (
                    tuple(times * row for row in size) if isinstance(size, tuple) else times * size
                )
            elif piece.family == "rows" and piece.is_expert:
                rows = [*size] if isinstance(size, tuple) else [size] * self.weights.shapes[name][0]
                for row in range(*piece.rows):
                    rows[row] = max(rows[row], min(times * rows[row], _LAST))
                sizes[name] = tuple(rows)


def _spans(count: int) -> list[tuple[int, int]]:
    """At most PARTS ranges of equal length."""
    step = -(-count // PARTS)
    return [(low, min(low + step, count)) for low in range(0, count, step)]


def _numbered(what: str, low: int, high: int) -> str:
    return f"{what} {low}" if high == low + 1 else f"{what}s {low}-{high - 1}"


def enough_of(floor: float) -> float:
    """The change of the trainer's scores, nats, that a perturbation has to have."""
    return min(AIM * floor, max(AIM_LEAST * floor, AIM_NATS))


def perturbation_size(
    weights: Weights,
    names: Sequence[str],
    logp_N: Floats,
    scores: Scores,
    floor: float,
    share: float = 1.0,
    first: float = _FIRST,
) -> tuple[float, Floats]:
    """The size of a visible perturbation, and the trainer's change by it.

    It is doubled, or more if it is far too small, until the trainer's scores change by AIM noise
    floors, or AIM_NATS if that is less: far from its weights a model differs, and two kernels
    differ by more than the noise floor.

    Args:
        logp_N: the trainer's scores before.
        scores: returns its current scores.
        share: of the values that are perturbed.
        first: a size that may be right, such as that of the same tensors in the layer before.

    Returns:
        size, in spreads of each tensor; change [N], nats.
    """
    enough = enough_of(floor)
    size, tried = first, first <= _FIRST
    while True:
        weights.perturb(dict.fromkeys(names, size), share)
        change_N = scores() - logp_N
        moved = float(np.abs(change_N).mean())
        if not tried and moved > _LARGE * enough:
            size, tried = _FIRST, True
            continue
        if moved >= enough or size >= _LAST:
            weights.settle(names)
            return size, change_N
        wanted = enough / moved if moved > 0 else _LEAP
        # a group's response is linear in its size, or quadratic if two of its tensors are
        # multiplied
        size = min(_LAST, size * min(_LEAP, max(2.0, 2.0 ** math.ceil(math.log2(wanted) / 2))))


@contextmanager
def _untied(weights: Weights, use: str, name: str) -> Iterator[None]:
    """Exclude one use of a tied tensor from its perturbation.

    The module's attribute gets a separate tensor, and then the tied one again.
    """
    try:
        weights.untie(use, name)
        yield
    finally:
        weights.tie(use, name)


def cast_of(weights: Weights, lack_N: Floats, logp_N: Floats, scores: Scores) -> str:
    """The format whose rounding explains a part of the difference at equal weights; "" for none.

    It need not be the largest part: a 4-bit engine differs more on its own.

    Args:
        lack_N: engine minus trainer, after a sync of unchanged weights.
    """
    residuals = {}
    for name in _CASTS:
        weights.cast(name)
        rounding_N = scores() - logp_N
        weights.settle(weights.parameters)
        if not np.isfinite(rounding_N).all() or not rounding_N.any():
            continue
        fit = response_slope(rounding_N, lack_N)
        if abs(fit.follow - 1) < 0.5 and fit.follow > _PLAIN * fit.spread:
            residuals[name] = fit.residual_nats
    return min(residuals, key=residuals.__getitem__, default="")
