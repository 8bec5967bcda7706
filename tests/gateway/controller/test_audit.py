# `servanda gateway audit`: a log in, a table and an exit code out.

import json
import re

import pytest

from servanda.cli.main import main
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.gateway.controller.audit import Audit, render
from servanda.promotion.ledger.ledger import open_ledger
from tests import serving
from tests.gateway.controller import controllers


def logged(folder, path, n=240, name="served.jsonl", **more):
    rows = controllers.rows(path, n, **more)
    for row in rows:
        del row["x-chance"]
    return serving.log(folder, rows, name)


def audited(path, *logs, state=None, open_=controllers.here):
    audit = Audit(path, logs, state=state or path.parent / "state", open=open_, key=b"")
    try:
        moved = audit.read()
        return audit.result, moved
    finally:
        audit.close()


def test_a_log_of_sound_traffic_has_nothing_to_divert(tmp_path):
    path = controllers.contract(tmp_path)
    found, moved = audited(path, logged(tmp_path, path, 600))
    assert (found.exit_code, found.beyond, moved) == (0, (), ())
    assert "toy · scored 600 of 600 requests" in render(found)
    assert len(re.findall("✓ active, within limits", render(found))) == 4


def test_assignments_between_the_requests_are_no_requests(tmp_path):
    path = controllers.contract(tmp_path)
    one = {"run": "r1", "leg": "canary-1", "at": 1.0, "key": "u", "pool": "stable"}
    serving.log(tmp_path, [one] * 3)
    found, _ = audited(path, logged(tmp_path, path))
    assert found.rows == 240
    assert "toy · scored 240 of 240 requests" in render(found)


@pytest.mark.parametrize("n", [1, 20])
def test_a_short_log_says_how_much_of_it_lies_in_a_slice_and_how_much_is_missing(tmp_path, n):
    """One that is read at once, so that nothing grew between two looks at it."""
    path = controllers.contract(tmp_path)
    found, _ = audited(path, logged(tmp_path, path, n))
    assert found.exit_code == 3 and "✓" not in render(found)
    assert re.search(
        rf"^all .*\? active, gathering: {n} of about \d+ requests", render(found), re.M
    )
    shares = {one.name: one.share or 0.0 for one in found.standing.slices}
    assert shares["all"] == 1.0 and sum(shares.values()) == pytest.approx(2.0)
    assert re.search(r"^all +100 %  ", render(found), re.M)


def test_a_slice_beyond_its_limit_is_told_with_what_showed_it(tmp_path):
    path = controllers.contract(tmp_path, q=controllers.FAULTY)
    found, _ = audited(path, logged(tmp_path, path))
    assert found.exit_code == 1
    assert "first=a" in found.beyond
    (line,) = [one for one in render(found).splitlines() if one.startswith("first=a")]
    assert "✗ would divert (e-value 2,923 from 45 requests, 30 users)" in line


def test_a_log_that_does_not_say_who_asked_shows_a_slice_all_the_same(tmp_path):
    path = controllers.contract(tmp_path, q=controllers.FAULTY)
    rows = controllers.rows(path, 240)
    for row in rows:
        del row["x-chance"], row["key"]
    found, _ = audited(path, serving.log(tmp_path, rows))
    assert "first=a" in found.beyond
    assert "no divert: the evidence comes from 0 distinct users, and 5 are needed" in render(found)


def test_without_routing_it_is_told_why_no_divert_would_follow(tmp_path):
    path = controllers.contract(tmp_path, q=controllers.FAULTY, routing="")
    found, _ = audited(path, logged(tmp_path, path, 400))
    assert found.exit_code == 1
    assert "no divert: routing.stable_in_flight is not declared" in render(found)


