# Every state that a slice can come to in a few steps from each place of its way, and what may
# never happen on the way.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest

from servanda.gateway.routing.evidence_price import evidence_of, slowest
from servanda.gateway.routing.model import AWAY, STATUSES, Pin
from servanda.gateway.routing.snapshot import build_snapshot
from servanda.gateway.routing.state import (
    RAMP,
    RoutingState,
    Rules,
    TrafficFacts,
    Transition,
    status_text,
)
from servanda.gateway.routing.state_machine import absorb, advance, begin, pin
from servanda.traces.serialization import to_plain
from tests.gateway.routing.made import cell, facts, fed, rules, score

DEPTH = 3
DWELL_S = 100.0
STEPS = ("bad", "good", "flood", "wait", "long", "full", "wide", "blind", "back")
SERVING = ("active", "suspect", "recovering")


@dataclass(frozen=True)
class Edge:
    """One step from a state: what was absorbed, what was measured, and what came of it."""

    step: str
    before: RoutingState
    facts: TrafficFacts
    after: RoutingState
    changes: tuple[Transition, ...]

    @property
    def left(self) -> str:
        return self.before.slices["code"].status

    @property
    def came(self) -> str:
        return self.after.slices["code"].status


def taken(rule: Rules, state: RoutingState, step: str) -> Edge:
    """Requests, or time, and then a look."""
    now, changed = state.clock + 1.0, {}
    if step in ("bad", "good"):
        state = fed(rule, state, 1.0 if step == "bad" else 0.0, 21, users=5)
    elif step == "flood":
        for _ in range(20):
            state = absorb(rule, state, score(1.0, "flood"))
    elif step in ("wait", "long"):
        now = state.clock + (DWELL_S / 4 if step == "wait" else DWELL_S)
    elif step == "back":
        now = state.clock - 1e6
    elif step == "full":
        changed = {"stable_in_flight": 9.5}
    elif step == "wide":
        changed = {"shares": {"code": 0.5}}
    else:
        changed = {"stable_in_flight": None, "in_flight": {}, "shares": {}}
    given = facts(now, **changed)
    return Edge(step, state, given, *advance(rule, state, given))


def same(state: RoutingState) -> str:
    """What the machine's next steps hang on: times count from the clock."""
    told = []
    for one in state.slices.values():
        times = (one.since, one.step_since, one.calm, *one.moves)
        told.append([None if t is None else t - state.clock for t in times])
        told.append(to_plain(replace(one, since=0.0, step_since=0.0, calm=None, moves=())))
    return repr(told)


@lru_cache
def explored(mode: str, keys: int, diverts: str = "slice") -> tuple[Rules, tuple[Edge, ...]]:
    rule = rules(cell(diverts=diverts), mode=mode, keys=keys)
    level, edges = [begin(rule, now=0.0)], []
    for step in ("bad", "long", "good", *("good", "wait") * 3):  # the way to the last step
        level.append(taken(rule, level[-1], step).after)
    seen = {*map(same, level)}
    for _ in range(DEPTH):
        following = []
        for state in level:
            for step in STEPS:
                edge = taken(rule, state, step)
                edges.append(edge)
                if same(edge.after) not in seen:
                    seen.add(same(edge.after))
                    following.append(edge.after)
        level = following
    return rule, tuple(edges)


ENFORCED, OBSERVED, LONELY = ("enforce", 4), ("observe", 4), ("enforce", 6)
TOGETHER = ("enforce", 4, "all")
ALL = pytest.mark.parametrize("world", [ENFORCED, OBSERVED, LONELY], ids=str)


def edges(world: tuple[Any, ...]) -> Iterator[tuple[Rules, Edge]]:
    rule, found = explored(*world)
    return ((rule, edge) for edge in found)


def room(edge: Edge) -> bool:
    return edge.step not in ("full", "blind")


@pytest.mark.slow
@ALL
def test_every_status_is_met(world):
    met = {edge.came for _, edge in edges(world)}

    assert met == {*STATUSES} if world != LONELY else {"active", "suspect"}


@pytest.mark.slow
def test_what_is_shown_to_be_beyond_its_limit_is_not_served_by_infer():
    """In enforce, with users and room, whatever came before."""
    count = 0
    for rule, edge in edges(ENFORCED):
        one = edge.before.slices["code"]
        shown = [w for w in evidence_of(rule, one) if w.paid]
        enough = room(edge) and len(one.keys) >= rule.policy.keys
        narrow = edge.step != "wide" or one.status == "recovering"
        if shown and enough and narrow and one.status in SERVING:
            count += 1
            made = build_snapshot(rule, edge.after, version=1, salt="", now=0.0, samples={})
            assert (edge.came, made.slices[0].share, made.slices[0].acts) == (
                "quarantined",
                0,
                True,
            )
    assert count > 20


