# Calibrating: from a run of a pair that is accepted to the limits that such a pair keeps.

from servanda.authoring.calibrate.base import Calibration, Left, Row
from servanda.authoring.calibrate.default_clauses import standard
from servanda.authoring.calibrate.eligibility import accept
from servanda.authoring.calibrate.limits import FEWEST, calibrate
from servanda.authoring.calibrate.recorder import Seen, seen
from servanda.authoring.calibrate.rewrite import rewritten

__all__ = [
    "FEWEST",
    "Calibration",
    "Left",
    "Row",
    "Seen",
    "accept",
    "calibrate",
    "rewritten",
    "seen",
    "standard",
]
