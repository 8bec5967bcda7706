# Rehearsing: a contract answers the cases of a test, by the very steps that judge a run.
#
# No kernel is run: tokens are made from the series, weighed and judged as measured ones are.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from servanda.authoring.contract_test.evidence import (
    Data,
    Gathering,
    Recording,
    recorded_data,
    synthetic_data,
)
from servanda.authoring.contract_test.missing_data import NotGiven
from servanda.authoring.contract_test.model import ContractTest, Expectation
from servanda.authoring.contract_test.promotion import Moment, promoted
from servanda.authoring.contract_test.results import CaseResult, Check, Looked, Rehearsal
from servanda.authoring.contract_test.validate import misfits
from servanda.contract.model import Contract
from servanda.contract.stages import Leg, course_of
from servanda.errors import ContractError, Problem
from servanda.judgement.clauses.base import CellVerdict, Outcome, worst
from servanda.judgement.escalation import asked_for
from servanda.judgement.plan import Plan, make_plan
from servanda.judgement.verdict import Verdict, judge
from servanda.promotion.state import leg_of
from servanda.registry import quoted
from servanda.report.cell_text import worst_first
from servanda.traces.corpus import Corpus


def rehearse(
    test: ContractTest,
    contract: Contract,
    corpora: Mapping[str, Corpus],
    golden: Corpus | None,
    *,
    recorded: Mapping[str, Recording] | None = None,
) -> Rehearsal:
    """A contract's answers to the cases of a test; pure, and the same for the same seed.

    Args:
        corpora, golden: the texts that the contract names.
        recorded: runs, under the names that cases give them.

    Raises:
        ContractError: the contract cannot be planned, in its own places; or the test speaks of
            what the contract, the run or its own case does not have, in the test's.
        EvidenceError: a recorded run is not of this contract's prompts and draws.
    """
    plan = make_plan(contract, corpora, golden)
    problems = [*misfits(test, plan)]
    if problems:
        raise ContractError.all(problems)
    cases = []
    for i, case in enumerate(test.cases):
        if case.clock is not None:
            cases.append(_promoted(test, i, plan))
            continue
        if case.recorded is None:
            data = synthetic_data(test, i, plan)
        else:
            data = recorded_data(test, i, plan, (recorded or {})[case.recorded])
        cases.append(_answered(test, i, data))
    return Rehearsal(test.metadata.name, contract.metadata.name, contract.digest, tuple(cases))


def _answered(test: ContractTest, i: int, data: Data) -> CaseResult:
    """One case: a look at each number of prompt groups, and each expectation held against its."""
    case = test.cases[i]
    problems = [*_vacuous(test, i, data.plan)]
    if problems:
        raise ContractError.all(problems)
    groups = [data.groups if e.after is None else e.after for e in case.expect]
    gathering = Gathering(data)
    verdicts = {n: judge(data.plan, gathering.after(n)) for n in sorted({*groups})}
    data.done(max(groups))
    expectations = []
    for j, (expectation, n) in enumerate(zip(case.expect, groups, strict=True)):
        place = ("cases", i, "expect", j)
        checks = tuple(_checks(test, place, expectation, data.plan.contract, verdicts[n]))
        expectations.append(Looked(n, checks, verdicts[n], test.where(*place)))
    return CaseResult(case.name, tuple(expectations), data.not_given, test.where("cases", i))


def _vacuous(test: ContractTest, i: int, plan: Plan) -> Iterator[Problem]:
    """Cells that an expectation names, and whose answer hangs on nothing that the case gives."""
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


def _promoted(test: ContractTest, i: int, plan: Plan) -> CaseResult:
    """One case with a clock: each expectation held against the latest look of its time."""
    case = test.cases[i]
    assert case.clock is not None
    moments, not_given = promoted(test, i, plan)
    expectations = []
    for j, expectation in enumerate(case.expect):
        place = ("cases", i, "expect", j)
        moment = moments[case.clock.looks(expectation.at or 0.0)]
        leg = leg_of(course_of(plan.contract), moment.state)
        checks = (
            *_of_moment(test, place, expectation, moment, leg),
            *_checks(test, place, expectation, plan.contract, moment.verdict),
        )
        stands = f"{leg.name}, {moment.state.status.replace('_', ' ')}: {moment.state.why}"
        groups, where = moment.verdict.groups, test.where(*place)
        expectations.append(Looked(groups, checks, moment.verdict, where, moment.at, stands))
    return CaseResult(case.name, tuple(expectations), not_given, test.where("cases", i))


def _of_moment(
    test: ContractTest,
    place: tuple[str | int, ...],
    expectation: Expectation,
    moment: Moment,
    leg: Leg,
) -> Iterator[Check]:
    """Where the promotion stands after the look."""
    stands = {
        "leg": leg.name,
        "stage": leg.stage,
        "status": moment.state.status,
        "share": moment.share,
        "paged": moment.paged,
    }
    for name, found in stands.items():
        expected = getattr(expectation, name)
        if expected is not None:
            where = test.where(*place, name)
            yield Check(name, _shown(expected), _shown(found), where=where)


def _shown(value: object) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else _value(value)


def _checks(
    test: ContractTest,
    place: tuple[str | int, ...],
    expectation: Expectation,
    contract: Contract,
    verdict: Verdict,
) -> Iterator[Check]:
    decided = _decider([c for c in verdict.cells if c.enforced])
    if expectation.verdict is not None:
        where = test.where(*place, "verdict")
        yield Check("verdict", expectation.verdict, verdict.outcome, decided, where)
    for name, expected in expectation.cells.items():
        own = [c for c in verdict.cells if _is_named(name, c.clause, c.slice)]
        met: list[Outcome] = [c.outcome for c in own if c.outcome != "not applicable"]
        found = worst(met) if met else "not applicable"
        yield Check(name, expected, found, _decider(own), test.where(*place, "cells", name))
    if expectation.actions is not None:
        found = _written(asked_for(contract, verdict.cells))
        where = test.where(*place, "actions")
        yield Check("actions", _written(expectation.actions), found, decided, where)
    if expectation.can_promote is not None:
        # a stage may be left where every enforced cell holds, at the stage's size
        may = verdict.outcome == "holds"
        expected, found = (str(answer).lower() for answer in (expectation.can_promote, may))
        yield Check("can_promote", expected, found, decided, test.where(*place, "can_promote"))


def _decider(cells: Sequence[CellVerdict]) -> CellVerdict | None:
    """The cell with the worst answer, and of those the one nearest to its limit or beyond."""
    applicable = [cell for cell in cells if cell.outcome != "not applicable"]
    return next(iter(worst_first(applicable)), None)


def _written(actions: Sequence[str | Mapping[str, Any]]) -> str:
    """Actions as a contract writes them; their order says nothing."""
    shown = [
        action
        if isinstance(action, str)
        else f"{{{', '.join(f'{name}: {_value(value)}' for name, value in action.items())}}}"
        for action in actions
    ]
    return f"[{', '.join(sorted(dict.fromkeys(shown)))}]"


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)
