# `servanda watch`: options, exit codes, and what a user reads who made a mistake.

import json
import shutil
from pathlib import Path

import pytest

from servanda.cli.commands import FIRST
from servanda.rl.watch.state_file import locked
from tests.kit import servanda
from tests.rl.watch.made import state_line
from tests.rl.watch.test_sinks import Server

TINY = Path(__file__).parents[3] / "examples" / "tiny-dump"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "monitor.jsonl"
    path.write_text(state_line(1))
    return path


def test_watch_is_one_of_the_verbs_that_people_live_in():
    assert "watch" in FIRST


@pytest.mark.parametrize(
    ("outcome", "code"), [("holds", 0), ("violated", 1), ("inconclusive", 3), ("error", 4)]
)
def test_once_exits_with_the_code_of_the_last_verdict(path, outcome, code):
    path.write_text(state_line(1, "violated") + state_line(2, outcome, cause="it broke"))
    done = servanda("watch", path, "--once")
    assert done.exit_code == code
    assert done.stdout.splitlines()[-1] == f"exit {code}"


def test_until_step_ends_with_the_answer_of_that_step(path):
    path.write_text(state_line(1) + state_line(2, "violated") + state_line(3))
    assert servanda("watch", path, "--until-step", 2).exit_code == 1


@pytest.mark.slow
def test_a_dump_is_watched_as_it_is_checked(tmp_path):
    folder = tmp_path / "dump"
    shutil.copytree(TINY, folder)
    watched = servanda("watch", folder, "--once", "--series", tmp_path / "s")
    assert watched.exit_code == 1
    assert "step 10: violated on first 3 tokens of turn 2 and later" in watched.stdout
    assert len((tmp_path / "s").read_text().splitlines()) == 16
    _, command = next(
        x.split("Next command: ") for x in watched.stdout.splitlines() if "Next command: " in x
    )
    done = servanda(*command.split()[1:-1], tmp_path / "masks", "--quiet")
    # one step alone has too few tokens for slices of its own, and the command runs
    assert done.exit_code in (0, 1, 3)


def test_the_stop_file_and_the_state_are_where_they_were_asked_for(path, tmp_path):
    path.write_text(state_line(1, "violated", tv=0.05))
    stop, state = tmp_path / "STOP", tmp_path / "state"
    done = servanda("watch", path, "--once", "--stop-file", stop, "--state-file", state)
    assert json.loads(stop.read_text())["step"] == 1
    assert json.loads(state.read_text())["memory"]["stop"] == 1
    assert "would have stopped at step 1" in done.stdout


def test_the_urls_of_receivers_may_be_in_the_environment(path, monkeypatch):
    """As secrets they are no arguments."""
    path.write_text(state_line(1, "violated", tv=0.05))
    with Server() as server:
        for name in ("SLACK", "WEBHOOK"):
            monkeypatch.setenv(f"SERVANDA_WATCH_{name}", server.url)
        assert servanda("watch", path, "--once").exit_code == 1
    assert sorted("servanda" in body for _, body in server.got) == [False, True]


def test_a_second_watch_on_one_state_is_refused(path, tmp_path):
    with locked(tmp_path / "state"):
        done = servanda("watch", path, "--once", "--state-file", tmp_path / "state")
    assert done.exit_code == 4
    assert "hint: stop it, or use another --state-file here" in done.output


def test_ctrl_c_prints_the_last_line_and_exits_as_ever(path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("servanda.cli.watch.time.sleep", interrupt)
    done = servanda("watch", path)
    assert done.exit_code == 130
    assert "watched 1 step, 1 to 1: 1 holds · would not have stopped" in done.stdout
    assert done.stderr.endswith("stopped\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{tmp}/none", "--once"], 4, "there is no '{tmp}/none'"),
        (["{tmp}", "--once", "--as", "nemoo"], 2, "there is no dump format 'nemoo'"),
        (["{tmp}", "--once", "--preset", "fp8"], 2, "and 'fp8' is for serving"),
        (["{tmp}", "--once", "--every", "5"], 2, "a duration is a number and ms, s, m, h or d"),
        (
            ["{tmp}", "--preset", "trl", "--contract", "x"],
            2,
            "--preset and --contract both set the limits: give one",
        ),
        (["{tmp}", "--stop-file", "{tmp}/no/STOP"], 2, "--stop-file: there is no folder"),
        (["{tmp}", "--state-file", "{tmp}/no/state"], 4, "cannot be written: No such file"),
        (["{tmp}", "--slack", "hooks.slack.com/x"], 2, "--slack takes a URL that begins with"),
    ],
)
def test_a_call_that_is_wrong_says_why(arguments, code, message, tmp_path):
    done = servanda("watch", *(a.format(tmp=tmp_path) for a in arguments))
    assert done.exit_code == code, done.output
    assert message.format(tmp=tmp_path) in done.output


def test_a_folder_of_two_formats_and_a_run_directory_are_refused(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    done = servanda("watch", tmp_path, "--once")
    assert done.exit_code == 2 and "is a run directory of servanda" in done.output
