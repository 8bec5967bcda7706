# `servanda contract plan`: what a contract will measure, cost and decide, before it does.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from servanda.cli.cost_table import HEADS, cost_line, plan_data, plan_lines, row
from servanda.cli.input import contract_at
from servanda.cli.options import FILE_OR_DASH, shared, show, show_json
from servanda.cli.screen import watching
from servanda.engines.worker import spawn
from servanda.judgement.cost import Cost, Decides, cost_of, power_curve
from servanda.judgement.plan import Plan
from servanda.report import format
from servanda.report.format import number
from servanda.report.html import Sheet, Story, board
from servanda.report.html_pictures import (
    WIDE,
    Markup,
    Scale,
    Tick,
    curve,
    key,
    line,
    mark,
    plot,
    spaced,
    text,
    toned,
)
from servanda.runner import run
from servanda.runner.compare.contract import costed
from servanda.runner.probe import Engines

# A plan as a page: how many samples each clause needs, against the true value.


_FAR = 3.0  # limits: the right edge of a picture
_DECADES, _PER_DECADE = 2, 8  # sizes on each side of the planned one
_PANELS = 8  # clauses and slices that are drawn; the table has all
_HEIGHT = 220  # pixels
_NOTE = Markup(
    f"{key('holds', 'holds ')}{key('violated', 'violated')}<br>Nine of ten runs of a size above "
    "the line decide. Solid: the worst case, in which tokens differ completely or not at all; "
    "dashed: every token has the mean. Vertical: the limit; horizontal: the size of this plan."
)


def sizes(planned: int) -> list[int]:
    """Sizes around the planned one, which is one of them; evenly on a log scale."""
    steps = range(-_DECADES * _PER_DECADE, _DECADES * _PER_DECADE + 1)
    return sorted({max(round(planned * 10 ** (i / _PER_DECADE)), 2) for i in steps})


def power_picture(points: Sequence[Decides], planned: int) -> Markup:
    """Samples needed against the true value, in units of the limit, for both answers.

    Args:
        points: one cell at several sizes, in order.
        planned: the size that is marked.
    """
    up = Scale.of([p.n for p in points])

    def at(p: Decides, value: float | None) -> tuple[float, float] | None:
        if value is None or not 0 <= value <= _FAR * p.limit:
            return None
        return 100 * value / p.limit / _FAR, 100 - up.at(p.n)

    limit, level = 100 / _FAR, 100 - up.at(planned)
    shapes = [line("limit", limit, 0, limit, 100), line("aside", 0, level, 100, level)]
    for tone, sure, even in (
        ("holds", [at(p, p.holds) for p in points], [at(p, p.holds_even) for p in points]),
        ("violated", [at(p, p.violated) for p in points], [at(p, p.violated_even) for p in points]),
    ):
        shapes.append(curve("aside", [place for place in even if place]))
        drawn = [place for place in sure if place]
        shapes.append(curve("serves", drawn))
        shapes += [toned(tone, mark(tone, *at, 3.4)) for at in drawn[::2]]
    here = next(p for p in points if p.n == planned)
    units = here.units
    words = f"limit {number(here.limit)}"
    shapes.append(text(f"{planned:,} {units}", 100, level, dy=-5, anchor="end", kind="ink"))
    shapes.append(text(words, limit, 100, dy=-6, anchor="end", kind="ink shift-end"))
    label = (
        f"Number of {units} needed for {_name(here)}, against the true value. In nine "
        f"of ten runs {planned:,} decide holds up to {_said(here.holds)}, violated from "
        f"{_said(here.violated)}; the limit is {number(here.limit)}."
    )
    values = [Tick(100 * i / 6, number(i * _FAR / 6 * here.limit)) for i in range(7)]
    return plot(
        label,
        _HEIGHT,
        shapes,
        across=spaced([values[2], values[0], values[-1], *values], WIDE),
        up=up.ticks(500),
        titles=("true value", f"{units}, log scale"),
    )


def _name(cell: Decides) -> str:
    return format.line(f"{cell.clause} on {cell.slice}")


def _said(value: float | None) -> str:
    return "never" if value is None else number(value)


def plan_page(plan: Plan, cost: Cost) -> str:
    """A self-contained page."""
    sheets = []
    for cell in [c for c in cost.decides if c.n and c.limit > 0][:_PANELS]:
        picture = power_picture(power_curve(plan, cell, sizes(cell.n)), cell.n)
        note = "" if sheets else _NOTE
        sheets.append(Sheet(_name(cell), note, picture))
    if cost.decides:
        note = "In brackets: every token has the mean."
        title = "Decided by nine of ten runs of the full size"
        table = Sheet(title, note, "", HEADS, [*map(row, cost.decides)])
        sheets.append(table)
    name = plan.contract.metadata.name
    return board(f"Plan of {name}", [Story(f"Plan of {name}", cost_line(cost), sheets)])


@click.command("plan")
@click.argument("contract", type=FILE_OR_DASH)
@click.option(
    "--no-probe", is_flag=True, help="Open no kernel: no times, and token counts are estimated."
)
@shared(
    "--format",
    type=click.Choice(["text", "json", "html"]),
    help="html draws how many samples each clause needs.",
)
@shared("--quiet", "--no-code")
def plan_command(contract: Path, no_probe: bool, quiet: bool, format_: str) -> None:
    """Show cells, sizes, cost and detectable effect sizes; nothing is measured.

    - reads the contract from standard input.
    """
    plan = run.compile(contract_at(contract))
    if no_probe:
        cost = cost_of(plan)
    else:
        with Engines(spawn) as engines, watching(quiet) as watch:
            cost = costed(plan, engines, watch=watch)
    if format_ == "json":
        show_json(plan_data(plan, cost))
    elif format_ == "html":
        show(plan_page(plan, cost))
    else:
        click.echo("\n".join([f"contract  {contract}", *plan_lines(plan, cost)]))
