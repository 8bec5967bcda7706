# `servanda`: errors to exit codes, and the verbs.

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from typing import Any

import click

from servanda._version import __version__
from servanda.errors import ServandaError
from servanda.registry import did_you_mean

_FAILED, _INTERRUPTED = 4, 130

# heading of the help -> its verbs, the ones that people live in first; each is the command of
# the module of its name, imported when it is asked for
VERBS: dict[str, tuple[str, ...]] = {
    "Measure and judge": ("check", "compare", "preflight", "watch", "import", "report"),
    "Contracts": (
        *("init", "lint", "explain", "schema", "plan", "derive", "calibrate", "presets"),
        *("diff", "list", "test"),
    ),
    "Promote": ("promote", "can-promote", "approve", "override", "rollback", "status", "ledger"),
    "Gateway": ("serve", "audit", "pin"),
    "Pieces": ("measure",),
    "Servers": ("selftest", "serve-kernel"),
    "See it": ("demo",),
}
# a verb whose name Python keeps for itself -> its module
_MODULES = {"import": "import_"}
# verbs of before that are none now, and what to run instead
_LEFT = {"bench": "in a clone of the repository: python -m benchmarks.theory"}


class _Group(click.Group):
    """Prints our errors as they are: place, what was found, next move; never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ServandaError as error:
            click.echo(str(error), err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            sys.exit(_INTERRUPTED)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except SystemExit as stop:
            if _by_a_verb(stop):
                raise
            # 0 would say "holds", and no verdict was reached
            click.echo(f"servanda failed: something exited with {stop.code!r}", err=True)
            click.echo("  hint: a reward, an engine or a library called exit()", err=True)
            sys.exit(_FAILED)
        except Exception as error:
            # 1 would say "violated", and that is not what a bug of ours says
            if os.environ.get("SERVANDA_TRACEBACK"):
                traceback.print_exc()
            click.echo(f"servanda failed: {type(error).__name__}: {error}", err=True)
            click.echo(
                "  hint: this is a bug of servanda; SERVANDA_TRACEBACK=1 shows where", err=True
            )
            sys.exit(_FAILED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [verb for verbs in VERBS.values() for verb in verbs]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        verbs = self.list_commands(ctx)
        if cmd_name not in verbs:
            hint = _LEFT.get(cmd_name) or did_you_mean(cmd_name, verbs)
            raise click.UsageError(f"there is no command {cmd_name!r}\n  hint: {hint}", ctx)
        name = _MODULES.get(cmd_name, cmd_name.replace("-", "_"))
        module = import_module(f"servanda.cli.{name}")
        found = (v for v in vars(module).values() if isinstance(v, click.Command))
        return next(verb for verb in found if verb.name == cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, verbs in VERBS.items():
            found = [(verb, self.get_command(ctx, verb)) for verb in verbs]
            with formatter.section(heading):
                formatter.write_dl([(name, v.get_short_help_str(100)) for name, v in found])


def _by_a_verb(stop: SystemExit) -> bool:
    """Whether a verb ended itself; code that it called must not, for exit codes are answers."""
    *_, (frame, _) = traceback.walk_tb(stop.__traceback__)
    return frame.f_globals.get("__name__", "").startswith("servanda.cli.")


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="servanda")
def main() -> None:
    """Keep the agreement between the kernel that trains a policy and the one that serves it.

    Exit codes: 0 holds, 1 violated, 2 the text or the call is wrong, 3 inconclusive,
    4 measuring failed or was refused, 130 interrupted (the same command resumes).
    """
