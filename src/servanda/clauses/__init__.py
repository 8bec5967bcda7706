# Clauses: how each kind is weighed and judged, one file a kind.

from servanda.clauses.base import (
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
from servanda.clauses.batches import BatchInvariance
from servanda.clauses.bound import BoundedFact
from servanda.clauses.budget import RatioBudget
from servanda.clauses.calibration import CALIBRATION, Calibration
from servanda.clauses.certificate import Certificate
from servanda.clauses.chain import CHAIN, ChainCertificate, ChainMetric, chain_metric
from servanda.clauses.corner import CornerFact, corners_of
from servanda.clauses.coverage import Coverage, RescoredRatio
from servanda.clauses.fact import Fact
from servanda.clauses.feed import Feed, feed_of
from servanda.clauses.fidelity import SamplerFidelity
from servanda.clauses.gradient import PolicyGradientBias, WeightGap
from servanda.clauses.guards import Coherent, UsableRatio
from servanda.clauses.later import Later, NotHere
from servanda.clauses.mass_gap import MassGap
from servanda.clauses.relative import RelativeCertificate, RelativeToNoise, RelativeToStable
from servanda.clauses.reward_gap import DRAWS, REWARD, RewardGap
from servanda.clauses.sequences import BySequence, RewardDrift
from servanda.clauses.steadiness import SELVES, SelfNoise
from servanda.clauses.support import SupportMass
from servanda.clauses.timing import TIMINGS, LoadOf, ServiceLevel, service_level
from servanda.contract import Clause, Relative

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
