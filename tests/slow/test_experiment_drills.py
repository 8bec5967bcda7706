# The preflight sync tests of docs/explanation/experiment.md, run again.

import pytest

pytest.importorskip("torch")

from benchmarks.experiment.drilled import drilled
from benchmarks.experiment.drills import read_drills


@pytest.mark.slow
@pytest.mark.parametrize("kept", read_drills(), ids=lambda drill: drill.fault)
def test_a_preflight_test_repeats_the_diagnosis_on_the_page(kept):
    again = drilled(kept.fault)

    assert (again.outcome, again.cause, again.deaf) == (kept.outcome, kept.cause, kept.deaf)
    assert (again.syncs, again.restored) == (kept.syncs, True)
    assert again.poison == pytest.approx(kept.poison, rel=0.1)
