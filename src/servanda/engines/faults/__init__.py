# The catalogue of faults: one function a fault, shared by demo, tests and drills.

from servanda.engines.faults import (
    attention,
    batching,
    delivery,
    identity,
    numerics,
    positions,
    record,
    sampler,
    training,
)
from servanda.engines.faults.base import FAULTS, Fault, injected

__all__ = [
    "FAULTS",
    "Fault",
    "attention",
    "batching",
    "delivery",
    "identity",
    "injected",
    "numerics",
    "positions",
    "record",
    "sampler",
    "training",
]
