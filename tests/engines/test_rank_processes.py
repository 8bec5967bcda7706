# A kernel of several ranks, in real processes, against the same kernel in one.

import os
import signal
import threading

import pytest

pytest.importorskip("torch.distributed.fsdp")

from servanda.engines import open_engine, rank_processes
from servanda.engines.rank_processes import ShardedEngine, joined, started_by_torchrun
from servanda.errors import MeasurementError
from tests.engines import large

RANKS = {"ranks": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return large.save_model(tmp_path_factory.mktemp("large"))


@pytest.fixture(scope="module")
def engine(folder):
    engine = open_engine(large.kernel(folder, RANKS))
    yield engine
    engine.close()


@pytest.mark.slow
def test_two_ranks_are_the_one_process_to_rounding(folder, engine):
    expected, one = large.in_one_process(folder, large.launched())

    found = large.everything(engine, large.launched())

    large.assert_alike(found, expected, 1e-12)
    two = engine.describe()
    assert two.tensors == one.tensors and (two.full_logits, two.vocab_size) == (True, 61)
    assert two.fingerprint == one.fingerprint | {"ranks": "2"}


@pytest.mark.slow
def test_what_all_ranks_refuse_is_said_once_and_they_go_on(engine):
    odd = large.launched(2, size=4).take([0])

    with pytest.raises(MeasurementError, match=r"^sequence 10 has the token id 99, and") as refused:
        engine.generate(type(odd)(odd.sequence_S, ((99,),), odd.width), large.PLAIN, 0)

    assert "encode prompts with the tokenizer" in refused.value.problems[0].hint
    assert len(engine.generate(odd, large.PLAIN, 0).token_N)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_call_is_named_and_no_rank_stays(folder):
    engine = open_engine(large.kernel(folder, RANKS))
    pids, said = engine.pids, []

    def draw():
        try:
            engine.generate(large.launched(), large.PLAIN, 0)
        except MeasurementError as error:
            said.append(error)

    os.kill(pids[1], signal.SIGSTOP)  # so that rank 0 waits for it in a collective
    call = threading.Thread(target=draw)
    call.start()
    os.kill(pids[1], signal.SIGKILL)
    call.join()

    (error,) = said
    place = f"the rank 1 of 2 worker (pid {pids[1]}) was killed by SIGKILL during 'generate'"
    assert str(error).startswith(place)
    assert "run the same command again" in str(error) and "more ranks" in str(error)
    with pytest.raises(MeasurementError, match=r"rank 1 of 2 worker"):  # and stays so
        engine.describe()
    engine.close()
    assert all(map(gone, pids))


@pytest.mark.slow
def test_an_error_on_one_rank_ends_the_others_and_is_named(folder, monkeypatch):
    worker = rank_processes.Worker

    def misled(kernel, side, environment):  # rank 1 refuses, while rank 0 waits for it
        odd = {"WORLD_SIZE": "3"} if side.startswith("rank 1") else {}
        return worker(kernel, side, environment | odd)

    monkeypatch.setattr(rank_processes, "Worker", misled)
    monkeypatch.setattr(rank_processes, "_ECHO_S", 0.1)

    with pytest.raises(MeasurementError, match=r"^rank 1 of 2: 3 processes are ranks of a kernel"):
        ShardedEngine(large.kernel(folder, RANKS))


@pytest.mark.parametrize("ranks", [0, True, "two", 1.5, 2000])
def test_a_number_of_ranks_that_is_none_is_refused(folder, ranks):
    with pytest.raises(MeasurementError, match=r"options.ranks is .*, and a kernel has 1 to 1024"):
        open_engine(large.kernel(folder, {"ranks": ranks}))


def test_torchrun_must_start_as_many_processes_as_the_kernel_has_ranks(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")

    assert started_by_torchrun()
    with pytest.raises(MeasurementError, match=r"started 4 .* has 2 ranks") as other:
        joined(large.kernel(folder, RANKS), "train")
    with pytest.raises(MeasurementError, match=r"torchrun started 4 .* kernel has no ranks"):
        joined(large.kernel(folder), "train")
    assert "ranks: 4" in str(other.value)
    with pytest.raises(MeasurementError, match=r"each of them would start ranks") as inside:
        open_engine(large.kernel(folder, RANKS))  # as `check` would, in each process
    assert "servanda tools measure" in str(inside.value)
