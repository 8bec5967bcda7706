# A monitor's state is followed line by line.

import json

import numpy as np
import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.rl import Monitor, read_state
from servanda.rl.watch.monitor_state import MonitorSource
from tests.rl.watch.made import Out, following, run, state_line, step


def appending(path, *texts):
    def write():
        with path.open("a") as file:
            file.write("".join(texts))

    return write


def test_lines_are_told_as_they_are_written(tmp_path):
    path = tmp_path / "monitor.jsonl"
    path.write_text(state_line(1))
    out = Out(appending(path, state_line(2), state_line(3, "violated", tv=0.05)))
    watch = run(path, out)

    assert out.steps == ["1", "2", "3"]
    assert out.alerts == ["✗ step 3: violated"]
    assert out.lines[0] == f"found    a monitor's state in {path}: rollout"
    assert watch.state.stop == 3
    assert out.lines[-1].endswith("red since step 3 · would have stopped at step 3")


def test_a_line_without_its_end_is_waited_for_and_counts_once(tmp_path):
    path = tmp_path / "monitor.jsonl"
    line = state_line(2)
    path.write_text(state_line(1) + line[:50])
    out = Out(appending(path, line[50:]), lambda: None)
    run(path, out)
    assert out.steps == ["1", "2"]
    assert out.count("waiting  the last line of monitor.jsonl is incomplete") == 1


def test_once_leaves_a_truncated_last_line_out(tmp_path):
    path = tmp_path / "monitor.jsonl"
    path.write_text(state_line(1) + state_line(2, "violated")[:-2])
    out = Out()
    watch = following(path, out, once=True)
    watch.run()
    assert out.steps == ["1"] and watch.state.outcome == "holds"
    assert out.count("left out the last line of monitor.jsonl is incomplete") == 1


def test_a_state_of_another_schema_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "monitor.jsonl"
    path.write_text(state_line(1) + state_line(2, schema=3))
    with pytest.raises(ContractError, match=r"monitor\.jsonl:2 has schema 3, .* reads schema 2"):
        following(path, Out(), once=True).run()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{not json\n", "the line is no JSON"),
        ("[1, 2]\n", "the line is no step of a monitor: Expected `object`, got `array`"),
        (state_line(3, outcome_=1).replace('"holds"', '"fine"'), "Invalid enum value 'fine'"),
        (json.dumps({"schema": 2, "weights": "3"}) + "\n", "no step of a monitor"),
        (state_line(3).replace('"step": 3, ', ""), "missing required field `step`"),
    ],
)
def test_a_line_that_cannot_be_read_is_an_error_and_never_agreement(tmp_path, bad, why):
    path = tmp_path / "monitor.jsonl"
    path.write_text(state_line(1) + bad + state_line(4))
    out = Out()
    watch = following(path, out, once=True)
    watch.run()
    assert watch.state.counts == {"holds": 2, "error": 1}
    (alert,) = out.alerts
    assert alert.startswith("✗ step 1: not measured: monitor.jsonl:2: ") and why in alert


def test_numbers_that_do_not_exist_are_absent(tmp_path):
    path = tmp_path / "monitor.jsonl"
    cell = {**json.loads(state_line(1))["cells"][0], "slice": "env-a", "outcome": "inconclusive"}
    path.write_text(
        state_line(1, cells=[{**cell, "value": float("nan"), "low": None, "high": "inf", "n": 0}])
    )
    out = Out()
    watch = following(path, out, once=True)
    watch.run()
    assert watch.state.places == ()
    assert "gradient, all trained tokens: 0.01 [0.009, 0.011], limit 0.025" in out.lines[2]


def run_of(path, drifts, *, first=1):
    """A real monitor's state: a step for each drift of the trainer, nats."""
    rng = np.random.default_rng(0)
    monitor = Monitor("verl-sync", state=path)
    for weights, drift in enumerate(drifts, first):
        infer = -1 - rng.exponential(1.0, (16, 200))
        train = infer + drift * rng.standard_normal(infer.shape)
        mask = np.ones(infer.shape)
        found = monitor.observe(train, infer, mask, weights=weights, staleness=[0, 2] * 8)
    return found


