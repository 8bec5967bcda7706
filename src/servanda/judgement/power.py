# Power: the faults of the catalogue that this gate would have caught at this sample size.
#
# Each fault was measured once on the shipped model; its prompt groups are resampled, as many as the
# run had, and judged by the run's clauses and thresholds.  If a fault was reported from the field
# with another strength than the catalogue's, it was measured at both.  The result holds for the
# fault at this size; its size on another model is unknown.  A signature does not contain the effect
# of a fault on the noise floor: a fault that makes a kernel noisy also raises the floor, and only
# `self_noise` can detect it.

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from servanda.judgement.clauses.base import Cell, CellVerdict, Interim, View
from servanda.judgement.clauses.numerical import Values
from servanda.judgement.evidence import Evidence
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Schedule
from servanda.judgement.slices.columns import CLASS_FIELDS, columns
from servanda.judgement.slices.rules import FIELDS
from servanda.judgement.verdict import Caught
from servanda.theory.divergence.base import DIVERGENCES
from servanda.traces.trace import Trace, TracePair

_FIELDS = frozenset(FIELDS) - CLASS_FIELDS - {"outcome.token_id"}  # signatures have no ids
_MOST = 2000  # most resampled prompt groups; a gate that needs more is not called blind
Cells = Sequence[tuple[int, Cell]]  # cells of a plan with their indexes


@dataclass(frozen=True)
class Signature:
    """One fault as measured on the bundled model.

    Args:
        pair: one prompt per sequence, in random order; None if weights or vocabulary reveal the
            fault before any measurement.
        golden: metric -> its largest values at golden positions, and their number.
        strength: the fault's value, as JSON; "" if unknown.
        met: whether the value is one reported from the field that differs from the catalogue's.
    """

    fault: str
    summary: str
    pair: TracePair | None
    golden: Mapping[str, tuple[float, ...]]
    strength: str = ""
    met: bool = False


def power(
    plan: Plan,
    evidence: Evidence,
    signatures: Iterable[Signature],
    found: Iterable[CellVerdict] = (),
) -> tuple[Caught, ...]:
    """Every fault with an applicable signature, and the cells that it would violate.

    Args:
        found: cells of the run itself: what it violates is caught, if a kernel has the fault.
    """
    refusing = evidence.key.grade == "verified"
    cells = [(i, cell) for i, cell in enumerate(plan.cells) if cell.clause.enforced]
    kernels = plan.contract.kernels
    had = {
        (name, json.dumps(value))
        for kernel in (kernels.infer, kernels.train)
        for name, value in (kernel.fault or {}).items()
    }
    red = tuple(f"{c.clause} on {c.slice}" for c in found if c.enforced and c.outcome == "violated")
    caught = (
        _caught(plan, cells, evidence, signature)
        for signature in signatures
        if signature.pair is not None or refusing
    )
    return tuple(
        replace(one, by=red, grounds="violated by this run")
        if red and (one.fault, one.strength) in had
        else one
        for one in caught
    )


def _caught(plan: Plan, cells: Cells, evidence: Evidence, signature: Signature) -> Caught:
    if signature.pair is None:
        by = ("identity of weights and vocabulary",)
        grounds = "refused before anything is drawn"
    else:
        red = [*_on_golden(plan, cells, evidence, signature)]
        for schedule in plan.schedules:
            red += _on_workload(plan, cells, evidence, schedule, signature)
        red.sort(key=lambda verdict: -(verdict.e_violated or 0.0))
        by = tuple(dict.fromkeys(f"{verdict.clause} on {verdict.slice}" for verdict in red))
        grounds = "measured on the bundled 2.6 M-parameter model"
    fault, strength = signature.fault, signature.strength
    return Caught(fault, signature.summary, by, grounds, strength, signature.met)


