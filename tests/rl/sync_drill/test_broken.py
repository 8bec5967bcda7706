# Whatever is wrong with a sync is found, is called what it is, and leaves the weights as they were.

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from servanda.rl.sync_drill.drill import preflight  # noqa: E402
from servanda.rl.sync_drill.held_weights import seen_shares  # noqa: E402
from servanda.rl.sync_drill.plan import planned  # noqa: E402
from servanda.rl.sync_drill.sides import Sides  # noqa: E402
from servanda.rl.sync_drill.signals import TimeLimit  # noqa: E402
from servanda.rl.sync_drill.trainee import Trainee, probes  # noqa: E402
from servanda.rl.sync_drill.weight_snapshot import Weights  # noqa: E402
from servanda.runner.measurement import unwatched  # noqa: E402
from tests.rl.served_weights import small_model  # noqa: E402
from tests.rl.sync_drill.broken import (  # noqa: E402
    Copies,
    differences,
    late,
    load,
    swapped,
    times,
    trainee,
    transposed,
    unless,
    without,
    without_columns,
    without_rows,
)
from tests.rl.sync_drill.toys import bits  # noqa: E402

ALL = {
    *("embed/lm_head", "norms.norm", "layers.0.attn", "layers.1.attn"),
    *("layers.0.mlp", "layers.1.mlp"),
}
Q = "model.layers.0.self_attn.q_proj.weight"
EVERY_SECOND = ("0.norm", "0.mlp.0.weight", "0.mlp.2.weight", "1.attn", "1.mlp.0.b", "1.mlp.2.b")

# a sync that is broken -> its cause, the groups that are wrong, the parts that are lost
LOST = {
    "one norm": (without("layers.1.norm"), "deaf", {"norms.norm"}, {"layers.1"}),
    "a class of norms": (without("norm"), "norms_stale", {"norms.norm"}, set()),
    "a bias": (without("layers.0.mlp.0.bias"), "deaf", {"layers.0.mlp"}, {"mlp.0.bias"}),
    "every second tensor": (
        without(*EVERY_SECOND),
        "deaf",
        {"norms.norm", "layers.0.mlp", "layers.1.attn", "layers.1.mlp"},
        {"layers.0", "mlp.0", "mlp.2", "mlp.0.bias", "mlp.2.bias"},
    ),
    "the last row": (without_rows(22, 23), "rows_stale", {"embed/lm_head"}, {"row 22"}),
    "the first rows": (without_rows(0, 2), "rows_stale", {"embed/lm_head"}, {"row 0", "row 1"}),
}
OTHERS = {
    "late": (late(""), {}, "late", ALL),
    "two late": (late("", ago=2), {}, "late", ALL),
    "norms late": (late("norm"), {}, "dropped", {"embed/lm_head", "norms.norm", "layers.0.attn"}),
    "even ones dropped": (unless(lambda n: n % 2 == 0), {}, "dropped", ALL - {"norms.norm"}),
    "odd ones dropped": (unless(lambda n: n % 2 == 1), {}, "dropped", ALL - {"norms.norm"}),
    "it stops": (unless(lambda n: n > 6), {}, "stopped", {"layers.1.attn", "layers.1.mlp"}),
    "the last one is dropped": (unless(lambda n: n == 13), {}, "dropped", set()),
    "one of few values is dropped": (unless(lambda n: n == 11), {}, "dropped", set()),
    "one replica of two": (lambda e: load(e, only=[0]), {"replicas": 2}, "stale_replicas", ALL),
    "one of three": (lambda e: load(e, only=[0, 2]), {"replicas": 3}, "stale_replicas", ALL),
    "one of two by call": (
        *(lambda e: load(e, only=[0]), {"replicas": 2, "by_call": True}),
        *("stale_replicas", ALL),
    ),
    "one of eight by call": (
        *(lambda e: load(e, only=range(7)), {"replicas": 8, "by_call": True}),
        *("stale_replicas", {"layers.0.attn"}),
    ),
}
MOVED = {
    "two tensors swapped": swapped("layers.0.attn.weight", "layers.1.attn.weight"),
    "two of one layer": swapped("layers.0.mlp.0.weight", "layers.0.mlp.2.weight"),
    "a square one transposed": transposed("layers.0.attn.weight"),
}


def wrong(result):
    return {group.name for group in result.groups if group.mark == "violated"}


