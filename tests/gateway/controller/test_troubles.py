# What a leader stands on: the store of its ledger, its disk, its train engine.

import json
import resource
import sqlite3
from threading import Event, Thread

import pytest

from servanda.engines import open_engine
from servanda.engines import worker as workers
from servanda.errors import MeasurementError
from servanda.gateway.controller.ledger_history import disagreements
from servanda.gateway.controller.rescoring import Scorer
from servanda.gateway.controller.store import FILE
from servanda.gateway.controller.watched_cells import select_cells
from servanda.promotion.ledger.ledger import open_ledger, verify_at
from servanda.runner.load import load
from tests.engines.serving import live
from tests.gateway.controller import controllers


@pytest.fixture
def clock():
    return controllers.Clock()


def of(where):
    with open_ledger(where, reading=True, key=b"") as ledger:
        return [*ledger.entries()], disagreements(ledger)


@pytest.mark.slow
def test_a_gateways_run_is_kept_in_either_store_of_ledgers(tmp_path, clock, where):
    path = controllers.contract(tmp_path, q=controllers.FAULTY, routing=controllers.ACTING)
    for part in (slice(0, 120), slice(120, 240)):  # a restart in between
        leader = controllers.controller(path, clock, ledger=where)
        controllers.drive(leader, clock, controllers.rows(path, 240)[part], first=part.start)
        moves = leader.status().moves
        assert (leader.status().ledger, leader.status().ledger_behind) == ("", 0)
        leader.close()
    entries, wrong = of(where)
    assert [e.body["o"] for e in entries] == list(range(1, len(entries) + 1))
    assert [e.kind for e in entries].count("routed") == moves > 0
    assert wrong == ()
    assert verify_at(where, key=b"").problems == ()


