# Mutating: limits moved, faults injected, and a kernel that has to pass: three questions.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from servanda.authoring.contract_test.files import PreparedTest
from servanda.authoring.mutation.conforming_kernel import against_itself, beyond_reach, conforming
from servanda.authoring.mutation.equivalent import Texts
from servanda.authoring.mutation.fault_injection import inject, named
from servanda.authoring.mutation.limit_tests import try_limits
from servanda.authoring.mutation.result import Conformance, FaultResult, Mutation, Part
from servanda.contract.model import Contract
from servanda.engines.faults import FAULTS
from servanda.engines.worker import spawn
from servanda.errors import ContractError, Interrupted
from servanda.judgement.plan import Plan, draft
from servanda.report.format import count, duration
from servanda.runner import load
from servanda.runner.fault_drill import drill
from servanda.runner.measurement import Open, Progress, Watch, unwatched

PARTS: tuple[Part, ...] = ("limits", "faults")
Say = Callable[[str], None]


def discard(_: str) -> None:
    """No one listens."""


def never() -> bool:
    return False


def mutate(
    contract: Contract,
    tests: Sequence[PreparedTest] = (),
    *,
    only: Part | None = None,
    faults: Sequence[str] = (),
    open: Open = spawn,
    watch: Watch = unwatched,
    deadline: Callable[[], bool] = never,
    say: Say = discard,
) -> Mutation:
    """Determine whether a contract and its tests distinguish good kernels from bad ones.

    Moved limits are held against the tests, which costs no kernel.  Then the train kernel is
    checked against itself, the contract as it is, and with each fault in it.  Ctrl-C ends it
    with what was found so far.

    Args:
        tests: that the contract passes.
        only: one of the two parts; faults: of the catalogue, none is every one.
        deadline: whether the time is over; no round and no mutant starts after that.
        say: called with the cost of the faults, before the first.

    Raises:
        ContractError: the contract cannot be measured, or its tests do not pass as they are.
        MeasurementError: no such fault, or a check without a fault failed.
    """
    run = _Run(contract, open, watch, deadline, say)
    parts = (only,) if only else PARTS
    result = Mutation(
        contract.metadata.name,
        contract.digest,
        parts,
        tests=len(tests),
        cases=sum(len(test.test.cases) for test in tests),
    )
    names = named(faults)
    try:
        if "limits" in parts:
            for mutant in try_limits(contract, tests, run.texts, run.over):
                result = replace(result, limits=(*result.limits, mutant))
        if "faults" in parts:
            for latest in run.drilled(result, names):
                result = latest
    except (Interrupted, KeyboardInterrupt):
        return replace(result, stopped="interrupted")
    return replace(result, stopped="time" if result.open else "")


@dataclass(frozen=True)
class _Run:
    """What all steps of one mutation need."""

    contract: Contract
    open: Open
    watch: Watch
    deadline: Callable[[], bool]
    say: Say

    @cached_property
    def texts(self) -> Texts:
        return load.corpora(self.contract)

    def over(self, done: int, total: int) -> bool:
        self.watch(Progress("moved limits", done, total))
        return self.deadline()

    def drilled(self, result: Mutation, names: Sequence[str]) -> Iterator[Mutation]:
        """The result after each check; faults are injected where a good kernel passes."""
        plan, problems = draft(self.contract, *self.texts)
        reach = beyond_reach(plan)
        beyond = {failing.why for failing in reach.failing} if reach else set()
        others = [problem for problem in problems if problem.message not in beyond]
        if others:
            raise ContractError.all(others)
        if reach is not None:
            yield replace(result, itself=reach)
            return
        faulty = self.contract
        itself = against_itself(self.contract)
        if itself is not None:
            result = replace(result, itself=self.checked(itself))
            yield result
        same = itself is not None and itself.kernels == self.contract.kernels
        if result.itself is None or (result.itself.holds and not same):
            result = replace(result, own=self.checked(self.contract))
            yield result
        good = next((c for c in (result.own, result.itself) if c is not None and c.holds), None)
        if good is None:
            if any(c is not None and c.open for c in (result.own, result.itself)):
                yield replace(result, faults=tuple(map(_unreached, names)))
            return
        if good is not result.own and itself is not None:
            # where infer is violated without a fault, every fault would seem to be caught
            faulty = itself
        result = replace(result, faulty=good.kernels)
        self.say(_cost(good, names, plan))
        for done, name in enumerate(names):
            self.watch(Progress("faults", done, len(names)))
            if self.deadline():
                fault = _unreached(name)
            else:
                fault = inject(
                    faulty, name, open=self.open, watch=self.watch, deadline=self.deadline
                )
            result = replace(result, faults=(*result.faults, fault))
            yield result

    def checked(self, contract: Contract) -> Conformance:
        """A check without a fault."""
        plan, began = load.compile(contract), time.monotonic()

        def watch_check(progress: Progress) -> None:
            self.watch(replace(progress, what=f"no fault: {progress.what}"))

        result = drill(contract, None, open=self.open, watch=watch_check, deadline=self.deadline)
        return conforming(plan, result, time.monotonic() - began)


def _unreached(name: str) -> FaultResult:
    return FaultResult(name, FAULTS[name].default, "open")


def _cost(good: Conformance, names: Sequence[str], plan: Plan) -> str:
    """What the faults will take, by what the check without one took."""
    each = good.seconds or 0.0
    last = sum(s.last for s in plan.schedules)
    longest = each * max(last / good.groups, 1.0) if good.groups else each
    what = count(len(names), "fault")
    return (
        f"{what}, a check each: about {duration(each * len(names))} if each takes as long as "
        f"without one ({duration(each)}), at most about {duration(longest * len(names))}"
    )