def drilled(take, **options):
    """What a drill says of a sync; its weights are back, and it took no more syncs than it said."""
    drill, engine = trainee(take, **options)
    before, most = bits(drill.module), planned(drill).most
    result = preflight(drill)
    assert bits(drill.module) == before
    assert result.syncs == engine.syncs <= most
    return result


@pytest.mark.parametrize("fault", LOST)
def test_what_is_lost_is_named_to_the_tensor(fault):
    take, cause, groups, lost = LOST[fault]

    result = drilled(take)

    assert (result.outcome, result.exit_code, result.cause) == ("violated", 1, cause), str(result)
    assert wrong(result) == groups
    assert {name for group in result.groups for name in group.lost} == lost
    assert result.back and "At equal weights no metric shows this fault" in str(result)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", OTHERS)
def test_weights_that_arrive_late_or_in_part_are_not_called_lost(fault):
    take, options, cause, groups = OTHERS[fault]

    result = drilled(take, **options)

    assert (result.outcome, result.exit_code, result.cause) == ("violated", 1, cause), str(result)
    assert wrong(result) == groups
    assert "never reaches the engine" not in str(result)


def test_how_late_is_said_and_the_engine_is_as_it_was_all_the_same():
    result = drilled(late("", ago=2))

    assert result.poison.late == 2 and {group.late for group in result.groups} == {2}
    assert "(2 syncs later)" in result.sentence
    assert result.back and result.returned == 0 and result.back_late == 2


@pytest.mark.parametrize(
    ("factor", "part", "name"),
    [(0.9, "mlp.2.weight", "mlp.2.weight"), (1.05, "layers.0.attn", "layers.0.attn")],
)
def test_a_factor_is_told_with_its_interval(factor, part, name):
    result = drilled(times(factor, part))

    assert (result.exit_code, result.cause) == (1, "scaled"), str(result)
    scale = result.found.scale
    assert name in scale.tensors and scale.factor == pytest.approx(factor, rel=1e-3)
    assert f"times {factor:.3g} [" in result.sentence
    assert "At equal weights" not in str(result)  # it does show


@pytest.mark.slow
@pytest.mark.parametrize("fault", MOVED)
def test_a_sync_that_moves_the_engine_at_equal_weights_says_so_and_names_no_tensor(fault):
    result = drilled(MOVED[fault])

    assert (result.exit_code, result.cause) == (1, "sync_moves"), str(result)
    assert f"0 before, {result.found.idle:.2g} nats after" in result.sentence
    assert not any(group.scale or group.lost for group in result.groups)
    assert "next     read back one tensor of each kind" in str(result)
    assert "At equal weights" not in str(result)


@pytest.mark.parametrize(
    "take",
    [transposed(Q), pytest.param(swapped(Q, Q.replace("0", "1")), marks=pytest.mark.slow)],
)
def test_a_large_difference_at_equal_weights_is_no_dropped_sync(take):
    """So large that random weights stay within the limit, though they have little effect."""
    module = small_model()
    engine = Copies(module, take)
    result = preflight(Trainee(module, engine.sync, engine.score))

    assert (result.exit_code, result.cause) == (1, "sync_moves"), str(result)
    assert result.poison.distance < result.poison.limit and not result.poison.late


def test_what_no_fault_explains_is_called_unexplained_with_what_was_measured():
    """Noise of its own on one tensor, as a sync of other weights has it."""
    noise = torch.Generator().manual_seed(0)

    def take(engine):
        name, count = "layers.0.attn.weight", engine.syncs
        shaken = lambda w: w[name].add_(torch.randn(8, 8, generator=noise), alpha=(count > 1) / 2)  # noqa: E731
        load(engine, shaken)

    result = drilled(take)

    assert (result.exit_code, result.cause) == (1, "unfaithful"), str(result)
    assert "unexplained: " in str(result) and "next     " in str(result)


def test_an_engine_that_keeps_weights_of_the_drill_is_a_violation_that_says_so():
    result = drilled(unless(lambda n: n >= 13))

    assert (result.outcome, result.exit_code, result.cause) == ("violated", 1, "not_returned")
    assert not result.back and result.returned > 0
    assert "ENGINE NOT AS BEFORE" in str(result) and "engine not as before" in str(result)


