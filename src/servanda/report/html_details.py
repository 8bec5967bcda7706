# What lies below the first screen: the matrix, the curves of drift, who was compared, all numbers.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.token_profile import EDGES, Portrait, Sums
from servanda.judgement.verdict import Verdict
from servanda.report import cell_text, format
from servanda.report.format import count, number
from servanda.report.html_cards import described
from servanda.report.html_ladder import Track
from servanda.report.html_shapes import Scale
from servanda.report.html_slices import SlicesOf, SliceWords, anchors, slice_words


class Entry(NamedTuple):
    """One cell in a box of the matrix.

    Args:
        times: its value in units of the limit; heat: 0 to 4, how near to the limit, 4 beyond it.
    """

    glyph: str
    outcome: str
    monitored: bool
    value: str
    limit: str
    times: str
    heat: int | None
    anchor: str


class Matrix(NamedTuple):
    """Metrics as columns, slices as rows.

    Args:
        columns: (what is measured, its clauses); rows: (slice, its definition, its boxes, a box
            with the cells of all clauses of that metric);
        single: of metrics that are judged in one place only: (what, where, its cells).
    """

    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[SliceWords, tuple[tuple[Entry, ...], ...]], ...]
    single: tuple[tuple[str, str, tuple[Entry, ...]], ...]


_HEAT = (0.25, 0.5, 0.8, 1.0)  # of the limit


def matrix(verdict: Verdict, slices: SlicesOf | None = None) -> Matrix:
    """Every cell, once; clauses that promise the same of one metric share a column."""
    slices = slices or slice_words(None)
    names = anchors(verdict.cells)
    metrics: dict[tuple[object, ...], dict[str, list[Entry]]] = {}
    heads: dict[tuple[object, ...], tuple[str, dict[str, None]]] = {}
    for i, cell in enumerate(verdict.cells):
        sampled = cell.threshold if cell.threshold is not None else cell.aggregate
        key = (cell.section, cell.metric, sampled, cell.workload)
        metrics.setdefault(key, {}).setdefault(cell.place, []).append(_entry(cell, names[i]))
        head = heads.setdefault(key, (cell_text.quantity(cell), {}))
        head[1][format.line(cell.clause, 40)] = None
    wide = [key for key, by_slice in metrics.items() if len(by_slice) > 1]
    words = {cell.place: slices.of_cell(cell) for cell in verdict.cells}
    columns = [(heads[k][0], ", ".join(heads[k][1])) for k in wide]
    rows = [
        (words[place], tuple(tuple(metrics[k].get(place, ())) for k in wide))
        for place in words
        if any(place in metrics[k] for k in wide)
    ]
    single = [
        (f"{heads[key][0]} ({', '.join(heads[key][1])})", words[place].name, tuple(entries))
        for key, by_slice in metrics.items()
        if key not in wide
        for place, entries in by_slice.items()
    ]
    return Matrix(tuple(columns), tuple(rows), tuple(single))


def _entry(cell: CellVerdict, anchor: str) -> Entry:
    times, heat = "", None
    if cell.section != "observability" and cell.limit and cell.value is not None:
        ratio = cell_text.excess(cell)
        times = f"{format.rough(ratio)}×"
        heat = sum(ratio > edge for edge in _HEAT)
    return Entry(
        cell_text.GLYPH[cell.outcome],
        cell.outcome,
        not cell.enforced,
        cell_text.of_cell(cell, cell.value),
        cell_text.signed_limit(cell),
        times,
        heat,
        anchor,
    )


class Bin(NamedTuple):
    """Tokens of one bin; without a track, there are none."""

    label: str
    n: str
    value: str = ""
    noise: str = ""
    track: Track | None = None


class Curve(NamedTuple):
    """Mean TV by bins of one field."""

    title: str
    unit: str
    bins: tuple[Bin, ...]
    scale: Scale
    has_ring: bool


_TITLES = {
    "prompt_tokens": ("prompt length", "tokens"),
    "position": ("position in the response", "tokens before it"),
    "entropy_nats": ("entropy of the infer kernel", "nats"),
    "probability": ("probability of the sampled token, infer kernel", ""),
}
_WHOLE = ("prompt_tokens", "position")


