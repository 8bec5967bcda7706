# Derivation: from a budget of reward, gradient or clip range to the contract that keeps it.
