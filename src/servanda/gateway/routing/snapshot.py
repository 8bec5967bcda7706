# Builds the snapshot for gateways from a state.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from servanda.contract.model import WHOLE
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
        samples: slice -> share of infer's responses that train scores (`sampling_budget.samples`);
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
