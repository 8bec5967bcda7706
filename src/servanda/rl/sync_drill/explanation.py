# Explanations of a group with a wrong response: the same fault is applied to the trainer, which
# must then reproduce the engine.  Needs no sync.
#
# Axes: N scored tokens.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from servanda.rl.sync_drill.response_slope import distance, part_slopes, response_slope
from servanda.rl.sync_drill.result import EXPLAINED, OFF, Response, Scale
from servanda.rl.sync_drill.trainer_response import Perturbation, Piece, Trials
from servanda.rl.sync_drill.weight_groups import LAYER
from servanda.theory.sampling import Floats

_TRIED = 8  # most parts that are omitted in turn
_BETTER = 0.8  # reduction of the rest that justifies omitting another part
_CHANGED = 4  # fewest tokens that an omission changes, for that to be judged on them alone
_LIMIT = 2.5  # noise floors that an explanation may leave, as a working sync does
_STEP, _STEPS = 0.02, 6  # steps of the search for a factor
_FACTORS = (0.02, 50.0)
_SURE = 5.0  # standard errors of a factor's distance from 1
_SINGLES = 96  # most tensors that are tried one by one
_ALIKE = 1.05  # ratio of the rests below which two explanations are not distinguishable


def explain(
    trials: Trials,
    perturbation: Perturbation,
    response: Response,
    *,
    train_N: Floats,
    infer_N: Floats,
    change_N: Floats,
    floor: float,
    damaged: bool,
    scales: bool,
) -> Response:
    """A response with its lost parts, or with the factor of one, if that explains it.

    Args:
        train_N, infer_N: both sides before the perturbation; change_N: the engine's change by it.
        damaged: whether the two sides differ at equal weights, so that no part can be named.
        scales: whether a factor is looked for.
    """
    lack_N = change_N - perturbation.own_N
    lack = _mean(lack_N)
    if damaged:
        return replace(response, left=lack / floor)

    def rest_of(pieces: Sequence[Piece]) -> Floats:
        return change_N - (trials.without(perturbation.sizes, pieces) - train_N)

    lost, left = _lost(trials, perturbation, response, rest_of, lack_N, floor)
    shards, rest = _lost_shards(trials, perturbation, rest_of, train_N, change_N)
    if rest <= _enough(lack, floor) and (not lost or rest <= _ALIKE * left):
        lost, left = shards, rest
    if lost:
        return replace(response, lost=tuple(p.name for p in lost), left=left / floor)
    scale = scales and scaled_by(
        lambda names, factor: trials.without(perturbation.sizes, (), names, factor),
        _scalable(perturbation),
        infer_N + change_N,
        limit=max(_LIMIT * floor, EXPLAINED * lack),
    )
    if scale:
        return replace(response, scale=scale)
    return replace(response, left=min(lack, left) / floor)


def _lost(
    trials: Trials,
    perturbation: Perturbation,
    response: Response,
    rest_of: Callable[[Sequence[Piece]], Floats],
    lack_N: Floats,
    floor: float,
) -> tuple[list[Piece], float]:
    """The parts without which the trainer reproduces the engine, and the unexplained rest, nats;
    empty if there are none.
    """
    follow = {part.name: part for part in response.parts}
    suspects = [
        p for p in perturbation.pieces if follow[p.name].follow < 1 - 3 * follow[p.name].spread
    ]
    suspects.sort(key=lambda piece: follow[piece.name].follow)
    limit = max(_LIMIT * floor, EXPLAINED * _mean(lack_N))

    def enough(rest_N: Floats) -> bool:
        return _mean(rest_N) <= limit and _is_better(rest_N, lack_N, floor)

    # all parts that are clearly not synced; of a tied tensor one use, or rows, not both
    best_N, chosen = lack_N, []
    for family in (("tensor", "use"), ("rows",)):
        deaf = [p for p in suspects if follow[p.name].deaf and p.family in family]
        if deaf and enough(rest_N := rest_of(deaf)) and _mean(rest_N) < _mean(best_N):
            best_N, chosen = rest_N, deaf
    if chosen:
        return chosen, _mean(best_N)
    # single experts of the bundles that are not clear
    suspects = [one for piece in suspects[:_TRIED] for one in trials.split(piece) or [piece]]
    for _ in range(_TRIED):
        tried = [(rest_of([*chosen, piece]), piece) for piece in suspects]
        if not tried:
            break
        rest_N, piece = min(tried, key=lambda pair: _mean(pair[0]))
        if not _is_better(rest_N, best_N, floor):
            break
        best_N, chosen = rest_N, [*chosen, piece]
        suspects.remove(piece)
        if enough(best_N):
            return chosen, _mean(best_N)
    return [], _mean(best_N)


def _mean(rest_N: Floats) -> float:
    return float(np.abs(rest_N).mean())


def _is_better(rest_N: Floats, before_N: Floats, floor: float) -> bool:
    """Whether an omission reduces the rest clearly, on the tokens that it changes.

    An expert changes few tokens: among all others its effect is lost in their noise.
    """
    changed_N = np.abs(rest_N - before_N) > floor
    if changed_N.sum() < _CHANGED:
        changed_N = np.ones_like(changed_N)
    return _mean(rest_N[changed_N]) <= _BETTER * _mean(before_N[changed_N])


