# Causes: the slices that explain a gap although they are not named, what its numbers look like, and
# the cause that they suggest.
