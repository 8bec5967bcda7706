# The cost of a run, in words: shown before anything starts.

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from servanda.judgement.cost import Cost, Decides
from servanda.judgement.plan import Plan
from servanda.report.format import count, duration, rough
from servanda.report.table import table
from servanda.theory.stats.alpha import shared
from servanda.traces.serialization import to_plain

HEADS = ("clause", "slice", "limit", "holds if at most", "violated if at least", "n")
_UNITS = ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "kB"))


def cost_line(cost: Cost) -> str:
    about = "" if cost.exact else "about "
    new = f"up to {cost.new_tokens_at_most:,}"
    if cost.new_tokens is not None:
        new = f"about {cost.new_tokens:,}"
    parts = [
        f"about {count(cost.expected, 'sequence')} if the kernels agree well",
        f"at most {count(cost.sequences, 'sequence')}",
        f"{about}{cost.prompt_tokens:,} prompt + {new} new tokens",
    ]
    if cost.seconds is not None:
        parts[0] += f", {duration(cost.seconds * cost.expected / cost.sequences)}"
        parts.append(f"about {duration(cost.seconds)} (timed on {count(cost.probed, 'sequence')})")
    if cost.memory_bytes:
        parts.append(f"{_bytes(sum(cost.memory_bytes.values()))} of memory so far")
    if cost.disk_bytes is not None:
        parts.append(f"{_bytes(cost.disk_bytes)} on disk")
    if not cost.exact:
        parts.append("tokens estimated from characters")
    return " · ".join(parts)


def decides_lines(cost: Cost) -> list[str]:
    """What nine of ten runs decide of each clause, slice by slice."""
    if not cost.decides:
        return []
    rows = [HEADS, *map(row, cost.decides)]
    return [
        "decided by nine of ten runs of the full size, if the truth lies there: for tokens that "
        "are all",
        "or nothing, and in brackets where every token has the mean",
        *(f"  {line}" for line in table(rows, right=range(2, 6))),
    ]


def row(cell: Decides) -> tuple[str, ...]:
    def show(value: float | None, side: int = 0) -> str:
        if value is None:
            return "never"
        value = value if value >= 1e-9 else 0.0
        return rough(value, share=cell.threshold is not None, side=side)

    return (
        cell.clause,
        cell.slice,
        show(cell.limit),
        f"{show(cell.holds, -1)} ({show(cell.holds_even, -1)})",
        f"{show(cell.violated, 1)} ({show(cell.violated_even, 1)})",
        f"{cell.n:,} {cell.units}",
    )


def plan_data(plan: Plan, cost: Cost) -> dict[str, Any]:
    """The same as data: of `servanda contract plan --format json`."""
    return {
        "contract": plan.contract.metadata.name,
        "digest": plan.contract.digest,
        "alpha": plan.alpha,
        "workloads": [
            {
                "name": s.name,
                "groups": [s.first, s.last],
                "round": s.workload.round,
                "prompts": len(s.corpus),
                "file": s.corpus.file,
            }
            for s in plan.schedules
        ],
        "cells": [cell.name for cell in plan.cells],
        "cost": to_plain(asdict(cost)),
    }


def plan_lines(plan: Plan, cost: Cost) -> list[str]:
    """A plan and its cost, for `servanda contract plan` and `compare --plan`."""
    lines = [
        f"{s.name}  {s.first:,} to {s.last:,} prompt groups in rounds of {s.workload.round}, "
        f"{count(len(s.corpus), 'prompt')} from {s.corpus.file}"
        for s in plan.schedules
    ]
    lines += [
        f"rewards  train answers the prompts of {s.name} as well; the answers of both have a reward"
        for s in plan.schedules
        if plan.scored(s.name)
    ]
    if plan.golden is not None:
        lines.append(f"golden  {count(len(plan.golden), 'text')} from {plan.golden.file}")
    lines.append(
        f"cells  {len(plan.cells)}, of which {plan.price_cells} may be called violated; alpha "
        f"{plan.alpha:.3g}: `holds` costs e = {1 / plan.alpha:,.0f}, `violated` e = "
        f"{1 / shared(plan.alpha, plan.price_cells):,.0f}"
    )
    judged = {(d.clause, d.slice) for d in cost.decides}
    others = [c for c in plan.cells if (c.clause.id, c.cut.name) not in judged]
    if others:
        lines.append(f"besides  {', '.join(c.name for c in others)}")
    return [*lines, f"cost  {cost_line(cost)}", "", *decides_lines(cost)]


def _bytes(value: int) -> str:
    for size, unit in _UNITS:
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} bytes"