@pytest.mark.slow
def test_two_contracts_share_a_ledger_and_their_entries_stay_apart(tmp_path, clock, where):
    leaders = []
    for name in ("one", "two"):
        path = controllers.contract(
            tmp_path / name, q=controllers.FAULTY, routing=controllers.ACTING
        )
        path.write_text(path.read_text().replace("name: toy", f"name: {name}"))
        leaders.append((path, controllers.controller(path, clock, ledger=where)))
    rows = [[{**row, "run": "x"} for row in controllers.rows(path, 240)] for path, _ in leaders]
    for at in range(0, 240, 16):
        for (_, leader), mine in zip(leaders, rows, strict=True):
            controllers.drive(leader, clock, mine[at : at + 16], first=at)
    for _, leader in leaders:
        leader.close()
    entries, wrong = of(where)
    assert {e.run for e in entries} == {"one-gateway", "two-gateway"}
    assert wrong == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        lambda body: {**body, "value": body["value"] / 2},
        lambda body: {**body, "log_evidence": body["log_price"] - 1},
        lambda body: {**body, "n": body["n"] + 1},
        lambda body: {**body, "reason": "no reason"},
    ],
)
def test_an_entry_that_was_edited_in_the_file_is_named(tmp_path, clock, edit):
    """By the chain, whatever was edited; an edit that goes with a new chain needs the key."""
    path = controllers.contract(tmp_path, q=controllers.FAULTY, routing=controllers.ACTING)
    leader = controllers.controller(path, clock, key=b"secret")
    controllers.drive(leader, clock, controllers.rows(path, 240))
    leader.close()
    where = str(tmp_path / "ledger.db")
    assert verify_at(where, key=b"secret").problems == ()
    db = sqlite3.connect(where)
    (table,) = [
        t
        for (t,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        if "body" in [c[1] for c in db.execute(f"PRAGMA table_info({t})")]
    ]
    for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        db.execute(f"DROP TRIGGER {name}")
    rows = db.execute(f"SELECT seq, body FROM {table}").fetchall()
    seq, body = next(
        (s, json.loads(b)) for s, b in rows if json.loads(b).get("after") == "quarantined"
    )
    db.execute(f"UPDATE {table} SET body = ? WHERE seq = ?", (json.dumps(edit(body)), seq))
    db.commit()
    db.close()
    assert verify_at(where, key=b"secret").problems


def test_a_full_disk_takes_nothing_and_loses_nothing(tmp_path, clock):
    path = controllers.contract(tmp_path)
    leader, rows = controllers.controller(path, clock), controllers.rows(path, 60)
    controllers.drive(leader, clock, rows[:20])
    before = leader.snapshot
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = max(file.stat().st_size for file in (tmp_path / "state").glob(f"{FILE}*"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        for first in (20, 40):
            leader.follow(controllers.message(rows[first : first + 20], first=first))
            leader.step()
        problem = leader.status().store
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be used" in problem
    taken = leader.follow(controllers.message([], first=60))["taken"]
    assert taken < 60
    assert leader.snapshot == before or taken > 20
    while leader.step():
        pass
    assert leader.follow(controllers.message([], first=60))["taken"] == 60
    assert leader.status().store == ""
    leader.close()
    again = controllers.controller(path, clock)
    assert controllers.status(again, "all").scored == 60
    again.close()


@pytest.mark.slow
def test_a_served_kernel_may_be_the_referee(tmp_path, clock):
    path = controllers.contract(tmp_path, q=controllers.FAULTY, routing=controllers.ACTING)
    rows = controllers.rows(path, 96)
    by_file = controllers.controller(path, clock, state="file", ledger="")
    controllers.drive(by_file, clock, rows)
    wanted = [(s.name, s.status, s.cells[0].log_evidence) for s in by_file.status().slices]
    by_file.close()
    with live(open_engine(by_file._state.rules.contract.kernels.train)) as (client, _):
        text = path.read_text()
        url = str(client.base_url)
        old = "train: {engine: table, model: p.json}"
        assert old in text
        path.write_text(text.replace(old, f'train: {{engine: openai_http, url: "{url}"}}'))
        leader = controllers.controller(path, controllers.Clock(), state="http", ledger="")
        controllers.drive(leader, controllers.Clock(), rows)
        status = leader.status()
        leader.close()
    assert status.scoring.problem == ""
    found = [(s.name, s.status, s.cells[0].log_evidence) for s in status.slices]
    assert [f[:2] for f in found] == [w[:2] for w in wanted]
    assert [f[2] for f in found] == pytest.approx([w[2] for w in wanted], abs=1e-6)


HANGS = """
import os, sys, time
sys.path.pop(0)
import servanda.engines.worker as worker
answer = worker._answer
def once(engine, verb, *more):
    if verb == "score" and not os.path.exists({flag!r}):
        open({flag!r}, "w").close()
        time.sleep(3600)
    return answer(engine, verb, *more)
worker._answer = once
worker.main()
"""


@pytest.mark.slow
def test_a_worker_that_hangs_is_killed_and_another_one_scores_its_rows(
    tmp_path, clock, monkeypatch
):
    path = controllers.contract(tmp_path)
    monkeypatch.setattr(workers, "_CHILD", HANGS.format(flag=str(tmp_path / "hung")))
    began = []

    def open_(kernel, side):
        if side == "infer":
            return open_engine(kernel)
        began.append(workers.spawn(kernel, side))
        return began[-1]

    leader = controllers.controller(path, clock, open=open_, timeout_s=5.0)
    controllers.drive(leader, clock, controllers.rows(path, 12))
    scoring = leader.status().scoring
    assert (scoring.scored, scoring.missing, scoring.restarts, scoring.errors) == (12, 0, 1, 1)
    assert began[0]._process.returncode == -9
    leader.close()
    assert [one._process.poll() for one in began] == [-9, -9]


def test_a_model_that_takes_long_to_load_is_not_killed_for_it(tmp_path):
    closed = Event()

    class Slow:
        def __init__(self, engine):
            self._engine = engine

        def __getattr__(self, name):
            return getattr(self._engine, name)

        def describe(self):
            assert not closed.wait(0.1)  # ten times as long as an answer may take
            return self._engine.describe()

        def close(self):
            closed.set()

    path = controllers.contract(tmp_path)
    watching = select_cells(load(path))
    one = Scorer(
        watching, lambda k, _: Slow(open_engine(k)), clock=controllers.Clock(), timeout_s=0.01
    )
    one.infer = open_engine(watching.contract.kernels.infer).describe()
    one._asked_at = 0.0
    one.start()
    assert one.train.alive


def test_a_train_engine_that_loads_for_another_contract_keeps_no_route_from_being_renewed(
    tmp_path, clock
):
    """A model may take longer to load than a route lasts."""
    path = controllers.contract(tmp_path, routing=controllers.ACTING)
    text = path.read_text()
    loading, loaded = Event(), Event()

    def slow(kernel, side):
        if side == "train" and "another" in path.read_text():
            loading.set()
            assert loaded.wait(60)
        return controllers.here(kernel, side)

    leader = controllers.controller(path, clock, open=slow)
    before = leader.snapshot
    path.write_text(text.replace("train: {", "train: {title: another, ", 1))
    reload = Thread(target=leader.reload)
    reload.start()
    try:
        assert loading.wait(60)
        clock.now += 400
        looked = Thread(target=leader._worker.settle, daemon=True)
        looked.start()
        looked.join(60)
        assert leader.snapshot.valid_until > before.valid_until
        pinned = leader.pin("first=a", "stable", 60, actor="ann", reason="x")
        assert [one.after for one in pinned] == ["active, pinned to stable"]
    finally:
        loaded.set()
        reload.join()
    assert leader.status().reload == ""
    assert controllers.status(leader, "first=a").pin is not None
    leader.close()


def test_a_store_that_hangs_keeps_no_gateway_waiting_for_whoever_looks(
    tmp_path, clock, monkeypatch
):
    leader = controllers.controller(controllers.contract(tmp_path), clock)
    asked, answers, heard = Event(), Event(), Event()

    def behind():
        asked.set()
        assert answers.wait(60)
        return 0

    def follow():
        leader.follow(controllers.message([]))
        heard.set()

    monkeypatch.setattr(leader._state.store, "behind", behind)
    looking, following = Thread(target=leader.status), Thread(target=follow)
    looking.start()
    assert asked.wait(60)
    following.start()
    try:
        assert heard.wait(60)
    finally:
        answers.set()
        looking.join()
        following.join()
    leader.close()


def test_a_leader_that_ends_does_not_wait_for_a_model_to_load(tmp_path):
    path = controllers.contract(tmp_path)
    loading, ended = Event(), Event()

    class Slow:
        def describe(self):
            loading.set()
            assert ended.wait(60)
            raise MeasurementError("the worker is gone")

        def close(self):
            ended.set()

    def open_(kernel, side):
        return Slow() if side == "train" else open_engine(kernel)

    scorer = Scorer(select_cells(load(path)), open_, clock=controllers.Clock(0.0))
    failed = []

    def start():
        try:
            scorer.start()
        except MeasurementError as error:
            failed.append(str(error))

    starting = Thread(target=start)
    starting.start()
    assert loading.wait(60)
    scorer.train.end()
    closed = ended.is_set()
    ended.set()
    starting.join()
    assert closed
    assert failed == ["the worker is gone"]
