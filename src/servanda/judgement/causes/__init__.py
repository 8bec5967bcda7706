# Causes: which slices explain a gap although they are not named, what its numbers look like, and what
# that suggests.
