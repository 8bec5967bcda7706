# A leader as its gateways, its ledger and its people meet it.

import json
import math
import sqlite3

import pytest

from servanda.cli.main import main
from servanda.engines import open_engine
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.gateway.controller.ledger_history import gateway_runs, run_problems
from servanda.gateway.controller.store import FILE
from servanda.gateway.controller.web import app as requests
from servanda.gateway.routing.model import RequestFacts, snapshot_of
from servanda.promotion.ledger.ledger import open_ledger
from servanda.report.format import percent
from servanda.traces.request_log import OTHER_PROMPT
from servanda.traces.serialization import to_plain
from tests import kit, serving
from tests.gateway.controller import controllers
from tests.promotion.run.test_sample_ratio import assignments


def entries(folder, name="ledger.db"):
    with open_ledger(str(folder / name), reading=True) as ledger:
        return [*ledger.entries()]


def route_of(body):
    return requests.route_of(json.dumps(body).encode())


def told(folder):
    with open_ledger(str(folder / "ledger.db"), reading=True) as ledger:
        return [str(p) for run in gateway_runs(ledger) for p in run_problems(ledger.entries(run))]


@pytest.fixture
def clock():
    return controllers.Clock()


def test_a_slice_beyond_its_limit_leaves_infer_and_the_ledger_says_on_which_evidence(
    tmp_path, clock
):
    path = controllers.contract(tmp_path, q=controllers.FAULTY, routing=controllers.ACTING)
    leader = controllers.controller(path, clock)
    controllers.drive(leader, clock, controllers.rows(path, 240))
    away = controllers.status(leader, "first=a")
    assert (away.status, away.acts, away.route) == ("quarantined", True, 0.0)
    known = RequestFacts("r", "s", {"first": "a"})
    decision = leader.decide(known)
    assert (decision.pool, decision.reason) == ("stable", "first=a quarantined")
    leader.close()
    (left,) = [e for e in entries(tmp_path) if e.body.get("after") == "quarantined"]
    body = left.body
    assert body["log_evidence"] >= body["log_price"]
    begun = next(e.body for e in entries(tmp_path) if "prices" in e.body)
    by_hand = {"enter": 100 * begun["cells"], "alarm": 1e6 * begun["cells"], "leave": 20}
    assert begun["prices"] == pytest.approx({n: math.log(e) for n, e in by_hand.items()})
    assert (body["acted"], body["pages"]) == (True, ["oncall"])
    assert body["keys"] >= 5
    assert [e["kind"] for e in body["effects"]] == ["notify", "page"]
    assert told(tmp_path) == []


def test_in_observe_mode_the_same_is_said_and_nothing_is_done(tmp_path, clock):
    path = controllers.contract(tmp_path, q=controllers.FAULTY)
    leader = controllers.controller(path, clock)
    controllers.drive(leader, clock, controllers.rows(path, 240))
    assert controllers.status(leader, "first=a").status == "quarantined"
    decision = leader.decide(RequestFacts("r", "s", {"first": "a"}))
    assert (decision.pool, decision.would) == ("infer", "stable")
    leader.close()


def test_sound_traffic_moves_nothing(tmp_path, clock):
    path = controllers.contract(tmp_path, routing=controllers.ACTING)
    leader = controllers.controller(path, clock)
    controllers.drive(leader, clock, controllers.rows(path, 240))
    assert {one.status for one in leader.status().slices} == {"active"}
    assert leader.status().moves == 0
    leader.close()


def test_a_row_is_taken_when_it_is_durable_and_counts_once(tmp_path, clock):
    path = controllers.contract(tmp_path)
    leader, rows = controllers.controller(path, clock), controllers.rows(path, 40)
    assert leader.follow(controllers.message(rows))["taken"] == 0
    while leader.step():
        pass
    assert leader.follow(controllers.message(rows))["taken"] == 40
    leader.step()
    leader.close()
    again = controllers.controller(path, clock)
    assert again.follow(controllers.message(rows))["taken"] == 40
    assert not again.step()
    assert controllers.status(again, "all").scored == 40
    again.close()


