# The runner: two engines on the same tokens, measured until the contract is decided.
