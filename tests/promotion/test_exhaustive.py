# Every state that a small promotion can reach, and every edge between them.
#
# Times are small whole numbers and count from now; what a person reads, and how often anybody
# was told, is left out of a state.  What is asserted holds of all edges, so of all histories.

from collections import deque
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from servanda.errors import EvidenceError
from servanda.promotion.advance import advance, approve, begin, override, roll_back, route_of
from servanda.promotion.state import CellResult, LegFinding, Override, RuleAction, State, leg_of
from tests.promotion.made import FULL, KEY, OFFLINE, ONE, TEN

DWELL, VALID, LONG = 2.0, 3.0, 99.0
FIRST, LAST = 2, 4  # of every leg in made.py
TICKS = (0.0, 1.0, 3.0)

TV = CellResult("tv", "all", "holds", n=9)
TAIL = CellResult("tail", "all", "holds", n=9)
BROKEN = replace(TAIL, outcome="violated")
OPEN = replace(TAIL, outcome="inconclusive")
# name -> (cells, what rules ask for); those in SOUND alone may carry a run forward
FINDINGS = {
    "holds": ((TV, TAIL), ()),
    "broken": ((TV, BROKEN), ()),
    "open": ((TV, OPEN), ()),
    "no sample": ((TV, replace(TAIL, n=0)), ()),
    "guards alone": ((replace(TV, guard=True),), ()),
    "nothing": ((), ()),
    "error cell": ((TV, replace(TAIL, outcome="error")), ()),
    "hold": ((TV, TAIL), (RuleAction("hold", "", (TV,), "r"),)),
    "halt": (
        (TV, OPEN),
        (RuleAction("halt", "", (TV,), "r"), RuleAction("page", "ana", (TV,), "r")),
    ),
    "roll back": ((TV, TAIL), (RuleAction("roll_back", "", (TV,), "r"),)),
}
WORD = ("tail", "all", "ana", "known")


def looks(leg):
    """(name, finding) of everything that a look can find, at every size that matters."""
    for name, (cells, asked) in FINDINGS.items():
        for groups in (FIRST - 1, FIRST, LAST) if name in ("holds", "open") else (LAST,):
            # old evidence, looked at once more, and evidence that is new
            for evidence in ("old", "new") if name in ("holds", "open") else ("new",):
                yield name, LegFinding(leg.name, KEY, groups, evidence, cells, asked)
    yield "failed", LegFinding(leg.name, error="no answer")
    yield "another", LegFinding(leg.name, replace(KEY, infer="other"), LAST, "new", (TV, TAIL))


def canonical(state, dwell, valid):
    """The state with now as time 0; what lies further back than anything counts is alike."""
    if state.ended:  # what it was is told, and moves nothing
        gone = State("run", KEY, state.leg, min(state.span, 2), state.status)
        return replace(gone, valid_until=0.0 if state.expired else None)
    left = [replace(o, expires=o.expires - state.seen) for o in state.overrides]
    until = None if state.valid_until is None else max(state.valid_until - state.seen, 0.0)
    return replace(
        state,
        turn=0,
        why="",
        seen=0.0,
        span=min(state.span, 2),
        errors=min(state.errors, 3),
        since=-min(state.seen - state.since, dwell),
        weighed=-min(state.seen - state.weighed, valid),
        evidence="old" if state.evidence else "",
        overrides=tuple(o for o in left if o.expires > 0),
        valid_until=until,
    )


def edges(course, state):
    """(name, finding or None, the state after, the effects) of everything that can happen."""
    leg = leg_of(course, state)
    # what does not expire sees no difference between a little time and none
    for tick in TICKS if leg.valid_for_s else TICKS[::2]:
        now = state.seen + tick
        for name, look in looks(leg):
            yield name, look, *advance(course, state, look, now=now)
    acts = {
        "yes": lambda: approve(course, state, actor="ana", reason="seen", now=state.seen),
        "back": lambda: roll_back(course, state, actor="ana", reason="seen", now=state.seen),
        "word": lambda: override(course, state, Override(*WORD, state.seen + 2), now=state.seen),
    }
    for name, act in acts.items():
        try:
            yield name, None, *act()
        except EvidenceError:
            continue


@cache
def explored(course):
    """State -> its edges, for every state that can be reached."""
    dwell = max(leg.dwell_s for leg in course)
    valid = course[0].valid_for_s or 0.0
    start = canonical(begin("run", KEY, course, now=0.0)[0], dwell, valid)
    found, waiting = {}, deque([start])
    while waiting:
        state = waiting.popleft()
        if state in found:
            continue
        found[state] = []
        for name, look, after, effects in edges(course, state):
            reached = canonical(after, dwell, valid)
            found[state].append((name, look, after, effects, reached))
            if reached not in found:
                waiting.append(reached)
    return found


