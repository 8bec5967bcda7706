# The loop: its clock, its end, its state file, and the one file by which it acts.

import itertools
import json

import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.rl.watch.state_file import locked
from tests.rl.watch.made import Out, following, run, state_line


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


def test_a_watch_that_dies_before_it_was_kept_tells_twice_rather_than_never(path, tmp_path):
    state = tmp_path / "state"
    path.write_text(state_line(1) + state_line(2, "violated", tv=0.05))
    out = Out()
    watch = following(path, out, state=state, once=True)
    save, calls = watch.state_file.save, []

    def dies(memory, source):
        calls.append(memory.step)
        if memory.step == 2:
            raise KeyboardInterrupt
        save(memory, source)

    watch.state_file.save = dies
    with pytest.raises(KeyboardInterrupt):
        watch.run()
    again = Out()
    following(path, again, state=state, once=True).run()
    assert out.alerts == again.alerts == ["✗ step 2: violated"]
