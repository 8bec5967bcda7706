# The judge of a training run: each step is judged alone, and what it does not decide is judged on
# the last few steps together.  `check DIR`, `watch` and `Monitor` are three loops over it.
#
# One error budget for a run: the probability that any healthy step of it is called violated is at
# most alpha, however long the run is, and so is that any steps j to t are which are all healthy.
# Half of alpha is for the whole of a dump (`WHOLE_PART`), and the rest for its steps: the j-th has
# 2 / ((j + 1)(j + 2)) of it, which adds up to 1, for all series of steps that begin there.
# `holds` needs no such share: it is wrong of a step that is violated, with probability alpha.

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any

from servanda.contract.identity import EvidenceKey
from servanda.contract.model import WHOLE
from servanda.judgement.clauses.base import CellVerdict, Interim, Reason, worst
from servanda.judgement.evidence import Evidence, Weighed
from servanda.judgement.plan import Plan
from servanda.judgement.verdict import BlindSpot, Verdict, judge, outcome_of, unsound
from servanda.report.cell_text import of_cell
from servanda.rl.steps.contract import AMPLE, WORKLOAD
from servanda.rl.steps.drift import TokenSum
from servanda.rl.steps.format import is_gradient
from servanda.rl.trend.changes import joined
from servanda.theory.stats.alpha import step_alpha

WHOLE_PART = 1 / 2  # share of a dump's alpha for violations of the whole; the steps have the rest
_GROWTH = 2  # of a window on which a thin step stays undecided
_MOST = 16  # times its first size, at most
# a clause holds only after a filter
ONLY_FILTERED: tuple[Reason, ...] = ("violated unfiltered", "undecided unfiltered")
_DECIDED = ("holds", "violated", "not applicable")
NO_TOKEN = "the mask has no trained token"

Atoms = Mapping[int, Sequence[float]]  # bits of slices -> tokens in exactly these, and their tv


@dataclass(frozen=True)
class StepSums:
    """What a step is judged on.

    Args:
        step: of the trainer; generation: its number in the step, if that has several.
        trained: sums over its trained tokens; drawn: including those that a filter of the trainer
            removed, None if it removed none.
    """

    step: int
    trained: Weighed
    drawn: Weighed | None = None
    generation: int = 0


@dataclass(frozen=True)
class _Series:
    """Consecutive steps of a cell since the number-th of the run, and their evidence.

    Args:
        statistic: of all of them; evidence: that the cell is violated, times the share of its
            first step, as a log e-value, nats.
    """

    number: int
    first: int
    statistic: Any
    evidence: float


@dataclass(frozen=True)
class StepVerdict:
    """The verdict on one step.

    Args:
        quick: without intervals and blind spots, which take long; cells that are judged on several
            steps name them.
        errors: why its data is no evidence; such a step is not judged.
    """

    step: int
    quick: Verdict
    errors: tuple[str, ...]
    _whole: Callable[[], Verdict]
    _trend: tuple[CellVerdict, ...] = ()
    _spots: tuple[BlindSpot, ...] = ()

    @cached_property
    def verdict(self) -> Verdict:
        """With intervals and blind spots."""
        whole = self._whole()
        whole = replace(whole, blind_spots=(*whole.blind_spots, *self._spots))
        return joined(whole, self._trend)

    def compared(self, trend: Sequence[CellVerdict]) -> StepVerdict:
        """The verdict with the cells of the step against good runs."""
        return replace(self, quick=joined(self.quick, trend), _trend=tuple(trend))

    def beside(self, spots: Sequence[BlindSpot]) -> StepVerdict:
        """The verdict with what was not examined of the step."""
        return replace(self, _spots=tuple(spots))

    def first(self, slices: Sequence[str]) -> int:
        """The first of the steps that cells of some slices are judged on."""
        spans = [cell.steps for cell in self.quick.cells if cell.slice in slices and cell.steps]
        return min((first for first, _ in spans), default=self.step)


