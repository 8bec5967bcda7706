# The verdict as one page: no script, nothing fetched, light and dark, on a phone and on paper.

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from pydantic import ValidationError

from servanda.contract import yaml_reader
from servanda.contract.clause import WHOLE
from servanda.contract.model import Contract
from servanda.errors import ContractError
from servanda.judgement.bound_chain.chain import Step, chain
from servanda.judgement.breakdown import RuleRow
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.token_profile import EDGES, Portrait, Sums, gates
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.report import cell_text, format, summary
from servanda.report.breakdown import removed_line, tables
from servanda.report.cell_text import KINDS
from servanda.report.chain_text import chain_text
from servanda.report.chain_text import number as step_number
from servanda.report.consequence import advice_rows
from servanda.report.format import count, number
from servanda.report.html_cards import cards, described
from servanda.report.html_pictures import (
    Scale,
    Track,
    axis,
    deciding,
    drawn_track,
    e_values,
    joint,
    ladder,
    ratios,
    rung_picture,
    steps,
)
from servanda.report.html_slices import SlicesOf, SliceWords, anchors, slice_words, slug
from servanda.report.summary import counted, dumped, headline

# What lies below the first screen: the matrix, the curves of drift, who was compared, all numbers.


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
        cell_text.glyph_of(cell),
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
    notes = [cell_text.remark(cell), "" if cell.enforced else "monitored, not enforced"]
    if cell.more:
        notes.append(f"about {count(cell.more, 'more prompt group')} would decide")
    note = "; ".join(filter(None, notes))
    return Number(cell.outcome, cell_text.glyph_of(cell), anchor, columns, note)


# The bound chain on the page: a tree for each clause that it starts from.


class ImpliedStep(NamedTuple):
    """One number of the chain, and those that follow from it.

    Args:
        by: the theorem by which it follows.
    """

    what: str
    number: str
    standing: str
    by: str
    vacuous: bool
    then: tuple[ImpliedStep, ...]


class Implied(NamedTuple):
    """The chain as a tree for each clause, in one line, and as text."""

    summary: str
    paths: tuple[tuple[str, tuple[ImpliedStep, ...]], ...]
    text: str


def implied(contract: Contract | None, verdict: Verdict) -> Implied | None:
    """The chain of a verdict; None where the text of its contract was not kept."""
    bounds = chain(contract, verdict) if contract else None
    if bounds is None or not bounds.steps:
        return None
    total = format.count(len(bounds.steps), "number")
    if bounds.vacuous:
        total += f", {len(bounds.vacuous)} of them vacuous (no smaller than the range)"
    paths: dict[str, list[Step]] = {}
    for step in bounds.steps:
        name = step.clause if step.enforced else f"{step.clause} (monitored)"
        paths.setdefault(name, []).append(step)
    trees = tuple((name, _tree(steps)) for name, steps in paths.items())
    return Implied(total, trees, chain_text(bounds))


def _tree(steps: Sequence[Step]) -> tuple[ImpliedStep, ...]:
    """Steps in their order, each with those that come after it at a deeper level."""
    firsts = [i for i, step in enumerate(steps) if step.level <= steps[0].level]
    return tuple(
        ImpliedStep(
            steps[i].what,
            step_number(steps[i]) if steps[i].vacuous else f"≤ {step_number(steps[i])}",
            KINDS.get(steps[i].standing, steps[i].standing),
            steps[i].theorem,
            steps[i].vacuous,
            _tree(steps[i + 1 : end]) if end > i + 1 else (),
        )
        for i, end in zip(firsts, [*firsts[1:], len(steps)], strict=True)
    )


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_STOPPED = {
    "decided": "stopped: decided",
    "traffic": "so far",
    "broken": cell_text.GIVEN_UP,
    "size": "full size",
    "time": "out of time",
}
_GLOSSARY = (
    (
        "kernel",
        "everything that turns weights and a context into token probabilities: engine, data type, "
        "attention, sampler",
    ),
    ("train kernel", "the reference: it scores the same tokens again"),
    ("infer kernel", "the candidate: it samples the tokens"),
    ("stable kernel", "the kernel that serves today, where it was measured too"),
    ("tv", "total variation: the share of next-token probability that moved, from 0 to 1"),
    ("log ratio", "log probability under the train kernel minus that under the infer kernel, nats"),
    ("top-1", "the most likely next token"),
    ("cell", "one clause of the contract on one slice of the traffic"),
    ("split", "a rule that makes several slices; no token is in two of them"),
    ("validity check", "a precondition: where it fails, no bound is valid"),
    (
        "noise floor",
        "the same kernel, re-scored in other batches, on the tokens of the infer kernel; "
        "a violation must exceed both the limit and twice the noise floor",
    ),
    (
        "anytime-valid bound",
        "an interval that holds at every evaluation of a run, at the stated alpha, not only at the "
        "last; so it is wider than one for a single evaluation",
    ),
    (
        "conditional bound",
        "an anytime-valid bound times factors that the contract declares: true if they are",
    ),
    ("exact", "exact for the recorded positions, and for nothing else"),
    ("exact, two ends", "two ends that hold the exact number of the recorded positions"),
    ("estimate", "a number without a guarantee"),
    ("scope: all such tokens", "all tokens this prompt distribution would generate"),
    ("scope: these tokens", f"the measured tokens, and no others; {cell_text.REALISED}"),
    ("alpha", "the largest probability of a wrong answer, over all evaluations together"),
    (
        "log e-value",
        "evidence for an answer, in nats; the answer is given when it exceeds a threshold",
    ),
    ("prompt group", "the unit of the random sample: a prompt, or prompts that belong together"),
    ("inconclusive", "shown neither to hold nor to be violated; never a pass"),
)


