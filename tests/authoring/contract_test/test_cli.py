# `servanda contract test`: what it prints, and its exit codes.

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from servanda.authoring.contract_test.files import read_tests
from servanda.authoring.contract_test.model import SUFFIX
from tests.authoring.contract_test.made import case, written
from tests.kit import servanda
from tests.transcripts import blocks

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A file of two cases, of which the second fails, in the current folder."""
    text = case('"-0.02x100"', "{verdict: holds, can_promote: true}", name="it holds")
    more = '"-0.02x50 -1x50"'
    text += case(
        more, "{after: 50, verdict: holds}", "{verdict: holds, cells: {tv: holds}}", name="b"
    )
    written(tmp_path, text, slices="", limit=0.1, claim="realised", last=400)
    monkeypatch.chdir(tmp_path)
    return "toy.kerneltest.yaml"


def test_each_case_is_told_with_the_cell_that_decided_and_the_place_of_what_failed(toy):
    done = servanda("contract", "test", toy)
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert lines[0].startswith("toy-tests: toy ")
    assert lines[1:5] == [
        "✓ it holds",
        "    ✓ after 100 prompt groups: holds, tv on all 0.0198 [0.0196, 0.0266], limit ≤ 0.1, "
        "n 600 tokens",
        "✗ b",
        "    ✓ after 50 prompt groups: holds, tv on all 0.0198 [0.0194, 0.0333], limit ≤ 0.1, "
        "n 300 tokens",
    ]
    assert lines[5].startswith("    ✗ after 100 prompt groups: violated, tv on all 0.326 [")
    assert lines[6] == "        verdict: expected holds, found violated"
    assert lines[8] == "          toy.kerneltest.yaml:16:19"
    assert lines[9] == "        tv: expected holds, found violated"
    assert lines[-1] == "2 cases: 1 fails, 1 passes"


def test_all_that_pass_exit_0(toy):
    text = Path(toy).read_text()
    Path(toy).write_text(
        text.replace("{verdict: holds, cells: {tv: holds}}", "{verdict: violated}")
    )
    done = servanda("contract", "test", toy)
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "2 cases: all pass")


def test_a_folder_gives_all_of_its_tests_once(toy):
    for name in ("x", "y"):
        Path(name).mkdir()
        text = Path(toy).read_text().replace("contract: toy", "contract: ../toy")
        Path(name, f"{name}{SUFFIX}").write_text(text.replace("toy-tests", name))
    done = servanda("contract", "test", ".", toy, "y")
    assert [line.split(":")[0] for line in done.output.splitlines() if ": toy " in line] == [
        "toy-tests",
        "x",
        "y",
    ]
    assert done.output.splitlines()[-1] == "6 cases: 3 fail, 3 pass"


def test_json_has_every_check_with_its_cell(toy):
    done = servanda("contract", "test", toy, "--format", "json")
    data = json.loads(done.output)
    assert done.exit_code == 1 and data["passed"] is False
    first, second = data["tests"][0]["cases"]
    assert first["passed"] and not second["passed"]
    (check,) = [c for c in second["expectations"][1]["checks"] if c["what"] == "tv"]
    assert (check["expected"], check["found"]) == ("holds", "violated")
    assert check["cell"]["value"] == pytest.approx(0.326, abs=1e-3)
    assert check["cell"]["n"] == 600
    assert check["where"] == "toy.kerneltest.yaml:16:38"


def test_junit_has_a_suite_for_a_test_and_a_case_for_a_case(toy):
    done = servanda("contract", "test", toy, "--format", "junit")
    suites = ET.fromstring(done.output)
    assert (suites.get("tests"), suites.get("failures")) == ("2", "1")
    good, bad = suites.find("testsuite").findall("testcase")
    assert good.find("failure") is None and "holds" in good.find("system-out").text
    assert bad.find("failure").get("message") == "verdict: expected holds, found violated"
    assert "toy.kerneltest.yaml:16:19" in bad.find("failure").text
    xmlschema = pytest.importorskip("xmlschema")  # and it is what Jenkins reads
    xmlschema.XMLSchema(str(ROOT / "tests" / "data" / "junit-10.xsd")).validate(done.output)


def test_what_is_wrong_in_several_files_is_said_at_once(toy):
    Path(f"a{SUFFIX}").write_text(Path(toy).read_text().replace("0.02x100", "0.02y100"))
    Path(f"b{SUFFIX}").write_text(Path(toy).read_text().replace("{verdict", "{verdit"))
    done = servanda("contract", "test", ".")
    assert done.exit_code == 2
    assert "a.kerneltest.yaml:9:15: '-0.02y100' cannot be read" in done.output
    assert "b.kerneltest.yaml:11:10: an expectation has no key 'verdit'" in done.output
    assert "✓" not in done.output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.kerneltest.yaml", "none.kerneltest.yaml cannot be read"),
        ("empty", "no contract test"),
    ],
)
def test_what_is_not_there_is_a_wrong_call(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    done = servanda("contract", "test", name)
    assert done.exit_code == 2 and message in done.output


def test_text_that_is_not_utf_8_is_refused(toy):
    Path(toy).write_bytes(b"\xff\xfe")
    done = servanda("contract", "test", toy)
    assert done.exit_code == 2 and "is not UTF-8 text" in done.output


# the example


@pytest.mark.slow
def test_the_example_passes():
    done = servanda("contract", "test", EXAMPLES)
    assert done.exit_code == 0, done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("aggregate: max, at_most: 2.0", "aggregate: max, at_most: 4.0"),
        (
            "at_most: 0.03, slices: all}\n  - {id: tv-slice",
            "at_most: 0.06, slices: all}\n  - {id: tv-slice",
        ),
        ("at_least: 0.999", "at_least: 0.998"),
        ("slices: [domain, depth]", "slices: [domain, depth], mode: monitor"),
    ],
)
def test_the_example_fails_where_its_contract_is_loosened(tmp_path, old, new):
    """Some case says so; tests/slow moves every limit."""
    done = servanda("contract", "test", loosened(tmp_path, old, new))
    assert done.exit_code in (1, 2), done.output


def loosened(tmp_path, old, new):
    """The example's tests in a folder where a part of its contract is another."""
    text = (EXAMPLES / "tiny-int8.kernelcontract.yaml").read_text()
    assert old in text
    folder = tmp_path / "examples"
    folder.mkdir()
    (folder / "tiny-int8.kernelcontract.yaml").write_text(text.replace(old, new))
    for name in ("models", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    file = folder / f"tiny-int8{SUFFIX}"
    file.write_text((EXAMPLES / file.name).read_text())
    return file


# the page

PAGE = ROOT / "docs" / "how-to" / "contract_tests.md"


def test_the_tests_of_the_page_are_read():
    texts = blocks(PAGE, "yaml")
    assert len(texts) == 2
    assert [len(read_tests(text, "page")) for text in texts] == [1, 1]


@pytest.mark.slow
def test_the_failure_that_the_page_shows_is_what_is_printed(tmp_path, monkeypatch):
    loosened(tmp_path, "aggregate: p90, at_most: 0.03", "aggregate: p90, at_most: 0.06")
    monkeypatch.chdir(tmp_path)
    (text,) = blocks(PAGE, "text")
    assert text in servanda("contract", "test", "examples").output


# the schema


def test_the_schema_of_tests_accepts_what_the_parser_reads():
    from servanda.contract.yaml_reader import read

    done = servanda("contract", "schema", "--kind", "ContractTest")
    schema = json.loads(done.output)
    Draft7Validator.check_schema(schema)
    validator = Draft7Validator(schema)
    for file in EXAMPLES.rglob(f"*{SUFFIX}"):
        data, _, _ = read(file.read_text(), file.name)
        assert [error.message for error in validator.iter_errors(data)] == []
        assert not validator.is_valid({**data, "case": []})
        assert not validator.is_valid({**data, "cases": [{"name": "x", "expect": [{"verdit": 1}]}]})
    assert json.loads(servanda("contract", "schema").output)["title"] == "KernelContract"
