# Passive follow on training runs: real engines, broken syncs, parts of the
# weights.  A minute on an idle core.

import pytest

pytest.importorskip("torch")

from tests.rl.follow_faults import BROKEN, CAUSES, followed, kept

pytestmark = pytest.mark.slow
RUNS = [(run, fault) for run in BROKEN for fault in run.faults]


@pytest.mark.parametrize(("run", "fault"), RUNS, ids=[f"{r.kind}-{r.seed}-{f}" for r, f in RUNS])
@pytest.mark.parametrize("parts", ["", "violated", "always"])
def test_a_broken_sync_gets_its_own_name_or_none(run, fault, parts):
    steps = followed(kept(run), fault, parts=parts)

    assert {s.cause for s in steps} <= {"", "undecided", "unexplained", CAUSES[fault]}
    if (fault, parts, run.kind) == ("one_mlp", "always", "qwen3"):
        assert (steps[-1].cause, steps[-1].worst.detail) == ("part", "layers.1.mlp")
    if fault == "adapter_scaled":
        assert steps[-1].cause == "scaled" and steps[-1].interval[0] < 2 < steps[-1].interval[1]


@pytest.mark.parametrize("run", BROKEN, ids=[f"{run.kind}-{run.seed}" for run in BROKEN])
@pytest.mark.parametrize("parts", ["", "always"])
def test_the_engine_that_follows_beside_them_is_never_violated(run, parts):
    steps = followed(kept(run), parts=parts)

    assert not any(step.outcome == "violated" for step in steps)
