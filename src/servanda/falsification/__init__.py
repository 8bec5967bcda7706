# Falsification: what tries to break the theorems and the procedures that Servanda rests on.

from servanda.falsification import drift as _drift  # noqa: F401 - registers challenges
from servanda.falsification import exceedance as _exceedance  # noqa: F401 - registers challenges
from servanda.falsification import gaps as _gaps  # noqa: F401
from servanda.falsification import gradient as _gradient  # noqa: F401
from servanda.falsification import logits as _logits  # noqa: F401
from servanda.falsification import partial as _partial  # noqa: F401
from servanda.falsification import sequence as _sequence  # noqa: F401
from servanda.falsification import trajectory as _trajectory  # noqa: F401
from servanda.falsification import truncation as _truncation  # noqa: F401
from servanda.falsification import weighting as _weighting  # noqa: F401
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
