# The machine beside an oracle that keeps every request and works each number out anew.

from __future__ import annotations

import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from servanda.gateway.routing.snapshot import build_snapshot
from servanda.gateway.routing.state import RoutingState
from servanda.gateway.routing.state_machine import absorb, advance, begin, rebase
from servanda.traces.serialization import from_plain, to_plain
from tests.drawn import examples
from tests.gateway.routing.made import LIMIT, facts, rules, score
from tests.gateway.routing.oracle import Slice

RULES = rules()
VALUES = st.sampled_from([0.0, 0.1, 0.4, 0.5, 0.7, 1.0])


class Beside(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = begin(RULES, now=0.0)
        self.oracle = Slice(LIMIT, 20, 10, 10, 4, 100.0, 400.0)
        self.now = 0.0
        self.users = 0

    def ask(self, key: str, x: float) -> None:
        self.state = absorb(RULES, self.state, score(x, key))
        self.oracle.request(key, x)

    @rule(x=VALUES, n=st.integers(1, 24))
    def many_users(self, x: float, n: int) -> None:
        for _ in range(n):
            self.users += 1
            self.ask(f"user {self.users % 7}", x)

    @rule(n=st.integers(1, 8))
    def the_beginning_of_a_way_out_and_back(self, n: int) -> None:
        """Which chance alone would hardly find."""
        for step in range(n):
            self.many_users(1.0 if step == 0 else 0.0, 22)
            self.a_look(max(25.0, self.oracle.away_s) if step else 1.0, room=True)
            self.they_agree()

    @rule(x=VALUES, n=st.integers(1, 12))
    def one_user(self, x: float, n: int) -> None:
        for _ in range(n):
            self.ask("flood", x)

    @rule(seconds=st.sampled_from([0.0, 1.0, 25.0, 100.0, 400.0]), room=st.booleans())
    def a_look(self, seconds: float, room: bool) -> None:
        self.now += seconds
        peak = 0.0 if room else None
        self.state, _ = advance(RULES, self.state, facts(self.now, stable_in_flight=peak))
        self.oracle.look(self.now, room)

    @rule(seconds=st.floats(0, 1e6))
    def a_look_by_a_clock_that_went_back(self, seconds: float) -> None:
        given = facts(self.now - seconds, stable_in_flight=0.0)
        self.state, _ = advance(RULES, self.state, given)
        self.oracle.look(self.now, room=True)

    @rule()
    def a_restart(self) -> None:
        self.state = from_plain(RoutingState, json.loads(json.dumps(to_plain(self.state))))

    @rule()
    def a_reload_of_the_same_contract(self) -> None:
        self.state = rebase(RULES, self.state, now=self.now, keep=True)

    @invariant()
    def they_agree(self) -> None:
        one, other = self.state.slices["code"], self.oracle
        assert (one.status, one.step, one.scored) == (other.status, other.step, len(other.got))
        assert one.status in ("active", "suspect") or one.dwell_s == other.away_s
        made = build_snapshot(RULES, self.state, version=1, salt="", now=self.now, samples={})
        assert made.slices[0].share == other.share


Beside.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=30)
test_the_machine_does_what_the_oracle_does = Beside.TestCase
