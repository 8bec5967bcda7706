# Limits: the smallest limit per clause that such a pair keeps.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from servanda.authoring.calibrate import rounding
from servanda.authoring.calibrate.base import Binds, Calibration, Limit, Skipped
from servanda.authoring.calibrate.recorder import Rounds
from servanda.authoring.calibrate.resample import Resampled, draw_counts
from servanda.contract.clause import Relative
from servanda.contract.model import Clause, Place
from servanda.errors import EvidenceError
from servanda.judgement.clauses.base import Cell, CellVerdict
from servanda.judgement.plan import Plan
from servanda.theory.divergence.base import DIVERGENCES
from servanda.theory.divergence.precision import CAPTURES, capture_floor, captured, eta
from servanda.theory.stats.alpha import log_price

# Precision floor: the value of a metric from rounding of the recorded logprobs alone.
#
# For two identical kernels with the logprobs of one rounded, the error of each log ratio is uniform
# on [-eta, eta] and independent between tokens.


_GRID = 2049


def record_floor(later: Resampled, capture: str) -> float | None:
    """The effect of rounding alone, in the unit of the metric, for responses of these lengths.

    Args:
        capture: what logprobs are recorded in.

    Returns:
        None if unknown for the metric.
    """
    clause = later.cell.clause
    if clause.metric in DIVERGENCES:
        return capture_floor(clause.metric, capture, clause.aggregate or "mean")
    error_N = np.linspace(-1.0, 1.0, _GRID) * eta(capture)
    length_S = np.concatenate([view.pair.infer.length_S for view in later.rounds.own])
    return later.kind.of_rounding(error_N, length_S[length_S > 0])


FEWEST = 50  # fewest prompt groups of a run, or of a slice, for resampling
_BEYOND = "no token of the run exceeds the limit, so the run says nothing about rarer ones"
_UNKNOWN = "the effect of rounding to {} on this metric is not known"
_COARSE = ("bfloat16", "float16")  # limits up to this are caused by rounding, not by kernels
_RECORD = "let the engine record its logprobs as float32 or float64"


@dataclass
class _ClauseLimit:
    """A clause on all its slices, in later runs.

    Args:
        decides: the slice that needs the limit.
        step: of the limit; highest: the last one at which the clause could still fail.
        capture: format of the recorded logprobs.
    """

    clause: Clause
    place: Place
    cells: Sequence[Resampled]
    decides: Resampled
    step: int
    highest: int
    binds: Binds
    capture: str

    @property
    def limit(self) -> float:
        return rounding.value(self.step)

    @property
    def holds(self) -> NDArray[np.bool_]:
        """Mask of the later runs in which all slices hold, [B]."""
        return np.all([cell.holds(self.limit) for cell in self.cells], axis=0)

    def raised(self) -> None:
        self.step += 1
        self.binds = "together"

    def row(self) -> Limit:
        """The clause's limit, or why there is none."""
        clause, later = self.clause, self.decides
        assert isinstance(clause.at_most, float)
        known = record_floor(later, self.capture)
        least, wanted = known or 0.0, self.limit
        if wanted < least:
            self.step, self.binds = rounding.at_or_above(least), "record"
        row = Limit(
            clause=clause.id,
            metric=clause.metric,
            aggregate=clause.aggregate or "",
            slice=later.cell.cut.name,
            place=self.place,
            measured=later.measured(),
            floor=later.floor(),
            before=clause.at_most,
            limit=self.limit,
            power=float(self.holds.mean()),
            binds=self.binds,
            enforced=clause.enforced,
            top=later.top,
        )
        if self.binds == "record" and self.capture in _COARSE:
            note = (
                f"{wanted:g} would do, and logprobs are recorded as {self.capture} (off by up to "
                f"{eta(self.capture):.1e}): rounding alone reads as {least:.1e}; {_RECORD}"
            )
            return replace(row, limit=None, power=None, note=note)
        if known is None:
            return replace(row, note=_UNKNOWN.format(self.capture))
        beyond = later.kind.feed.threshold is not None and self.limit >= later.largest()
        return replace(row, note=_BEYOND) if beyond else row


