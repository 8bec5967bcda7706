# Falsification: what tries to break the theorems and the procedures that Servanda rests on.

from servanda.falsification import exceedance as _exceedance  # noqa: F401 - registers challenges
from servanda.falsification import gaps as _gaps  # noqa: F401 - registers challenges
from servanda.falsification import gradient as _gradient  # noqa: F401 - registers challenges
from servanda.falsification import weighting as _weighting  # noqa: F401 - registers challenges
from servanda.falsification.base import CHALLENGES, Tightness, Trial, challenge, falsify

__all__ = ["CHALLENGES", "Tightness", "Trial", "challenge", "falsify"]
