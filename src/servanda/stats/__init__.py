# Sequential statistics that stay valid while someone watches.

from servanda.stats.alarm import ShiryaevRoberts
from servanda.stats.coherence import Coherence
from servanda.stats.expected import units_expected
from servanda.stats.fidelity import Fidelity
from servanda.stats.groups import GroupRatio
from servanda.stats.interval import interval, units_at_best, units_to_decide
from servanda.stats.likelihood_ratio import LikelihoodRatio, RequestDraws
from servanda.stats.log_moment import LogMoment
from servanda.stats.multiplicity import attempt_alpha, e_bh, slice_alpha, step_alpha
from servanda.stats.reach import Reach, reach
from servanda.stats.refutation import Refutation
from servanda.stats.served import Served
from servanda.stats.unequal import ByChance, Unequal

__all__ = [
    "ByChance",
    "Coherence",
    "Fidelity",
    "GroupRatio",
    "LikelihoodRatio",
    "LogMoment",
    "Reach",
    "Refutation",
    "RequestDraws",
    "Served",
    "ShiryaevRoberts",
    "Unequal",
    "attempt_alpha",
    "e_bh",
    "interval",
    "reach",
    "slice_alpha",
    "step_alpha",
    "units_at_best",
    "units_expected",
    "units_to_decide",
]
