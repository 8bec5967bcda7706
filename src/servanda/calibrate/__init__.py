# Calibrating: from a run of a pair that is accepted to the limits that such a pair keeps.

from servanda.calibrate.accept import accept
from servanda.calibrate.base import Calibration, Left, Row
from servanda.calibrate.limits import FEWEST, calibrate
from servanda.calibrate.rewrite import rewritten
from servanda.calibrate.seen import Seen, seen
from servanda.calibrate.standard import standard

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
