# A dump is followed while it grows: what counts as whole, what is read, what is said.

import gzip
import json
import shutil
from pathlib import Path

import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.rl.dumps.formats import FORMATS
from servanda.rl.watch.dump import DumpSource, WatchOptions
from tests.rl.dumps.formats import made as trainers
from tests.rl.dumps.made import bad_starts
from tests.rl.watch.made import Out, following, run, step

TINY = Path(__file__).parents[3] / "examples" / "tiny-dump"


def nothing():
    pass


def test_a_step_counts_once_the_next_has_begun_or_nothing_has_changed_for_a_look(tmp_path):
    out = Out(
        lambda: step(tmp_path, 2),
        lambda: step(tmp_path, 3),
        nothing,
    )
    step(tmp_path, 1)
    seen_at = []
    watch = following(tmp_path, out)
    wait = out.wait
    watch.wait = lambda s: (seen_at.append([*out.steps]), wait(s))

    with pytest.raises(KeyboardInterrupt):
        watch.run()

    assert seen_at == [[], ["1"], ["1", "2"], ["1", "2", "3"]]


def test_a_rank_that_comes_late_is_judged_with_its_step_again(tmp_path):
    from servanda.rl.dumps.formats.parquet import Writer
    from tests.rl.dumps import made

    def rank_one():
        import numpy as np

        made.store(Writer(tmp_path, rank=1), made.rollouts(np.random.default_rng(9), 1, 24))

    step(tmp_path, 1)
    out = Out(nothing, rank_one, nothing)
    run(tmp_path, out)
    lines = [line for line in out.lines if line.startswith("step ")]
    assert [line.endswith("written again") for line in lines] == [False, True]


def counted(monkeypatch, name="own"):
    """Steps whose rows are read, in the order of reading."""
    inner, read = FORMATS[name].rows, []

    def rows(files, refused):
        read.append(files[0].step)
        return inner(files, refused)

    monkeypatch.setattr(FORMATS[name], "rows", rows)
    return read


def test_only_what_is_new_is_read(tmp_path, monkeypatch):
    for number in (1, 2, 3):
        step(tmp_path, number)
    read = counted(monkeypatch)
    out = Out(nothing, lambda: step(tmp_path, 4), nothing, nothing, lambda: step(tmp_path, 5))
    run(tmp_path, out, once=False)

    assert out.steps == ["1", "2", "3", "4"]
    # the slices are fixed from the steps that were there, 1 and 2; then each is read once
    assert read == [1, 2, 1, 2, 3, 4]


def test_a_restarted_watch_reads_nothing_again_and_tells_nothing_again(tmp_path, monkeypatch):
    folder, state = tmp_path / "runs", tmp_path / "state"
    shutil.copytree(TINY, folder)
    first = Out()
    watch = following(folder, first, state=state, once=True)
    watch.run()
    read = counted(monkeypatch)

    second = Out()
    again = following(folder, second, state=state, once=True)
    again.run()

    assert first.count("step 10: violated") == 1 and len(first.steps) == 16
    assert not read and not second.steps and not second.alerts
    assert again.state == watch.state
    assert second.lines == [f"resumed  after step 16, from {state}", first.lines[-1]]


@pytest.mark.slow
def test_a_watch_that_was_cut_anywhere_says_the_same_as_one_that_was_not(tmp_path):
    """Restarted behind every step, alerts are those of the whole run."""
    whole = Out()
    shutil.copytree(TINY, tmp_path / "whole")
    following(tmp_path / "whole", whole, once=True).run()

    folder, alerts = tmp_path / "cut", []
    folder.mkdir()
    # the head that fixes the slices is the same
    for number in range(1, 17):
        shutil.copy(TINY / f"step_{number:06}.rank0.parquet", folder)
        if number not in (5, 9, 10, 12, 16):
            continue
        out = Out()
        following(folder, out, state=tmp_path / "state", once=True).run()
        alerts += out.alerts
    assert alerts == whole.alerts


def test_slices_are_fixed_from_the_first_steps_and_stay(tmp_path):
    env = {"env": lambda s: "a" if s % 2 else "b"}
    new = {"env": lambda s: "a" if s % 2 else "c"}
    for number in (1, 2, 3):
        step(tmp_path, number, n=60, labels=env)
    source = DumpSource(WatchOptions(tmp_path))
    before = [*source.poll(final=True)]
    step(tmp_path, 4, n=60, labels=new)
    (after,) = source.poll(final=True)

    assert before[0].slices == after.slices and "env-b" in after.slices
    assert "env-c" not in after.slices


@pytest.mark.slow
def test_a_fault_on_a_slice_is_told_at_its_step_with_the_command_that_masks_it(tmp_path):
    for number in range(1, 7):
        step(tmp_path, number, n=48, turns=4, tv=lambda *at: bad_starts(*at, since=5))
    out = Out()
    watch = following(tmp_path, out, once=True)
    watch.run()

    assert out.alerts == ["✗ step 5: violated on first 3 tokens of turn 2 and later"]
    assert out.count(f"Next command: servanda check {tmp_path} --steps 5 --mask masks") == 1
    assert out.count("after a tool result") == 1
    assert watch.state.stop == 5 and watch.state.outcome == "violated"


def nemo(folder, number, cut=False):
    """A step of NeMo-RL, whose last line may be cut."""
    path = trainers.nemo(folder, trainers.sequences(60, seed=number, longest=60), step=number)
    if cut:
        path.write_bytes(path.read_bytes()[:-40])
    return path


