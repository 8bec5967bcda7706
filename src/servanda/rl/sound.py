# Sound: what no logprob of a step can be, looked for before anything is judged.

from __future__ import annotations

import numpy as np

from servanda.rl.batch import Batch
from servanda.rollouts import Rollouts
from servanda.soundness.values import Values
from servanda.soundness.zeros import Zeros


def rollouts_of(batch: Batch) -> Rollouts:
    """A step as a dump would hold it; every column of the arrays is a token of its sequence."""
    size, width = batch.mask_BT.shape
    own = tuple(map(str, range(size)))
    stale = {}
    if batch.staleness_BT is not None:
        stale_BT = np.broadcast_to(batch.staleness_BT, (size, width))
        stale["staleness"] = stale_BT.ravel().astype(np.float64)
    return Rollouts(
        batch.weights,
        np.full(size, width),
        np.full(size * width, -1),
        batch.mask_BT.ravel(),
        batch.logp_train_BT.ravel(),
        batch.logp_infer_BT.ravel(),
        batch.group_B or own,
        tuple(f"sequence {b}" for b in range(size)),
        batch.labels,
        {},
        stale,
    )


def problems(batch: Batch) -> tuple[str, ...]:
    """Why a step can be no evidence: logprobs above 0, or missing ones that were filled with 0."""
    rollouts = rollouts_of(batch)
    found = []
    for check in (Values(), Zeros()):
        check.add(rollouts)
        finding = check.finding()
        if finding.state == "unsound":
            found.append(f"{finding.text} (first: {finding.first})")
    return tuple(found)
