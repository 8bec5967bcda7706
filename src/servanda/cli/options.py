# What commands share: types of parameters, options, and how they print.  One name means one thing
# everywhere.

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from servanda.contract.fields import seconds
from servanda.engines.foreign_code import ALLOWED_HOSTS, NO_CODE, exported
from servanda.errors import MeasurementError
from servanda.traces.serialization import to_plain

Command = TypeVar("Command", bound=Callable[..., Any])
DASH = "-"  # standard input or output
LOCAL = ("127.0.0.1", "localhost", "::1")  # hosts that only this machine reaches


def duration(text: str | float) -> float:
    """10m, 30s, 1h: in seconds."""
    try:
        return text if isinstance(text, float) else float(str(seconds(text)))
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}") from None


class FileType(click.Path):
    """A file or folder by its path.

    Args:
        dash: - is standard input or output, as the command says.
    """

    def __init__(self, *, dash: bool = False) -> None:
        super().__init__(path_type=Path)
        self.name, self.dash = "file", dash

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value) == DASH and not self.dash:
            self.fail("- is standard input or output, and this has to be a path", param, ctx)
        return super().convert(value, param, ctx)


class PlaceType(FileType):
    """A file or folder by its path, or by the URL of an object store."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "://" in value:
            from servanda.rl.dumps.storage import place

            return place(value)
        return super().convert(value, param, ctx)


class OutputPath(FileType):
    """A file to write to; None for -, standard output, where a command prints without it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return None if str(value) == DASH else super().convert(value, param, ctx)


FILE, FILE_OR_DASH = FileType(), FileType(dash=True)
PLACE, PLACE_OR_DASH = PlaceType(), PlaceType(dash=True)


def until(max_time: float | None) -> Callable[[], bool] | None:
    """Whether the time is over, counted from now; None: there is no end."""
    if max_time is None:
        return None
    end = time.monotonic() + max_time
    return lambda: time.monotonic() >= end


