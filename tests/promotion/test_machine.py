# A promotion under everything that can happen to it, in any order, beside its oracle.

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from servanda.errors import EvidenceError
from servanda.promotion.advance import advance, approve, begin, override, roll_back, route_of
from servanda.promotion.state import CellResult, LegFinding, Override, RuleAction, leg_of
from tests.drawn import examples
from tests.promotion import oracle
from tests.promotion.made import FULL, KEY, OFFLINE, ONE, SHADOW, T0, TEN

DWELL, VALID, SOON = 10.0, 40.0, 15.0
COURSES = [
    (OFFLINE,),
    (OFFLINE, FULL),
    (replace(OFFLINE, approval=True), SHADOW, FULL),
    (OFFLINE, SHADOW, ONE, TEN, FULL),
    tuple(replace(leg, dwell_s=DWELL) for leg in (OFFLINE, ONE, TEN, FULL)),
    tuple(replace(leg, valid_for_s=VALID) for leg in (OFFLINE, SHADOW, ONE, FULL)),
    tuple(replace(leg, if_inconclusive="roll_back") for leg in (OFFLINE, ONE, FULL)),
    (
        replace(OFFLINE, if_inconclusive="wait", valid_for_s=VALID),
        replace(SHADOW, approval=True, valid_for_s=VALID),
        replace(ONE, dwell_s=DWELL, valid_for_s=VALID),
        replace(TEN, dwell_s=DWELL, approval=True, valid_for_s=VALID),
        replace(FULL, dwell_s=DWELL, valid_for_s=VALID),
    ),
]
OUTCOMES = ("holds", "holds", "holds", "inconclusive", "violated", "error", "not applicable")

cells = st.builds(
    CellResult,
    clause=st.sampled_from(["tv", "tail"]),
    slice=st.sampled_from(["all", "code"]),
    outcome=st.sampled_from(OUTCOMES),
    high=st.sampled_from([None, 0.01, 0.07]),
    limit=st.sampled_from([None, 0.0, 0.05]),
    n=st.sampled_from([0, 1, 500, 500]),
    guard=st.booleans(),
)
good = st.builds(CellResult, clause=st.sampled_from(["tv", "tail"]), slice=st.just("all"),
                 outcome=st.just("holds"), n=st.just(9))  # fmt: skip
asks = st.builds(
    RuleAction,
    action=st.sampled_from(["hold", "halt", "roll_back", "page", "page"]),
    value=st.sampled_from(["ana", "ben"]),
    cells=st.lists(cells, min_size=1, max_size=2).map(tuple),
    rule=st.sampled_from(["one", "two"]),
)
others = st.sampled_from(
    [replace(KEY, **{part: "other"}) for part in ("contract", "train", "infer", "weights")]
    + [replace(KEY, attempt=2), replace(KEY, stable="other"), replace(KEY, reward="other")]
    + [replace(KEY, corpus="other")]
)
sizes = st.sampled_from([0, 1, 2, 3, 4, 9])
digests = st.sampled_from(["a", "b", "c"])
signed = st.sampled_from([("ana", "seen"), ("ben", "known")])


