# The ledger: what was decided, when, by whom and on which evidence; append-only and chained.

from servanda.ledger.chained import ChainedLedger
from servanda.ledger.exported import export
from servanda.ledger.opening import open_exported, open_ledger, verify_at
from servanda.ledger.values import Damaged, Entry, Ledger, LedgerError, Outrun, Record
from servanda.ledger.verifying import Problem, Verified, verify

__all__ = [
    "ChainedLedger",
    "Damaged",
    "Entry",
    "Ledger",
    "LedgerError",
    "Outrun",
    "Problem",
    "Record",
    "Verified",
    "export",
    "open_exported",
    "open_ledger",
    "verify",
    "verify_at",
]
