# Rehearsal: contracts that are tested themselves, on series, recorded runs and a virtual clock.

from servanda.rehearsal.data import Recording
from servanda.rehearsal.reading import read_tests
from servanda.rehearsal.rehearse import rehearse
from servanda.rehearsal.results import CaseResult, Check, Looked, Rehearsal
from servanda.rehearsal.series import Series
from servanda.rehearsal.values import Case, ContractTest, Expectation

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