def test_a_snapshot_travels_as_json_only_where_it_is_newer(tmp_path, clock):
    leader = controllers.controller(controllers.contract(tmp_path), clock)
    reply = json.loads(json.dumps(leader.follow(controllers.message([]))))
    assert snapshot_of(reply["snapshot"]) == leader.snapshot
    assert leader.follow(controllers.message([], version=reply["version"]))["snapshot"] is None
    leader.close()


def test_versions_only_grow_across_restarts_and_a_lost_state(tmp_path, clock):
    path = controllers.contract(tmp_path)
    seen = []
    for state in ("state", "state", "other"):
        leader = controllers.controller(path, clock, state=state, ledger="")
        leader.follow(controllers.message([], version=seen[-1] if seen else 0))
        leader.step()
        seen.append(leader.snapshot.version)
        leader.close()
    assert seen == sorted(set(seen))


def test_a_snapshot_is_renewed_before_it_ends(tmp_path, clock):
    leader = controllers.controller(controllers.contract(tmp_path), clock)
    first = leader.snapshot
    clock.now += 200
    leader.step()
    assert leader.snapshot.version == first.version  # it lasts 600 s
    clock.now += 150
    leader.step()
    assert leader.snapshot.version > first.version
    assert leader.snapshot.valid_until == clock.now + 600
    leader.close()


def test_a_locked_store_takes_nothing_and_the_snapshot_stands(tmp_path, clock, monkeypatch):
    monkeypatch.setattr("servanda.gateway.controller.store._PATIENCE_S", 0.01)
    path = controllers.contract(tmp_path)
    leader, rows = controllers.controller(path, clock), controllers.rows(path, 20)
    before = leader.snapshot
    other = sqlite3.connect(tmp_path / "state" / FILE)
    other.execute("BEGIN IMMEDIATE")
    leader.follow(controllers.message(rows))
    for _ in range(3):
        leader.step()
    assert leader.follow(controllers.message([], first=20))["taken"] == 0
    assert leader.snapshot is before
    assert "database is locked" in leader.status().store
    with pytest.raises(MeasurementError, match="the change cannot be stored now: "):
        leader.pin("first=a", "stable", 60, actor="ann", reason="x")
    assert controllers.status(leader, "first=a").pin is None
    other.rollback()
    other.close()
    while leader.step():
        pass
    assert leader.follow(controllers.message([], first=20))["taken"] == 20
    assert leader.status().store == ""
    assert controllers.status(leader, "all").scored == 20
    leader.close()


def test_a_store_that_is_gone_is_begun_again_with_all_there_is(tmp_path, clock):
    path = controllers.contract(tmp_path)
    leader, rows = controllers.controller(path, clock), controllers.rows(path, 40)
    controllers.drive(leader, clock, rows[:20])
    for file in (tmp_path / "state").glob(f"{FILE}*"):
        file.unlink()
    controllers.drive(leader, clock, rows[20:], first=20)
    version = leader.snapshot.version
    leader.close()
    again = controllers.controller(path, clock)
    assert again.follow(controllers.message([], first=40))["taken"] == 40
    assert controllers.status(again, "all").scored == 40
    assert again.snapshot.version > version
    again.close()
    assert told(tmp_path) == []


@pytest.mark.parametrize("restart", [False, True])
def test_a_store_that_is_gone_takes_nothing_with_it_that_the_ledger_was_not_told(
    tmp_path, clock, restart
):
    path = controllers.contract(tmp_path, q=controllers.FAULTY, routing=controllers.ACTING)
    leader, rows = controllers.controller(path, clock), controllers.rows(path, 240)
    controllers.drive(leader, clock, rows[:20])
    leader.pin("first=b", "infer", 600, actor="ann", reason="x")  # nobody told the ledger yet
    if restart:
        leader.close()
        leader = controllers.controller(path, clock)
    for file in (tmp_path / "state").glob(f"{FILE}*"):
        file.unlink()
    controllers.drive(leader, clock, rows[20:], first=20)
    leader.close()
    found = entries(tmp_path)
    assert [e.body["o"] for e in found] == list(range(1, len(found) + 1))
    assert next(e.actor for e in found if e.body.get("slice") == "first=b") == "ann"
    assert told(tmp_path) == []


