# A part of a tensor that never arrives: rows or columns of it, such as one head, or the shard of a
# rank of the engine.
#
# In the slope of its group such a part may be too small to be seen.  With all weights random it is
# not: the trainer, with this part as it was, then has to reproduce the engine.

from __future__ import annotations

from collections.abc import Iterator, Sequence

from servanda.rl.sync_drill.response_slope import distance
from servanda.rl.sync_drill.result import EXPLAINED, Response
from servanda.rl.sync_drill.sides import Sides
from servanda.rl.sync_drill.weight_groups import WeightGroup
from servanda.rl.sync_drill.weight_snapshot import Weights

_GROUPS = 3  # those that fit worst are searched
_PARTS = (2, 4)  # halves and quarters


def lost_share(
    weights: Weights, sides: Sides, groups: Sequence[WeightGroup], responses: Sequence[Response]
) -> str:
    """The part of a tensor without which random weights explain the engine; "" if none does.

    Leaves the trainer with random weights.

    Args:
        responses: of the groups, in their order.
    """
    sides.stage = "all weights randomised once more"
    weights.poison()
    sides.sync()
    there_N = sides.infer()
    enough = EXPLAINED * distance(there_N, sides.train())
    worst = sorted(zip(responses, groups, strict=True), key=lambda pair: -pair[0].residual)
    found: list[tuple[float, str]] = []
    for name in (name for _, group in worst[:_GROUPS] for name in group.tensors):
        # of a matrix in shards no process has whole columns
        axes = 1 + weights.local.places[name].is_whole
        for axis, low, high in _shares(weights.shapes[name], axes):
            weights.settle_share(name, axis, low, high)
            rest = distance(there_N, sides.train())
            weights.poison([name])
            of = weights.shapes[name][axis]
            found.append((rest, f"{name}, {('rows', 'columns')[axis]} {low}-{high - 1} of {of}"))
    rest, share = min(found, default=(enough, ""))
    return share if rest < enough else ""


def _shares(shape: Sequence[int], axes: int) -> Iterator[tuple[int, int, int]]:
    """(axis, from, to) of the parts of a matrix, along its first axes."""
    for axis in range(axes) if len(shape) == 2 else ():
        for parts in _PARTS:
            size = shape[axis] // parts
            if size:
                yield from ((axis, low, low + size) for low in range(0, parts * size, size))
