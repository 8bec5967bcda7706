# The judge of a training run: each step is judged alone, and what it does not decide is judged on
# the last few steps together.  `check DIR`, `watch` and `Monitor` are three loops over it.
#
# One error budget for a run: the probability that any healthy step of it is called violated is at
# most alpha, however long the run is.  Half of alpha is for the whole of a dump (`WHOLE_PART`), and
# all steps share the other half: the t-th verdict of a run has 2 / ((t + 1)(t + 2)) of it, which
# adds up to 1, and half of that for each of its two evaluations.  A realised claim is additive, so
# the steps of a window are summed, and which ones they are is decided before the last is seen.

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce

from servanda.contract.identity import EvidenceKey
from servanda.contract.model import WHOLE
from servanda.judgement.clauses.base import CellVerdict, Outcome, Reason, worst
from servanda.judgement.evidence import Evidence, Weighed
from servanda.judgement.plan import Plan
from servanda.judgement.verdict import BlindSpot, Verdict, judge, outcome_of, unsound
from servanda.report.cell_text import of_cell
from servanda.rl.steps.contract import AMPLE, WORKLOAD
from servanda.rl.trend.run_chart import joined

WHOLE_PART = 1 / 2  # share of a dump's alpha for violations of the whole; the steps have the rest
_GROWTH = 2  # of a window on which a thin step stays undecided
_MOST = 16  # times its first size, at most
# a clause holds only after a filter
ONLY_FILTERED: tuple[Reason, ...] = ("violated unfiltered", "undecided unfiltered")
NO_TOKEN = "the mask has no trained token"

Atoms = Mapping[int, Sequence[float]]  # bits of slices -> tokens in exactly these, and their tv


def step_part(number: int) -> float:
    """The share of the number-th step, from 1, in the error probability of all steps.

    >>> round(sum(step_part(t) for t in range(1, 10_000)), 3)
    1.0
    """
    return 2 / ((number + 1) * (number + 2))


@dataclass(frozen=True)
class StepSums:
    """What a step is judged on.

    Args:
        step: of the trainer.
        trained: sums over its trained tokens; drawn: including those that a filter of the trainer
            removed, None if it removed none.
        atoms: of its tokens; empty if they are not needed.
    """

    step: int
    trained: Weighed
    drawn: Weighed | None = None
    atoms: Atoms = field(default_factory=dict)


