# The scoring budget: the sampled share of each slice, with more scoring near a decision.

from __future__ import annotations

from collections.abc import Mapping

from servanda.contract.model import WHOLE
from servanda.gateway.routing.evidence_price import evidence_of
from servanda.gateway.routing.state import RoutingState, Rules, SliceState

LEAST = 1e-4  # smallest share of every slice, so that no fault stays unnoticed


def samples(
    rules: Rules, state: RoutingState, *, rates: Mapping[str, float], cost_s: float
) -> dict[str, float]:
    """The share of infer's responses, mirrored ones included, that train scores, per slice.

    `routing.sample` of all slices, and up to `routing.sample_near` near a decision, the nearest
    first.  A request is scored once for all its slices, by the largest of their shares; so each
    slice has at least the share of the whole, at no further cost.

    Args:
        rates: slice -> requests per second to infer, mirrored ones included; a missing slice costs
            nothing.
        cost_s: scoring time per request, seconds; NaN or 0: unknown.

    Returns:
        slice -> share in [1e-4, 1].  The sum of share x rate x cost is within `routing.budget`,
        except for the smallest shares.
    """
    policy = rules.policy
    near = max(policy.sample, policy.sample_near)
    urgent = {name: urgency(rules, slice_) for name, slice_ in state.slices.items()}
    spend = _Spending(rates, policy.budget / cost_s if cost_s > 0 else float("inf"))
    for name in sorted((n for n in urgent if urgent[n] > 0), key=lambda n: -urgent[n]):
        spend.on(name, near)
    for name in (WHOLE, *urgent):  # the whole first: every slice has at least its share
        spend.on(name, policy.sample)
    return {name: spend.share(name) for name in urgent}


def urgency(rules: Rules, slice_: SliceState) -> float:
    """The importance of a slice's next request for a decision; 0: none.

    Slices that infer serves come before mirrored ones.
    """
    if slice_.status == "probation":
        return 0.5
    if slice_.status not in ("suspect", "recovering"):
        return 0.0
    evidence = evidence_of(rules, slice_)
    if evidence and evidence[0].paid and len(slice_.keys) >= rules.policy.keys:
        return 0.0  # decided, and held by a condition that evidence does not change
    return 1.0 + (evidence[0].near if evidence else 0.0)


class _Spending:
    """The shares assigned so far, and the remaining scoring rate, requests per second."""

    def __init__(self, rates: Mapping[str, float], left: float) -> None:
        self._rates = {**rates, WHOLE: max(rates.values(), default=0.0)}
        self._given: dict[str, float] = {}
        self._left = left - self._rates[WHOLE] * LEAST

    def share(self, name: str) -> float:
        return max(self._given.get(name, LEAST), self._given.get(WHOLE, LEAST))

    def on(self, name: str, wanted: float) -> None:
        """Raise a share as far as the budget allows."""
        has, rate = self.share(name), self._rates.get(name, 0.0)
        more = min(wanted, 1.0) - has
        if more <= 0.0:
            return
        if rate > 0.0 and more * rate > self._left:
            more = max(0.0, self._left) / rate
        self._given[name] = has + more
        self._left -= more * rate
