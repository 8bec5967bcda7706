# `servanda bisect`: what makes B differ from A, by modules, builds or settings.

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from servanda.cli.options import FILE, refuse_given, shared
from servanda.cli.progress import watching
from servanda.cli.stdout import show, show_json

if TYPE_CHECKING:
    from servanda.runner.bisect.builds import Search
    from servanda.runner.measurement import Watch

_DIFFERENT = 1
_SIZES = (16, 32)  # sequences and new tokens of a search by modules


@click.command("bisect")
@click.argument("a", metavar="[A]", required=False)
@click.argument("b", metavar="[B]", required=False)
@click.option(
    "--builds", type=FILE, help="List of builds, one a line, the oldest first, such as builds.txt."
)
@click.option("--git", "commits", metavar="GOOD..BAD", help="Range of commits, such as v1.0..main.")
@click.option(
    "--repository",
    type=FILE,
    metavar="FOLDER",
    default=".",
    show_default=True,
    help="Repository of --git.",
)
@click.option(
    "--settings",
    type=FILE,
    help="Flags and NAME=VALUE of the environment, one a line, such as settings.txt.",
)
@click.option(
    "--run",
    "command",
    metavar="COMMAND",
    help="Shell command of a build, such as './serve.sh {}'; {} is the build, or the flags.",
)
@shared("--prompts", help="[default: the shipped ones]")
@shared("--preset", "--sequences", "--max-new-tokens", "--bitwise")
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
    builds: Path | None,
    commits: str | None,
    repository: Path,
    settings: Path | None,
    command: str | None,
    format_: str,
    quiet: bool,
    **options: Any,
) -> None:
    """Find what makes B differ from A: a module, a build or a setting.

    With A and B alone, two kernels of one architecture in transformers, each module of B runs on
    the inputs of A. The one whose output differs is at fault; what comes after it only passes the
    error on. Then the module of A takes its place: what it explains is the share of KL(B || A)
    that goes away.

    With --builds, --git or --settings, each state is tested. Without A and B, the exit code of
    --run answers: 0 good, 1 bad, and 3, 4 or 125 skip. With A and B, the command serves or
    prepares B, and a sequential comparison answers; {} in B is the build. An undecided state is
    skipped, never taken as good.

    Exit codes: 0 no difference beyond the noise, 1 found, 2 the call is wrong, 3 several builds
    or settings are left, because some were skipped, 4 measuring failed.
    """
    chosen = [given for given in (builds, commits, settings) if given is not None]
    if len(chosen) > 1:
        raise click.UsageError("give one of --builds, --git and --settings")
    if (a is None) != (b is None) or not (chosen or a):
        raise click.UsageError("give A and B, or one of --builds, --git and --settings")
    with watching(quiet) as watch:
        if not chosen:
            refuse_given(("command", "preset", "bitwise"), "modules are compared without them")
            _by_modules(str(a), str(b), format_, options, watch)
        refuse_given(("path",), "it is for modules")
        if format_ == "html":
            raise click.UsageError("--format html is for modules")
        found = _searched(a, b, command, options, (builds, commits, repository, settings), watch)
    if format_ == "json":
        show_json({**vars(found), "tokens": found.tokens})
    else:
        from servanda.cli.bisect_text import search_lines

        show("\n".join(search_lines(found)))
    sys.exit(3 if found.unsure else _DIFFERENT)


def _by_modules(a: str, b: str, format_: str, options: dict[str, Any], watch: Watch) -> None:
    from servanda.cli import bisect_page, bisect_text
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
        show(bisect_page.module_page(found))
    else:
        show("\n".join(bisect_text.module_lines(found)))
    sys.exit(0 if found.outcome == "same" else _DIFFERENT)


def _searched(
    a: str | None,
    b: str | None,
    command: str | None,
    options: dict[str, Any],
    where: tuple[Path | None, str | None, Path, Path | None],
    watch: Watch,
) -> Search:
    from servanda.runner.bisect.builds import Method, bisect_builds, bisect_git, bisect_settings
    from servanda.runner.compare.contract import Options

    builds, commits, repository, settings = where
    names = ("prompts", "preset", "sequences", "max_new_tokens", "bitwise")
    comparison = None
    if a is not None and b is not None:
        comparison = Options(a, b, **{name: options[name] for name in names})
    else:
        refuse_given(names, "the command measures")
    method = Method(command, comparison)
    if builds is not None:
        return bisect_builds([*_lines(builds)], method, watch=watch)
    if commits is not None:
        return bisect_git(repository, commits, method, watch=watch)
    assert settings is not None
    return bisect_settings([*_lines(settings)], method, watch=watch)


def _lines(path: Path) -> Iterator[str]:
    """Lines that are neither empty nor a comment."""
    from servanda.errors import ContractError

    with ContractError.of_system(f"{path} cannot be read", hint="name a file with one a line"):
        text = path.read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            yield line.strip()
