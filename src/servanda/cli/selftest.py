# `servanda tools selftest`: would a gate on this server see what it is there to see?

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import click

from servanda.cli.options import format_option, no_code_option
from servanda.cli.progress import watching
from servanda.runner.compare.selftest import SEQUENCES, SelftestCase, selftest


@click.command("selftest")
@click.argument("url", metavar="URL")
@click.option("--referee", metavar="KERNEL", help="Re-scores, where the server cannot.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Lines of prompts.")
@click.option(
    "--sequences",
    type=click.IntRange(1),
    default=SEQUENCES,
    show_default=True,
    help="Prompt groups of a case at most.",
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=32, show_default=True)
@click.option("--quiet", is_flag=True, help="No progress.")
@format_option
@no_code_option
def selftest_command(
    url: str,
    referee: str | None,
    prompts: Path | None,
    sequences: int,
    max_new_tokens: int,
    quiet: bool,
    format_: str,
) -> None:
    """Compare the server at URL with itself, then with faults that are asked of it.

    It has to agree with itself, and a temperature of .95 and a top_p of .95 that no contract
    declares have to be found.  Nothing is changed on the server, and nothing is kept.

    Exit codes: 0 all of it, 1 the server breaks its agreement with itself, 3 something was
    not decided or not found at this size.
    """
    aside = format_ == "json"  # only the data goes to stdout then
    say = partial(click.echo, err=aside)
    say(f"selftest  {url}" + (f", re-scored by {referee}" if referee else ""))
    rows: list[SelftestCase] = []
    with (
        tempfile.TemporaryDirectory(prefix="servanda-selftest-") as place,
        watching(quiet) as watch,
    ):
        found = selftest(
            url,
            Path(place),
            referee=referee,
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            sequences=sequences,
            watch=watch,
        )
        for row in found:
            rows.append(row)
            say(_line(row))
    if aside:
        data = [
            {"case": r.case, "passed": r.passed, "by": r.by, "tokens": r.verdict.tokens}
            for r in rows
        ]
        click.echo(json.dumps(data, indent=1))
    if not rows[0].passed:
        said = rows[0].verdict.outcome
        say(f"the server against itself: {said}. A gate on it would be red by itself")
        sys.exit(rows[0].verdict.exit_code)
    missed = [row.case for row in rows if not row.passed]
    if missed:
        say(f"not found at this size: {'; '.join(missed)}. Try more: --sequences")
        sys.exit(3)
    click.echo(
        "a gate on this server holds when nothing is wrong, and sees an undisclosed sampler",
        err=aside,
    )


def _line(row: SelftestCase) -> str:
    verdict = row.verdict
    by = f"by {', '.join(row.by)}" if row.by else ""
    told = f"{verdict.outcome} {by}".strip()
    return f"{'✓' if row.passed else '✗'} {row.case:<30} {told}, {verdict.tokens:,} tokens"
