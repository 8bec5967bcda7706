# Differences between the promises of two versions of a contract.
#
# values: one change.  directions: the meaning of a change of one value.  compare: the direction of
# each field of the language, and two contracts, field by field.
