# Updates of few values, as those of RL are: at a small learning rate 1 to 3 % of the values of
# bfloat16 weights change in a step.  A sync that sends differences takes another path for them than
# for a tensor that changes as a whole.
#
# Axes: N scored tokens.

from __future__ import annotations

from dataclasses import replace

from servanda.rl.sync_drill.perturbation import judged
from servanda.rl.sync_drill.result import Response
from servanda.rl.sync_drill.sides import Sides
from servanda.rl.sync_drill.trainer_response import Perturbation, perturbation_size
from servanda.rl.sync_drill.weight_groups import WeightGroup
from servanda.rl.sync_drill.weight_snapshot import Weights
from servanda.theory.sampling import Floats

DENSITIES = (0.005, 0.01, 0.05)  # shares of all values that change between two syncs
SYNCS = 1 + len(DENSITIES)


def sparse_updates(
    weights: Weights, sides: Sides, train_N: Floats, infer_N: Floats, floor: float
) -> tuple[Response, ...]:
    """The engine's responses to updates of a share of all values, up to the first that is wrong.

    The values of one update keep their change in the next, so that each sync differs from the one
    before in its share alone.

    Args:
        train_N, infer_N: scores of both sides at the start of perturbations; the trainer is there.
        floor: the noise floor, nats.
    """
    sides.stage = "updates of few values"
    sides.sync()  # undoes the last perturbation, which was of whole tensors
    names, changed = [*weights.parameters], 0.0
    # of all updates together: far from its weights a model differs, and kernels of it differ more
    size, _ = perturbation_size(weights, names, train_N, sides.train, floor, share=sum(DENSITIES))
    sizes, responses = dict.fromkeys(names, size), []
    for density in DENSITIES:
        changed += density
        weights.perturb(sizes, changed)
        sides.sync()
        own_N = sides.train() - train_N
        update = WeightGroup(f"{100 * density:g} % of the values", "rest", None, {"": tuple(names)})
        perturbations = [Perturbation(update, size, sizes, own_N)]
        (found,) = judged(perturbations, own_N, sides.infer() - infer_N, floor)
        if found.mark == "violated":
            sides.sync()
            (again,) = judged(perturbations, own_N, sides.infer() - infer_N, floor)
            found = replace(found, late=int(again.mark != "violated"))
        responses.append(found)
        if found.mark == "violated":
            break
    weights.settle(names)
    return tuple(responses)
