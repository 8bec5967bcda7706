# Explain: a contract, a metric, a guard or a slice field in plain English; text from values.

from servanda.explain.contract import explain_contract
from servanda.explain.words import explain_name, names

__all__ = ["explain_contract", "explain_name", "names"]
