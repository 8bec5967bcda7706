# A leader that begins again, or reads its contract again, in every state that a slice can be in.

import json
from dataclasses import replace

import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.gateway.controller.store import SqliteStore
from servanda.gateway.http.clock import SteadyClock
from servanda.gateway.routing.model import Pin
from servanda.traces.serialization import to_plain
from tests.gateway.controller import controllers

CHEAP = """\
routing: {mode: enforce, stable_in_flight: 100, min_users: 5, enter_evidence: 20, leave_evidence: 2,
  most_diverted: 0.6, dwell: 60s, moves_per_hour: 20}
escalation:
  - {when: {section: statistical, is: violated}, do: [{divert: slice}, {page: oncall}]}
"""
SLICE = "first=a"


class Driven:
    """A leader of one slice that is driven to a state by rows of faulty or sound answers."""

    def __init__(self, folder, clock):
        self.path = controllers.contract(folder, routing=CHEAP, limit=0.05)
        self.clock, self.sent = clock, 0
        self.leader = controllers.controller(self.path, clock)

    def rows(self, n, *, sound):
        """Sound answers are train's own; faulty ones are tokens that infer overrates."""
        made = controllers.rows(self.path, n, start=self.sent, at=self.clock.now, prompts=[0])
        for i, row in enumerate(made):
            row["at"] = self.clock.now + i / 100
            if not sound:
                row["logprobs"] = [logp + 0.7 if logp < -0.8 else logp for logp in row["logprobs"]]
                row.pop("best")
        return made

    def feed(self, n, *, sound):
        rows = self.rows(n, sound=sound)
        controllers.drive(self.leader, self.clock, rows, first=self.sent)
        self.sent += n

    def to(self, status):
        """Drive on until the slice has the status."""
        for _ in range(60):
            now = self.status
            if now == status:
                return
            sound = status in ("active", "probation", "recovering") and now != "active"
            if now == "quarantined":
                self.clock.now += 61
            self.feed(2 if status == "suspect" else 24, sound=sound)
            self.clock.now += 16 if sound else 0
        raise AssertionError(f"{self.status}, not {status}")

    @property
    def status(self):
        return controllers.status(self.leader, SLICE).status

    @property
    def state(self):
        """But for the clock, which is kept with what changes next."""
        return json.dumps(to_plain(replace(self.leader._state.routing, clock=0.0)))

    def again(self):
        self.leader.close()
        self.leader = controllers.controller(self.path, self.clock)


STATES = ["active", "suspect", "quarantined", "probation", "recovering"]


@pytest.fixture
def driven(tmp_path):
    found = Driven(tmp_path, controllers.Clock())
    yield found
    found.leader.close()


@pytest.mark.parametrize("status", STATES)
def test_a_restart_restores_every_state_to_the_last_bit(driven, status):
    driven.to(status)
    before, version = driven.state, driven.leader.snapshot.version
    old = driven.leader._state.routing.slices[SLICE]
    driven.again()
    assert driven.state == before
    assert driven.leader.snapshot.version > version
    driven.leader.step()
    after = driven.leader._state.routing.slices[SLICE]
    assert (after.status, after.since, after.dwell_s) == (status, old.since, old.dwell_s)


