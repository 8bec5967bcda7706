# The ledger: what was decided, when, by whom and on which evidence; append-only and chained.

from servanda.promotion.ledger.entry import Damaged, Entry, Ledger, LedgerError, Outrun, Record
from servanda.promotion.ledger.export import export
from servanda.promotion.ledger.ledger import ChainedLedger
from servanda.promotion.ledger.open import open_exported, open_ledger, verify_at
from servanda.promotion.ledger.verify import Problem, Verified, verify

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
