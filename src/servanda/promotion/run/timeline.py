# The timeline of a promotion: its ledger entries as one page of HTML with pictures.
#
# Three pictures share one axis of time: the traffic, a lane for each step, and the deciding cell of
# each evaluation.  Every mark is numbered as its row in the table below, where there is room.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from servanda.promotion.advance import judged
from servanda.promotion.effects import route_of
from servanda.promotion.ledger.entry import Entry
from servanda.promotion.run import report
from servanda.promotion.run.history import DELIVERED, History, replayed
from servanda.promotion.state import CellResult
from servanda.report import format
from servanda.report.format import count, duration, number
from servanda.report.html import Sheet, Story, board
from servanda.report.html_shapes import (
    WIDE,
    Markup,
    Scale,
    Tick,
    curve,
    key,
    line,
    mark,
    plot,
    rect,
    spaced,
    text,
    time_ticks,
    toned,
)

_TRAFFIC = Markup(
    "".join(
        f'<svg class="key" style="width:22px" height="10" aria-hidden="true">'
        f'<line class="{kind}" x1="0" x2="22" y1="5" y2="5"/></svg>{words} '
        for kind, words in (("serves", "served by the infer kernel"), ("aside", "mirrored to it"))
    )
)
_LANE, _CHART, _CELLS = 62, 90, 190  # pixels
_MANY = 60  # evaluations beyond which single intervals are not drawn
_TONES = {"held": "holds", "completed": "holds", "rolled back": "violated", "superseded": "error"}
_PEOPLE = {"approved": "approval", "overrode": "override", "rolled_back": "rollback"}
_EVENTS = {  # mark -> in words
    "holds": "holds",
    "inconclusive": "inconclusive",
    "violated": "violated",
    "error": "error",
    "approval": "approval",
    "override": "override",
    "rollback": "manual rollback",
}
_HEADS = ("#", "after", "time", "step", "event", "reason", "deciding cell")
Events = Sequence[tuple[int, "Moment"]]


@dataclass(frozen=True)
class Moment:
    """One entry, and the promotion after it.

    Args:
        mark: one of `_EVENTS`, or "" for the first entry.
        text: why it happened, and what followed.
        cell: that decided an evaluation, where something was counted.
    """

    at: float
    step: int
    mark: str
    text: str
    history: History
    cell: CellResult | None = None


def moments(entries: Iterable[Entry]) -> Iterator[Moment]:
    """The decisions of one promotion, in order; deliveries are none.

    Raises:
        LedgerError: an entry does not follow from those before it.
    """
    history: History | None = None
    for entry in entries:
        step = history.state.leg if history is not None else 0
        history = replayed([entry], history)
        if entry.kind == DELIVERED:
            continue
        mark, text, cell = _PEOPLE.get(entry.kind, ""), history.state.why, None
        if mark:
            reason = entry.body.get("reason") or entry.body.get("override", {}).get("reason", "")
            text = f"by {entry.actor}: {reason}"
        if entry.kind == "looked":
            finding = history.evaluations[-1].finding
            outcome, cell = judged(finding.cells)
            mark = "error" if finding.error or outcome == "not applicable" else outcome
            cell = cell if cell is not None and cell.n else None
        yield Moment(entry.at, step, mark, text, history, cell)


def page(promotions: Sequence[Sequence[Entry]], *, now: float) -> str:
    """A self-contained page with pictures and tables for each promotion."""
    stories = [story([*moments(entries)], now=now) for entries in promotions]
    return board("Promotions", stories, empty="no promotion is under way")


class _Time(NamedTuple):
    """The axis that the pictures of one promotion share; unix seconds."""

    begin: float
    end: float

    def at(self, time: float) -> float:
        return 100 * (time - self.begin) / (self.end - self.begin)

    def plot(self, label: str, height: int, shapes: Sequence[str], up: Sequence[Tick]) -> Markup:
        ticks = time_ticks(self.end - self.begin)
        title = f"time since {report.when(self.begin)}"
        return plot(label, height, shapes, across=ticks, up=up, titles=(title, ""))

    def numbers(self, events: Events, y: str) -> list[str]:
        """Numbers of events, the last ones preferred where there is no room for all."""
        ticks = spaced((Tick(self.at(m.at), f"{n}") for n, m in reversed(events)), WIDE)
        return [text(tick.label, tick.at, y, anchor=tick.anchor) for tick in ticks]


def story(made: Sequence[Moment], *, now: float) -> Story:
    """The pictures of one promotion.

    Args:
        now: unix seconds; a promotion that has not ended is drawn up to it.
    """
    history, begin = made[-1].history, made[0].at
    time = _Time(begin, max(made[-1].at, begin + 1, 0 if history.state.ended else now))
    events = [*enumerate((m for m in made if m.mark), start=1)]
    drawn = {moment.mark for _, moment in events}
    legend = Markup(
        "".join(key(mark, f"{words} ") for mark, words in _EVENTS.items() if mark in drawn)
    )
    steps = [report.columns(row) for row in report.rows(history)]
    sheets = [
        Sheet("Share of traffic", _TRAFFIC, _traffic(made, time)),
        Sheet("Steps", legend, _lanes(made, events, time), report.HEAD, steps),
        *_deciding(events, time),
    ]
    if events:
        sheets.append(Sheet("Events", heads=_HEADS, rows=[_row(n, m, begin) for n, m in events]))
    status = history.state.status.replace("_", " ")
    return Story(history.run, f"{status} on {history.leg.name}: {history.state.why}", sheets)


