# The name of a fault: where two are seen at once, the one that explains the whole.

from dataclasses import replace

import pytest

from servanda.rl.sync_drill.diagnosis import cause_of
from servanda.rl.sync_drill.result import Baseline, PoisonResult, Response, Scale

HALF = Scale("all tensors", 0.5, 0.49, 0.51)
SOUND = Baseline(
    distance=0.01, idle=0.01, moved=0.0, engine_noise=1e-4, train_noise=1e-4, floor=0.01
)
DAMAGED = replace(SOUND, idle=0.5, moved=0.5)  # by a sync of unchanged weights
CLEAR = PoisonResult(distance=0.01, moved=3.0, follow=1.0, limit=0.1, mark="holds")


def group(name, follow=1.0, **more):
    fields = {"kind": "mlp", "layer": int(name[7]), "residual": 0.0, "moved": 12.0, "block": name}
    return Response(name, follow=follow, spread=0.01, size=1.0, **{**fields, **more})


SCALED = [group(f"layers.{i}.mlp", 0.5, scale=HALF) for i in range(2)]
FOLLOWING = [group(f"layers.{i}.mlp") for i in range(2)]


@pytest.mark.parametrize(
    ("found", "groups", "cause"),
    [
        (SOUND, FOLLOWING, ""),
        (SOUND, SCALED, "scaled"),
        (replace(SOUND, scale=HALF), FOLLOWING, "scaled"),
        # a sync that takes unchanged weights far away is wrong before any factor is
        (DAMAGED, SCALED, "sync_moves"),
        (DAMAGED, FOLLOWING, "sync_moves"),
        (replace(DAMAGED, scale=HALF), FOLLOWING, "scaled"),  # the factor explains that, too
        (replace(DAMAGED, cast="float8"), FOLLOWING, "wrong_cast"),
        # beside a group that is neither right nor clearly wrong, all that is known comes late
        (SOUND, [group("layers.0.mlp", 0.1, late=1), group("layers.1.mlp", 0.6)], "late"),
        (SOUND, [group("layers.0.mlp", 0.1, late=1), group("layers.1.mlp", 1.0)], "dropped"),
        # one group that no factor explains, and nothing else: what is wrong has no name
        (SOUND, [SCALED[0], group("layers.1.mlp", 0.4, residual=9.0)], "unfaithful"),
    ],
)
def test_the_cause_is_the_one_that_explains_all_that_was_seen(found, groups, cause):
    assert cause_of(found, CLEAR, groups, adapted=False, layers=2, back=True) == cause


@pytest.mark.parametrize(("stopped", "cause"), [(False, "not_repaired"), (True, "dropped")])
def test_what_a_further_sync_of_all_does_not_repair_was_lost_on_the_way(stopped, cause):
    groups = [group("layers.0.mlp", 0.4, residual=9.0), group("layers.1.mlp", 0.0, stopped=stopped)]
    assert cause_of(SOUND, CLEAR, groups, adapted=False, layers=2, back=False) == cause
