# A program gets every effect: real programs, which fail, hang and leave children behind.

import json
import os
import shlex
import subprocess
import sys

import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.promotion.notify.http_post import Busy
from servanda.promotion.notify.sinks import Command
from tests.promotion.notify.made import BODY, effect

# holds the pipe open, as does its child, which would write to it much later
LINGERS = "exec 3>{pipe}; (sleep 30; echo late >&3) & wait"


def python(code, *arguments):
    return shlex.join([sys.executable, "-c", code, *map(str, arguments)])


def shell(code):
    return shlex.join(["sh", "-c", code])


def refused(text, **options):
    with pytest.raises(MeasurementError) as error:
        Command(text, **options).deliver(effect())
    assert not isinstance(error.value, Busy)  # a person looks before it is run again
    return str(error.value)


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def written(end):
    """To a pipe, until no one holds it open any more."""
    os.set_blocking(end, True)
    with open(end, "rb") as file:
        return file.read()


def test_a_program_gets_the_json_and_the_key(tmp_path):
    code = (
        "import json, os, sys; json.dump([json.load(sys.stdin), os.environ['SERVANDA_EFFECT'],"
        " os.environ['SERVANDA_IDEMPOTENCY_KEY']], open(sys.argv[1], 'w')); print('fine')"
    )
    path = tmp_path / "a file"
    Command(python(code, path)).deliver(effect("page", to="oncall"))
    key = "llama-int8-3f9a/4/notify"
    said = {"kind": "page", "key": key, **BODY, "to": "oncall"}
    assert json.loads(path.read_text()) == [said, "page", key]


def test_its_output_is_not_ours(capfd):
    Command(shell("echo out; echo err >&2")).deliver(effect())
    assert capfd.readouterr() == ("", "")


def test_a_program_that_reads_nothing_has_taken_it():
    Command("true").deliver(effect(why="x" * 1_000_000))


def test_a_child_that_is_left_behind_holds_nobody_up(tmp_path):
    """It has the program's standard error, and goes on until it may read."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    Command(shell(f"cat {gate} & true")).deliver(effect())
    os.close(os.open(gate, os.O_WRONLY))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("exit 3", "sh: exit code 3"),
        (
            "echo first >&2; echo the last one >&2; echo >&2; exit 1",
            "sh: exit code 1: the last one",
        ),
        (r"printf 'no \377\033[31mend' >&2; exit 1", "sh: exit code 1: no � [31mend"),
        ("kill -TERM $$", "sh: ended by signal 15"),
    ],
)
def test_a_program_that_fails_has_not_taken_it(code, said):
    assert refused(shell(code)) == said


def test_a_long_last_line_is_cut():
    said = refused(python("import sys; sys.exit('x' * 100_000)"))
    assert said.endswith("x…") and len(said) < 240


def test_a_program_that_takes_too_long_is_ended_with_all_that_it_started(pipe):
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    said = refused(shell(LINGERS.format(pipe=pipe)), limit_s=0.5)
    assert said.startswith("sh: took longer than 0.5 s and was ended")
    assert written(end) == b""


def test_ctrl_c_ends_it_with_all_that_it_started(pipe, monkeypatch):
    ends = []

    def interrupted(self, timeout):
        ends.append(os.open(pipe, os.O_RDONLY))  # which waits until the program has it open
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Command(shell(LINGERS.format(pipe=pipe))).deliver(effect())
    assert written(*ends) == b""


def test_a_program_that_is_gone_by_now_is_said(tmp_path):
    program = tmp_path / "tell"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    command = Command(str(program))
    program.unlink()
    with pytest.raises(MeasurementError) as error:
        command.deliver(effect())
    assert str(error.value) == "tell: cannot be run: No such file or directory"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "echo 'one",
            "--command cannot be split into words: no closing quotation\n"
            "  hint: it is split as a shell would; quote arguments with spaces",
        ),
        (" ", "--command names no program"),
        (
            "no-such-program --token x",
            "--command: there is no program 'no-such-program' that can be run\n"
            "  hint: no shell runs it: give a program, or 'sh -c \"...\"'",
        ),
    ],
)
def test_a_text_that_names_no_program_is_refused_before_anything(text, said):
    with pytest.raises(ContractError) as error:
        Command(text)
    assert str(error.value) == said
    assert error.value.exit_code == 2


def test_no_shell_reads_it(tmp_path):
    path = tmp_path / "made"
    Command(f"true ; touch {path}").deliver(effect())
    assert not path.exists()
