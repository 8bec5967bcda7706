# The page of disagreements is the one of its record, and the record has all of it: each finding its
# repro, each difference of the survey its explanation.  tests/real/test_found.py runs the repros.

import copy
import re

import pytest
from benchmarks.hunt import page
from benchmarks.hunt.findings import FINDING, HERE, known

RECORD = page.recorded()
DIFFERENT = [
    (part, name, way)
    for part, report in RECORD["survey"].items()
    for name, row in report["rows"].items()
    for way in row["differ"]
]


def test_the_page_shows_the_record():
    assert page.page(RECORD) == page.PAGE.read_text(encoding="utf-8"), "make hunt"


def test_each_repro_is_a_finding_and_each_finding_has_a_repro():
    names = [finding.name for finding in known()]

    assert sorted(names) == sorted(path.stem for path in (HERE / "repro").glob("*.py"))
    assert sorted(names) == sorted(RECORD["repros"])


@pytest.mark.parametrize("finding", known(), ids=lambda finding: finding.name)
def test_a_repro_shows_a_difference_with_the_library_alone(finding):
    printed = RECORD["repros"][finding.name]["printed"]
    text = finding.repro.read_text(encoding="utf-8")
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))

    same = len({value for _, value in printed}) == 1
    assert same == (finding.verdict != FINDING), printed
    assert imported <= {"torch", "transformers", "vllm", "peft", "os", "json", "tempfile"}
    assert len(text.splitlines()) <= 32


def test_an_unexplained_difference_stops_the_page():
    record = copy.deepcopy(RECORD)
    record["survey"]["ways"]["rows"]["llama"]["differ"]["decode"] = 0.2

    with pytest.raises(ValueError, match=r"does not explain ways, llama, decode: 0\.2"):
        page.page(record)


def test_every_explanation_explains_a_case():
    used = [page.explained(*case) for case in DIFFERENT]

    for entry in page.entries():
        assert entry in used, entry


def test_every_difference_that_is_a_finding_names_one():
    names = {finding.name for finding in known()}

    for entry in page.entries():
        assert ("of" in entry) != ("why" in entry)
        assert entry.get("of", "falcon_alibi") in names
