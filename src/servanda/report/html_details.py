# What lies below the first screen: the matrix, the curves of drift, the tails, who was compared.

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.token_profile import EDGES, RATIO_EDGES, Portrait, Sums
from servanda.judgement.verdict import Verdict
from servanda.report import cell_text, format
from servanda.report.html_cards import described
from servanda.report.html_ladder import Track, shown_values, track
from servanda.report.html_scale import Scale


class Box(NamedTuple):
    """A cell of the matrix; None of its parts exists where the clause has no such cell."""

    glyph: str
    outcome: str
    value: str
    track: Track | None


class Matrix(NamedTuple):
    """Clauses as columns, slices as rows.

    Args:
        columns: (clause, what it measures, its limit); rows: (slice, its boxes).
    """

    columns: tuple[tuple[str, str, str], ...]
    rows: tuple[tuple[str, tuple[Box | None, ...]], ...]


def matrix(verdict: Verdict) -> Matrix:
    """Every cell, each column on its own axis."""
    clauses: dict[tuple[str, str], list[CellVerdict]] = {}
    for cell in verdict.cells:
        clauses.setdefault((cell.section, cell.clause), []).append(cell)
    slices = list(dict.fromkeys(c.slice for c in verdict.cells))
    columns, boxes = [], []
    for cells in clauses.values():
        scale = Scale.of(shown_values(cells))
        limits = {cell_text.limit(c) for c in cells if c.limit is not None}
        limit = f"{cell_text.limit_sign(cells[0])} {limits.pop()}" if len(limits) == 1 else ""
        columns.append((format.line(cells[0].clause), cell_text.quantity(cells[0]), limit))
        boxes.append({c.slice: _box(c, scale) for c in cells})
    rows = [(format.place(s), tuple(column.get(s) for column in boxes)) for s in slices]
    return Matrix(tuple(columns), tuple(rows))


def _box(cell: CellVerdict, scale: Scale) -> Box:
    drawn = track(cell, scale) if cell.limit is not None and cell.value is not None else None
    value = cell_text.of_cell(cell, cell.value)
    return Box(cell_text.GLYPH[cell.outcome], cell.outcome, value, drawn)


class Bin(NamedTuple):
    label: str
    n: str
    value: str
    noise: str
    track: Track


class Curve(NamedTuple):
    """Mean TV by bins of one field."""

    title: str
    unit: str
    bins: tuple[Bin, ...]
    scale: Scale
    has_ring: bool


_TITLES = {
    "prompt_tokens": ("prompt length", "tokens"),
    "position": ("position in the answer", "tokens drawn before"),
    "entropy_nats": ("entropy of infer", "nats"),
    "probability": ("probability infer gave the sampled token", ""),
}
_WHOLE = ("prompt_tokens", "position")


def curves(verdict: Verdict) -> tuple[Curve, ...]:
    """Mean TV by each field of the portrait, the self-noise and the stable kernel beside it."""
    what, portrait = described(verdict)
    peers = verdict.portraits if what == "workload" else {}
    bins = {name: portrait.by.get(name, ()) for name in _TITLES}
    return tuple(_curve(name, sums, peers) for name, sums in bins.items() if any(s.n for s in sums))


def _curve(name: str, bins: Sequence[Sums], peers: Mapping[str, Portrait]) -> Curve:
    def of(peer: str, i: int) -> float | None:
        sums_of = peers[peer].by.get(name, ()) if peer in peers else ()
        return sums_of[i].mean("tv") if i < len(sums_of) else None

    filled = [i for i, sums in enumerate(bins) if sums.n]
    means = {i: bins[i].mean("tv") or 0.0 for i in filled}
    noises = {i: _most(of("self_train", i), of("self_infer", i)) for i in filled}
    rings = {i: of("stable", i) for i in filled}
    most = max(means.values())
    near = [v for v in noises.values() if v and v > most / 1e4]
    scale = Scale.of([*means.values(), *near, *rings.values()])
    title, unit = _TITLES[name]
    drawn = []
    for i in filled:
        label, mean, noise, ring = bin_label(name, i), means[i], noises[i], rings[i]
        caption = f"{title} {label}: mean TV {format.number(mean)}, n {bins[i].n:,} tokens"
        if noise is not None:
            caption += f"; self-noise {format.number(noise)}"
        if ring is not None:
            caption += f"; stable kernel {format.number(ring)}"
        marks = Track(
            "plain",
            caption,
            dot=scale.at(mean),
            floor=None if noise is None else scale.at(noise),
            ring=None if ring is None else scale.at(ring),
        )
        drawn.append(Bin(label, f"{bins[i].n:,}", format.number(mean), format.number(noise), marks))
    return Curve(title, unit, tuple(drawn), scale, any(r is not None for r in rings.values()))


def _most(*values: float | None) -> float | None:
    return max((v for v in values if v is not None), default=None)


def bin_label(name: str, i: int) -> str:
    """Bin i of a field, as people write ranges.

    >>> bin_label("position", 0), bin_label("position", 3), bin_label("entropy_nats", 10)
    ('0', '4–7', '≥ 6')
    """
    edges = EDGES[name]
    if i == len(edges):
        return f"≥ {edges[-1]:g}"
    if name not in _WHOLE:
        return f"< {edges[0]:g}" if i == 0 else f"{edges[i - 1]:g}–{edges[i]:g}"
    first = int(edges[i - 1]) if i else 0
    last = int(edges[i]) - 1
    return f"{first}" if first == last else f"{first}–{last}"


