# The sync drill: names every fault on two architectures and three engines, and flags no sync
# that works.

from itertools import product

import pytest

from servanda.faults.sync import SYNC_FAULTS
from tests.preflight.drills import drilled, expected, wrong

ARCHITECTURES = ("llama", "qwen3")
ENGINES = ("bfloat16", "int8_weight_only", "int4_g32")
SEEDS = 4


def faults():
    for fault, kind, form in product(SYNC_FAULTS, ARCHITECTURES, ENGINES):
        for adapters in ("fresh", "trained") if fault == "adapter_ignored" else ("",):
            yield pytest.param(fault, kind, form, adapters, id=f"{fault}-{kind}-{form}-{adapters}")


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "kind", "form", "adapters"), faults())
def test_a_fault_is_named_with_what_it_leaves_behind(fault, kind, form, adapters):
    result = drilled(kind, form, fault, adapters=adapters)

    assert (result.outcome, result.cause) == ("violated", fault), str(result)
    assert wrong(result) == expected(kind, fault), str(result)


@pytest.mark.slow
@pytest.mark.parametrize("form", ENGINES)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_of_many_drills_of_a_sync_that_works_none_is_flagged(kind, form):
    """Nine each of six pairs: fifty-four, with other probe tokens and noise."""
    trials = [*product(range(SEEDS), ("", "fresh")), (SEEDS, "trained")]
    assert len(trials) * len(ENGINES) * len(ARCHITECTURES) >= 50

    for seed, adapters in trials:
        result = drilled(kind, form, adapters=adapters, seed=seed)
        assert result.outcome == "holds", str(result)
        assert (result.warnings, wrong(result)) == ((), set()), str(result)
