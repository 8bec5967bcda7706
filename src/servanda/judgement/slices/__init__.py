# Slices: which tokens a clause speaks of.
