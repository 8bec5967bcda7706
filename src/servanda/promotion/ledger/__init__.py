# The ledger: each decision with its time, actor and evidence; append-only and hash-chained.
