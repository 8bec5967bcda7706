# `servanda`: finds a command, and turns errors into exit codes.

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from servanda._version import __version__
from servanda.cli.commands import FIRST, GONE, GROUPS, HINTS, MODULES
from servanda.errors import ServandaError
from servanda.registry import did_you_mean

_FAILED, _INTERRUPTED = 4, 130
_HELP: dict[str, Any] = {"context_settings": {"help_option_names": ["-h", "--help"]}}
_SUMMARIES = {group: summary for group, (summary, _) in GROUPS.items()}


class _Commands(click.Group):
    """Commands of a table, each loaded when it is called: help and completion load none."""

    lines: Mapping[str, str]  # command -> its line of help

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.lines]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in self.lines if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=self.lines[name]) for name in names), *options]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _section(formatter, "Commands", self.lines)


def _section(formatter: click.HelpFormatter, heading: str, lines: Mapping[str, str]) -> None:
    with formatter.section(heading):
        formatter.write_dl([*lines.items()])


class _Section(_Commands):
    """One of the groups, such as `servanda contract`."""

    def __init__(self, name: str) -> None:
        summary, self.lines = GROUPS[name]
        super().__init__(name, help=summary, **_HELP)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in self.lines:
            raise _no_command(cmd_name, self.lines, ctx)
        return _load(str(self.name), cmd_name)


def _no_command(name: str, here: Mapping[str, str], ctx: click.Context) -> click.UsageError:
    """The error of a name that is none, with the nearest one, here or in another group."""
    from difflib import get_close_matches

    places = {name: f"{group} {name}" for group, (_, names) in GROUPS.items() for name in names}
    places |= {command: command for command in FIRST}
    near = get_close_matches(name, [*here, *places], n=1)
    hint = did_you_mean(name, [*here])
    if name in HINTS:
        hint = HINTS[name]
    elif near and near[0] not in here:
        hint = f"did you mean `servanda {places[near[0]]}`?"
    return click.UsageError(f"there is no command {name!r}\n  hint: {hint}", ctx)


def _hinted(error: click.NoSuchOption) -> click.UsageError:
    """The error of an option that other programs have, or that left, with what does the same."""
    context = error.ctx
    names = {name for param in context.command.params for name in param.opts} if context else set()
    hint = GONE.get((context.info_name or "", error.option_name), "") if context else ""
    if error.option_name == "--json" and "--format" in names:
        hint = "write --format json"
    return click.UsageError(f"{error.message}\n  hint: {hint}", context) if hint else error


def _load(group: str, name: str) -> click.Command:
    from servanda.cli.examples import add_examples

    module = import_module(f"servanda.cli.{MODULES.get((group, name), name.replace('-', '_'))}")
    commands = (c for c in vars(module).values() if isinstance(c, click.Command))
    command = next(command for command in commands if command.name == name)
    return add_examples(command, f"{group} {name}".strip())


class _Servanda(_Commands):
    """Prints our errors as they are: place, what was found, next move; never a traceback."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.lines = {**FIRST, **_SUMMARIES}

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ServandaError as error:
            click.echo(str(error), err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            sys.exit(_INTERRUPTED)
        except click.NoSuchOption as error:
            raise _hinted(error) from None
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except SystemExit as stop:
            *_, (frame, _) = traceback.walk_tb(stop.__traceback__)
            # a command may end itself; code that it called must not, for exit codes are answers
            if frame.f_globals.get("__name__", "").startswith("servanda.cli."):
                raise
            # 0 would say "holds", and no verdict was reached
            click.echo(f"servanda failed: something exited with {stop.code!r}", err=True)
            click.echo("  hint: a reward, an engine or a library called exit()", err=True)
            sys.exit(_FAILED)
        except Exception as error:
            # 1 would say "violated", and that is not what a bug of ours says
            if os.environ.get("SERVANDA_TRACEBACK"):
                traceback.print_exc()
            module = error.name if isinstance(error, ModuleNotFoundError) else None
            if module is not None and (extra := _extra_of(module)) is not None:
                click.echo(f"this command needs {module}, which is not installed here", err=True)
                click.echo(f"  hint: pip install 'servanda[{extra}]'", err=True)
                sys.exit(_FAILED)
            from servanda.traces.json_fields import words

            click.echo(f"servanda failed: {type(error).__name__}: {words(str(error))}", err=True)
            click.echo(
                "  hint: this is a bug of servanda; SERVANDA_TRACEBACK=1 shows where", err=True
            )
            sys.exit(_FAILED)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name in FIRST:
            return _load("", cmd_name)
        if cmd_name in GROUPS:
            return _Section(cmd_name)
        raise _no_command(cmd_name, self.lines, ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _section(formatter, "Commands", FIRST)
        _section(formatter, "More, in groups (`servanda GROUP --help`)", _SUMMARIES)


def _extra_of(module: str) -> str | None:
    """The extra of the package that installs a module, by the metadata of the installation."""
    from importlib.metadata import requires

    for line in requires("servanda") or ():
        found = re.match(r"([\w-]+).*; extra == '(\w+)'", line)
        if found and found[1].replace("-", "_") == module.partition(".")[0] and found[2] != "dev":
            return found[2]
    return None


@click.group(cls=_Servanda, **_HELP)
@click.version_option(__version__, prog_name="servanda")
def main() -> None:
    """Keep the agreement between the kernel that trains a policy and the one that serves it.

    Exit codes: 0 holds, 1 violated, 2 the text or the call is wrong, 3 inconclusive,
    4 measuring failed or was refused, 130 interrupted (the same command resumes).
    """
