# Limits moved: whether any case of the contract's tests notices.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from servanda.authoring.contract_test.files import PreparedTest
from servanda.authoring.contract_test.model import Case
from servanda.authoring.contract_test.results import CaseResult, SuiteResult
from servanda.authoring.mutation.equivalent import Texts, proof
from servanda.authoring.mutation.mutants import Mutant, mutants
from servanda.authoring.mutation.result import Mark, MutantResult, Nearest
from servanda.contract.model import Contract
from servanda.contract.stages import course_of
from servanda.errors import ContractError
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.plan import draft
from servanda.report.cell_text import of_cell
from servanda.report.format import count


def try_limits(
    contract: Contract,
    tests: Sequence[PreparedTest],
    texts: Texts,
    over: Callable[[int, int], bool],
) -> Iterator[MutantResult]:
    """The results of the mutants of a contract.

    Args:
        tests: that the contract passes.
        texts: that the contract names.
        over: called with the number of finished mutants and of all; returns whether the time is
            over.

    Raises:
        ContractError: the tests do not pass as they are, so nothing can be said of a mutant.
    """
    base = [test.run(contract) for test in tests]
    failing = [f"{r.test}: {case.name}" for r in base for case in r.cases if not case.passed]
    if failing:
        some = f"{count(len(failing), 'case')} fail{'s' * (len(failing) == 1)}"
        raise ContractError(
            f"{some} before anything is moved: {', '.join(failing[:3])}",
            hint="repair the contract or its tests first: servanda contract test",
        )
    known = _refusals(contract, texts)
    every = [*mutants(contract)]
    # every case in a test of its own: one that notices is enough, and cases take their time
    cases = [
        (case, replace(test, test=test.test.model_copy(update={"cases": (case,)})))
        for test in tests
        for case in test.test.cases
    ]
    for done, mutant in enumerate(every):
        if over(done, len(every)):
            yield _result(mutant, "open")
            continue
        new = [p for p in _refusals(mutant.contract, texts) if p not in known]
        if new:
            yield _result(mutant, "refused", why=new[0])
            continue
        by = _failing_case(mutant, cases)
        if by:
            yield _result(mutant, "killed", by=by)
        elif why := proof(mutant, contract, texts):
            yield _result(mutant, "equivalent", why=why)
        else:
            why, near = _missing(mutant, base)
            yield _result(mutant, "survived", why=why, near=near)


def _refusals(contract: Contract, texts: Texts) -> list[str]:
    """What stands against measuring a contract, by itself and on the legs of its promotion."""
    plans = [draft(contract, *texts, leg=leg) for leg in (None, *course_of(contract))]
    return [problem.message for _, problems in plans for problem in problems]


def _result(mutant: Mutant, mark: Mark, **more: object) -> MutantResult:
    return MutantResult(
        mutant.name,
        mutant.kind,
        mutant.sentence,
        mark,
        where=mutant.where,
        **more,  # type: ignore[arg-type]
    )


def _failing_case(mutant: Mutant, cases: Sequence[tuple[Case, PreparedTest]]) -> tuple[str, ...]:
    """The first case that the mutant fails; one that no longer fits it has noticed too."""

    def other(pair: tuple[Case, PreparedTest]) -> bool:
        """Whether a case expects nothing of the clause; those that do are asked first."""
        cells = (name for expectation in pair[0].expect for name in expectation.cells)
        return mutant.clause not in {name.partition(" on ")[0] for name in cells}

    for case, alone in sorted(cases, key=other):
        try:
            result = alone.run(mutant.contract)
        except ContractError as error:
            return (f"{case.name}: {error.problems[0].message}",)
        if not result.passed:
            return (case.name,)
    return ()


def _missing(mutant: Mutant, base: Sequence[SuiteResult]) -> tuple[str, Nearest | None]:
    """What no test asks, and the case that comes nearest to asking it."""
    if mutant.between is None:
        return mutant.unasked, None
    low, high = mutant.between
    values = [
        (_part(value, min(max(value, low), high)), value, cell, case)
        for rehearsal in base
        for case in rehearsal.cases
        for cell, value in _values(case, mutant.clause)
    ]
    if not values:
        return mutant.unasked, None
    part, value, cell, case = max(values, key=lambda f: f[0])
    near = Nearest(
        f"{cell.clause} on {cell.slice}", part, f"{of_cell(cell, value)} in {case.name!r}"
    )
    if part == 1:
        return (
            f"a case lies between {low:g} and {high:g}, and is answered alike: too few prompt "
            "groups, or nothing is expected of it",
            near,
        )
    return mutant.unasked, near


def _part(value: float, end: float) -> float:
    """How near a value is to an end of the interval that it is outside of; 1 inside."""
    if value == end:
        return 1.0
    near = 1 - abs(value - end) / max(abs(value), abs(end))
    return min(near, 1 - 1e-12)


def _values(case: CaseResult, clause: str) -> Iterator[tuple[CellVerdict, float]]:
    for look in case.expectations:
        for cell in look.verdict.cells:
            if cell.clause == clause and cell.value is not None:
                yield cell, cell.value
