# `servanda tools report`, and the reports that `servanda check` writes.

import json
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner

from servanda.cli import main
from servanda.judgement.verdict import FORMATS
from tests import kit
from tests.report import made


def call(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run that was violated, with the files that it was asked for."""
    folder = tmp_path_factory.mktemp("run")
    path, _ = kit.write(folder, q={"": kit.moved(kit.BASE, 0.3)})
    (folder / "a.html").write_text("of an earlier run")
    names = ("a.html", "a.json", "a.xml", "a.sarif", "a.md")
    reports = [part for name in names for part in ("--report", folder / name)]
    done = call("check", path, "--run-dir", folder / "run", *reports)
    assert done.exit_code == 1, done.output
    (folder / "stdout").write_text(done.stdout)
    return folder


@pytest.mark.slow
def test_check_writes_what_the_suffixes_ask_for(run_dir):
    assert (run_dir / "a.html").read_text().lstrip().startswith("<!doctype html>")
    assert json.loads((run_dir / "a.json").read_text())["outcome"] == "violated"
    assert ET.parse(run_dir / "a.xml").getroot().tag == "testsuites"
    assert json.loads((run_dir / "a.sarif").read_text())["version"] == "2.1.0"
    assert (run_dir / "a.md").read_text().startswith("> [!CAUTION]")


def test_check_says_where_its_reports_are(run_dir):
    shown = (run_dir / "stdout").read_text()
    assert "VIOLATED: tv on all" in shown
    assert shown.rstrip().endswith(f"report {run_dir / 'a.md'}")


@pytest.mark.parametrize("format_", sorted(FORMATS))
def test_report_renders_again_without_measuring(run_dir, format_):
    done = call("tools", "report", run_dir / "run", "--format", format_)
    of_file = call("tools", "report", run_dir / "a.json", "--format", format_)
    of_attempt = call("tools", "report", run_dir / "run" / "attempt-1", "--format", format_)
    assert done.exit_code == 0, done.output
    assert done.stdout == of_file.stdout == of_attempt.stdout


def test_report_is_what_check_had_written(run_dir):
    done = call("tools", "report", run_dir / "run", "-o", run_dir / "again.html")
    assert done.exit_code == 0 and done.stdout == ""
    assert (run_dir / "again.html").read_text() == (run_dir / "a.html").read_text()


def test_report_takes_the_last_attempt_with_a_verdict(tmp_path):
    for attempt, outcome in ((2, "holds"), (10, "violated")):
        folder = tmp_path / f"attempt-{attempt}"
        folder.mkdir()
        (folder / "verdict.json").write_text(FORMATS["json"](made.VERDICTS[outcome]))
    (tmp_path / "attempt-11").mkdir()
    assert "VIOLATED" in call("tools", "report", tmp_path).stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON of a verdict"),
        ("[]", "is not JSON of a verdict: it is not an object"),
        ("{}", "v.json: outcome is missing"),
    ],
)
def test_report_refuses_what_is_no_verdict(tmp_path, content, message):
    if content is not None:
        (tmp_path / "v.json").write_text(content)
    done = call("tools", "report", tmp_path / "v.json")
    assert done.exit_code == 4 and message in done.stderr


def test_report_of_a_run_without_a_verdict_says_what_to_do(tmp_path):
    done = call("tools", "report", tmp_path)
    assert done.exit_code == 4 and "holds no verdict" in done.stderr
    assert "servanda check" in done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.pdf", "the suffix says the format; known: .html"),
        ("no/a.html", "cannot be written: no folder"),
        (".", "the suffix says the format"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_measuring(tmp_path, name, message):
    path, _ = kit.write(tmp_path)
    done = call("check", path, "--run-dir", tmp_path / "run", "--report", tmp_path / name)
    assert done.exit_code == 2 and message in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_leaves_no_report_of_an_earlier_one(tmp_path):
    path, _ = kit.write(tmp_path)
    kit.table(tmp_path, "q.json", {"": kit.BASE}, weights="other")
    (tmp_path / "a.html").write_text("green")
    out = ("--report", tmp_path / "a.html", "--run-dir", tmp_path / "run")
    done = call("check", path, *out)
    assert done.exit_code == 4 and not (tmp_path / "a.html").exists()


def test_output_takes_its_format_from_its_suffix_unless_one_is_named(tmp_path):
    (tmp_path / "v.json").write_text(FORMATS["json"](made.VERDICTS["holds"]))
    call("tools", "report", tmp_path / "v.json", "-o", tmp_path / "a.md")
    call("tools", "report", tmp_path / "v.json", "-o", tmp_path / "b.md", "--format", "text")
    assert (tmp_path / "a.md").read_text().startswith("> [!TIP]")
    assert "HOLDS" in (tmp_path / "b.md").read_text()


@pytest.mark.slow
def test_a_damaged_verdict_of_a_run_is_written_again_by_the_same_check(tmp_path):
    path, _ = kit.write(tmp_path, q={"": kit.BASE}, limit=0.5)
    assert call("check", path, "--run-dir", tmp_path / "run").exit_code == 0
    file = tmp_path / "run" / "attempt-1" / "verdict.json"
    before = json.loads(file.read_text())
    file.write_text("\n")
    for verb in (("tools", "report"), ("contract", "calibrate")):
        done = call(*verb, tmp_path / "run")
        assert done.exit_code == 4
        assert done.stderr == (
            f"{file} is not JSON of a verdict: Expecting value: line 2 column 1 (char 1)\n"
            "  hint: the same `servanda check` writes it again, from what was measured\n"
        )
    assert call("check", path, "--run-dir", tmp_path / "run").exit_code == 0
    again = json.loads(file.read_text())
    assert again["cells"] == before["cells"]
