# The one printer of tables: cells stand in columns of a terminal, whatever script they are in.

from hypothesis import given
from hypothesis import strategies as st

from servanda.report.table import cut, table, width

CELLS = st.text(alphabet="ab \u00e9\u540d\u524d\u0301", max_size=12).map(str.strip)
ROWS = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=5)
)


@given(ROWS, st.sets(st.integers(0, 3)))
def test_every_cell_stands_in_its_column_and_nothing_is_lost(rows, right):
    lines = table([[*row, "|"] for row in rows], right=right)
    assert len({width(line) for line in lines}) == 1
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    for line, row in zip(lines, rows, strict=True):
        assert line.replace(" ", "") == "".join([*row, "|"]).replace(" ", "")
        assert width(line) == sum(widths) + 2 * len(row) + 1


@given(CELLS, st.integers(1, 12))
def test_what_is_cut_fits_and_says_that_it_was_cut(text, widest):
    short = cut(text, widest)
    assert width(short) <= widest
    assert short == " ".join(text.split()) or short.endswith("\u2026")


def test_the_last_cell_is_whole_for_nothing_follows_it():
    assert table([["a" * 9, "b" * 9]], widest=4) == ["aaa\u2026  bbbbbbbbb"]