def _on_golden(
    plan: Plan, cells: Cells, evidence: Evidence, signature: Signature
) -> Iterator[CellVerdict]:
    look = Interim(plan.alpha, plan.price_cells, 0, 0, intervals=False)
    golden = evidence.once.get("golden")
    for i, cell in cells:
        values = signature.golden.get(cell.clause.metric)
        whole = cell.kind.exact and cell.kind.source == "golden" and not cell.cut.terms
        # the largest values give a maximum, but no mean or percentile
        if not whole or golden is None or not values or cell.clause.aggregate not in (None, "max"):
            continue
        floor = cell.kind.floor(cell, [golden.noise[i]])
        verdict = cell.kind.judge(cell, [Values(values)], floor, look)
        if verdict.outcome == "violated":
            yield verdict


def _on_workload(
    plan: Plan, enforced: Cells, evidence: Evidence, schedule: Schedule, signature: Signature
) -> Iterator[CellVerdict]:
    closed = evidence.closed(schedule.name)
    launched = min(sum(part.groups for part in closed), _MOST)
    cells = [(i, c) for i, c in enforced if c.workload == schedule.name and _computable(c)]
    if not launched or not cells:
        return
    view = _drawn_again(schedule, signature, launched, [cell for _, cell in cells])
    look = Interim(plan.alpha, plan.price_cells, 0, launched, False, plan.part)
    own = evidence.portraits.get((schedule.name, "infer"))
    for i, cell in cells:
        inside_N = view.mask(cell.cut)
        if own is not None and len(inside_N):
            tokens = own.slices[cell.cut.name].n if cell.cut.name in own.slices else 0
            # a slice that is rarer in the run than in the signature would overstate the power
            if tokens < 0.8 * own.total.n * float(inside_N.mean()):
                continue
        floor = cell.kind.floor(cell, [part.noise[i] for part in closed])
        verdict = cell.kind.judge(cell, [cell.kind.weigh(cell, view)], floor, look)
        if verdict.outcome in ("violated", "error"):
            yield verdict


def _computable(cell: Cell) -> bool:
    """Whether a cell can be computed from a signature, which lacks labels, peers and experts."""
    metric = DIVERGENCES.get(cell.clause.metric)
    if metric is not None and metric.of_experts:
        return False
    return cell.kind.source == "workload" and not cell.kind.peers and cell.cut.fields <= _FIELDS


def _drawn_again(schedule: Schedule, signature: Signature, n: int, cells: list[Cell]) -> View:
    """n prompt groups of the signature, resampled with replacement, within the schedule's width."""
    assert signature.pair is not None
    seed = np.random.Philox(key=schedule.seed)
    row_S = np.random.Generator(seed).integers(0, len(signature.pair.infer.sequence_S), n)
    pair = TracePair(
        _rows(signature.pair.infer, row_S, schedule.width),
        _rows(signature.pair.train, row_S, schedule.width),
    )
    trace, group_S = pair.infer, np.arange(n)
    cuts = {cut for cell in cells for cut in (cell.cut, cell.cut.given)}
    return View(
        pair=pair,
        columns=columns(pair, (), {field for cut in cuts for field in cut.fields}),
        group_N=np.repeat(group_S, trace.length_S),
        group_S=group_S,
        launched=n,
        width=schedule.width,
        may_meet={cut: np.ones(n, dtype=bool) for cut in cuts},
        uniform_N=np.random.Generator(seed).random(len(trace.token_N)),
    )


def _rows(trace: Trace, row_S: NDArray[np.int64], width: int) -> Trace:
    """Some sequences of a trace, each cut to `width` tokens and renumbered."""
    starts_S = np.cumsum(trace.length_S) - trace.length_S
    length_S = np.minimum(trace.length_S, width)[row_S]
    moved_S = starts_S[row_S] - (np.cumsum(length_S) - length_S)
    at_N = np.arange(length_S.sum()) + np.repeat(moved_S, length_S)
    return replace(
        trace,
        sequence_S=np.arange(len(row_S)),
        length_S=length_S,
        lost_S=trace.lost_S[row_S],
        prompt_tokens_S=trace.prompt_tokens_S[row_S],
        token_N=trace.token_N[at_N],
        columns={name: column[at_N] for name, column in trace.columns.items()},
    )
