# Contract tests from files: the tests and their contracts, as input of `run_test`.

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from servanda.authoring.contract_test.evidence import (
    Data,
    GrowingEvidence,
    misfits,
    synthetic_data,
)
from servanda.authoring.contract_test.model import (
    KIND,
    SUFFIX,
    Act,
    Case,
    Clock,
    ContractTest,
    Expectation,
)
from servanda.authoring.contract_test.results import CaseResult, Check, Evaluation, SuiteResult
from servanda.contract import yaml_reader
from servanda.contract.finding import Finding
from servanda.contract.model import Contract
from servanda.contract.parser import Tongue, refused
from servanda.contract.stages import Leg, course_of
from servanda.engines.foreign_code import refuse_outside
from servanda.errors import ContractError, EvidenceError, Problem, Where
from servanda.judgement.clauses.base import CellVerdict, Outcome, worst
from servanda.judgement.escalation import asked_for
from servanda.judgement.plan import Plan, make_plan
from servanda.judgement.schedule import Arrivals, Schedule
from servanda.judgement.verdict import Verdict, judge
from servanda.promotion.advance import Move, advance, approve, begin, override, roll_back, route_of
from servanda.promotion.api import leg_finding
from servanda.promotion.state import LegFinding, Override, State, leg_of
from servanda.registry import quoted
from servanda.report.cell_text import worst_first
from servanda.runner import load
from servanda.traces.corpus import Corpus

# Reading contract tests: text -> ContractTest, or every error at once, each with its place.
#
# Read like the contract language, by the same passes.  A file may contain several documents.


_TONGUE = Tongue(
    ContractTest,
    {
        "ContractTest": "a contract test",
        "Case": "a case",
        "Expectation": "an expectation",
        "Level": "a service level",
        "Clock": "a clock",
        "Act": "an act",
        "Metadata": "metadata",
    },
    {
        "contract": "one file, such as ../tiny-int8.kernelcontract.yaml; each test has its own",
        "cases": "write a list of {name: ..., traffic: ..., expect: [...]}",
        "expect": "write a list, such as [{after: 400, verdict: holds}]",
        "traffic": 'write "gap(0.01)x6000", or {domain=code: "gap(0.6)x400", rest: ...}',
        "self_noise": 'write "gap(0.001)x6000"',
        "stable": 'write "gap(0.01)x6000"',
        "cells": 'write {"tail on domain=code": violated}',
        "actions": "write a list, such as [{divert: slice}, {page: oncall}]; [] is none",
        "clock": "write {every: 1m, groups: 200}",
        "acts": "write a list, such as [{at: 20m, approve: alice}]",
        "paged": "write a list, such as [oncall]; [] names no one",
        "golden": "write {logit_osc_nats: 0.4}",
        "timing": "write {CLAUSE: 0.2}, or {CLAUSE: {infer: 0.2, stable: 0.25}}",
    },
)
_DOCUMENT = re.compile(r"^---(?=\s|$)", re.MULTILINE)
_ACTS = ("approve", "roll_back", "override", "fails", "changes")
_OF_PROMOTION = ("at", "leg", "stage", "status", "share", "paged")


def read_tests(text: str, name: str) -> tuple[ContractTest, ...]:
    """The contract tests of a text, in order, with their places.

    Args:
        text: the whole text; name: of its file, for messages.

    Raises:
        ContractError: all problems, in the order of the text.
    """
    tests: list[ContractTest] = []
    problems: list[Problem] = []
    for document in _documents(text):
        result = _read(document, name)
        if isinstance(result, ContractTest):
            tests.append(result)
        else:
            problems += result
    if problems:
        raise ContractError.all(problems)
    return tuple(tests)


def _documents(text: str) -> Iterator[str]:
    """Each document of a text on its own lines; those before it are left blank."""
    starts = [0, *(match.start() for match in _DOCUMENT.finditer(text))]
    ends = [*starts[1:], len(text)]
    parts = [(start, text[start:end]) for start, end in zip(starts, ends, strict=True)]
    # the text before the first --- is a document only if it is not empty
    documents = [(start, part) for start, part in parts if _says_something(part)]
    for start, part in documents or parts[:1]:
        yield "\n" * text.count("\n", 0, start) + part


def _says_something(part: str) -> bool:
    lines = part.removeprefix("\ufeff").removeprefix("---").split("\n")
    return any(line.strip() and not line.strip().startswith("#") for line in lines)


