# Promotion: offline -> shadow -> canary -> full, on evidence alone; pure.

from servanda.promotion.advance import ERRORS, Moved, advance, begin, judged
from servanda.promotion.api import beginning_of, run_name
from servanda.promotion.effects import route_of
from servanda.promotion.finding import found
from servanda.promotion.operator import approve, override, roll_back
from servanda.promotion.state import (
    ENDED,
    STATUSES,
    Asked,
    Effect,
    Finding,
    Found,
    Override,
    State,
    Status,
    leg_of,
)

__all__ = [
    "ENDED",
    "ERRORS",
    "STATUSES",
    "Asked",
    "Effect",
    "Finding",
    "Found",
    "Moved",
    "Override",
    "State",
    "Status",
    "advance",
    "approve",
    "begin",
    "beginning_of",
    "found",
    "judged",
    "leg_of",
    "override",
    "roll_back",
    "route_of",
    "run_name",
]
