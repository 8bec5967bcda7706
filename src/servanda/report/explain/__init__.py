# Explanations of a contract, its chain, a metric, a guard or a slice field in plain English.
