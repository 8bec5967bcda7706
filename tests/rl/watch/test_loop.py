# The loop: its clock, its end, its state file, and the one file by which it acts.

import itertools
import json
from pathlib import Path

import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.rl.watch.state_file import locked
from tests.rl.watch.made import Out, following, run, state_line, step


@pytest.fixture
def path(tmp_path):
    return tmp_path / "monitor.jsonl"


def test_an_interrupted_watch_says_its_last_line_and_stays_interrupted(path):
    path.write_text(state_line(1))
    out = Out()
    with pytest.raises(KeyboardInterrupt):
        following(path, out).run()
    assert out.lines[-1] == "watched 1 step, 1 to 1: 1 holds · would not have stopped"


def test_a_watch_ends_behind_the_step_it_was_told(path):
    path.write_text("".join(state_line(i) for i in range(1, 9)))
    out = Out()
    watch = following(path, out, until=5)
    watch.run()
    assert out.steps == ["1", "2", "3", "4", "5"] and not out.waits
    assert watch.state.outcome == "holds"


def test_what_it_waits_is_what_it_was_told(path):
    out = Out(lambda: path.write_text(state_line(1)), lambda: None)
    run(path, out, every_s=42.0)
    assert set(out.waits) == {42.0}


def test_a_clock_that_jumps_changes_nothing_but_the_dates(path, tmp_path):
    from servanda.rl.watch.sinks import SINKS, GuardedSink

    path.write_text("".join(state_line(i) for i in range(1, 5)))
    plain, jumping = Out(), Out()
    following(path, plain, once=True).run()
    file = tmp_path / "series.jsonl"
    sink = GuardedSink("series", SINKS["series"](str(file), jumping.wait), jumping.say)
    watch = following(path, jumping, once=True, sinks=[sink])
    watch.now = itertools.cycle([9e9, -5.0, 3.0]).__next__
    watch.run()
    assert jumping.lines == plain.lines
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["at"] for row in rows] == [9e9, -5.0, 3.0, 9e9]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_the_stop_file_is_written_once_and_only_where_it_was_asked_for(path, tmp_path):
    stop = tmp_path / "STOP"
    path.write_text(state_line(1) + state_line(2, "violated", tv=0.05))
    following(path, Out(), once=True).run()
    assert not stop.exists()

    out = Out()
    following(path, out, once=True, stop_file=stop).run()
    data = json.loads(stop.read_text())
    assert (data["step"], data["why"]) == (
        2,
        "an enforced clause was violated: gradient on all trained tokens",
    )
    assert out.count("was written, as --stop-file asks") == 1

    stop.write_text("mine")
    following(path, Out(), once=True, stop_file=stop).run()
    assert stop.read_text() == "mine"


def test_a_stop_file_that_cannot_be_written_is_said(path, tmp_path):
    path.write_text(state_line(1, "violated", tv=0.05))
    with pytest.raises(MeasurementError, match=r"--stop-file .* cannot be written"):
        following(path, Out(), once=True, stop_file=tmp_path / "no" / "STOP").run()


def test_two_watches_do_not_share_a_state_file(tmp_path):
    state = tmp_path / "state"
    why = "another watch uses the state file"
    with locked(state), pytest.raises(MeasurementError, match=why), locked(state):
        pass
    with locked(state):
        pass  # the lock went with the first


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no json", "is not the state file of a watch"),
        ("{}", "is not the state file of a watch"),
        (
            '{"servanda": "watch", "schema": 2}',
            "has schema 2, and this version of Servanda reads schema 1",
        ),
        ('{"servanda": "watch", "schema": 1, "watched": 3}', "is the state of another watch"),
        ('["servanda"]', "is not the state file of a watch"),
    ],
)
def test_a_state_file_that_is_none_is_refused_and_left_as_it_is(path, tmp_path, text, why):
    state = tmp_path / "state"
    state.write_text(text)
    path.write_text(state_line(1))
    with pytest.raises(ContractError, match=why):
        following(path, Out(), state=state, once=True).run()
    assert state.read_text() == text


def test_the_state_of_one_run_is_not_taken_for_another(path, tmp_path):
    state, other = tmp_path / "state", tmp_path / "other.jsonl"
    path.write_text(state_line(1))
    other.write_text(state_line(1))
    following(path, Out(), state=state, once=True).run()
    with pytest.raises(ContractError, match=r"is the state of another watch, of .*monitor.jsonl"):
        following(other, Out(), state=state, once=True).run()


def test_once_with_nothing_new_ends_with_the_last_answer(path, tmp_path):
    state = tmp_path / "state"
    path.write_text(state_line(1, "violated", tv=0.05))
    following(path, Out(), state=state, once=True).run()
    out = Out()
    assert following(path, out, state=state, once=True).run().outcome == "violated"
    assert not out.alerts and not out.steps


@pytest.mark.sampled(4)
@pytest.mark.parametrize("when", ["before", "in", "after"])
@pytest.mark.parametrize("kind", ["monitor", "dump"])
def test_a_watch_that_is_killed_at_any_save_loses_no_step_and_counts_none_twice(
    tmp_path, kind, when, monkeypatch
):
    """It tells a step twice rather than never, and ends with the state of one that went on."""
    path, told = tmp_path / kind, Out()
    if kind == "dump":
        path.mkdir()
        for number in (1, 2, 3):
            step(path, number)
    else:
        path.write_text(state_line(1) + state_line(2, "violated", tv=0.05) + state_line(3))
    following(path, told, state=tmp_path / "whole", once=True).run()
    assert told.steps == ["1", "2", "3"]
    for at in (1, 2, 3):
        state, first, second = tmp_path / f"state-{at}", Out(), Out()
        watch = following(path, first, state=state, once=True)
        save = watch.state_file.save

        def killed(*_):
            raise KeyboardInterrupt

        def dies(memory, source, save=save, at=at):
            with monkeypatch.context() as patch:
                if memory.step == at and when == "in":  # written, and not yet in its place
                    patch.setattr(Path, "replace", killed)
                if memory.step != at or when != "before":
                    save(memory, source)
            if memory.step == at:
                killed()

        watch.state_file.save = dies
        with pytest.raises(KeyboardInterrupt):
            watch.run()
        following(path, second, state=state, once=True).run()
        twice = [] if when == "after" else [str(at)]
        assert sorted(first.steps + second.steps) == sorted(told.steps + twice)
        assert {*first.alerts, *second.alerts} == {*told.alerts}
        assert state.read_text() == (tmp_path / "whole").read_text()