class StepJudge:
    """Judges the steps of one run, in their order.

    Args:
        window: steps on which a slice, or a thin step, may hold together.
        number: verdicts of the run so far, of an earlier process.
        digest: of the contract, which takes long to compute; "": computed.

    `size`: most steps of the window now; `enough`: the tokens with which a good pair is decided.
    """

    def __init__(self, plan: Plan, window: int, *, number: int = 0, digest: str = "") -> None:
        self.plan, self.size, self.number = plan, window, number
        self._digest = digest or plan.contract.digest
        self._largest = _MOST * window
        self.enough = tokens_to_decide(plan)
        self._window: list[tuple[int, StepSums]] = []  # its steps, with their numbers
        self._place = -1, 0  # step and generation of the last one
        self._series: dict[int, _Series] = {}  # of cells

    def add(
        self,
        sums: StepSums,
        errors: Sequence[str] = (),
        look: Callable[[], Sequence[str]] = tuple,
    ) -> StepVerdict:
        """Judge the next step; one from before the last ends what is judged with those after it.

        Args:
            errors: why its data is no evidence; look: finds more of these, if the step is red.
        """
        self.number += 1
        part = step_alpha(1 - WHOLE_PART, self.number)
        if not sums.trained.tokens:  # a filter of the trainer may remove all of a step
            nothing = partial(self._nothing, sums, part)
            return StepVerdict(sums.step, nothing(False), (), partial(nothing, True))
        alone = self._judged((sums,), part, False)
        failed = [c.note for c in alone.cells if c.enforced and c.outcome == "error"]
        if failed or any(c.enforced and c.outcome == "violated" for c in alone.cells):
            errors = (*errors, *look())
        if errors := (*errors, *failed):
            whole = partial(self._unsound, sums, part, errors[0])
            return StepVerdict(sums.step, whole(False), errors, partial(whole, True))
        before, self._place = self._place, (sums.step, sums.generation)
        if self._place <= before:
            # a run that went back: what began before has spent its share on the steps after it
            self._series.clear()
            self._window = []
        window = self._window = [*self._window, (self.number, sums)][-self.size :]
        # a whole that a step of a good pair would decide is judged on the step alone
        thin, full = sums.trained.tokens < self.enough, len(window) == self.size
        whole = partial(self._together, window, self._violated(sums, alone), thin, full)
        quick = whole(alone)
        if thin and full and any(c.slice == WHOLE and c.open for c in quick.cells if c.enforced):
            self.size = min(_GROWTH * self.size, self._largest)
        return StepVerdict(sums.step, quick, (), whole)

    def _violated(self, sums: StepSums, alone: Verdict) -> dict[int, _Series]:
        """The cells that a series of steps violates, which then end; all others go on.

        A series that begins at the j-th step has the evidence of steps j to t at the price of the
        j-th, whatever t is: by Ville's inequality it is valid at every t, and the prices of all
        beginnings add up.  It begins anew where the last step alone has better prospects.
        """
        red: dict[int, _Series] = {}
        start = math.log(step_alpha(1.0, self.number))
        for i, (cell, own) in enumerate(zip(self.plan.cells, alone.cells, strict=True)):
            if own.e_violated is None or not (own.open or own.outcome in _DECIDED):
                continue
            series, statistic = self._series.get(i), sums.trained.statistics[i]
            if series is None or series.evidence <= start:
                series = _Series(self.number, sums.step, statistic, start + own.e_violated)
            else:
                series = replace(series, statistic=series.statistic + statistic)
                own = self._cell(i, series, False)
                price = math.log(step_alpha(1.0, series.number))
                series = replace(series, evidence=price + (own.e_violated or 0.0))
            self._series[i] = series
            adds = cell.kind.adds(statistic)
            if cell.clause.enforced and own.outcome == "violated" and adds:
                red[i] = self._series.pop(i)
        return red

    def _cell(self, i: int, series: _Series, intervals: bool) -> CellVerdict:
        """The verdict on a cell over a series of steps."""
        plan = self.plan
        part = step_alpha(1 - WHOLE_PART, series.number)
        look = Interim(plan.alpha, plan.price_cells, 0, 0, intervals, part)
        return plan.cells[i].kind.judge(plan.cells[i], [series.statistic], None, look)

    def _judged(self, steps: Sequence[StepSums], part: float, intervals: bool) -> Verdict:
        """The verdict on some steps together."""
        first, last = steps[0].step, steps[-1].step
        key = EvidenceKey(
            contract=self._digest,
            corpus="",
            train="external",
            infer="external",
            weights=f"{last}" if first == last else f"{first}..{last}",
            grade="declared",
        )

        def of(weighed: Weighed) -> Verdict:
            evidence = Evidence(key, self.plan.digest, {(WORKLOAD, 0): weighed})
            return judge(self.plan, evidence, intervals=intervals, part=part)

        own = of(reduce(operator.add, (step.trained for step in steps)))
        if all(step.drawn is None for step in steps):
            return own
        return bracketed(
            own, of(reduce(operator.add, (step.drawn or step.trained for step in steps)))
        )

    def _nothing(self, sums: StepSums, part: float, intervals: bool) -> Verdict:
        alone = self._judged((sums,), part, intervals)
        cells = (c.but(outcome="inconclusive", open=False, note=NO_TOKEN) for c in alone.cells)
        return replace(alone, cells=tuple(cells), outcome="inconclusive")

    def _unsound(self, sums: StepSums, part: float, why: str, intervals: bool) -> Verdict:
        alone = self._judged((sums,), part, intervals)
        wrong = unsound(alone, why)
        # a failed validity check reports it
        pairs = zip(alone.cells, wrong.cells, strict=True)
        return replace(wrong, cells=tuple(c if c.outcome == "error" else w for c, w in pairs))

    def _together(
        self,
        window: Sequence[tuple[int, StepSums]],
        red: Mapping[int, _Series],
        thin: bool,
        full: bool,
        alone: Verdict | None = None,
    ) -> Verdict:
        """The verdict on the last step, with the cells that only several steps decide.

        Args:
            red: the cells that a series of steps violates.
            alone: the verdict on the step alone; None: all are made with intervals.
        """
        intervals, steps = alone is None, [sums for _, sums in window]
        first, last = (step_alpha(1 - WHOLE_PART, n) for n in (window[0][0], window[-1][0]))
        alone = alone or self._judged(steps[-1:], last, intervals)
        cells = list(alone.cells)
        for i, series in red.items():
            if series.first < steps[-1].step:
                span = series.first, steps[-1].step
                cells[i] = self._cell(i, series, True).but(steps=span, where=cells[i].where)
        base = alone
        # one that does not hold before a filter is not mended by earlier steps
        undecided = [
            i
            for i, c in enumerate(cells)
            if c.outcome not in _DECIDED and c.reason not in ONLY_FILTERED
        ]
        rest = [i for i in undecided if thin or cells[i].slice != WHOLE]
        if rest and self.size > 1:
            joint = self._judged(steps, first, intervals)  # a series, too
            base = joint if thin else alone
            for i in rest:
                cells[i] = _joint(cells[i], joint.cells[i], thin, full, steps)
        return replace(base, cells=tuple(cells), outcome=outcome_of(cells))