def test_a_ledger_that_is_away_gets_everything_once_when_it_is_back(tmp_path, clock):
    path = controllers.contract(tmp_path, q=controllers.FAULTY)
    away = tmp_path / "away"
    away.write_text("no folder")
    leader = controllers.controller(path, clock, ledger="away/ledger.db")
    controllers.drive(leader, clock, controllers.rows(path, 160))
    status = leader.status()
    assert status.ledger_behind == status.moves + 1 > 1
    assert "away" in status.ledger
    away.unlink()
    leader.step()
    leader.step()
    status = leader.status()
    assert (status.ledger_behind, status.ledger) == (0, "")
    leader.close()
    assert len(entries(tmp_path, "away/ledger.db")) == status.moves + 1


def test_what_the_ledger_took_before_a_crash_is_not_said_twice(tmp_path, clock, monkeypatch):
    path = controllers.contract(tmp_path, q=controllers.FAULTY)
    leader = controllers.controller(path, clock)
    # the ledger has it, and the store is killed before it knows
    monkeypatch.setattr(
        "servanda.gateway.controller.store.SqliteStore.delete_outbox", lambda *_: None
    )
    monkeypatch.setattr("servanda.gateway.controller.controller.LedgerOutbox._append", _once)
    controllers.drive(leader, clock, controllers.rows(path, 160))
    moves = leader.status().moves
    leader.close()
    monkeypatch.undo()
    again = controllers.controller(path, clock)
    again.step()
    again.close()
    assert [e.body["o"] for e in entries(tmp_path)] == list(range(1, moves + 2))
    assert told(tmp_path) == []


def _once(teller, ledger):
    from servanda.promotion.ledger.entry import Record
    from servanda.traces.serialization import from_plain

    teller._read(ledger)
    records = [from_plain(Record, r) for o, r in teller._store.outbox().items() if o > teller._o]
    ledger.append(teller._run, records, after=teller._n)


class Sink:
    name, kinds = "pager", ("notify", "page")

    def __init__(self):
        self.got = []

    def deliver(self, effect):
        self.got.append(effect)


def test_whoever_is_to_be_paged_is_told_once_each(tmp_path, clock):
    path = controllers.contract(tmp_path, q=controllers.FAULTY, routing=controllers.ACTING)
    sink = Sink()
    leader = controllers.controller(path, clock, sinks=[sink])
    controllers.drive(leader, clock, controllers.rows(path, 240))
    leader.close()
    again = controllers.controller(path, clock, sinks=[sink])
    again.step()
    again.close()
    keys = [effect.key for effect in sink.got]
    assert len(keys) == len(set(keys)) > 0
    pages = [e for e in sink.got if e.kind == "page"]
    assert {e.body["to"] for e in pages} == {"oncall"}
    assert any("first=a: tv on first=a exceeds its limit" in e.body["why"] for e in pages)


def test_answers_for_another_prompt_are_missing_and_somebody_is_paged_once(tmp_path, clock):
    path = controllers.contract(tmp_path, routing=controllers.ACTING)
    sink = Sink()
    leader = controllers.controller(path, clock, sinks=[sink])
    swapped = [
        serving.lost(row, OTHER_PROMPT) if row["labels"].get("first") == "a" else row
        for row in controllers.rows(path, 60)
    ]
    controllers.drive(leader, clock, swapped)

    one = controllers.status(leader, "first=a")
    assert one.held.startswith("infer ran another prompt than stable for ")
    assert one.status == "active" and one.cells[0].n == one.scored
    assert not controllers.status(leader, "first=b").held
    leader.close()
    pages = [e.body["slice"] for e in sink.got if e.kind == "page"]
    assert sorted(pages) == ["all", "first=a"]


