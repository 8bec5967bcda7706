# The records of docs/reference/faults.md at every default and every value of the field, measured
# again: ten to thirty minutes on two cores.

import pytest
from benchmarks import faults_page, truth_table

from servanda.engines.faults import FAULTS

RECORDS = truth_table.read()
DEFAULTS = [faults_page.at_default(RECORDS, name) for name in truth_table.NAMES]
MET = [faults_page.at_field(RECORDS, name) for name in FAULTS]


@pytest.mark.slow
@pytest.mark.parametrize("key", dict.fromkeys(r.key for r in DEFAULTS + MET if r), ids="-".join)
def test_a_fault_ends_as_its_record_says(key):
    record = RECORDS[key]

    told = truth_table.measured(record.fault, record.value)

    assert (told.outcome, told.exit) == (record.outcome, record.exit)
    assert told.deciding[:1] == record.deciding[:1]
