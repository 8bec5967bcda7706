# `servanda`: finds a command, and turns errors into exit codes.

from __future__ import annotations

import os
import re
import sys
import textwrap
import traceback
from collections.abc import Mapping
from importlib import import_module
from inspect import cleandoc
from typing import Any

import click
from click.shell_completion import CompletionItem

from servanda._version import __version__
from servanda.cli.commands import FIRST, GONE, GROUPS, HINTS, MODULES, exit_codes
from servanda.errors import ServandaError
from servanda.registry import did_you_mean

# Two calls of each command, for the end of its help.


_WIDTH = 74
_MODEL = "transformers:models/tiny-lm"
_SIDES = f"{_MODEL}@float32 {_MODEL}@bfloat16"
# a command's words -> its arguments and options, as typed
EXAMPLES: dict[str, tuple[str, ...]] = {
    "check": (
        "my.kernelcontract.yaml --report report.html",
        "logs/rollouts --steps 10:20    # a trainer's dump",
    ),
    "compare": (
        _SIDES,
        "http://127.0.0.1:8000 http://127.0.0.1:8001 --prompts prompts.jsonl --plan",
    ),
    "relations": (
        "http://127.0.0.1:8000",
        f"{_MODEL}@float32,prefix_cache=16 --only prefix-cache --only batching",
    ),
    "bisect": (_SIDES, f"{_SIDES} --path decode --format html > bisect.html"),
    "preflight": ("my_drill.py:trainee", "--trl train.py --format json"),
    "watch": ("logs/rollouts", "runs/monitor.jsonl --every 30s"),
    "promote": ("my.kernelcontract.yaml", "my.kernelcontract.yaml --log served.jsonl --every 1m"),
    "serve": (
        "my.kernelcontract.yaml --infer-url http://127.0.0.1:8001 --stable-url "
        "http://127.0.0.1:8000",
        "my.kernelcontract.yaml --infer-url http://127.0.0.1:8001 --stable-url "
        "http://127.0.0.1:8000 --port 8080",
    ),
    "demo": ("--fault bf16_positions", "--files ."),
    "contract init": (
        "my.kernelcontract.yaml --model models/my-model",
        "- --engine openai_http --model my-model    # print it",
    ),
    "contract lint": ("my.kernelcontract.yaml", "contracts/*.kernelcontract.yaml --format json"),
    "contract explain": ("my.kernelcontract.yaml", "tv"),
    "contract schema": ("", "> kernelcontract.schema.json"),
    "contract plan": ("my.kernelcontract.yaml", "my.kernelcontract.yaml --no-probe"),
    "contract derive": (
        f"--train {_MODEL}@float32 --infer {_MODEL}@bfloat16 --prompts data/prompts.jsonl "
        "--max-new-tokens 64 --reward-drift 0.05 -o derived.kernelcontract.yaml",
        f"--train {_MODEL}@float32 --infer {_MODEL}@bfloat16 --prompts data/prompts.jsonl "
        "--max-new-tokens 64 --policy-gradient-bias 0.1 --advantage 1 --score-norm logit_space",
    ),
    "contract calibrate": (
        "runs/first --save-contract calibrated.yaml",
        "good-*.jsonl --recorded 9 --save-reference good.reference.json",
    ),
    "contract presets": ("", "--show fp8"),
    "contract diff": ("old.yaml new.yaml", "old.yaml new.yaml --reader producer"),
    "contract test": ("tests/my.kerneltest.yaml", "tests --faults --fault bf16_positions"),
    "promotion status": ("--ledger runs/ledger.db", "--format json"),
    "promotion can-promote": (
        "my.kernelcontract.yaml --to canary",
        "my.kernelcontract.yaml --to full --format json",
    ),
    "promotion approve": (
        "my-run --reason 'reviewed by the team'",
        "my-run --reason 'reviewed by the team' --ledger runs/ledger.db",
    ),
    "promotion override": (
        "my-run --clause tv --ttl 24h --reason 'known issue'",
        "my-run --clause tv --slice long --ttl 24h --reason 'known issue'",
    ),
    "promotion rollback": (
        "my-run --reason 'incident 12'",
        "my-run --reason 'incident 12' --format json",
    ),
    "promotion ledger show": ("", "--format json"),
    "promotion ledger verify": ("", "--ledger runs/ledger.db --format json"),
    "promotion ledger export": ("", "-o ledger.jsonl"),
    "gateway status": ("", "--format json"),
    "gateway pin": (
        "all --to stable --ttl 1h --reason 'incident 12'",
        "all --release --reason 'incident 12 is over'",
    ),
    "gateway audit": (
        "my.kernelcontract.yaml --log served.jsonl",
        "my.kernelcontract.yaml --log served.jsonl --format json",
    ),
    "gateway envoy": (
        "--leader http://127.0.0.1:8081",
        "--leader http://127.0.0.1:8081 --grpc 0.0.0.0:9002 --http 0.0.0.0:9003",
    ),
    "tools measure": (
        f"{_MODEL}@float32 --golden data/golden.jsonl -o reference.pack",
        "my.kernelcontract.yaml --side infer -o infer.pack",
    ),
    "tools report": ("runs/first -o report.html", "runs/first --format markdown"),
    "tools kld": (
        f"{_MODEL}@bfloat16 --base base.kld",
        f"{_MODEL} --texts texts.jsonl --save-base base.kld --context 256",
    ),
    "tools weights": ("hf-before hf-after", "hf-before hf-after --format json"),
    "tools selftest": (
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8000 --referee transformers:models/tiny-lm",
    ),
    "tools serve-kernel": (f"{_MODEL}@bfloat16", f"{_MODEL} --port 8001 --test-mode"),
}


def complete_help(command: click.Command, words: str) -> click.Command:
    """The command, with exit codes and examples in its help; those of a group's commands, too."""
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            complete_help(part, f"{words} {name}")
    elif command.epilog is None:  # a command is loaded more than once
        command.help = f"{cleandoc(command.help or '')}\n\n{exit_codes(words)}"
        calls = [f"servanda {words} {example}".rstrip() for example in EXAMPLES[words]]
        command.epilog = "\n".join(["\b", "Examples:", *map(_in_lines, calls)])
    return command


def _in_lines(call: str) -> str:
    """A call that a shell reads, in lines of a terminal."""
    parts = textwrap.wrap(
        call,
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="      ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return " \\\n".join(parts)


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
    module = import_module(f"servanda.cli.{MODULES.get((group, name), name.replace('-', '_'))}")
    commands = (c for c in vars(module).values() if isinstance(c, click.Command))
    command = next(command for command in commands if command.name == name)
    return complete_help(command, f"{group} {name}".strip())


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
    """Keep the agreement between the kernel that trains a policy and the one that serves it."""


main.help = f"{main.help}\n\n{exit_codes('')}"