def _read(text: str, name: str) -> ContractTest | list[Problem]:
    try:
        data, marks, problems = yaml_reader.read(text, name, noun="contract test")
    except ContractError as error:
        return [*error.problems]
    kind = data.get("kind")
    if isinstance(kind, str) and kind != KIND and "cases" not in data:
        message = f"this is a {kind}, and `servanda contract test` reads a {KIND}"
        hint = f"name it under contract: of a file that ends in {SUFFIX}"
        return [Problem(message, marks.near(("kind",)), hint)]
    try:
        test = ContractTest.model_validate(data)
    except ValidationError as error:
        problems += refused(error, data, marks, _TONGUE)
    else:
        problems += [
            Problem(f.message, (marks.key if f.key else marks.near)(f.path), f.hint)
            for f in _contradictions(test)
        ]
        if not problems:
            return test.placed(marks.near)
    return sorted(problems, key=lambda p: (p.where.line, p.where.column) if p.where else (0, 0))


def _contradictions(test: ContractTest) -> Iterator[Finding]:
    """Contradictions between parts of a test."""
    first: dict[str, int] = {}
    for i, case in enumerate(test.cases):
        path = ("cases", i)
        if case.name in first:
            message = f"two cases are named {case.name!r}"
            yield Finding((*path, "name"), message, "a name says what only this case shows")
        first.setdefault(case.name, i)
        yield from _case_findings(path, case)
        for j, expectation in enumerate(case.expect):
            yield from _expectation_findings((*path, "expect", j), case, expectation)


def _case_findings(path: tuple[str | int, ...], case: Case) -> Iterator[Finding]:
    for name in ("self_noise", "stable"):
        if getattr(case, name) is not None and not case.traffic:
            message = f"{name} is measured beside traffic, and the case has none"
            yield Finding((*path, name), message, "give traffic as well", True)
    if case.clock is not None and not case.traffic:
        message = "a clock lets prompt groups come in, and the case gives no traffic"
        yield Finding((*path, "clock"), message, "give traffic as well", True)
    if case.acts and case.clock is None:
        message = "acts are done to a promotion, and the case has no clock"
        yield Finding((*path, "acts"), message, "give clock: {every: 1m, groups: 200}", True)
    ends = max((e.at or 0.0 for e in case.expect), default=0.0)
    for j, act in enumerate(case.acts):
        if case.clock is not None and act.at > case.clock.looks(ends) * case.clock.every:
            message = "the act is never done: the last look of the case is before it"
            yield Finding((*path, "acts", j, "at"), message, "expect something at a later time")
        done = [name for name in _ACTS if getattr(act, name) is not None]
        if len(done) != 1:
            message = f"an act is one of {', '.join(_ACTS)}; found {len(done)}"
            yield Finding((*path, "acts", j), message, "write {at: 20m, approve: alice}")


def _expectation_findings(
    path: tuple[str | int, ...], case: Case, expectation: Expectation
) -> Iterator[Finding]:
    says = expectation.model_dump(exclude={"after", "at"}, exclude_defaults=True)
    if not says:
        message = "the expectation expects nothing"
        yield Finding(path, message, "add verdict: holds, or cells, actions, can_promote")
    if case.clock is None:
        for name in _OF_PROMOTION:
            if getattr(expectation, name) is not None:
                message = f"{name} is about a promotion, and the case has no clock"
                hint = "give the case clock: {every: 1m, groups: 200}"
                yield Finding((*path, name), message, hint, True)
        yield from _long_enough((*path, "after"), case, expectation.after or 0)
        return
    if expectation.after is not None:
        message = "a case with a clock is looked at by its time"
        yield Finding((*path, "after"), message, "write at: 10m instead", True)
    if expectation.at is None:
        message = "the expectation does not say when"
        yield Finding(path, message, "add at: 10m, the time of the look")
        return
    groups = case.clock.looks(expectation.at) * case.clock.groups
    yield from _long_enough((*path, "at"), case, groups)


