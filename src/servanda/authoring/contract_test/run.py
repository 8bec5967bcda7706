# Runs contract tests: judges the cases of a test by the same steps as a run.
#
# No kernel is run: tokens are generated from the series, and judged like measured ones.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from servanda.authoring.contract_test.evidence import (
    Data,
    GrowingEvidence,
    Recording,
    recorded_data,
    synthetic_data,
)
from servanda.authoring.contract_test.missing_data import NotGiven
from servanda.authoring.contract_test.model import ContractTest, Expectation
from servanda.authoring.contract_test.promotion import Moment, simulate
from servanda.authoring.contract_test.results import CaseResult, Check, Evaluation, SuiteResult
from servanda.authoring.contract_test.validate import misfits
from servanda.contract.model import Contract
from servanda.contract.stages import Leg, course_of
from servanda.errors import ContractError, Problem, Where
from servanda.judgement.clauses.base import CellVerdict, Outcome, worst
from servanda.judgement.escalation import asked_for
from servanda.judgement.plan import Plan, make_plan
from servanda.judgement.verdict import Verdict, judge
from servanda.promotion.state import leg_of
from servanda.registry import quoted
from servanda.report.cell_text import worst_first
from servanda.traces.corpus import Corpus

Locate = Callable[..., Where | None]  # a part of an expectation -> its place in the test


def run_test(
    test: ContractTest,
    contract: Contract,
    corpora: Mapping[str, Corpus],
    golden: Corpus | None,
    *,
    recorded: Mapping[str, Recording] | None = None,
) -> SuiteResult:
    """A contract's results for the cases of a test; pure, and determined by the seed.

    Args:
        corpora, golden: the texts that the contract names.
        recorded: runs, under the names that cases give them.

    Raises:
        ContractError: the contract cannot be planned; or the test refers to parts that the
            contract, the run or its case lacks.
        EvidenceError: a recorded run has other prompts or samples than this contract.
    """
    plan = make_plan(contract, corpora, golden)
    problems = [*misfits(test, plan)]
    if problems:
        raise ContractError.all(problems)
    cases = []
    for i, case in enumerate(test.cases):
        if case.clock is not None:
            cases.append(_run_promotion(test, i, plan))
            continue
        if case.recorded is None:
            data = synthetic_data(test, i, plan)
        else:
            data = recorded_data(test, i, plan, (recorded or {})[case.recorded])
        cases.append(_run_case(test, i, data))
    return SuiteResult(test.metadata.name, contract.metadata.name, contract.digest, tuple(cases))


def _run_case(test: ContractTest, i: int, data: Data) -> CaseResult:
    """One case: an evaluation at each number of prompt groups, with its expectations."""
    case = test.cases[i]
    problems = [*_vacuous(test, i, data.plan)]
    if problems:
        raise ContractError.all(problems)
    groups = [data.groups if e.after is None else e.after for e in case.expect]
    gathering = GrowingEvidence(data)
    verdicts = {n: judge(data.plan, gathering.after(n)) for n in sorted({*groups})}
    data.done(max(groups))
    expectations = []
    for j, (expectation, n) in enumerate(zip(case.expect, groups, strict=True)):
        where = partial(test.where, "cases", i, "expect", j)
        checks = tuple(_checks(where, expectation, data.plan.contract, verdicts[n]))
        expectations.append(Evaluation(n, checks, verdicts[n], where()))
    return CaseResult(case.name, tuple(expectations), data.not_given, test.where("cases", i))


def _vacuous(test: ContractTest, i: int, plan: Plan) -> Iterator[Problem]:
    """Cells of an expectation whose result does not depend on the case's data."""
    for j, expectation in enumerate(test.cases[i].expect):
        for name in expectation.cells:
            kinds = [
                cell.kind for cell in plan.cells if _is_named(name, cell.clause.id, cell.cut.name)
            ]
            missing = [kind.reason for kind in kinds if isinstance(kind, NotGiven)]
            if missing and len(missing) == len(kinds):
                message = f"the case has no data of {quoted(name)}: it is inconclusive at any limit"
                where = test.where("cases", i, "expect", j, "cells", name)
                yield Problem(message, where, missing[0])


def _is_named(name: str, clause: str, part: str) -> bool:
    """Whether a name in `cells` means a cell; a clause alone means all of its cells."""
    return name in (clause, f"{clause} on {part}")


def _run_promotion(test: ContractTest, i: int, plan: Plan) -> CaseResult:
    """One case with a clock: each expectation held against the latest evaluation of its time."""
    case = test.cases[i]
    assert case.clock is not None
    moments, not_given = simulate(test, i, plan)
    expectations = []
    for j, expectation in enumerate(case.expect):
        where = partial(test.where, "cases", i, "expect", j)
        moment = moments[case.clock.looks(expectation.at or 0.0)]
        leg = leg_of(course_of(plan.contract), moment.state)
        checks = (
            *_of_moment(where, expectation, moment, leg),
            *_checks(where, expectation, plan.contract, moment.verdict),
        )
        stands = f"{leg.name}, {moment.state.status.replace('_', ' ')}: {moment.state.why}"
        verdict = moment.verdict
        expectations.append(Evaluation(verdict.groups, checks, verdict, where(), moment.at, stands))
    return CaseResult(case.name, tuple(expectations), not_given, test.where("cases", i))


def _of_moment(
    where: Locate, expectation: Expectation, moment: Moment, leg: Leg
) -> Iterator[Check]:
    stands = {
        "leg": leg.name,
        "stage": leg.stage,
        "status": moment.state.status,
        "share": moment.share,
        "paged": moment.paged,
    }
    for name, actual in stands.items():
        expected = getattr(expectation, name)
        if expected is not None:
            yield Check(name, _value(expected), _value(actual), where=where(name))


def _checks(
    where: Locate, expectation: Expectation, contract: Contract, verdict: Verdict
) -> Iterator[Check]:
    decided = _decider([c for c in verdict.cells if c.enforced])
    if expectation.verdict is not None:
        place = where("verdict")
        yield Check("verdict", expectation.verdict, verdict.outcome, decided, place)
    for name, expected in expectation.cells.items():
        own = [c for c in verdict.cells if _is_named(name, c.clause, c.slice)]
        outcomes: list[Outcome] = [c.outcome for c in own if c.outcome != "not applicable"]
        actual = worst(outcomes) if outcomes else "not applicable"
        yield Check(name, expected, actual, _decider(own), where("cells", name))
    if expectation.actions is not None:
        actual = _action_text(asked_for(contract, verdict.cells))
        expected = _action_text(expectation.actions)
        yield Check("actions", expected, actual, decided, where("actions"))
    if expectation.can_promote is not None:
        # a stage may be left where every enforced cell holds, at the stage's size
        may = verdict.outcome == "holds"
        expected, actual = (str(answer).lower() for answer in (expectation.can_promote, may))
        yield Check("can_promote", expected, actual, decided, where("can_promote"))


def _decider(cells: Sequence[CellVerdict]) -> CellVerdict | None:
    """The cell with the worst outcome, of those the one with the largest ratio to its limit."""
    applicable = [cell for cell in cells if cell.outcome != "not applicable"]
    return next(iter(worst_first(applicable)), None)


def _action_text(actions: Sequence[str | Mapping[str, Any]]) -> str:
    """Actions as in contracts, independent of their order."""
    texts = [
        action
        if isinstance(action, str)
        else f"{{{', '.join(f'{name}: {_value(value)}' for name, value in action.items())}}}"
        for action in actions
    ]
    return f"[{', '.join(sorted({*texts}))}]"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return f"{value:g}" if isinstance(value, int | float) else str(value)
