"""The listener of a leader with kernels behind it: rows come in, a slice goes, a person pins."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from servanda.errors import MeasurementError
from servanda.gateway.controller.status import ControllerStatus
from servanda.gateway.controller.web import summary
from servanda.gateway.controller.web.app import whole_page
from servanda.gateway.routing.model import snapshot_of
from servanda.traces.serialization import from_plain
from tests.gateway.controller import controllers
from tests.gateway.controller.web.serving import bearer, live
from tests.gateway.controller.web.test_page import OPERATOR


@pytest.fixture
def served(tmp_path):
    path = controllers.contract(tmp_path, q=controllers.FAULTY, routing=controllers.ACTING)
    clock = controllers.Clock()
    leader = controllers.controller(path, clock)
    try:
        with live(leader) as client:
            yield client, leader, clock, path
    finally:
        leader.close()


def told(client, rows, first):
    body = controllers.message(rows, first=first)
    return client.post("/v1/follow", json=body, headers=bearer("gateway")).json()


def test_one_request_is_no_tick(served):
    client, leader, clock, path = served
    told(client, [], 0)
    rows = controllers.rows(path, 1)
    clock.now = rows[0]["at"] + 3
    told(client, rows, 0)
    while leader.step():
        pass

    data = client.get("/v1/status", headers=bearer("viewer")).json()
    for shown in (
        client.get("/", headers=bearer("operator")).text,
        summary.text(from_plain(ControllerStatus, data), "http://x"),
    ):
        assert "✓" not in shown and re.search(r"gathering: 1 of about \d+ requests", shown)


def test_a_faulty_slice_leaves_and_everybody_is_told(served):
    client, leader, clock, path = served
    told(client, [], 0)
    rows = controllers.rows(path, 240)
    for i in range(0, len(rows), 24):
        clock.now = rows[i + 23]["at"] + 3
        reply = told(client, rows[i : i + 24], i)
        while leader.step():
            pass
    assert reply["taken"] >= 0

    data = client.get("/v1/status", headers=bearer("viewer")).json()
    status = from_plain(ControllerStatus, data)
    gone = {one.name: one.status for one in status.slices}
    assert gone["first=a"] == "quarantined" and gone["first=b"] in ("active", "suspect")
    assert 0 <= status.now - status.made < 600

    html = client.get("/", headers=bearer("operator")).text
    for text in (html, summary.text(status, "http://x")):
        assert "✗ quarantined" in text or "✗ 1 quarantined" in text

    snapshot = client.get("/v1/route/snapshot", headers=bearer("gateway"))
    route = {one.name: one for one in snapshot_of(snapshot.json()).slices}["first=a"]
    assert (route.share, route.acts) == (0.0, True)
    assert snapshot.headers["etag"] == f'"{status.version}"'

    text = client.get("/metrics", headers=bearer("viewer")).text
    found = {
        (s.name, s.labels.get("slice"), s.labels.get("state") or s.labels.get("outcome")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    assert found["servanda_slice_state", "first=a", "quarantined"] == 1
    assert found["servanda_samples_total", None, "scored"] == status.scoring.scored > 0
    assert found["servanda_rescore_lag_seconds_count", None, None] > 0
    assert found["servanda_rescore_lag_seconds_sum", None, None] > 0


def test_a_pin_is_followed_and_kept_in_the_ledger_by_its_actor(served):
    client, leader, _, _ = served
    before = leader.snapshot.version
    body = {"slice": "first=b", "to": "stable", "ttl_s": 60, "reason": "a new driver"}

    answer = client.post("/v1/admin/pin", json=body, headers=bearer("operator"))

    (moved,) = answer.json()["transitions"]
    assert (moved["actor"], moved["reason"]) == ("a-operator", "a new driver")
    snapshot = leader.snapshot
    assert snapshot.version > before
    assert {s.name: s.pinned for s in snapshot.slices}["first=b"] == "stable"
    decided = client.post(
        "/v1/route/decide",
        json={"request": "r", "labels": {"first": "b"}},
        headers=bearer("gateway"),
    ).json()
    assert (decided["pool"], decided["reason"]) == ("stable", "first=b pinned")
    assert "● pinned to stable" in whole_page(leader.status(), OPERATOR)

    body = {"slice": "first=b", "reason": "it works"}
    assert client.post("/v1/admin/unpin", json=body, headers=bearer("operator")).status_code == 200
    assert not any(s.pinned for s in leader.snapshot.slices)
    again = client.post("/v1/admin/unpin", json=body, headers=bearer("operator")).json()
    assert again == {"transitions": []}


def test_a_reload_of_a_broken_contract_keeps_the_old_one_and_says_so(served):
    client, _, _, path = served
    path.write_text(path.read_text().replace("metric: tv", "metric: tvv"))

    answer = client.post("/v1/admin/reload", json={}, headers=bearer("admin"))

    assert answer.status_code == 409
    assert "no metric is named 'tvv'" in answer.json()["error"]["message"]
    html = client.get("/page", headers=bearer("viewer")).text
    assert "1 problem<" in html and "no metric is named" in html

    path.write_text(path.read_text().replace("metric: tvv", "metric: tv"))
    assert client.post("/v1/admin/reload", json={}, headers=bearer("admin")).status_code == 200
    assert "problem<" not in client.get("/page", headers=bearer("viewer")).text


def test_what_cannot_be_kept_is_asked_for_again(served, monkeypatch):
    client, leader, _, _ = served

    def locked(*_, **__):
        raise MeasurementError("the store is locked", hint="who else has it open?")

    monkeypatch.setattr(leader, "pin", locked)
    body = {"slice": "all", "to": "stable", "ttl_s": 60, "reason": "x"}
    answer = client.post("/v1/admin/pin", json=body, headers=bearer("operator"))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["message"] == "the store is locked"
