# All weights randomised at once: whether, when and where the weights reach the engine.
#
# Axes: N scored tokens.

from __future__ import annotations

from dataclasses import replace

import numpy as np

from servanda.rl.sync_drill.perturbation import LATEST, is_mixed
from servanda.rl.sync_drill.response_slope import distance, response_slope
from servanda.rl.sync_drill.result import (
    DEAF,
    POISON_FLOORS,
    POISON_NATS,
    POISON_SHARE,
    Baseline,
    Mark,
    PoisonResult,
)
from servanda.rl.sync_drill.sides import Sides
from servanda.rl.sync_drill.weight_snapshot import Weights
from servanda.theory.sampling import Floats


def poison_test(
    weights: Weights, sides: Sides, baseline: Baseline, train_N: Floats, infer_N: Floats
) -> PoisonResult:
    """Randomise all weights and sync once; afterwards the trainer is restored, not the engine.

    Args:
        train_N, infer_N: scores of both sides before.
    """
    sides.stage = "all weights randomised"
    weights.poison()
    sides.sync()
    there_N, here_N = sides.infer(), sides.train()
    own_N, change_N = here_N - train_N, there_N - infer_N
    apart_by, moved = distance(there_N, here_N), distance(here_N, train_N)
    limit = max(POISON_FLOORS * baseline.floor, POISON_SHARE * moved)
    answer = response_slope(own_N, change_N) if own_N.any() else None
    mark: Mark = "violated" if apart_by > limit else "holds"
    if moved < POISON_FLOORS * baseline.floor:
        mark = "unseen"
    if answer and moved > POISON_NATS and answer.follow + 3 * answer.spread < DEAF:
        # whatever the distance before: one changed, the other did not
        mark = "violated"
    poison = PoisonResult(
        distance=apart_by,
        moved=moved,
        follow=answer.follow if answer else np.nan,
        limit=limit,
        mark=mark,
    )
    if poison.mark == "violated":
        poison = _again(sides, baseline, poison, own_N, change_N, there_N)
    weights.restore()
    return poison


def _again(
    sides: Sides,
    baseline: Baseline,
    poison: PoisonResult,
    own_N: Floats,
    change_N: Floats,
    there_N: Floats,
) -> PoisonResult:
    """Repeat after random weights did not arrive: by another call, on other tokens, after syncs.

    Args:
        own_N: the trainer's change; change_N: the engine's; there_N: its scores.
    """
    due_N, start_N = sides.train(), there_N - change_N
    changes = [change_N, sides.infer() - start_N]
    lengths = [len(row) - 1 for row in sides.rows]
    if is_mixed(own_N, changes, lengths, floor=baseline.floor, noise=baseline.engine_noise):
        return replace(poison, mixed=True)
    if poison.follow < DEAF:
        # the same tokens in reverse order: unknown to prefix caches
        rows = [row[::-1] for row in sides.rows]
        poison = replace(poison, fresh=distance(sides.infer(rows), sides.train(rows)))
        if poison.cached:
            return poison
    # of a small distance that is violated by its slope, the limit would be no improvement
    enough = poison.distance / 2
    if poison.distance > poison.limit:
        enough = max(poison.limit, enough)
    for late in range(1, LATEST + 1):
        sides.sync()
        if distance(sides.infer(), due_N) <= enough:
            return replace(poison, late=late)
    return poison
