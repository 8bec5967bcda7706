# Differences between the promises of two versions of a contract.
#
# values: one change.  directions: the meaning of a change of one value.  rules: the direction of
# each field of the language.  compare: two contracts, field by field.
