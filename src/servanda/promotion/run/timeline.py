# The timeline of a promotion: its ledger entries as one page of HTML with an SVG picture.
#
# Above: the share of the traffic over time.  Below: one lane per step, from its start to its end,
# with a mark for each evaluation and each decision of a person.  Every state has a shape and a
# word as well as a colour.  The table below the picture has the numbers.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from servanda.promotion.advance import judged
from servanda.promotion.effects import route_of
from servanda.promotion.ledger.entry import Entry
from servanda.promotion.run import report
from servanda.promotion.run.history import DELIVERED, History, replayed
from servanda.report.format import duration

_LEFT, _RIGHT, _TOP, _CHART, _LANE = 170, 940, 24, 90, 34  # pixels
_TONES = {"held": "ok", "completed": "ok", "rolled back": "bad", "superseded": "bad"}
_PEOPLE = {"approved": "approval", "overrode": "override", "rolled_back": "manual rollback"}
_MARKS = {
    "holds": '<circle cx="{x}" cy="{y}" r="5" class="ok mark"/>',
    "inconclusive": '<circle cx="{x}" cy="{y}" r="4" class="hollow"/>',
    "violated": '<path d="M{x} {y}m-5 -5l10 10m0 -10l-10 10" class="cross"/>',
    "error": '<path d="M{x} {y}m-6 5h12l-6 -11z" class="hollow"/>',
    "approval": '<path d="M{x} {y}m0 -8l8 8l-8 8l-8 -8z" class="person"/>',
    "override": '<path d="M{x} {y}m-6 -6h12v12h-12z" class="person"/>',
    "manual rollback": '<path d="M{x} {y}m8 -8v16l-14 -8z" class="person"/>',
}
_STYLE = """
:root{--bg:#fff;--fg:#1b1f24;--mu:#57606a;--ln:#dfe4ea;--bad:#b3261e;--ok:#1a6b3c;--open:#7a4d00;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e8eaed;--mu:#9aa4af;--ln:#2b3138;--bad:#ff8a80;--ok:#7bd49b;--open:#f0b95a}}
body{margin:0 auto;max-width:1000px;padding:12px 24px 40px;background:var(--bg);color:var(--fg);font:14px/1.45 system-ui,sans-serif}
h1{font-size:24px;margin:12px 0 2px;overflow-wrap:anywhere}p{margin:0 0 10px;color:var(--mu)}
.scroll{overflow-x:auto}svg{display:block;min-width:960px}svg text{font-size:12.5px;fill:var(--fg)}svg .mu{fill:var(--mu)}
.grid{stroke:var(--ln)}.serves{fill:none;stroke:var(--fg);stroke-width:2.5}.mirror{fill:none;stroke:var(--mu);stroke-width:2;stroke-dasharray:5 4}
.bar{stroke-width:2;fill:none}.bar.ok{stroke:var(--ok)}.bar.bad{stroke:var(--bad)}.bar.open{stroke:var(--open)}
.mark.ok{fill:var(--ok)}.hollow{fill:var(--bg);stroke:var(--open);stroke-width:2}.cross{stroke:var(--bad);stroke-width:3}.person{fill:var(--fg);stroke:var(--bg)}
table{border-collapse:collapse;margin-top:14px;font-size:13px}td,th{border-bottom:1px solid var(--ln);padding:4px 10px 4px 0;text-align:left;white-space:nowrap}th{color:var(--mu)}
"""  # noqa: E501


@dataclass(frozen=True)
class Moment:
    """One entry, and the promotion after it.

    Args:
        mark: a name of `_MARKS`, or "" for the first entry.
        text: the mark in words, for its tooltip.
    """

    at: float
    step: int
    mark: str
    text: str
    history: History


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
        mark = _PEOPLE.get(entry.kind, "")
        text = f"{mark} by {entry.actor}: {entry.body.get('reason', '')}" if mark else ""
        if entry.kind == "looked":
            finding = history.evaluations[-1].finding
            outcome, cell = judged(finding.cells)
            mark = "error" if finding.error or outcome == "not applicable" else outcome
            numbers = f" ({report.cell_text(cell)})" if cell is not None and cell.n else ""
            text = f"{mark}: {history.state.why}{numbers}"
        yield Moment(entry.at, step, mark, text, history)


def page(promotions: Sequence[Sequence[Entry]], *, now: float) -> str:
    """A self-contained page with a picture and a table for each promotion."""
    parts = [_section([*moments(entries)], now) for entries in promotions]
    body = "\n".join(parts) or "<p>no promotion is under way</p>"
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Promotions</title><style>{_STYLE}</style>\n<body>{body}</body></html>"
    )


