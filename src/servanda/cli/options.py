# Types of parameters, and the options of several commands: one name means one thing everywhere.

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from servanda.contract.fields import seconds
from servanda.engines.foreign_code import NO_CODE

Command = TypeVar("Command", bound=Callable[..., Any])
DASH = "-"  # standard input or output


class DurationType(click.ParamType):
    """10m, 30s, 1h: in seconds.

    Args:
        bare: a number without a unit is seconds.
    """

    name = "duration"

    def __init__(self, *, bare: bool = False) -> None:
        self.bare = bare

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        try:
            duration = seconds(f"{value}s" if self.bare and value[-1:].isdigit() else value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)
        assert isinstance(duration, float)
        return duration


class FileType(click.Path):
    """A file or folder by its path.

    Args:
        dash: - is standard input or output, as the command says.
    """

    def __init__(self, *, dash: bool = False) -> None:
        super().__init__(path_type=Path)
        self.dash = dash

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value) == DASH and not self.dash:
            self.fail("- is standard input or output, and this has to be a path", param, ctx)
        return super().convert(value, param, ctx)


class OutputPath(FileType):
    """A file to write to; None for -, standard output, where a command prints without it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return None if str(value) == DASH else super().convert(value, param, ctx)


FILE, FILE_OR_DASH = FileType(), FileType(dash=True)


def until(max_time: float | None) -> Callable[[], bool] | None:
    """Whether the time is over, counted from now; None: there is no end."""
    if max_time is None:
        return None
    end = time.monotonic() + max_time
    return lambda: time.monotonic() >= end


def together(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Several options as one decorator."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def given(*names: str) -> list[str]:
    """The options of the command line, by the names of their parameters, that are there.

    One from the environment is not: it is meant for other commands too.
    """
    context = click.get_current_context()
    options = {param.name: param.opts[0] for param in context.command.params}
    line = ParameterSource.COMMANDLINE
    return [options[name] for name in names if context.get_parameter_source(name) is line]


def refuse_given(names: tuple[str, ...], why: str) -> None:
    """Refuse options that would say nothing.

    Raises:
        click.UsageError: one of them is given.
    """
    if options := given(*names):
        raise click.UsageError(f"{why}: leave out {', '.join(options)}")


def _ledger_place(text: str) -> str:
    if text == DASH:
        raise click.BadParameter("- is standard input or output, and a ledger is neither")
    return text


@contextmanager
def _code_refused() -> Iterator[None]:
    before = os.environ.get(NO_CODE)
    os.environ[NO_CODE] = "1"  # of child processes too
    try:
        yield
    finally:
        os.environ.pop(NO_CODE)
        os.environ.update({} if before is None else {NO_CODE: before})


def _refuse_code(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    """Refuse code that a contract names while the command runs."""
    if value:
        ctx.with_resource(_code_refused())


LOG_ROWS = "A file of rows, or a folder of .jsonl files; may be given again."
PRINTS = "Without it, or with -: print."
_SAMPLED = "Of sampling, such as"
# option -> the name of its parameter, where that is another one, and its attributes; a command may
# add its own default and say more in `help`, and tests hold what is the same everywhere
_SHARED: dict[str, dict[str, Any]] = {
    "--as": {
        "name": "as_",
        "metavar": "NAME",
        "help": "The dump's format, such as verl.  [default: it is found out]",
    },
    "--bitwise": {"is_flag": True, "help": "Both sides compute the same bits, I declare."},
    "--claim": {
        "type": click.Choice(["realised", "population"]),
        "help": "Of the tokens measured, or of all that such prompts bring forth.",
    },
    "--command": {
        "metavar": "COMMAND",
        "multiple": True,
        "help": "Run a program for what is decided, with the JSON on its input; may be given "
        "again.",
    },
    "--contract": {"metavar": "FILE", "type": FILE, "help": "A contract."},
    "--every": {"type": DurationType(), "help": "Keep looking, with this pause, such as 30s."},
    "--fault": {"metavar": "NAME", "help": "A fault."},
    "--force": {"is_flag": True, "help": "Write over a file that is there."},
    "--format": {
        "name": "format_",
        "type": click.Choice(["text", "json"]),
        "default": "text",
        "help": "Of what is printed.",
    },
    "--fresh": {"is_flag": True, "help": "Open a new attempt, judged at a smaller alpha."},
    "--golden": {"metavar": "FILE", "type": FILE, "help": "Fixed texts, for the drift of logits."},
    "--host": {"default": "127.0.0.1", "help": "Where users ask."},
    "--ledger": {
        "name": "where",
        "metavar": "WHERE",
        "type": _ledger_place,
        "envvar": "SERVANDA_LEDGER",
        "default": "runs/ledger.db",
        "show_envvar": True,
        "help": "A file for SQLite, or postgresql://USER@HOST/DATABASE.",
    },
    "--log": {
        "name": "logs",
        "type": FILE,
        "multiple": True,
        "help": "The log of served requests.",
    },
    "--max-new-tokens": {
        "type": click.IntRange(1, 1_000_000),
        "help": "New tokens of an answer at most.",
    },
    "--max-time": {
        "type": DurationType(),
        "help": "Start nothing new after this time, such as 30s or 10m; what is open stays "
        "inconclusive.",
    },
    "--no-code": {
        "is_flag": True,
        "expose_value": False,
        "callback": _refuse_code,
        "help": "Refuse contracts and kernels that run code of their own, or send a key.  "
        "[env var: SERVANDA_NO_CODE]",
    },
    "--port": {"type": click.IntRange(0, 65535), "help": "Its port; 0 takes a free one."},
    "--preset": {
        "metavar": "NAME",
        "help": "Limits; `servanda contract presets` lists them.  [default: those that fit]",
    },
    "--prompts": {"metavar": "FILE", "type": FILE, "help": "Lines of prompts."},
    "--quiet": {"is_flag": True, "help": "Only the result, and no progress."},
    "--reason": {"required": True, "help": "Why: the ledger keeps it."},
    "--referee": {"metavar": "KERNEL", "help": "Re-scores the tokens of both sides."},
    "--report": {
        "name": "reports",
        "metavar": "FILE",
        "type": FILE_OR_DASH,
        "multiple": True,
        "help": "Write this one too; its suffix says the format (.html .json .xml .sarif .md).  "
        "With -o, - prints as well.",
    },
    "--run-dir": {"type": FILE, "help": "Where to measure; a run there is continued."},
    "--save-contract": {
        "name": "save",
        "metavar": "FILE",
        "type": FILE_OR_DASH,
        "help": "Write the contract to FILE, too; - prints it, and all else goes to stderr.",
    },
    "--sequences": {"type": click.IntRange(1), "help": "Prompt groups at most, such as 512."},
    "--slack": {
        "metavar": "URL",
        "multiple": True,
        "envvar": "SERVANDA_SLACK",
        "show_envvar": True,
        "help": "POST what changed to an incoming webhook of Slack; may be given again.",
    },
    "--state": {"metavar": "FOLDER", "type": FILE, "help": "Keeps what was scored and decided."},
    "--temperature": {
        "type": click.FloatRange(0, 100, min_open=True),
        "help": f"{_SAMPLED} 1.",
    },
    "--top-p": {"type": click.FloatRange(0, 1, min_open=True), "help": f"{_SAMPLED} 0.95."},
    "--ttl": {"type": DurationType(), "help": "How long, such as 24h."},
    "--unsafe-pickles": {"is_flag": True, "help": "Read pickles, which can run any code."},
    "--webhook": {
        "metavar": "URL",
        "multiple": True,
        "envvar": "SERVANDA_WEBHOOK",
        "show_envvar": True,
        "help": "POST what is decided to URL, as JSON; may be given again.",
    },
    "-o": {
        "name": "--output",
        "metavar": "FILE",
        "type": OutputPath(),
        "help": "Write to FILE.",
    },
}


def shared(*names: str, help: str = "", **changes: Any) -> Callable[[Command], Command]:
    """Options by their names, as every command has them.

    Args:
        help: after what the option says everywhere.
        changes: further attributes, such as a default.
    """
    return together(*(_option(name, help, changes) for name in names))


def _option(name: str, more: str, changes: dict[str, Any]) -> Callable[[Any], Any]:
    attributes = {"show_default": True, **_SHARED[name], **changes}
    text = f"{attributes.get('help', '')}  {more}".strip()
    names = (name, *filter(None, [attributes.pop("name", None)]))
    return click.option(*names, **{**attributes, "help": text})