def test_an_empty_log_is_undecided(tmp_path):
    path = controllers.contract(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    found, _ = audited(path, tmp_path / "empty.jsonl")
    assert found.exit_code == 3
    assert "? no request of the log is in it" in render(found)
    assert render(found).endswith(
        "nothing was scored: the log has no rows; --log takes files of rows, or folders of "
        ".jsonl files"
    )


@pytest.mark.parametrize("said", [0, -1, 1.5, "often", True])
def test_a_chance_that_is_none_is_named_with_its_place(tmp_path, said):
    path = controllers.contract(tmp_path)
    rows = controllers.rows(path, 3)
    rows[1]["x-chance"] = said
    with pytest.raises(EvidenceError, match=r"served.jsonl:2:1: 'x-chance' is .* of 1e-09 to 1"):
        audited(path, serving.log(tmp_path, rows, "served.jsonl"))


def test_a_broken_line_is_named_with_the_column(tmp_path):
    path = controllers.contract(tmp_path)
    log = logged(tmp_path, path, 2)
    log.write_text(log.read_text() + '{"index": 1 "run"}\n')
    with pytest.raises(EvidenceError, match=r"served.jsonl:3:13: not JSON: Expecting ',' delim"):
        audited(path, log)


def test_rows_without_keys_are_said_to_be_of_one_user(tmp_path):
    path = controllers.contract(tmp_path, q=controllers.FAULTY)
    rows = [{**row, "key": ""} for row in controllers.rows(path, 20)]
    found, _ = audited(path, serving.log(tmp_path, rows, "served.jsonl"))
    assert "20 of 20 rows have no key: they count as one user" in render(found)


def test_a_log_of_another_model_is_told_apart_from_a_good_one(tmp_path):
    path = controllers.contract(tmp_path)
    rows = [
        {**row, "token_ids": [9_999 for _ in row["token_ids"]]} for row in controllers.rows(path, 9)
    ]
    found, _ = audited(path, serving.log(tmp_path, rows, "served.jsonl"))
    assert found.exit_code == 3
    assert "✓" not in render(found)
    assert render(found).endswith("is the log of this contract's model?")


def test_a_log_that_is_not_there_is_refused(tmp_path, capsys):
    path = controllers.contract(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(
            ["gateway", "audit", str(path), "--log", str(tmp_path / "served.jsonl")],
            standalone_mode=False,
        )
    assert stopped.value.code == 4
    assert "served.jsonl is not there\n  hint: --log takes a file" in capsys.readouterr().err


def test_rows_that_are_no_evidence_are_counted_with_their_reason(tmp_path):
    path = controllers.contract(tmp_path)
    rows = controllers.rows(path, 20)
    rows[3]["sampling"] = {**rows[3]["sampling"], "temperature": 0.3}
    rows[4] = serving.lost(rows[4])
    found, _ = audited(path, serving.log(tmp_path, rows))
    assert (
        "scored 18 of 20 requests · 1 missing · 1 outside: asked for another sampling than the "
        "workload's"
    ) in render(found)


def test_what_was_scored_is_kept_and_a_log_that_grew_is_read_on(tmp_path):
    path = controllers.contract(tmp_path)
    log = logged(tmp_path, path, 40)
    audited(path, log)
    logged(tmp_path, path, 10, start=40)
    found, _ = audited(path, log)
    assert found.standing.scoring.scored == 10
    assert next(s.scored for s in found.standing.slices if s.name == "all") == 50


def test_a_line_that_is_being_written_waits_and_one_without_an_end_counts(tmp_path):
    path = controllers.contract(tmp_path)
    log = logged(tmp_path, path, 4)
    whole = log.read_text()
    log.write_text(whole[:-20])
    audit = Audit(path, [log], state=tmp_path / "state", open=controllers.here, key=b"")
    audit.read()
    assert audit.result.rows == 3
    log.write_text(whole.rstrip("\n"))
    audit.read()
    assert audit.result.rows == 4
    log.write_text(whole)
    audit.read()
    assert audit.result.rows == 4
    audit.close()


def test_a_line_that_is_no_row_is_named_with_its_place(tmp_path):
    path = controllers.contract(tmp_path)
    log = logged(tmp_path, path, 3)
    with log.open("a") as file:
        file.write('{"index": 1}\n')
    with pytest.raises(EvidenceError, match=r"served.jsonl:4:1: 'run' is missing"):
        audited(path, log)


def test_a_train_engine_that_is_down_is_trouble_and_no_verdict(tmp_path):
    path = controllers.contract(tmp_path)

    def open_(kernel, side):
        if side == "train":
            raise MeasurementError("no memory")
        return controllers.here(kernel, side)

    with pytest.raises(MeasurementError, match="the log cannot be scored: no memory"):
        audited(path, logged(tmp_path, path, 10), open_=open_)


@pytest.mark.slow
def test_the_verb_prints_the_table_and_ends_with_its_code(tmp_path, capsys):
    path = controllers.contract(tmp_path, q=controllers.FAULTY)
    log, ledger = logged(tmp_path, path), str(tmp_path / "audit.db")
    call = ["gateway", "audit", str(path), "--log", str(log), "--ledger", ledger]
    with pytest.raises(SystemExit) as stopped:
        main(call, standalone_mode=False)
    assert stopped.value.code == 1
    out = capsys.readouterr()
    assert "✗ would divert" in out.out
    assert "first=a: suspect → quarantined: tv on first=a exceeds its limit" in out.err
    with pytest.raises(SystemExit) as stopped:
        main([*call[:5], "--format", "json"], standalone_mode=False)
    assert stopped.value.code == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["exit"], data["rows"], "first=a" in data["beyond"]) == (1, 240, True)
    main(["promotion", "ledger", "verify", "--ledger", ledger], standalone_mode=False)


def test_a_contract_that_cannot_be_watched_is_refused(tmp_path):
    path = controllers.contract(tmp_path)
    path.write_text(path.read_text().replace("at_most: 0.05", "at_most: 0.05, mode: monitor"))
    with pytest.raises(ContractError):
        audited(path, tmp_path / "none.jsonl")


def test_a_second_call_on_one_state_knows_what_the_first_one_found(tmp_path):
    path = controllers.contract(tmp_path)
    log = logged(tmp_path, path, 240)
    audited(path, log)
    found, _ = audited(path, log)
    assert render(found).startswith("toy · nothing new in 240 requests\n")
    assert "nothing was scored" not in render(found)
    assert (found.old, found.exit_code) == (True, 3)


def test_the_history_of_a_log_begins_with_its_first_row(tmp_path):
    path = controllers.contract(tmp_path)
    where = str(tmp_path / "audit.db")
    first = controllers.rows(path, 5)[0]["at"]
    with pytest.raises(SystemExit):
        main(
            [
                "gateway",
                "audit",
                str(path),
                "--log",
                str(logged(tmp_path, path, 5)),
                "--ledger",
                where,
            ],
            standalone_mode=False,
        )
    with open_ledger(where, reading=True, key=b"") as ledger:
        assert next(iter(ledger.entries())).at == first > 0
