# The catalogue of faults: one function a fault, shared by demo, tests and drills.

from servanda.faults import delivery, identity, positions, sampler
from servanda.faults.base import FAULTS

__all__ = ["FAULTS", "delivery", "identity", "positions", "sampler"]
