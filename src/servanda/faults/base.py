# What a fault is: a class of engine, and the same class with something broken in it.
#
# Faults are injected on purpose, by a contract's `fault:`, in demos, tests and drills.  They
# do not change what the engine says of itself, for a real fault would not either.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from servanda.registry import Registry

Fault = Callable[[Any, Any], Any]  # (class of engine, the fault's value) -> class of engine

FAULTS: Registry[Fault] = Registry("fault")
fault = FAULTS.register
