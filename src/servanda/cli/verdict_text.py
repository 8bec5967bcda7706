# A verdict on a terminal: in colour, and as wide as it is; a pipe gets the plain text.

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable

import click

from servanda.cli.output import show
from servanda.judgement.verdict import Verdict
from servanda.report.text import lines

_COLOURS = {"✓": "green", "✗": "red", "?": "yellow", "!": "yellow", "–": "bright_black"}
_COLOURS |= {"HOLDS": "green", "VIOLATED": "red", "INCONCLUSIVE": "yellow", "ERROR": "red"}
_COLOURS |= {"UNSOUND": "red"}
# a glyph that begins a row, or the answer in capitals
_MARK = re.compile(rf"^( *)({'|'.join(map(re.escape, _COLOURS))})(?=[ :])", re.M)


def show_verdict(verdict: Verdict, *more: str, err: bool = False) -> None:
    """Print a verdict as text, with lines after it."""
    stream = sys.stderr if err else sys.stdout
    columns = shutil.get_terminal_size().columns if stream.isatty() else 0
    show_marked([*lines(verdict, columns), *more], err=err)


def show_marked(texts: Iterable[str], *, err: bool = False) -> None:
    """Print lines; a terminal shows their glyphs and answers in colour, unless NO_COLOR is set."""
    text = "\n".join(texts)
    stream = sys.stderr if err else sys.stdout
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if stream.isatty() and not plain:
        text = _MARK.sub(lambda m: m[1] + click.style(m[2], fg=_COLOURS[m[2]], bold=True), text)
    show(text, err=err)


def next_step(verdict: Verdict, run_dir: object, *, page: bool = False) -> list[str]:
    """The command to run after a verdict that is not green; [] after one that is.

    Args:
        page: whether a page of it was written already.
    """
    if verdict.outcome == "violated" and not page:
        return [f"next: servanda tools report {run_dir} -o report.html   (the tokens behind it)"]
    if verdict.outcome == "inconclusive" and verdict.circumstances.stopped == "time":
        return ["next: the same command goes on with this run"]
    return []
