# Whether a test matches its contract: slices, cells, metrics and sizes.

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from servanda.authoring.contract_test.model import REST, Case, ContractTest, Expectation
from servanda.contract.model import WHOLE
from servanda.contract.stages import course_of
from servanda.errors import Problem
from servanda.judgement.clauses.service_level import TIMINGS
from servanda.judgement.plan import Plan
from servanda.judgement.slices.rules import cuts_of
from servanda.registry import did_you_mean, quoted

MOST_TOKENS = 20_000_000  # of one case; a minute of weighing

MOST_LOOKS = 1_000  # of one case with a clock

Place = tuple[str | int, ...]


def width_of(test: ContractTest, width: int) -> int:
    """Tokens of each response: given by the test, or the workload's limit."""
    return min(test.answer_tokens or width, width)


def misfits(test: ContractTest, plan: Plan) -> Iterator[Problem]:
    """Parts of a test that its contract lacks, each with its place in the test."""
    yield from _levels(test, plan, (), test.golden, test.timing)
    for i, case in enumerate(test.cases):
        path = ("cases", i)
        for part in ("traffic", "self_noise", "stable"):
            for name in getattr(case, part) or {}:
                yield from _slice(test, plan, (*path, part), name)
        yield from _levels(test, plan, path, case.golden, case.timing)
        for j, expectation in enumerate(case.expect):
            yield from _expectation(test, plan, case, (*path, "expect", j), expectation)


def named_slices(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Slice of the contract -> the names of its parts, in all workloads; the whole is one."""
    parts_of: dict[str, dict[str, None]] = {WHOLE: {WHOLE: None}}
    for corpus in plan.corpora.values():
        for rule, cuts in cuts_of(plan.contract.slices, corpus).items():
            parts_of.setdefault(rule, {}).update({cut.name: None for cut in cuts})
    return {rule: tuple(names) for rule, names in parts_of.items()}


def _slice(test: ContractTest, plan: Plan, path: Place, name: str) -> Iterator[Problem]:
    slices = named_slices(plan)
    known = [part for parts in slices.values() for part in parts]
    if name == REST or name in known:
        return
    where = test.where(*path, name)
    if name in slices:
        message = f"slice {name!r} is split, and a series is for one of its parts"
        yield Problem(message, where, f"known: {', '.join(slices[name])}")
    else:
        hint = did_you_mean(name, [*known, REST])
        yield Problem(f"no slice is named {quoted(name)}", where, hint)


def _levels(
    test: ContractTest, plan: Plan, path: Place, golden: object, timing: object
) -> Iterator[Problem]:
    metrics = {c.clause.metric for c in plan.cells if c.section == "numerical"}
    levels = {c.clause.id for c in plan.cells if c.clause.metric in TIMINGS}
    for part, names, known, what in (
        ("golden", golden, metrics, "numerical clause concerns"),
        ("timing", timing, levels, "clause about time or speed is named"),
    ):
        for name in names if isinstance(names, dict) else ():
            if name not in known:
                hint = did_you_mean(name, known) if known else f"remove {part}"
                yield Problem(f"no {what} {quoted(name)}", test.where(*path, part, name), hint)


def _expectation(
    test: ContractTest, plan: Plan, case: Case, path: Place, expectation: Expectation
) -> Iterator[Problem]:
    clauses = {cell.clause.id for cell in plan.cells}
    cells = {f"{cell.clause.id} on {cell.cut.name}" for cell in plan.cells}
    for name in expectation.cells:
        if name not in clauses and name not in cells:
            own = [cell for cell in cells if cell.startswith(f"{name.partition(' on ')[0]} on ")]
            hint = did_you_mean(name, own or [*clauses, *cells])
            message = f"no cell is named {quoted(name)}"
            yield Problem(message, test.where(*path, "cells", name), hint)
    legs = [leg.name for leg in course_of(plan.contract)]
    # a promotion in full has one window after another
    pattern = "|".join([*map(re.escape, legs), *(["full-[1-9][0-9]*"] if "full-1" in legs else [])])
    if expectation.leg is not None and not re.fullmatch(pattern, expectation.leg):
        hint = f"known: {', '.join(legs)}"
        message = f"the promotion has no leg {quoted(expectation.leg)}"
        yield Problem(message, test.where(*path, "leg"), hint)
    if case.recorded is None:
        yield from _sizes(test, plan, case, path, expectation)


def _sizes(
    test: ContractTest, plan: Plan, case: Case, path: Place, expectation: Expectation
) -> Iterator[Problem]:
    """Whether the data suffices for the evaluation, and whether it takes at most a minute."""
    if case.clock is not None:
        looks = case.clock.looks(expectation.at or 0.0)
        groups = looks * case.clock.groups
        ends, where = math.inf, test.where(*path, "at")
        if looks > MOST_LOOKS:
            message = f"{looks:,} looks until then; a case has at most {MOST_LOOKS:,}"
            yield Problem(message, where, "let the clock tick less often: every: 10m")
    else:
        groups = expectation.after
        if groups is None:
            groups = min(map(len, (case.traffic or {}).values()), default=0)
        ends = min((s.rounds * s.workload.round for s in plan.schedules), default=0)
        where = test.where(*path, "after")
    tokens = sum(groups * s.workload.samples * width_of(test, s.width) for s in plan.schedules)
    if groups > ends:
        message = f"a run of this contract ends after {ends:,} prompt groups"
        hint = "look earlier, or raise the second number of promotion.offline.prompt_groups"
        yield Problem(message, where, hint)
    elif tokens > MOST_TOKENS:
        message = f"{groups:,} prompt groups are {tokens:,} tokens"
        hint = f"a case has at most {MOST_TOKENS:,}: write answer_tokens: 32 beside seed:"
        yield Problem(message, where, hint)
