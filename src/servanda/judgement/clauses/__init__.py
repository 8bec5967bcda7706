# Clauses: how each kind is weighed and judged, one file a kind.

from servanda.contract.model import Clause, Relative
from servanda.judgement.clauses.base import (
    GUARDS,
    Cell,
    CellVerdict,
    Kind,
    Look,
    Outcome,
    Sampled,
    View,
    worst,
)
from servanda.judgement.clauses.batch_invariance import BatchInvariance
from servanda.judgement.clauses.calibration import CALIBRATION, Calibration
from servanda.judgement.clauses.chain_metrics import (
    CHAIN,
    ChainCertificate,
    ChainMetric,
    chain_metric,
)
from servanda.judgement.clauses.clip_ratio import RatioBudget
from servanda.judgement.clauses.coverage import Coverage, RescoredRatio
from servanda.judgement.clauses.envelope import CornerFact, corners_of
from servanda.judgement.clauses.fidelity import SamplerFidelity
from servanda.judgement.clauses.gradient import PolicyGradientBias, WeightGap
from servanda.judgement.clauses.guards import Coherent, UsableRatio
from servanda.judgement.clauses.mass_gap import MassGap
from servanda.judgement.clauses.not_applicable import Later, NotHere
from servanda.judgement.clauses.numerical import Fact
from servanda.judgement.clauses.numerical_interval import BoundedFact
from servanda.judgement.clauses.relative import (
    RelativeCertificate,
    RelativeToNoise,
    RelativeToStable,
)
from servanda.judgement.clauses.reward_gap import DRAWS, REWARD, RewardGap
from servanda.judgement.clauses.scaling import Feed, feed_of
from servanda.judgement.clauses.self_noise import SELVES, SelfNoise
from servanda.judgement.clauses.sequences import BySequence, RewardDrift
from servanda.judgement.clauses.service_level import TIMINGS, LoadOf, ServiceLevel, service_level
from servanda.judgement.clauses.statistical import Certificate
from servanda.judgement.clauses.support import SupportMass

__all__ = [
    "CALIBRATION",
    "CHAIN",
    "DRAWS",
    "GUARDS",
    "REWARD",
    "SELVES",
    "TIMINGS",
    "BatchInvariance",
    "BoundedFact",
    "BySequence",
    "Calibration",
    "Cell",
    "CellVerdict",
    "Certificate",
    "ChainCertificate",
    "ChainMetric",
    "Coherent",
    "CornerFact",
    "Coverage",
    "Fact",
    "Feed",
    "Kind",
    "Later",
    "LoadOf",
    "Look",
    "MassGap",
    "NotHere",
    "Outcome",
    "PolicyGradientBias",
    "RatioBudget",
    "RelativeCertificate",
    "RelativeToNoise",
    "RelativeToStable",
    "RescoredRatio",
    "RewardDrift",
    "RewardGap",
    "Sampled",
    "SamplerFidelity",
    "SelfNoise",
    "ServiceLevel",
    "SupportMass",
    "UsableRatio",
    "View",
    "WeightGap",
    "certificate_of",
    "chain_metric",
    "corners_of",
    "feed_of",
    "service_level",
    "worst",
]


def certificate_of(clause: Clause) -> Certificate | MassGap | None:
    """How a statistical clause is certified; None where it cannot be."""
    if clause.metric == "mass_gap":
        return MassGap(clause.at_most) if isinstance(clause.at_most, float) else None
    feed = feed_of(clause)
    if feed is None:
        return None
    if isinstance(clause.at_most, Relative):
        relative = {"self_noise": RelativeToNoise, "stable": RelativeToStable}[clause.at_most.of]
        return relative(feed, times=clause.at_most.times)
    return Certificate(feed)
