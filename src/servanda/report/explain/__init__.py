# Explain: a contract, its chain, a metric, a guard or a slice field in plain English.

from servanda.report.chain_text import chain_text
from servanda.report.explain.contract import explain_contract
from servanda.report.explain.glossary import explain_name, names

__all__ = ["chain_text", "explain_contract", "explain_name", "names"]
