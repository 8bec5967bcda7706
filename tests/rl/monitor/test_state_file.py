# Memory: a run that is started again goes on where it was, whatever cut its file off.

import json

import numpy as np
import pytest

from servanda.cli.main import main
from servanda.errors import ContractError, EvidenceError
from servanda.rl import Monitor
from servanda.rl.monitor.state_file import Journal, _entry
from servanda.rl.steps.judge import WHOLE_PART
from servanda.theory.stats.alpha import step_alpha
from tests.rl.monitor.made import step


def observe(monitor, weights, tv=0.004, size=16):
    train, infer, mask = step(np.random.default_rng(weights), size, 256, tv)
    token = np.random.default_rng(weights).integers(0, 99, mask.shape)
    groups = [b // 4 for b in range(size)]
    return monitor.observe(train, infer, mask, weights=weights, groups=groups, tokens=token)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_step_is_a_line(tmp_path):
    path = tmp_path / "run" / "state.jsonl"
    monitor = Monitor("verl-sync", state=path)
    for weights in range(3):
        found = observe(monitor, weights)

    entry = lines(path)[-1]
    assert [line["weights"] for line in lines(path)] == [0, 1, 2]
    assert (entry["schema"], entry["name"], entry["outcome"]) == (2, "verl-sync", "holds")
    assert entry["contract"] == monitor.contract.digest
    assert entry["tokens"] == found.verdict.tokens
    assert entry["metrics"] == pytest.approx(dict(found.metrics))
    cell = entry["cells"][0]
    assert (cell["clause"], cell["slice"], cell["metric"]) == ("gradient", "all", "tv")
    assert cell["low"] <= cell["value"] <= cell["high"] < cell["limit"] == 0.025
    assert cell["enforced"] is True


def test_steps_that_are_not_numbered_are_counted_over_a_restart_too(tmp_path):
    path = tmp_path / "state.jsonl"
    train, infer, mask = step(np.random.default_rng(0), 16, 256, 0.004)
    first = Monitor("verl-sync", state=path)

    found = [first.observe(train, infer, mask).weights for _ in range(2)]
    found.append(first.observe(train, infer, mask, weights=7).weights)
    found += [first.observe(train, infer, mask).weights]
    again = Monitor("verl-sync", state=path)

    assert found == [0, 1, 7, 8] and again.observe(train, infer, mask).weights == 9


def test_a_restart_goes_on_with_its_slices_and_its_trend(tmp_path):
    path = tmp_path / "state.jsonl"
    whole = Monitor("verl-sync")
    for weights in range(8):
        uninterrupted = observe(whole, weights, tv=0.004 if weights < 5 else 0.012)
    for begin, end in ((0, 4), (4, 7), (7, 8)):
        monitor = Monitor("verl-sync", state=path)
        for weights in range(begin, end):
            found = observe(monitor, weights, tv=0.004 if weights < 5 else 0.012)

    assert monitor.contract == whole.contract
    assert found.trend.ratio == pytest.approx(uninterrupted.trend.ratio, rel=1e-4)
    assert found.trend.ratio == pytest.approx(3.0, rel=0.1)
    assert (found.trend.level, found.trend.steps) == ("error", 3)
    assert found.metrics["servanda/trend"] == pytest.approx(found.trend.ratio)


def test_there_is_no_trend_before_the_sixth_step():
    monitor = Monitor("verl-sync")
    steps = [observe(monitor, weights) for weights in range(6)]

    assert [s.trend is None for s in steps] == [True] * 5 + [False]
    assert ["servanda/trend" in s.metrics for s in steps] == [False] * 5 + [True]


def test_a_step_that_comes_again_after_a_restart_replaces_what_was_known(tmp_path):
    path = tmp_path / "state.jsonl"
    first = Monitor("verl-sync", state=path)
    for weights in range(7):
        observe(first, weights, tv=0.3 if weights > 2 else 0.004)
    again = Monitor("verl-sync", state=path)
    for weights in range(3, 7):
        found = observe(again, weights)

    assert found.trend.ratio == pytest.approx(1.0, rel=0.1)


def test_a_run_that_is_killed_at_any_byte_of_a_line_goes_on_at_its_step(tmp_path):
    """A step without a token and one in error have a number of the run's budget, too."""
    whole, path, rng = tmp_path / "whole.jsonl", tmp_path / "state.jsonl", np.random.default_rng(0)
    steps = [step(rng, 4, 28) for _ in range(5)]
    steps[1] = *steps[1][:2], np.zeros_like(steps[1][2])
    steps[2] = steps[2][0], steps[2][0].copy(), steps[2][2]
    monitor = Monitor("trl", state=whole)
    for given in steps:
        monitor.observe(*given)
    data = whole.read_bytes()
    begin = data.rindex(b"\n", 0, -1) + 1
    size = len(data) - begin
    assert all(_entry(data[begin:][:end]) is None for end in range(size))
    for end in (*range(0, size, size // 50), size - 1, size):
        path.write_bytes(data[begin:][:end])
        journal, last = Journal(path), begin + end == len(data)
        assert (journal.read().number, path.stat().st_size) == ((1, end) if last else (0, 0))
        dropped = f"line 1 of {path} was cut off, and is dropped"
        assert journal.notes == (() if last or not end else (dropped,))
    for end in (begin, begin + 1, (begin + len(data)) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        again = Monitor("trl", state=path)
        found = again.observe(*steps[-1])
        dropped = f"line 5 of {path} was cut off, and is dropped"
        assert again.notes == () if end == begin else again.notes[0] == dropped == found.notes[0]
        assert (found.weights, found.verdict.part) == (4, step_alpha(1 - WHOLE_PART, 5))
        assert [line["weights"] for line in lines(path)] == [*range(5)]
        assert Journal(path).read().number == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("3", "is no step of a monitor\n  hint: name another state file"),
        (
            '{"loss": 1}',
            "has no schema, and this version of Servanda reads schema 2\n"
            "  hint: name another state file",
        ),
        (
            '{"schema": 7}',
            "has schema 7, and this version of Servanda reads schema 2\n"
            "  hint: upgrade it: pip install --upgrade servanda",
        ),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, line, message):
    path = tmp_path / "state.jsonl"
    path.write_text(f"{line}\n{line}\n")
    with pytest.raises(EvidenceError) as refused:
        Monitor("verl-sync", state=path)
    assert str(refused.value) == f"{path}:1 {message}"


def test_a_step_of_an_earlier_form_and_a_file_of_another_contract_are_refused(tmp_path):
    path = tmp_path / "state.jsonl"
    observe(Monitor("verl-sync", state=path), 0)
    with pytest.raises(ContractError, match="the state file is of contract"):
        observe(Monitor("verl-async", state=path), 1)
    (line,) = lines(path)
    del line["window"]
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(EvidenceError, match=r"step 0 of the state file cannot be read: .*'window'"):
        Monitor("verl-sync", state=path)


def test_a_run_remembers_when_it_would_have_been_stopped(tmp_path):
    from tests.rl.monitor.test_actions import RULES, given
    from tests.rl.monitor.test_monitor import contract

    path = tmp_path / "state.jsonl"
    shown = given()
    bad = {**shown, "logp_infer_BT": np.full_like(shown["logp_infer_BT"], np.nan)}
    first = Monitor(contract(RULES), state=path)
    for weights, what in enumerate((shown, bad, shown)):
        first.observe(**what, weights=weights)

    assert Monitor(contract(RULES), state=path).would_have_stopped == 1


def test_the_kept_share_is_a_dump_that_check_reads(tmp_path):
    monitor = Monitor("verl-sync", dump=tmp_path / "kept", sample=0.5, seed=3)
    for weights in range(4):
        observe(monitor, weights, size=32)

    with pytest.raises(SystemExit) as end:
        main(["check", str(tmp_path / "kept")])
    assert end.value.code == 0


def test_the_share_does_not_depend_on_what_was_measured(tmp_path):
    from servanda.rl.dumps.formats import open_dump

    kept = []
    for tv in (0.0, 0.4):
        folder = tmp_path / str(tv)
        monitor = Monitor("verl-sync", dump=folder, sample=0.3)
        observe(monitor, 0, tv=tv, size=64)
        read = [*open_dump(folder).read()]
        kept.append([tuple(chunk.length_S) for chunk in read])
        assert 8 < sum(map(len, read)) < 32

    assert kept[0] == kept[1]


def test_a_dump_needs_token_ids(tmp_path):
    train, infer, mask = step(np.random.default_rng(0))
    with pytest.raises(EvidenceError, match="step 0 has no token ids"):
        Monitor("verl-sync", dump=tmp_path).observe(train, infer, mask, weights=0)
    with pytest.raises(EvidenceError, match="sample is 2"):
        Monitor("verl-sync", dump=tmp_path, sample=2)


def test_a_file_that_cannot_be_written_is_a_note_and_stops_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    monitor = Monitor("verl-sync", state=tmp_path / "file" / "state.jsonl")
    first, second = observe(monitor, 0), observe(monitor, 1)

    assert (first.outcome, first.notes) == ("holds", ())
    assert "step 0 was not written: the state file" in second.notes[0]


def test_a_first_step_without_a_token_decides_no_slices(tmp_path):
    path = tmp_path / "state.jsonl"
    monitor = Monitor("verl-sync", state=path)
    train, infer, mask = step(np.random.default_rng(0), 16, 256)
    empty = monitor.observe(train, infer, np.zeros_like(mask), weights=0)
    monitor = Monitor("verl-sync", state=path)
    found = observe(monitor, 1)

    assert (empty.outcome, found.outcome) == ("inconclusive", "holds")
    assert "position<16" in {c.slice for c in found.verdict.cells}
    assert observe(Monitor("verl-sync", state=path), 2).outcome == "holds"
