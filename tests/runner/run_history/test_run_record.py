# `servanda tools history`: which runs it shows, in which order, and what it refuses.

import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

from servanda.cli import main
from servanda.errors import EvidenceError
from servanda.judgement.verdict import FORMATS
from servanda.rl.dumps.storage import RemotePath
from servanda.runner.run_history.run_record import history_of
from tests import kit
from tests.report import made
from tests.runner.run_history import many


def history(*arguments):
    return CliRunner().invoke(main, ["tools", "history", *map(str, arguments)])


def test_runs_are_in_the_order_of_time_and_not_of_names(tmp_path):
    for n, day in ((0, 9), (1, 3), (2, 5)):
        many.write(tmp_path, n, many.verdict(n, {("tv", "all"): (n + 1) / 100}, build=n), day)

    (contract,) = json.loads(history(tmp_path, "--format", "json").stdout)["contracts"]

    assert [run["ended"][:10] for run in contract["runs"]] == [
        "2026-11-03",
        "2026-11-05",
        "2026-11-09",
    ]
    assert [run["cells"][0]["value"] for run in contract["runs"]] == [0.02, 0.03, 0.01]
    assert [run["build"] for run in contract["runs"]] == [
        f"vllm 0.2{n}.0 {f'{n}' * 8}" for n in (1, 2, 0)
    ]


def test_each_contract_has_its_own_table_of_values_against_limits(tmp_path):
    for n, name in enumerate(("chat", "code", "chat")):
        values = {("tv", "all"): 0.01, ("tv", "long"): 0.05 + n / 100}
        many.write(tmp_path, n, many.verdict(n, values, contract=name, build=n))

    text = history(tmp_path).stdout

    assert "chat: 2 runs, 2 builds of the infer kernel" in text
    assert "code: 1 run, 1 build of the infer kernel" in text
    assert re.search(r"tv: mean tv, long +≤ 0\.1 +✓ 0\.05 +✓ 0\.07\n", text)
    assert "long" not in history(tmp_path, "--slice", "all").stdout


def test_a_real_run_says_when_it_ended_and_keeps_that_time(tmp_path):
    path, _ = kit.write(tmp_path)
    check = ["check", str(path), "--run-dir", str(tmp_path / "runs" / "a"), "--quiet"]
    file = tmp_path / "runs" / "a" / "attempt-1" / "verdict.json"
    assert CliRunner().invoke(main, check).exit_code == 0
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "ended": "2020-02-03T04:05:06Z"}))

    assert CliRunner().invoke(main, check).exit_code == 0  # judged again, on the same evidence

    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", data["ended"])
    assert "2020-02-03 04:05Z" in history(tmp_path / "runs").stdout


def test_the_page_is_one_file_without_scripts_and_has_every_value(tmp_path):
    many.good(tmp_path, 8)
    hostile = many.verdict(8, contract=made.HOSTILE)
    many.write(tmp_path, 8, hostile)

    done = history(tmp_path, "-o", tmp_path / "h.html")

    page = (tmp_path / "h.html").read_text()
    assert done.exit_code == 0 and done.stdout == ""
    assert "<script" not in page and not re.search(r'(src|href)="?http', page)
    assert page.count("<svg height=") == 6  # a picture for each of three cells, of two contracts
    for i in range(8):
        assert f"run-{i:02d}/attempt-1/verdict.json" in page


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no verdict\n  hint: give a folder with run directories"),
        ({"a/verdict.json": "{"}, "a/verdict.json is not JSON of a verdict"),
        ({"verdict.json": "{}"}, "verdict.json: outcome is missing"),
        ({"a/verdict.json": "{", "b/verdict.json": "{}"}, "hint: none of 2 files can be read"),
    ],
)
def test_a_folder_without_a_verdict_is_answered_by_a_sentence(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = history(tmp_path)
    assert done.exit_code == 4 and message in done.stderr


def test_a_file_that_cannot_be_read_is_named_beside_the_others(tmp_path):
    """Damaged, or of a newer version: the history goes on, and the gate does not pass."""
    many.good(tmp_path, 12)
    newer = many.verdict(12).to_dict() | {"outcome": "likely"}
    (tmp_path / "new.verdict.json").write_text(json.dumps(newer))
    (tmp_path / "old.verdict.json").write_bytes(b"\xff\x00")

    done = history(tmp_path)
    page = history(tmp_path, "--format", "html").stdout

    assert done.exit_code == 0
    assert re.search(
        r"not read: \S+new\.verdict\.json: outcome is 'likely', .*this version", done.stdout
    )
    assert re.search(r"not read: \S+old\.verdict\.json is not JSON of a verdict", done.stdout)
    assert "new.verdict.json" in page
    assert history(tmp_path, "--gate").exit_code == 4


def test_places_that_cannot_be_listed_are_refused(tmp_path):
    file = tmp_path / "one.verdict.json"
    file.write_text(FORMATS["json"](many.verdict(0)))
    cases = {
        tmp_path / "none": "is not there",
        file: "is no folder",
        "https://x.example/runs": "a server of HTTP has no folders",
    }
    for place, message in cases.items():
        done = history(place)
        assert done.exit_code in (2, 4) and message in done.stderr
    done = history(tmp_path, "--slice", "lnog")
    assert done.exit_code == 4 and "hint: known: all, long" in done.stderr
    assert "a history is text, json or html" in history(tmp_path, "-o", tmp_path / "h.md").stderr


def test_a_folder_in_an_object_store_is_that_folder(tmp_path):
    many.good(tmp_path / "runs", 3)
    (tmp_path / "runs" / "old.verdict.json").write_text("{")
    url = (tmp_path / "runs").as_uri()

    here = history_of(tmp_path / "runs")
    there = history_of(RemotePath(url, str(tmp_path / "runs")))

    assert there.contracts[0].runs == tuple(
        replace(run, place=f"file://{run.place}") for run in here.contracts[0].runs
    )
    assert len(there.unread) == len(here.unread) == 1
    with pytest.raises(EvidenceError, match="is not there"):
        history_of(RemotePath(url + "x", str(tmp_path / "runsx")))


def test_steps_of_a_promotion_are_apart(tmp_path):
    many.write(tmp_path, 0, many.verdict(0))
    many.write(tmp_path, 1, replace(many.verdict(1), leg="canary"))
    assert "toy (canary): 1 run" in history(tmp_path).stdout
