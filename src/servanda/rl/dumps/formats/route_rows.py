# Recorded experts of a sequence, as trainers and servers keep them, in the form of `Rollouts`.
#
# A server records a row for each token that it was fed.  The last sampled token is fed to nothing,
# so T tokens have T - 1 rows, and row t of ours is row t - 1 of theirs.
# Axes: T tokens, R recorded rows, L layers, K experts of a token.

from __future__ import annotations

from typing import Any

import numpy as np

from servanda.rl.dumps.formats.json_arrays import Unusable
from servanda.rl.dumps.formats.padding import plain
from servanda.traces.rollouts import UNROUTED, Array


def routes_of(value: Any, tokens: int, name: str, *, may_end_early: bool = False) -> Array:
    """The experts of the pass that predicted each token, [T, L, K], int16; UNROUTED for the first.

    Args:
        value: [R, L, K], whole numbers: of the tokens that were fed, from the first on.
        tokens: T.
        may_end_early: whether fewer rows are right, of a record that leaves out the end.

    Raises:
        Unusable: it is of another shape or type, or names what is no expert.
    """
    try:
        route_RLK = plain(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise Unusable(f"{name} are not numbers") from None
    if route_RLK.ndim != 3 or route_RLK.dtype.kind not in "iu" or not all(route_RLK.shape[1:]):
        raise Unusable(f"{name} are not whole numbers, [tokens, layers, experts]")
    rows = len(route_RLK)
    if rows > tokens - 1 or (rows < tokens - 1 and not may_end_early):
        raise Unusable(f"{name} have not one row for each token but the last")
    low, high = int(route_RLK.min(initial=0)), int(route_RLK.max(initial=0))
    if low < UNROUTED or high > np.iinfo(np.int16).max:
        odd = low if low < UNROUTED else high
        raise Unusable(f"{name} name expert {odd}, which is no expert's number")
    route_TLK = np.full((tokens, *route_RLK.shape[1:]), UNROUTED, np.int16)
    route_TLK[1 : rows + 1] = route_RLK
    return route_TLK
