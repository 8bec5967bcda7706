# Sequential statistics that stay valid while someone watches.

from servanda.theory.stats.change_point import ShiryaevRoberts
from servanda.theory.stats.coherence import Coherence
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.interval import interval, units_at_best, units_to_decide
from servanda.theory.stats.inverse_probability import ByChance, Unequal
from servanda.theory.stats.likelihood_ratio import LikelihoodRatio, RequestDraws
from servanda.theory.stats.log_moment import LogMoment
from servanda.theory.stats.multiplicity import attempt_alpha, e_bh, slice_alpha, step_alpha
from servanda.theory.stats.pit import Fidelity
from servanda.theory.stats.reachable import Reach, reach
from servanda.theory.stats.refutation import Refutation
from servanda.theory.stats.sample_size import units_expected
from servanda.theory.stats.served_tokens import Served

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
