# The drill on real kernels, a float32 trainer and a bfloat16 engine: each fault by its name.
#
# tests/slow/test_preflight.py does the same on two architectures and quantised engines.

import pytest

pytest.importorskip("torch")

from servanda.engines.faults.sync import SYNC_FAULTS
from servanda.rl.sync_drill.diagnosis import CAUSES
from servanda.rl.sync_drill.vocabulary import drawn
from tests.rl.sync_drill.drills import CALLED, OF_ADAPTERS, Drill, drilled, named
from tests.trainers import adapt, trainer

# few tokens, as the default suite has no time for 640
TOKENS = drawn(1024, [], 6, 25, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", ["", "fresh"])
def test_a_sync_that_works_is_found_to_work(adapters):
    result = drilled("llama", "bfloat16", adapters=adapters, tokens=TOKENS)

    assert (result.outcome, result.cause, result.exit_code) == ("holds", "", 0), str(result)
    assert {group.mark for group in result.groups} == {"holds"}
    assert result.warnings == ()
    assert result.returned == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*SYNC_FAULTS])
def test_each_fault_is_named_with_what_it_leaves_behind(fault):
    drill = Drill("qwen3", "bfloat16", fault, "fresh" if fault in OF_ADAPTERS else "")

    result = drilled(*drill, tokens=TOKENS)

    assert (result.outcome, result.exit_code) == ("violated", 1), str(result)
    assert named(drill, result), str(result)


def test_a_fault_of_a_sync_has_a_cause_of_its_name():
    assert {CALLED.get(fault, fault) for fault in SYNC_FAULTS} <= {*CAUSES}


@pytest.mark.slow
def test_a_fresh_adapter_hides_the_fault_from_who_only_looks():
    """B is 0, so the adapter does nothing yet: the first step of a run looks as it should."""
    result = drilled("qwen3", "float32", "adapter_ignored", adapters="fresh", tokens=TOKENS)

    assert result.cause == "adapter_ignored"
    assert result.found.distance < 1e-4
    b = adapt(trainer("qwen3", moved=0.0)).model.layers[0].self_attn.q_proj.lora_B["default"].weight
    assert not b.any()
