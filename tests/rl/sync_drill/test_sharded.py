# The drill of a trainer that FSDP2 shards over gloo processes: every fault by its name on two
# processes, the same result on each, and every bit of every shard back.
#
# tests/slow/test_sharded.py has four processes, tensor parallelism, types, and kills.

import copy
from itertools import pairwise
from math import prod
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp")

from servanda.errors import MeasurementError  # noqa: E402
from servanda.rl.sync_drill.drill import preflight  # noqa: E402
from servanda.rl.sync_drill.noise import Sums, noise  # noqa: E402
from servanda.rl.sync_drill.parallel.shards import Place, place_of  # noqa: E402
from servanda.rl.sync_drill.parallel.zero3 import FlatPlace  # noqa: E402
from servanda.rl.sync_drill.trainee import Trainee, forward_logprobs  # noqa: E402
from tests.rl import sharded_faults  # noqa: E402
from tests.rl.sync_drill.toys import Toy  # noqa: E402

QUICK = ("healthy", "one_shard", "late")


def same_on_all(ranks):
    """The result that all ranks agree on, after a look at the bits."""
    assert all(bits for _, bits in ranks)
    results = [result for result, _ in ranks]
    assert {repr(result) for result in results} == {repr(results[0])}
    return results[0]


@pytest.fixture(scope="module")
def two():
    return sharded_faults.processes(2, sharded_faults.drill, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_fault_of_a_sharded_trainer_has_its_name_on_every_rank(two, name):
    result = same_on_all([rank[name] for rank in two])

    assert result.cause == sharded_faults.FAULTS[name].cause, str(result)
    assert result.outcome == ("violated" if result.cause else "holds"), str(result)


@pytest.mark.slow
def test_the_rank_whose_shards_are_not_sent_is_named(two):
    result = two[0]["one_shard"][0]

    assert result.sentence.startswith("the shards of some ranks never reach the engine: shard of")
    assert {group.lost for group in result.groups} == {("shard of rank 1",)}


def test_a_shard_gets_its_part_of_the_noise_of_the_whole():
    """By rows, by columns, by both, with a gap, and with nothing at all."""
    whole = torch.zeros(23, 8)
    places = [
        (torch.arange(12, 23), None),
        (None, torch.arange(3, 5)),
        (torch.tensor([0, 1, 6, 7]), torch.arange(0, 4)),
        (torch.arange(0), None),
    ]
    full = noise(whole, Place((23, 8), (None, None)), "key")

    for rows, columns in places:
        place = Place((23, 8), (rows, columns))
        part = noise(torch.zeros(place.sizes()), place, "key")
        expected = full if rows is None else full[rows]
        assert torch.equal(part, expected if columns is None else expected[:, columns])


@given(
    st.sampled_from([(23, 8), (5,), (3, 4, 6), (1, 7)]),
    st.integers(1, 9),
    st.lists(st.integers(0, 23), min_size=2, max_size=2).map(sorted),
)
def test_flat_parts_have_the_noise_and_the_rows_of_the_whole(shape, ranks, span):
    """As ZeRO-3 cuts: in equal parts of the flattened tensor; the last may have nothing."""
    low, high = (min(end, shape[0]) for end in span)
    whole = torch.arange(float(prod(shape))).reshape(shape)
    full = noise(whole, Place(shape, (None,) * len(shape)), "key")
    size = -(-whole.numel() // ranks)
    ends = [min(rank * size, whole.numel()) for rank in range(ranks + 1)]
    noises, rows, tail = [], [], []
    for first, stop in pairwise(ends):
        place, part = FlatPlace(shape, first, stop), whole.reshape(-1)[first:stop]
        noises.append(noise(part, place, "key"))
        rows.append(part[place.rows(low, high)])
        tail.append(part[place.rows(low, None)])

    assert torch.equal(torch.cat(noises).reshape(shape), full)
    assert torch.equal(torch.cat(rows), whole[low:high].reshape(-1))
    assert torch.equal(torch.cat(tail), whole[low:].reshape(-1))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ds_secondary_tensor": torch.zeros(2)}, "w has second or quantised parts (ZeRO++)"),
        ({"scale": 2.0}, "w has second or quantised parts (ZeRO++)"),
        ({"place": "nvme"}, "w is offloaded to a disk"),
    ],
)
def test_parts_that_are_not_the_only_ones_are_refused(changes, problem):
    changes = {"ds_secondary_tensor": None, "scale": None, "place": "none", **changes}
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.ds_tensor = torch.zeros(2)
    parameter.ds_tensor.final_location = SimpleNamespace(value=changes["place"])
    if changes["scale"]:
        parameter.ds_tensor.ds_quant_scale = changes["scale"]
    parameter.ds_secondary_tensor = changes["ds_secondary_tensor"]
    with pytest.raises(MeasurementError) as caught:
        place_of("w", parameter)
    assert problem in str(caught.value)
    assert "zero_hpz_partition_size" in caught.value.problems[0].hint


def test_the_noise_is_standard_and_its_own_for_each_key():
    """Mean 0, spread 1, within four standard errors of 200,000 values; no correlation of keys."""
    count = 200_000
    a, b = (noise(torch.zeros(count), Place((count,), (None,)), key) for key in ("a", "b"))

    assert abs(float(a.mean())) < 4 * count**-0.5
    assert abs(float(a.var()) - 1) < 4 * (2 / count) ** 0.5
    assert abs(float((a * b).mean())) < 4 * count**-0.5
    assert abs(float((a[1:] * a[:-1]).mean())) < 4 * count**-0.5
    assert float(a.abs().max()) < 3.5


def test_sums_of_shards_are_those_of_the_whole():
    tensor = torch.randn(23, 5, generator=torch.Generator().manual_seed(0))
    tensor[3, 2] = float("nan")
    parts = [Sums.of(part) for part in tensor.chunk(4)]

    added = parts[0].plus(parts[1]).plus(parts[2]).plus(parts[3])

    assert added.moments((23, 5)) == pytest.approx(Sums.of(tensor).moments((23, 5)), rel=1e-12)
    assert added.count == 23 * 5 - 1


def test_rows_of_the_whole_are_found_in_a_shard():
    place = Place((23, 8), (torch.arange(12, 23), None))

    assert place.rows(0, 12) == slice(0, 0) and place.rows(11, 14) == slice(0, 2)
    assert place.rows(20, None) == slice(8, 11)


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
def test_one_expert_of_forty_is_named_though_experts_are_bundled(stacked):
    module = Toy()
    module.layers[0].mlp = sharded_faults.Experts(stacked, 40).double()
    engine = copy.deepcopy(module).eval()

    def sync():
        mine = dict(engine.named_parameters())
        old = {name: tensor.detach().clone() for name, tensor in mine.items()}
        with torch.no_grad():
            for name, tensor in module.named_parameters():
                mine[name].copy_(old[name] if ".experts.17." in name else tensor)
                if name.endswith("experts.up_proj"):
                    mine[name][17] = old[name][17]

    trainee = Trainee(module, sync, lambda rows: forward_logprobs(engine, rows))
    result = preflight(trainee)

    assert result.cause == "experts_stale", str(result)
    (wrong,) = (group for group in result.groups if group.mark == "violated")
    assert wrong.lost == (("expert 17",) if stacked else ("mlp.experts.17",))


def test_a_whole_module_is_no_sharded_trainer():
    with pytest.raises(MeasurementError, match="there is no process group"):
        Trainee.from_fsdp(Toy(), lambda: None, lambda rows: rows)
