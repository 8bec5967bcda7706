# The bound chain of a contract: what each of its numbers implies, one theorem at a time.

from servanda.judgement.bound_chain.assumptions import Rest
from servanda.judgement.bound_chain.chain import chain
from servanda.judgement.bound_chain.steps import Chain, Step

__all__ = ["Chain", "Rest", "Step", "chain"]
