# `servanda bisect`: what makes B differ from A.

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from servanda.cli.options import shared
from servanda.cli.progress import watching
from servanda.cli.stdout import show, show_json

if TYPE_CHECKING:
    from servanda.runner.bisect.modules import ModuleBisection
    from servanda.runner.measurement import Watch

_DIFFERENT = 1


@click.command("bisect")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@shared("--prompts", help="[default: the shipped ones]")
@shared("--sequences", default=16)
@shared("--max-new-tokens", default=32)
@click.option(
    "--path",
    type=click.Choice(["prefill", "decode"]),
    default="prefill",
    show_default=True,
    help="How the tokens are scored; decode also goes through the cache.",
)
@shared(
    "--format",
    type=click.Choice(["text", "json", "html"]),
    help="html draws the errors along the model.",
)
@shared("--quiet", "--no-code")
def bisect_command(
    a: str,
    b: str,
    prompts: Path | None,
    sequences: int,
    max_new_tokens: int,
    path: str,
    format_: str,
    quiet: bool,
) -> None:
    """Find the module that makes B differ from A, two kernels of one architecture.

    A and B are kernel strings of the engine transformers.  B draws tokens, and both score them in
    this process.  Each module of B runs on the inputs of A: the one whose output differs is at
    fault, and what comes after it only passes the error on.  Then the module of A takes its place,
    and the share of KL(B || A) that goes away is what the module explains.

    Exit codes: 0 no difference beyond the noise, 1 a difference, 2 the call is wrong,
    4 scoring failed.
    """
    with watching(quiet) as watch:
        found = _modules(a, b, prompts, (sequences, max_new_tokens), path, watch)
    if format_ == "json":
        show_json({"outcome": found.outcome, **vars(found)})
    elif format_ == "html":
        from servanda.cli.bisect_page import module_page

        show(module_page(found))
    else:
        from servanda.cli.bisect_text import module_lines

        show("\n".join(module_lines(found)))
    sys.exit(0 if found.outcome == "same" else _DIFFERENT)


def _modules(
    a: str, b: str, prompts: Path | None, sizes: tuple[int, int], path: Any, watch: Watch
) -> ModuleBisection:
    from servanda.runner.bisect.modules import bisect_kernels

    return bisect_kernels(a, b, prompts, *sizes, path, watch=watch)
