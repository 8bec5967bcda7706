# SQL that the ledger and the state of a gateway controller share: opened, written, refused.
