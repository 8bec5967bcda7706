# The catalogue of faults: one function a fault, shared by demo, tests and drills.

from servanda.engines.faults import (  # noqa: F401 - they register faults
    attention,
    delivery,
    identity,
    numerics,
    positions,
    sampler,
    training,
)
from servanda.engines.faults.base import FAULTS, Fault, injected
from servanda.engines.faults.requests import REQUEST_FAULTS

__all__ = ["FAULTS", "REQUEST_FAULTS", "Fault", "injected"]
