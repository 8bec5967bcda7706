# Derive: from a budget of reward, gradient or clip range to the contract that keeps it.

from servanda.derive.asked import Asked
from servanda.derive.derivation import Derived, derive
from servanda.derive.sizes import MOST

__all__ = ["MOST", "Asked", "Derived", "derive"]