def together(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def given(names: Iterable[str]) -> list[str]:
    """The options of the command line, by the names of their parameters, that are there.

    One from the environment is not: it is meant for other commands too.
    """
    context = click.get_current_context()
    options = {param.name: param.opts[0] for param in context.command.params}
    line = ParameterSource.COMMANDLINE
    return [options[name] for name in names if context.get_parameter_source(name) is line]


def refuse_given(names: Iterable[str], why: str) -> None:
    """Refuse options that would say nothing.

    Raises:
        click.UsageError: one of them is given.
    """
    if options := given(names):
        raise click.UsageError(f"{why}: leave out {', '.join(options)}")


def host_and_port(option: str, text: str) -> tuple[str, int]:
    """Where to listen, from an option.

    Raises:
        click.UsageError: the text is not HOST:PORT.
    """
    host, _, port = text.rpartition(":")
    if ":" not in text or not port.isdigit() or int(port) > 65535:
        raise click.UsageError(f"{option} is HOST:PORT, not {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


@contextmanager
def needing(what: str, extras: str) -> Iterator[None]:
    """Imports that only an installation with these extras can do.

    Raises:
        MeasurementError: one of them is not there.
    """
    try:
        yield
    except ImportError as error:
        raise MeasurementError(
            f"{what} needs {error.name}, which is not installed",
            hint=f"pip install 'servanda[{extras}]'",
        ) from None


def _ledger_place(text: str) -> str:
    if text == DASH:
        raise click.BadParameter("- is standard input or output, and a ledger is neither")
    return text


def _export(ctx: click.Context, _: click.Parameter, value: bool | tuple[str, ...]) -> None:
    """Refuse what a contract names, or allow hosts, while the command runs."""
    if value:
        name, text = (NO_CODE, "1") if value is True else (ALLOWED_HOSTS, " ".join(value))
        ctx.with_resource(exported(name, text))


LOG_ROWS = "A file of rows, or a folder of .jsonl files.  Repeatable."
PRINTS = "Without this option, or with -: print."
_SHARED: dict[str, dict[str, Any]] = {}


def _share(option: str, help: str, **attributes: Any) -> None:
    """An option of several commands; `name` is that of its parameter, where it is another one.

    A command may add its own default and more help; tests hold what is the same everywhere.
    """
    _SHARED[option] = {"show_default": True, "help": help, **attributes}


_share(
    "--as",
    "Format of the dump, such as own.  [default: detected]",
    name="as_",
    metavar="NAME",
)
_share(
    "--reference",
    "Compare the steps with good runs: a file that `contract calibrate --save-reference` writes.",
    type=FILE,
)
_share("--bitwise", "Declare that both sides compute the same bits.", is_flag=True)
_share(
    "--claim",
    "Scope of the verdict: the tokens that were measured (realised), or all that such prompts "
    "would generate (population).",
    type=click.Choice(["realised", "population"]),
)
_share(
    "--command",
    "Program to run for each decision, with its JSON on standard input.  Repeatable.",
    metavar="COMMAND",
    multiple=True,
)
_share("--contract", "Contract file, such as my.kernelcontract.yaml.", type=FILE)
_share("--every", "Repeat, with this pause between evaluations, such as 30s.", type=duration)
_share("--fault", "Fault to inject, such as bf16_positions.", metavar="NAME")
_share("--force", "Overwrite a file that exists.", is_flag=True)
_share(
    "--format",
    "Format of the output, such as json.",
    name="format_",
    type=click.Choice(["text", "json"]),
    default="text",
)
_share(
    "--ladder",
    "Also measure standard formats (bfloat16, FP8, MXFP8, int4, NVFP4, an FP8 cache, ...) of A or "
    "train on the same texts, so that the report shows which of them the candidate is like.",
    is_flag=True,
)
_share("--fresh", "Start a new attempt, judged at a smaller α.", is_flag=True)
_share("--golden", "Fixed texts for the drift of logits, such as golden.jsonl.", type=FILE)
_share("--host", "Address to listen on.", default="127.0.0.1")
_share(
    "--ledger",
    "Ledger: a file for SQLite, or postgresql://USER@HOST/DATABASE.",
    name="where",
    metavar="WHERE",
    type=_ledger_place,
    envvar="SERVANDA_LEDGER",
    default="runs/ledger.db",
    show_envvar=True,
)
_share("--log", "Log of served requests, such as served.", name="logs", type=FILE, multiple=True)
_share(
    "--max-new-tokens",
    "Largest number of new tokens per response, such as 64.",
    type=click.IntRange(1, 1_000_000),
)
_share(
    "--max-time",
    "Start nothing new after this time, such as 30s or 10m; undecided cells stay inconclusive.",
    type=duration,
)
_share(
    "--no-code",
    "Refuse contracts and kernels that run their own code, send an API key, ask a server that "
    "--allow-host does not name, or read files outside their repository.  "
    "[env var: SERVANDA_NO_CODE]",
    is_flag=True,
    expose_value=False,
    callback=_export,
)
_share(
    "--allow-host",
    "Server that kernels may ask under --no-code, such as 127.0.0.1:8000.  Repeatable.",
    metavar="HOST[:PORT]",
    multiple=True,
    envvar=ALLOWED_HOSTS,
    show_envvar=True,
    expose_value=False,
    callback=_export,
)
_share(
    "--notify",
    "Another notifier: alertmanager=URL, apprise=URL, otlp=URL, or one of an installed package.  "
    "Repeatable.",
    metavar="NAME=VALUE",
    multiple=True,
    envvar="SERVANDA_NOTIFY",
    show_envvar=True,
)
_share(
    "--on",
    "Ray cluster that does the work: local, auto, or ray://HOST:PORT.",
    metavar="ADDRESS",
)
_share(
    "--port", "Port to listen on, such as 8000; 0 takes a free one.", type=click.IntRange(0, 65535)
)
_share(
    "--preset",
    "Preset of limits; `servanda contract presets` lists them.  [default: the one that fits]",
    metavar="NAME",
)
_share("--prompts", "File of prompts, one JSON object per line, such as prompts.jsonl.", type=FILE)
_share("--quiet", "Print the result only, without progress.", is_flag=True)
_share(
    "--ray-actor",
    "Options of Ray for the actor of a kernel, such as 'infer={\"num_gpus\": 1}'.  Repeatable.",
    name="actors",
    metavar="SIDE=JSON",
    multiple=True,
)
_share("--reason", "Reason, such as 'incident 12'; the ledger keeps it.", required=True)
_share(
    "--referee",
    "Reference scorer: a third kernel that re-scores the tokens of both sides, such as "
    "transformers:models/tiny-lm@float32.",
    metavar="KERNEL",
)
_share(
    "--report",
    "Further report to write, such as report.html; the suffix selects the format (.html .json .xml "
    ".sarif .md).  Repeatable.  With -o, - prints as well.",
    name="reports",
    type=FILE_OR_DASH,
    multiple=True,
)
_share(
    "--run-dir",
    "Folder of the run, such as runs/first; a run that is there is continued.",
    metavar="FOLDER",
    type=FILE,
)
_share(
    "--save-contract",
    "Also write the contract to FILE; - prints it, and everything else goes to stderr.",
    name="save",
    type=FILE_OR_DASH,
)
_share(
    "--sequences",
    "Largest number of prompt groups (a prompt with its responses), such as 512.",
    type=click.IntRange(1),
)
_share("--seed", "Seed of all random numbers, such as 7.", type=int, default=0)
_share(
    "--side",
    "Kernel of the contract to run, such as infer.",
    type=click.Choice(["train", "infer"]),
)
_share(
    "--slack",
    "Slack incoming webhook to post each decision to.  Repeatable.",
    metavar="URL",
    multiple=True,
    envvar="SERVANDA_SLACK",
    show_envvar=True,
)
_share(
    "--state", "Folder that keeps scores and decisions, such as state.", metavar="FOLDER", type=FILE
)
_share(
    "--temperature",
    "Sampling temperature, such as 1.",
    type=click.FloatRange(0, 100, min_open=True),
)
_share("--top-p", "Sampling top-p, such as 0.95.", type=click.FloatRange(0, 1, min_open=True))
_share("--ttl", "Lifetime, such as 24h.", type=duration)
_share("--unsafe-pickles", "Allow pickle files, which can run any code.", is_flag=True)
_share(
    "--webhook",
    "URL to POST each decision to, as JSON.  Repeatable.",
    metavar="URL",
    multiple=True,
    envvar="SERVANDA_WEBHOOK",
    show_envvar=True,
)
_share("-o", "Write to FILE, such as out.json.", name="--output", type=OutputPath())


def shared(*names: str, help: str = "", **changes: Any) -> Callable[[Command], Command]:
    """Options by their names, as every command has them.

    Args:
        help: after what the option says everywhere.
        changes: further attributes, such as a default.
    """
    if "--no-code" in names:
        names = (*names, "--allow-host")
    options = []
    for option in names:
        attributes = {**_SHARED[option], **changes}
        attributes["help"] = f"{attributes['help']}  {help}".strip()
        parameter = filter(None, [attributes.pop("name", None)])
        options.append(click.option(option, *parameter, **attributes))
    return together(*options)


# Standard output and standard error of every command.


def show(text: str, *, err: bool = False) -> None:
    """Print, though anyone who reads may have seen enough; the exit code still counts."""
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_json(data: Any, *, err: bool = False) -> None:
    """Print data; a number that does not exist is null, an infinite one a text."""
    show(json.dumps(to_plain(data), indent=1), err=err)


def show_as(format_: str, data: Any, text: str, *, err: bool = False) -> None:
    """Print data for the format json, and a text for any other."""
    if format_ == "json":
        show_json(data, err=err)
    else:
        show(text, err=err)
