# Slices: the tokens of a clause.
