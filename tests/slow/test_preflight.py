# The sync drill: names every fault on two architectures and three engines, and flags no sync
# that works.  docs/how-to/preflight.md has the numbers, from benchmarks/preflight.py.

import pytest

pytest.importorskip("torch")

from benchmarks.preflight import clean

from tests.rl.sync_drill.drills import BROKEN, WORKING, drilled, named, wrong


@pytest.mark.slow
@pytest.mark.parametrize("drill", BROKEN, ids=lambda drill: "-".join(map(str, drill)))
def test_a_fault_is_named_with_what_it_leaves_behind(drill):
    result = drilled(*drill)

    assert (result.outcome, result.exit_code) == ("violated", 1), str(result)
    assert named(drill, result), str(result)


@pytest.mark.slow
@pytest.mark.parametrize("drill", WORKING, ids=lambda drill: "-".join(map(str, drill)))
def test_a_sync_that_works_is_not_flagged(drill):
    result = drilled(*drill)

    assert clean(result), str(result)
    assert wrong(result) == set(), str(result)


def test_more_than_fifty_syncs_that_work_are_drilled():
    assert len({*WORKING}) >= 50