def test_a_person_pins_and_takes_it_back_and_the_ledger_names_who(tmp_path, clock):
    path = controllers.contract(tmp_path, routing=controllers.ACTING)
    leader = controllers.controller(path, clock)
    leader.pin("first=b", "stable", 3600, actor="ann", reason="a drill")
    assert leader.decide(RequestFacts("r", "s", {"first": "b"})).pool == "stable"
    leader.pin("first=b", None, actor="bob", reason="done")
    assert leader.decide(RequestFacts("r", "s", {"first": "b"})).pool == "infer"
    with pytest.raises(ContractError, match="no slice is named 'first=z'"):
        leader.pin("first=z", "stable", 3600, actor="ann", reason="x")
    leader.step()
    leader.close()
    _, pinned, unpinned = entries(tmp_path)
    assert (pinned.actor, pinned.body["reason"]) == ("ann", "a drill")
    assert (unpinned.actor, unpinned.body["after"]) == ("bob", "active")
    assert told(tmp_path) == []


def test_a_promotions_route_is_followed(tmp_path, clock):
    leader = controllers.controller(controllers.contract(tmp_path), clock)
    body = {"run": "toy-1", "leg": "canary-1", "share": 0.25, "mirror": 0.0, "sample": 1.0}
    leader.route(route_of(body))
    made = leader.snapshot
    assert (made.base, made.sample, made.run, made.leg) == (0.25, 1.0, "toy-1", "canary-1")
    refusal = r"a route: share is 2, expected `float` <= 1\.0\n  hint: send the body"
    with pytest.raises(requests.RequestError, match=refusal):
        leader.route(route_of({**body, "share": 2}))
    leader.close()
    again = controllers.controller(controllers.contract(tmp_path), clock)
    assert again.snapshot.base == 0.25
    again.close()


@pytest.mark.parametrize(("share", "wrong"), [(0.05, False), (0.03, True)])
def test_the_split_of_a_step_is_tested_if_a_clause_says_so(tmp_path, clock, share, wrong):
    clause = "{id: split, metric: sample_ratio, stages: [canary]}"
    golden = f"observability: {{clauses: [{clause}]}}"
    leader = controllers.controller(controllers.contract(tmp_path, golden=golden), clock)
    body = {"run": "r1", "leg": "canary-1", "share": 0.05, "mirror": 0.0, "sample": 1.0}
    leader.route(route_of(body))
    lines = assignments(4000, share)
    for first in range(0, 4000, 500):
        part = lines[first : first + 500]
        for gateway in ("g1", "g2"):  # a user may come to both
            odd = [{"key": "no assignment"}]
            leader.follow({**controllers.message([], gateway=gateway), "assigned": part + odd})
    status = leader.status()
    assert (status.split.users, status.split.leg) == (4000, "canary-1")
    assert (status.split.log_evidence >= status.split.log_price) == wrong
    cells = [cell for slice_ in status.slices for cell in slice_.cells]
    by_hand = [math.log(n) for n in (100 * len(cells), 100 * len(cells) * 10_000, 20)]
    assert status.split.log_price == math.log(100) and len(cells) > 3
    for cell in cells:
        prices = [cell.log_price, cell.log_alarm_price, cell.log_leave_price]
        assert prices == pytest.approx(by_hand)
    served = percent(status.split.infer / 4000)
    alarm = f"infer served {served} of 4,000 users of canary-1, and the step plans 5.0 %"
    assert [p for p in status.problems if "the step plans" in p] == [alarm] * wrong

    leader.route(route_of({**body, "leg": "full-1", "share": 1.0}))  # not a stage of the clause
    leader.follow({**controllers.message([]), "assigned": assignments(9, leg="full-1")})
    assert leader.status().split is None
    leader.close()