def curves(verdict: Verdict) -> tuple[Curve, ...]:
    """Mean TV by each field of the portrait, with the noise floor and the stable kernel."""
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
    sides = {i: (of("self_train", i), of("self_infer", i)) for i in filled}
    noises = {i: max((v for v in s if v is not None), default=None) for i, s in sides.items()}
    rings = {i: of("stable", i) for i in filled}
    most = max(means.values())
    near = [v for v in noises.values() if v and v > most / 1e4]
    scale = Scale.of([*means.values(), *near, *rings.values()])
    title, unit = _TITLES[name]
    drawn = []
    for i in range(filled[0], filled[-1] + 1):
        label = bin_label(name, i)
        if i not in means:
            drawn.append(Bin(label, "0"))
            continue
        mean, noise, ring = means[i], noises[i], rings[i]
        caption = f"{title} {label}: mean TV {number(mean)}, n {bins[i].n:,} tokens"
        if noise is not None:
            caption += f", noise floor {number(noise)}"
        if ring is not None:
            caption += f", stable kernel {number(ring)}"
        caption += "."
        marks = Track(
            "plain",
            caption,
            dot=scale.at(mean),
            floor=None if noise is None else scale.at(noise),
            ring=None if ring is None else scale.at(ring),
        )
        drawn.append(Bin(label, f"{bins[i].n:,}", number(mean), number(noise), marks))
    return Curve(title, unit, tuple(drawn), scale, any(r is not None for r in rings.values()))


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
    anchor: str
    columns: tuple[str, ...]
    note: str


class Numbers(NamedTuple):
    """The rows, and the heads of those columns that some row fills.

    Args:
        right: columns of numbers.
    """

    heads: tuple[str, ...]
    right: tuple[int, ...]
    rows: tuple[Number, ...]


_HEADS = (
    *("clause", "slice", "measured", "interval", "limit", "noise floor", "stable"),
    *("n", "missing", "kind", "scope", "alpha", "log e-value: holds, violated"),
)
_RIGHT = {2, 3, 4, 5, 6, 7, 8, 11, 12}


def numbers(verdict: Verdict, slices: SlicesOf | None = None) -> Numbers:
    """Every cell with what it claims, worst first; columns that no cell fills are left out."""
    slices = slices or slice_words(None)
    names = anchors(verdict.cells)
    places = {id(cell): names[i] for i, cell in enumerate(verdict.cells)}
    worst = cell_text.worst_first(verdict.cells)
    rows = [_number(cell, slices, places[id(cell)]) for cell in worst]
    filled = [i for i in range(len(_HEADS)) if any(row.columns[i] for row in rows)]
    return Numbers(
        tuple(_HEADS[i] for i in filled),
        tuple(at for at, i in enumerate(filled) if i in _RIGHT),
        tuple(row._replace(columns=tuple(row.columns[i] for i in filled)) for row in rows),
    )


def _number(cell: CellVerdict, slices: SlicesOf, anchor: str) -> Number:
    show = partial(cell_text.of_cell, cell)
    evidence = [
        "–" if nats is None or not math.isfinite(nats) else number(nats)
        for nats in (cell.e_holds, cell.e_violated)
    ]
    columns = (
        f"{format.line(cell.clause)}: {cell_text.quantity(cell)}",
        slices.of_cell(cell).name if cell.section != "numerical" else cell_text.where(cell),
        show(cell.value),
        cell_text.interval(cell),
        cell_text.signed_limit(cell),
        show(cell.floor),
        show(cell.stable),
        " ".join(filter(None, (cell_text.short_size(cell), f"({cell.unit})" if cell.unit else ""))),
        f"{cell.missing:,}" if cell.missing else "",
        cell_text.KINDS.get(cell.kind, cell.kind),
        cell_text.scope(cell),
        number(cell.alpha),
        ", ".join(evidence) if {*evidence} != {"–"} else "",
    )
    notes = [format.line(cell.note)] if cell.note else []
    if not cell.enforced:
        notes.append("monitored, not enforced")
    if cell.more:
        notes.append(f"about {count(cell.more, 'more prompt group')} would decide")
    return Number(cell.outcome, cell_text.GLYPH[cell.outcome], anchor, columns, "; ".join(notes))
