# The sync drill: names every fault on two architectures and three engines, and flags no sync
# that works.  docs/how-to/preflight.md has the numbers, from benchmarks/preflight.py.

import pytest

pytest.importorskip("torch")

from benchmarks.preflight import clean

from tests.rl.sync_drill.drills import BROKEN, WORKING, drilled, named, wrong
from tests.rl.sync_drill.mixtures import tiny_moe


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


# models/tiny-moe in float32, and an engine in bfloat16 that routes some tokens otherwise


@pytest.mark.slow
@pytest.mark.parametrize("lost", [*(f"expert {e}" for e in range(16)), "mlp.gate"])
@pytest.mark.parametrize("layer", range(3))
def test_each_expert_and_each_router_of_a_mixture_is_named(layer, lost):
    (group,) = (result := tiny_moe(layer, lost)).groups

    assert result.cause == ("deaf" if lost == "mlp.gate" else "experts_stale"), str(result)
    assert group.lost == (lost,)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("layer", range(3))
def test_a_sync_of_a_mixture_that_works_is_not_flagged(layer, seed):
    result = tiny_moe(layer, seed=seed)

    assert result.outcome == "holds", str(result)
