# Clauses: how each kind is weighed and judged, one file a kind.

from servanda.clauses.base import (
    GUARDS,
    Cell,
    CellVerdict,
    Kind,
    Look,
    Outcome,
    View,
    worst,
)
from servanda.clauses.calibration import CALIBRATION, Calibration
from servanda.clauses.certificate import Certificate, feed_of
from servanda.clauses.fact import Fact
from servanda.clauses.guards import SamplerFidelity, UsableRatio
from servanda.clauses.later import Later, NotHere

__all__ = [
    "CALIBRATION",
    "GUARDS",
    "Calibration",
    "Cell",
    "CellVerdict",
    "Certificate",
    "Fact",
    "Kind",
    "Later",
    "Look",
    "NotHere",
    "Outcome",
    "SamplerFidelity",
    "UsableRatio",
    "View",
    "feed_of",
    "worst",
]
