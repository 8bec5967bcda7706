# The ledger: what was decided, when, by whom and on which evidence; append-only and chained.

from servanda.ledger.values import Damaged, Entry, Ledger, LedgerError, Outrun, Record

__all__ = ["Damaged", "Entry", "Ledger", "LedgerError", "Outrun", "Record"]