def calibrate(
    plan: Plan,
    closed: Mapping[str, Rounds],
    judged: Sequence[CellVerdict],
    *,
    power: float,
    resamples: int,
    rng: np.random.Generator,
) -> Calibration:
    """The smallest limits that the pair of a run keeps, clause by clause.

    One limit serves all slices of a clause.  It has two significant digits, and is never
    below twice the noise floor, where red would not be red, nor below what the record
    resolves.  Where clauses hold often enough one by one and not together, the one that
    fails most often is raised until they do.

    Args:
        plan: plan of the run; its attempt defines the threshold of later runs.
        closed: its rounds, by workload.
        judged: its cells, for facts about the golden texts.
        power: the probability that a later run of the contract's full size holds, in (0, 1).
        resamples: number of simulated later runs.

    Raises:
        EvidenceError: too few prompt groups, or nothing in the contract can be calibrated.
    """
    counts = _later_runs(plan, closed, resamples, rng)
    captures = {name: _capture(closed[name]) for name in counts}
    limits: list[_ClauseLimit] = []
    rows: dict[str, Limit] = {}
    left: list[Skipped] = []
    by_clause: dict[str, list[Cell]] = {}
    for cell in plan.cells:
        by_clause.setdefault(cell.clause.id, []).append(cell)
    for cells in by_clause.values():
        clause = cells[0].clause
        if cells[0].section == "observability":
            continue
        if isinstance(clause.at_most, Relative):
            left.append(Skipped(clause.id, "its limit is relative to another measured value"))
            continue
        if cells[0].kind.certificate:
            rounds, count_BG = closed[cells[0].workload], counts[cells[0].workload]
            price = log_price(plan.alpha)
            later = [Resampled(c, c.kind.certificate, rounds, count_BG, price) for c in cells]  # type: ignore[arg-type]
            result = _clause_limit(later, power, captures[cells[0].workload])
        elif cells[0].kind.source == "golden":
            result = _fact_limit(cells, judged)
        elif not cells[0].kind.applies:
            result = f"it is not judged at stage {plan.stage!r}"
        else:
            result = f"{clause.metric} is not calibrated by this version"
        if isinstance(result, _ClauseLimit):
            limits.append(result)
        elif isinstance(result, Limit):
            rows[clause.id] = result
        else:
            left.append(Skipped(clause.id, result))
    together = _together([p for p in limits if p.clause.enforced], power)
    rows |= {p.clause.id: p.row() for p in limits}
    if not any(row.limit is not None for row in rows.values()):
        reasons = [*left, *(Skipped(row.clause, row.note) for row in rows.values())]
        why = "; ".join(f"{skipped.clause}: {skipped.reason}" for skipped in reasons)
        raise EvidenceError(f"no limit of this contract can be calibrated ({why})")
    order = [clause.id for _, _, clause in plan.contract.clauses()]
    return Calibration(
        rows=tuple(sorted(rows.values(), key=lambda row: order.index(row.clause))),
        left=tuple(left),
        asked=power,
        power=together,
        groups={n: (closed[n].groups, int(count_BG[0].sum())) for n, count_BG in counts.items()},
        resamples=resamples,
    )


def _later_runs(
    plan: Plan, closed: Mapping[str, Rounds], resamples: int, rng: np.random.Generator
) -> dict[str, NDArray[np.float64]]:
    """Workload -> count of each of its prompt groups in each later run."""
    counts = {}
    for schedule in plan.schedules:
        wanted = any(
            cell.workload == schedule.name and cell.kind.certificate for cell in plan.cells
        )
        groups = closed[schedule.name].groups if schedule.name in closed else 0
        if wanted and groups < FEWEST:
            raise EvidenceError(
                f"the run has {groups} prompt groups of {schedule.name!r}, and limits are "
                f"calibrated on {FEWEST} or more",
                hint="raise promotion.offline.prompt_groups and go on with the same run directory: "
                "servanda check CONTRACT --run-dir RUN_DIR",
            )
        if wanted:
            size = schedule.rounds * schedule.workload.round  # every round is full
            counts[schedule.name] = draw_counts(groups, size, resamples, rng)
    return counts


def _clause_limit(cells: Sequence[Resampled], power: float, capture: str) -> _ClauseLimit | str:
    """The smallest limit at which all slices hold often enough; or why there is none."""
    cell = cells[0].cell
    if not cells[0].kind.feed.proves:
        return "no sample shows that a mean without bound is small: give the clause a clip"
    for later in cells:
        if later.groups_met < FEWEST:
            return (
                f"{later.groups_met} prompt groups of the run met slice {later.cell.cut.name!r}, "
                f"and a limit is calibrated on {FEWEST} or more: measure more, or give that slice "
                "a clause of its own"
            )
    highest = _highest(cells)
    smallest = partial(rounding.first, rounding.LOWEST, highest)
    clear = [smallest(later.clear_of_noise) for later in cells]
    alone = [smallest(partial(later.holds_often, power)) for later in cells]
    for later, noise_step, step in zip(cells, clear, alone, strict=True):
        if noise_step is None:
            return f"twice the noise floor on slice {later.cell.cut.name!r} exceeds every limit"
        if step is None and (short := _too_few_groups(later, highest)):
            return short
        if step is None:
            return (
                f"no limit below {rounding.value(highest + 1):g} is kept often enough on slice "
                f"{later.cell.cut.name!r}: raise promotion.offline.prompt_groups"
            )
    sampled, quiet = (max(s for s in some if s is not None) for some in (alone, clear))
    step = max(sampled, quiet)
    binds: Binds = "sampling" if sampled >= quiet else "self-noise"
    deciding = (alone if sampled >= quiet else clear).index(step)
    limit = _ClauseLimit(
        cell.clause, cell.place, cells, cells[deciding], step, highest, binds, capture
    )
    while limit.holds.mean() < power and limit.step < highest:
        limit.raised()  # slice by slice it held often enough, and not on all of them
    return limit


