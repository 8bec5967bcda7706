# Explain: a contract, its chain, a metric, a guard or a slice field in plain English.

from servanda.explain.chain import chain_text
from servanda.explain.contract import explain_contract
from servanda.explain.words import explain_name, names

__all__ = ["chain_text", "explain_contract", "explain_name", "names"]
