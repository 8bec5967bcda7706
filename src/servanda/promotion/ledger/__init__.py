# The ledger: what was decided, when, by whom and on which evidence; append-only and chained.
