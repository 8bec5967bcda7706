# Small routings: cells of which one request is one number in [0, 1].

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from servanda.contract.model import Contract
from servanda.gateway.routing.state import RoutingState, Rules, Score, TrafficFacts, WatchedCell
from servanda.gateway.routing.state_machine import absorb, advance
from servanda.judgement.slices.rules import Cut, Term
from servanda.theory.stats.group_ratio import GroupRatio

LIMIT = 0.5
CHEAP = {
    "mode": "enforce",
    "enter_evidence": 20,
    "leave_evidence": 10,
    "horizon": 10,
    "keys": 4,
    "dwell": "100s",
    "longest_dwell": "400s",
    "moves_per_hour": 100,
    "stable_in_flight": 10,
}


def contract(**routing: Any) -> Contract:
    """A contract with cheap prices, on which a dozen requests decide."""
    stable = {"engine": "table"} if routing.pop("stable", True) else None
    more = {name: routing.pop(name) for name in ("labels", "runtime") if name in routing}
    return Contract.model_validate(
        {
            "apiVersion": "servanda.dev/v1alpha1",
            "kind": "KernelContract",
            "metadata": {"name": "small"},
            "kernels": {"train": {"engine": "table"}, "infer": {"engine": "table"}},
            "stable": stable,
            "routing": {**CHEAP, **routing},
            **more,
        }
    )


def cut(name: str, *also: tuple[str, str]) -> Cut:
    """Requests whose label `team` is the name; "all" has every one."""
    if name == "all":
        return Cut("all")
    terms = [
        Term("labels.team", "in", (name,)),
        *(Term(f"labels.{k}", "in", (v,)) for k, v in also),
    ]
    return Cut(name, tuple(terms))


def cell(name: str = "code", **changes: Any) -> WatchedCell:
    one = WatchedCell("tv", cut(name), LIMIT, diverts="slice", pages=("oncall",))
    return replace(one, **changes)


def rules(*cells: WatchedCell, **routing: Any) -> Rules:
    return Rules(contract(**routing), tuple(cells) or (cell(),))


def facts(now: float, **changes: Any) -> TrafficFacts:
    """Traffic of which each slice is a tenth, and stable has room for all of it."""
    names = ("code", "chat", "maths")
    given: dict[str, Any] = {
        "shares": {**dict.fromkeys(names, 0.1), "all": 1.0},
        "in_flight": {**dict.fromkeys(names, 1.0), "all": 4.0},
        "stable_in_flight": 2.0,
    }
    return TrafficFacts(now, **{**given, **changes})


def score(
    x: float, key: str = "a", *, of: str = "code", clause: str = "tv", chance: float = 1.0
) -> Score:
    """One request whose only token has the value x in one cell."""
    return scores({(clause, of): x}, key, chance=chance)


def scores(x_by_cell: dict[tuple[str, str], float], key: str, *, chance: float = 1.0) -> Score:
    return Score(0.0, key, chance, {cell: one(x) for cell, x in x_by_cell.items()})


def one(x: float) -> GroupRatio:
    return GroupRatio(1, 1, np.array([x]), np.array([1]), np.array([0]))


def lost() -> GroupRatio:
    """A request that came to nothing."""
    return GroupRatio(1, 1, np.array([0.0]), np.array([0]), np.array([1]))


def fed(
    rules: Rules, state: RoutingState, x: float, n: int = 12, *, of: str = "code", users: int = 6
) -> RoutingState:
    """The state after n requests of the value x, of so many users in turn."""
    for i in range(n):
        state = absorb(rules, state, score(x, f"user {i % users}", of=of))
    return state


def looked(rules: Rules, state: RoutingState, now: float, **changes: Any) -> RoutingState:
    return advance(rules, state, facts(now, **changes))[0]


def quarantined(rules: Rules, state: RoutingState, now: float) -> RoutingState:
    """The state with `code` away, at that time."""
    state = looked(rules, fed(rules, state, 1.0), now)
    assert state.slices["code"].status == "quarantined"
    return state


def recovering(rules: Rules, state: RoutingState, now: float) -> RoutingState:
    """The same, on its way back."""
    state = quarantined(rules, state, now)
    state = looked(rules, state, now + state.slices["code"].dwell_s)
    state = looked(rules, fed(rules, state, 0.0), state.clock)
    assert state.slices["code"].status == "recovering"
    return state
