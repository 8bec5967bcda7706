# Causes: which slices explain a gap that nobody named, what its numbers look like, and what that
# suggests.
