# The drill of sharded trainers beyond the default suite: all faults on two and four processes,
# other shardings and types, errors and signals on one rank, and kills.

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.fsdp")

from tests.rl import sharded_faults
from tests.rl.sync_drill import sharded_trials
from tests.rl.sync_drill.test_sharded import same_on_all

pytestmark = pytest.mark.slow
WORLDS = (2, 4)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=WORLDS)
def drilled(request):
    return sharded_faults.processes(
        request.param, sharded_faults.drill, [*sharded_faults.FAULTS], limit_s=3600
    )


@pytest.mark.parametrize("name", [*sharded_faults.FAULTS])
def test_each_fault_has_its_name_and_a_sync_that_works_has_none(drilled, name):
    result = same_on_all([rank[name] for rank in drilled])

    assert result.cause == sharded_faults.FAULTS[name].cause, str(result)
    assert result.exit_code == (1 if result.cause else 0), str(result)


@pytest.mark.parametrize("kind", [*sharded_trials.KINDS])
def test_types_adapters_and_shardings_are_clean_or_named(kind):
    clean = same_on_all(sharded_faults.processes(4, sharded_trials.drilled, kind))
    lost = same_on_all(sharded_faults.processes(4, sharded_trials.drilled, kind, "layers.1."))

    assert (clean.outcome, clean.cause) == ("holds", ""), str(clean)
    # of two adapters one is filled in the trainer alone, and the response of the other is no longer
    # linear
    assert lost.cause == ("unfaithful" if kind == "adapters" else "one_layer"), str(lost)


@pytest.mark.parametrize("journal", [False, True])
@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("how", ["raises", "SIGINT", "SIGTERM"])
def test_what_stops_one_rank_stops_all_with_their_weights(tmp_path, how, at, journal):
    path = tmp_path / "j" if journal else None

    ranks = sharded_faults.processes(2, sharded_trials.stopped, 1, how, at, path)

    texts = {text for _, text, _, _ in ranks}
    assert len(texts) == 1 and all(back for _, _, back, _ in ranks)
    (text,) = texts
    restored = "weights restored bit for bit, and synced to the engine once more"
    assert ("no weight was changed" if at == 1 else restored) in text  # the first sync is as found
    if how == "raises":
        assert text.startswith("rank 1: ") and "ValueError: not this time" in text
    else:
        assert "preflight was stopped" in text
    assert [bool(heard) for *_, heard in ranks] == [False, how == "SIGTERM"]
    assert [*tmp_path.iterdir()] == []


def test_a_rank_that_leaves_a_collective_alone_is_waited_for_no_longer_than_the_limit():
    ranks = sharded_faults.processes(2, sharded_trials.stopped, 1, "alone", 3, None, 20.0)

    assert all(back for _, _, back, _ in ranks)
    assert all("rank 1: " in text and "alone in a collective" in text for _, text, _, _ in ranks)
    assert all("the engine may hold perturbed weights" in text for _, text, _, _ in ranks)


def test_a_rank_that_is_killed_leaves_the_others_with_their_weights_and_journals(tmp_path):
    ranks = sharded_faults.processes(
        2, sharded_trials.stopped, 1, "killed", 3, tmp_path / "j", 60.0
    )

    assert ranks[1] is None and ranks[0][0] == "MeasurementError" and ranks[0][2]
    assert "was lost" in ranks[0][1] and "the engine may hold perturbed weights" in ranks[0][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j.0-of-2", "j.1-of-2"]


@pytest.mark.parametrize("world", WORLDS)
def test_after_a_kill_of_all_ranks_each_puts_its_own_journal_back(tmp_path, world):
    path = tmp_path / "j"
    killed = sharded_faults.processes(world, sharded_trials.stopped, None, "killed", 4, path)
    assert killed == [None] * world and len([*tmp_path.iterdir()]) == world

    other = sharded_faults.processes(6 - world, sharded_trials.restored, path)
    assert all("there is no journal" in text for text in other)
    back = sharded_faults.processes(world, sharded_trials.restored, path)

    assert back == [(True, 1, [])] * world and [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("lost", ["", "layers.0.mlp.0.bias"])
def test_a_stream_of_several_ranks_is_perturbed_on_all_and_loaded_on_one(lost):
    ranks = sharded_faults.processes(2, sharded_trials.streamed, lost)

    assert repr(ranks[0]) == repr(ranks[1])
    alone, module = ranks[0]
    assert alone.cause == module.cause == ("deaf" if lost else ""), (str(alone), str(module))
    assert {m.name for m in alone.groups if m.mark == "not moved"} == ({lost} if lost else set())
    assert module.stream.missing == module.stream.unknown == ()


def test_fsdp1_is_refused_with_what_to_do():
    (text,) = sharded_faults.processes(1, sharded_trials.fsdp1)

    assert "FullyShardedDataParallel is sharded by FSDP1" in text and "servanda.rl.Stream" in text


@pytest.mark.parametrize(("lost", "cause"), [((), ""), (("layers.1.mlp.",), "one_mlp")])
def test_a_shipped_model_and_an_engine_in_bfloat16_are_clean_or_named(lost, cause):
    result = same_on_all(sharded_faults.processes(2, sharded_trials.shipped, *lost, limit_s=3600))

    assert (result.cause, result.exit_code) == (cause, 1 if cause else 0), str(result)
    assert result.found.floor > 1e-3 and result.stream.missing == result.stream.unknown == ()


SETUP = """
from torch import distributed
from tests.rl import sharded_faults

def trainee():
    distributed.init_process_group("gloo")
    return sharded_faults.trainee({name!r})[0]
"""


@pytest.mark.parametrize(("name", "code"), [("healthy", 0), ("one_layer", 1)])
def test_torchrun_prints_one_transcript_for_all_ranks(tmp_path, name, code):
    (tmp_path / "setup.py").write_text(SETUP.format(name=name))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    target = [f"{tmp_path / 'setup.py'}:trainee", "--journal", str(tmp_path / "j")]

    done = subprocess.run(
        [*launch, "-m", "servanda", "preflight", *target], capture_output=True, text=True, cwd=ROOT
    )

    assert done.returncode == code, done.stderr
    assert done.stdout.count("weights restored bit for bit") == 1
    assert done.stderr.count("plan     7 groups in") == 1 and "on each rank" in done.stderr
    assert [path.name for path in tmp_path.glob("j*")] == []