@pytest.mark.parametrize("low", [0, 2, 6])
@pytest.mark.parametrize("left_out", [without_rows, without_columns])
def test_a_quarter_of_a_matrix_that_never_arrives_is_named(left_out, low):
    name = "layers.1.attn.weight"

    result = drilled(left_out(low, low + 2, name))

    assert result.cause == "share_stale"
    what = "rows" if left_out is without_rows else "columns"
    assert f"{name}, {what} {low}-{low + 1} of 8" in result.sentence


def test_the_smallest_share_that_is_seen_is_told_and_its_loss_is_a_violation():
    shares = drilled(load).poison.shares

    assert {name.removeprefix("layers.0.").removeprefix("layers.1.") for name in shares} == {
        name.removeprefix("layers.0.") for name in trainee(load)[0].module.state_dict()
        if name.startswith("layers.0.") and name.endswith("weight") and "norm" not in name
    }  # fmt: skip
    for name, share in shares.items():
        rows = trainee(load)[0].module.state_dict()[name].shape[0]
        assert share < 1
        assert drilled(without_rows(0, int(share * rows), name)).outcome == "violated", name


def test_a_share_is_told_as_what_it_moves_against_the_limit():
    drill, _ = trainee(load)
    weights = Weights(drill.module)
    sides = Sides(drill, probes(drill, 0), 1, unwatched, TimeLimit(None))
    weights.poison()
    there_N = sides.train()

    every = seen_shares(weights, sides, there_N, 0.0)
    none = seen_shares(weights, sides, there_N, np.inf)

    assert {*every.values()} == {1 / 8} and {*none.values()} == {1.0}
    assert np.array_equal(sides.train(), there_N)


@pytest.mark.parametrize("off", [0, 1])
def test_an_update_of_few_values_that_is_written_elsewhere_is_found(off):
    take = differences(place=lambda k, share: k + off * (share < 0.1))

    result = drilled(take, layers=8)

    assert result.cause == ("sparse_updates" if off else "")
    assert [update.mark for update in result.updates] == ["violated"] if off else ["holds"] * 3
    assert ("0.5 % of the values" in result.sentence) == bool(off)
    if not off:
        assert result.sentence.endswith("synced, and updates of 0.5, 1, 5 % of the values")


def test_two_copies_that_answer_by_turns_are_no_noise():
    """One replica has other weights from the start: the engine differs from itself."""
    drill, engine = trainee(load, replicas=2, by_call=True)
    old = engine.models[1].state_dict()
    with torch.no_grad():
        for tensor in old.values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    engine.take = lambda e: load(e, only=[0])

    result = preflight(drill)

    assert result.found.mixed and result.cause == "stale_replicas", str(result)


@pytest.mark.parametrize("seed", range(3))
def test_heavy_tails_of_a_sync_that_works_are_no_alarm(seed):
    """Rounding of one token in fifty is ten times that of the others, and is another one for
    other weights: the largest of 640 is twenty times the mean."""
    drill, engine = trainee(load)
    names = np.random.default_rng(seed)

    def score(rows):
        found = []
        for row, logp_T in zip(rows, engine.score(rows), strict=True):
            bits_of = np.frombuffer(np.ascontiguousarray(logp_T).tobytes(), np.uint64)
            rng = np.random.default_rng([seed, int(bits_of.sum() % 2**32), len(row)])
            tail = np.where(rng.random(logp_T.size) < 0.02, 10, 1)
            found.append(np.minimum(logp_T + 0.01 * tail * rng.normal(size=logp_T.size), 0))
        return found

    result = preflight(Trainee(drill.module, drill.sync, score), seed=int(names.integers(99)))

    assert (result.outcome, result.warnings) == ("holds", ()), str(result)
    assert {group.mark for group in result.groups} == {"holds"}


def test_probes_hold_the_ends_of_the_vocabulary_and_what_is_not_probed_is_said():
    result = drilled(load)
    assert result.blind_spots == ()

    drill, _ = trainee(load)
    few = Trainee(drill.module, drill.sync, drill.score, tokens=[[1, 2, 3, 4] * 5] * 4)
    (spot,) = [spot for spot in preflight(few).blind_spots if spot.subject == "rows"]
    assert spot.text.startswith("19 vocabulary ids occur in no probe")


def test_a_vocabulary_of_unknown_size_is_said_to_be_one(monkeypatch):
    monkeypatch.setattr("servanda.rl.sync_drill.drill.size_of", lambda _: None)
    (spot,) = [spot for spot in drilled(load).blind_spots if spot.subject == "rows"]
    assert spot.text.startswith("the vocabulary size is unknown")
