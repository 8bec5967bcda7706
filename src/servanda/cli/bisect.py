# `servanda bisect`: what makes B differ from A, by modules or settings.

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from servanda.cli.options import FILE, refuse_given, shared
from servanda.cli.screen import watching
from servanda.cli.stdout import show, show_as, show_json

if TYPE_CHECKING:
    from servanda.runner.measurement import Watch

_DIFFERENT = 1
_SIZES = (16, 32)  # sequences and new tokens of a search by modules


@click.command("bisect")
@click.argument("a", metavar="[A]", required=False)
@click.argument("b", metavar="[B]", required=False)
@click.option(
    "--settings",
    type=FILE,
    help="Flags and NAME=VALUE of the environment, one a line, such as settings.txt.",
)
@click.option(
    "--run",
    "command",
    metavar="COMMAND",
    help="Shell command of --settings, such as './judge.sh {}'; {} is the flags.",
)
@shared("--prompts", help="[default: the shipped ones]")
@shared("--sequences", "--max-new-tokens")
@click.option(
    "--path",
    type=click.Choice(["prefill", "decode"]),
    default="prefill",
    show_default=True,
    help="How modules score the tokens; decode also goes through the cache.",
)
@shared(
    "--format",
    type=click.Choice(["text", "json", "html"]),
    help="html is for modules: it draws the errors along the model.",
)
@shared("--quiet", "--no-code")
def bisect_command(
    a: str | None,
    b: str | None,
    settings: Path | None,
    command: str | None,
    format_: str,
    quiet: bool,
    **options: Any,
) -> None:
    """Find what makes B differ from A: a module or a setting.

    With A and B alone, two kernels of one architecture in transformers, each module of B runs on
    the inputs of A. The one whose output differs is at fault; what comes after it only passes the
    error on. Then the module of A takes its place: what it explains is the share of KL(B || A)
    that goes away.

    With --settings, the exit code of --run answers: 0 good, 1 bad, and 3, 4 or 125 skip. The
    command has to be good without the settings and bad with all. One after another is removed,
    as long as the rest is bad.
    """
    if (a is None) != (b is None) or (a is None) == (settings is None):
        raise click.UsageError("give A and B, or --settings")
    if settings is not None:
        refuse_given(("prompts", "path", "sequences", "max_new_tokens"), "settings have no modules")
        if format_ == "html":
            raise click.UsageError("--format html is for modules")
        _by_settings(settings, command, format_)
    refuse_given(("command",), "modules are compared without it")
    with watching(quiet) as watch:
        _by_modules(str(a), str(b), format_, options, watch)


def _by_modules(a: str, b: str, format_: str, options: dict[str, Any], watch: Watch) -> None:
    from servanda.cli import bisect_result
    from servanda.runner.bisect.modules import bisect_kernels

    sequences, width = (
        options[name] or size
        for name, size in zip(("sequences", "max_new_tokens"), _SIZES, strict=True)
    )
    found = bisect_kernels(a, b, options["prompts"], sequences, width, options["path"], watch=watch)
    if format_ == "json":
        outliers = [module.name for module, _ in found.outliers]
        show_json({"outcome": found.outcome, "outliers": outliers, **vars(found)})
    elif format_ == "html":
        show(bisect_result.module_page(found))
    else:
        show("\n".join(bisect_result.module_lines(found)))
    sys.exit(0 if found.outcome == "same" else _DIFFERENT)


def _by_settings(file: Path, command: str | None, format_: str) -> None:
    from servanda.cli.bisect_result import setting_lines
    from servanda.errors import ContractError
    from servanda.runner.bisect.settings import bisect_settings

    with ContractError.of_system(f"{file} cannot be read", hint="name a file with one a line"):
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    found = bisect_settings([s for s in lines if s and not s.startswith("#")], command)
    probes = [{"settings": some, "outcome": outcome} for some, outcome in found.probes.items()]
    show_as(format_, {**vars(found), "probes": probes}, "\n".join(setting_lines(found)))
    sys.exit(3 if found.undecided else _DIFFERENT)
