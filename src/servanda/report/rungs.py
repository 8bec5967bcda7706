# The precision ladder: standard formats of the reference model, and the candidate among them.

from __future__ import annotations

from collections.abc import Iterator

from servanda.judgement.breakdown import Rung
from servanda.judgement.verdict import Verdict
from servanda.report.format import count, line, number, percent
from servanda.report.table import table

HEADS = ("format", "mean tv", "other top-1")
_ALIKE = 0.05  # of a distance: formats that are as far away


def by_distance(rungs: tuple[Rung, ...]) -> list[Rung]:
    """Those that were measured, nearest first."""
    return sorted((r for r in rungs if r.tv is not None), key=lambda r: r.tv or 0.0)


def place(rungs: tuple[Rung, ...]) -> str:
    """Where the candidate is, in a sentence; "" where it was not measured.

    >>> place((Rung("bfloat16", 0.001), Rung("nvfp4", 0.02), Rung("B", 0.004, candidate=True)))
    'the infer kernel is farther away than bfloat16 and nearer than nvfp4'
    """
    order = by_distance(rungs)
    at = next((i for i, rung in enumerate(order) if rung.candidate), None)
    if at is None or len(order) < 2:
        return ""
    tv = order[at].tv or 0.0
    near = [r for r in order if not r.candidate and abs((r.tv or 0.0) - tv) <= _ALIKE * tv]
    if near:
        return f"the infer kernel is as far away as {near[0].name}"
    below = f"farther away than {order[at - 1].name}" if at else ""
    above = f"nearer than {order[at + 1].name}" if at + 1 < len(order) else ""
    return f"the infer kernel is {' and '.join(part for part in (below, above) if part)}"


def cells(rung: Rung) -> list[str]:
    return [
        "infer kernel" if rung.candidate else line(rung.name, 60),
        number(rung.tv),
        percent(rung.flips) if rung.flips is not None else "",
    ]


def heading(rungs: tuple[Rung, ...]) -> str:
    tokens = max((rung.tokens for rung in rungs), default=0)
    return f"Precision ladder: the model of train in other formats, {count(tokens, 'given token')}"


def lines(verdict: Verdict) -> Iterator[str]:
    """The ladder as text; nothing where none was measured."""
    rungs = verdict.circumstances.rungs
    if not rungs:
        return
    yield heading(rungs)
    order = by_distance(rungs)
    head, *rows = table([[*HEADS], *map(cells, order)], right=range(1, len(HEADS)))
    yield f"  {head}"
    for rung, row in zip(order, rows, strict=True):
        yield f"{'→' if rung.candidate else ' '} {row}"
    yield from (f"  {text}" for text in (place(rungs), *missing(rungs)) if text)


def missing(rungs: tuple[Rung, ...]) -> tuple[str, ...]:
    """The formats that were not measured, each with the reason."""
    return tuple(f"not measured: {line(r.name, 60)}: {line(r.missing)}" for r in rungs if r.missing)