class GateRow(NamedTuple):
    name: str
    text: str
    says: str
    tone: str


@FORMATS.register("html")
def render(verdict: Verdict) -> str:
    """One self-contained page of HTML."""
    page = environment("servanda.report").get_template("page.html")
    return page.render(**view(verdict))


class Sheet(NamedTuple):
    """A picture, a table, or both, under a title; texts, or Markup."""

    title: str
    note: str = ""
    picture: str = ""
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


class Story(NamedTuple):
    """One subject of a page."""

    head: str
    text: str
    sheets: Sequence[Sheet]


def board(title: str, stories: Sequence[Story]) -> str:
    """A self-contained page with the pictures of something other than a verdict."""
    page = environment("servanda.report").get_template("board.html")
    return page.render(title=title, stories=stories)


def environment(package: str) -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _printable(value: Any) -> Any:
    """Texts without control characters, which HTML has no way to hold; markup as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return _CONTROL.sub("\ufffd", value)


def view(verdict: Verdict) -> dict[str, Any]:
    """Everything that the page shows, by the names that its template uses."""
    what, portrait = described(verdict)
    breakdown = verdict.breakdown
    rules = breakdown.rules if breakdown is not None else ()
    passes = [*map(_passes, rules)] or [g.passes for g in gates(verdict.portraits)]
    contract = _contract(verdict.circumstances.contract_text)
    slices = slice_words(contract)
    return {
        "v": verdict,
        "head": headline(verdict),
        "remarks": summary.remarks(verdict),
        "impact": summary.effect(verdict, lambda cell: _place(cell, slices)),
        "names": _names(verdict),
        "size": _size(verdict),
        "ladder": ladder(verdict, slices),
        "rungs": rung_picture(verdict),
        "gates_title": _gates_title(verdict, passes),
        "gates": _gates(verdict),
        "cards": cards(verdict),
        "matrix": matrix(verdict, slices),
        "curves": curves(verdict),
        "steps": steps(verdict, slices),
        "e_values": e_values(verdict, slices),
        "joint": joint(verdict),
        "ratios": ratios(verdict),
        "what": what,
        "worst": portrait.worst,
        "prints": fingerprints(verdict),
        "implied": implied(contract, verdict),
        "assumed": cell_text.assumed(c for c in verdict.cells if cell_text.certified(c)),
        "advice": [*advice_rows(verdict.advice)],
        "tables": tables(verdict),
        "removed": removed_line(breakdown.removed) if breakdown and breakdown.removed else "",
        "numbers": numbers(verdict, slices),
        "glossary": _GLOSSARY,
        "line": format.line,
        "number": format.number,
        "spans": spans,
        "slug": slug,
        "axis": axis,
        "track": drawn_track,
        "dumped": dumped(verdict),
    }


def _place(cell: CellVerdict, slices: SlicesOf) -> str:
    """A cell's slice, as code, with its definition."""
    if cell.place == WHOLE or cell.section == "numerical":
        return cell_text.where(cell)
    words = slices.of_cell(cell)
    return f"slice `{words.name}`" + (f" ({words.definition})" if words.definition else "")


