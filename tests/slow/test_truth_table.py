# Every row of docs/reference/faults.md, run again: ten to thirty minutes on two cores.

import pytest
from benchmarks import truth_table

from servanda import run
from servanda.drill import drill

ROWS = truth_table.read(truth_table.DOCS.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_fault_ends_as_its_row_says(name):
    row = ROWS[name]

    told = drill(run.load(truth_table.CONTRACT), None if name == truth_table.NONE else name)

    assert (told.outcome, str(told.exit_code)) == (row.verdict, row.exit)
    if told.deciding:
        assert row.first in told.deciding