def _row(n: int, moment: Moment, begin: float) -> tuple[str, ...]:
    cell = report.cell_text(moment.cell) if moment.cell else ""
    leg = moment.history.course[moment.step].name
    event = key(moment.mark, _EVENTS[moment.mark])
    after = f"+{duration(moment.at - begin)}"
    return (f"{n}", after, report.when(moment.at), leg, event, moment.text, cell)


def _traffic(made: Sequence[Moment], time: _Time) -> Markup:
    until = [*(moment.at for moment in made[1:]), time.end]
    shapes, most, share = [], 0.0, 0.0
    for name, kind in (("mirror", "aside"), ("share", "serves")):
        points: list[tuple[float, float]] = []
        for moment, to in zip(made, until, strict=True):
            share = 100 * route_of(moment.history.course, moment.history.state)[name]
            if share or name == "share":
                points += [(time.at(moment.at), 100 - share), (time.at(to), 100 - share)]
                most = max(most, share if name == "share" else 0)
            else:  # nothing is mirrored: no line
                shapes.append(curve(kind, points))
                points = []
        shapes.append(curve(kind, points))
    label = f"Share of the traffic over time: it is {share:.3g} % now, at most {most:.3g} %."
    return time.plot(label, _CHART, shapes, [Tick(share, f"{share} %") for share in (0, 50, 100)])


def _lanes(made: Sequence[Moment], events: Events, time: _Time) -> Markup:
    history, shapes, said = made[-1].history, [], []
    for i, row in enumerate(report.rows(history)):
        top = _LANE * i
        tone = _TONES.get(row.state, "not-applicable" if row.state == "to come" else "inconclusive")
        glyph = {"holds": "✓ ", "not-applicable": "", "inconclusive": "▶ "}.get(tone, "✗ ")
        shapes.append(text(f"{row.leg.name}: {glyph}{row.state}", 0, f"{top + 14}", kind="ink"))
        said.append(f"{row.leg.name} {row.state}")
        inside = [moment.at for moment in made if moment.history.state.leg == i]
        if inside:
            ends = [m.at for m in made if m.step == i and m.history.state.leg != i]
            last = made[-1].at if history.state.ended else time.end
            left = time.at(min(inside))
            right = time.at(last if history.state.leg == i else ends[-1])
            bar = rect("lane", left, f"{top + 34}", max(right - left, 0.4), "18")
            shapes.append(f'<g class="{tone}">{bar}</g>')
        # decisions of people are drawn over evaluations, and numbered first
        here = [(n, moment) for n, moment in events if moment.step == i]
        here.sort(key=lambda event: event[1].mark in _PEOPLE.values())
        shapes += [toned(m.mark, mark(m.mark, time.at(m.at), f"{top + 43}", 5)) for _, m in here]
        shapes += time.numbers(here, f"{top + 30}")
    label = f"Steps of promotion {history.run}: {', '.join(said)}; {len(events)} events."
    return time.plot(label, _LANE * len(history.course), shapes, ())


def _times(cell: CellResult, value: float | None) -> float | None:
    """A number in units of the limit; of a limit from below, the limit in units of the number."""
    if value is None or not cell.limit:
        return None
    if cell.at_least:
        return cell.limit / value if value > 0 else None
    return value / cell.limit


def _deciding(events: Events, time: _Time) -> Iterator[Sheet]:
    """The deciding cell of each evaluation; nothing where none has a value and a limit."""
    known: list[tuple[Moment, CellResult, float, list[float]]] = []
    for _, moment in events:
        cell = moment.cell
        if cell is not None and (value := _times(cell, cell.value)) is not None:
            ends = [
                end for end in (_times(cell, cell.low), _times(cell, cell.high)) if end is not None
            ]
            known.append((moment, cell, value, ends))
    if not known:
        return
    # a lower end near 0 says little, and would take most of the axis
    up = Scale.of([1.0, *(max(value, *ends) for *_, value, ends in known), *(e[2] for e in known)])
    limit = 100 - up.at(1.0)
    shapes = [line("limit", 0, limit, 100, limit)]
    shapes.append(text("limit", 100, limit, dy=-5, anchor="end", kind="ink"))
    if many := len(known) > _MANY:  # the ends of all intervals as two lines
        for i in (0, 1):
            ends_of = [(time.at(m.at), 100 - up.at(e[i])) for m, *_, e in known if len(e) == 2]
            shapes.append(curve("aside", ends_of))
    for moment, _, value, ends in known:
        x = time.at(moment.at)
        if len(ends) == 2 and not many:
            bar = line("bar", x, 100 - up.at(ends[0]), x, 100 - up.at(ends[1]))
            shapes.append(toned(moment.mark, bar))
        dot = mark(moment.mark, x, 100 - up.at(value), 2.4 if many else 5)
        shapes.append(toned(moment.mark, dot))
    drawn = {id(moment) for moment, *_ in known}
    shapes += time.numbers([event for event in events if id(event[1]) in drawn], "-6")
    moment, cell, value, _ = known[-1]
    label = (
        f"The deciding cell of {count(len(known), 'evaluation')}, in multiples of its limit: "
        f"{number(value)} at the last one, {format.line(cell.name)}, which is {moment.mark}."
    )
    yield Sheet(
        "Deciding cell of each evaluation",
        "Value and interval divided by the limit, log scale; below 1 is within the limit.",
        time.plot(label, _CELLS, shapes, up.ticks(_CELLS)),
    )