def test_rows_that_only_a_promotion_asked_for_cost_train_nothing(tmp_path, clock):
    path = controllers.contract(tmp_path)
    leader = controllers.controller(path, clock)
    rows = controllers.rows(path, 20)
    apart = [{**row, "x-drawn": {} if i % 2 else {"all": 1.0}} for i, row in enumerate(rows)]
    leader.follow(controllers.message(apart))
    while leader.step():
        pass
    assert leader.follow(controllers.message([], first=20))["taken"] == 20
    scoring = leader.status().scoring
    assert (scoring.scored, scoring.outside) == (10, {"rows sampled only for a promotion": 10})
    leader.close()


def test_a_route_that_comes_late_is_passed_over_also_after_a_restart(tmp_path, clock):
    body = {"run": "toy-1", "leg": "canary-1", "share": 0.25, "mirror": 0.0, "sample": 1.0}
    back = {**body, "leg": "canary-2", "share": 0.0, "turn": 5}
    leader = controllers.controller(controllers.contract(tmp_path), clock)
    assert leader.route(route_of({**body, "turn": 4}))
    assert leader.route(route_of(back))
    assert not leader.route(route_of({**body, "turn": 4}))
    assert not leader.route(route_of(back))
    leader.close()
    again = controllers.controller(controllers.contract(tmp_path), clock)
    assert not again.route(route_of({**body, "turn": 4}))
    assert (again.snapshot.base, again.snapshot.leg) == (0.0, "canary-2")
    # another run has turns of its own, and does not let the first one's come back
    assert again.route(route_of({**body, "run": "toy-2", "share": 0.5, "turn": 1}))
    assert not again.route(route_of({**body, "turn": 5}))
    assert again.snapshot.base == 0.5
    with pytest.raises(requests.RequestError, match='turn is "six", expected'):
        again.route(route_of({**body, "turn": "six"}))
    again.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gateway": ""}, 'gateway is "", expected `str` of length >= 1'),
        ({"start": None}, "start is null, expected `float`, got `null`"),
        ({"version": -1}, "version is -1, expected `int` >= 0"),
        ({"version": 2**53}, f"version is {2**53}, expected `int` <= {2**53 - 1}"),
        ({"first": 1.5}, "first is 1.5, expected `int`, got `float`"),
        ({"rows": {}}, "rows is {}, expected `array`, got `object`"),
        ({"counts": []}, r"counts is \[\], expected `object`, got `array`"),
    ],
)
def test_a_message_that_is_none_is_refused(tmp_path, clock, change, message):
    leader = controllers.controller(controllers.contract(tmp_path), clock)
    with pytest.raises(EvidenceError, match=message):
        leader.follow({**controllers.message([]), **change})
    leader.close()


@pytest.mark.parametrize("version", [2**40 - 1, 2**53 - 1])
def test_a_gateway_that_claims_the_last_version_there_is_keeps_no_other_from_following(
    tmp_path, clock, version
):
    leader = controllers.controller(controllers.contract(tmp_path), clock)
    leader.follow(controllers.message([], gateway="rogue", version=version))
    for _ in range(3):
        leader.pin("all", "stable", 60.0, actor="ann", reason="a new snapshot")
        leader.pin("all", None, actor="ann", reason="and another")
        mine = leader.snapshot.version
        leader.follow(controllers.message([], version=mine))  # it is heard
        assert 0 < mine < 2**53
    leader.close()


def test_counts_of_any_kind_do_no_harm(tmp_path, clock):
    leader = controllers.controller(controllers.contract(tmp_path), clock)
    odd = {"decisions": {"x": "y", "z": None}, "launched": 3, "peak": {"stable": float("nan")}}
    leader.follow({**controllers.message([]), "counts": odd})
    leader.step()
    assert to_plain(leader.status())
    leader.close()


# another contract


def test_a_text_that_is_wrong_is_refused_and_the_one_before_is_followed(tmp_path, clock):
    path = controllers.contract(tmp_path)
    leader = controllers.controller(path, clock)
    controllers.drive(leader, clock, controllers.rows(path, 20))
    good = path.read_text()
    path.write_text(good.replace("metric: tv", "metric: tvv"))
    assert "no metric is named 'tvv'" in leader.reload()
    assert "no metric is named 'tvv'" in leader.status().reload
    assert controllers.status(leader, "all").scored == 20
    path.write_text(good.replace("name: toy", "name: other"))
    assert "the contract has another name now" in leader.reload()
    path.write_text(good)
    assert leader.reload() == ""
    assert leader.status().reload == ""
    leader.close()


