# The sync drill: names every fault on two architectures and three engines, and flags no sync
# that works.  docs/how-to/preflight.md has numbers of such drills.

import pytest

pytest.importorskip("torch")

from tests.rl.sync_drill.drills import BROKEN, WORKING, drilled, named, wrong
from tests.rl.sync_drill.mixtures import tiny_moe


def clean(result):
    """Whether a drill says nothing against a sync: no error, no warning, nothing unseen."""
    marked = any(group.mark != "holds" for group in result.groups)
    return result.outcome == "holds" and not result.warnings and not marked


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
@pytest.mark.parametrize("layer", range(3))
def test_each_expert_and_each_router_of_a_mixture_is_named_or_listed_as_untested(layer):
    experts = [f"expert {number}" for number in range(16)]
    unnamed = []
    for lost in (*experts, "mlp.gate"):
        (group,) = (result := tiny_moe(layer, lost)).groups
        if result.outcome == "holds":
            assert any(f"{lost} of {group.name}" in spot.text for spot in result.blind_spots)
            unnamed.append(lost)
        else:
            assert result.cause == ("experts_stale" if lost in experts else "deaf"), str(result)
            assert group.lost == (lost,)

    assert len(unnamed) <= 2, unnamed  # of few probe tokens


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("layer", range(3))
def test_a_sync_of_a_mixture_that_works_is_not_flagged(layer, seed):
    result = tiny_moe(layer, seed=seed)

    assert result.outcome == "holds", str(result)
