# Sequential statistics that stay valid while someone watches.

from servanda.stats.expected import units_expected
from servanda.stats.fidelity import Fidelity
from servanda.stats.groups import GroupRatio
from servanda.stats.interval import interval, units_at_best, units_to_decide
from servanda.stats.log_moment import LogMoment
from servanda.stats.reach import Reach, reach

__all__ = [
    "Fidelity",
    "GroupRatio",
    "LogMoment",
    "Reach",
    "interval",
    "reach",
    "units_at_best",
    "units_expected",
    "units_to_decide",
]
