# Falsification: what tries to break the theorems and the procedures that Servanda rests on.

from servanda.falsification import weighting as _weighting  # noqa: F401 - registers challenges
from servanda.falsification.base import CHALLENGES, Tightness, Trial, challenge, falsify
from servanda.falsification.findings import Findings, find
from servanda.falsification.procedures import Row, simulate
from servanda.falsification.scenarios import SCENARIOS, Scenario

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
