# The results of contract tests: per case and evaluation, expected and found; as text, and as
# JUnit XML.

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from servanda.contract.fields import duration_text
from servanda.errors import Where
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.verdict import Verdict
from servanda.report import cell_text, format
from servanda.report.format import count, xml_document, xml_text
from servanda.traces.serialization import to_plain


@dataclass(frozen=True)
class Check:
    """One expected result, and the result found.

    Args:
        what: "verdict", "actions", "can_promote", or the name of a cell.
        cell: the deciding cell, if any.
        where: in the text of the test.
    """

    what: str
    expected: str
    found: str
    cell: CellVerdict | None = None
    where: Where | None = None

    @property
    def passed(self) -> bool:
        return self.expected == self.found


@dataclass(frozen=True)
class Evaluation:
    """One expectation with its verdict.

    Args:
        groups: prompt groups that were judged.
        at: with a clock, the virtual seconds of the evaluation; stands: the promotion's state then.
    """

    groups: int
    checks: tuple[Check, ...]
    verdict: Verdict
    where: Where | None = None
    at: float | None = None
    stands: str = ""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class CaseResult:
    """One case.

    Args:
        expectations: in the order of the text.
        not_given: clauses without data in the case, each with the missing data.
    """

    name: str
    expectations: tuple[Evaluation, ...]
    not_given: tuple[str, ...] = ()
    where: Where | None = None

    @property
    def passed(self) -> bool:
        return all(look.passed for look in self.expectations)


@dataclass(frozen=True)
class SuiteResult:
    """A contract's results for all cases of one test.

    Args:
        test, contract: their names; digest: of the contract.
    """

    test: str
    contract: str
    digest: str
    cases: tuple[CaseResult, ...]

    @property
    def passed(self) -> bool:
        return all(case.passed for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; of each verdict its outcome, and of each check its cell."""
        return to_plain(
            {
                "test": self.test,
                "contract": self.contract,
                "digest": self.digest,
                "passed": self.passed,
                "cases": [_case_data(case) for case in self.cases],
            }
        )


def _case_data(case: CaseResult) -> dict[str, Any]:
    looks = [
        {
            "after": look.groups,
            **({} if look.at is None else {"at": look.at, "stands": look.stands}),
            "passed": look.passed,
            "verdict": look.verdict.outcome,
            "where": str(look.where or ""),
            "checks": [
                {**vars(c), "where": str(c.where or ""), "passed": c.passed} for c in look.checks
            ],
        }
        for look in case.expectations
    ]
    return {
        "name": case.name,
        "passed": case.passed,
        "where": str(case.where or ""),
        "not_given": list(case.not_given),
        "expectations": looks,
    }


_GLYPH = {True: "✓", False: "✗"}


def render(results: Sequence[SuiteResult]) -> str:
    """Every case with expected and found results, the deciding cell, and the place of a failure.

    The last line counts them.
    """
    lines: list[str] = []
    for result in results:
        lines += [f"{format.line(result.test)}: {format.line(result.contract)} {result.digest[:8]}"]
        for case in result.cases:
            lines += [f"{_GLYPH[case.passed]} {format.line(case.name)}", *_case_lines(case)]
        lines.append("")
    cases = [case for result in results for case in result.cases]
    failed = sum(not case.passed for case in cases)
    counted = count(len(cases), "case")
    return "\n".join([*lines, f"{counted}: {_ends(len(cases), failed)}"])


def _ends(cases: int, failed: int) -> str:
    if not failed:
        return "all pass" if cases > 1 else "passes"
    passed = cases - failed
    says = f"{failed} fail{'s' if failed == 1 else ''}"
    return f"{says}, {passed} pass{'es' if passed == 1 else ''}" if passed else says


def _case_lines(case: CaseResult) -> Iterator[str]:
    for look in case.expectations:
        yield f"    {_GLYPH[look.passed]} {_expectation_line(look)}"
        yield from (f"        {line}" for check in look.checks for line in _failed_check(check))
    if not case.passed:
        yield from (f"        not given: {format.line(name)}" for name in case.not_given)


def _expectation_line(look: Evaluation) -> str:
    """The time, the verdict, and the deciding cell."""
    if look.at is not None:
        return f"at {duration_text(look.at)}, {format.line(look.stands)}"
    after = f"after {count(look.groups, 'prompt group')}"
    cell = next((check.cell for check in look.checks if check.cell is not None), None)
    return f"{after}: {look.verdict.outcome}{f', {cell_line(cell)}' if cell else ''}"


def _failed_check(check: Check) -> Iterator[str]:
    if check.passed:
        return
    what = format.line(check.what)
    yield f"{what}: expected {format.line(check.expected)}, found {format.line(check.found)}"
    if check.cell is not None:
        yield f"  {cell_line(check.cell)}"
    if check.where is not None:
        yield f"  {check.where}"


def cell_line(cell: CellVerdict) -> str:
    """A cell with its value, interval, limit and n; or why it has none."""
    text = f"{format.line(cell.clause)} on {format.line(cell.slice)}"
    if cell.value is not None:
        text += f" {cell_text.of_cell(cell, cell.value)}"
    if cell.interval is not None:
        text += f" {cell_text.interval(cell)}"
    if cell.limit is not None:
        text += f", limit {cell_text.signed_limit(cell)}"
    if cell.n:
        text += f", n {cell_text.size(cell.n, cell.units)}"
    if cell.note and (cell.value is None or cell.outcome == "inconclusive"):
        text += f"; {format.line(cell.note)}"
    return text


def junit(results: Sequence[SuiteResult]) -> str:
    """JUnit XML in the form that Jenkins and surefire read: a suite a test, a case a case."""
    cases = [case for result in results for case in result.cases]
    suites = ET.Element("testsuites", {"name": "servanda test", **_counts(cases)})
    for result in results:
        counts = {**_counts(result.cases), "skipped": "0"}
        suite = ET.SubElement(suites, "testsuite", {"name": xml_text(result.test), **counts})
        for case in result.cases:
            names = {"name": xml_text(case.name), "classname": xml_text(result.test)}
            element = ET.SubElement(suite, "testcase", {**names, "time": "0"})
            wrong = [c for look in case.expectations for c in look.checks if not c.passed]
            inside = xml_text("\n".join(_case_lines(case)))
            if wrong:
                message = f"{wrong[0].what}: expected {wrong[0].expected}, found {wrong[0].found}"
                what = {"message": xml_text(message), "type": "expectation"}
                ET.SubElement(element, "failure", what).text = inside
            else:
                ET.SubElement(element, "system-out").text = inside
    return xml_document(suites)


def _counts(cases: Sequence[CaseResult]) -> dict[str, str]:
    failed = sum(not case.passed for case in cases)
    return {"tests": str(len(cases)), "failures": str(failed), "errors": "0", "time": "0"}
