# `servanda`: errors to exit codes, and the verbs.

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import click

from servanda import __version__
from servanda.cli.check import check
from servanda.cli.compare import compare_command
from servanda.cli.demo import demo
from servanda.cli.explain import explain
from servanda.cli.init import init
from servanda.cli.lint import lint
from servanda.cli.measure import measure_command
from servanda.cli.plan import plan_command
from servanda.cli.presets import presets_command
from servanda.cli.report import report
from servanda.cli.schema import schema
from servanda.errors import ServandaError

_FAILED, _INTERRUPTED = 4, 130


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
        except Exception as error:
            # 1 would say "violated", and that is not what a bug of ours says
            if os.environ.get("SERVANDA_TRACEBACK"):
                traceback.print_exc()
            click.echo(f"servanda failed: {type(error).__name__}: {error}", err=True)
            click.echo(
                "  hint: this is a bug of servanda; SERVANDA_TRACEBACK=1 shows where", err=True
            )
            sys.exit(_FAILED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, verbs in VERBS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(verb.name or "", verb.get_short_help_str(100)) for verb in verbs]
                )


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="servanda")
def main() -> None:
    """Keep the agreement between the kernel that trains a policy and the one that serves it.

    Exit codes: 0 holds, 1 violated, 2 the text or the call is wrong, 3 inconclusive,
    4 measuring failed or was refused, 130 interrupted (the same command resumes).
    """


# heading of the help -> its verbs, the ones that people live in first
VERBS: dict[str, tuple[click.Command, ...]] = {
    "Measure and judge": (check, compare_command, report),
    "Contracts": (init, lint, explain, schema, plan_command, presets_command),
    "Pieces": (measure_command,),
    "See it": (demo,),
}
for _verbs in VERBS.values():
    for _verb in _verbs:
        main.add_command(_verb)
