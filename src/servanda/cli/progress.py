# Progress: a bar on a terminal, a plain line now and then elsewhere, both on stderr.

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from servanda.runner.measurement import Progress, Watch, unwatched
from servanda.runner.sequential import named

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
