# Syncs that send differences: those that work hold, and what is lost between messages has a name.

import pytest

torch = pytest.importorskip("torch")

from benchmarks.sync_matrix import DELTAS  # noqa: E402

from servanda.errors import MeasurementError  # noqa: E402
from servanda.rl import preflight  # noqa: E402
from tests.rl.delta_syncs import CASES, FAULTS, KINDS, subject  # noqa: E402
from tests.rl.sync_drill.toys import bits  # noqa: E402

SHOWN = {
    "lost apply": "some syncs are dropped",
    "wrong base": "further syncs do not repair it",
    "index off by one": "each value is one place after its own in its tensor",
    "stale seed": "a sync of unchanged weights moves the engine away from the trainer",
    "dtype of the difference": "what changes is rounded to float8_e4m3fn",
}


@pytest.mark.parametrize("kind", ["values", "difference", "low rank"])
def test_a_sync_of_differences_that_works_holds(kind):
    trainee, _ = subject(kind, seed=3)
    before = bits(trainee.module)

    result = preflight(trainee)

    assert (result.outcome, result.back) == ("holds", True), str(result)
    assert bits(trainee.module) == before


@pytest.mark.parametrize("fault", SHOWN)
def test_a_fault_between_messages_has_a_name(fault):
    trainee, _ = subject(FAULTS[fault].kind, fault)
    before = bits(trainee.module)

    result = preflight(trainee)

    assert result.exit_code == 1 and result.cause in FAULTS[fault].causes, str(result)
    assert SHOWN[fault] in result.sentence and "later)" not in result.sentence
    assert bits(trainee.module) == before


def test_numbers_that_are_none_are_refused_with_their_place():
    trainee, _ = subject("difference", "NaN on grouped experts")
    with pytest.raises(MeasurementError, match="the engine gave row 1, token 2 a logprob of nan"):
        preflight(trainee)


def test_each_fault_has_a_kind_that_shows_it():
    assert len(FAULTS) == 14 and {fault for _, fault in CASES} == {*FAULTS}
    assert {kind for kind, _ in CASES} == {*KINDS} == {*DELTAS}
