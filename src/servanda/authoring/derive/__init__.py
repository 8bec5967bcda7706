# Derive: from a budget of reward, gradient or clip range to the contract that keeps it.

from servanda.authoring.derive.budget import Asked
from servanda.authoring.derive.derivation import Derived, derive
from servanda.authoring.derive.sizes import MOST

__all__ = ["MOST", "Asked", "Derived", "derive"]