def _joint(
    own: CellVerdict, joint: CellVerdict, thin: bool, full: bool, steps: Sequence[StepSums]
) -> CellVerdict:
    """An undecided cell on the steps of the window; a step that is no evidence adds none."""
    if joint.outcome == "violated" and (own.e_violated or 0.0) <= 0:
        return own
    joint = joint.but(more=joint.more if thin else own.more)
    if len(steps) > 1:
        joint = joint.but(steps=(steps[0].step, steps[-1].step))
    if joint.outcome == "inconclusive" and not full and own.slice != WHOLE:
        joint = joint.but(outcome="not applicable", note="too few steps yet")
    return joint


# Tokens that a trainer's filter removed before it wrote its dump: both of their logprobs are
# recorded.  A clause holds only if it holds with and without those tokens, because inclusion must
# be decided before the outcome; it is violated only on the trained tokens.


def bracketed(kept: Verdict, before: Verdict) -> Verdict:
    """The verdict on the trained tokens, inconclusive where it does not hold before the filter."""
    cells = []
    for own, drawn in zip(kept.cells, before.cells, strict=True):
        if own.metric == "kept_ratio":
            cells.append(drawn)
            continue
        missing = own.missing + max(drawn.n - own.n, 0)
        cell = own.but(missing=missing) if own.section == "statistical" else own
        if own.interval and drawn.interval:
            ends = (
                min(own.interval[0], drawn.interval[0]),
                max(own.interval[1], drawn.interval[1]),
            )
            cell = cell.but(interval=ends)
        if own.outcome == "holds" and drawn.outcome != "holds":
            # unscored tokens were removed too: a mean over the rest does not cover them
            scored = drawn.n - own.n > drawn.missing - own.missing
            value = of_cell(drawn, drawn.value) if scored else ""
            violated = drawn.outcome == "violated"
            known = "violated" if violated else "not decided"
            note = f"holds only after a filter: before it {value or 'not known'}, {known}"
            reason = ONLY_FILTERED[0 if violated else 1]
            cell = cell.but(outcome="inconclusive", note=note, reason=reason)
        cells.append(cell)
    enforced = [c.outcome for c in cells if c.enforced and c.outcome != "not applicable"]
    return replace(kept, cells=tuple(cells), outcome=worst([kept.outcome, *enforced]))


