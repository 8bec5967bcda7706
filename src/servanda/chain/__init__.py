# The bound chain of a contract: what each of its numbers implies, one theorem at a time.

from servanda.chain.paths import chain
from servanda.chain.rests import Rest
from servanda.chain.steps import Chain, Step

__all__ = ["Chain", "Rest", "Step", "chain"]