@pytest.mark.parametrize("status", STATES)
def test_a_reload_of_another_limit_keeps_the_state_and_begins_the_evidence_anew(driven, status):
    driven.to(status)
    before = driven.leader._state.routing.slices[SLICE]
    driven.path.write_text(driven.path.read_text().replace("at_most: 0.05", "at_most: 0.06"))
    assert driven.leader.reload() == ""
    after = driven.leader._state.routing.slices[SLICE]
    assert (after.status, after.since, after.dwell_s, after.moves) == (
        before.status,
        before.since,
        before.dwell_s,
        before.moves,
    )
    assert (after.tracks, after.scored) == ({}, 0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("status", STATES)
@pytest.mark.parametrize("to", ["stable", "infer", "enforce", "observe"])
def test_a_pin_holds_in_every_state_and_is_over_at_its_second(driven, status, to):
    driven.to(status)
    leader, clock = driven.leader, driven.clock
    leader.pin(SLICE, to, 30, actor="ann", reason="a drill")
    clock.now += 30 - 1e-6
    leader.step()
    assert isinstance(controllers.status(leader, SLICE).pin, Pin)
    clock.now += 1e-6
    leader.step()
    assert controllers.status(leader, SLICE).pin is None
    assert controllers.status(leader, SLICE).acts


@pytest.mark.sampled(4)
@pytest.mark.parametrize("jump", [-3600, 3600])
@pytest.mark.parametrize("status", STATES)
def test_a_clock_that_jumps_breaks_nothing_and_goes_on_when_it_is_back(driven, status, jump):
    driven.to(status)
    transitions = driven.leader.status().moves
    driven.clock.now += jump
    driven.leader.step()
    driven.again()
    driven.leader.step()
    if jump < 0:
        assert (driven.status, driven.leader.status().moves) == (status, transitions)
    driven.clock.now -= jump
    driven.feed(30, sound=True)
    assert controllers.status(driven.leader, "all").scored > 0
    assert driven.leader.status().problems == ()


@pytest.mark.parametrize("jump", [-86_400.0, 7_200.0])
def test_who_sets_the_systems_clock_ends_no_pin_and_keeps_none(tmp_path, jump):
    wall, steady = [1e9], [0.0]
    clock = SteadyClock(lambda: wall[0], lambda: steady[0])
    path = controllers.contract(tmp_path, routing=CHEAP)

    def later(seconds, set_by=0.0):
        steady[0] += seconds
        wall[0] += seconds + set_by
        leader.step()
        return controllers.status(leader, SLICE).pin

    leader = controllers.controller(path, clock)
    leader.pin(SLICE, "stable", 3600, actor="ann", reason="a drill")
    made = leader.status().valid_until
    assert later(10, set_by=jump) is not None
    assert leader.status().valid_until - made < 60
    assert leader.status().problems == (
        f"the system's clock was set by {jump:+,.0f} s: times here follow the old clock until the "
        "next start; no pin and no route is changed",
    )
    assert later(3589) is not None
    assert later(1) is None
    leader.close()


@pytest.mark.parametrize("years", [1 / 365, 10])
def test_after_a_clock_that_was_ahead_a_restart_goes_on_from_now(driven, years):
    """Else no dwell and no pin would be over, and none could be made, until then."""
    years *= 365 * 86_400.0
    driven.clock.now += years
    driven.to("quarantined")
    driven.leader.pin("first=b", "stable", 90, actor="ann", reason="x")
    driven.clock.now -= years
    driven.again()
    assert controllers.status(driven.leader, SLICE).since <= driven.clock.now
    driven.leader.follow(controllers.message([], first=driven.sent))
    driven.leader.step()
    assert driven.status == "quarantined"
    assert controllers.status(driven.leader, "first=b").pin is not None
    driven.clock.now += 91
    driven.leader.step()
    assert driven.status == "probation"
    assert controllers.status(driven.leader, "first=b").pin is None
    driven.to("active")
    driven.leader.pin("first=b", "stable", 90, actor="ann", reason="x")


def test_a_slice_that_vanishes_and_comes_back_begins_active_and_the_ledger_can_be_told(driven):
    driven.to("quarantined")
    whole = driven.path.read_text()
    driven.path.write_text(whole.replace(controllers.SLICES, "slices: []"))
    assert driven.leader.reload() == ""
    assert [s.name for s in driven.leader.status().slices] == ["all"]
    driven.path.write_text(whole)
    assert driven.leader.reload() == ""
    assert driven.status == "active"
    driven.again()
    driven.to("quarantined")
    driven.leader.step()
    from tests.gateway.controller.test_controller import told

    assert told(driven.path.parent) == []


def test_a_leader_of_another_contract_does_not_go_on_from_the_folder(driven):
    driven.to("quarantined")
    driven.leader.close()
    text = driven.path.read_text()
    driven.path.write_text(text.replace("name: toy", "name: other"))
    with pytest.raises(ContractError, match="is the state of toy, and this is other") as refused:
        controllers.controller(driven.path, driven.clock)
    assert "name another --state" in str(refused.value)
    driven.path.write_text(text)
    driven.leader = controllers.controller(driven.path, driven.clock)
    assert driven.status == "quarantined"


def test_two_leaders_do_not_lead_from_one_folder(driven):
    with pytest.raises(MeasurementError, match="in use by another leader"):
        controllers.controller(driven.path, driven.clock)


def test_what_is_kept_of_a_state_is_what_is_shown(driven):
    driven.to("recovering")
    before = driven.state
    driven.leader.close()
    store = SqliteStore(driven.path.parent / "state")
    assert json.dumps({**store.meta("state"), "clock": 0.0}) == before
    store.close()
    driven.leader = controllers.controller(driven.path, driven.clock)
