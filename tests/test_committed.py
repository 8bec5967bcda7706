# Every number of a page that a script wrote is the one that the script kept.
#
# Pages that are held elsewhere: experiment.md (tests/experiment), accuracy.md (tests/divergence),
# faults.md (tests/faults), found.md (tests/test_found.py), the reference pages
# (tests/test_docs.py).

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest
from benchmarks import causes, committed, sync_matrix, sync_matrix_page, truth
from benchmarks.hunt import page as found
from benchmarks.theory import report
from hypothesis import given
from hypothesis import strategies as st

DOCS = committed.ROOT / "docs"
BLOCKS = sorted(
    set(committed.KEPT.glob("*.json"))
    - {truth.MEASURED, sync_matrix.KEPT, causes.MEASURED, causes.UNSEEN}
    - {found.RECORD, committed.KEPT / "theory.json"}
)
# pages whose numbers a person copied from what the command printed, which the page names
BY_HAND = {"binning.md": "benchmarks.monitor", "monitor.md": "benchmarks.monitor"}


@pytest.mark.parametrize("path", BLOCKS, ids=lambda path: path.stem)
def test_a_page_shows_what_was_measured(path):
    told = json.loads(path.read_text(encoding="utf-8"))
    page = committed.ROOT / told["page"]

    text = page.read_text(encoding="utf-8")

    assert committed.placed(text, told) == text, f"measured by {told['command']}"


def test_every_pair_of_markers_on_a_page_is_held():
    marked = {
        (page.relative_to(committed.ROOT).as_posix(), begin)
        for page in DOCS.rglob("*.md")
        for begin in re.findall(r"^<!-- (?!end|/|written by)[^>]* -->$", page.read_text(), re.M)
    }
    held = {(told["page"], told["begin"]) for told in map(_read, BLOCKS)}

    assert marked == held


def test_a_command_that_a_page_or_a_record_names_is_in_the_repository():
    """Or it says in which revision it was."""
    made = set(re.findall(r"^([a-z0-9-]+):", (committed.ROOT / "Makefile").read_text(), re.M))
    texts = [(path, _read(path)["command"]) for path in BLOCKS]
    texts += [(page, page.read_text(encoding="utf-8")) for page in DOCS.rglob("*.md")]

    for path, text in texts:
        for module in re.findall(r"python -m (benchmarks[\w.]*)", text):
            assert importlib.util.find_spec(module.rstrip(".")), (path, module)
        for target in re.findall(r"(?:^|`)make ([a-z0-9-]+)", text, re.M):
            assert target in made, (path, target)
    for told in map(_read, BLOCKS):
        assert re.match(r"python -m |make |benchmarks/[\w./]+ of revision ", told["command"])


def _read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_how_often_verdicts_are_wrong_is_what_was_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(truth, "RECORDS", tmp_path)  # nothing newer of this machine

    assert truth.page(truth.recorded()) == truth.DOCS.read_text(encoding="utf-8"), "make truth"


def test_the_table_of_causes_is_what_was_found():
    found = json.loads(causes.MEASURED.read_text(encoding="utf-8"))

    new = json.loads(causes.UNSEEN.read_text(encoding="utf-8"))
    page = causes.PAGE.read_text(encoding="utf-8")
    assert causes.page(found, new) == page, "python -m benchmarks.causes --write"


def test_the_matrix_of_sync_faults_is_what_was_found():
    found = sync_matrix.rows()

    page = sync_matrix_page.DOCS.read_text(encoding="utf-8")
    assert sync_matrix_page.page(found) == page, "python -m benchmarks.sync_matrix --write"
    for row in found:
        assert row["named"] == sync_matrix.judged(row), row
        missed = (row["setting"], row["fault"]) == ("follow, differences", "tied alias")
        if row["setting"] != "unseen":  # whose misses stay
            assert missed == (row["named"] in ("passed", "alarm")), row
        assert row.get("bits", True), row


def test_a_row_of_the_matrix_is_right_only_with_the_right_name():
    def judged(expected, outcome, cause):
        return sync_matrix.judged({"expected": expected, "outcome": outcome, "cause": cause})

    assert judged([""], "holds", "") == judged(["late"], "violated", "late") == "right"
    assert judged([""], "violated", "late") == judged([""], "error", "") == "alarm"
    assert judged([""], "inconclusive", "") == "undecided"
    assert judged(["late"], "holds", "") == "passed"
    assert judged(["late"], "violated", "unfaithful") == "unexplained"
    assert judged(["error"], "error", "") == "unexplained"
    assert judged(["late"], "inconclusive", "") == "undecided"
    assert judged(["late"], "violated", "dropped") == "wrong"


def test_a_number_that_is_copied_by_hand_is_said_to_be():
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        if "copied by hand from" in text:
            assert f"python -m {BY_HAND[page.name]}" in text, page
    for name in BY_HAND:
        (page,) = DOCS.rglob(name)
        assert "copied by hand from" in page.read_text(encoding="utf-8"), name


cells = st.text("ab1|. -", min_size=1).map(str.strip).filter(lambda c: c and "|" not in c)


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["## Head", "a\n\nb", "\n"]),
            st.integers(1, 4).flatmap(
                lambda n: st.lists(st.lists(cells, min_size=n, max_size=n), min_size=1, max_size=4)
            ),
        ),
        min_size=1,
    )
)
def test_a_text_and_its_tables_are_kept_whole(parts):
    lines = []
    for part in parts:
        if isinstance(part, str):
            lines.append(part)
        else:
            head, *rest = (f"| {' | '.join(row)} |" for row in part)
            lines += [head, "|---" * len(part[0]) + "|", *rest, ""]
    text = "\n".join(lines)

    assert committed.text_of(committed.blocks(text)).split() == text.split()


def test_a_cell_that_is_changed_on_a_page_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(committed, "ROOT", tmp_path)
    monkeypatch.setattr(committed, "KEPT", tmp_path / "measured")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{committed.BEGIN}\n{committed.END}\nafter\n")

    committed.write(page, "| a | b |\n|---|---|\n| 1 | 2 |", "make it")

    (kept,) = (tmp_path / "measured").iterdir()
    told = json.loads(Path(kept).read_text())
    assert told["blocks"][0]["rows"] == [["a", "b"], ["1", "2"]]
    assert committed.placed(page.read_text(), told) == page.read_text()
    changed = page.read_text().replace("| 2 |", "| 3 |")
    assert committed.placed(changed, told) != changed
    with pytest.raises(ValueError):
        committed.placed("no marker", told)


def test_what_was_tried_against_the_theorems_is_what_was_counted():
    told = json.loads((committed.KEPT / "theory.json").read_text(encoding="utf-8"))

    def each(kind, rows):
        names = {field.name for field in dataclasses.fields(kind)}
        return tuple(kind(**{k: v for k, v in row.items() if k in names}) for row in rows)

    found = report.Findings(
        each(report.Tightness, told["theorems"]),
        each(report.Row, told["procedures"]),
        *(told[name] for name in ("cases", "runs", "seed")),
    )

    page = DOCS / "explanation" / "falsification.md"
    assert page.read_text(encoding="utf-8").strip() == report.markdown(found).strip(), "make theory"
