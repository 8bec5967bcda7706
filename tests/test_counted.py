# Numbers on the first pages are counted, not remembered: `python -m scripts.counted` writes them.

import pytest
from scripts import counted

PAGES = sorted({*counted.FIRST, *counted.DOCS.rglob("*.md")})


def named(page):
    return str(page.relative_to(counted.ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_has_the_numbers_of_today(page):
    text = page.read_text(encoding="utf-8")
    assert counted.written(text) == text, "run `python -m scripts.counted`"


@pytest.mark.parametrize("page", counted.FIRST, ids=named)
def test_every_number_of_a_first_page_is_counted(page):
    assert [*counted.uncounted(page.read_text(encoding="utf-8"))] == []


def test_a_number_that_is_wrong_or_not_counted_is_found():
    assert counted.written("16<!-- dump.steps --> and 7<!-- dump.steps -->").endswith(
        " 16<!-- dump.steps -->"
    )
    assert counted.written("Seven<!-- faults.all --> faults").startswith("Eight<")
    assert [*counted.uncounted("We catch 49 of them.")] == [(1, "We catch 49 of them.")]
