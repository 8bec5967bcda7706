# `servanda contract test --mutate` on real kernels.

from pathlib import Path

import pytest

from servanda.authoring.mutation.run import mutate
from servanda.runner import run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_real_kernels_pass_without_a_fault_and_not_with_one():
    contract = run.load(EXAMPLES / "tiny-faults.kernelcontract.yaml")

    found = mutate(contract, only="faults", faults=["int4", "lost_top_token", "permuted_ids"])

    assert found.itself.holds and found.own.holds
    assert {f.fault: f.outcome for f in found.faults} == {
        "int4": "violated",
        "permuted_ids": "refused",
        "lost_top_token": "violated",
    }
    assert (found.score, found.exit_code(1.0)) == (1.0, 0)