def _too_few_groups(later: Resampled, highest: int) -> str:
    """Why no percentile limit can be shown at these sizes, even without violations; or ""."""
    if later.kind.feed.threshold is None:
        return ""
    size = int(later.count_BG[0].sum())
    needed = later.needed(rounding.value(highest))
    if needed is None or needed <= size:
        return ""
    return (
        f"{later.cell.clause.aggregate} on slice {later.cell.cut.name!r} takes about {needed:,} "
        f"prompt groups like these even of identical kernels, and a run has {size:,}: raise "
        "promotion.offline.prompt_groups"
    )


def _highest(cells: Sequence[Resampled]) -> int:
    """The last step at which the clause can still fail."""
    feed = cells[0].kind.feed
    most = feed.value(1.0) if feed.threshold is None else math.inf
    if feed.threshold is not None:
        # no change beyond the largest value
        metric = cells[0].cell.clause.metric
        most = DIVERGENCES[metric].span[1] if metric in DIVERGENCES else math.inf
        top = max(later.largest(selves=True) for later in cells)
        if 0 < top < most:
            return rounding.at_or_above(top)
        if not top:
            return rounding.LOWEST
    last = rounding.at_or_above(most if math.isfinite(most) else 1e9)
    return last - 1


def _capture(closed: Rounds) -> str:
    """The precision of the coarser side's record."""
    pairs = [view.pair for view in closed.own]
    sides = ([p.train for p in pairs], [p.infer for p in pairs])
    records = [captured(np.concatenate([s.columns["logp"] for s in side])) for side in sides]
    return min(records, key=CAPTURES.__getitem__)


def _together(limits: Sequence[_ClauseLimit], power: float) -> float | None:
    """Raise limits until all clauses hold together often enough; returns that share."""
    if not limits:
        return None
    while True:
        holds_PB = np.array([limit.holds for limit in limits])
        share = float(holds_PB.all(axis=0).mean())
        free = [i for i, p in enumerate(limits) if p.step < p.highest and not holds_PB[i].all()]
        if share >= power or not free:
            return share
        limits[min(free, key=lambda i: holds_PB[i].mean())].raised()


def _fact_limit(cells: Sequence[Cell], judged: Sequence[CellVerdict]) -> Limit | str:
    """The value on the golden texts plus twice the noise floor.

    In other batches each side may differ by its noise floor, and so their difference by both: exact
    for metrics with the triangle inequality.
    """
    clause = cells[0].clause
    mine = [c for c in judged if c.clause == clause.id]
    measured: list[tuple[float, CellVerdict]] = []
    for verdict in mine:
        value = verdict.value if verdict.interval is None else verdict.interval[1]
        if value is None:
            return f"nothing was measured on {verdict.slice!r}"
        if not math.isfinite(value):
            return f"it is infinite on {verdict.slice!r}"
        measured.append((value + 2 * (verdict.floor or 0.0), verdict))
    if not measured:
        return "nothing was measured"
    beyond, verdict = max(measured, key=lambda pair: pair[0])
    value = beyond - 2 * (verdict.floor or 0.0)
    limit = rounding.value(rounding.at_or_above(beyond)) if beyond > 0 else 0.0
    assert isinstance(clause.at_most, float)
    times = (
        f"{limit / value:.3g} times the measured value" if value else "every measured value is 0"
    )
    return Limit(
        clause=clause.id,
        metric=clause.metric,
        aggregate=clause.aggregate or "max",
        slice=verdict.slice,
        place=cells[0].place,
        measured=value,
        floor=verdict.floor,
        before=clause.at_most,
        limit=limit,
        power=None,
        binds="fact",
        enforced=clause.enforced,
        note=f"{times}: the value plus twice the noise floor, rounded up",
    )
