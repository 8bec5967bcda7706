# Falsification: what tries to break the theorems and the procedures that Servanda rests on.

from servanda.theory.falsification import drift as _drift  # noqa: F401 - registers challenges
from servanda.theory.falsification import exceedance as _exceedance  # noqa: F401 - registers challenges
from servanda.theory.falsification import gradient as _gradient  # noqa: F401
from servanda.theory.falsification import importance_weights as _weighting  # noqa: F401
from servanda.theory.falsification import logits as _logits  # noqa: F401
from servanda.theory.falsification import partial_observation as _partial  # noqa: F401
from servanda.theory.falsification import sequence as _sequence  # noqa: F401
from servanda.theory.falsification import trajectory as _trajectory  # noqa: F401
from servanda.theory.falsification import truncation as _truncation  # noqa: F401
from servanda.theory.falsification import weighting_gap as _gaps  # noqa: F401
from servanda.theory.falsification.base import CHALLENGES, Tightness, Trial, challenge, falsify
from servanda.theory.falsification.procedures import Row, simulate
from servanda.theory.falsification.report import Findings, find
from servanda.theory.falsification.scenarios import SCENARIOS, Scenario

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