def _long_enough(path: tuple[str | int, ...], case: Case, groups: int) -> Iterator[Finding]:
    if not case.traffic and groups and case.clock is None:
        message = f"there are no {groups:,} prompt groups: the case gives no traffic"
        yield Finding(path, message, "give traffic, or write after: 0")
    for part in ("traffic", "self_noise", "stable"):
        for name, series in (getattr(case, part) or {}).items():
            if len(series) < groups:
                message = f"{part} on {name} ends after {len(series):,} prompt groups, and the "
                message += f"look is after {groups:,}"
                yield Finding(path, message, "make the series longer, or look earlier")


# Runs contract tests: judges the cases of a test by the same steps as a run.
#
# No kernel is run: tokens are generated from the series, and judged like measured ones.


# A promotion in virtual time: evaluations at fixed intervals, with the series of a case as data.
#
# The steps are those of a real one (`begin`, `advance`, and actions of people); only the clock and
# the tokens are synthetic.  The series continue with time: data of one step is not repeated on the
# next.


_SIMULATED = "rehearsed"  # the run's name, and the reason of every act


@dataclass(frozen=True)
class LegPlan(Plan):
    """The plan of one step, with the contract's own prompts as user requests."""

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """As planned; those of a live step have a separate order."""
        return tuple(
            replace(s.planned, seed=s.seed) if isinstance(s, Arrivals) else s
            for s in super().schedules
        )


@dataclass(frozen=True)
class Moment:
    """The state of a promotion after one evaluation.

    Args:
        at: virtual seconds; leg: evaluated step; share: share of the traffic that infer serves.
        verdict: of the evaluation, and its prompt groups; paged: people paged until then.
    """

    at: float
    state: State
    leg: Leg
    share: float
    verdict: Verdict
    paged: tuple[str, ...]


def simulate(test: ContractTest, i: int, plan: Plan) -> tuple[list[Moment], tuple[str, ...]]:
    """Every evaluation of a case with a clock, in order, and the missing data of any step.

    Raises:
        ContractError: an act that the promotion refuses, at its place in the test.
    """
    case = test.cases[i]
    assert case.clock is not None
    run = _Run(test, i, plan, case.clock)
    looks = case.clock.looks(max(e.at or 0.0 for e in case.expect))
    moments = [run.evaluate(tick) for tick in range(looks + 1)]
    return moments, tuple(run.not_given)


class _Run:
    def __init__(self, test: ContractTest, i: int, plan: Plan, clock: Clock) -> None:
        self.test, self.i, self.plan, self.clock = test, i, plan, clock
        self.course = course_of(plan.contract)
        self.not_given: dict[str, None] = {}
        self._paged: list[str] = []
        self._done = 0  # acts
        self._changed: dict[str, str] = {}
        self._fails = ""
        leg = self.course[0]
        self._enter(leg, 0)
        key = self._gathering.data.once.key
        self._follow(begin(_SIMULATED, key, self.course, now=0.0))

    def evaluate(self, tick: int) -> Moment:
        """Due actions, one evaluation, and its consequences."""
        now, self._fails = tick * self.clock.every, ""
        acts = sorted(enumerate(self.test.cases[self.i].acts), key=lambda act: act[1].at)
        while self._done < len(acts) and acts[self._done][1].at <= now:
            self._act(*acts[self._done], now)
            self._done += 1
        leg = leg_of(self.course, self._state)
        if leg.name != self._leg.name:
            self._enter(leg, (tick - 1) * self.clock.groups)
        if not self._state.ended:
            groups = tick * self.clock.groups - self._first
            self._verdict = judge(self._gathering.data.plan, self._gathering.after(groups))
            finding = leg_finding(self.plan.contract, leg, self._verdict)
            finding = replace(finding, key=replace(self._verdict.key, **self._changed))
            if self._fails:
                finding = LegFinding(leg.name, finding.key, error=self._fails)
            self._follow(advance(self.course, self._state, finding, now=now))
        share = route_of(self.course, self._state)["share"]
        return Moment(now, self._state, leg, share, self._verdict, tuple(self._paged))

    def _enter(self, leg: Leg, first: int) -> None:
        """Begin a step without evidence."""
        plan = self.plan
        plan = make_plan(plan.contract, plan.corpora, plan.golden, leg=leg)
        plan = LegPlan(**{field.name: getattr(plan, field.name) for field in fields(plan)})
        data = synthetic_data(self.test, self.i, plan, leg.name, first)
        self.not_given.update(dict.fromkeys(data.not_given))
        self._leg, self._first, self._gathering = leg, first, GrowingEvidence(data)

    def _follow(self, move: Move) -> None:
        self._state, effects = move
        self._paged += [str(e.body["to"]) for e in effects if e.kind == "page"]

    def _act(self, j: int, act: Act, now: float) -> None:
        if act.changes is not None:
            self._changed[act.changes] = "another"
        self._fails = act.fails or self._fails
        try:
            for actor, action in ((act.approve, approve), (act.roll_back, roll_back)):
                if actor is not None:
                    signature = {"actor": actor, "reason": _SIMULATED, "now": now}
                    self._follow(action(self.course, self._state, **signature))
            if act.override is not None:
                clause, _, part = act.override.partition(" on ")
                given = Override(clause, part or "*", _SIMULATED, _SIMULATED, now + act.ttl)
                self._follow(override(self.course, self._state, given, now=now))
        except EvidenceError as error:
            where = self.test.where("cases", self.i, "acts", j)
            raise ContractError.all([replace(p, where=where) for p in error.problems]) from None