def test_the_same_meaning_keeps_its_evidence_and_another_begins_anew(tmp_path, clock):
    path = controllers.contract(tmp_path)
    opened = []

    def open_(kernel, side):
        opened.append(side)
        return open_engine(kernel)

    leader = controllers.controller(path, clock, open=open_)
    controllers.drive(leader, clock, controllers.rows(path, 20))
    path.write_text(path.read_text().replace("enter_evidence: 100", "enter_evidence: 500"))
    assert leader.reload() == ""
    assert controllers.status(leader, "all").scored == 20
    assert opened == ["infer", "train", "infer"]  # train is as it was
    old = leader.snapshot.version
    path.write_text(path.read_text().replace("at_most: 0.05", "at_most: 0.06"))
    assert leader.reload() == ""
    assert controllers.status(leader, "all").scored == 0
    # what was launched before is no evidence of it
    late = controllers.rows(path, 10, start=20, **{"x-version": old})
    controllers.drive(leader, clock, late, first=20)
    assert controllers.status(leader, "all").scored == 0
    controllers.drive(leader, clock, controllers.rows(path, 10, start=30), first=30)
    assert controllers.status(leader, "all").scored == 10
    leader.close()
    kinds = [e.kind for e in entries(tmp_path)]
    assert kinds == ["gateway-opened"] * 3
    assert told(tmp_path) == []


def test_whom_a_rule_pages_is_followed_at_once_though_no_route_changes(tmp_path, clock):
    path = controllers.contract(tmp_path, q=controllers.FAULTY, routing=controllers.ACTING)
    leader = controllers.controller(path, clock)
    path.write_text(path.read_text().replace("page: oncall", "page: night"))
    assert leader.reload() == ""
    controllers.drive(leader, clock, controllers.rows(path, 240))
    left = [one for one in leader.status().transitions if one.after == "quarantined"]
    assert {one.pages for one in left} == {("night",)}
    leader.close()


def test_another_kernel_behind_the_same_text_begins_anew_after_a_restart(tmp_path, clock):
    path = controllers.contract(tmp_path)
    leader = controllers.controller(path, clock)
    controllers.drive(leader, clock, controllers.rows(path, 20))
    leader.close()
    controllers.contract(tmp_path, q={"": kit.moved(kit.BASE, 0.004)})
    again = controllers.controller(path, clock)
    assert controllers.status(again, "all").scored == 0
    again.step()
    again.close()
    *_, last = entries(tmp_path)
    assert "infer changed, and evidence begins anew" in last.body["text"]
    assert told(tmp_path) == []


def test_rows_are_evidence_again_at_once_when_a_kernel_changed(tmp_path, clock):
    """Gateways are told by a new snapshot, for rows of the old one are of the old kernel."""
    path = controllers.contract(tmp_path)
    controllers.controller(path, clock).close()
    controllers.contract(tmp_path, q={"": kit.moved(kit.BASE, 0.004)})
    again = controllers.controller(path, clock)
    version = again.snapshot.version
    rows = controllers.rows(path, 20, **{"x-version": version})
    controllers.drive(again, clock, rows)
    assert controllers.status(again, "all").scored == 20
    again.close()


# what may break


def test_a_train_engine_that_is_down_leaves_routes_alone_and_drops_the_oldest(tmp_path, clock):
    path = controllers.contract(tmp_path)
    down = [True]

    def open_(kernel, side):
        if side == "train" and down[0]:
            raise MeasurementError("no memory for train")
        return open_engine(kernel)

    leader = controllers.controller(path, clock, open=open_, room=10)
    rows = controllers.rows(path, 30)
    leader.follow(controllers.message(rows))
    leader.step()
    scoring = leader.status().scoring
    assert (scoring.alive, scoring.problem) == (False, "no memory for train")
    assert scoring.dropped == 20
    # they are missing, and durably so; the others wait
    leader.step()
    assert leader.follow(controllers.message([], first=30))["taken"] == 20
    down[0] = False
    while leader.step():
        pass
    assert leader.follow(controllers.message([], first=30))["taken"] == 30
    all_of_it = controllers.status(leader, "all")
    assert (all_of_it.scored, leader.status().scoring.scored) == (30, 10)
    assert all_of_it.cells[0].missing > 0
    leader.close()


