# Builds the snapshot for gateways from a state, with the sampled share of each slice: there is more
# scoring near a decision.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from servanda.contract.model import WHOLE
from servanda.gateway.routing.evidence_price import evidence_of
from servanda.gateway.routing.model import AWAY, SliceRoute, Snapshot
from servanda.gateway.routing.state import RAMP, RoutingState, Rules, SliceState
from servanda.judgement.slices.rules import Cut

_DRIFT = 0.25  # relative change of a sampled share below which no new snapshot is made


def cuts(rules: Rules) -> dict[str, Cut]:
    """The slices of routing by name: the most specific first, the whole always last."""
    cuts_ = {cell.slice: cell.cut for cell in rules.watched if cell.slice != WHOLE}
    ordered = sorted(cuts_.values(), key=lambda cut: -len(cut.terms))  # stable: as watched
    return {**{cut.name: cut for cut in ordered}, WHOLE: Cut(WHOLE)}


def acts(rules: Rules, slice_: SliceState) -> bool:
    """Whether decisions about a slice are acted on: by its pin, otherwise by the mode."""
    if rules.contract.stable is None:
        return False
    if slice_.pin is not None and slice_.pin.to in ("enforce", "observe"):
        return slice_.pin.to == "enforce"
    return rules.enforces


def build_snapshot(
    rules: Rules,
    state: RoutingState,
    *,
    version: int,
    salt: str,
    now: float,
    samples: Mapping[str, float],
) -> Snapshot:
    """The routes of a state.

    Args:
        version: larger than that of every earlier one.
        salt: key of the split, hex; constant during a deployment, so that sessions stay.
        now: unix seconds; start of its lifetime `routing.expires`.
        samples: slice -> share of infer's responses that train scores (see `samples`);
            default: the contract's.
    """
    policy, contract = rules.policy, rules.contract
    base = policy.share if state.base is None else state.base
    envelope = contract.runtime.envelope
    has_stable = contract.stable is not None
    outside = envelope.outside if envelope is not None else "stable"
    return Snapshot(
        version=version,
        contract=rules.digest,
        name=contract.metadata.name,
        valid_until=now + policy.expires,
        salt=salt,
        base=base,
        mirror=state.mirror,
        sample=state.sample,
        run=state.run,
        leg=state.leg,
        slices=tuple(
            _route(rules, state.slices[name], cut, base, samples.get(name, policy.sample))
            for name, cut in cuts(rules).items()
        ),
        labels={name: label.source for name, label in contract.labels.items()},
        prompt_tokens=envelope.prompt_tokens if envelope is not None else None,
        outside=outside if has_stable or outside == "refuse" else "infer",
        without=policy.without_snapshot if has_stable else "infer",
        has_stable=has_stable,
    )


def _route(rules: Rules, slice_: SliceState, cut: Cut, base: float, sample: float) -> SliceRoute:
    # without a mirror no evidence for a return would arrive
    unseen = slice_.status in (*AWAY, "recovering") or slice_.pinned == "stable"
    return SliceRoute(
        cut=cut,
        status=slice_.status,
        share=base * served(slice_),
        mirror=rules.policy.mirror if unseen else 0.0,
        sample=sample,
        acts=acts(rules, slice_),
        critical=any(cell.critical for cell in rules.on(slice_.name)),
        pinned=slice_.pinned,
    )


def differ(old: Snapshot, made: Snapshot) -> bool:
    """Whether two snapshots differ in more than number and expiry."""
    pairs = zip(old.slices, made.slices, strict=False)  # other slices differ in a lasting property
    drifted = any(abs(new.sample - was.sample) > _DRIFT * was.sample for was, new in pairs)
    return drifted or _lasting(old) != _lasting(made)


def _lasting(made: Snapshot) -> Snapshot:
    slices = tuple(replace(route, sample=0.0) for route in made.slices)
    return replace(made, version=0, valid_until=0.0, slices=slices)


def served(slice_: SliceState) -> float:
    """The fraction of an active slice's share that infer serves, by the decisions."""
    if slice_.status in AWAY:
        return 0.0
    return RAMP[slice_.step] if slice_.status == "recovering" else 1.0


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
