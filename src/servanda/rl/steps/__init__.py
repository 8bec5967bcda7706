"""The steps of a training run: one contract and one judge for dumps, watches and monitors."""
