# The budget: how much of each slice is scored, so that train's time goes where a decision is near.

from __future__ import annotations

from collections.abc import Mapping

from servanda.contract.model import WHOLE
from servanda.gateway.routing.evidence_price import evidence_of
from servanda.gateway.routing.state import RoutingState, Rules, SliceState

LEAST = 1e-4  # of every slice: a fault that no one evaluations for is never seen


def samples(
    rules: Rules, state: RoutingState, *, rates: Mapping[str, float], cost_s: float
) -> dict[str, float]:
    """Of what infer answers, or is asked as well, the share of each slice that train scores.

    `routing.sample` of everything, and up to `routing.sample_near` where a decision is near,
    the nearest first.  A request is scored once for all its slices, by the largest of their
    shares; so each slice has at least the share of the whole, which costs nothing more.

    Args:
        rates: slice -> requests a second that infer answers or is asked as well; a slice that
            is left out costs nothing.
        cost_s: seconds of train that one request takes; NaN or 0 where no one knows it yet.

    Returns:
        slice -> share in [1e-4, 1].  Shares times rates times the cost are within
        `routing.budget`, but for the least of each.
    """
    policy = rules.policy
    near = max(policy.sample, policy.sample_near)
    urgent = {name: urgency(rules, slice_) for name, slice_ in state.slices.items()}
    spend = _Spending(rates, policy.budget / cost_s if cost_s > 0 else float("inf"))
    for name in sorted((n for n in urgent if urgent[n] > 0), key=lambda n: -urgent[n]):
        spend.on(name, near)
    for name in (WHOLE, *urgent):  # the whole first: what it has, every slice has
        spend.on(name, policy.sample)
    return {name: spend.share(name) for name in urgent}


def urgency(rules: Rules, slice_: SliceState) -> float:
    """How much a slice's next request matters to a decision; 0: no more than any other.

    What users are served by infer comes before what they are not.
    """
    if slice_.status == "probation":
        return 0.5
    if slice_.status not in ("suspect", "recovering"):
        return 0.0
    evidence = evidence_of(rules, slice_)
    if evidence and evidence[0].paid and len(slice_.keys) >= rules.policy.keys:
        return 0.0  # it is decided, and held by something that more evidence does not bring
    return 1.0 + (evidence[0].near if evidence else 0.0)


class _Spending:
    """Shares that were given so far, and the requests a second that train has time for."""

    def __init__(self, rates: Mapping[str, float], left: float) -> None:
        self._rates = {**rates, WHOLE: max(rates.values(), default=0.0)}
        self._given: dict[str, float] = {}
        self._left = left - self._rates[WHOLE] * LEAST

    def share(self, name: str) -> float:
        return max(self._given.get(name, LEAST), self._given.get(WHOLE, LEAST))

    def on(self, name: str, wanted: float) -> None:
        """Raise a share as far as what is left allows."""
        has, rate = self.share(name), self._rates.get(name, 0.0)
        more = min(wanted, 1.0) - has
        if more <= 0.0:
            return
        if rate > 0.0 and more * rate > self._left:
            more = max(0.0, self._left) / rate
        self._given[name] = has + more
        self._left -= more * rate
