# Falsification: what tries to break the theorems and the procedures that Servanda rests on.

from benchmarks.theory import drift as _drift  # noqa: F401 - registers challenges
from benchmarks.theory import epochs as _epochs  # noqa: F401
from benchmarks.theory import exceedance as _exceedance  # noqa: F401 - registers challenges
from benchmarks.theory import gradient as _gradient  # noqa: F401
from benchmarks.theory import importance_weights as _weighting  # noqa: F401
from benchmarks.theory import logits as _logits  # noqa: F401
from benchmarks.theory import partial_observation as _partial  # noqa: F401
from benchmarks.theory import sequence as _sequence  # noqa: F401
from benchmarks.theory import third_kernel as _third  # noqa: F401
from benchmarks.theory import trajectory as _trajectory  # noqa: F401
from benchmarks.theory import truncation as _truncation  # noqa: F401
from benchmarks.theory import weighting_gap as _gaps  # noqa: F401
from benchmarks.theory.base import CHALLENGES, Tightness, Trial, challenge, falsify
from benchmarks.theory.procedures import Row, simulate
from benchmarks.theory.report import Findings, find
from benchmarks.theory.scenarios import SCENARIOS, Scenario

__all__ = [
    "CHALLENGES",
    "SCENARIOS",
    "Findings",
    "Row",
    "Scenario",
    "Tightness",
    "Trial",
    "challenge",
    "falsify",
    "find",
    "simulate",
]