def courses():
    for legs, asks, undecided, expires in product(
        ((OFFLINE,), (OFFLINE, ONE), (OFFLINE, ONE, TEN), (OFFLINE, ONE, TEN, FULL)),
        (False, True),
        ("hold", "wait", "roll_back"),
        (None, VALID),
    ):
        *first, last = legs
        if asks and not first:
            continue  # nobody is asked after the last leg
        if expires and (len(legs) + asks > 2 or undecided != "hold"):
            continue  # what can expire is dear to explore, and the same on every leg
        if len(legs) == 3 and undecided != "hold":
            continue  # four legs have three among them
        # the dwell where it meets what can expire, so that the rest stays small
        dwell = DWELL if expires else 0.0
        course = [
            replace(
                leg,
                approval=asks and leg is not ONE,
                if_inconclusive=undecided,
                valid_for_s=expires,
                dwell_s=dwell if leg.live else 0.0,
            )
            for leg in (*first, last)
        ]
        name = f"{len(legs)} legs, {'a person' if asks else 'no one'}, {undecided}, {expires}"
        most = len(legs) > 1 and expires and undecided == "hold"
        yield pytest.param(tuple(course), id=name, marks=[pytest.mark.slow] if most else [])


COURSES = [*courses()]


def covered(state, look, now):
    """Cells of a look that count: those that no word covers by then."""
    words = [o for o in state.overrides if o.expires > now]
    return [
        c for c in look.cells if not any((o.clause, o.slice) == (c.clause, c.slice) for o in words)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("course", COURSES)
def test_every_state_and_every_edge(course):
    found = explored(course)
    last = len(course) - 1

    for state, around in found.items():
        assert (state.status != "completed") or state.leg == last
        backs = [after for name, _, after, _, _ in around if name == "back"]
        if state.status != "rolled_back":
            # stable gets everything back in one act, wherever the run stands
            assert [b.status for b in backs] == ["rolled_back"]
            assert route_of(course, backs[0])["share"] == 0.0
        for name, look, after, effects, reached in around:
            step_is_allowed(course, state, name, look, after)
            effects_tell_it(course, state, after, effects)
            assert reached in found

    ways_out(found)
    # so that the exploration cannot silently become nothing
    assert len(found) >= 8 * len(course), len(found)
    seen = {state.status for state in found}
    assert {"running", "rolled_back", "superseded", "completed", "awaiting_evidence"} <= seen
    assert {state.leg for state in found} == set(range(len(course)))


def step_is_allowed(course, state, name, look, after):
    leg = leg_of(course, state)
    forward = after.leg - state.leg
    assert forward in (0, 1)
    if state.ended:
        assert (after.status == "rolled_back") if name == "back" else (after == state)
    if look is None:
        assert forward == 0 and after.span == state.span
        return
    counted = covered(state, look, after.seen)
    refuted = any(c.outcome == "violated" for c in counted)
    if refuted and not state.ended:
        # it ends there, and what has ended never moves: no path leads forward from it
        assert after.ended
    # infer serves everybody: what one span showed stands while the next is undecided, and an
    # undecided one is followed by another, which is no step forward
    stands = state.status == after.status == "completed" and after.span == state.span
    again = after.span > state.span and after.status != "completed"
    if again:
        assert leg.stage == "full" and look.groups >= LAST
    progress = not again and (
        forward
        or after.span > state.span
        or (after.status == "completed" and after != state and not stands)
    )
    dwelt = after.seen - state.since >= leg.dwell_s
    if progress:
        assert all(c.outcome == "holds" and c.n > 0 for c in counted)
        assert any(not c.guard for c in counted)
        assert name in ("holds", "broken", "open", "no sample", "error cell")
        assert not look.asked and look.key == KEY
        assert look.groups >= FIRST or not leg.live
        assert dwelt
    if forward:
        assert not state.ended
        crossing = course[after.leg].stage != leg.stage
        assert state.approved == leg.name or not (leg.approval and crossing)
        assert (after.since, after.approved) == (after.seen, "")
        if leg.valid_for_s is not None:
            first = state.weighed if look.evidence == state.evidence else after.seen
            assert after.seen < first + leg.valid_for_s


def effects_tell_it(course, state, after, effects):
    kinds = [e.kind for e in effects if e.kind != "page"]
    was, there = (leg_of(course, one).name for one in (state, after))
    before, now = route_of(course, state), route_of(course, after)
    assert kinds.count("route") == int((was, before) != (there, now))
    for effect in effects:
        assert effect.key.startswith(f"run:{after.turn}:")
        assert {n: effect.body[n] for n in now} == now
    assert len({e.key for e in effects}) == len(effects)
    assert (after.turn > state.turn) == bool(effects or after.span > state.span)
    if after.status != state.status:
        assert kinds.count("notify") == 1
    if after.leg > state.leg:
        assert now["share"] >= before["share"]
    if after.status == "rolled_back":
        assert now["share"] == 0.0


def ways_out(found: dict[State, list]):
    """From every state that has not ended, something can still complete the run or end it."""
    into = {}
    for state, around in found.items():
        for name, _, _, _, reached in around:
            if name not in ("back", "another"):
                into.setdefault(reached, set()).add(state)
    waiting = deque(s for s in found if s.status == "completed")
    through = set(waiting)
    assert through
    while waiting:
        for state in into.get(waiting.popleft(), ()):
            if state not in through:
                through.add(state)
                waiting.append(state)
    stuck = [s for s in found if s not in through and not s.ended]
    # what has expired is noticed at the next look, and only that ends it
    assert all(s.expired for s in stuck), stuck[:3]


@pytest.mark.slow
def test_the_small_promotions_are_not_trivially_small():
    """Of the largest one, and the sum of what is asserted above."""
    sizes = [len(explored(param.values[0])) for param in COURSES if "4 legs" in param.id]

    assert len(sizes) == 6
    assert max(sizes) >= 100, sizes