def spans(words: str) -> list[tuple[bool, str]]:
    """A text in parts, and whether each stood between back-ticks.

    >>> spans("a `b` c")
    [(False, 'a '), (True, 'b'), (False, ' c')]
    """
    parts = words.split("`")
    return [(i % 2 == 1 and i + 1 < len(parts), part) for i, part in enumerate(parts) if part]


def _names(verdict: Verdict) -> tuple[str, list[tuple[str, str]]]:
    """What all kernels are called, and what each is called besides."""
    sides = [("infer", verdict.infer), ("train", verdict.train), ("stable", verdict.stable)]
    split = {side: format.line(name).split() for side, name in sides if name}
    same = 0
    while len({tuple(w[: same + 1]) for w in split.values()}) == 1 and all(
        len(w) > same + 1 for w in split.values()
    ):
        same += 1
    shared = next(iter(split.values()), [])[:same]
    return " ".join(shared), [(side, " ".join(w[same:])) for side, w in split.items()]


def _size(verdict: Verdict) -> str:
    parts = []
    if verdict.sequences:
        parts += [count(verdict.tokens, "token"), count(verdict.groups, "group")]
    elif verdict.golden_tokens:
        parts.append(count(verdict.golden_tokens, "golden position"))
    seconds = verdict.circumstances.seconds
    if seconds is not None:
        parts.append(format.duration(seconds))
    if reason := _STOPPED.get(verdict.circumstances.stopped):
        parts.append(reason)
    if verdict.key.attempt > 1:
        parts.append(f"attempt {verdict.key.attempt}")
    return " · ".join([*parts, f"contract {verdict.key.contract[:8]}"])


def _gates_title(verdict: Verdict, passes: list[bool | None]) -> str:
    if verdict.outcome == "holds":
        return "Other projects' thresholds, on the same tokens"
    judged = [p for p in passes if p is not None]
    if verdict.outcome == "violated" and 2 * len(judged) > len(passes) and all(judged):
        return "Other projects' thresholds: none would fail"
    if not judged:
        return "Other projects' thresholds"
    return f"Other projects' thresholds: {sum(judged)} of {len(judged)} would pass"


def _gates(verdict: Verdict) -> list[GateRow]:
    says = {True: ("would pass", "plain"), False: ("would fail", "fails"), None: ("–", "plain")}
    rows = [
        GateRow(g.name.replace(" %", "\xa0%"), summary.gate_text(g), *says[g.passes])
        for g in gates(verdict.portraits)
    ]
    if verdict.breakdown is not None and verdict.breakdown.rules:
        rows = [_rule(row, says) for row in verdict.breakdown.rules]
    answer = f"{cell_text.GLYPH[verdict.outcome]} {verdict.outcome}"
    return [*rows, GateRow("this contract", _ours(verdict), answer, verdict.outcome)]


def _rule(row: RuleRow, says: Mapping[bool | None, tuple[str, str]]) -> GateRow:
    name = f"{row.what} ≤ {row.limit:g} ({row.project})"
    text = format.number(row.value)
    if row.steps > 1 and row.red:
        text += f"; {row.red:,} of {count(row.steps, 'step')}"
    return GateRow(name, text, *says[_passes(row)])


def _passes(row: RuleRow) -> bool | None:
    return None if row.value is None else not row.red


def _ours(verdict: Verdict) -> str:
    cells = counted(verdict.cells)
    if verdict.outcome == "holds":
        return f"{len(cells)} of {count(len(cells), 'cell')}"
    bad = cell_text.worst_first(c for c in cells if c.outcome == verdict.outcome)
    cell = deciding(verdict)
    if cell is None or cell not in bad:
        cell = next(iter(bad), None)
    if cell is None:
        return "no enforced clause"
    if cell.value is None or cell.limit is None:
        return f"{format.line(cell.clause, 24)} on {cell_text.where(cell, 20)}"
    value = cell_text.of_cell(cell, cell.value)
    return f"{cell_text.where(cell, 20)}: {value}, limit {cell_text.limit(cell)}"


def _contract(text: str) -> Contract | None:
    """As it was judged: lint had its say when it was run."""
    if not text:
        return None
    try:
        data, _, problems = yaml_reader.read(text, "the contract of the verdict")
        return None if problems else Contract.model_validate(data)
    except (ContractError, ValidationError):
        return None
