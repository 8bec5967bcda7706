# Drafts of speculative decoding in a trace.
#
# An engine that verifies drafts itself records, at the first token that a draft was made for, how
# many tokens were drafted and how many of them accepted; elsewhere both are 0.  A server that
# counts them by itself gives one number for all sequences of a batch, in `Trace.about`.

DRAFTED, ACCEPTED = "drafted", "accepted"
COUNTED = "drafts"  # in about: {"drafts", "proposed", "accepted", "by_depth", "longest"} as JSON
