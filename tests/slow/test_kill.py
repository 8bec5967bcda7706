# Kill -9 at 50 random moments of a measurement, resume: the evidence is bit-identical.

import pytest

from tests.runner.test_resume import kill_and_resume

KILLS = 50


@pytest.mark.slow
def test_fifty_kills_leave_no_trace_in_the_evidence(tmp_path):
    kill_and_resume(tmp_path, KILLS, seed=11)
