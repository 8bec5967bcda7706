# Standard output and standard error of every command.

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import click

from servanda.cli.options import show
from servanda.judgement.verdict import Verdict
from servanda.report.text import lines
from servanda.runner.measurement import Progress, Watch, unwatched
from servanda.runner.sequential import named

# Progress: a bar on a terminal, a plain line now and then elsewhere, both on stderr.


_PLAIN_EVERY_S = 5.0


@contextmanager
def watching(
    quiet: bool = False, above: Callable[[], str] | None = None, run: str = ""
) -> Iterator[Watch]:
    """Something to give to `run.check(watch=...)`.

    Args:
        above: a text that a terminal shows above the bars, as it is at the time.
        run: which of several runs this is, such as "run 1 of 2"; each line begins with it.
    """
    if quiet or sys.stderr is None:
        yield unwatched
        return
    with _bar(above or str) if sys.stderr.isatty() else nullcontext(_plain()) as watch:
        yield named(watch, run) if run else watch


def _plain() -> Watch:
    started: dict[str, float] = {}
    last: dict[str, float] = {}

    def watch(progress: Progress) -> None:
        now = time.monotonic()
        if progress.what in last and now - last[progress.what] < _PLAIN_EVERY_S:
            return
        first = progress.what not in last
        last[progress.what] = now
        began = started.setdefault(progress.what, now)
        if first and progress.done == 0:
            print(f"{progress} ...", file=sys.stderr, flush=True)
            return
        rate = progress.done / max(now - began, 1e-9)
        left = max(progress.total - progress.done, 0) / rate if rate else 0.0
        print(
            f"{progress}: {progress.done:,} of about {progress.total:,}, "
            f"{now - began:.0f} s, about {left:.0f} s more",
            file=sys.stderr,
            flush=True,
        )

    return watch


@contextmanager
def _bar(above: Callable[[], str]) -> Iterator[Watch]:
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Bar(Bars):
        def get_renderables(self) -> Iterator[RenderableType]:
            if text := above():
                yield Text(text)
            yield from super().get_renderables()

    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("about"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def watch(progress: Progress) -> None:
            if progress.done >= progress.total and progress.what in tasks:
                bar.update(tasks[progress.what], visible=False)
                return
            if progress.what not in tasks:
                tasks[progress.what] = bar.add_task(str(progress), total=progress.total)
            bar.update(tasks[progress.what], completed=progress.done, total=progress.total)

        yield watch


# A verdict on a terminal: in colour, and as wide as it is; a pipe gets the plain text.


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
