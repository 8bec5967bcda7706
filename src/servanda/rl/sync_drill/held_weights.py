# Which weights an engine holds instead of the random ones that it was sent: the same is done to the
# trainer's, which then has to reproduce the engine.
#
# Its values in other places, or its changes rounded; or all but rows or columns of one matrix, such
# as a head, or the shard of a rank of the engine, too small to be seen in the slope of its group.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations

from servanda.rl.sync_drill.parallel.orders import ORDERS
from servanda.rl.sync_drill.response_slope import distance
from servanda.rl.sync_drill.result import EXPLAINED, Response
from servanda.rl.sync_drill.sides import Sides
from servanda.rl.sync_drill.weight_groups import LAYER, WeightGroup, expert_of
from servanda.rl.sync_drill.weight_snapshot import Weights
from servanda.theory.sampling import Floats

_GROUPS = 3  # those that fit worst are searched
_PARTS = (2, 4)  # halves and quarters
_LEAST = 8  # rows of a matrix of which an eighth is lost


def order_held(weights: Weights, sides: Sides, there_N: Floats, limit: float) -> tuple[str, str]:
    """(cause, what is wrong) with the random weights that the trainer has; "" if nothing explains
    the engine.

    Args:
        there_N: the engine's scores after these weights were synced.
        limit: on the distance of both sides, nats; what explains it is within, and halves it.
    """
    if not all(place.is_whole for place in weights.local.places.values()):
        return "", ""
    apart = distance(there_N, sides.train())
    enough = min(max(limit, EXPLAINED * apart), apart / 2)
    found: list[tuple[float, str, str]] = []
    for number, (cause, what, _) in enumerate(ORDERS):
        weights.reorder(number)
        found.append((distance(there_N, sides.train()), cause, what))
        weights.poison()
    rest, cause, what = min(found)
    return (cause, what) if rest < enough else ("", "")


def exchanged(weights: Weights, sides: Sides, infer_N: Floats, apart: float) -> str:
    """The two kinds of tensors that change places in the engine in every layer; "" for none.

    Args:
        infer_N: the engine's scores at equal weights; apart: their distance from the trainer, nats.
    """
    if not all(place.is_whole for place in weights.local.places.values()):
        return ""
    kinds: dict[str, list[str]] = {}
    for name in weights.parameters:
        kinds.setdefault(LAYER.sub(r"\2", name), []).append(name)
    shapes = {kind: [weights.shapes[name] for name in names] for kind, names in kinds.items()}
    found: list[tuple[float, str]] = []
    for one, other in combinations(kinds, 2):
        if shapes[one] == shapes[other]:
            weights.exchange([*zip(kinds[one], kinds[other], strict=True)])
            found.append((distance(infer_N, sides.train()), f"{one} and {other}"))
            weights.settle([*kinds[one], *kinds[other]])
    rest, which = min(found, default=(apart, ""))
    return which if rest < EXPLAINED * apart else ""


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


def kinds_of(weights: Weights) -> list[list[str]]:
    """The tensors of layers, those of one kind together, in the order of the layers."""
    kinds: dict[str, list[str]] = {}
    for name in weights.shapes:
        if LAYER.search(name):
            kinds.setdefault(LAYER.sub(r"\2", name), []).append(name)
    return [*kinds.values()]


def matrices_of(weights: Weights) -> list[str]:
    """Of each kind of matrices one of a middle layer."""
    middle = (names[len(names) // 2] for names in kinds_of(weights))
    shapes = weights.shapes
    return [name for name in middle if len(shapes[name]) == 2 and shapes[name][0] >= _LEAST]


def plain_kinds(weights: Weights) -> list[list[str]]:
    """The same without experts: which tokens reach an expert differs from layer to layer."""
    return [names for names in kinds_of(weights) if not expert_of(names[0])]


def tried_of(names: Sequence[str]) -> list[str]:
    """Of a kind of tensors those of the first, the middle and the last layer."""
    return [*dict.fromkeys((names[0], names[len(names) // 2], names[-1]))]


def seen_shares(weights: Weights, sides: Sides, there_N: Floats, limit: float) -> dict[str, float]:
    """A matrix of each kind -> the smallest share of its first rows of which the loss would exceed
    the limit, of a half, a quarter and an eighth; 1 if not even a half does.

    Args:
        there_N: the trainer's scores with the random weights that it has.
        limit: on the distance of both sides then, nats.
    """
    seen: dict[str, float] = {}
    for name in matrices_of(weights):

        def shows(parts: int, name: str = name) -> bool:
            weights.settle_share(name, 0, 0, weights.shapes[name][0] // parts)
            apart = distance(sides.train(), there_N)
            weights.poison([name])
            return apart > limit

        order = (4, 8) if shows(4) else (2,)
        seen[name] = min((1 / n for n in order if n == 4 or shows(n)), default=1.0)
    return seen


def shown_alone(weights: Weights, sides: Sides, there_N: Floats, limit: float) -> frozenset[str]:
    """The tensors of layers that random weights show one by one.

    They are those of a kind of which one, left out in the first, the middle and the last layer,
    exceeds the limit.

    Args:
        there_N, limit: as of seen_shares.
    """

    def shows(name: str) -> bool:
        weights.settle([name])
        apart = distance(sides.train(), there_N)
        weights.poison([name])
        return apart > limit

    shown = (names for names in plain_kinds(weights) if all(map(shows, tried_of(names))))
    return frozenset(chain.from_iterable(shown))


def _shares(shape: Sequence[int], axes: int) -> Iterator[tuple[int, int, int]]:
    """(axis, from, to) of the parts of a matrix, along its first axes."""
    for axis in range(axes) if len(shape) == 2 else ():
        for parts in _PARTS:
            size = shape[axis] // parts
            if size:
                yield from ((axis, low, low + size) for low in range(0, parts * size, size))