Locate = Callable[..., Where | None]  # a part of an expectation -> its place in the test


def run_test(
    test: ContractTest, contract: Contract, corpora: Mapping[str, Corpus], golden: Corpus | None
) -> SuiteResult:
    """A contract's results for the cases of a test; pure, and determined by the seed.

    Args:
        corpora, golden: the texts that the contract names.

    Raises:
        ContractError: the contract cannot be planned; or the test refers to parts that the
            contract or its case lacks.
    """
    plan = make_plan(contract, corpora, golden)
    problems = [*misfits(test, plan)]
    if problems:
        raise ContractError.all(problems)
    cases = tuple(
        _run_case(test, i, synthetic_data(test, i, plan))
        if case.clock is None
        else _run_promotion(test, i, plan)
        for i, case in enumerate(test.cases)
    )
    return SuiteResult(test.metadata.name, contract.metadata.name, contract.digest, cases)


def _run_case(test: ContractTest, i: int, data: Data) -> CaseResult:
    """One case: an evaluation at each number of prompt groups, with its expectations."""
    case = test.cases[i]
    problems = [*_vacuous(test, i, data)]
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


def _vacuous(test: ContractTest, i: int, data: Data) -> Iterator[Problem]:
    """Cells of an expectation whose result does not depend on the case's data."""
    for j, expectation in enumerate(test.cases[i].expect):
        for name in expectation.cells:
            pairs = zip(data.plan.cells, data.lacks, strict=True)
            missing = [why for c, why in pairs if _is_named(name, c.clause.id, c.cut.name)]
            if missing and all(missing):
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


@dataclass(frozen=True)
class PreparedTest:
    """A test with its contract and texts.

    Args:
        file: of the test, as it was named; path, text: of its contract.
    """

    file: Path
    test: ContractTest
    path: Path
    text: str
    contract: Contract
    corpora: dict[str, Corpus]
    golden: Corpus | None

    def run(self) -> SuiteResult:
        """The results of the contract.

        Raises:
            ContractError: as in `run_test`.
        """
        return run_test(self.test, self.contract, self.corpora, self.golden)


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The test files of paths: single files, or all of a folder.

    Raises:
        ContractError: a folder has none.
    """
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not inside:
            raise ContractError(f"{path} holds no contract test", hint=f"it ends in {SUFFIX}")
        files += inside
    return list(dict.fromkeys(files))


def prepare_tests(file: Path) -> tuple[PreparedTest, ...]:
    """The tests of a file, with the contracts that they name.

    Raises:
        ContractError: problems of a test's or a contract's text, with their places.
    """
    data = load.bytes_of(file, f"give a {SUFFIX} file, or a folder of them")
    text = load.decoded(data, str(file))
    return tuple(_prepare_test(file, test) for test in read_tests(text, str(file)))


def _prepare_test(file: Path, test: ContractTest) -> PreparedTest:
    path = file.parent / test.contract
    refuse_outside([(path, test.where("contract"))], file.parent)
    if not path.is_file():
        raise ContractError(
            f"{path} is no file" if path.exists() else f"there is no {path}",
            where=test.where("contract"),
            hint="the path of a contract starts from the folder of its test",
        )
    contract = load.load(path)
    corpora, golden = load.corpora(contract)
    text = path.read_text(encoding="utf-8-sig")
    return PreparedTest(file, test, path, text, contract, corpora, golden)
