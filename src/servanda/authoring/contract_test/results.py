# The results of contract tests: per case and evaluation, expected and found.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from servanda.errors import Where
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.verdict import Verdict
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