@pytest.mark.slow
@ALL
def test_nothing_leaves_infer_without_evidence_users_and_room(world):
    for rule, edge in edges(world):
        if edge.left in SERVING and edge.came not in SERVING:
            one = edge.before.slices["code"]
            assert evidence_of(rule, one)[0].paid
            assert len(one.keys) >= rule.policy.keys
            assert room(edge)
            assert edge.step != "wide" or edge.left == "recovering"


@pytest.mark.slow
@ALL
def test_nothing_comes_back_without_requests_that_show_it(world):
    for rule, edge in edges(world):
        if edge.left in AWAY and edge.came not in AWAY:
            one = edge.before.slices["code"]
            found = slowest(rule, one)
            assert (edge.left, edge.came) == ("probation", "recovering")
            assert one.scored > 0
            assert found is not None
            assert found.paid


@pytest.mark.slow
@ALL
def test_stable_keeps_a_slice_for_its_dwell(world):
    for _, edge in edges(world):
        one = edge.before.slices["code"]
        if edge.left == "quarantined" and edge.came != "quarantined":
            assert edge.after.clock >= one.since + one.dwell_s


@pytest.mark.slow
@ALL
def test_a_slice_takes_one_step_at_a_time_and_a_ramp_skips_none(world):
    allowed = {
        ("active", "suspect"),
        ("active", "quarantined"),
        ("suspect", "active"),
        ("suspect", "quarantined"),
        ("quarantined", "probation"),
        ("probation", "recovering"),
        ("probation", "quarantined"),
        ("recovering", "quarantined"),
        ("recovering", "active"),
    }
    for _, edge in edges(world):
        before, after = edge.before.slices["code"], edge.after.slices["code"]
        assert edge.left == edge.came or (edge.left, edge.came) in allowed
        if edge.left == edge.came == "recovering":
            assert after.step - before.step in (0, 1)
        if (edge.left, edge.came) == ("recovering", "active"):
            assert before.step == len(RAMP) - 1


def test_every_place_where_infer_serves_has_a_way_out():
    ways = {edge.left for _, edge in edges(ENFORCED) if edge.came == "quarantined"}

    assert ways >= {*SERVING, "probation"}


@ALL
def test_every_change_is_written_down_and_numbered_without_gaps(world):
    for _, edge in edges(world):
        numbers = [change.number for change in edge.changes]
        first = edge.before.transitions
        assert numbers == list(range(first + 1, edge.after.transitions + 1))
        assert bool(edge.changes) == (
            (edge.left, edge.before.slices["code"].step, edge.before.slices["code"].told)
            != (edge.came, edge.after.slices["code"].step, edge.after.slices["code"].told)
        )


@ALL
def test_the_changes_of_a_slice_are_a_chain(world):
    """Each begins where the one before it ended: what is written down is all that happened."""
    for _, edge in edges(world):
        for name in edge.before.slices:
            chain = [status_text(edge.before.slices[name])]
            for change in edge.changes:
                if change.slice == name:
                    assert change.before == chain[-1]
                    chain.append(change.after)
            assert chain[-1] == status_text(edge.after.slices[name])


@pytest.mark.slow
def test_a_rule_that_diverts_all_takes_the_whole_and_leaves_it_there_until_the_slice_is_back():
    went, came = 0, 0
    for rule, edge in edges(TOGETHER):
        code, whole = edge.after.slices["code"], edge.after.slices["all"]
        before = edge.before.slices["all"]
        if before.status not in AWAY and whole.status in AWAY:
            went += 1
            assert evidence_of(rule, edge.before.slices["code"])[0].paid
            assert room(edge)
            assert code.status == "quarantined"
        if before.status in AWAY and whole.status not in AWAY:
            came += 1
            assert code.status not in AWAY
        if edge.left in SERVING and edge.came == "quarantined":
            assert whole.status in AWAY
    assert min(went, came) > 0


@ALL
def test_time_never_goes_back(world):
    for _, edge in edges(world):
        assert edge.after.clock >= edge.before.clock


@pytest.mark.slow
def test_who_observes_does_nothing_and_comes_to_the_same_states():
    acting, watching = ({same(e.after) for _, e in edges(w)} for w in (ENFORCED, OBSERVED))

    # what is held is said in other words, and nothing else differs
    assert {one.replace("not diverted", "would not be diverted") for one in acting} == watching
    assert not any(change.acted for _, edge in edges(OBSERVED) for change in edge.changes)


@pytest.mark.parametrize("to", ["stable", "infer"])
def test_a_person_has_the_last_word_in_every_state(to):
    rule, found = explored(*ENFORCED)
    states = {edge.came: edge.after for edge in found}
    for status, state in states.items():
        word = Pin(to, "anna", "why", state.clock + 1e6)
        pinned, _ = pin(rule, state, "code", word, actor="anna", reason="why", now=state.clock)
        for step in STEPS:
            edge = taken(rule, pinned, step)
            route = build_snapshot(
                rule, edge.after, version=1, salt="", now=0.0, samples={}
            ).slices[0]
            assert route.pinned == to
            assert (edge.came in AWAY) == (status in AWAY)
