"""Where a gateway's slices stand, by its ledger alone."""

import json
from dataclasses import replace

import pytest

from servanda.cli.main import main
from servanda.gateway.controller.ledger_history import ledger_statuses, render
from servanda.promotion.ledger.entry import LedgerError
from servanda.promotion.ledger.ledger import open_ledger
from tests.gateway.controller import controllers


@pytest.fixture
def where(tmp_path):
    """A ledger in which first=a left infer, and first=b was pinned to stable and released."""
    path, clock = (
        controllers.contract(tmp_path, q=controllers.FAULTY, routing=controllers.ACTING),
        controllers.Clock(),
    )
    leader = controllers.controller(path, clock)
    controllers.drive(leader, clock, controllers.rows(path, 160))
    leader.pin("first=b", "stable", 60, actor="ann", reason="a look")
    leader.pin("first=b", None, actor="ann", reason="seen")
    leader.pin("first=c", "stable", 60, actor="ann", reason="a look")
    leader.step()
    leader.close()
    return str(tmp_path / "ledger.db")


def called(capsys, *words):
    main([*words], standalone_mode=False)
    return capsys.readouterr().out


def test_status_says_in_one_line_which_slices_of_a_gateway_are_away(where, capsys):
    with open_ledger(where, reading=True, key=b"") as ledger:
        left = next(e for e in ledger.entries() if e.body.get("after") == "quarantined")
    (line,) = called(capsys, "promotion", "status", "--ledger", where).splitlines()
    assert line.startswith("toy-gateway (enforce): first=a is served by stable since 1970-01-01 ")
    assert "(quarantined); first=c is served by stable since" in line
    assert "(suspect, pinned to stable); 2 other slices not diverted; last entry" in line
    assert left.body["slice"] == "first=a"

    assert called(capsys, "promotion", "status", "toy-gateway", "--ledger", where).splitlines() == [
        line
    ]


def test_a_slice_that_stands_where_it_stood_keeps_its_time(where):
    with open_ledger(where, reading=True, key=b"") as ledger:
        (found,) = ledger_statuses(ledger)
        moves = [e.body for e in ledger.entries() if e.body.get("slice") == "first=a"]
    assert found.slices["first=a"].since == moves[-1]["at"]
    assert {name for name, one in found.slices.items() if one.away} == {"first=a", "first=c"}


def test_a_pin_to_infer_keeps_a_slice_there(where):
    with open_ledger(where, reading=True, key=b"") as ledger:
        (found,) = ledger_statuses(ledger)
    pinned = replace(found.slices["first=a"], stands="quarantined, pinned to infer")
    acting = replace(pinned, stands="quarantined, pinned to enforce")
    assert (pinned.away, acting.away) == (False, True)
    assert render(replace(found, slices={"first=a": pinned})).startswith(
        "toy-gateway (enforce): 1 slice not diverted; last entry"
    )


def test_as_json_a_gateways_run_is_told_apart(where, capsys):
    (data,) = json.loads(
        called(capsys, "promotion", "status", "--ledger", where, "--format", "json")
    )
    assert (data["status"], data["run"], data["mode"]) == ("routing", "toy-gateway", "enforce")
    assert data["slices"]["first=a"]["stands"] == "quarantined"


def test_an_entry_that_no_leader_writes_is_named(where):
    class Odd:
        def __init__(self, entries):
            self._entries = entries

        def runs(self):
            return ("toy-gateway",)

        def entries(self, run):
            return iter(self._entries)

    with open_ledger(where, reading=True, key=b"") as ledger:
        first, *_ = ledger.entries()
    body = {key: value for key, value in first.body.items() if key != "mode"}
    with pytest.raises(LedgerError, match="entry 1 of run toy-gateway cannot be replayed"):
        ledger_statuses(Odd([replace(first, body=body)]))