class Segment(NamedTuple):
    x1: float
    y1: float
    x2: float
    y2: float


class Tail(NamedTuple):
    """Share of tokens beyond each |log ratio|, as line segments in percent of the drawing."""

    name: str
    tone: str
    n: str
    segments: tuple[Segment, ...]


class Tails(NamedTuple):
    lines: tuple[Tail, ...]
    across: Scale
    up: Scale
    below: int
    above: int


_TAILS = (
    ("infer", "infer", "infer against train"),
    ("self_infer", "noise", "infer against itself"),
    ("self_train", "quiet", "train against itself"),
    ("stable", "stable", "stable against train"),
)


def tails(verdict: Verdict) -> Tails | None:
    """The distribution of |log ratio|, seen from its tail; both axes logarithmic."""
    what, portrait = described(verdict)
    if not portrait.total.n:
        return None
    sides = {"infer against train, golden texts": ("infer", portrait)}
    if what == "workload":
        of = verdict.portraits
        sides = {label: (tone, of[name]) for name, tone, label in _TAILS if name in of}
    shares = {name: _survival(p) for name, (_, p) in sides.items() if p.total.n}
    inside = [x for points in shares.values() for x, _ in points]
    across = Scale.of([x for x in inside if x > 1e-6] or [1e-6, 1.0])
    smallest = min(s for points in shares.values() for _, s in points if s > 0)
    up = Scale(Scale.of([smallest]).low, 1.0)
    lines = [
        Tail(name, sides[name][0], f"{sides[name][1].total.n:,}", _segments(points, across, up))
        for name, points in shares.items()
    ]
    below, above = (sum(side) for side in portrait.ratios)
    return Tails(tuple(lines), across, up, below, above)


def _survival(portrait: Portrait) -> list[tuple[float, float]]:
    """(x, share of tokens with |log ratio| >= x) at every edge where some are left."""
    counts = np.add(*map(np.array, portrait.ratios))
    beyond = counts.sum() - counts.cumsum()[:-1]
    shares = (beyond / counts.sum()).tolist()
    return [(x, s) for x, s in zip(RATIO_EDGES, shares, strict=True) if s > 0] or [
        (RATIO_EDGES[0], 1 / float(counts.sum()))
    ]


def _segments(
    points: Sequence[tuple[float, float]], across: Scale, up: Scale
) -> tuple[Segment, ...]:
    placed = [(across.at(x), round(100 - up.at(s), 3)) for x, s in points]
    return tuple(Segment(*a, *b) for a, b in itertools.pairwise(placed) if a != b)


class Fingerprints(NamedTuple):
    """Key by key, one column a side; `other` are the rows in which the sides differ."""

    sides: tuple[str, ...]
    other: tuple[tuple[str, tuple[str, ...]], ...]
    same: tuple[tuple[str, tuple[str, ...]], ...]


def fingerprints(verdict: Verdict) -> Fingerprints | None:
    """Who was compared; None where it was not recorded."""
    prints = verdict.circumstances.fingerprints
    if not prints:
        return None
    sides = tuple(prints)
    keys = sorted({key for side in prints.values() for key in side})
    rows = [(key, tuple(prints[side].get(key, "–") for side in sides)) for key in keys]
    return Fingerprints(
        sides,
        tuple(row for row in rows if len(set(row[1])) > 1),
        tuple(row for row in rows if len(set(row[1])) == 1),
    )


class Number(NamedTuple):
    """One cell as a row of text, with everything that its number claims."""

    outcome: str
    glyph: str
    columns: tuple[str, ...]
    note: str


NUMBER_HEADS = (
    *("clause", "slice", "measured", "interval", "limit", "floor", "stable"),
    *("n", "unit", "missing", "kind", "claim", "alpha", "evidence for, against (nats)"),
)


def numbers(verdict: Verdict) -> tuple[Number, ...]:
    """Every cell with what it claims: the footnotes of all other numbers."""
    return tuple(_number(cell) for cell in cell_text.worst_first(verdict.cells))


def _number(cell: CellVerdict) -> Number:
    show = partial(cell_text.of_cell, cell)
    evidence = [
        "–" if nats is None or not math.isfinite(nats) else f"{nats:.1f}"
        for nats in (cell.e_holds, cell.e_violated)
    ]
    columns = (
        f"{format.line(cell.clause)}: {cell_text.quantity(cell)}",
        cell_text.where(cell),
        show(cell.value),
        cell_text.interval(cell),
        cell_text.signed_limit(cell),
        show(cell.floor),
        show(cell.stable),
        f"{cell.n:,}" if cell.units else "",
        " ".join(filter(None, (cell.units, f"({cell.unit})" if cell.unit else ""))),
        f"{cell.missing:,}" if cell.missing else "",
        cell.kind,
        cell.claim if cell_text.certified(cell) or cell.kind == "estimate" else "",
        "" if cell.alpha is None else f"{cell.alpha:.3g}",
        ", ".join(evidence) if {*evidence} != {"–"} else "",
    )
    notes = [format.line(cell.note)] if cell.note else []
    if not cell.enforced:
        notes.append("monitored, not enforced")
    if cell.more:
        notes.append(f"about {cell.more:,} more prompt groups would decide")
    return Number(cell.outcome, cell_text.GLYPH[cell.outcome], columns, "; ".join(notes))