def test_a_line_that_is_being_written_is_waited_for(tmp_path):
    path = nemo(tmp_path, 1)
    data = path.read_bytes()
    path.write_bytes(data[:-40])
    out = Out(nothing, nothing, lambda: path.write_bytes(data), nothing)
    run(tmp_path, out)

    assert out.count("waiting  step 1 is not whole and is left alone: train_data_step1.jsonl") == 1
    assert out.steps == ["1"] and out.lines[-1].startswith("watched 1 step")


def test_once_leaves_out_a_last_step_that_is_cut_and_says_so(tmp_path):
    nemo(tmp_path, 1)
    nemo(tmp_path, 2, cut=True)
    out = Out()
    watch = following(tmp_path, out, once=True)
    watch.run()
    assert out.steps == ["1"] and watch.state.step == 1
    assert out.count("left out step 2 is not whole") == 1


def test_a_cut_step_behind_which_others_follow_is_an_error(tmp_path):
    nemo(tmp_path, 1, cut=True)
    nemo(tmp_path, 2)
    out = Out()
    watch = following(tmp_path, out, once=True)
    watch.run()
    assert out.steps == ["1", "2"] and watch.state.counts["error"] == 1
    assert out.count("the file ends in the middle of a row") >= 1


def test_a_folder_that_is_not_there_yet_is_waited_for_and_said_once(tmp_path):
    folder = tmp_path / "later"
    out = Out(nothing, folder.mkdir, nothing, lambda: step(folder, 1), nothing)
    run(folder, out)
    assert out.count("waiting  there is no") == 1
    assert out.count("holds no dump") == 1
    assert out.steps == ["1"]


def test_once_of_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(MeasurementError, match=r"there is no .*later'"):
        following(tmp_path / "later", Out(), once=True).run()
    with pytest.raises(MeasurementError, match="holds no dump"):
        following(tmp_path, Out(), once=True).run()


def test_two_formats_in_a_folder_are_refused_at_once(tmp_path):
    step(tmp_path, 1)
    nemo(tmp_path, 1)
    with pytest.raises(ContractError, match="dumps of more than one format: 1 of nemo, 1 of own"):
        following(tmp_path, Out()).run()
    out = Out(nothing)
    run(tmp_path, out, asked={"format": "own"})
    assert out.steps == ["1"]


def test_a_step_without_a_usable_row_is_an_error_and_the_watch_goes_on(tmp_path):
    for number in (1, 2, 3, 4, 5):
        step(tmp_path, number)
    path = tmp_path / "step_000002.rank0.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    out = Out()
    watch = following(tmp_path, out, once=True)
    watch.run()
    assert out.steps == ["1", "2", "3", "4", "5"]
    assert watch.state.counts == {"holds": 4, "error": 1}
    # three steps later it is over
    assert [a[:9] for a in out.alerts] == ["✗ step 2:", "✓ step 5:"]


def test_lost_logprobs_are_lost_coverage_and_never_agreement(tmp_path):
    import numpy as np

    from servanda.rl.dumps.formats.parquet import Writer
    from tests.rl.dumps import made

    step(tmp_path, 1)
    r = made.rollouts(np.random.default_rng(2), 2, 24)
    r.logp_infer_N[::7] = np.nan
    made.store(Writer(tmp_path), r)
    out = Out()
    watch = following(tmp_path, out, once=True)
    watch.run()
    assert watch.state.outcome == "error"
    assert [a.split(":")[1] for a in out.alerts] == [" logprob coverage lost"]


def test_a_contract_of_import_is_what_each_step_is_held_to(tmp_path):
    from servanda.rl.steps import contract as of_run

    for number in (1, 2, 3):
        step(tmp_path, number, n=48)
    text, _ = of_run.contract_of("verl-sync", "strict", ())
    strict = text.replace("at_most: 0.025", "at_most: 0.001")
    assert strict != text
    file = tmp_path / "strict.kernelcontract.yaml"
    file.write_text(
        strict + "escalation:\n  - {when: {clause: gradient, is: violated}, do: [halt]}\n"
    )
    out = Out()
    watch = following(tmp_path, out, once=True, asked={"contract": file})
    watch.run()
    assert watch.state.outcome == "violated" and watch.state.stop == 1
    assert f"contract {file}" in out.lines


def test_a_contract_of_kernels_is_refused(tmp_path):
    contract = TINY.parent / "tiny-bf16.kernelcontract.yaml"
    with pytest.raises(ContractError, match="is no contract for a trainer"):
        following(tmp_path, Out(), asked={"contract": contract})


def test_another_preset_than_the_kept_one_is_refused(tmp_path):
    folder, state = tmp_path / "runs", tmp_path / "state"
    step(folder, 1)
    following(folder, Out(), state=state, once=True).run()
    with pytest.raises(
        ContractError, match="kept with another --as, --preset, --contract or --reference"
    ):
        following(folder, Out(), state=state, once=True, asked={"preset": "trl"}).run()


def test_a_packed_file_that_is_cut_is_not_whole(tmp_path):
    path = nemo(tmp_path, 1)
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes())[:-20])
    path.unlink()
    with pytest.raises(MeasurementError):
        following(tmp_path, Out(), once=True).run()


@pytest.mark.slow
def test_the_state_of_a_watch_is_small_and_plain(tmp_path):
    state = tmp_path / "state"
    following(TINY, Out(), state=state, once=True).run()
    data = json.loads(state.read_text())
    assert (data["servanda"], data["schema"], data["kind"]) == ("watch", 1, "dump")
    assert state.stat().st_size < 50_000