def _section(made: Sequence[Moment], now: float) -> str:
    history = made[-1].history
    status = history.state.status.replace("_", " ")
    line = f"{status} on {history.leg.name}: {history.state.why}"
    rows = [
        "".join(f"<td>{escape(cell)}</td>" for cell in report.columns(row))
        for row in report.rows(history)
    ]
    heads = "".join(f"<th>{head}</th>" for head in report.HEAD)
    return (
        f"<h1>{escape(history.run)}</h1><p>{escape(line)}</p>"
        f'<div class="scroll">{svg(made, now=now)}</div>'
        f'<div class="scroll"><table><tr>{heads}</tr>'
        f"<tr>{'</tr><tr>'.join(rows)}</tr></table></div>"
    )


def svg(made: Sequence[Moment], *, now: float) -> str:
    """The picture of one promotion.

    Args:
        now: unix seconds; a promotion that has not ended is drawn up to it.
    """
    history = made[-1].history
    begin = made[0].at
    end = max(made[-1].at, begin + 1, 0 if history.state.ended else now)

    def x(at: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * (at - begin) / (end - begin), 1)

    lanes = _TOP + _CHART + 20
    bottom = lanes + _LANE * len(history.course)
    parts = [*_axes(begin, end, bottom), *_traffic(made, end, x)]
    for i, row in enumerate(report.rows(history)):
        parts += _lane(i, row, made, end, lanes + _LANE * i + _LANE // 2, x)
    parts += _legend(bottom + 46)
    label = escape(f"Timeline of {history.run}: {history.state.status} on {history.leg.name}", True)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 960 {bottom + 60}" '
        f'width="960" height="{bottom + 60}">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", tone: str = "") -> str:
    kind = f' class="{tone}"' if tone else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _axes(begin: float, end: float, bottom: float) -> Iterator[str]:
    yield _text(0, _TOP + 4, "share of traffic")
    for share in (0, 50, 100):
        y = _TOP + _CHART * (1 - share / 100)
        yield f'<path d="M{_LEFT} {y}H{_RIGHT}" class="grid"/>'
        yield _text(_LEFT - 8, y + 4, f"{share} %", "end", "mu")
    for i in range(5):
        x = _LEFT + (_RIGHT - _LEFT) * i / 4
        anchor = ("start", "middle", "middle", "middle", "end")[i]
        yield f'<path d="M{x} {_TOP}V{bottom}" class="grid"/>'
        yield _text(x, bottom + 16, f"+{duration((end - begin) * i / 4)}", anchor, "mu")
    yield _text(0, bottom + 16, report.when(begin), tone="mu")


def _traffic(made: Sequence[Moment], end: float, x: Callable[[float], float]) -> Iterator[str]:
    until = [*(moment.at for moment in made[1:]), end]
    for name, kind in (("mirror", "mirror"), ("share", "serves")):
        path, before = "", 0.0
        for moment, to in zip(made, until, strict=True):
            share = route_of(moment.history.course, moment.history.state)[name]
            y = f"{_TOP + _CHART * (1 - share):.1f}"
            if share or name == "share":
                path += f"V{y}" if path and (before or name == "share") else f"M{x(moment.at)} {y}"
                path += f"H{x(to)}"
            before = share
        yield f'<path d="{path}" class="{kind}"/>' if path else ""


def _lane(
    i: int,
    row: report.LegRow,
    made: Sequence[Moment],
    end: float,
    y: int,
    x: Callable[[float], float],
) -> Iterator[str]:
    yield _text(0, y + 4, row.leg.name)
    inside = [moment.at for moment in made if moment.history.state.leg == i]
    if not inside:
        yield _text(_LEFT, y + 4, "to come", tone="mu")
        return
    here = made[-1].history.state.leg == i
    ends = [m.at for m in made if m.step == i and m.history.state.leg != i]
    last = made[-1].at if made[-1].history.state.ended else end
    stop = x(last if here else ends[-1])
    start = x(min(inside))
    glyph = {"ok": "✓", "bad": "✗"}.get(tone := _TONES.get(row.state, "open"), "▶")
    yield (
        f'<rect x="{start}" y="{y - 11}" width="{max(stop - start, 4):.1f}" height="22" rx="4" '
        f'class="bar {tone}"/>'
    )
    yield _text(_LEFT - 8, y + 4, f"{glyph} {row.state}", "end", "mu")
    # decisions of people are drawn over evaluations
    for moment in sorted(made, key=lambda moment: moment.mark in _PEOPLE.values()):
        if moment.step == i and moment.mark:
            mark = _MARKS[moment.mark].format(x=x(moment.at), y=y)
            yield f"<g>{mark}<title>{escape(moment.text)}</title></g>"


def _legend(y: int) -> Iterator[str]:
    at = _LEFT
    yield f'<path d="M0 {y}h22" class="serves"/>' + _text(28, y + 4, "served")
    yield f'<path d="M80 {y}h22" class="mirror"/>' + _text(108, y + 4, "mirrored")
    for name, mark in _MARKS.items():
        yield mark.format(x=at + 8, y=y) + _text(at + 20, y + 4, name)
        at += 36 + 7 * len(name)