def test_rows_of_any_kind_are_answered_and_the_sound_ones_count(tmp_path, clock):
    path = controllers.contract(tmp_path)
    rows = controllers.rows(path, 12)
    rows[1] = None
    rows[2] = {"index": "x"}
    rows[3]["logprobs"] = [None] * len(rows[3]["logprobs"])
    rows[3].pop("best")
    rows[4]["token_ids"] = [99] * len(rows[4]["token_ids"])
    rows[4].pop("best")
    rows[5]["at"] = 1e12
    rows[6]["x-version"] = 10**6
    rows[7]["labels"] = {"first": "unheard of"}
    leader = controllers.controller(path, clock)
    controllers.drive(leader, clock, rows)
    scoring = leader.status().scoring
    assert leader.follow(controllers.message([], first=12))["taken"] == 12
    assert scoring.outside == {"a row that cannot be read": 2}
    assert controllers.status(leader, "all").scored == 10
    assert leader.status().gateways[0].skew_s > 1e6
    leader.close()


def test_two_gateways_count_together(tmp_path, clock):
    path = controllers.contract(tmp_path)
    rows = controllers.rows(path, 40)
    leader = controllers.controller(path, clock)
    for name, part in (("a", rows[::2]), ("b", rows[1::2])):
        leader.follow(controllers.message(part, gateway=name))
    while leader.step():
        pass
    clock.now += 60
    while leader.step():
        pass
    taken = [
        leader.follow(controllers.message([], gateway=n, first=20))["taken"] for n in ("a", "b")
    ]
    assert taken == [20, 20]
    assert [g.name for g in leader.status().gateways] == ["a", "b"]
    assert controllers.status(leader, "all").scored == 40
    leader.close()


def test_the_ledger_verb_shows_and_verifies_a_gateways_run(tmp_path, clock, capsys):
    path = controllers.contract(tmp_path, q=controllers.FAULTY)
    leader = controllers.controller(path, clock)
    controllers.drive(leader, clock, controllers.rows(path, 160))
    leader.close()
    where = str(tmp_path / "ledger.db")
    main(["promotion", "ledger", "verify", "--ledger", where], standalone_mode=False)
    assert capsys.readouterr().out.startswith("✓")
    main(["promotion", "ledger", "show", "--ledger", where], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "toy-gateway" in shown
    assert "observe: 8 cells on 4 slices" in shown
    main(["promotion", "status", "--ledger", where], standalone_mode=False)
    assert capsys.readouterr().out.startswith("toy-gateway (observe): first=a would be served by")


def test_a_bug_ends_no_thread_and_is_told(tmp_path, clock):
    leader = controllers.controller(controllers.contract(tmp_path), clock)

    def bug():
        raise ZeroDivisionError("ours")

    assert not leader._guarded(bug)
    assert leader.status().problems == ("a bug of servanda: ZeroDivisionError: ours",)
    leader.close()


def test_a_leader_with_threads_does_it_all_by_itself_and_ends(tmp_path):
    import time

    path = controllers.contract(tmp_path)
    leader = controllers.controller(path, time.time, threads=True)
    rows = controllers.rows(path, 20, at=time.time())
    taken = 0
    for _ in range(10_000):
        taken = leader.follow(controllers.message(rows[taken:], first=taken))["taken"]
        if taken == 20:
            break
        time.sleep(0.01)  # the threads are others'
    assert taken == 20
    leader.close()
    again = controllers.controller(path, time.time)
    assert controllers.status(again, "all").scored == 20
    again.close()
