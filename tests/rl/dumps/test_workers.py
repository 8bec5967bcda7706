# Steps that are summed by several processes give the verdict of one, to the last bit.

import json
from concurrent.futures import Future

import numpy as np
import pytest

from servanda.errors import EvidenceError, MeasurementError
from servanda.report.json import render
from servanda.rl.dumps import judge, workers
from servanda.rl.dumps.formats.parquet import Writer
from servanda.rl.dumps.judge import DumpOptions, judge_dump
from tests.rl.dumps import made

# one sequence that is refused: the trainer did not score it
UNSCORED = {
    "token_ids": [[1, 2]],
    "mask": [[1, 1]],
    "logp_train": [[0.0, 0.0]],
    "logp_infer": [[-1.0, -2.0]],
}


def answer_of(folder, jobs):
    return told(judge_dump(DumpOptions(folder, jobs=jobs)))


def told(answer):
    """All that an answer says, but for its seconds."""
    verdict = json.loads(render(answer.verdict))
    verdict["circumstances"].pop("seconds")
    return verdict, [(line.level, line.text) for line in answer.lines]


def faulty(folder):
    """Bad starts from step 14 on, a step written twice, a refused row, a step of refused rows."""
    made.write(folder, steps=range(10, 18), n=32, turns=4, tv=made.bad_starts)
    rng = np.random.default_rng(9)
    again = made.rollouts(rng, 18, 8, turns=4)
    for step in (18, 19):
        made.store(Writer(folder), again.__class__(step, *[*vars(again).values()][1:11]))
    Writer(folder, rank=1).step(12, **UNSCORED)
    Writer(folder).step(20, **UNSCORED)
    return folder


@pytest.fixture
def read_again(monkeypatch):
    """No dump is small enough to stay in memory; its head is all of it but one block."""
    monkeypatch.setattr(judge, "HEAD_TOKENS", 1_000)


@pytest.mark.slow
@pytest.mark.parametrize("make", [made.write, faulty])
def test_the_verdict_does_not_depend_on_the_number_of_processes(make, tmp_path, read_again):
    folder = make(tmp_path / "dump")
    alone = answer_of(folder, 1)
    assert answer_of(folder, 2) == alone
    assert answer_of(folder, 3) == alone


def test_a_dump_that_is_read_again_has_the_verdict_of_one_in_memory(tmp_path, monkeypatch):
    folder = faulty(tmp_path / "dump")
    in_memory = answer_of(folder, 1)
    whole = judge._head
    monkeypatch.setattr(judge, "_head", lambda read: (whole(read)[0], False))
    assert answer_of(folder, 1) == in_memory


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_file_that_cannot_be_read_is_named_by_any_process(jobs, tmp_path, read_again):
    folder = made.write(tmp_path / "dump", steps=range(1, 5))
    last = sorted(folder.glob("*.parquet"))[-1]
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(MeasurementError, match=rf"{last.name} .*\n.*write the step again"):
        judge_dump(DumpOptions(folder, jobs=jobs))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_dump_without_a_usable_sequence_after_its_head_is_refused(jobs, tmp_path):
    folder = tmp_path / "dump"
    for step in (1, 2):
        Writer(folder).step(step, **UNSCORED)
    with pytest.raises(EvidenceError, match=r"no sequence of .* can be used"):
        judge_dump(DumpOptions(folder, jobs=jobs))


def test_results_come_in_order_and_few_are_begun_before_their_turn():
    begun = []

    def submit(work, number):
        begun.append(number)
        future = Future()
        if number != 7:
            future.set_result(work(number))
        else:
            future.set_exception(ValueError("seven"))
        return future

    ordered = workers.in_order(submit, lambda n: 10 * n, [(n,) for n in range(20)], 4)
    assert next(ordered) == 0
    assert begun == [0, 1, 2, 3]
    assert [next(ordered) for _ in range(6)] == [10, 20, 30, 40, 50, 60]
    with pytest.raises(ValueError, match="seven"):
        next(ordered)
    assert len(begun) <= 12
