# `servanda`: errors to exit codes, and the verbs.

from __future__ import annotations

import sys
from typing import Any

import click

from servanda import __version__
from servanda.cli.check import check
from servanda.cli.demo import demo
from servanda.errors import ServandaError


class _Group(click.Group):
    """Prints our errors as they are: place, what was found, next move; never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ServandaError as error:
            click.echo(str(error), err=True)
            sys.exit(error.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="servanda")
def main() -> None:
    """Keep the agreement between the kernel that trains a policy and the one that serves it.

    Exit codes: 0 holds, 1 violated, 2 the text or the call is wrong, 3 inconclusive,
    4 measuring failed or was refused, 130 interrupted (the same command resumes).
    """


main.add_command(check)
main.add_command(demo)
