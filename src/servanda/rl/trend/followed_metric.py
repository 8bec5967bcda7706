# The metrics that a reference may follow: their scale, and the direction that is a change.

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from servanda.rl.trend.step_scalars import COVERAGE, K3, MEAN, P99

LEAST_RATIO = 0.01  # a step of 1 % is within the rounding of logs
_SMALLEST = 1e-300  # in place of a value of 0 on a logarithmic scale


@dataclass(frozen=True)
class FollowedMetric:
    """How a metric is compared with good runs.

    Args:
        log: whether ratios count, rather than differences.
        side: 1 if a rise is a change, -1 if a fall is, 0 if both are.
    """

    log: bool
    side: int

    def x(self, value: float) -> float:
        return math.log(max(value, _SMALLEST)) if self.log else value

    def told(self, change: float) -> str:
        """A change of x, in words."""
        return f"x{math.exp(change):.3g}" if self.log else f"{change:+.3g}"

    def least(self, tokens: float) -> float:
        """The smallest scale: 1 %, or one token of a step."""
        return LEAST_RATIO if self.log else 1 / max(tokens, 1.0)


_RISES, _FALLS = FollowedMetric(log=True, side=1), FollowedMetric(log=False, side=-1)
_MOVES = FollowedMetric(log=False, side=0)
_KNOWN: Mapping[str, FollowedMetric] = {
    K3: _RISES,
    P99: _RISES,
    MEAN: _RISES,
    COVERAGE: _FALLS,
}
BY_DEFAULT = (K3, COVERAGE)  # one threshold is for all metrics: each more makes the others blunter


def followed(name: str) -> FollowedMetric:
    """How a metric is compared: a known one, by its ending, or in both directions.

    >>> followed("k3_nats").side, followed("draft_acceptance").side, followed("follow/slope").side
    (1, -1, 0)
    """
    if name in _KNOWN:
        return _KNOWN[name]
    if name.endswith("_nats"):
        return _RISES
    return _FALLS if "acceptance" in name else _MOVES


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """The metrics that are followed by default, of those that every step of a reference has."""
    known = set(names)
    more = sorted(n for n in known if "acceptance" in n or n.endswith("slope"))
    return (*(n for n in BY_DEFAULT if n in known), *more)
