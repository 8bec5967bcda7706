# What one version of a contract promises more or less than another.
#
# values: one change.  directions: what a move of one value means.  rules: which direction each
# field of the language has.  compare: two contracts, field by field.