@dataclass(frozen=True)
class StepVerdict:
    """The verdict on one step.

    Args:
        quick: without intervals and blind spots, which take long; cells that are judged on several
            steps name them.
        atoms: of the tokens of its cells.
        errors: why its data is no evidence; such a step is not judged.
    """

    step: int
    quick: Verdict
    atoms: Atoms
    errors: tuple[str, ...]
    _whole: Callable[[], Verdict]
    _trend: tuple[CellVerdict, ...] = ()
    _spots: tuple[BlindSpot, ...] = ()

    @property
    def outcome(self) -> Outcome:
        return self.quick.outcome

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
        window: steps that a slice, or a thin step, is judged on together.
        number: verdicts of the run so far, of an earlier process.
        digest: of the contract, which takes long to compute; "": computed.

    `size`: most steps of the window now; `enough`: the tokens with which a good pair is decided.
    """

    def __init__(self, plan: Plan, window: int, *, number: int = 0, digest: str = "") -> None:
        self.plan, self.size, self.number = plan, window, number
        self._digest = digest or plan.contract.digest
        self._largest = _MOST * window
        self.enough = tokens_to_decide(plan)
        self._steps: tuple[StepSums, ...] = ()

    def add(self, sums: StepSums, errors: Sequence[str] = ()) -> StepVerdict:
        """Judge the next step; one from before the last ends the windows of those after it.

        Args:
            errors: why its data is no evidence.
        """
        self.number += 1
        several = self.size > 1
        # a step is evaluated twice: alone, and with earlier steps
        part = (1 - WHOLE_PART) * step_part(self.number) / (2 if several else 1)
        alone = self._judged((sums,), part, False)
        failed = [c.note for c in alone.cells if c.enforced and c.outcome == "error"]
        if not sums.trained.tokens:
            # a completely filtered step has no data to check
            errors = () if sums.drawn is not None else (NO_TOKEN, *errors)
        if errors := (*errors, *failed):
            whole = partial(self._unsound, sums, part, errors[0])
            return StepVerdict(sums.step, whole(False), sums.atoms, errors, partial(whole, True))
        if not several:
            whole = partial(self._judged, (sums,), part, True)
            return StepVerdict(sums.step, alone, sums.atoms, (), whole)
        # a run that went back repeats its steps
        earlier = (known for known in self._steps if known.step < sums.step)
        steps = self._steps = (*earlier, sums)[-self.size :]
        # a whole that a step of a good pair would decide is judged on the step alone
        thin = sums.trained.tokens < self.enough
        full = len(steps) == self.size
        if all((c.slice == WHOLE and not thin) or _decided(c) for c in alone.cells):
            whole = partial(self._judged, (sums,), part, True)
            return StepVerdict(sums.step, alone, _atoms(steps), (), whole)
        whole = partial(self._chosen, steps, part, thin, full)
        quick = whole(alone)
        if thin and full and any(c.slice == WHOLE and c.open for c in quick.cells if c.enforced):
            self.size = min(_GROWTH * self.size, self._largest)
        return StepVerdict(sums.step, quick, _atoms(steps), (), whole)

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

    def _unsound(self, sums: StepSums, part: float, why: str, intervals: bool) -> Verdict:
        alone = self._judged((sums,), part, intervals)
        wrong = unsound(alone, why)
        # a failed validity check reports it
        pairs = zip(alone.cells, wrong.cells, strict=True)
        return replace(wrong, cells=tuple(c if c.outcome == "error" else w for c, w in pairs))

    def _chosen(
        self,
        steps: Sequence[StepSums],
        part: float,
        thin: bool,
        full: bool,
        alone: Verdict | None = None,
    ) -> Verdict:
        """The verdict on the last step, with the cells that only the window decides.

        Args:
            alone: the verdict on the step alone; None: it and the window's are made with intervals.
        """
        intervals = alone is None
        alone = alone or self._judged(steps[-1:], part, intervals)
        joint = self._judged(steps, part, intervals)
        span = steps[0].step, steps[-1].step
        cells = []
        for own, other in zip(alone.cells, joint.cells, strict=True):
            # a violation on the step alone, or before the filter, is not undone by earlier steps
            keeps = own.outcome in ("holds", "violated") or own.reason in ONLY_FILTERED
            if keeps or (own.slice == WHOLE and not thin):
                cells.append(own)
                continue
            other = other.but(more=other.more if thin else own.more, steps=span)
            if other.outcome == "inconclusive" and not full and own.slice != WHOLE:
                other = other.but(outcome="not applicable", note="too few steps yet")
            cells.append(other if len(steps) > 1 else other.but(steps=None))
        return replace(joint if thin else alone, cells=tuple(cells), outcome=outcome_of(cells))


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


def _decided(cell: CellVerdict) -> bool:
    return cell.outcome in ("holds", "violated", "not applicable")


def _atoms(steps: Sequence[StepSums]) -> Atoms:
    sums: dict[int, list[float]] = {}
    for step in steps:
        for key, (n, tv) in step.atoms.items():
            had = sums.get(key, [0.0, 0.0])
            sums[key] = [had[0] + n, had[1] + tv]
    return sums


def tokens_to_decide(plan: Plan) -> int:
    """The tokens with which a good pair decides every enforced mean on the whole; 0 without one."""
    cells = (c for c in plan.cells if c.cut.name == WHOLE and c.clause.enforced)
    return AMPLE * max((c.kind.units_at_best(plan.alpha) or 0 for c in cells), default=0)
