# The field's bugs: each row of the page is run, and so is its healthy twin.

import pytest

from tests import frozen
from tests.field import ROWS, page

RUN = [row for row in ROWS if row.case]
FROZEN = frozen.read()["field"]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("row", RUN, ids=[row.name for row in RUN])
def test_a_bug_of_the_field_gets_the_answer_that_the_page_shows(row, tmp_path):
    if {"preflight", "relations"} & {*row.command.split()}:
        pytest.importorskip("torch")
    found = row.case(tmp_path, True)

    assert found.exit == row.exit, found.text
    assert row.says in found.text, found.text
    assert frozen.of_row(found) == FROZEN[row.name]


@pytest.mark.slow
@pytest.mark.parametrize("row", RUN, ids=[row.name for row in RUN])
def test_its_healthy_twin_holds(row, tmp_path):
    if {"preflight", "relations"} & {*row.command.split()}:
        pytest.importorskip("torch")
    found = row.case(tmp_path, False)

    assert found.exit == 0, found.text
    assert row.state != "caught" or row.says not in found.text


def test_the_page_is_written_from_the_rows():
    assert page.PAGE.read_text(encoding="utf-8") == page.written(), "python -m tests.field.page"


def test_a_row_says_what_it_claims():
    """Caught needs a case that is red; anything else says what is missing; no thread twice."""
    for row in ROWS:
        assert row.section in page.SECTIONS, row.name
        assert (row.case is None) == (row.exit is None) == (row.says == ""), row.name
        if row.state == "caught":
            assert row.exit in (1, 4) and not row.missing, row.name
        else:
            assert row.missing, row.name
    names = [row.name for row in ROWS]
    assert len({*names}) == len(names)
    assert {row.name for row in RUN} == {*FROZEN}