def test_the_trend_and_the_staleness_are_those_that_the_monitor_wrote(tmp_path):
    path = tmp_path / "monitor.jsonl"
    found = run_of(path, [0.004] * 5 + [0.008, 0.010, 0.012, 0.014, 0.016])
    source = MonitorSource(path)
    *_, last = source.poll(final=True)

    assert last.trend.ratio == pytest.approx(found.trend.ratio, rel=1e-5)
    assert last.trend.ratio == pytest.approx(3.0, rel=0.05)
    assert last.trend.interval == pytest.approx(found.trend.interval, rel=1e-5)
    assert last.staleness == found.metrics["servanda/staleness/max"] == 2.0
    out = Out()
    following(path, out, once=True).run()
    assert [line.split()[-1][:3] for line in out.lines if line[:4] == "step"][-1] == "x3."


def test_a_run_that_went_back_takes_its_steps_anew(tmp_path):
    path = tmp_path / "monitor.jsonl"
    run_of(path, [0.004] * 3 + [0.04] * 7)
    again = run_of(path, [0.004] * 8, first=4)
    out = Out()
    following(path, out, once=True).run()

    written = [line for line in out.lines if line.endswith("written again")]
    assert [line.split()[1] for line in written] == [*"456789", "10"]
    assert again.trend.ratio == pytest.approx(1.0, rel=0.1)
    assert f"trend x{again.trend.ratio:.2f}" in [x for x in out.lines if x[:4] == "step"][-1]


def test_what_the_monitor_did_or_would_do_counts_as_its_contract_says(tmp_path):
    path = tmp_path / "monitor.jsonl"
    path.write_text(state_line(1) + state_line(2, would=["page", "halt"]) + state_line(3))
    out = Out()
    watch = following(path, out, once=True)
    watch.run()
    assert (watch.state.stop, watch.state.stop_why) == (
        2,
        "the contract's escalation says halt",
    )


def test_a_file_that_is_written_anew_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "monitor.jsonl"
    path.write_text(state_line(1) + state_line(2))
    out = Out(lambda: path.write_text(state_line(7) + state_line(8) + state_line(9)))
    run(path, out)
    assert out.steps == ["1", "2", "7", "8", "9"]


def test_a_folder_with_one_state_is_that_state_and_with_two_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(state_line(1))
    out = Out()
    following(tmp_path, out, once=True).run()
    assert out.steps == ["1"]

    (tmp_path / "b.jsonl").write_text(state_line(1))
    with pytest.raises(ContractError, match=r"holds 2 states: a\.jsonl, b\.jsonl"):
        following(tmp_path, Out(), once=True).run()


def test_a_state_beside_a_dump_is_refused_unless_one_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(state_line(1))
    step(tmp_path, 1)
    with pytest.raises(ContractError, match=r"holds a monitor's state, a\.jsonl, and a dump of"):
        following(tmp_path, Out(), once=True).run()
    out = Out()
    following(tmp_path, out, once=True, asked={"format": "own"}).run()
    assert out.count("found    Servanda") == 1


def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path):
    path = tmp_path / "monitor.jsonl"
    out = Out(lambda: path.write_text(""), lambda: path.write_text(state_line(1)))
    run(path, out)
    assert out.steps == ["1"]


def test_a_first_line_that_was_begun_is_no_state_yet(tmp_path):
    path = tmp_path / "monitor.jsonl"
    path.write_text(state_line(1)[:30])
    with pytest.raises(MeasurementError):
        following(path, Out(), once=True).run()
    out = Out(lambda: path.write_text(state_line(1)))
    run(path, out)
    assert out.steps == ["1"]


def test_a_state_is_read_as_steps(tmp_path):
    path = tmp_path / "monitor.jsonl"
    path.write_text(state_line(1) + state_line(2, "violated"))
    steps = read_state(path)
    assert [(step.step, step.outcome) for step in steps] == [(1, "holds"), (2, "violated")]
    assert steps[0].cells
    with pytest.raises(ContractError, match="there is no"):
        read_state(tmp_path / "none.jsonl")
