# The catalogue of faults: one function a fault, shared by demo, tests and drills.

from servanda.engines.faults.base import FAULTS, Fault, injected
from servanda.engines.faults.catalogue import REQUEST_FAULTS

__all__ = ["FAULTS", "REQUEST_FAULTS", "Fault", "injected"]
