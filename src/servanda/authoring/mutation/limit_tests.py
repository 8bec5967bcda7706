# Limits moved: whether any case of the contract's tests notices.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from servanda.authoring.contract_test.files import Prepared
from servanda.authoring.contract_test.model import Case
from servanda.authoring.contract_test.results import CaseResult, Rehearsal
from servanda.authoring.mutation.equivalent import proof
from servanda.authoring.mutation.mutants import Mutant, mutants
from servanda.authoring.mutation.result import Mark, Near, Tried
from servanda.contract.model import Contract
from servanda.contract.stages import course_of
from servanda.errors import ContractError
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.plan import draft
from servanda.report.cell_text import of_cell
from servanda.traces.corpus import Corpus


def try_limits(
    contract: Contract,
    tests: Sequence[Prepared],
    corpora: Mapping[str, Corpus],
    golden: Corpus | None,
    over: Callable[[int, int], bool],
) -> Iterator[Tried]:
    """What becomes of each mutant of a contract.

    Args:
        tests: that the contract passes.
        corpora, golden: the texts that the contract names.
        over: is told how many mutants of how many are done, and says whether the time is over.

    Raises:
        ContractError: the tests do not pass as they are, so nothing can be said of a mutant.
    """
    base = [test.rehearse(contract) for test in tests]
    failing = [f"{r.test}: {case.name}" for r in base for case in r.cases if not case.passed]
    if failing:
        some = f"{len(failing)} cases fail" if len(failing) > 1 else "1 case fails"
        raise ContractError(
            f"{some} before anything is moved: {', '.join(failing[:3])}",
            hint="mend the contract or its tests first: servanda contract test",
        )
    known = _refusals(contract, corpora, golden)
    every = [*mutants(contract)]
    cases = [*_single(tests)]
    for done, mutant in enumerate(every):
        if over(done, len(every)):
            yield _tried(mutant, "open")
            continue
        new = [p for p in _refusals(mutant.contract, corpora, golden) if p not in known]
        if new:
            yield _tried(mutant, "refused", why=new[0])
            continue
        by = _killer(mutant, cases)
        if by:
            yield _tried(mutant, "killed", by=by)
        elif why := proof(mutant, contract, corpora, golden):
            yield _tried(mutant, "equivalent", why=why)
        else:
            why, near = _missing(mutant, base)
            yield _tried(mutant, "survived", why=why, near=near)


def _refusals(
    contract: Contract, corpora: Mapping[str, Corpus], golden: Corpus | None
) -> list[str]:
    """What stands against measuring a contract, by itself and on the legs of its promotion."""
    plans = [draft(contract, corpora, golden)]
    plans += [draft(contract, corpora, golden, leg=leg) for leg in course_of(contract)]
    return [problem.message for _, problems in plans for problem in problems]


def _tried(mutant: Mutant, mark: Mark, **more: object) -> Tried:
    return Tried(
        mutant.name,
        mutant.kind,
        mutant.sentence,
        mark,
        where=mutant.where,
        **more,  # type: ignore[arg-type]
    )


def _single(tests: Sequence[Prepared]) -> Iterator[tuple[Case, Prepared]]:
    """Every case, in a test of its own: one that notices is enough, and cases take their time."""
    for prepared in tests:
        for case in prepared.test.cases:
            alone = prepared.test.model_copy(update={"cases": (case,)})
            yield case, replace(prepared, test=alone)


def _killer(mutant: Mutant, cases: Sequence[tuple[Case, Prepared]]) -> tuple[str, ...]:
    """The first case that the mutant fails; one that no longer fits it has noticed too."""
    for case, alone in sorted(cases, key=lambda pair: not _names(pair[0], mutant.clause)):
        try:
            found = alone.rehearse(mutant.contract)
        except ContractError as error:
            return (f"{case.name}: {error.problems[0].message}",)
        if not found.passed:
            return (case.name,)
    return ()


def _names(case: Case, clause: str) -> bool:
    """Whether a case expects something of a clause; such a case is asked first."""
    named = {name.partition(" on ")[0] for look in case.expect for name in look.cells}
    return clause in named


def _missing(mutant: Mutant, base: Sequence[Rehearsal]) -> tuple[str, Near | None]:
    """What no test asks, and the case that comes nearest to asking it."""
    if mutant.between is None:
        return mutant.unasked, None
    low, high = mutant.between
    found = [
        (_part(value, min(max(value, low), high)), value, cell, case)
        for rehearsal in base
        for case in rehearsal.cases
        for cell, value in _values(case, mutant.clause)
    ]
    if not found:
        return mutant.unasked, None
    part, value, cell, case = max(found, key=lambda f: f[0])
    near = Near(f"{cell.clause} on {cell.slice}", part, f"{of_cell(cell, value)} in {case.name!r}")
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
