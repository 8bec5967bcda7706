# Rehearsal: contracts that are tested themselves, on series, recorded runs and a virtual clock.

from servanda.authoring.contract_test.evidence import Recording
from servanda.authoring.contract_test.model import Case, ContractTest, Expectation
from servanda.authoring.contract_test.parser import read_tests
from servanda.authoring.contract_test.results import CaseResult, Check, Looked, Rehearsal
from servanda.authoring.contract_test.run import rehearse
from servanda.authoring.contract_test.series import Series

__all__ = [
    "Case",
    "CaseResult",
    "Check",
    "ContractTest",
    "Expectation",
    "Looked",
    "Recording",
    "Rehearsal",
    "Series",
    "read_tests",
    "rehearse",
]