class Promotion(RuleBasedStateMachine):
    """A run, its history, and what was told of it."""

    @initialize(course=st.sampled_from(COURSES))
    def opened(self, course):
        self.course, self.now = course, T0
        state, effects = begin("run", KEY, course, now=T0)
        self.history = [oracle.Step("begin", T0, state, effects)]

    @property
    def state(self):
        return self.history[-1].state

    def happened(self, kind, moved, **more):
        before, (state, effects) = self.state, moved
        self.history.append(oracle.Step(kind, self.now, state, effects, **more))
        # one turn for whatever is told, and none for nothing; a new span is a turn of its own
        spans = state.span - before.span
        assert state.turn - before.turn == int(bool(effects) or spans > 0)
        told = [e for e in effects if e.kind == "route"]
        was, now = (
            (leg_of(self.course, one).name, route_of(self.course, one)) for one in (before, state)
        )
        assert bool(told) == (was != now)

    def refused(self, act):
        try:
            act()
        except EvidenceError as error:
            assert error.problems[0].hint
        else:
            raise AssertionError("it was not refused")

    @rule(seconds=st.sampled_from([0.0, 0.5, DWELL / 2, DWELL, SOON, VALID - DWELL, VALID * 2]))
    def time_passes(self, seconds):
        self.now += seconds

    def look(self, finding):
        before = self.state
        moved = advance(self.course, before, finding, now=self.now)
        if before.ended:
            assert moved == (before, ())
        else:
            status, (legs, spans) = oracle.expected(self.course, self.history, self.now, finding)
            after = moved[0]
            assert (after.status, after.leg - before.leg, after.span - before.span) == (
                status,
                legs,
                spans,
            )
            paged = {e.body["to"] for e in moved[1] if e.kind == "page"}
            assert paged == oracle.pages(self.history, self.now, finding)
        self.happened("look", moved, finding=finding)

    @rule(cells=st.lists(cells, max_size=3).map(tuple), groups=sizes, evidence=digests,
          asked=st.lists(asks, max_size=2).map(tuple))  # fmt: skip
    def anything_is_found(self, cells, groups, evidence, asked):
        leg = oracle.leg_at(self.course, self.state)
        self.look(LegFinding(leg.name, KEY, groups, evidence, cells, asked))

    @rule(cells=st.lists(good, min_size=1, max_size=2).map(tuple), groups=sizes, evidence=digests)
    def everything_is_found_to_hold(self, cells, groups, evidence):
        leg = oracle.leg_at(self.course, self.state)
        self.look(LegFinding(leg.name, KEY, groups, evidence, cells))

    @rule(cells=st.lists(cells, max_size=1).map(tuple), key=st.sampled_from([None, KEY]))
    def measuring_fails(self, cells, key):
        leg = oracle.leg_at(self.course, self.state)
        self.look(LegFinding(leg.name, key, cells=cells, error="no answer"))

    @precondition(lambda self: len(self.history) > 3)
    @rule(key=others, cells=st.lists(cells, max_size=2).map(tuple))
    def another_build_is_found(self, key, cells):
        leg = oracle.leg_at(self.course, self.state)
        self.look(LegFinding(leg.name, key, 4, "o", cells))

    @rule()
    def the_finding_is_of_another_leg(self):
        look = LegFinding("elsewhere", KEY, 4, "e", (CellResult("tv", "all", "holds", n=9),))
        if not self.state.ended:
            self.refused(lambda: advance(self.course, self.state, look, now=self.now))

    @rule(by=signed)
    def a_person_says_yes(self, by):
        def act():
            return approve(self.course, self.state, actor=by[0], reason=by[1], now=self.now)

        if self.state.status == "awaiting_approval":
            self.happened("approve", act())
            assert self.state.approved
        else:
            self.refused(act)

    @rule(clause=st.sampled_from(["tv", "tail", "*"]), slice=st.sampled_from(["all", "code", "*"]),
          by=signed, seconds=st.sampled_from([-1.0, 0.0, 0.5, SOON, 200.0]))  # fmt: skip
    def a_person_overrides(self, clause, slice, by, seconds):
        given = Override(clause, slice, *by, self.now + seconds)

        def act():
            return override(self.course, self.state, given, now=self.now)

        if self.state.ended or seconds <= 0:
            self.refused(act)
        else:
            self.happened("override", act(), override=given)

    @precondition(lambda self: len(self.history) > 6)
    @rule(by=signed)
    def a_person_rolls_back(self, by):
        def act():
            return roll_back(self.course, self.state, actor=by[0], reason=by[1], now=self.now)

        if self.state.status == "rolled_back":
            self.refused(act)
        else:
            self.happened("roll_back", act())
            assert self.state.status == "rolled_back"

    @rule(by=signed, seconds=st.sampled_from([0.001, 1.0, 1e9]))
    def the_clock_goes_back(self, by, seconds):
        state, early = self.state, self.history[-1].state.seen - seconds
        look = LegFinding(oracle.leg_at(self.course, state).name, KEY, 4, "e")
        word = Override("tv", "all", *by, early + 60)
        self.refused(lambda: advance(self.course, state, look, now=early))
        self.refused(lambda: override(self.course, state, word, now=early))
        for act in (approve, roll_back):
            self.refused(lambda act=act: act(self.course, state, actor=by[0], reason=by[1],
                                             now=early))  # fmt: skip

    @invariant()
    def no_effect_is_lost_or_doubled(self):
        effects = [e for step in self.history for e in step.effects]
        keys = [e.key for e in effects]
        routes = [e.body for e in effects if e.kind == "route"]

        assert len(set(keys)) == len(keys)
        told = {name: routes[-1][name] for name in ("share", "mirror", "sample")}
        assert told == route_of(self.course, self.state)

    @invariant()
    def who_is_told_of_a_status_is_told_of_the_latest(self):
        notes = [e.body for s in self.history for e in s.effects if e.kind == "notify"]

        assert notes[-1]["status"] == self.state.status

    @invariant()
    def the_share_grows_forward_and_goes_back_to_stable(self):
        if len(self.history) < 2:
            return
        before, after = (step.state for step in self.history[-2:])
        was, now = (route_of(self.course, state)["share"] for state in (before, after))
        if after.leg > before.leg:
            assert now >= was
        elif not after.ended:
            assert now == was
        elif self.course[after.leg].stage != "full" or after.status == "rolled_back":
            assert now == 0.0
        else:
            assert now in (0.0, 1.0)

    @invariant()
    def who_was_refuted_never_goes_forward_again(self):
        refuted = False
        for i, step in enumerate(self.history[1:], 1):
            past, before = self.history[:i], self.history[i - 1]
            if refuted:
                assert step.state.leg == before.state.leg
                assert step.state.status in ("rolled_back", "superseded")
            if step.kind == "look" and not before.state.ended:
                counted = oracle.counting(past, step.now, step.finding)
                refuted = refuted or any(c.outcome == "violated" for c in counted)

    @invariant()
    def completed_is_the_last_leg(self):
        if self.state.status == "completed":
            assert self.state.leg == len(self.course) - 1


Promotion.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestPromotion = Promotion.TestCase