def tokens_to_decide(plan: Plan) -> int:
    """The tokens with which a good pair decides every enforced mean on the whole; 0 without one."""
    cells = (c for c in plan.cells if c.cut.name == WHOLE and c.clause.enforced)
    cells = (c for c in cells if c.kind.each == "token")
    return AMPLE * max((c.kind.units_at_best(plan.alpha) or 0 for c in cells), default=0)


# The violated slices to exclude, so that all other tokens are within the limits.


def within(atoms: Atoms, bits: int) -> tuple[TokenSum, TokenSum]:
    """The (1 - w)^+ of tokens in any of the slices that `bits` names, and of all others."""
    inside, outside = TokenSum(), TokenSum()
    for key, (n, tv) in atoms.items():
        if key & bits:
            inside += TokenSum(tv, int(n))
        else:
            outside += TokenSum(tv, int(n))
    return inside, outside


def limits_of(violated: Iterable[CellVerdict]) -> dict[str, float | None]:
    """The exceeded limit on mean TV of each violated slice and of the whole, if any."""
    limits: dict[str, float | None] = {}
    for cell in violated:
        if is_gradient(cell):
            limits[cell.slice] = cell.limit
        elif cell.slice != WHOLE:
            limits.setdefault(cell.slice, None)
    return limits


def fewest(
    names: Sequence[str], limits: Mapping[str, float | None], atoms: Atoms
) -> tuple[str, ...]:
    """The violated slices to exclude so that the others, and the whole, are within their limits.

    A slice that is violated only because it shares tokens with a worse one is not excluded. Greedy:
        the worst remaining slice is taken until no limit is exceeded; an estimate from means.

    Args:
        names: names of all slices, in the order of the bits of `atoms`.
        limits: limits of the violated ones on the mean of (1 - w)^+; None if another metric exceeds
            its limit, so that the slice is always excluded.  A name that is no slice means all
            tokens.
    """
    left = [name for name, limit in limits.items() if limit is None]
    while True:
        without = _bits(names, left)
        rest = {key: sums for key, sums in atoms.items() if not key & without}
        means = {}
        for name in limits:
            bits = _bits(names, [name])
            inside, outside = within(rest, bits)
            means[name] = (inside if bits else outside).mean or 0.0  # of all, for the whole
        beyond = any(means[n] > limit for n, limit in limits.items() if limit is not None)
        open_ = [name for name in limits if name in names and name not in left]
        if not beyond or not open_:
            return tuple(name for name in names if name in left)
        left.append(max(open_, key=means.__getitem__))


def _bits(names: Sequence[str], some: Sequence[str]) -> int:
    return sum(1 << i for i, name in enumerate(names) if name in some)
