# `servanda tools selftest`: would a gate on this server see what it is there to see?

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import click

from servanda.cli.cost_table import cost_line
from servanda.cli.options import shared, show_json
from servanda.cli.screen import watching
from servanda.judgement.cost import Cost
from servanda.report.format import count
from servanda.runner.compare.selftest import CASES, SEQUENCES, SelftestCase, selftest


@click.command("selftest")
@click.argument("url", metavar="URL")
@shared("--referee")
@shared("--prompts", help="[default: the shipped ones]")
@shared("--sequences", default=SEQUENCES)
@shared("--max-new-tokens", default=32)
@shared("--quiet", "--format", "--no-code")
def selftest_command(
    url: str, referee: str | None, quiet: bool, format_: str, **options: Any
) -> None:
    """Compare the server at URL with itself, then with two faults in the sampling parameters.

    The server has to agree with itself, and an undeclared temperature of 0.95 and an undeclared
    top_p of 0.95 have to be detected.  The server is not changed, and no file is kept.
    """
    aside = format_ == "json"  # only the data goes to stdout then
    say = partial(click.echo, err=aside)
    say(f"selftest  {url}" + (f", re-scored by {referee}" if referee else ""))

    def expect(cost: Cost) -> None:
        say(f"cost      {len(CASES)} parts, and of each: {cost_line(cost)}")

    rows: list[SelftestCase] = []
    with (
        tempfile.TemporaryDirectory(prefix="servanda-selftest-") as place,
        watching(quiet) as watch,
    ):
        for row in selftest(
            url, Path(place), referee=referee, watch=watch, expect=expect, **options
        ):
            rows.append(row)
            by = f" by {', '.join(row.by)}" if row.by else ""
            outcome, tokens = f"{row.verdict.outcome}{by}", row.verdict.tokens
            say(f"{'✓' if row.passed else '✗'} {row.case:<30} {outcome}, {count(tokens, 'token')}")
    if aside:
        show_json(
            [
                {"case": row.case, "passed": row.passed, "by": row.by, "tokens": row.verdict.tokens}
                for row in rows
            ]
        )
    if not rows[0].passed:
        outcome = rows[0].verdict.outcome
        say(f"the server compared with itself: {outcome}. Checks of it fail without any fault")
        advice = rows[0].verdict.advice
        if advice is not None and advice.cause:
            say(f"likely cause: {advice.cause}")
        say(f"next: servanda relations {url}")
        sys.exit(rows[0].verdict.exit_code)
    missed = [row.case for row in rows if not row.passed]
    if missed:
        say(f"not detected at this size: {'; '.join(missed)}. Try a larger --sequences")
        sys.exit(3)
    say("a check of this server holds without a fault, and detects an undeclared sampler setting")