def _lost_shards(
    trials: Trials,
    perturbation: Perturbation,
    rest_of: Callable[[Sequence[Piece]], Floats],
    train_N: Floats,
    change_N: Floats,
) -> tuple[list[Piece], float]:
    """The shards without which the trainer is nearest to the engine, and the rest, nats."""
    shards = trials.shards_of(perturbation.group)
    own_N = perturbation.own_N
    if len(shards) < 2:
        return [], np.inf
    effects = [own_N - (trials.without(perturbation.sizes, [shard]) - train_N) for shard in shards]
    each = [part_slopes([effect_N], own_N, change_N)[0][0] for effect_N in effects]
    fits = [follow for follow, _ in part_slopes(effects, own_N, change_N)]
    follows = each if np.isnan(fits).any() else fits
    order = [shards[at] for at in np.argsort(follows)]
    # the one before the last: without all of them the group is not synced as a whole
    tried = [(_mean(rest_of(order[:count])), count) for count in range(1, len(order))]
    left, count = min(tried)
    return sorted(order[:count], key=lambda shard: shard.rows), left


def _enough(lack: float, floor: float) -> float:
    """The largest rest of an explanation, nats; `lack` is the rest without one."""
    return min(max(_LIMIT * floor, EXPLAINED * lack), _BETTER * lack)


def _scalable(perturbation: Perturbation) -> dict[str, tuple[str, ...]]:
    """Tensors that may be scaled together: an adapter's B's, all of a layer, and each by itself."""
    tensors = perturbation.group.tensors
    parts = {p.name: p.tensors for p in perturbation.pieces if p.family == "tensor"}
    if perturbation.group.kind == "adapter":
        second = tuple(name for name in tensors if "lora_B" in name)
        return {"lora_B": second, **parts} if second else parts
    return parts or {perturbation.group.name: tensors}


def classes(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Tensors that may be scaled together: of one kind in all layers, and, of few, of one module,
    and each by itself.

    >>> [*classes(["h.0.up.bias", "h.1.up.bias"])]
    ['up.bias', 'h.0.up', 'h.1.up', 'h.0.up.bias', 'h.1.up.bias']
    """
    tensors: dict[str, tuple[str, ...]] = {}
    for name in names:
        kind = LAYER.sub(r"\2", name)
        tensors[kind] = (*tensors.get(kind, ()), name)
    second = tuple(name for name in names if "lora_B" in name)
    if second:
        tensors = {"lora_B": second, **tensors}
    if len(names) > _SINGLES:
        return tensors
    for name in names:
        module = name.rpartition(".")[0] or name
        tensors[module] = (*tensors.get(module, ()), name)
    return {**tensors, **{name: (name,) for name in names}}


def scaled_by(
    scores: Callable[[Sequence[str], float], Floats],
    candidates: Mapping[str, tuple[str, ...]],
    infer_N: Floats,
    *,
    limit: float,
) -> Scale | None:
    """The factor on some tensors with which the trainer reproduces the engine's scores; None if
    there is none, or it is 1.

    Args:
        scores: the trainer's, with these tensors times a factor, [N], nats.
        candidates: display name -> tensors that may be scaled together.
        infer_N: the engine's scores.
        limit: largest unexplained rest, mean |engine - trainer|, nats.
    """
    plain_N = scores((), 1.0)
    screened: list[tuple[float, str, float]] = []
    for name, tensors in candidates.items():
        slope_N = (scores(tensors, 1 + _STEP) - plain_N) / _STEP
        if slope_N.any():
            fit = response_slope(slope_N, infer_N - plain_N)
            screened.append((fit.residual_nats, name, 1 + fit.follow))
    fits: list[tuple[float, Scale]] = []
    for _, name, factor in sorted(screened)[:4]:
        fitted = _factor(lambda c, of=candidates[name]: scores(of, c), factor, infer_N)
        if fitted is None:
            continue
        left, factor, spread = fitted
        if not _FACTORS[0] < factor < _FACTORS[1]:
            continue  # next to 0: not synced, rather than scaled
        if left <= limit and abs(factor - 1) > max(_SURE * spread, OFF):
            fits.append((left, Scale(name, factor, factor - 2 * spread, factor + 2 * spread)))
    if not fits:
        return None
    least = min(left for left, _ in fits)
    alike = [scale for left, scale in fits if left <= _ALIKE * least]
    best = next(scale for left, scale in fits if left == least)
    return replace(best, tensors=" or ".join(sorted(scale.tensors for scale in alike)))


def _factor(
    scores: Callable[[float], Floats], factor: float, infer_N: Floats
) -> tuple[float, float, float] | None:
    """(rest, factor, standard error) by Gauss-Newton, from a first guess."""
    spread = np.inf
    for _ in range(_STEPS):
        factor = float(np.clip(factor, *_FACTORS))
        here_N = scores(factor)
        slope_N = (scores(factor * (1 + _STEP)) - here_N) / (factor * _STEP)
        if not np.isfinite(slope_N).all() or not slope_N.any():
            return None
        fit = response_slope(slope_N, infer_N - here_N)
        spread = fit.spread
        step = float(np.clip(fit.follow, -0.5 * factor, factor))
        factor += step
        if abs(step) < 0.1 * spread:
            break
    return distance(scores(factor), infer_N), factor, spread
